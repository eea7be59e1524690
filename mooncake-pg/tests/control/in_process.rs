//! Agents of one process.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use futures::future::{join_all, try_join_all};
use mooncake_core::ErrorCode;
use mooncake_pg::control::{Agent, ControlSettings, CoordinatorServer, GroupHandle, is_refusal};
use mooncake_pg::protocol::{AttachMode, Change, ProposalOutcome};
use mooncake_pg::view::{Evidence, GlobalRank, Membership, RankState, Slot, SyncOutcome, View};
use tokio::time::timeout;

use crate::{PATIENCE, active, settings, spec};

pub(crate) const HOST: &str = "127.0.0.1";
const LONG: Duration = Duration::from_secs(60);

struct World {
    server: CoordinatorServer,
    agents: Vec<Agent>,
    groups: Vec<GroupHandle>,
}

pub(crate) async fn start_group(agent: &Agent, name: &str, size: u8, capacity: usize) -> GroupHandle {
    let group = agent.register_group(spec(name, size, capacity, AttachMode::CreateOrAttach)).await.unwrap();
    group.publish_endpoint(vec![agent.rank().0].into());
    group.wait_until_ready().await.unwrap();
    group
}

async fn connect(server: &CoordinatorServer, rank: u8, settings: &ControlSettings) -> Agent {
    Agent::connect(server.address(), GlobalRank(rank), HOST, settings.clone()).await.unwrap()
}

async fn world(size: u8, settings: &ControlSettings) -> World {
    let server = CoordinatorServer::start(HOST, settings.clone()).await.unwrap();
    let agents = join_all((0..size).map(|rank| connect(&server, rank, settings))).await;
    let capacity = usize::from(size);
    let groups = join_all(agents.iter().map(|agent| start_group(agent, "cpu:0", size, capacity))).await;
    World { server, agents, groups }
}

/// Waits for a view of the data plane.
pub(crate) async fn until(group: &GroupHandle, is_wanted: impl Fn(&View) -> bool) -> Arc<View> {
    let mut views = group.view();
    let wanted = views.wait_for(|view| view.as_ref().is_some_and(|view| is_wanted(view)));
    let found = timeout(PATIENCE, wanted).await;
    let found = found.unwrap_or_else(|_| panic!("last view is {:?}", group.last_view())).unwrap();
    found.clone().unwrap()
}

pub(crate) async fn until_usable(group: &GroupHandle, slots: &[u8]) {
    let slots: Vec<Slot> = slots.iter().copied().map(Slot).collect();
    let usable = async {
        while group.peer_state(&slots).contains(&false) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, usable).await.unwrap_or_else(|_| panic!("last view is {:?}", group.last_view()));
}

