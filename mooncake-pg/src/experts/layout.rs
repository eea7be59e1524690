//! Layout of the tokens that this rank has got.

use std::num::NonZero;
use std::thread;

use mooncake_core::{Error, Result};

use super::{HEADER, MARK, NAMES, Routes, Rows, Sizes, WORD};

/// Part of a memory that has the messages of all ranks: first row, and length in bytes. A longer
/// message than its part is there only in part.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Part {
    /// First row of the message.
    pub first: usize,
    /// Length of the message in bytes.
    pub len: u64,
}

/// Tokens that this rank has got, in the order of local experts, then source ranks, then tokens
/// there.
#[derive(Debug)]
pub struct Layout {
    sizes: Sizes,
    /// Number of tokens of each local expert from each rank, by expert.
    counts: Vec<usize>,
    /// Row of each token, and its index at its source.
    tokens: Vec<(usize, i32)>,
    missing: Vec<usize>,
}

/// Pairs of one source.
struct Pairs {
    counts: Vec<usize>,
    /// Row of each token, and its index.
    tokens: Vec<(usize, i32)>,
}

fn number(word: [u8; WORD]) -> usize {
    // A negative number becomes too large for every check.
    i32::from_ne_bytes(word) as u32 as usize
}

fn malformed(rank: usize) -> Error {
    Error::invalid(format!("cannot dispatch: a message is malformed. rank={rank}"))
}

impl Layout {
    /// Reads the messages of the other ranks in `rows`, and takes the own tokens by `routes`. An
    /// own row has the index of its token. `space` has the largest number of rows of each message,
    /// or `None` for a rank from which no tokens are wanted.
    ///
    /// # Errors
    /// `INVALID_PARAMS` if a rank has other sizes, or a message is malformed.
    pub fn read(
        sizes: Sizes,
        routes: &Routes,
        rows: Rows<'_>,
        parts: &[Option<Part>],
        space: &[Option<usize>],
    ) -> Result<Self> {
        let fits = routes.fits(&sizes) && rows.width() == sizes.width();
        if !fits || parts.len() != sizes.ranks || space.len() != sizes.ranks {
            return Err(Error::invalid("cannot dispatch: the numbers of messages do not fit"));
        }
        let (own, own_counts, own_tokens) = routes.own();
        let mut own_tokens = Some(own_tokens);
        let (mut sources, mut missing) = (Vec::new(), Vec::new());
        for (rank, (part, space)) in parts.iter().zip(space).enumerate() {
            let pairs = match (part, space, own_tokens.take_if(|_| rank == own)) {
                (_, None, _) => None,
                (_, Some(_), Some(tokens)) => Some(Pairs {
                    counts: own_counts.to_vec(),
                    tokens: tokens.map(|token| (rows.split() + token, token as i32)).collect(),
                }),
                (None, Some(_), None) => {
                    missing.push(rank);
                    None
                }
                (Some(part), Some(space), None) => {
                    let pairs = read(&sizes, rows.received(), *part, *space, rank)?;
                    if pairs.is_none() {
                        missing.push(rank);
                    }
                    pairs
                }
            };
            sources.push(pairs);
        }
        let mut rest: Vec<&[(usize, i32)]> =
            sources.iter().map(|pairs| pairs.as_ref().map_or(&[][..], |pairs| &pairs.tokens[..])).collect();
        let (mut counts, mut tokens) = (Vec::new(), Vec::new());
        for expert in 0..sizes.local() {
            for (pairs, rest) in sources.iter().zip(&mut rest) {
                let count = pairs.as_ref().map_or(0, |pairs| pairs.counts[expert]);
                let (taken, left) = rest.split_at(count);
                *rest = left;
                counts.push(count);
                tokens.extend_from_slice(taken);
            }
        }
        if tokens.iter().any(|(row, _)| *row >= rows.count()) {
            return Err(Error::invalid("cannot dispatch: a row is not there"));
        }
        Ok(Self { sizes, counts, tokens, missing })
    }

