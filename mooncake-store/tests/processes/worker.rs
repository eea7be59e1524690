//! Process of a client that joins, reads and writes a few keys with others, checks every byte, and
//! leaves.

use std::collections::HashMap;
use std::fmt;

use mooncake_core::clock::Rng;
use mooncake_core::{Error, ErrorCode, ErrorKind};
use mooncake_store::client::{Client, PutOptions, PutOutcome};

use crate::cluster::{argument, builder, master_address, start, tagged, until_end_of_input};
use crate::process::{Lines, Process};

/// Length of the longest value, and of the shortest.
const LONGEST: u64 = 128 << 10;

/// Numbers of operations by outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) stored: u64,
    pub(crate) removed: u64,
    pub(crate) hits: u64,
    pub(crate) misses: u64,
    /// Number of operations with an error that permits another try.
    pub(crate) failed: u64,
    /// Number of hits from the cache of the client.
    pub(crate) kept: u64,
}

impl Counts {
    pub(crate) fn add(&mut self, other: Self) {
        self.stored += other.stored;
        self.removed += other.removed;
        self.hits += other.hits;
        self.misses += other.misses;
        self.failed += other.failed;
        self.kept += other.kept;
    }

    fn parse(text: &str) -> Option<Self> {
        let mut numbers = text.split_whitespace().map(|word| word.parse().ok());
        let mut next = || numbers.next().flatten();
        Some(Self {
            stored: next()?,
            removed: next()?,
            hits: next()?,
            misses: next()?,
            failed: next()?,
            kept: next()?,
        })
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { stored, removed, hits, misses, failed, kept } = self;
        write!(f, "{stored} {removed} {hits} {misses} {failed} {kept}")
    }
}

/// Worker process, whose output its parent inspects line by line.
pub(crate) struct Worker {
    pub(crate) process: Process,
    said: Lines,
}

impl Worker {
    /// Starts a worker that offers `segment` bytes and uses the first `keys` keys. Returns when the
    /// worker is at work.
    pub(crate) fn start(port: u16, number: u64, keys: u64, segment: u64, writes: bool) -> Self {
        let arguments = [
            ("TEST_NUMBER", number.to_string()),
            ("TEST_KEYS", keys.to_string()),
            ("TEST_SEGMENT", segment.to_string()),
            ("TEST_WRITES", writes.to_string()),
        ];
        let mut process = start("worker::worker", port, &arguments);
        let mut said = process.lines_after("> ");
        assert_eq!(said.next().as_deref(), Some("at work"), "a worker that comes up");
        Self { process, said }
    }

    /// Lets the worker leave by itself.
    pub(crate) fn leave(mut self) -> Counts {
        drop(self.process.0.stdin.take());
        let last = self.said.by_ref().last().unwrap_or_default();
        assert!(self.process.ended().success(), "a worker that finds nothing wrong: {last}");
        Counts::parse(&last).unwrap_or_else(|| panic!("figures, not {last:?}"))
    }

