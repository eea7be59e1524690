//! Clients of several tenants, which share the memory of one cluster.

use mooncake_core::ErrorCode::{TenantNotRegistered, TenantQuotaExceeded};
use mooncake_store::master::{MasterOptions, TenantQuota};
use mooncake_store::protocol::wire::TaskStatus;

use crate::cluster::{Cluster, Kind, eventually, value};

fn options() -> MasterOptions {
    let quota = |name: &str, bytes| TenantQuota { name: name.into(), bytes };
    let tenants = Some(vec![quota("a", 300_000), quota("b", 4 << 20)]);
    MasterOptions { tenants, ..MasterOptions::default() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tenants_do_not_see_each_other() {
    for kind in [Kind::Embedded, Kind::Tcp] {
        let cluster = Cluster::start(kind, options()).await;
        let a = cluster.builder().tenant("a").connect().await.unwrap();
        let b = cluster.builder().tenant("b").connect().await.unwrap();
        a.put("k", &value(1, 100_000)[..]).await.unwrap();
        assert!(b.get("k").await.unwrap().is_none(), "{kind:?}");
        b.put("k", &value(2, 200_000)[..]).await.unwrap();
        assert_eq!(a.get("k").await.unwrap().unwrap(), value(1, 100_000), "{kind:?}");
        assert_eq!(b.get("k").await.unwrap().unwrap(), value(2, 200_000), "{kind:?}");
        // The object "k" was just read.
        assert_eq!(a.put("l", &value(3, 250_000)[..]).await.unwrap_err().code(), TenantQuotaExceeded);
        a.put("l", &value(3, 150_000)[..]).await.unwrap();
        a.put("m", &value(4, 150_000)[..]).await.unwrap();
        assert!(a.get("l").await.unwrap().is_none(), "it made room for its successor");

        // The owner of the bytes copies the object of a tenant, though it may belong to another
        // tenant.
        let replicas = cluster.master.peek(&cluster.master.scoped("a", b"m").unwrap()).unwrap();
        let there = &replicas[0].location.memory().unwrap().endpoint;
        let segments = cluster.master.segment_stats();
        let name = |here: bool| {
            let found = segments.iter().find(|at| (at.segment.endpoint == *there) == here);
            found.unwrap().segment.name.clone()
        };
        let task = a.replicas().move_to("m", &name(true), &name(false)).await.unwrap();
        let status = async || a.replicas().task(task).await.unwrap().status;
        eventually("the move is over", async || {
            !matches!(status().await, TaskStatus::Pending | TaskStatus::Processing)
        })
        .await;
        assert_eq!(status().await, TaskStatus::Success, "{kind:?}");
        assert_eq!(a.get("m").await.unwrap().unwrap(), value(4, 150_000), "{kind:?}");
        assert!(!b.remove("m", true).await.unwrap());

        let c = cluster.builder().tenant("c").connect().await.unwrap();
        assert_eq!(c.put("k", &value(5, 10)[..]).await.unwrap_err().code(), TenantNotRegistered, "{kind:?}");
        // A lookup of an unknown tenant finds nothing.
        assert!(!c.exist("k").await.unwrap());
        assert!(c.get("k").await.unwrap().is_none());
        assert!(!c.remove("k", true).await.unwrap());
        assert_eq!(c.remove_matching("k", true).await.unwrap(), 0);
        assert_eq!(c.replicas().copy("k", &[a.hostname()]).await.unwrap_err().code(), TenantNotRegistered);
        assert_eq!(b.remove_all(true).await.unwrap(), 1, "{kind:?}");
        assert!(a.get("m").await.unwrap().is_some());
        a.remove_all(true).await.unwrap();
        assert!(cluster.master.tenants().iter().all(|tenant| tenant.charged == 0));
    }
}
