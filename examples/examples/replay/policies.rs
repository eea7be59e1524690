//! Hit ratios of the eviction policies: by exact simulation, beside Belady's bound and an unbounded
//! cache, and through a master.
//!
//! The simulated cache has no leases. Through the master, shards, leases, placement and eviction
//! are the real ones.

use mooncake_core::Result;
use mooncake_core::evict::{Fifo, Gittins, Lru, MergeableOrder, PolicyKind, S3Fifo, Tenure};
use mooncake_core::testkit::policies::{AdaptiveReplacement, Lirs, Sieve, TinyLfu, TwoQueue};
use mooncake_core::testkit::simulate::{Belady, Calls, PolicyCache, hit_rate};

use crate::args::Args;
use crate::hot_cache;
use crate::master::MasterReplay;
use crate::svg;
use crate::table::{Row, Table};
use crate::trace::Trace;

/// Maximum difference of the default policy from LRU. The policy is nowhere behind on the public
/// traces. On generated traces, where the recurring conversations are random, leases and chance
/// cost up to half a hundredth.
const SLACK: f64 = 0.01;

/// Sizes of memory in blocks, unless others are requested.
const SIZES: [u64; 4] = [1_000, 5_000, 10_000, 30_000];

/// Returns the hit ratio of a policy on a trace, with so many blocks of memory. Only a policy that
/// knows chains heeds the calls.
type Simulate = fn(&Trace, usize, Calls) -> f64;

const SIMULATED: [(&str, Simulate); 11] = [
    ("lru", by_use::<Lru>),
    ("fifo", by_use::<Fifo>),
    ("s3fifo", by_use::<S3Fifo>),
    ("sieve", by_use::<Sieve>),
    ("arc", by_use::<AdaptiveReplacement>),
    ("2q", by_use::<TwoQueue>),
    ("lirs", by_use::<Lirs>),
    ("w-tinylfu", by_use::<TinyLfu>),
    ("tenure", by_use::<Tenure>),
    ("gittins", |trace, blocks, calls| simulate::<Gittins>(trace, blocks, 1, calls)),
    ("gittins, 64 shards", |trace, blocks, calls| simulate::<Gittins>(trace, blocks, 64, calls)),
];

/// Prints the tables, and draws the first one if requested. Returns whether the default policy kept
/// up with LRU at each size.
pub(crate) fn compare(args: &Args, trace: &Trace) -> std::result::Result<bool, String> {
    let mut sizes = if args.blocks.is_empty() { SIZES.to_vec() } else { args.blocks.clone() };
    sizes.sort_unstable();
    sizes.dedup();
    let (blocks, distinct) = trace.blocks();
    println!("{} requests, {blocks} blocks, {distinct} distinct", trace.requests.len());
    if args.hot_cache {
        println!("share of the reads that the hot cache of one client serves\n");
        println!("{}", hot_cache::compare(trace, &sizes));
        return Ok(true);
    }
    println!("share of blocks found, one lookup of the longest cached prefix per request");
    println!("in brackets: share of the gap between `lru` and Belady that a policy closes\n");
    println!("exact simulation\n");
    let simulated = simulate_all(args, trace, sizes);
    println!("{simulated}");
    if let Some(path) = &args.svg {
        std::fs::write(path, svg::chart(&simulated))
            .map_err(|e| format!("cannot write chart: {e}. path=\"{}\"", path.display()))?;
    }
    if args.simulation_only {
        return Ok(true);
    }
    println!("through the master: 64 shards, leases, puts that evict\n");
    let (through, is_good) = through_master(args, trace, &simulated).map_err(|e| e.to_string())?;
    println!("{through}");
    if !is_good {
        println!("the default policy is behind LRU");
    }
    Ok(is_good)
}

