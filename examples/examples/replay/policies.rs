//! Hit ratios of the eviction policies: by exact simulation, beside Belady's bound and an unbounded
//! cache, and through a master.
//!
//! The simulated cache has no leases. Through the master, shards, leases, placement and eviction
//! are the real ones.

use mooncake_core::Result;
use mooncake_core::evict::{Fifo, Gittins, Lru, MergeableOrder, PolicyKind, S3Fifo, Tenure};
use mooncake_core::testkit::policies::{AdaptiveReplacement, Lirs, Sieve, TinyLfu, TwoQueue};
use mooncake_core::testkit::simulate::{Belady, Calls, PolicyCache};

use crate::args::Args;
use crate::hot_cache;
use crate::master::MasterReplay;
use crate::svg;
use crate::table::{Row, Table};
use crate::trace::{HitRatios, Trace};

/// Maximum difference of the default policy from LRU. The policy is nowhere behind on the public
/// traces. On generated traces, where the recurring conversations are random, leases and chance
/// cost up to half a hundredth.
const SLACK: f64 = 0.01;

/// Sizes of memory in blocks, unless others are requested.
const SIZES: [u64; 4] = [1_000, 5_000, 10_000, 30_000];

/// Returns the hit ratios of a policy on a trace, with so many blocks of memory. Only a policy that
/// knows chains heeds the calls.
type Simulate = fn(&Trace, usize, Calls) -> HitRatios;

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
    simulated.print();
    if let Some(path) = &args.svg {
        std::fs::write(path, svg::chart(&simulated.by_blocks))
            .map_err(|e| format!("cannot write chart: {e}. path=\"{}\"", path.display()))?;
    }
    if args.simulation_only {
        return Ok(true);
    }
    println!("through the master: 64 shards, leases, puts that evict\n");
    let (through, is_good) = through_master(args, trace, &simulated).map_err(|e| e.to_string())?;
    through.print();
    if !is_good {
        println!("the default policy is behind LRU");
    }
    Ok(is_good)
}

/// Hit ratios of one policy, or of a bound, at each size.
struct MeasuredRow {
    name: String,
    ratios: Vec<HitRatios>,
    is_bound: bool,
}

/// Tables of the same rows.
struct Tables {
    by_blocks: Table,
    /// Table by the tokens of the prompts, if they are known.
    by_tokens: Option<Table>,
}

impl Tables {
    fn new(sizes: &[u64], rows: &[MeasuredRow]) -> Self {
        let table = |ratio: fn(&HitRatios) -> Option<f64>| {
            let row = |row: &MeasuredRow| {
                let ratios = row.ratios.iter().map(ratio).collect::<Option<Vec<f64>>>()?;
                Some(Row { name: row.name.clone(), ratios, is_bound: row.is_bound })
            };
            let rows = rows.iter().map(row).collect::<Option<Vec<Row>>>()?;
            Some(Table { sizes: sizes.to_vec(), rows })
        };
        let by_blocks = table(|of| Some(of.blocks));
        Self {
            by_blocks: by_blocks.unwrap_or_else(|| Table { sizes: sizes.to_vec(), rows: Vec::new() }),
            by_tokens: table(|of| of.tokens),
        }
    }

    fn print(&self) {
        println!("{}", self.by_blocks);
        if let Some(table) = &self.by_tokens {
            println!("by tokens of the prompts; Belady is the best by blocks\n\n{table}");
        }
    }

    /// Returns a row of both tables under another name.
    fn bound(&self, row: &str, name: &str) -> MeasuredRow {
        let tokens = self.by_tokens.as_ref().map(|table| table.ratios_of(row));
        let blocks = self.by_blocks.ratios_of(row).into_iter().enumerate();
        let ratios = |(at, blocks)| HitRatios { blocks, tokens: tokens.as_ref().map(|of| of[at]) };
        MeasuredRow { name: name.into(), ratios: blocks.map(ratios).collect(), is_bound: true }
    }
}

