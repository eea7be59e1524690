//! Prints the hit rates of the eviction policies by exact simulation: on a trace of the FAST'25
//! format (JSON lines with `hash_ids`), or on made workloads.
//!
//! ```sh
//! cargo run --release -p mooncake-core --example hit_rates -- conversation_trace.jsonl
//! cargo run --release -p mooncake-core --example hit_rates
//! ```
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example prints to its terminal")]

use std::process::ExitCode;

use mooncake_core::evict::{BuiltinPolicy, PolicyKind};
use mooncake_core::testkit::simulate::{Belady, Calls, PolicyCache, hit_rate};
use mooncake_core::testkit::workloads::{self, Requests};

fn main() -> ExitCode {
    match std::env::args().nth(1) {
        None => {
            for (name, requests) in made() {
                println!("\n{name}");
                compare(&requests, &[1000, 5000, 10_000, 20_000]);
            }
        }
        Some(path) => match std::fs::read_to_string(&path).map_err(|e| e.to_string()).and_then(|t| parse(&t))
        {
            Ok(requests) => {
                compare(&requests, &[1000, 2000, 5000, 10_000, 20_000, 30_000, 60_000]);
                compare_calls(&requests, &[1000, 5000, 10_000, 20_000, 30_000]);
            }
            Err(error) => {
                eprintln!("cannot read trace: {error}. path={path}");
                return ExitCode::FAILURE;
            }
        },
    }
    ExitCode::SUCCESS
}

/// Returns the block ids of each request.
fn parse(text: &str) -> Result<Requests, String> {
    let ids = |line: &str| {
        let list = line.split_once("\"hash_ids\"")?.1.split_once('[')?.1.split_once(']')?.0;
        let ids = list.split(',').map(str::trim).filter(|id| !id.is_empty());
        ids.map(|id| id.parse().ok()).collect::<Option<Vec<u64>>>()
    };
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    lines.map(|(at, line)| ids(line).ok_or_else(|| format!("no hash_ids in line {}", at + 1))).collect()
}

fn made() -> Vec<(&'static str, Requests)> {
    const USES: usize = 400_000;
    vec![
        ("uniform, 30,000 keys", workloads::uniform(30_000, USES, 1)),
        ("Zipf 0.8, 100,000 keys", workloads::zipf(0.8, 100_000, USES, 2)),
        ("Zipf 1.0, 100,000 keys", workloads::zipf(1.0, 100_000, USES, 3)),
        ("Zipf 0.9, a quarter scans", workloads::zipf_with_scans(0.9, 100_000, USES, 4)),
        ("Zipf 1.0, moving", workloads::moving_zipf(1.0, 100_000, 50_000, USES, 5)),
        ("loop over 12,000 keys", workloads::chain_loop(12_000, 1, USES as u64)),
        ("loop over 750 chains of 16", workloads::chain_loop(750, 16, USES as u64)),
        ("documents by Zipf 0.9", workloads::documents(0.9, 10_000, USES, 6)),
        ("conversations by chance", workloads::conversations(12_000, 7)),
    ]
}

fn compare(requests: &Requests, sizes: &[usize]) {
    let by_use = Calls { deepest_oldest: false, ..Calls::default() };
    print_row("blocks", sizes, |size| size as f64);
    for kind in [PolicyKind::Lru, PolicyKind::Fifo, PolicyKind::S3Fifo, PolicyKind::Tenure] {
        print_row(&kind.to_string(), sizes, |size| rate(kind, requests, size, 1, by_use));
    }
    for (name, shards) in [("gittins", 1), ("gittins, 64 shards", 64)] {
        print_row(name, sizes, |size| rate(PolicyKind::Gittins, requests, size, shards, Calls::default()));
    }
    let belady = |size| hit_rate(&mut Belady::new(size, chains(requests)), chains(requests));
    print_row("Belady", sizes, belady);
    print_row("gap closed", sizes, |size| {
        let lru = rate(PolicyKind::Lru, requests, size, 1, by_use);
        let gittins = rate(PolicyKind::Gittins, requests, size, 1, Calls::default());
        let gap = belady(size) - lru;
        if gap > 0.0 { (gittins - lru) / gap } else { 0.0 }
    });
}

fn compare_calls(requests: &Requests, sizes: &[usize]) {
    println!("\ngittins, chains cut into calls");
    for (name, keys, linked) in [
        ("calls of 1", 1, false),
        ("calls of 8", 8, false),
        ("calls of 32", 32, false),
        ("calls of 1, linked", 1, true),
        ("calls of 8, linked", 8, true),
    ] {
        let calls = Calls { keys, linked, ..Calls::default() };
        print_row(name, sizes, |size| rate(PolicyKind::Gittins, requests, size, 1, calls));
    }
}

fn chains(requests: &Requests) -> impl Iterator<Item = &[u64]> {
    requests.iter().map(|chain| &chain[..])
}

fn rate(kind: PolicyKind, requests: &Requests, size: usize, shards: usize, calls: Calls) -> f64 {
    let mut cache = PolicyCache::<BuiltinPolicy>::new(&kind.into(), size, shards, calls);
    hit_rate(&mut cache, chains(requests))
}

fn print_row(name: &str, sizes: &[usize], value: impl Fn(usize) -> f64) {
    print!("{name:<20}");
    for size in sizes {
        match value(*size) {
            value if value >= 2.0 => print!(" {value:>7}"),
            value => print!(" {value:>7.4}"),
        }
    }
    println!();
}
