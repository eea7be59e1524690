//! Prints the hit rates of the eviction policies on a trace of the FAST'25 format.
//!
//! ```sh
//! cargo run --release -p mooncake-core --example hit_rates -- conversation_trace.jsonl
//! ```
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example prints to its terminal")]

use mooncake_core::evict::{BuiltinPolicy, PolicyKind};
use mooncake_core::testkit::simulate::{Belady, Calls, PolicyCache, hit_rate};

fn main() {
    let path = std::env::args().nth(1).expect("a trace");
    let text = std::fs::read_to_string(path).unwrap();
    let requests: Vec<Vec<u64>> = text.lines().map(|line| {
        let ids = line.split_once("\"hash_ids\": [").or_else(|| line.split_once("\"hash_ids\":[")).unwrap().1.split_once(']').unwrap().0;
        ids.split(',').map(|id| id.trim().parse().unwrap()).collect()
    }).collect();
    let sizes = [1000, 2000, 5000, 10_000, 20_000, 30_000, 60_000];
    let chains = || requests.iter().map(|r| &r[..]);
    let row = |name: &str, rate: &dyn Fn(usize) -> f64| {
        print!("{name:<24}");
        for size in sizes { print!(" {:.4}", rate(size)); }
        println!();
    };
    let of = |kind: PolicyKind, shards, calls| move |size: usize| hit_rate(&mut PolicyCache::<BuiltinPolicy>::new(&kind.into(), size, shards, calls), chains());
    let first = Calls { deepest_oldest: false, ..Calls::default() };
    row("lru", &of(PolicyKind::Lru, 1, first));
    row("lru deepest", &of(PolicyKind::Lru, 1, Calls::default()));
    row("fifo", &of(PolicyKind::Fifo, 1, first));
    row("s3fifo", &of(PolicyKind::S3Fifo, 1, first));
    row("tenure", &of(PolicyKind::Tenure, 1, first));
    row("gittins", &of(PolicyKind::Gittins, 1, Calls::default()));
    row("gittins 64", &of(PolicyKind::Gittins, 64, Calls::default()));
    row("gittins single", &of(PolicyKind::Gittins, 1, Calls { keys: 1, ..Calls::default() }));
    row("gittins 8", &of(PolicyKind::Gittins, 1, Calls { keys: 8, ..Calls::default() }));
    row("gittins 8 linked", &of(PolicyKind::Gittins, 1, Calls { keys: 8, linked: true, ..Calls::default() }));
    row("gittins single linked", &of(PolicyKind::Gittins, 1, Calls { keys: 1, linked: true, ..Calls::default() }));
    row("belady", &|size| hit_rate(&mut Belady::new(size, chains()), chains()));
}