fn simulate_all(args: &Args, trace: &Trace, sizes: Vec<u64>) -> Table {
    let calls = Calls {
        keys: args.call_keys.map_or(usize::MAX, |keys| keys as usize),
        linked: args.link_calls,
        ..Calls::default()
    };
    let at_each = |ratio: &dyn Fn(usize) -> f64| sizes.iter().map(|size| ratio(*size as usize)).collect();
    let mut rows: Vec<Row> = Vec::new();
    for (name, simulate) in SIMULATED {
        let ratios = at_each(&|size| simulate(trace, size, calls));
        rows.push(Row { name: format!("`{name}`"), ratios, is_bound: false });
    }
    let belady = at_each(&|size| hit_rate(&mut Belady::new(size, trace.chains()), trace.chains()));
    rows.push(Row { name: "Belady".into(), ratios: belady, is_bound: true });
    let endless = endless(trace);
    rows.push(Row { name: "unbounded".into(), ratios: at_each(&|_| endless), is_bound: true });
    Table { sizes, rows }
}

/// Simulates a policy that gets the blocks of a request one after the other, from the first on.
fn by_use<P: MergeableOrder>(trace: &Trace, blocks: usize, _: Calls) -> f64 {
    simulate::<P>(trace, blocks, 1, Calls { deepest_oldest: false, ..Calls::default() })
}

fn simulate<P: MergeableOrder>(trace: &Trace, blocks: usize, shards: usize, calls: Calls) -> f64 {
    hit_rate(&mut PolicyCache::<P>::new(&P::Config::default(), blocks, shards, calls), trace.chains())
}

/// Returns the share of the blocks that an unbounded cache finds.
pub(crate) fn endless(trace: &Trace) -> f64 {
    by_use::<Lru>(trace, trace.blocks().1.max(1) as usize, Calls::default())
}

/// Returns the table of the policies of the master, with `lru` and Belady of the simulation, and
/// whether the default policy kept up with that LRU.
fn through_master(args: &Args, trace: &Trace, simulated: &Table) -> Result<(Table, bool)> {
    let exact = simulated.ratios_of("`lru`");
    let mut rows = vec![Row { name: "exact LRU".into(), ratios: exact.clone(), is_bound: true }];
    let mut is_good = true;
    for kind in PolicyKind::ALL {
        let is_default = *kind == PolicyKind::default();
        let shares = |size: &u64| {
            MasterReplay { policy: *kind, blocks: *size, clients: 1, loss: None }.shares(args, trace)
        };
        let shares: Vec<_> = simulated.sizes.iter().map(shares).collect::<Result<_>>()?;
        if is_default {
            let behind: Vec<_> = shares.iter().map(|of| format!("{:.4}", of.behind_gap)).collect();
            println!("in memory behind a gap through the master, `{kind}`: {}", behind.join(", "));
        }
        let ratios: Vec<f64> = shares.iter().map(|of| of.hits).collect();
        is_good &= !is_default || ratios.iter().zip(&exact).all(|(of, exact)| *of >= exact - SLACK);
        let name = format!("`{kind}`{}", if is_default { " (default)" } else { "" });
        rows.push(Row { name, ratios, is_bound: false });
    }
    rows.push(Row { name: "Belady".into(), ratios: simulated.ratios_of("Belady"), is_bound: true });
    Ok((Table { sizes: simulated.sizes.clone(), rows }, is_good))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[test]
    fn no_policy_finds_more_than_belady() {
        let trace = Trace::generate(300, 5);
        let args = Args::parse_from(["replay", "--policies"]);
        let table = simulate_all(&args, &trace, vec![100, 400, 100_000]);
        assert_eq!(table.rows.len(), SIMULATED.len() + 2);
        let (belady, unbounded) = (table.ratios_of("Belady"), table.ratios_of("unbounded"));
        for row in table.rows.iter().filter(|row| row.name != "unbounded") {
            for (at, ratio) in row.ratios.iter().enumerate() {
                assert!(*ratio <= belady[at] && *ratio <= unbounded[at], "{} {ratio}", row.name);
            }
            assert_eq!(row.ratios[2], unbounded[2], "everything fits for {}", row.name);
        }
        assert!(belady[0] < belady[1] && belady[1] < belady[2]);
    }
}
