//! Master under a manual clock, and short calls of it.

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::clock::ManualClock;
use mooncake_core::error::ErrorCode;
use mooncake_core::evict::PolicyKind;
use mooncake_core::ids::{ClientId, SegmentId, Uuid};
use mooncake_core::replica::{Replica, ReplicaList, ReplicaType, ReplicateConfig, Segment};
use mooncake_store::api::WriteMode;
use mooncake_store::master::{Master, MasterOptions, Put, Writer};

pub(crate) const KIB: u64 = 1024;
pub(crate) const MIB: u64 = 1024 * KIB;

pub(crate) struct Rig {
    pub(crate) clock: Arc<ManualClock>,
    pub(crate) master: Master,
}

impl Rig {
    pub(crate) fn new() -> Self {
        Self::with(MasterOptions::default())
    }

    pub(crate) fn with(options: MasterOptions) -> Self {
        Self::with_policy(options, PolicyKind::default())
    }

    pub(crate) fn with_policy(options: MasterOptions, policy: PolicyKind) -> Self {
        let clock = Arc::new(ManualClock::new());
        let master =
            Master::with_parts(options, &Default::default(), &policy.into(), clock.clone(), 7).unwrap();
        Self { clock, master }
    }

    /// Returns a master that evicts only when a put finds no free space.
    pub(crate) fn without_watermark() -> Self {
        Self::with(MasterOptions { high_watermark: 1.0, ..MasterOptions::default() })
    }

    /// Moves the clock and ticks.
    pub(crate) fn pass(&self, seconds: f64) {
        self.clock.advance(Duration::from_secs_f64(seconds));
        self.master.tick();
    }

    /// Moves the clock as `pass` does, while the clients of segments 1 to 19 send heartbeats.
    pub(crate) fn alive_for(&self, seconds: f64) {
        let mut left = Duration::from_secs_f64(seconds);
        while !left.is_zero() {
            let step = left.min(Duration::from_secs(1));
            self.clock.advance(step);
            left -= step;
            (1..20).for_each(|number| {
                let _ = self.master.ping(client(number));
            });
            self.master.tick();
        }
    }

    pub(crate) fn mount(&self, number: u64, size: u64) -> Segment {
        let segment = segment(number, size);
        self.master.mount(client(number), &segment).unwrap();
        segment
    }

    pub(crate) fn start(&self, who: u64, key: &str, len: u64) -> Result<Vec<Replica>, ErrorCode> {
        self.start_with(who, key, len, WriteMode::Put, &ReplicateConfig::default())
    }

    pub(crate) fn upsert(&self, who: u64, key: &str, len: u64) -> Result<Vec<Replica>, ErrorCode> {
        self.start_with(who, key, len, WriteMode::Upsert, &ReplicateConfig::default())
    }

    pub(crate) fn start_with(
        &self,
        who: u64,
        key: &str,
        len: u64,
        mode: WriteMode,
        config: &ReplicateConfig,
    ) -> Result<Vec<Replica>, ErrorCode> {
        let put = Put {
            writer: client(who).into(),
            mode,
            key: key.as_bytes(),
            len,
            config,
            group: config.group_ids.as_ref().and_then(|groups| groups.first()).map_or("", |group| group),
            session: None,
        };
        self.master.put_start(&put).map_err(|e| e.code())
    }

    pub(crate) fn end(&self, who: u64, key: &str) -> Result<(), ErrorCode> {
        let writer = Writer::from(client(who));
        self.master.put_end(writer, key.as_bytes(), None, ReplicaType::All).map_err(|e| e.code())
    }

    pub(crate) fn revoke(&self, who: u64, key: &str) -> Result<(), ErrorCode> {
        let writer = Writer::from(client(who));
        self.master.put_revoke(writer, key.as_bytes(), ReplicaType::All).map_err(|e| e.code())
    }

    pub(crate) fn put(&self, who: u64, key: &str, len: u64) -> Result<Vec<Replica>, ErrorCode> {
        self.put_with(who, key, len, &ReplicateConfig::default())
    }

    pub(crate) fn put_with(
        &self,
        who: u64,
        key: &str,
        len: u64,
        config: &ReplicateConfig,
    ) -> Result<Vec<Replica>, ErrorCode> {
        let replicas = self.start_with(who, key, len, WriteMode::Put, config)?;
        self.end(who, key)?;
        Ok(replicas)
    }

    pub(crate) fn locate(&self, key: &str) -> Result<ReplicaList, ErrorCode> {
        self.master.locate(key.as_bytes()).map_err(|e| e.code())
    }

    pub(crate) fn exists(&self, key: &str) -> bool {
        self.master.exists(key.as_bytes())
    }

    /// Returns whether the object can be read, without taking a lease.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.master.peek(key.as_bytes()).is_ok()
    }

    pub(crate) fn remove(&self, key: &str, force: bool) -> Result<(), ErrorCode> {
        self.master.remove(key.as_bytes(), force).map_err(|e| e.code())
    }

    pub(crate) fn used(&self) -> u64 {
        self.master.stats().used()
    }
}

pub(crate) fn client(number: u64) -> ClientId {
    ClientId(Uuid::new(1, number))
}

/// Segment `number`, on a host and at addresses of its own.
pub(crate) fn segment(number: u64, size: u64) -> Segment {
    Segment {
        id: SegmentId(Uuid::new(2, number)),
        name: format!("node{number}:1"),
        base: (number + 1) << 40,
        size,
        endpoint: format!("10.0.0.{number}:1"),
        protocol: "tcp".into(),
        host_id: format!("node{number}"),
        locality: None,
    }
}

pub(crate) fn address(replica: &Replica) -> u64 {
    replica.location.memory().unwrap().address
}

pub(crate) fn endpoint(replica: &Replica) -> &str {
    &replica.location.memory().unwrap().endpoint
}
