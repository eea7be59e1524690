//! Hit ratio of a master that is called in process, under a clock that follows the trace. Only the
//! bytes are left out.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::clock::ManualClock;
use mooncake_core::evict::PolicyKind;
use mooncake_core::ids::{ClientId, SegmentId, Uuid};
use mooncake_core::replica::{Replica, ReplicaList, ReplicaLocation, ReplicaType, ReplicateConfig, Segment};
use mooncake_core::{ErrorKind, Result};
use mooncake_store::master::{Master, MasterOptions, MissCause};
use mooncake_store::protocol::call::Handle;
use mooncake_store::protocol::message::{BatchExistKey, BatchGetReplicaList, BatchPutEnd, BatchPutStart};
use mooncake_store::protocol::wire::EndItem;

use crate::args::Args;
use crate::trace::{HitRatios, Request, Trace, key};

/// Longest time between two requests, beyond a lease.
const LONGEST_PAUSE: Duration = Duration::from_secs(300);
/// Time between two heartbeats.
const BEAT: Duration = Duration::from_secs(1);

/// Replay through a master.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MasterReplay {
    pub(crate) policy: PolicyKind,
    /// Blocks that all clients hold together.
    pub(crate) blocks: u64,
    pub(crate) clients: u16,
    pub(crate) loss: Option<Loss>,
}

/// Loss of a client with its blocks. Another one replaces it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Loss {
    /// Number of requests before it.
    pub(crate) after: usize,
    /// Time in the trace until the master gives up the client.
    pub(crate) silence: Duration,
    /// True if the client holds the block that most requests begin with. Until the master has given
    /// the client up, those requests find nothing then.
    pub(crate) with_root: bool,
}

/// Shares of the blocks that were asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shares {
    pub(crate) hits: HitRatios,
    /// Blocks in memory that an earlier block of the request was missing for.
    pub(crate) behind_gap: f64,
}

impl MasterReplay {
    /// Returns the hit ratio.
    ///
    /// # Errors
    ///
    /// If a call of the master fails for another reason than the lack of space.
    pub(crate) fn hit_ratio(self, args: &Args, trace: &Trace) -> Result<f64> {
        self.shares(args, trace).map(|shares| shares.hits.blocks)
    }

    /// Returns the hit ratio and the share of blocks that were in memory in vain.
    ///
    /// # Errors
    ///
    /// Those of [`hit_ratio`](Self::hit_ratio).
    pub(crate) fn shares(self, args: &Args, trace: &Trace) -> Result<Shares> {
        let lease_ttl = args.lease_ms.map_or(MasterOptions::default().lease_ttl, Duration::from_millis);
        let client_ttl = self.loss.map_or(MasterOptions::default().client_ttl, |l| l.silence.max(3 * BEAT));
        let options =
            MasterOptions { high_watermark: args.watermark, lease_ttl, client_ttl, ..Default::default() };
        let clock = Arc::new(ManualClock::new());
        let master: Master =
            Master::with_parts(options, &Default::default(), &self.policy.into(), clock.clone(), args.seed)?;
        let mut members = Members { master: &master, present: Vec::new(), lost: None };
        let bytes = self.blocks.div_ceil(self.clients.into()).saturating_mul(args.block_bytes);
        for number in 1..=self.clients {
            members.join(number, bytes)?;
        }
        let longest_pause = LONGEST_PAUSE.saturating_add(lease_ttl).as_millis() as u64;
        let (mut hits, mut tokens, mut now_ms) = (0, 0, 0);
        for (index, request) in trace.requests.iter().enumerate() {
            now_ms = now_ms.max(request.timestamp.saturating_sub(longest_pause));
            while now_ms < request.timestamp {
                let step = (request.timestamp - now_ms).min(BEAT.as_millis() as u64);
                clock.advance(Duration::from_millis(step));
                now_ms += step;
                members.ping();
                master.tick();
            }
            if let Some(loss) = self.loss.filter(|loss| loss.after == index) {
                members.lose_one(trace.root(), loss.with_root);
                members.join(self.clients + 1, bytes)?;
            }
            let found = members.request(index, args.block_bytes, request)?;
            hits += found;
            tokens += trace.found_tokens(index, found as usize);
        }
        let behind_gap = master.stats().misses.of(MissCause::BehindGap);
        let hits = trace.shares_of(hits, tokens);
        Ok(Shares { hits, behind_gap: trace.shares_of(behind_gap, 0).blocks })
    }
}

/// Clients of a master.
struct Members<'m> {
    master: &'m Master,
    present: Vec<u16>,
    lost: Option<u16>,
}

fn id(number: u16) -> ClientId {
    ClientId(Uuid::new(1, number.into()))
}

fn endpoint(number: u16) -> String {
    format!("member:{number}")
}

