//! Writers that end a put without a write, as a client of Mooncake C++ may: readers see no bytes of
//! other tenants.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use async_trait::async_trait;
use mooncake_core::error::ErrorCode::NoAvailableHandle;
use mooncake_core::ids::{ClientId, Uuid};
use mooncake_core::replica::{Replica, ReplicaType, ReplicateConfig};
use mooncake_core::{ErrorCode, Result};
use mooncake_store::client::{Client, ClientBuilder, ClientConfig, MasterHandle};
use mooncake_store::master::{Master, MasterOptions, TenantQuota};
use mooncake_store::protocol::master_client::MasterConnection;
use mooncake_store::protocol::message::{FetchZeroWork, Handle, PutEnd, PutStart, Request, UnmountSegment};
use mooncake_store::protocol::server::Service;
use mooncake_store::protocol::service::MasterService;
use mooncake_store::protocol::wire::EndItem;
use mooncake_transport::testkit::{Fault, Faults};
use tokio::sync::Semaphore;

use crate::cluster::{Cluster, Kind, eventually};
use crate::faults::{World, always};

const SEGMENT: usize = 1 << 20;
const LEN: usize = SEGMENT / 16;
/// Byte of the objects of the tenant whose memory no other tenant may see.
const SECRET: u8 = 0xa5;

fn options() -> MasterOptions {
    let quota = |name: &str| TenantQuota { name: name.into(), bytes: 1 << 30 };
    let tenants = Some(["a", "b"].map(quota).into());
    MasterOptions { tenants, high_watermark: 1.0, ..MasterOptions::default() }
}

/// Lets a tenant use all memory, and others none.
fn give_all(master: &Master, tenant: &str) {
    for name in ["a", "b"] {
        let bytes = if name == tenant { 1 << 40 } else { 1 };
        master.set_tenant(&TenantQuota { name: name.into(), bytes }).unwrap();
    }
}

/// Returns settings with which work of the master is fetched at once.
fn quick() -> ClientConfig {
    ClientConfig { ping_interval: Duration::from_millis(10), ..ClientConfig::default() }
}

fn member(cluster: &Cluster, tenant: &str, segment: u64) -> ClientBuilder {
    cluster.builder_with(quick()).tenant(tenant).segment(segment)
}

/// Requests space as a client of Mooncake C++ does.
fn start(master: &Master, tenant: &str, key: &str) -> Result<Vec<Replica>> {
    master.handle(PutStart {
        client: ClientId(Uuid::new(7, 7)),
        key: key.as_bytes(),
        size: LEN as u64,
        config: Cow::Owned(ReplicateConfig::default()),
        tenant,
    })
}

fn end(cluster: &Cluster, tenant: &str, key: &str) -> Result<()> {
    let item = EndItem { key: key.as_bytes(), checksum: None };
    let client = ClientId(Uuid::new(7, 7));
    cluster.master.handle(PutEnd { client, item, replicas: ReplicaType::All, tenant })
}

/// Puts without a write into a pool that was full of bytes of another tenant.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_put_without_a_write_shows_no_bytes_of_other_tenants() {
    for kind in [Kind::Embedded, Kind::Tcp] {
        let cluster = Cluster::start(kind, options()).await;
        let owner = member(&cluster, "a", SEGMENT as u64).connect().await.unwrap();
        let reader = member(&cluster, "b", 0).connect().await.unwrap();
        give_all(&cluster.master, "a");
        for n in 0..16 {
            owner.put(format!("{n}"), &[SECRET; LEN][..]).await.unwrap();
        }
        owner.remove_all(true).await.unwrap();
        give_all(&cluster.master, "b");
        let granted = async |key: &str| match start(&cluster.master, "b", key) {
            Ok(_) => true,
            Err(error) => {
                assert_eq!(error.code(), NoAvailableHandle, "{error}");
                assert!(error.to_string().contains("bytes of other tenants"), "{error}");
                false
            }
        };
        for n in 0..8 {
            let key = format!("hole {n}");
            eventually("there is memory without remains", async || granted(&key).await).await;
            end(&cluster, "b", &key).unwrap();
            let got = reader.get(&key).await.unwrap().unwrap();
            let foreign = got.iter().filter(|byte| **byte == SECRET).count();
            assert_eq!((foreign, got.len()), (0, LEN), "{kind:?}: bytes of another tenant are shown");
        }
        // A client that writes every byte takes any memory, and the owner gives all of it back.
        reader.remove_all(true).await.unwrap();
        eventually("all memory is free", async || cluster.master.stats().used() == 0).await;
        for n in 0..14 {
            reader.put(format!("{n}"), &[1; LEN][..]).await.unwrap();
        }
    }
}

