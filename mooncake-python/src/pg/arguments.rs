//! Memory and operators as Python names them.

use mooncake_core::{Error, Result};
use mooncake_pg::call::{Buffer, Buffers};
use mooncake_pg::dtype::DType;
use mooncake_pg::reduce::{ReduceOp, Reduction};
use mooncake_pg::view::{MAX_RANKS, Slot};
use pyo3::prelude::*;

use crate::args::Uint;

/// Address and length in bytes.
#[derive(Clone, Copy, FromPyObject)]
pub(super) struct Span(Uint, Uint);

impl Span {
    pub(super) fn buffer(self) -> Buffer {
        Buffer { address: self.0.len(), len: self.1.len() }
    }
}

/// Memory for each slot.
#[derive(FromPyObject)]
pub(super) enum Spans {
    /// Address, length, and length of each piece.
    Flat((Uint, Uint, Uint)),
    /// Span of each slot.
    List(Vec<Span>),
}

impl Spans {
    pub(super) fn buffers(self) -> Buffers {
        match self {
            Spans::Flat((address, len, piece)) => {
                Buffers::Flat { whole: Span(address, len).buffer(), piece: piece.len() }
            }
            Spans::List(list) => Buffers::List(list.into_iter().map(Span::buffer).collect()),
        }
    }
}

/// Element type and operator, by their numbers.
#[derive(Clone, Copy, FromPyObject)]
pub(super) struct Reducing(u8, u8);

impl Reducing {
    pub(super) fn reduction(self) -> Result<Reduction> {
        Reduction::new(DType::from_code(self.0)?, ReduceOp::from_code(self.1)?)
    }
}

/// Returns the slot of a rank in its group.
///
/// # Errors
/// `INVALID_PARAMS` for a number that no group has.
pub(super) fn slot_of(rank: i64) -> Result<Slot> {
    let found = u8::try_from(rank).ok().filter(|slot| usize::from(*slot) < MAX_RANKS);
    found.map(Slot).ok_or_else(|| {
        Error::invalid(format!("cannot use rank: it is out of range. rank={rank} ranks={MAX_RANKS}"))
    })
}
