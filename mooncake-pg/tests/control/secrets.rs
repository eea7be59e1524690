//! Ranks that share a secret, and ranks with another one or none.

use std::time::Duration;

use futures::future::join_all;
use mooncake_core::Error;
use mooncake_pg::control::{Agent, ControlSettings, CoordinatorServer};
use mooncake_pg::secret::{Secret, VARIABLE};
use mooncake_pg::view::{GlobalRank, Membership, Slot};
use tokio::time::timeout;

use crate::in_process::{HOST, start_group, until, until_usable};
use crate::{active, settings};

/// Longest time of a refusal, far below the limits of [`settings`].
const PROMPTLY: Duration = Duration::from_secs(30);

fn with(secret: Option<&str>) -> ControlSettings {
    let secret = secret.map(|secret| Secret::new(secret).unwrap());
    ControlSettings { secret, ..settings(Duration::from_secs(60)) }
}

async fn connect(server: &CoordinatorServer, rank: u8, secret: Option<&str>) -> Result<Agent, Error> {
    let connected = Agent::connect(server.address(), GlobalRank(rank), HOST, with(secret));
    timeout(PROMPTLY, connected).await.expect("the rank is refused promptly")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_with_one_secret_form_a_group() {
    let server = CoordinatorServer::start(HOST, with(Some("a secret"))).await.unwrap();
    let connected = join_all((0..3).map(|rank| connect(&server, rank, Some("a secret")))).await;
    let agents: Vec<Agent> = connected.into_iter().map(Result::unwrap).collect();
    let groups = join_all(agents.iter().map(|agent| start_group(agent, "cpu:0", 3, 3))).await;
    for group in &groups {
        until(group, |view| active(view) == [0, 1, 2]).await;
        // The links between processes are proved as well.
        until_usable(group, &[0, 1, 2]).await;
        for slot in 0..3 {
            assert!(group.is_alive(Slot(slot)).await);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_with_another_secret_or_none_are_refused_by_name() {
    for (coordinator, rank, says) in [
        (Some("a secret"), Some("another secret"), "the other process has another secret"),
        (Some("a secret"), None, "the other process has a secret, and this process has none"),
        (None, Some("a secret"), "this process has a secret, and the other process has none"),
    ] {
        let server = CoordinatorServer::start(HOST, with(coordinator)).await.unwrap();
        let founder = connect(&server, 0, coordinator).await.unwrap();
        let error = connect(&server, 1, rank).await.unwrap_err().to_string();
        assert!(error.contains(says) && error.contains(VARIABLE), "{error}");
        // Rank 0 goes on, and a rank with its secret replaces the one that was refused.
        let second = connect(&server, 1, coordinator).await.unwrap();
        let groups = join_all([&founder, &second].map(|agent| start_group(agent, "cpu:0", 2, 2))).await;
        until(&groups[0], |view| active(view) == [0, 1]).await;
    }
}
