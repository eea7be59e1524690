//! Copies and moves that a client makes for the master.

use mooncake_core::ids::Uuid;
use mooncake_core::{ErrorCode, Result};
use mooncake_store::client::{Client, PutOptions};
use mooncake_store::master::{MasterOptions, TaskOptions};
use mooncake_store::protocol::wire::TaskStatus;

use crate::cluster::{Cluster, Kind, eventually, value};

const KINDS: [Kind; 2] = [Kind::Embedded, Kind::Tcp];

fn options() -> MasterOptions {
    let tasks = TaskOptions { max_retries: 2, ..TaskOptions::default() };
    MasterOptions { tasks, ..MasterOptions::default() }
}

async fn ended(client: &Client, task: Uuid) -> (TaskStatus, String) {
    let over = |status| matches!(status, TaskStatus::Failed | TaskStatus::Success);
    eventually("the task is over", async || over(client.replicas().task(task).await.unwrap().status)).await;
    let info = client.replicas().task(task).await.unwrap();
    (info.status, info.message)
}

fn done() -> (TaskStatus, String) {
    (TaskStatus::Success, "Task completed successfully".into())
}

async fn put_in(client: &Client, owner: &Client, key: &str, len: usize) -> Result<()> {
    let config = PutOptions::new().prefer_segment(owner.hostname());
    client.put_with(key, &value(7, len)[..], &config).await.map(drop)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_outlives_the_first_client() {
    for kind in KINDS {
        let cluster = Cluster::start(kind, options()).await;
        let (a, b) = cluster.pair().await;
        let c = cluster.builder().segment(0).connect().await.unwrap();
        put_in(&c, &a, "k", 1_500_000).await.unwrap();
        let task = c.replicas().copy("k", &[b.hostname(), a.hostname()]).await.unwrap();
        assert_eq!(ended(&c, task).await, done(), "{kind:?}");
        a.close().await.unwrap();
        assert_eq!(c.get("k").await.unwrap().unwrap(), value(7, 1_500_000), "{kind:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_move_goes_elsewhere() {
    for kind in KINDS {
        let cluster = Cluster::start(kind, options()).await;
        let (a, b) = cluster.pair().await;
        put_in(&b, &a, "k", 300_000).await.unwrap();
        let task = a.replicas().move_to("k", a.hostname(), b.hostname()).await.unwrap();
        assert_eq!(ended(&a, task).await, done(), "{kind:?}");
        let replicas = cluster.master.peek(b"k").unwrap();
        assert_eq!(replicas.len(), 1);
        a.close().await.unwrap();
        assert_eq!(b.get("k").await.unwrap().unwrap(), value(7, 300_000), "{kind:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_task_that_fails_says_why_and_leaves_nothing() {
    let cluster = Cluster::start(Kind::Tcp, options()).await;
    let (a, b) = cluster.pair().await;
    put_in(&b, &a, "k", 5 << 20).await.unwrap();
    put_in(&a, &b, "full", 5 << 20).await.unwrap();
    let task = b.replicas().copy("k", &[b.hostname()]).await.unwrap();
    let (status, message) = ended(&b, task).await;
    assert_eq!(status, TaskStatus::Failed);
    assert_eq!(message, "NO_AVAILABLE_HANDLE (max retries reached: 2)");

    // The object is removed before a client fetches the task.
    let task = b.replicas().copy("k", &[b.hostname()]).await.unwrap();
    assert!(b.remove("k", true).await.unwrap());
    let (status, message) = ended(&b, task).await;
    assert_eq!(status, TaskStatus::Failed);
    assert!(message.starts_with("OBJECT_NOT_FOUND"), "{message}");
    let refused = |outcome: Result<Uuid>| outcome.unwrap_err().code();
    assert_eq!(refused(a.replicas().copy("full", &["elsewhere:1"]).await), ErrorCode::InvalidParams);
    b.remove_all(true).await.unwrap();
    cluster.assert_empty();

    assert_eq!(refused(a.replicas().copy("k", &[b.hostname()]).await), ErrorCode::ObjectNotFound);
    assert_eq!(refused(a.replicas().copy("k", &[]).await), ErrorCode::InvalidParams);
    assert_eq!(refused(a.replicas().copy("k", &["elsewhere:1"]).await), ErrorCode::ObjectNotFound);
    assert_eq!(a.replicas().task(Uuid::new(1, 1)).await.unwrap_err().code(), ErrorCode::TaskNotFound);
    a.close().await.unwrap();
    assert_eq!(refused(a.replicas().copy("k", &["x"]).await), ErrorCode::InvalidParams);
}
