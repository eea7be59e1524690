//! Put, get and exist between processes, beside raw loopback TCP, memcpy and, with `--peer`,
//! Mooncake C++; all in one run, cell by cell in turn, medians. Run by `cargo xtask bench`.
//!
//! Three processes of this project (master, owner of the segment, and this one as the requester)
//! against three of Mooncake C++. This project is measured twice: over TCP, as between hosts, and
//! through shared memory, as on one host, which is the default.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command line tool prints to its terminal")]

mod child;
mod ours;
mod raw;
mod table;

use std::process::ExitCode;
use std::time::Duration;

use mooncake_benches::peer::{Installation, Node, Process, Result};
use serde_json::{Value, json};

use ours::Ours;
use raw::Raw;
use table::{Cell, Table, Way};

/// Sizes of values, and the number of values of each size per round.
const SIZES: [(usize, usize); 5] =
    [(4 << 10, 300), (64 << 10, 150), (1 << 20, 48), (4 << 20, 16), (16 << 20, 8)];
const EXISTS: usize = 500;
const BATCH: usize = 500;
const BATCHES: usize = 60;
/// Number of measured rounds, after one that only warms up memory and connections.
const ROUNDS: usize = 5;
/// Lease of both masters in milliseconds, so that the next round can reuse the space of removed
/// objects.
const LEASE_MS: u64 = 300;
const SEGMENT: u64 = 1 << 30;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    let words: Vec<&str> = arguments.iter().skip(1).map(String::as_str).collect();
    let outcome = match words.as_slice() {
        ["--role", "master"] => ours::master(LEASE_MS),
        ["--role", "owner", master] => ours::owner(master, SEGMENT),
        ["--role", "raw"] => raw::serve(),
        [] => run(None),
        ["--peer", python] => run(Some(Installation::new(*python))),
        other => Err(format!("unknown arguments {other:?}; run `cargo xtask bench [--peer]`")),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("store_bench: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(peer: Option<Installation>) -> Result<()> {
    let largest = SIZES.iter().map(|(size, _)| *size).max().unwrap_or(0);
    let mut raw = Raw::start(largest)?;
    let mut ours = Ours::start()?;
    let mut theirs = peer.as_ref().map(CppStore::start).transpose()?;
    let mut table = Table::default();
    for round in 0..=ROUNDS {
        // The first round touches all memory and opens all connections; its results are dropped.
        if round == 1 {
            table = Table::default();
        }
        for (size, count) in SIZES {
            let prefix = format!("{size}/{round}/");
            for cell in [Cell::Put(size), Cell::Get(size)] {
                table.raw(cell, raw.times(cell, count)?);
                table.memcpy(cell, raw.memcpy(size, count));
                for way in [Way::Tcp, Way::SameHost] {
                    table.ours(way, cell, ours.times(way, cell, &prefix, count)?);
                }
                if let Some(theirs) = &mut theirs {
                    table.theirs(cell, theirs.median(cell, &prefix, count)?);
                }
            }
            if size == SIZES[0].0 {
                for (cell, count) in [(Cell::Exist, EXISTS), (Cell::BatchExist(BATCH), BATCHES)] {
                    table.raw(cell, raw.times(cell, count)?);
                    for way in [Way::Tcp, Way::SameHost] {
                        table.ours(way, cell, ours.times(way, cell, &prefix, count)?);
                    }
                    if let Some(theirs) = &mut theirs {
                        table.theirs(cell, theirs.median(cell, &prefix, count)?);
                    }
                }
            }
            ours.clear()?;
            if let Some(theirs) = &mut theirs {
                theirs.clear()?;
            }
            // Recently read objects are still leased; their space becomes free after that.
            std::thread::sleep(Duration::from_millis(LEASE_MS + 100));
        }
    }
    for way in [Way::Tcp, Way::SameHost] {
        table.print(way);
    }
    println!(
        "peak memory of the requester beyond its {} MiB of registered memory: {} MiB",
        ours.registered() >> 20,
        ours.peak_beyond_registered(raw::FOOTPRINT)? >> 20
    );
    Ok(())
}

/// Mooncake C++: its master, an owner, and a requester.
struct CppStore {
    requester: Node,
    _owner: Node,
    _master: Process,
}

impl CppStore {
    fn start(peer: &Installation) -> Result<Self> {
        let host = "10.213.0.1";
        let master = peer.master_with(52051, None, &[&format!("--default_kv_lease_ttl={LEASE_MS}")])?;
        let address = format!("{host}:52051");
        let mut owner = peer.node()?;
        owner.setup(&format!("{host}:17401"), "P2PHANDSHAKE", SEGMENT, 16 << 20, &address)?;
        let mut requester = peer.node()?;
        requester.setup(&format!("{host}:17402"), "P2PHANDSHAKE", 0, 16 << 20, &address)?;
        Ok(Self { requester, _owner: owner, _master: master })
    }

    /// Returns the median time of a cell in microseconds.
    fn median(&mut self, cell: Cell, prefix: &str, count: usize) -> Result<f64> {
        let answer = self.requester.call(match cell {
            Cell::Put(size) => json!(["bench_put", prefix, size, count]),
            Cell::Get(size) => json!(["bench_get", prefix, size, count]),
            Cell::Exist => json!(["bench_exist", prefix, count]),
            Cell::BatchExist(keys) => json!(["bench_batch_exist", prefix, keys, count]),
        })?;
        if answer[1] != Value::Bool(true) {
            return Err(format!("a call of Mooncake C++ failed in {cell:?}"));
        }
        answer[0].as_f64().ok_or_else(|| format!("invalid median of Mooncake C++: {answer}"))
    }

    fn clear(&mut self) -> Result<()> {
        self.requester.call(json!(["remove_all", true])).map(drop)
    }
}