    /// Returns the bytes of a row.
    pub fn width(&self) -> usize {
        self.sizes.width()
    }

    /// Returns the ranks whose message is missing, and those that have left this rank out.
    pub fn missing(&self) -> &[usize] {
        &self.missing
    }

    /// Returns the number of tokens of each local expert.
    pub fn counts(&self) -> Vec<usize> {
        self.counts.chunks(self.sizes.ranks).map(|counts| counts.iter().sum()).collect()
    }

    /// Returns the row of each token.
    pub fn rows(&self) -> impl Iterator<Item = usize> {
        self.tokens.iter().map(|(row, _)| *row)
    }

    /// Writes the number of tokens of each local expert, the rows of each rank there as
    /// `first << 32 | number`, and the index of each token at its source.
    ///
    /// # Errors
    /// `INVALID_PARAMS` if a length does not fit.
    pub fn write(&self, count: &mut [i32], ranges: &mut [i64], sources: &mut [i32]) -> Result<()> {
        let (local, ranks) = (self.sizes.local(), self.sizes.ranks);
        if count.len() != local
            || ranges.len() != local * ranks
            || sources.len() != local * self.sizes.slots()
        {
            return Err(Error::invalid("cannot dispatch: the lengths of the results do not fit"));
        }
        let mut tokens = self.tokens.iter();
        let experts = self.counts.chunks(ranks).zip(count).zip(ranges.chunks_mut(ranks)).enumerate();
        for (expert, ((counts, count), ranges)) in experts {
            let mut first = 0;
            for (count, range) in counts.iter().zip(ranges) {
                *range = (first << 32 | *count) as i64;
                first += count;
            }
            *count = first as i32;
            let sources = &mut sources[expert * self.sizes.slots()..];
            for (source, (_, token)) in sources.iter_mut().zip(tokens.by_ref().take(first)) {
                *source = *token;
            }
        }
        Ok(())
    }

    /// Copies the tokens to the rows of their experts, with at most that many threads. `scales` is
    /// empty without scales.
    ///
    /// # Errors
    /// `INVALID_PARAMS` if a length does not fit, or a row is not there.
    pub fn place(
        &self,
        rows: Rows<'_>,
        elements: &mut [u8],
        scales: &mut [u8],
        threads: NonZero<usize>,
    ) -> Result<()> {
        let sizes = &self.sizes;
        let (of_expert, of_scales) = (sizes.slots() * sizes.elements(), sizes.slots() * sizes.scales());
        let are_there = self.tokens.iter().all(|(row, _)| *row < rows.count());
        if rows.width() != sizes.width()
            || !are_there
            || elements.len() != sizes.local() * of_expert
            || scales.len() != sizes.local() * of_scales
        {
            return Err(Error::invalid("cannot dispatch: the lengths of the results do not fit"));
        }
        if of_expert == 0 {
            return Ok(());
        }
        let threads = threads_for(threads, self.tokens.len() * sizes.width());
        let share = self.tokens.len().div_ceil(threads).max(1);
        let (mut elements, mut scales, mut tokens) = (elements, scales, &self.tokens[..]);
        let counts = self.counts();
        let mut counts = &counts[..];
        thread::scope(|scope| {
            while !counts.is_empty() {
                // Experts of one thread: as many as have its share of the tokens.
                let (mut number, mut sum) = (0, 0);
                while number < counts.len() && (number == 0 || sum < share) {
                    sum += counts[number];
                    number += 1;
                }
                let (own_counts, other_counts) = counts.split_at(number);
                let (own_tokens, other_tokens) = tokens.split_at(sum);
                let (own, others) = std::mem::take(&mut elements).split_at_mut(number * of_expert);
                let (own_scales, other_scales) = std::mem::take(&mut scales).split_at_mut(number * of_scales);
                (counts, tokens, elements, scales) = (other_counts, other_tokens, others, other_scales);
                let mut work = move || self.copy(rows, own_counts, own_tokens, own, own_scales);
                if threads == 1 {
                    work();
                } else {
                    scope.spawn(work);
                }
            }
        });
        Ok(())
    }

