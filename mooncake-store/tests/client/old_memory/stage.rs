//! Cluster of the test: two owners of memory, one with a disk, and writers of two tenants.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use mooncake_core::clock::Rng;
use mooncake_core::memory::{HostMemory, MemorySource};
use mooncake_store::client::{Client, ClientBuilder, ClientConfig, MasterHandle, OffloadConfig};
use mooncake_store::master::{DiskOptions, MasterOptions, PromotionOptions, TenantQuota};
use mooncake_transport::testkit::{Fault, Faults};

use super::Seen;
use super::expected::{Expected, MARKER, Values};
use super::operations::Session;
use crate::faults::{Wire, World};

/// Number of bytes of each of the two segments.
pub(super) const SEGMENT: usize = 128 << 10;
/// Length of the objects that fill the memory.
const FILLER: usize = 8 << 10;
/// Names of the tenants of the writers.
const TENANTS: [&str; 2] = ["a", "b"];
/// Number of polls of a call that waits for nothing else than its transfers.
const POLLS: usize = 200_000;

pub(super) type Member = (Client<Wire>, Arc<Wire>);

pub(super) struct Stage {
    pub(super) world: World,
    pub(super) rng: Rng,
    pub(super) values: Values,
    pub(super) owners: [Member; 2],
    pub(super) writers: [Member; 2],
    /// Client of a third tenant, whose objects have only marker bytes.
    filler: Client<Wire>,
    pub(super) sessions: Vec<Session>,
    pub(super) expected: Expected,
    pub(super) seen: Seen,
    _folder: tempfile::TempDir,
}

fn options(rng: &mut Rng) -> MasterOptions {
    let quota = |name: &str| TenantQuota { name: name.into(), bytes: 1 << 30 };
    let promotion = PromotionOptions { threshold: 1, per_heartbeat: 8, ..PromotionOptions::default() };
    let disks =
        DiskOptions { on_evict: rng.below(2) == 0, promotion: Some(promotion), ..DiskOptions::default() };
    MasterOptions {
        lease_ttl: Duration::from_secs(1),
        tenants: Some(["a", "b", "filler"].map(quota).into()),
        disks: Some(disks),
        ..MasterOptions::default()
    }
}

/// Returns memory of a segment, all of whose bytes are the marker.
fn marked(client: &Client<Wire>) -> Arc<dyn MemorySource> {
    let memory: Arc<dyn MemorySource> = Arc::new(HostMemory::new(SEGMENT).unwrap());
    let mut all = client.memory().register(memory.clone()).unwrap().exclusive().unwrap();
    all.copy_from(0, &[MARKER; SEGMENT]).unwrap();
    memory
}

impl Stage {
    pub(super) async fn new(seed: u64) -> Self {
        let mut rng = Rng::seeded(seed);
        let world = World::new(options(&mut rng));
        let folder = tempfile::tempdir().unwrap();
        let disk = OffloadConfig {
            interval: Duration::from_millis(5),
            buffer: 1 << 20,
            capacity: 1 << 20,
            ..OffloadConfig::new(folder.path())
        };
        let builder = |tenant: &str| -> ClientBuilder {
            let config = ClientConfig {
                ping_interval: Duration::from_millis(20),
                space_timeout: Duration::ZERO,
                tenant: tenant.into(),
                ..ClientConfig::default()
            };
            Client::builder().config(config).master(MasterHandle::embedded(world.master.clone()))
        };
        let first = world.over(builder("a").offload(disk), "127.0.0.1", 0, 1 << 20).await;
        let second = world.over(builder("b"), "127.0.0.1", 0, 1 << 20).await;
        for (owner, _) in [&first, &second] {
            owner.segments().mount_memory(marked(owner)).await.unwrap();
        }
        let a = world.over(builder("a"), "127.0.0.1", 0, 1 << 20).await;
        let b = world.over(builder("b").hot_cache(64 << 10), "127.0.0.1", 0, 1 << 20).await;
        let (filler, _) = world.over(builder("filler"), "127.0.0.1", 0, 1 << 20).await;
        Self {
            values: Values::new(rng.next_u64()),
            rng,
            owners: [first, second],
            writers: [a, b],
            filler,
            sessions: Vec::new(),
            expected: Expected::default(),
            seen: Seen::default(),
            world,
            _folder: folder,
        }
    }

    /// Runs one operation, and lets background tasks run.
    pub(super) async fn step(&mut self) -> Result<(), String> {
        match self.rng.below(64) {
            0..=13 => self.put().await?,
            14..=19 => self.batch_put().await?,
            20..=22 => self.reserve().await,
            23..=30 => self.write().await?,
            31..=33 => self.commit().await?,
            34 => self.abandon().await,
            35..=37 => self.copy().await,
            38..=40 => self.remove().await,
            41..=48 => self.get().await?,
            49..=52 => self.batch_get().await?,
            53..=56 => self.read_range().await?,
            57 => self.prefetch().await,
            58..=61 => self.advance().await,
            62 => self.disturb_owners(),
            _ => match self.rng.below(8) {
                0 => self.replace_segment().await,
                1 | 2 => self.refill().await,
                _ => {}
            },
        }
        self.settle(2).await;
        Ok(())
    }

