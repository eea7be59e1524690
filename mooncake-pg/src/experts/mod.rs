//! Routes and layouts of expert parallelism, in host memory.
//!
//! Expert `e` is on rank `e / local`, with `local` experts per rank. A *pair* is a token and one of
//! its experts. Pairs are in the order of their experts, and those of one expert in the order of
//! their tokens.
//!
//! A message of tokens from one rank to another is made of rows of equal length. Its first rows,
//! the *front*, have the sizes, the number of pairs of each local expert, and for each pair the row
//! of its token and the token's index at the sender. Each token follows once, as one row. A rank
//! sends no message to itself: its own rows stay where they are.

mod layout;
mod quantize;
mod routes;
mod rows;
mod sum;

use mooncake_core::{Error, Result};

pub use layout::{Layout, Part};
pub use quantize::quantize;
pub use routes::{Routes, Run};
pub use rows::Rows;
pub use sum::add_up;

use crate::view::MAX_RANKS;

/// Elements of a token that share a scale.
const BLOCK: usize = 128;
/// Bytes of an integer in the front.
const WORD: usize = size_of::<i32>();
/// Integers at the start of a front: the mark, the sizes, whether the receiver is active, and the
/// numbers of pairs and tokens.
const HEADER: usize = 8;
/// First integer of a front.
const MARK: i32 = 0x3150_454d;
/// Names of the sizes in a front, in their order.
const NAMES: [&str; 4] = ["num_max_dispatch_tokens_per_rank", "hidden", "num_experts", "use_fp8"];

/// Sizes on which all ranks agree.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sizes {
    ranks: usize,
    experts: usize,
    tokens: usize,
    hidden: usize,
    is_fp8: bool,
}

impl Sizes {
    /// Describes a dispatch over `ranks`, with at most `tokens` tokens of each rank.
    ///
    /// # Errors
    /// `INVALID_PARAMS` if the ranks cannot share the experts evenly, if `hidden` is not a multiple
    /// of 128, or if a number is too large.
    pub fn new(ranks: usize, experts: usize, tokens: usize, hidden: usize, is_fp8: bool) -> Result<Self> {
        let sizes = Self { ranks, experts, tokens, hidden, is_fp8 };
        let shares = (1..=MAX_RANKS).contains(&ranks) && experts > 0 && experts.is_multiple_of(ranks);
        let fits = [experts, tokens, hidden].iter().all(|size| i32::try_from(*size).is_ok());
        if shares && fits && hidden > 0 && hidden.is_multiple_of(BLOCK) {
            return Ok(sizes);
        }
        Err(Error::invalid(format!(
            "cannot dispatch: sizes do not fit. ranks={ranks} num_experts={experts} tokens={tokens} hidden={hidden}"
        )))
    }

    /// Returns the number of experts of a rank.
    pub fn local(&self) -> usize {
        self.experts / self.ranks
    }

    /// Returns the number of rows for each local expert.
    pub fn slots(&self) -> usize {
        self.ranks * self.tokens
    }

    /// Returns the bytes of the elements of a token.
    pub fn elements(&self) -> usize {
        if self.is_fp8 { self.hidden } else { 2 * self.hidden }
    }

    /// Returns the bytes of the scales of a token.
    pub fn scales(&self) -> usize {
        if self.is_fp8 { self.hidden / BLOCK * size_of::<f32>() } else { 0 }
    }

    /// Returns the bytes of a row: elements, then scales.
    pub fn width(&self) -> usize {
        self.elements() + self.scales()
    }

    /// Returns the number of rows of a front with that many pairs.
    fn front(&self, pairs: usize) -> usize {
        ((HEADER + self.local() + 2 * pairs) * WORD).div_ceil(self.width())
    }

    /// Returns the largest number of rows of a message whose tokens have `choices` experts each.
    pub fn space(&self, choices: usize) -> usize {
        self.front(self.tokens * choices.min(self.local())) + self.tokens
    }

    fn agreed(&self) -> [i32; NAMES.len()] {
        // Every size fits, as `new` has checked.
        [self.tokens as i32, self.hidden as i32, self.experts as i32, i32::from(self.is_fp8)]
    }
}

#[cfg(test)]
mod tests;