fn simulate_all(args: &Args, trace: &Trace, sizes: Vec<u64>) -> Tables {
    let calls = Calls {
        keys: args.call_keys.map_or(usize::MAX, |keys| keys as usize),
        linked: args.link_calls,
        ..Calls::default()
    };
    let at_each = |ratios: &dyn Fn(usize) -> HitRatios| {
        sizes.iter().map(|size| ratios(*size as usize)).collect::<Vec<_>>()
    };
    let mut rows: Vec<MeasuredRow> = Vec::new();
    for (name, simulate) in SIMULATED {
        let ratios = at_each(&|size| simulate(trace, size, calls));
        rows.push(MeasuredRow { name: format!("`{name}`"), ratios, is_bound: false });
    }
    let belady = at_each(&|size| trace.hit_ratios(&mut Belady::new(size, trace.chains())));
    rows.push(MeasuredRow { name: "Belady".into(), ratios: belady, is_bound: true });
    let endless = unbounded(trace);
    rows.push(MeasuredRow { name: "unbounded".into(), ratios: at_each(&|_| endless), is_bound: true });
    Tables::new(&sizes, &rows)
}

/// Simulates a policy that gets the blocks of a request one after the other, from the first on.
fn by_use<P: MergeableOrder>(trace: &Trace, blocks: usize, _: Calls) -> HitRatios {
    simulate::<P>(trace, blocks, 1, Calls { deepest_oldest: false, ..Calls::default() })
}

fn simulate<P: MergeableOrder>(trace: &Trace, blocks: usize, shards: usize, calls: Calls) -> HitRatios {
    trace.hit_ratios(&mut PolicyCache::<P>::new(&P::Config::default(), blocks, shards, calls))
}

/// Returns the share of the blocks that an unbounded cache finds.
pub(crate) fn endless(trace: &Trace) -> f64 {
    unbounded(trace).blocks
}

fn unbounded(trace: &Trace) -> HitRatios {
    by_use::<Lru>(trace, trace.blocks().1.max(1) as usize, Calls::default())
}

/// Returns the tables of the policies of the master, with `lru` and Belady of the simulation, and
/// whether the default policy kept up with that LRU.
fn through_master(args: &Args, trace: &Trace, simulated: &Tables) -> Result<(Tables, bool)> {
    let sizes = &simulated.by_blocks.sizes;
    let exact = simulated.bound("`lru`", "exact LRU");
    let mut is_good = true;
    let mut rows = Vec::new();
    for kind in PolicyKind::ALL {
        let is_default = *kind == PolicyKind::default();
        let shares = |size: &u64| {
            MasterReplay { policy: *kind, blocks: *size, clients: 1, loss: None }.shares(args, trace)
        };
        let shares: Vec<_> = sizes.iter().map(shares).collect::<Result<_>>()?;
        if is_default {
            let behind: Vec<_> = shares.iter().map(|of| format!("{:.4}", of.behind_gap)).collect();
            println!("in memory behind a gap through the master, `{kind}`: {}", behind.join(", "));
        }
        let ratios: Vec<HitRatios> = shares.iter().map(|of| of.hits).collect();
        let pairs = || ratios.iter().zip(&exact.ratios);
        is_good &= !is_default || pairs().all(|(of, exact)| of.blocks >= exact.blocks - SLACK);
        let name = format!("`{kind}`{}", if is_default { " (default)" } else { "" });
        rows.push(MeasuredRow { name, ratios, is_bound: false });
    }
    rows.insert(0, exact);
    rows.push(simulated.bound("Belady", "Belady"));
    Ok((Tables::new(sizes, &rows), is_good))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[test]
    fn no_policy_finds_more_than_belady() {
        let trace = Trace::generate(300, 5);
        let args = Args::parse_from(["replay", "--policies"]);
        let tables = simulate_all(&args, &trace, vec![100, 400, 100_000]);
        assert!(tables.by_tokens.is_none(), "no tokens are known");
        let table = tables.by_blocks;
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
