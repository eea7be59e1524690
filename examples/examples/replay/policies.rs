//! Hit ratios of the eviction policies: by exact simulation, beside Belady's bound and an unbounded
//! cache, and through a master.
//!
//! The simulated cache has no leases. Through the master, shards, leases, placement and eviction
//! are the real ones: the master is called in process, under a clock that follows the trace. Only
//! the bytes are left out.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::clock::ManualClock;
use mooncake_core::evict::{Fifo, Gittins, Lru, MergeableOrder, PolicyKind, S3Fifo, Tenure};
use mooncake_core::ids::{ClientId, SegmentId, Uuid};
use mooncake_core::replica::{ReplicaType, ReplicateConfig, Segment};
use mooncake_core::testkit::policies::{AdaptiveReplacement, Lirs, Sieve, TinyLfu, TwoQueue};
use mooncake_core::testkit::simulate::{Belady, Calls, PolicyCache, hit_rate};
use mooncake_core::{ErrorKind, Result};
use mooncake_store::master::{Master, MasterOptions};
use mooncake_store::protocol::call::Handle;
use mooncake_store::protocol::message::{BatchExistKey, BatchGetReplicaList, BatchPutEnd, BatchPutStart};
use mooncake_store::protocol::wire::EndItem;

use crate::args::Args;
use crate::hot_cache;
use crate::svg;
use crate::table::{Row, Table};
use crate::trace::{Request, Trace, key};

/// Maximum difference of the default policy from LRU. The policy is nowhere behind on the public
/// traces. On generated traces, where the recurring conversations are random, leases and chance
/// cost up to half a hundredth.
const SLACK: f64 = 0.01;

/// Longest time between two requests for the master, beyond a lease.
const LONGEST_PAUSE_MS: u64 = 300_000;

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
    println!("through the master: 64 shards, leases, puts that make room\n");
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
        let ratio = |size: &u64| ratio_of_master(args, *kind, *size, trace);
        let ratios: Vec<f64> = simulated.sizes.iter().map(ratio).collect::<Result<_>>()?;
        is_good &= !is_default || ratios.iter().zip(&exact).all(|(of, exact)| *of >= exact - SLACK);
        let name = format!("`{kind}`{}", if is_default { " (default)" } else { "" });
        rows.push(Row { name, ratios, is_bound: false });
    }
    rows.push(Row { name: "Belady".into(), ratios: simulated.ratios_of("Belady"), is_bound: true });
    Ok((Table { sizes: simulated.sizes.clone(), rows }, is_good))
}

/// Returns the hit ratio of a master with space for so many blocks.
pub(crate) fn ratio_of_master(args: &Args, kind: PolicyKind, room: u64, trace: &Trace) -> Result<f64> {
    let clock = Arc::new(ManualClock::new());
    let lease_ttl = args.lease_ms.map_or(MasterOptions::default().lease_ttl, Duration::from_millis);
    let options = MasterOptions { high_watermark: args.watermark, lease_ttl, ..MasterOptions::default() };
    let longest_pause = LONGEST_PAUSE_MS.saturating_add(lease_ttl.as_millis() as u64);
    let master: Master =
        Master::with_parts(options, &Default::default(), &kind.into(), clock.clone(), args.seed)?;
    let member = ClientId(Uuid::new(1, 1));
    master.mount(
        member,
        &Segment {
            id: SegmentId(Uuid::new(2, 1)),
            name: "member:1".into(),
            base: 1 << 40,
            size: room.saturating_mul(args.block_bytes),
            endpoint: "member:1".into(),
            protocol: "tcp".into(),
            host_id: "member".into(),
        },
    )?;
    let mut hits = 0;
    let mut now_ms = 0;
    for request in &trace.requests {
        now_ms = now_ms.max(request.timestamp.saturating_sub(longest_pause));
        while now_ms < request.timestamp {
            let step = (request.timestamp - now_ms).min(1000);
            clock.advance(Duration::from_millis(step));
            now_ms += step;
            master.ping(member);
            master.tick();
        }
        hits += one_request(&master, member, args.block_bytes, request)?;
    }
    Ok(hits as f64 / trace.blocks().0.max(1) as f64)
}

/// Handles one request like a client: looks all blocks up, reads the present prefix, puts the rest.
fn one_request(master: &Master, member: ClientId, len: u64, request: &Request) -> Result<u64> {
    let keys: Vec<Vec<u8>> = request.ids.iter().map(|&id| key(id)).collect();
    let keys: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
    let there = master.handle(BatchExistKey { keys: Cow::Borrowed(&keys), tenant: "" });
    let prefix = there.iter().take_while(|there| matches!(there, Ok(true))).count();
    let read = BatchGetReplicaList { keys: Cow::Borrowed(&keys[..prefix]), tenant: "" };
    master.handle(read).into_iter().collect::<Result<Vec<_>>>()?;
    let missing = &keys[prefix..];
    let started = master.handle(BatchPutStart {
        client: member,
        keys: Cow::Borrowed(missing),
        sizes: Cow::Owned(vec![len; missing.len()]),
        config: Cow::Owned(ReplicateConfig::default()),
        tenant: "",
    });
    let mut items = Vec::with_capacity(missing.len());
    for (key, started) in missing.iter().zip(started) {
        match started {
            Ok(_) => items.push(EndItem { key, checksum: None }),
            Err(error) if matches!(error.kind(), ErrorKind::AlreadyExists | ErrorKind::NoSpace) => {}
            Err(error) => return Err(error),
        }
    }
    let ended =
        BatchPutEnd { client: member, items: Cow::Borrowed(&items), replicas: ReplicaType::All, tenant: "" };
    master.handle(ended).into_iter().collect::<Result<Vec<_>>>()?;
    Ok(prefix as u64)
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

    #[test]
    fn a_master_finds_what_the_simulation_of_lru_finds() {
        let trace = Trace::generate(300, 6);
        // Without leases, and with the pause of a day.
        let args = Args::parse_from(["replay", "--policies", "--lease-ms", "0"]);
        let mut late = trace.clone();
        late.requests[150..].iter_mut().for_each(|request| request.timestamp += 86_400_000);
        for size in [300, 1000] {
            let master = ratio_of_master(&args, PolicyKind::Lru, size, &late).unwrap();
            let exact = by_use::<Lru>(&trace, size as usize, Calls::default());
            assert!((master - exact).abs() < 0.002, "{size}: {master} {exact}");
        }
    }
}
