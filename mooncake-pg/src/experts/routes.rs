//! Routes of the tokens of this rank to the ranks of their experts.

use mooncake_core::{Error, Result};

use super::{MARK, NAMES, Sizes, WORD};
use crate::view::MAX_RANKS;

/// Consecutive tokens: the first one, and their number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    /// First token.
    pub first: usize,
    /// Number of tokens.
    pub count: usize,
}

/// Pairs of the tokens of this rank.
#[derive(Debug)]
pub struct Routes {
    choices: usize,
    ranks: usize,
    /// This rank.
    own: usize,
    tokens: usize,
    /// Number of pairs of each expert.
    counts: Vec<usize>,
    /// Choice of each pair, counted over the choices of all tokens.
    pairs: Vec<usize>,
}

impl Routes {
    /// Reads the experts of each token of the rank `own`; -1 stands for none.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for an expert that does not exist, or that a token names twice.
    pub fn new(topk: &[i64], choices: usize, ranks: usize, experts: usize, own: usize) -> Result<Self> {
        let shares = (1..=MAX_RANKS).contains(&ranks) && experts.is_multiple_of(ranks);
        if !shares || own >= ranks || !topk.len().is_multiple_of(choices) {
            return Err(Error::invalid("cannot route tokens: the numbers do not fit"));
        }
        let mut counts = vec![0; experts];
        for expert in topk.iter().filter(|expert| **expert != -1) {
            let count = usize::try_from(*expert).ok().and_then(|expert| counts.get_mut(expert));
            *count.ok_or_else(|| {
                Error::invalid(format!(
                    "cannot route tokens: expert is out of range. expert={expert} num_experts={experts}"
                ))
            })? += 1;
        }
        let mut next: Vec<usize> = counts
            .iter()
            .scan(0, |sum, count| {
                *sum += count;
                Some(*sum - count)
            })
            .collect();
        let firsts = next.clone();
        let mut pairs = vec![0; counts.iter().sum()];
        for (choice, expert) in topk.iter().enumerate().filter(|(_, expert)| **expert != -1) {
            let expert = *expert as usize;
            let at = next[expert];
            if at > firsts[expert] && pairs[at - 1] / choices == choice / choices {
                let token = choice / choices;
                return Err(Error::invalid(format!(
                    "cannot route tokens: a token names an expert twice. token={token} expert={expert}"
                )));
            }
            pairs[at] = choice;
            next[expert] += 1;
        }
        Ok(Self { choices, ranks, own, tokens: topk.len() / choices.max(1), counts, pairs })
    }

    fn local(&self) -> usize {
        self.counts.len() / self.ranks
    }

    /// Returns the number of pairs of each rank.
    pub fn pairs(&self) -> Vec<usize> {
        self.counts.chunks(self.local().max(1)).map(|counts| counts.iter().sum()).collect()
    }

    /// Returns this rank, the number of pairs of each of its experts, and the token of each pair.
    pub(super) fn own(&self) -> (usize, &[usize], impl Iterator<Item = usize>) {
        let first = self.own * self.local();
        let counts = &self.counts[first..first + self.local()];
        let pairs = self.counts[..first].iter().sum::<usize>();
        let pairs = &self.pairs[pairs..pairs + counts.iter().sum::<usize>()];
        (self.own, counts, pairs.iter().map(|choice| choice / self.choices))
    }

    /// Returns whether the ranks and experts are those of the sizes.
    pub(super) fn fits(&self, sizes: &Sizes) -> bool {
        self.ranks == sizes.ranks && self.counts.len() == sizes.experts && self.tokens <= sizes.tokens
    }

    /// Returns the number of rows of each rank's front. A rank that is not active gets no tokens,
    /// and this rank no message.
    pub fn fronts(&self, sizes: &Sizes, is_active: &[bool]) -> Vec<usize> {
        let active = self.pairs().into_iter().zip(is_active).enumerate();
        let rows = active.map(|(rank, (pairs, active))| match rank == self.own {
            true => 0,
            false => sizes.front(if *active { pairs } else { 0 }),
        });
        rows.collect()
    }

