//! Prefetches: objects that are only on disks return to memory before they are read.

use std::collections::BTreeSet;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::task::Poll;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use mooncake_core::ids::{ClientId, Uuid};
use mooncake_core::{ErrorCode, Result};
use mooncake_store::client::{
    Client, ClientBuilder, ExistOptions, MasterHandle, Prefetch, PrefetchConfig, PutOptions,
};
use mooncake_store::master::{DiskOptions, Master, MasterOptions};
use mooncake_store::protocol::frame::Status;
use mooncake_store::protocol::master_client::MasterConnection;
use mooncake_store::protocol::message::{BatchGetReplicaListForAdmin, PrefetchObjects, Request};
use mooncake_store::protocol::pack;
use mooncake_store::protocol::server::{Refusal, RunningServer, Server, ServerOptions, Service};
use mooncake_store::protocol::service::MasterService;
use mooncake_store::protocol::wire::{OffloadItem, StoredAt};
use parking_lot::Mutex;

use crate::cluster::{Cluster, Kind, eventually, value};
use crate::disk::{MIB, disk, patient_builder, replicas_of};

/// Length of the values. Memory has space for one.
const LEN: usize = 6 << 20;
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

fn options() -> ExistOptions {
    ExistOptions::new().prefetch_to_memory(true)
}

/// Settings with which existence checks prefetch.
fn on_exist() -> PrefetchConfig {
    PrefetchConfig { on_exist: true, ..PrefetchConfig::default() }
}

async fn prefetch(client: &Client, key: &str) -> Result<Prefetch> {
    client.replicas().prefetch(&[key]).await?.remove(0)
}

/// Cluster in which "cold" is only on the disk of `owner`, whose memory is full.
struct Stage {
    cluster: Cluster,
    owner: Client,
    cold: Bytes,
    _folder: tempfile::TempDir,
}

impl Stage {
    async fn new(config: PrefetchConfig) -> Self {
        let cluster = Cluster::start(
            Kind::Tcp,
            MasterOptions {
                disks: Some(DiskOptions::default()),
                lease_ttl: Duration::from_millis(500),
                ..MasterOptions::default()
            },
        )
        .await;
        let folder = tempfile::tempdir().unwrap();
        let owner = patient_builder(&cluster).offload(disk(folder.path())).prefetch(config);
        let owner = owner.segment(8 * MIB).connect().await.unwrap();
        let cold = value(1, LEN);
        owner.put("cold", &cold[..]).await.unwrap();
        eventually("it is on disk", async || replicas_of(&cluster, "cold").1 == 1).await;
        owner.put_with("warm", &value(2, LEN)[..], &PutOptions::new().hard_pin()).await.unwrap();
        // Space that a disk reads is not free at once.
        eventually("both are on disk", async || replicas_of(&cluster, "warm").1 == 1).await;
        assert_eq!(replicas_of(&cluster, "cold"), (0, 1));
        Self { cluster, owner, cold, _folder: folder }
    }

    /// Frees memory.
    async fn free(&self) {
        self.owner.remove("warm", true).await.unwrap();
        // The disk has read the value under a lease.
        eventually("its space is free", async || self.cluster.master.stats().used() == 0).await;
    }

    /// Returns a client without memory and without a disk.
    async fn other(&self, config: PrefetchConfig) -> Client {
        patient_builder(&self.cluster).segment(0).prefetch(config).connect().await.unwrap()
    }

    async fn is_warm(&self) -> bool {
        replicas_of(&self.cluster, "cold") == (1, 1)
    }

