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
        let failed = |reason: String| format!("cannot read trace: {reason} path=\"{}\"", path.display());
        let file = std::fs::File::open(path).map_err(|e| failed(format!("{e}.")))?;
        let mut requests = Vec::new();
        for (index, line) in BufReader::new(file).lines().enumerate() {
            let in_line = |reason: String| failed(format!("{reason}. line={}", index + 1));
            let line = line.map_err(|e| in_line(e.to_string()))?;
            if !line.trim().is_empty() {
                requests.push(parse(&line, field, requests.len() as u64).map_err(in_line)?);
            }
        }
        let Some(first) = requests.first().map(|request: &Request| request.timestamp) else {
            return Err(failed("it has no requests.".into()));
        };
        requests.iter_mut().for_each(|request| request.timestamp = request.timestamp.saturating_sub(first));
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
    let request: Value = serde_json::from_str(line).map_err(|e| {
        let text = e.to_string();
        let reason = text.split(" at line ").next().unwrap_or_default();
        format!("invalid JSON at column {}: {reason}", e.column())
    })?;
    let blocks = request.get(field).and_then(Value::as_array);
    let blocks = blocks.ok_or_else(|| format!("no list of blocks in `{field}`"))?;
    let id = |block: &Value| match block {
        Value::String(text) => {
            let mut hasher = DefaultHasher::new();
            text.hash(&mut hasher);
            Some(hasher.finish())
        }
        number => number.as_u64().or_else(|| number.as_i64().map(i64::cast_unsigned)),
    };
    let ids: Option<Vec<u64>> = blocks.iter().map(id).collect();
    let ids = ids.ok_or_else(|| format!("a block in `{field}` is neither a whole number nor a text"))?;
    let timestamp = match request.get("timestamp") {
        None | Some(Value::Null) => before * PAUSE_MS,
        Some(time) => time.as_f64().filter(|ms| *ms >= 0.0).ok_or("`timestamp` is not a time in ms")? as u64,
    };
    Ok(Request { timestamp, ids })
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
    use std::io::Write;

    use super::*;

    fn read(text: &[u8], field: &str) -> Result<Trace, String> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text).unwrap();
        let name = file.path().display().to_string();
        Trace::read(file.path(), field).map_err(|error| error.replace(&name, "PATH"))
    }

    #[test]
    fn lines_are_requests() {
        let text = b"{\"timestamp\": 1700000000000, \"output_length\": 3, \"hash_ids\": [0, 7, -1]}\n\n\
                     {\"timestamp\": 1700000000027.5, \"hash_ids\": []}\r\n{\"hash_ids\": [7]}";
        let trace = read(text, "hash_ids").unwrap();
        let requests = &trace.requests;
        assert_eq!(requests.iter().map(|r| r.timestamp).collect::<Vec<_>>(), [0, 27, 0], "from the first on");
        assert_eq!((&requests[0].ids[..], &requests[2].ids[..]), (&[0, 7, u64::MAX][..], &[7][..]));
        assert_eq!(trace.blocks(), (4, 3));
        let texts = read(b"{\"blocks\": [\"a\", \"b\"]}\n{\"blocks\": [\"a\"]}", "blocks").unwrap();
        assert_eq!(texts.requests[0].ids[0], texts.requests[1].ids[0]);
        assert_eq!((texts.blocks(), texts.requests[1].timestamp), ((3, 2), PAUSE_MS));
    }

    #[test]
    fn an_error_names_the_file_and_the_line() {
        for (text, reason) in [
            (&b"\n \n"[..], "it has no requests. path=\"PATH\""),
            (
                b"{\"hash_ids\": [1]}\n\n{",
                "invalid JSON at column 1: EOF while parsing an object. line=3 path=\"PATH\"",
            ),
            (b"[1, 2]", "no list of blocks in `hash_ids`. line=1 path=\"PATH\""),
            (b"{\"hash_ids\": 5}", "no list of blocks in `hash_ids`. line=1 path=\"PATH\""),
            (
                b"{\"hash_ids\": [1.5]}",
                "a block in `hash_ids` is neither a whole number nor a text. line=1 path=\"PATH\"",
            ),
            (
                b"{\"timestamp\": -1, \"hash_ids\": []}",
                "`timestamp` is not a time in ms. line=1 path=\"PATH\"",
            ),
            (b"{\"hash_ids\": []}\n\xff\n", "stream did not contain valid UTF-8. line=2 path=\"PATH\""),
        ] {
            assert_eq!(read(text, "hash_ids").unwrap_err(), format!("cannot read trace: {reason}"));
        }
        let missing = Trace::read(Path::new("/does/not/exist"), "hash_ids").unwrap_err();
        let expected = "cannot read trace: No such file or directory (os error 2). path=\"/does/not/exist\"";
        assert_eq!(missing, expected);
    }
}
