//! Writers that end a put without a write, as a client of Mooncake C++ may: readers see no bytes of
//! other tenants.

use std::borrow::Cow;
use std::time::Duration;

use mooncake_core::error::ErrorCode::NoAvailableHandle;
use mooncake_core::ids::{ClientId, Uuid};
use mooncake_core::replica::{Replica, ReplicaType, ReplicateConfig};
use mooncake_core::{ErrorCode, Result};
use mooncake_store::client::{ClientBuilder, ClientConfig};
use mooncake_store::master::{MasterOptions, TenantQuota};
use mooncake_store::protocol::message::{Handle, PutEnd, PutStart};
use mooncake_store::protocol::wire::EndItem;

use crate::cluster::{Cluster, Kind, eventually};

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
fn give_all(cluster: &Cluster, tenant: &str) {
    for name in ["a", "b"] {
        let bytes = if name == tenant { 1 << 40 } else { 1 };
        cluster.master.set_tenant(&TenantQuota { name: name.into(), bytes }).unwrap();
    }
}

fn member(cluster: &Cluster, tenant: &str, segment: u64) -> ClientBuilder {
    let config = ClientConfig { ping_interval: Duration::from_millis(10), ..ClientConfig::default() };
    cluster.builder_with(config).tenant(tenant).segment(segment)
}

/// Requests space as a client of Mooncake C++ does.
fn start(cluster: &Cluster, tenant: &str, key: &str) -> Result<Vec<Replica>> {
    cluster.master.handle(PutStart {
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
        give_all(&cluster, "a");
        for n in 0..16 {
            owner.put(format!("{n}"), &[SECRET; LEN][..]).await.unwrap();
        }
        owner.remove_all(true).await.unwrap();
        give_all(&cluster, "b");
        let granted = async |key: &str| match start(&cluster, "b", key) {
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
        give_all(&cluster, "a");
        for n in 0..16 {
            owner.put(format!("{n}"), &[SECRET; LEN][..]).await.unwrap();
        }
        owner.remove_all(true).await.unwrap();
        give_all(&cluster, tenant);
        for n in 0..16 {
            let started = start(&cluster, tenant, &format!("hole {n}")).map_err(|error| error.code());
            assert_eq!(started.map(drop), Ok::<_, ErrorCode>(()), "{zeroes} {n}");
        }
    }
}