    /// Waits until "cold" is in memory, and reads it there.
    async fn until_warm(&self, client: &Client) {
        eventually("it is in memory", async || self.is_warm().await).await;
        let before = self.owner.status().disk().unwrap();
        let got = crate::disk::read(client, "cold").await;
        assert!(got.as_deref() == Some(&*self.cold));
        let after = self.owner.status().disk().unwrap();
        assert_eq!((after.promoted, after.read), (1, before.read), "the disk is not read again");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_existence_check_prefetches_from_the_own_disk() {
    let stage = Stage::new(on_exist()).await;
    stage.free().await;
    assert!(stage.owner.exist_with("cold", &ExistOptions::new()).await.unwrap());
    let found = stage.owner.batch_exist_with(&["none", "cold"], &options()).await.unwrap();
    assert_eq!(found.into_iter().map(Result::unwrap).collect::<Vec<_>>(), [false, true]);
    stage.until_warm(&stage.owner).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_existence_check_prefetches_from_the_disk_of_another_client() {
    let stage = Stage::new(PrefetchConfig::default()).await;
    stage.free().await;
    let other = stage.other(on_exist()).await;
    assert!(other.exist_with("cold", &options()).await.unwrap());
    stage.until_warm(&other).await;
    assert_eq!(prefetch(&other, "cold").await.unwrap(), Prefetch::Recent);
    assert_eq!(prefetch(&stage.owner, "cold").await.unwrap(), Prefetch::Recent, "the owner knows it, too");
}

/// Without the setting of the client, the option has no effect.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn existence_checks_prefetch_if_the_client_allows_it() {
    let stage = Stage::new(PrefetchConfig::default()).await;
    stage.free().await;
    assert!(stage.owner.exist_with("cold", &options()).await.unwrap());
    assert_eq!(stage.owner.status().disk().unwrap().promoted, 0);
    assert_eq!(prefetch(&stage.owner, "cold").await.unwrap(), Prefetch::Requested);
    stage.until_warm(&stage.owner).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_object_is_prefetched_once_in_a_time() {
    let stage = Stage::new(PrefetchConfig::default()).await;
    stage.free().await;
    let other = stage.other(PrefetchConfig { dedup: DAY, ..PrefetchConfig::default() }).await;
    let always = stage.other(PrefetchConfig { dedup: Duration::ZERO, ..PrefetchConfig::default() }).await;
    assert_eq!(prefetch(&other, "cold").await.unwrap(), Prefetch::Requested);
    assert_eq!(prefetch(&other, "cold").await.unwrap(), Prefetch::Recent);
    assert_eq!(prefetch(&other, "none").await.unwrap(), Prefetch::Missing);
    stage.until_warm(&other).await;
    assert_eq!(prefetch(&other, "cold").await.unwrap(), Prefetch::Recent);
    assert_eq!(prefetch(&always, "cold").await.unwrap(), Prefetch::InMemory);
    assert_eq!(stage.cluster.master.stats().disks.promotions_admitted, 1);
}

/// The owner of a disk takes no prefetch for a while after memory had no space.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prefetches_pause_while_memory_is_full() {
    let stage = Stage::new(PrefetchConfig { cooldown: DAY, ..PrefetchConfig::default() }).await;
    let other = stage.other(PrefetchConfig::default()).await;
    assert_eq!(prefetch(&other, "cold").await.unwrap(), Prefetch::Requested);
    let owner = &stage.owner;
    let refused = async || prefetch(owner, "cold").await.unwrap() == Prefetch::Refused;
    eventually("the owner knows that memory is full", refused).await;
    stage.free().await;
    assert_eq!(prefetch(owner, "cold").await.unwrap(), Prefetch::Refused);
    assert_eq!(stage.cluster.master.stats().disks.promotions_failed, 1);
    assert!(crate::disk::read(&other, "cold").await.as_deref() == Some(&*stage.cold), "reads go on");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefetch_that_failed_is_made_again() {
    let stage = Stage::new(PrefetchConfig { cooldown: Duration::ZERO, ..PrefetchConfig::default() }).await;
    let owner = &stage.owner;
    assert_eq!(prefetch(owner, "cold").await.unwrap(), Prefetch::Requested);
    let failed = async || stage.cluster.master.stats().disks.promotions_failed == 1;
    eventually("memory has no space", failed).await;
    stage.free().await;
    eventually("it is made again", async || prefetch(owner, "cold").await.unwrap() == Prefetch::Requested)
        .await;
    stage.until_warm(owner).await;
}

/// A shared client prefetches through the client that it shares.
#[cfg(feature = "local")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shared_client_prefetches() {
    use mooncake_store::local::{LocalClient, LocalConfig, LocalServer, LocalServerConfig};
    let stage = Stage::new(on_exist()).await;
    stage.free().await;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("owner.sock");
    let config = LocalServerConfig { path: path.clone(), ..LocalServerConfig::default() };
    let server = LocalServer::start(stage.owner.clone(), config).unwrap();
    let at = LocalConfig { buffer: 4 << 20, ..LocalConfig::at(path.to_str().unwrap()) };
    let shared = LocalClient::connect(at).await.unwrap();
    assert!(!shared.exist_with("none", &options()).await.unwrap());
    assert!(shared.exist_with("cold", &options()).await.unwrap());
    stage.until_warm(&stage.owner).await;
    drop(shared);
    server.stop().await;
}

/// Owner of a disk that holds any object and brings nothing back.
struct Holder {
    /// Response to a prefetch; `None` for an owner that lacks the call.
    response: Mutex<Option<bool>>,
    calls: AtomicUsize,
}

impl Service for Holder {
    fn call(&self, function: u32, body: &[u8], out: &mut Vec<u8>) -> Result<(), Refusal> {
        assert_eq!(function, PrefetchObjects::FUNCTION);
        self.calls.fetch_add(1, Relaxed);
        let request: PrefetchObjects<'_> = pack::decode(body).unwrap();
        assert_eq!((request.tenant, &request.sizes[..]), ("default", &vec![100; request.keys.len()][..]));
        let taken = self.response.lock().ok_or((Status::NotRegistered, "no such call".into()))?;
        pack::encode(&taken, out);
        Ok(())
    }
}

/// Starts a cluster with objects on the disk of a holder.
async fn held(response: Option<bool>, keys: usize) -> (Cluster, Arc<Holder>, RunningServer) {
    let options = MasterOptions {
        disks: Some(DiskOptions::default()),
        client_ttl: Duration::from_secs(600),
        ..MasterOptions::default()
    };
    let cluster = Cluster::start(Kind::Tcp, options).await;
    let holder = Arc::new(Holder { response: Mutex::new(response), calls: AtomicUsize::new(0) });
    let server = Server::bind("127.0.0.1:0", ServerOptions::default()).await.unwrap();
    let server = server.start(holder.clone());
    let id = ClientId(Uuid { first: 7, second: 7 });
    cluster.master.mount_disk(id, true).unwrap();
    for number in 0..keys {
        let item = OffloadItem { tenant: "default".into(), key: format!("k{number}").into(), size: 100 };
        let endpoint = server.local_addr().to_string();
        let place = StoredAt { bucket: 0, offset: 0, key_size: 0, data_size: 100, endpoint };
        cluster.master.offloaded(id, &[item], &[place]).unwrap();
    }
    (cluster, holder, server)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_that_lacks_prefetches_is_remembered() {
    let (cluster, holder, server) = held(None, 2).await;
    let client = cluster.builder().prefetch(on_exist()).connect().await.unwrap();
    for key in ["k0", "k1", "k0"] {
        assert_eq!(prefetch(&client, key).await.unwrap(), Prefetch::Refused);
        assert!(client.exist_with(key, &options()).await.unwrap());
    }
    assert_eq!(holder.calls.load(Relaxed), 1);
    // An owner that refuses may take the next request.
    let (cluster, holder, _server) = held(Some(false), 2).await;
    let client = cluster.builder().connect().await.unwrap();
    for _ in 0..2 {
        assert_eq!(prefetch(&client, "k0").await.unwrap(), Prefetch::Refused);
    }
    *holder.response.lock() = Some(true);
    assert_eq!(prefetch(&client, "k0").await.unwrap(), Prefetch::Requested);
    assert_eq!((prefetch(&client, "k0").await.unwrap(), holder.calls.load(Relaxed)), (Prefetch::Recent, 3));
    server.stop().await;
}

/// Many keys travel in requests of 128, and each owner is called once for those of a request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_objects_are_prefetched_in_parts() {
    let (cluster, holder, _server) = held(Some(true), 300).await;
    let client = cluster.builder().connect().await.unwrap();
    let keys: Vec<String> = (0..301).map(|number| format!("k{number}")).collect();
    let states = client.replicas().prefetch(&keys).await.unwrap();
    let states: Vec<_> = states.into_iter().map(Result::unwrap).collect();
    assert!(states[..300].iter().all(|state| *state == Prefetch::Requested));
    assert_eq!((states[300], holder.calls.load(Relaxed)), (Prefetch::Missing, 3));
}

/// A prefetch that is dropped at any point leaves nothing behind: the next one is made.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefetch_may_be_dropped_at_any_point() {
    const MOST: usize = 64;
    let (cluster, _holder, _server) = held(Some(true), MOST).await;
    let client = cluster.builder().connect().await.unwrap();
    let mut dropped_after = BTreeSet::new();
    for number in 1..MOST {
        let key = format!("k{number}");
        // One poll may pass several points where the prefetch waits, so each count has several
        // tries.
        let polls = 1 + number % 6;
        let ended = {
            let mut prefetch = pin!(prefetch(&client, &key));
            let mut left = polls;
            std::future::poll_fn(|context| {
                let outcome = prefetch.as_mut().poll(context);
                left -= 1;
                if outcome.is_pending() && left > 0 { Poll::Pending } else { Poll::Ready(outcome) }
            })
            .await
        };
        match ended {
            // Even one poll may end it: a call polls its socket for a moment.
            Poll::Ready(state) => assert_eq!(state.unwrap(), Prefetch::Requested),
            Poll::Pending => {
                dropped_after.insert(polls);
                let state = prefetch(&client, &key).await.unwrap();
                assert_eq!(state, Prefetch::Requested, "after {polls} polls");
            }
        }
    }
    assert!(dropped_after.len() > 1, "dropped after {dropped_after:?} polls only");
}

/// Master that lacks the calls of prefetches, as that of Mooncake C++ 0.3.13 does.
#[derive(Debug)]
struct Earlier {
    master: Arc<Master>,
    calls: AtomicUsize,
}

#[async_trait]
impl MasterConnection for Earlier {
    async fn call(&self, function: u32, body: &[u8]) -> Result<Vec<u8>> {
        if function == BatchGetReplicaListForAdmin::FUNCTION {
            self.calls.fetch_add(1, Relaxed);
            return Err(ErrorCode::NotSupported.into());
        }
        let mut out = Vec::new();
        MasterService(self.master.clone()).call(function, body, &mut out).unwrap();
        Ok(out)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_that_lacks_prefetches_is_remembered() {
    let earlier = Earlier {
        master: Arc::new(Master::new(MasterOptions::default()).unwrap()),
        calls: AtomicUsize::new(0),
    };
    let earlier = Arc::new(earlier);
    let builder: ClientBuilder = Client::builder().master(MasterHandle::custom(earlier.clone()));
    let client = builder.prefetch(on_exist()).connect().await.unwrap();
    client.put("k", &b"value"[..]).await.unwrap();
    for _ in 0..2 {
        assert_eq!(prefetch(&client, "k").await.unwrap_err().code(), ErrorCode::NotSupported);
        assert!(client.exist_with("k", &options()).await.unwrap());
    }
    assert_eq!(earlier.calls.load(Relaxed), 1);
}