impl Members<'_> {
    /// Adds a client with so much memory.
    fn join(&mut self, number: u16, size: u64) -> Result<()> {
        self.present.push(number);
        let segment = Segment {
            id: SegmentId(Uuid::new(2, number.into())),
            name: endpoint(number),
            base: 1 << 40,
            size,
            endpoint: endpoint(number),
            protocol: "tcp".into(),
            host_id: endpoint(number),
            locality: None,
        };
        self.master.mount(id(number), &segment)
    }

    fn ping(&self) {
        for number in &self.present {
            self.master.ping(id(*number));
        }
    }

    /// Ends the heartbeats of a client that holds the block `root`, or of one that does not.
    /// Another one reports that it does not respond.
    fn lose_one(&mut self, root: Option<u64>, with_root: bool) {
        let replicas = root.and_then(|root| self.master.peek(&key(root)).ok()).unwrap_or_default();
        let holds = |number: u16| is_at(&replicas, &endpoint(number));
        let lost = self.present.iter().rposition(|number| holds(*number) == with_root);
        let lost = lost.or(self.present.len().checked_sub(1));
        self.lost = lost.map(|at| self.present.remove(at));
        if let (Some(lost), Some(other)) = (self.lost, self.present.first()) {
            self.master.report_unreachable(id(*other), &endpoint(lost));
        }
    }

    /// Handles one request like a client: looks all blocks up, reads the present prefix, puts the
    /// rest. Returns the number of blocks read.
    fn request(&self, index: usize, len: u64, request: &Request) -> Result<u64> {
        let client = id(self.present[index % self.present.len()]);
        let keys: Vec<Vec<u8>> = request.ids.iter().map(|&id| key(id)).collect();
        let keys: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
        let there = self.master.handle(BatchExistKey { keys: Cow::Borrowed(&keys), tenant: "" });
        let prefix = there.iter().take_while(|there| matches!(there, Ok(true))).count();
        let read = BatchGetReplicaList { keys: Cow::Borrowed(&keys[..prefix]), tenant: "" };
        let lists = self.master.handle(read).into_iter().collect::<Result<Vec<_>>>()?;
        let hits = lists.iter().take_while(|list| self.is_readable(list)).count();
        let missing = &keys[hits..];
        let started = self.master.handle(BatchPutStart {
            client,
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
            BatchPutEnd { client, items: Cow::Borrowed(&items), replicas: ReplicaType::All, tenant: "" };
        self.master.handle(ended).into_iter().collect::<Result<Vec<_>>>()?;
        Ok(hits as u64)
    }

    fn is_readable(&self, list: &ReplicaList) -> bool {
        let Some(lost) = self.lost.map(endpoint) else { return true };
        list.replicas.iter().any(|replica| match &replica.location {
            ReplicaLocation::Memory(memory) => memory.endpoint != lost,
            _ => true,
        })
    }
}

/// Returns whether one of the replicas is in the memory at an endpoint.
pub(crate) fn is_at(replicas: &[Replica], endpoint: &str) -> bool {
    let memory = replicas.iter().filter_map(|replica| replica.location.memory());
    memory.into_iter().any(|memory| memory.endpoint == endpoint)
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use mooncake_core::evict::Lru;
    use mooncake_core::testkit::simulate::{Calls, PolicyCache, hit_rate};

    use super::*;

    fn exact(trace: &Trace, blocks: u64) -> f64 {
        let calls = Calls { deepest_oldest: false, ..Calls::default() };
        hit_rate(&mut PolicyCache::<Lru>::new(&Default::default(), blocks as usize, 1, calls), trace.chains())
    }

    #[test]
    fn a_master_finds_what_the_simulation_of_lru_finds() {
        let trace = Trace::generate(300, 6);
        // Without leases, and with the pause of a day.
        let args = Args::parse_from(["replay", "--policies", "--lease-ms", "0"]);
        let mut late = trace.clone();
        late.requests[150..].iter_mut().for_each(|request| request.timestamp += 86_400_000);
        for (blocks, clients) in [(300, 1), (1000, 1), (900, 3)] {
            let replay = MasterReplay { policy: PolicyKind::Lru, blocks, clients, loss: None };
            let (master, exact) = (replay.hit_ratio(&args, &late).unwrap(), exact(&trace, blocks));
            assert!((master - exact).abs() < 0.002, "{blocks}: {master} {exact}");
        }
    }

    #[test]
    fn the_blocks_of_a_lost_client_are_missed() {
        // The same four blocks again and again, and space for twelve.
        let trace = Trace::with_pauses(vec![vec![1, 2, 3, 4]; 100]);
        let args = Args::parse_from(["replay"]);
        let ratio = |loss| {
            let replay = MasterReplay { policy: PolicyKind::Lru, blocks: 12, clients: 2, loss };
            (replay.hit_ratio(&args, &trace).unwrap() * 400.0).round() as u64
        };
        assert_eq!(ratio(None), 396);
        let silent =
            |seconds, with_root| Some(Loss { after: 50, silence: Duration::from_secs(seconds), with_root });
        // A request each 0.294 s.
        let [soon, late] = [3, 6].map(|seconds| ratio(silent(seconds, false)));
        assert!(late <= soon && soon < 396, "{late} {soon}");
        let [rootless, late] = [3, 6].map(|seconds| ratio(silent(seconds, true)));
        assert!(late < rootless && rootless < soon, "{late} {rootless} {soon}");
        assert!(late <= 396 - 4 * 6000 / 294, "no request finds anything for six seconds: {late}");
    }
}