    /// Kills the worker, which must have reported no error before.
    pub(crate) fn kill(self) {
        self.process.kill();
        let said: Vec<_> = self.said.collect();
        assert!(said.is_empty(), "{said:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "child process of other tests"]
async fn worker() {
    let Some(master) = master_address() else { return };
    let (number, segment): (u64, _) = (argument("TEST_NUMBER").unwrap(), argument("TEST_SEGMENT").unwrap());
    let mut builder = builder(&master, segment);
    let writes = argument("TEST_WRITES").unwrap();
    if writes && number % 2 == 1 {
        // A cached value must not be older than the values that other clients read.
        builder = builder.share_memory(false).hot_cache(4 << 20);
    }
    let client = builder.connect().await.unwrap();
    println!("\n> at work");
    let leave = until_end_of_input();
    let mut work = Work::new(client.clone(), number, argument("TEST_KEYS").unwrap(), writes);
    while !leave.is_finished() {
        if let Err(wrong) = work.step().await {
            println!("> {wrong}");
            panic!("{wrong}");
        }
    }
    assert_eq!(client.status().local_buffer_used(), 0, "every buffer came back");
    work.counts.kept = client.status().hot_cache().map_or(0, |cache| cache.hits);
    client.close().await.unwrap();
    println!("\n> {}", work.counts);
}

/// Operations of a client on keys that others use, too.
pub(crate) struct Work {
    client: Client,
    number: u64,
    keys: u64,
    writes: bool,
    rng: Rng,
    written: u64,
    /// Latest version of each key and writer that a read has shown. A writer puts one version after
    /// the other, so a later read never shows an older one.
    seen: HashMap<(u64, u64), u64>,
    pub(crate) counts: Counts,
}

impl Work {
    /// Creates the operations of a client. Each client needs a number of its own.
    pub(crate) fn new(client: Client, number: u64, keys: u64, writes: bool) -> Self {
        let (rng, seen, counts) = (Rng::seeded(number), HashMap::new(), Counts::default());
        Self { client, number, keys, writes, rng, written: 0, seen, counts }
    }

    /// Runs one operation. The error reports an impossible outcome.
    pub(crate) async fn step(&mut self) -> Result<(), String> {
        let number = self.rng.below(self.keys);
        let key = format!("key {number}");
        match self.rng.below(if self.writes { 8 } else { 4 }) {
            0..=3 => {
                let read = self.client.get(&key).await;
                let Some(read) = self.fine(read)? else { return Ok(()) };
                match read {
                    Some(bytes) => self.check(number, &bytes)?,
                    None => self.counts.misses += 1,
                }
            }
            4 => {
                let removed = self.client.remove(&key, true).await;
                self.counts.removed += u64::from(self.fine(removed)?.unwrap_or(false));
            }
            5 => {
                let value = self.next_value(number);
                let config = PutOptions::new().replicas(1 + self.rng.below(2));
                let put = self.client.put_with(&key, &value[..], &config).await;
                self.counts.stored += u64::from(self.fine(put)? == Some(PutOutcome::Stored));
            }
            _ => {
                let value = self.next_value(number);
                let upsert = self.client.put_with(&key, &value[..], &PutOptions::new().upsert()).await;
                self.counts.stored += u64::from(self.fine(upsert)?.is_some());
            }
        }
        Ok(())
    }

    fn next_value(&mut self, key: u64) -> bytes::Bytes {
        self.written += 1;
        let len = 1 + self.rng.below(LONGEST) as usize;
        tagged(key, self.number << 32 | self.written, len)
    }

    fn check(&mut self, key: u64, bytes: &[u8]) -> Result<(), String> {
        let version = crate::cluster::version_of(key, bytes);
        let version =
            version.ok_or_else(|| format!("{} bytes of key {key} are no value of it", bytes.len()))?;
        let (writer, count) = (version >> 32, version & 0xffff_ffff);
        let latest = self.seen.entry((key, writer)).or_insert(count);
        if count < *latest {
            return Err(format!("key {key} went back from value {latest} of writer {writer} to {count}"));
        }
        *latest = count;
        self.counts.hits += 1;
        Ok(())
    }

    /// Returns `None` for a permitted error.
    fn fine<T>(&mut self, outcome: Result<T, Error>) -> Result<Option<T>, String> {
        use ErrorKind::{Busy, Expired, NoSpace, Timeout, Unavailable};
        match outcome {
            Ok(value) => Ok(Some(value)),
            Err(error) if matches!(error.kind(), Busy | Expired | NoSpace | Timeout | Unavailable) => {
                self.counts.failed += 1;
                Ok(None)
            }
            // An upsert of another client has replaced the value: the later end would have been
            // replaced at once.
            Err(error) if error.code() == ErrorCode::IllegalClient => {
                self.counts.failed += 1;
                Ok(None)
            }
            Err(error) => Err(format!("an error that must not be: {error}")),
        }
    }
}
