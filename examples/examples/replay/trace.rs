//! Traces as JSON lines, and a generator of traces of the same shape.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{BufRead, BufReader};
use std::path::Path;

use mooncake_core::clock::Rng;
use mooncake_core::testkit::workloads::Requests;
use serde_json::Value;

/// Request: the ids of its 512-token blocks, prefix first.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    /// Milliseconds from the start of the trace.
    pub(crate) timestamp: u64,
    /// Id of each block. Equal ids are equal prefixes.
    pub(crate) ids: Vec<u64>,
}

/// Milliseconds between two requests without times, as in the public conversation trace.
const PAUSE_MS: u64 = 294;

/// Requests in order of arrival.
#[derive(Clone, Debug)]
pub(crate) struct Trace {
    pub(crate) requests: Vec<Request>,
}

impl Trace {
    /// Reads a file with one JSON object per line, which lists its blocks in `field`. The time is
    /// in `timestamp`, in milliseconds, if it is known. An error names the faulty line.
    pub(crate) fn read(path: &Path, field: &str) -> Result<Self, String> {
        let shown = path.display();
        let file = std::fs::File::open(path).map_err(|e| format!("cannot open the trace {shown}: {e}"))?;
        let mut requests = Vec::new();
        for (number, line) in BufReader::new(file).lines().enumerate() {
            let line = line.map_err(|e| format!("cannot read {shown}: {e}"))?;
            if line.trim().is_empty() {
                continue;
            }
            let request = parse(&line, field, requests.len() as u64)
                .map_err(|e| format!("cannot read {shown}: {e}. line={}", number + 1))?;
            requests.push(request);
        }
        if requests.is_empty() {
            return Err(format!("{shown} has no requests"));
        }
        Ok(Self { requests })
    }

    /// Gives requests their times.
    pub(crate) fn with_pauses(requests: Requests) -> Self {
        let timed = |(index, ids)| Request { timestamp: index as u64 * PAUSE_MS, ids };
        Self { requests: requests.into_iter().enumerate().map(timed).collect() }
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
        for id in self.requests.iter().flat_map(|r| &r.ids) {
            all += 1;
            *seen.entry(*id).or_insert(0u32) += 1;
        }
        (all, seen.len() as u64)
    }
}

/// Parses a request. `before` is the number of requests before it.
fn parse(line: &str, field: &str, before: u64) -> Result<Request, String> {
    let request: Value = serde_json::from_str(line).map_err(|e| format!("invalid JSON: {e}"))?;
    let blocks = request.get(field).and_then(Value::as_array);
    let blocks = blocks.ok_or_else(|| format!("no list of blocks. field={field}"))?;
    let id = |block: &Value| match block {
        Value::String(text) => {
            let mut hasher = DefaultHasher::new();
            text.hash(&mut hasher);
            Some(hasher.finish())
        }
        number => number.as_u64().or_else(|| number.as_i64().map(i64::cast_unsigned)),
    };
    let ids: Option<Vec<u64>> = blocks.iter().map(id).collect();
    let ids = ids.ok_or_else(|| format!("a block is neither a number nor a text. field={field}"))?;
    let timestamp = request.get("timestamp").and_then(Value::as_f64);
    Ok(Request { timestamp: timestamp.map_or(before * PAUSE_MS, |ms| ms.max(0.0) as u64), ids })
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