    /// Writes the fronts of the messages to all ranks, one after the other. Returns the tokens that
    /// follow each front.
    ///
    /// # Errors
    /// `INVALID_PARAMS` if `space` does not have the length of the fronts, or if there are more
    /// tokens than the sizes allow.
    pub fn write_fronts(&self, sizes: &Sizes, is_active: &[bool], space: &mut [u8]) -> Result<Vec<Vec<Run>>> {
        let rows = self.fronts(sizes, is_active);
        let bytes = rows.iter().sum::<usize>() * sizes.width();
        if !self.fits(sizes) || is_active.len() != self.ranks || space.len() != bytes {
            return Err(Error::invalid("cannot route tokens: the sizes do not fit"));
        }
        let (mut space, mut pairs) = (space, &self.pairs[..]);
        let mut runs = Vec::new();
        for (rank, (of_rank, counts)) in
            self.pairs().into_iter().zip(self.counts.chunks(self.local())).enumerate()
        {
            let (front, rest) = std::mem::take(&mut space).split_at_mut(rows[rank] * sizes.width());
            space = rest;
            let (own, others) = pairs.split_at(of_rank);
            pairs = others;
            runs.push(match is_active[rank] {
                _ if rank == self.own => Vec::new(),
                true => self.write_front(sizes, counts, own, front),
                false => {
                    write(front, header(sizes, false, 0, 0));
                    Vec::new()
                }
            });
        }
        Ok(runs)
    }

    /// Writes a front with these pairs. Returns the tokens that follow.
    fn write_front(&self, sizes: &Sizes, counts: &[usize], pairs: &[usize], front: &mut [u8]) -> Vec<Run> {
        // Row of each token, counted from 1; first whether the token is there.
        let mut rows = vec![0; self.tokens];
        for choice in pairs {
            rows[choice / self.choices] = 1;
        }
        let (mut runs, mut given) = (Vec::<Run>::new(), 0);
        for (token, row) in rows.iter_mut().enumerate().filter(|(_, row)| **row > 0) {
            given += 1;
            *row = given;
            match runs.last_mut() {
                Some(run) if run.first + run.count == token => run.count += 1,
                _ => runs.push(Run { first: token, count: 1 }),
            }
        }
        let tokens = || pairs.iter().map(|choice| choice / self.choices);
        let numbers = header(sizes, true, pairs.len(), given as usize)
            .chain(counts.iter().map(|count| *count as i32))
            .chain(tokens().map(|token| rows[token] - 1))
            .chain(tokens().map(|token| token as i32));
        write(front, numbers);
        runs
    }

    /// Writes for each choice the row of its pair. The pairs of another rank lie one after the
    /// other from its row in `firsts` on, and those of each expert of this rank from its row in
    /// `own` on. -1 stands for no expert, and for an expert of a rank without rows.
    ///
    /// # Errors
    /// `INVALID_PARAMS` if a length does not fit.
    pub fn rows(&self, firsts: &[Option<usize>], own: Option<&[usize]>, rows: &mut [i64]) -> Result<()> {
        let is_whole = rows.len() == self.tokens * self.choices && firsts.len() == self.ranks;
        if !is_whole || own.is_some_and(|own| own.len() != self.local()) {
            return Err(Error::invalid("cannot route tokens: the numbers do not fit"));
        }
        rows.fill(-1);
        let mut pairs = self.pairs.iter();
        for (rank, (counts, first)) in self.counts.chunks(self.local().max(1)).zip(firsts).enumerate() {
            let mut next = first.filter(|_| rank != self.own);
            for (expert, count) in counts.iter().enumerate() {
                if rank == self.own {
                    next = own.map(|own| own[expert]);
                }
                for choice in pairs.by_ref().take(*count) {
                    rows[*choice] = next.map_or(-1, |row| row as i64);
                    next = next.map(|row| row + 1);
                }
            }
        }
        Ok(())
    }
}

fn header(sizes: &Sizes, is_active: bool, pairs: usize, tokens: usize) -> impl Iterator<Item = i32> {
    const { assert!(NAMES.len() + 4 == super::HEADER) };
    let counts = [i32::from(is_active), pairs as i32, tokens as i32];
    [MARK].into_iter().chain(sizes.agreed()).chain(counts)
}

fn write(front: &mut [u8], numbers: impl Iterator<Item = i32>) {
    let (words, _) = front.as_chunks_mut::<WORD>();
    let mut words = words.iter_mut();
    // Numbers before words, so that no word is lost.
    for (number, word) in numbers.zip(words.by_ref()) {
        *word = number.to_ne_bytes();
    }
    words.for_each(|word| *word = [0; WORD]);
}