    fn copy(
        &self,
        rows: Rows<'_>,
        counts: &[usize],
        tokens: &[(usize, i32)],
        elements: &mut [u8],
        scales: &mut [u8],
    ) {
        let (bytes, scale) = (self.sizes.elements(), self.sizes.scales());
        let mut tokens = tokens.iter();
        for (expert, count) in counts.iter().enumerate() {
            for (slot, (row, _)) in tokens.by_ref().take(*count).enumerate() {
                let (from, to) = (rows.row(*row), expert * self.sizes.slots() + slot);
                elements[to * bytes..(to + 1) * bytes].copy_from_slice(&from[..bytes]);
                scales[to * scale..(to + 1) * scale].copy_from_slice(&from[bytes..]);
            }
        }
    }
}

/// Returns the number of threads that are worth their start for that many bytes.
pub(super) fn threads_for(threads: NonZero<usize>, bytes: usize) -> usize {
    threads.get().min(bytes >> 20).max(1)
}

/// Reads a message. Returns `None` if its sender has left this rank out.
fn read(sizes: &Sizes, memory: &[u8], part: Part, space: usize, rank: usize) -> Result<Option<Pairs>> {
    let start = part.first.checked_mul(sizes.width()).and_then(|start| memory.get(start..));
    let len = usize::try_from(part.len).unwrap_or(usize::MAX);
    let part_of = start.map(|start| &start[..start.len().min(len)]).ok_or_else(|| malformed(rank))?;
    let (words, _) = part_of.as_chunks::<WORD>();
    let (header, body) = words.split_at_checked(HEADER).ok_or_else(|| malformed(rank))?;
    if i32::from_ne_bytes(header[0]) != MARK {
        return Err(malformed(rank));
    }
    for ((name, here), there) in NAMES.iter().zip(sizes.agreed()).zip(&header[1..]) {
        let there = i32::from_ne_bytes(*there);
        if there != here {
            return Err(Error::invalid(format!(
                "cannot dispatch: ranks do not agree on {name}. here={here} rank={rank} there={there}"
            )));
        }
    }
    let [is_active, pairs, tokens] = [5, 6, 7].map(|at| number(header[at]));
    if is_active == 0 {
        return Ok(None);
    }
    if len > space * sizes.width() {
        return Err(Error::invalid(format!(
            "cannot dispatch: ranks do not agree on the number of experts per token. rank={rank}"
        )));
    }
    let front = sizes.front(pairs);
    if tokens > sizes.tokens || len != (front + tokens) * sizes.width() || part_of.len() != len {
        return Err(malformed(rank));
    }
    let (counts, body) = body.split_at_checked(sizes.local()).ok_or_else(|| malformed(rank))?;
    let (rows, body) = body.split_at_checked(pairs).ok_or_else(|| malformed(rank))?;
    let (indices, _) = body.split_at_checked(pairs).ok_or_else(|| malformed(rank))?;
    let is_within = |words: &[[u8; WORD]], limit: usize| words.iter().all(|word| number(*word) < limit);
    // An expert has no more tokens of a rank than its rows there.
    let fits =
        is_within(counts, sizes.tokens + 1) && is_within(rows, tokens) && is_within(indices, sizes.tokens);
    let counts: Vec<_> = counts.iter().map(|count| number(*count)).collect();
    if !fits || counts.iter().sum::<usize>() != pairs {
        return Err(malformed(rank));
    }
    let first = part.first + front;
    let tokens =
        rows.iter().zip(indices).map(|(row, index)| (first + number(*row), i32::from_ne_bytes(*index)));
    Ok(Some(Pairs { counts, tokens: tokens.collect() }))
}
