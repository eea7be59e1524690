//! Traces of requests, and a generator of traces like the public conversation trace.

use std::collections::HashMap;

use mooncake_core::clock::Rng;
use mooncake_core::testkit::simulate::Cache;
use mooncake_core::testkit::workloads::Requests;

/// Request: the ids of its blocks, prefix first.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    /// Milliseconds from the start of the trace.
    pub(crate) timestamp: u64,
    /// Id of each block. Equal ids are equal prefixes.
    pub(crate) ids: Vec<u64>,
    /// Tokens of the prompt; empty if they are unknown.
    pub(crate) inputs: Vec<TokenRun>,
}

/// Tokens in consecutive blocks of a request. All blocks but the last one are full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TokenRun {
    pub(crate) blocks: usize,
    pub(crate) tokens: u64,
}

/// Milliseconds between two requests without times, as in the public conversation trace.
pub(crate) const PAUSE_MS: u64 = 294;

/// Shares that a cache finds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct HitRatios {
    pub(crate) blocks: f64,
    /// Share of the tokens of the prompts, if they are known.
    pub(crate) tokens: Option<f64>,
}

/// Requests in order of arrival.
#[derive(Clone, Debug)]
pub(crate) struct Trace {
    pub(crate) requests: Vec<Request>,
    /// Tokens of a full block, if they are known.
    pub(crate) block_tokens: Option<u64>,
}

impl Trace {
    /// Gives requests their times.
    pub(crate) fn with_pauses(requests: Requests) -> Self {
        let timed = |(index, ids)| Request { timestamp: index as u64 * PAUSE_MS, ids, inputs: Vec::new() };
        Self { requests: requests.into_iter().enumerate().map(timed).collect(), block_tokens: None }
    }

    /// Generates recurring conversations, which share about as much as the public conversation
    /// trace (a common first block, some 25 blocks per request, two fifths of the requests continue
    /// an earlier one).
    pub(crate) fn generate(requests: usize, seed: u64) -> Self {
        let mut rng = Rng::seeded(seed);
        let mut fresh = 1u64;
        let mut recent: Vec<Vec<u64>> = Vec::new();
        let mut made = Vec::with_capacity(requests);
        for _ in 0..requests {
            let mut ids = vec![0];
            if !recent.is_empty() && rng.below(100) < 40 {
                // Older conversations recur more rarely.
                let depth = (recent.len() as u64).min(1 << rng.below(10));
                let pick = recent.len() - 1 - rng.below(depth) as usize;
                ids.clone_from(&recent[pick]);
            }
            let growth = 1 + (1u64 << rng.below(6)) + rng.below(8);
            ids.extend(fresh..fresh + growth);
            fresh += growth;
            ids.truncate(240);
            recent.push(ids.clone());
            made.push(ids);
        }
        Self::with_pauses(made)
    }

    /// Returns the block ids of each request.
    pub(crate) fn chains(&self) -> impl Iterator<Item = &[u64]> {
        self.requests.iter().map(|request| &request.ids[..])
    }

    /// Returns the number of tokens in the first `found` blocks of a request.
    pub(crate) fn found_tokens(&self, index: usize, found: usize) -> u64 {
        let (mut remaining, mut sum) = (found, 0u64);
        for run in self.requests.get(index).map_or(&[][..], |request| &request.inputs) {
            let blocks = remaining.min(run.blocks);
            sum += (blocks as u64).saturating_mul(self.block_tokens.unwrap_or(0)).min(run.tokens);
            remaining -= blocks;
        }
        sum
    }

    /// Returns the number of tokens of all prompts; 0 if they are unknown.
    pub(crate) fn input_tokens(&self) -> u64 {
        self.requests.iter().flat_map(|request| &request.inputs).map(|run| run.tokens).sum()
    }

    /// Returns the shares of so many blocks and tokens.
    pub(crate) fn shares_of(&self, blocks: u64, tokens: u64) -> HitRatios {
        let input_tokens = self.input_tokens();
        HitRatios {
            blocks: blocks as f64 / self.block_references().max(1) as f64,
            tokens: (input_tokens > 0).then(|| tokens as f64 / input_tokens as f64),
        }
    }