fn applied(outcome: &ProposalOutcome) -> bool {
    matches!(outcome, ProposalOutcome::Applied { dropped, .. } if dropped.is_empty())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_agree_on_their_first_view() {
    let world = world(4, &settings(LONG)).await;
    let all = Slot(0)..=Slot(3);
    let slots: Vec<Slot> = (0..4).map(Slot).collect();
    assert!(all.contains(&world.groups[2].slot()));
    let mut views = Vec::new();
    for group in &world.groups {
        let view = until(group, |view| view.members.iter().all(|m| m.rank_state == RankState::Healthy)).await;
        assert_eq!(active(&view), [0, 1, 2, 3]);
        assert_eq!(view.extent(), 4);
        assert_eq!(group.peer_state(&slots), [true; 4]);
        assert_eq!((group.num_synced(), group.rank_state()), (4, RankState::Healthy));
        assert_eq!(view.members[1].endpoint.as_deref(), Some(&[1][..]));
        assert_eq!(view.mask, views.first().unwrap_or(&view).mask);
        views.push(view);
        assert!(group.is_alive(Slot(0)).await);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_whose_sockets_close_is_out_at_once() {
    let mut world = world(4, &settings(LONG)).await;
    let before = until(&world.groups[0], |_| true).await;
    world.groups.pop();
    world.agents.pop();
    let start = tokio::time::Instant::from_std(std_now());
    for group in &world.groups {
        let view = until(group, |view| active(view) == [0, 1, 2]).await;
        assert!(view.mask > before.mask && view.members[3].endpoint.is_none());
        assert_eq!(group.peer_state(&[Slot(3)]), [false]);
        assert!(!group.is_alive(Slot(3)).await);
    }
    assert!(start.elapsed() < LONG / 2, "the window was closed early");
}

#[allow(clippy::disallowed_methods, reason = "the limit is of real time")]
fn std_now() -> std::time::Instant {
    std::time::Instant::now()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_leaves_the_active_set_and_joins_again() {
    let world = world(3, &settings(LONG)).await;
    let outcome = world.groups[0].propose(Change::Deactivate, &[Slot(2)]).await.unwrap();
    assert!(applied(&outcome), "{outcome:?}");
    // A proposal is in force everywhere before it returns.
    for group in &world.groups {
        assert_eq!(active(&group.last_view().unwrap()), [0, 1]);
    }
    let early = world.groups[0].propose(Change::Activate, &[Slot(2)]).await.unwrap();
    assert!(
        matches!(&early, ProposalOutcome::Rejected(reason) if reason.contains("join_group")),
        "{early:?}"
    );
    let rejoin = async {
        world.groups[2].publish_endpoint("again".into());
        world.groups[2].join().await.unwrap();
    };
    let activate = async {
        until_usable(&world.groups[0], &[2]).await;
        let both = [&world.groups[0], &world.groups[1]];
        join_all(both.map(|group| group.propose(Change::Activate, &[Slot(2)]))).await
    };
    let ((), outcomes) = tokio::join!(rejoin, activate);
    assert!(outcomes.iter().all(|outcome| applied(outcome.as_ref().unwrap())), "{outcomes:?}");
    let view = until(&world.groups[1], |view| active(view) == [0, 1, 2]).await;
    assert_eq!(view.members[2].endpoint.as_deref(), Some(&b"again"[..]));
    let wrong = world.groups[0].propose(Change::Activate, &[Slot(7)]).await.unwrap();
    assert!(matches!(&wrong, ProposalOutcome::Rejected(reason) if reason.contains("slot=7")), "{wrong:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_that_is_created_again_is_another_one() {
    let mut world = world(3, &settings(LONG)).await;
    let before = until(&world.groups[0], |_| true).await.generation;
    // Rank 0 is ahead of the others.
    let groups = std::mem::take(&mut world.groups);
    let mut groups = groups.into_iter();
    groups.next().unwrap().unregister().await.unwrap();
    let first = start_group(&world.agents[0], "cpu:0", 3, 3);
    let others = async {
        try_join_all(groups.map(|group| async move { group.unregister().await })).await.unwrap();
        join_all(world.agents[1..].iter().map(|agent| start_group(agent, "cpu:0", 3, 3))).await
    };
    let (first, others) = tokio::join!(first, others);
    for group in others.iter().chain([&first]) {
        let view = until(group, |view| active(view) == [0, 1, 2]).await;
        assert!(view.generation > before);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_grows() {
    let settings = settings(LONG);
    let server = CoordinatorServer::start(HOST, settings.clone()).await.unwrap();
    let agents = join_all((0..3).map(|rank| connect(&server, rank, &settings))).await;
    // The added rank may come first.
    let added = async {
        let spec = spec("cpu:0", 3, 3, AttachMode::AttachOrExtend);
        let group = agents[2].register_group(spec).await.unwrap();
        group.publish_endpoint("2".into());
        group.wait_until_ready().await.unwrap();
        assert!(group.view().borrow().is_none(), "operations are local before the activation");
        group.join().await.unwrap();
        group
    };
    let founders = async {
        let groups = join_all(agents[..2].iter().map(|agent| start_group(agent, "cpu:0", 2, 3))).await;
        until_usable(&groups[1], &[2]).await;
        assert!(applied(&groups[1].propose(Change::Activate, &[Slot(2)]).await.unwrap()));
        groups
    };
    let (added, founders) = tokio::join!(added, founders);
    for group in founders.iter().chain([&added]) {
        assert_eq!(until(group, |view| active(view) == [0, 1, 2]).await.extent(), 3);
    }
    let other = agents[0].register_group(spec("cpu:9", 2, 1, AttachMode::CreateOrAttach)).await.unwrap_err();
    assert!(is_refusal(&other) && other.message().contains("capacity"), "{other}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_transfer_is_reconciled() {
    let world = world(3, &settings(LONG)).await;
    let view = until(&world.groups[0], |view| active(view) == [0, 1, 2]).await;
    // The process lives, and the other rank contradicts: of two ranks without a link, one leaves.
    let group = &world.groups[0];
    group.report(Slot(2), view.members[2].incarnation, Evidence::Failure);
    let outcome = group.sync_after_failure().await;
    // The report of the other rank may have closed the window before the call.
    let (SyncOutcome::Reconciled(after) | SyncOutcome::NoPending(after)) = &outcome else {
        panic!("{outcome:?}")
    };
    assert_eq!(active(after), [0, 1]);
    assert_eq!(group.view().borrow().as_ref().unwrap().mask, after.mask, "the view is applied");
    let outcome = group.sync_after_failure().await;
    assert!(matches!(outcome, SyncOutcome::NoPending(_)), "{outcome:?}");
    // A stale report changes nothing.
    group.report(Slot(1), 0, Evidence::Failure);
    assert!(
        matches!(group.sync_after_failure().await, SyncOutcome::NoPending(view) if active(&view) == [0, 1])
    );
    // The link works, and the process comes back in place.
    let join = world.groups[2].join();
    let activate = async {
        until_usable(group, &[2]).await;
        group.propose(Change::Activate, &[Slot(2)]).await
    };
    let (joined, outcome) = tokio::join!(join, activate);
    joined.unwrap();
    assert!(applied(&outcome.unwrap()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_fail_by_name_without_a_coordinator() {
    let World { server, agents, groups } = world(3, &settings(LONG)).await;
    drop(server);
    // The coordinator may still respond to a request before its connections end.
    let offline = async {
        while agents.iter().any(Agent::is_online) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, offline).await.unwrap();
    let limit = Duration::from_secs(20);
    let sync = timeout(limit, groups[1].sync_after_failure());
    let propose = timeout(limit, groups[1].propose(Change::Deactivate, &[Slot(2)]));
    let register = timeout(limit, agents[2].register_group(spec("x", 3, 3, AttachMode::CreateOrAttach)));
    let join = timeout(limit, groups[2].join());
    let leave = timeout(limit, groups[0].unregister());
    let (sync, propose, register, join, leave) = tokio::join!(sync, propose, register, join, leave);
    let sync = sync.unwrap();
    assert!(matches!(&sync, SyncOutcome::Rejected(reason) if reason.contains("coordinator=")), "{sync:?}");
    for error in [propose.unwrap().unwrap_err(), register.unwrap().unwrap_err(), leave.unwrap().unwrap_err()]
    {
        assert_eq!(error.code(), ErrorCode::RpcFail, "{error}");
        assert!(error.message().contains("does not respond"), "{error}");
    }
    join.unwrap().unwrap();
    assert!(!agents[0].is_online());
    assert_eq!(groups[1].rank_state(), RankState::Offline);
    // Later calls fail at once, and links show who lives.
    timeout(Duration::from_secs(1), groups[1].propose(Change::Deactivate, &[Slot(2)]))
        .await
        .unwrap()
        .unwrap_err();
    assert!(groups[1].is_alive(Slot(2)).await);
    timeout(limit, agents[1].shut_down()).await.unwrap();
    let gone =
        Agent::connect(agents[1].coordinator(), GlobalRank(1), HOST, settings(LONG)).await.unwrap_err();
    assert!(gone.message().contains("cannot connect"), "{gone}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_graceful_end_is_no_failure() {
    let World { server, agents, groups } = world(3, &settings(LONG)).await;
    assert!(applied(&groups[0].propose(Change::Deactivate, &[Slot(2)]).await.unwrap()));
    groups[2].unregister().await.unwrap();
    agents[2].shut_down().await;
    let error = agents[2].register_group(spec("x", 3, 3, AttachMode::CreateOrAttach)).await.unwrap_err();
    assert!(error.message().contains("shut down"), "{error}");
    // The coordinator waits for the last one.
    let others = async {
        agents[1].shut_down().await;
        agents[0].shut_down().await;
    };
    let ends = timeout(PATIENCE, server.shut_down(GlobalRank(0), LONG));
    let ((), ended) = tokio::join!(others, ends);
    ended.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_has_one_process() {
    let settings = settings(LONG);
    let world = world(2, &settings).await;
    let mut impatient = settings.clone();
    impatient.agent.request = Duration::from_secs(2);
    let second = Agent::connect(world.server.address(), GlobalRank(1), HOST, impatient).await.unwrap_err();
    assert_eq!(second.code(), ErrorCode::RpcTimeout, "{second}");
    let view = until(&world.groups[0], |_| true).await;
    assert_eq!(active(&view), [0, 1]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_registration_without_a_caller_ends() {
    let settings = settings(LONG);
    let server = CoordinatorServer::start(HOST, settings.clone()).await.unwrap();
    let agents = join_all((0..2).map(|rank| connect(&server, rank, &settings))).await;
    for pause in [0, 1, 5] {
        let register = agents[0].register_group(spec("cpu:0", 2, 2, AttachMode::CreateOrAttach));
        let _ = timeout(Duration::from_millis(pause), register).await;
    }
    let groups = join_all(agents.iter().map(|agent| start_group(agent, "cpu:0", 2, 2))).await;
    let view = until(&groups[1], |_| true).await;
    assert_eq!(active(&view), [0, 1]);
}

/// Sends bytes to a coordinator and returns the response.
fn exchange(server: &CoordinatorServer, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(server.address()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(bytes).unwrap();
    let mut response = Vec::new();
    // A connection with unread bytes is reset.
    let _ = stream.read_to_end(&mut response);
    response
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_versions_and_programs_are_refused() {
    let settings = settings(LONG);
    let server = CoordinatorServer::start(HOST, settings.clone()).await.unwrap();
    let (server, responses) = tokio::task::spawn_blocking(move || {
        let mut hello = *b"MC-GROUP\x02\x00\x01.....12345678";
        let newer = exchange(&server, &hello);
        hello[8] = 1;
        hello[10] = 2;
        let link = exchange(&server, &hello);
        let http = exchange(&server, b"GET / HTTP/1.1\r\nHost: here\r\n\r\n");
        let silent = exchange(&server, b"");
        hello[10] = 1;
        let garbage = exchange(&server, &[&hello[..], &[0xff; 64][..]].concat());
        let idle = exchange(&server, &hello);
        (server, [newer, link, http, silent, garbage, idle])
    })
    .await
    .unwrap();
    let [newer, link, http, silent, garbage, idle] =
        responses.map(|bytes| (bytes.get(8).copied(), bytes.get(10).copied()));
    assert_eq!(newer, (Some(1), Some(1)), "own version, and the refusal");
    assert_eq!(link, (Some(1), Some(2)), "no process has its links here");
    assert_eq!((http, silent), ((None, None), (None, None)));
    assert_eq!((garbage, idle), ((Some(1), Some(0)), (Some(1), Some(0))), "closed after the hello");
    drop(connect(&server, 0, &settings).await);

    // A coordinator of another version.
    let listener = tokio::net::TcpListener::bind((HOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let mut impatient = settings;
    impatient.agent.request = Duration::from_secs(1);
    let newer = async {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut hello = [0; 24];
            let _ = tokio::io::AsyncReadExt::read_exact(&mut stream, &mut hello).await;
            let answer = *b"MC-GROUP\x07\x00\x01.....";
            let _ = tokio::io::AsyncWriteExt::write_all(&mut stream, &answer).await;
        }
    };
    let error = tokio::select! {
        connected = Agent::connect(&address, GlobalRank(0), HOST, impatient) => connected.unwrap_err(),
        _ = newer => unreachable!("it serves for ever"),
    };
    assert!(error.message().contains("own=1 other=7"), "{error}");
}