    /// Reads everything once more after all transfers have landed.
    pub(super) async fn finish(&mut self) -> Result<(), String> {
        for (_, wire) in self.owners.iter().chain(&self.writers) {
            wire.set(Faults::none());
        }
        self.release();
        self.settle(50).await;
        self.read_all().await?;
        self.seen.promoted += self.owners[0].0.status().disk().map_or(0, |report| report.promoted);
        self.seen.read_from_disk +=
            self.writers.iter().map(|(writer, _)| writer.status().disk_reads()).sum::<u64>();
        for (client, _) in self.writers.iter().chain(&self.owners) {
            client.close().await.map_err(|error| format!("a client does not close: {error}"))?;
        }
        self.filler.close().await.map_err(|error| format!("a client does not close: {error}"))
    }

    /// Fills all free memory with the marker: objects of it take the whole memory, and are removed.
    async fn refill(&mut self) {
        let marker = Bytes::from_static(&[MARKER; FILLER]);
        for n in 0..2 * SEGMENT / FILLER {
            // Objects with a lease stay, so the last puts may find no space.
            let _ = self.filler.put(format!("filler {n}"), &marker).await;
        }
        let _ = self.filler.remove_all(true).await;
    }

    /// Lets a segment leave, mostly with its objects moved elsewhere, and mounts another one.
    async fn replace_segment(&mut self) {
        self.release();
        let (owner, wire) = self.owners[usize::from(self.rng.below(4) > 0)].clone();
        wire.set(Faults::none());
        if self.rng.below(4) > 0 {
            for _ in 0..20 {
                let _ = owner.segments().drain().await;
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
        for id in owner.segments().ids() {
            if owner.segments().unmount(id).await.is_err() {
                return;
            }
        }
        owner.segments().mount_memory(marked(&owner)).await.unwrap();
        self.seen.replaced += 1;
    }

    /// Makes transfers of owners fail from now on, or not any more: copies, moves and promotions.
    fn disturb_owners(&mut self) {
        for at in 0..self.owners.len() {
            let faults = self.faults();
            self.owners[at].1.set(faults);
        }
    }

    /// Moves the clock after all transfers have landed: a client transfers for 25 s at most.
    async fn advance(&mut self) {
        self.release();
        self.settle(10).await;
        self.world.clock.advance(Duration::from_millis(self.rng.below(1500)));
        for (client, _) in self.owners.iter().chain(&self.writers) {
            client.status().is_healthy().await;
        }
        self.world.master.tick();
    }

    fn release(&self) {
        for (_, wire) in self.owners.iter().chain(&self.writers) {
            wire.release(usize::MAX);
        }
    }

    /// Runs background tasks.
    pub(super) async fn settle(&self, times: usize) {
        for _ in 0..times {
            tokio::task::yield_now().await;
        }
    }

    /// Returns rates of faults, mostly none.
    pub(super) fn faults(&mut self) -> Faults {
        if self.rng.below(6) > 0 {
            return Faults::none();
        }
        let fault = match self.rng.below(16) {
            0 => Fault::LandLate,
            1 => Fault::LoseResponse,
            2 | 3 => Fault::Fail,
            4..=6 => Fault::Cut,
            _ => Fault::Delay,
        };
        Faults::none().with(fault, [100, 300, 1000][self.rng.below(3) as usize])
    }

    /// Returns the number of polls after which a call is dropped, mostly none.
    pub(super) fn drops(&mut self) -> Option<u64> {
        (self.rng.below(6) == 0).then(|| self.rng.range(1..6))
    }

    /// Returns any value.
    pub(super) fn value(&mut self) -> Bytes {
        let len = match self.rng.below(8) {
            0 => self.rng.range(1..65),
            1..=5 => self.rng.range(65..8_000),
            _ => self.rng.range(8_000..20_000),
        };
        self.values.next(&mut self.rng, len as usize)
    }

    /// Returns the tenant of a call.
    pub(super) fn tenant(&mut self) -> usize {
        self.rng.below(TENANTS.len() as u64) as usize
    }
}

/// Runs a call to its end, or drops it after some polls and returns `None`. Transfers that a
/// transport holds are released once the call waits for them.
pub(super) async fn run<R>(wire: &Wire, drops: Option<u64>, call: impl Future<Output = R>) -> Option<R> {
    let mut call = pin!(call);
    for polls in 0..POLLS {
        let poll = poll_fn(|context| Poll::Ready(call.as_mut().poll(context))).await;
        if let Poll::Ready(outcome) = poll {
            return Some(outcome);
        }
        if drops.is_some_and(|drops| polls as u64 + 1 >= drops) {
            return None;
        }
        tokio::task::yield_now().await;
        if polls % 8 == 7 {
            wire.release(usize::MAX);
            tokio::time::sleep(Duration::from_micros(100)).await;
        }
    }
    panic!("a call did not end after its transfers");
}
