//! FAST'25 trace format, and a generator of traces of the same shape.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::path::Path;

use mooncake_core::clock::Rng;
use serde::{Deserialize, Serialize};

/// Request: the ids of its 512-token blocks, prefix first.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Request {
    /// Milliseconds from the start of the trace.
    pub(crate) timestamp: u64,
    /// Id of each block. Equal ids are equal prefixes.
    pub(crate) hash_ids: Vec<u64>,
}

/// Requests in order of arrival.
#[derive(Clone, Debug)]
pub(crate) struct Trace {
    pub(crate) requests: Vec<Request>,
}

impl Trace {
    /// Reads a file with one JSON object per line. An error names the faulty line.
    pub(crate) fn read(path: &Path) -> Result<Self, String> {
        let shown = path.display();
        let file = std::fs::File::open(path).map_err(|e| format!("cannot open the trace {shown}: {e}"))?;
        let mut requests = Vec::new();
        for (number, line) in BufReader::new(file).lines().enumerate() {
            let line = line.map_err(|e| format!("cannot read {shown}: {e}"))?;
            if line.trim().is_empty() {
                continue;
            }
            let request = serde_json::from_str(&line).map_err(|e| {
                format!("{shown}, line {}: not a request of this trace format: {e}", number + 1)
            })?;
            requests.push(request);
        }
        if requests.is_empty() {
            return Err(format!("{shown} has no requests"));
        }
        Ok(Self { requests })
    }

    /// Generates recurring conversations, which share about as much as the public conversation
    /// trace (a common first block, some 25 blocks per request, two fifths of the requests continue
    /// an earlier one).
    pub(crate) fn generate(requests: usize, seed: u64) -> Self {
        let mut rng = Rng::seeded(seed);
        let mut fresh = 1u64;
        let mut recent: Vec<Vec<u64>> = Vec::new();
        let mut made = Vec::with_capacity(requests);
        for index in 0..requests {
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
            made.push(Request { timestamp: index as u64 * 294, hash_ids: ids });
        }
        Self { requests: made }
    }

    /// Returns the covered time in seconds.
    pub(crate) fn span_s(&self) -> f64 {
        let first = self.requests.first().map_or(0, |r| r.timestamp);
        let last = self.requests.last().map_or(0, |r| r.timestamp);
        (last.saturating_sub(first)) as f64 / 1000.0
    }

    /// Returns the number of block references, and of distinct blocks.
    pub(crate) fn blocks(&self) -> (u64, u64) {
        let mut seen = HashMap::new();
        let mut all = 0;
        for id in self.requests.iter().flat_map(|r| &r.hash_ids) {
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
