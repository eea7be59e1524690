//! Hit rates of the eviction policies, beside exact LRU, Belady's bound and an unbounded cache. The
//! last column is the share of the gap between LRU and Belady that the best policy closes.
//!
//! The master itself runs the policy, called in process under a clock that follows the trace.
//! Shards, leases, placement and eviction are the real ones; only the bytes are left out.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::clock::ManualClock;
use mooncake_core::evict::PolicyKind;
use mooncake_core::ids::{ClientId, SegmentId, Uuid};
use mooncake_core::replica::{ReplicaType, ReplicateConfig, Segment};
use mooncake_core::testkit::simulate::{Belady, hit_rate};
use mooncake_core::{ErrorKind, Result};
use mooncake_store::master::{Master, MasterOptions};
use mooncake_store::protocol::call::Handle;
use mooncake_store::protocol::message::{BatchExistKey, BatchGetReplicaList, BatchPutEnd, BatchPutStart};
use mooncake_store::protocol::wire::EndItem;

use crate::args::Args;
use crate::trace::{Request, Trace, key};

/// Maximum difference of the default policy from exact LRU. The policy is nowhere behind on the
/// public traces. On generated traces, where the recurring conversations are random, leases and
/// chance cost up to half a hundredth.
const SLACK: f64 = 0.01;

/// Prints a table. Returns whether the default policy kept up with exact LRU in each row.
pub(crate) fn compare(args: &Args, trace: &Trace) -> std::result::Result<bool, String> {
    let (blocks, distinct) = trace.blocks();
    let rate = |hits: u64| hits as f64 / blocks as f64;
    println!("{} requests, {blocks} blocks, {distinct} distinct", trace.requests.len());
    println!("share of blocks found, one lookup of the longest cached prefix per request\n");
    let mut header: Vec<String> = vec!["blocks of memory".into(), "exact LRU".into()];
    for kind in PolicyKind::ALL {
        let default = if *kind == PolicyKind::default() { " (default)" } else { "" };
        header.push(format!("`{kind}`{default}"));
    }
    header.extend(["Belady".into(), "unbounded".into(), "gap closed".into()]);
    println!("| {} |\n|{}", header.join(" | "), "---|".repeat(header.len()));
    let endless = endless(trace);
    let mut good = true;
    for &room in &args.blocks {
        let exact = rate(ExactLru::new(room).replay(trace));
        let mut row = vec![room.to_string(), format!("{exact:.4}")];
        let chains = || trace.requests.iter().map(|request| &request.hash_ids[..]);
        let belady = hit_rate(&mut Belady::new(room as usize, chains()), chains());
        let mut best = exact;
        for kind in PolicyKind::ALL {
            let reached = rate(replay(args, *kind, room, trace).map_err(|e| e.to_string())?);
            best = best.max(reached);
            row.push(format!("{reached:.4}"));
            good &= *kind != PolicyKind::default() || reached >= exact - SLACK;
        }
        row.extend([format!("{belady:.4}"), format!("{endless:.4}")]);
        row.push(match belady - exact {
            gap if gap > 0.0 => format!("{:.0} %", 100.0 * (best - exact) / gap),
            _ => "-".into(),
        });
        println!("| {} |", row.join(" | "));
    }
    if !good {
        println!("\nthe default policy is behind exact LRU");
    }
    Ok(good)
}

/// Returns the share of the blocks that an unbounded cache finds.
pub(crate) fn endless(trace: &Trace) -> f64 {
    ExactLru::new(u64::MAX).replay(trace) as f64 / trace.blocks().0.max(1) as f64
}

/// Returns the hits of a master with space for so many blocks.
fn replay(args: &Args, kind: PolicyKind, room: u64, trace: &Trace) -> Result<u64> {
    let clock = Arc::new(ManualClock::new());
    let options = MasterOptions {
        high_watermark: args.watermark,
        lease_ttl: args.lease_ms.map_or(MasterOptions::default().lease_ttl, Duration::from_millis),
        ..MasterOptions::default()
    };
    let master: Master =
        Master::with_parts(options, &Default::default(), &kind.into(), clock.clone(), args.seed)?;
    let member = ClientId(Uuid::new(1, 1));
    master.mount(
        member,
        &Segment {
            id: SegmentId(Uuid::new(2, 1)),
            name: "member:1".into(),
            base: 1 << 40,
            size: room * args.block_bytes,
            endpoint: "member:1".into(),
            protocol: "tcp".into(),
            host_id: "member".into(),
        },
    )?;
    let mut hits = 0;
    let mut now_ms = 0;
    for request in &trace.requests {
        while now_ms < request.timestamp {
            let step = (request.timestamp - now_ms).min(1000);
            clock.advance(Duration::from_millis(step));
            now_ms += step;
            master.ping(member);
            master.tick();
        }
        hits += one_request(&master, member, args.block_bytes, request)?;
    }
    Ok(hits)
}

/// Handles one request like a client: looks all blocks up, reads the present prefix, puts the rest.
fn one_request(master: &Master, member: ClientId, len: u64, request: &Request) -> Result<u64> {
    let keys: Vec<Vec<u8>> = request.hash_ids.iter().map(|&id| key(id)).collect();
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

/// Exact LRU: one order over all blocks, without leases.
struct ExactLru {
    room: u64,
    used: HashMap<u64, u64>,
    order: BTreeMap<u64, u64>,
    uses: u64,
}

impl ExactLru {
    fn new(room: u64) -> Self {
        Self { room, used: HashMap::new(), order: BTreeMap::new(), uses: 0 }
    }

    /// Returns the hits of a whole trace.
    fn replay(&mut self, trace: &Trace) -> u64 {
        let mut hits = 0;
        for Request { hash_ids, .. } in &trace.requests {
            hits += hash_ids.iter().take_while(|id| self.used.contains_key(id)).count() as u64;
            hash_ids.iter().for_each(|id| self.use_block(*id));
        }
        hits
    }

    fn use_block(&mut self, id: u64) {
        self.uses += 1;
        if let Some(before) = self.used.insert(id, self.uses) {
            self.order.remove(&before);
        } else if self.used.len() as u64 > self.room
            && let Some((_, oldest)) = self.order.pop_first()
        {
            self.used.remove(&oldest);
        }
        self.order.insert(self.uses, id);
    }
}