    /// Replays the requests on a cache.
    pub(crate) fn hit_ratios(&self, cache: &mut impl Cache) -> HitRatios {
        let (mut blocks, mut tokens) = (0, 0);
        for (index, chain) in self.chains().enumerate() {
            let found = cache.request(chain);
            blocks += found as u64;
            tokens += self.found_tokens(index, found);
        }
        self.shares_of(blocks, tokens)
    }

    /// Returns the number of ids that follow several ids, and the number of all ids. If an id
    /// stands for a prefix, each follows one.
    pub(crate) fn count_predecessors(&self) -> (usize, usize) {
        let mut predecessors: HashMap<u64, (Option<u64>, bool)> = HashMap::new();
        for chain in self.chains() {
            let mut before = None;
            for id in chain {
                let (first, has_several) = predecessors.entry(*id).or_insert((before, false));
                *has_several |= *first != before;
                before = Some(*id);
            }
        }
        let ambiguous = predecessors.values().filter(|(_, has_several)| *has_several).count();
        (ambiguous, predecessors.len())
    }

    /// Returns the block that most requests begin with.
    pub(crate) fn root(&self) -> Option<u64> {
        let mut counts = HashMap::new();
        for root in self.requests.iter().filter_map(|request| request.ids.first()) {
            *counts.entry(*root).or_insert(0u64) += 1;
        }
        counts.into_iter().max_by_key(|&(root, count)| (count, root)).map(|(root, _)| root)
    }

    /// Returns the covered time in seconds.
    pub(crate) fn span_s(&self) -> f64 {
        let first = self.requests.first().map_or(0, |r| r.timestamp);
        let last = self.requests.last().map_or(0, |r| r.timestamp);
        (last.saturating_sub(first)) as f64 / 1000.0
    }

    fn block_references(&self) -> u64 {
        self.requests.iter().map(|request| request.ids.len() as u64).sum()
    }

    /// Returns the number of block references, and of distinct blocks.
    pub(crate) fn blocks(&self) -> (u64, u64) {
        let mut seen = HashMap::new();
        let mut all = 0;
        for id in self.requests.iter().flat_map(|r| &r.ids) {
            all += 1;
            *seen.entry(*id).or_insert(0u32) += 1;
        }
        (all, seen.len() as u64)
    }
}

/// Fills `buffer` with the bytes of block `id`, which are always the same, so that every read can
/// be checked.
pub(crate) fn payload(id: u64, buffer: &mut [u8]) {
    Rng::seeded(id ^ 0x6d6f_6f6e_6361_6b65).fill(buffer);
}

/// Returns the key of a block.
pub(crate) fn key(id: u64) -> Vec<u8> {
    format!("block/{id}").into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_those_of_the_found_blocks() {
        let mut trace = Trace::with_pauses(vec![vec![1, 2, 3, 4, 5]]);
        assert_eq!(trace.shares_of(2, 0), HitRatios { blocks: 0.4, tokens: None });
        trace.block_tokens = Some(512);
        // A turn of 600 tokens, and one of 1,100 after it.
        trace.requests[0].inputs =
            vec![TokenRun { blocks: 2, tokens: 600 }, TokenRun { blocks: 3, tokens: 1100 }];
        let found: Vec<u64> = (0..=6).map(|found| trace.found_tokens(0, found)).collect();
        assert_eq!(found, [0, 512, 600, 1112, 1624, 1700, 1700]);
        assert_eq!(trace.shares_of(5, 850).tokens, Some(0.5));
    }

    #[test]
    fn an_id_after_different_ids_is_counted_once() {
        let trace =
            |chains: &[&[u64]]| Trace::with_pauses(chains.iter().map(|chain| chain.to_vec()).collect());
        assert_eq!(trace(&[&[1, 2, 3], &[1, 2, 4], &[5]]).count_predecessors(), (0, 5));
        assert_eq!(trace(&[&[1, 2, 3], &[3], &[4, 3], &[2, 1]]).count_predecessors(), (3, 4));
    }
}