/// A writer may see bytes of its own tenant, and without the option those of every tenant.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_of_the_own_tenant_is_granted_at_once() {
    for (zeroes, tenant) in [(true, "a"), (false, "b")] {
        let options = MasterOptions { zero_across_tenants: zeroes, ..options() };
        let cluster = Cluster::start(Kind::Embedded, options).await;
        let owner = member(&cluster, "a", SEGMENT as u64).connect().await.unwrap();
        give_all(&cluster.master, "a");
        for n in 0..16 {
            owner.put(format!("{n}"), &[SECRET; LEN][..]).await.unwrap();
        }
        owner.remove_all(true).await.unwrap();
        give_all(&cluster.master, tenant);
        for n in 0..16 {
            let started = start(&cluster.master, tenant, &format!("hole {n}")).map_err(|error| error.code());
            assert_eq!(started.map(drop), Ok::<_, ErrorCode>(()), "{zeroes} {n}");
        }
    }
}

/// A write through the transport could land after its time, when others have the memory.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_is_zeroed_without_the_transport() {
    let world = World::new(options());
    let builder = Client::builder().config(ClientConfig { tenant: "a".into(), ..quick() });
    let builder = builder.master(MasterHandle::embedded(world.master.clone()));
    let (owner, wire) = world.over(builder, "127.0.0.1", SEGMENT as u64, 1 << 20).await;
    give_all(&world.master, "a");
    for n in 0..16 {
        owner.put(format!("{n}"), &[SECRET; LEN][..]).await.unwrap();
    }
    owner.remove_all(true).await.unwrap();
    give_all(&world.master, "b");
    wire.set(always(Fault::Delay));
    eventually("memory is zeroed", async || start(&world.master, "b", "hole").is_ok()).await;
    assert_eq!(wire.held(), 0);
    wire.set(Faults::none());
}

/// Connection to a master that holds the first request for memory to zero.
#[derive(Debug)]
struct Held {
    master: Arc<Master>,
    /// True once the request is held.
    has_arrived: AtomicBool,
    is_unmounted: AtomicBool,
    release: Semaphore,
}

#[async_trait]
impl MasterConnection for Held {
    async fn call(&self, function: u32, body: &[u8]) -> Result<Vec<u8>> {
        if function == FetchZeroWork::FUNCTION && !self.has_arrived.swap(true, SeqCst) {
            let _ = self.release.acquire().await;
        }
        if function == UnmountSegment::FUNCTION {
            self.is_unmounted.store(true, SeqCst);
        }
        let mut out = Vec::new();
        MasterService(self.master.clone()).call(function, body, &mut out).unwrap();
        Ok(out)
    }
}

/// Number of polls after which a call that waits for no other has reached the master.
const POLLS: usize = 1000;

/// Another master would grant the memory, while this client zeroes it for the master before.
#[tokio::test]
async fn no_segment_leaves_while_its_memory_is_zeroed() {
    let master = Arc::new(Master::new(options()).unwrap());
    let (has_arrived, is_unmounted) = (AtomicBool::new(false), AtomicBool::new(false));
    let held = Arc::new(Held { master, has_arrived, is_unmounted, release: Semaphore::new(0) });
    let builder = Client::builder().config(ClientConfig { tenant: "a".into(), ..quick() });
    let builder = builder.segment(SEGMENT as u64).master(MasterHandle::custom(held.clone()));
    let owner = builder.connect().await.unwrap();
    eventually("a request is held", async || held.has_arrived.load(SeqCst)).await;
    let id = owner.segments().ids()[0];
    let unmounted = tokio::spawn({
        let owner = owner.clone();
        async move { owner.segments().unmount(id).await }
    });
    for _ in 0..POLLS {
        tokio::task::yield_now().await;
    }
    assert!(!held.is_unmounted.load(SeqCst), "the segment has left");
    held.release.add_permits(1);
    unmounted.await.unwrap().unwrap();
    assert!(held.is_unmounted.load(SeqCst));
}
