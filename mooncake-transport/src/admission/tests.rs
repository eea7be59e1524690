use std::future::pending;

use mooncake_core::clock::{ManualClock, SystemClock};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::*;

const SHORT_WAIT: Duration = Duration::from_secs(10);

fn limits(name: &'static str, slots: usize) -> ListenerLimits {
    let budget = ByteBudget::new(u64::MAX, SystemClock::shared());
    ListenerLimits { budget, ..ListenerLimits::new(name, slots, 2) }
}

/// Connection that reports its end, and receives commands through its entry in the table.
struct Served {
    slot: Arc<ConnectionSlot>,
    ended: mpsc::Receiver<()>,
}

fn serve(connections: &mut Connections) -> Option<Served> {
    let (alive, ended) = mpsc::channel(1);
    let (sender, mut receiver) = mpsc::unbounded_channel();
    let admitted = connections.admit(|slot| {
        let slot = Arc::new(slot);
        // The entry is free when the task drops its share, so the test keeps a weak one.
        let _ = sender.send(Arc::downgrade(&slot));
        async move {
            let _held = (slot, alive);
            pending::<()>().await;
        }
    });
    let slot = receiver.try_recv().ok().and_then(|slot| slot.upgrade());
    admitted.then(|| Served { slot: slot.unwrap(), ended })
}

impl Served {
    async fn has_ended(&mut self) -> bool {
        timeout(SHORT_WAIT, self.ended.recv()).await.is_ok_and(|message| message.is_none())
    }

    fn is_open(&self) -> bool {
        !self.ended.is_closed() && self.slot.connection.state.load(Ordering::SeqCst) != ENDED
    }
}

fn report(name: &str) -> ListenerReport {
    listeners().into_iter().find(|report| report.listener == name).unwrap()
}

#[tokio::test]
async fn full_listener_evicts_longest_waiting_connection() {
    let mut connections = Connections::new(limits("test-longest", 4));
    let mut served: Vec<Served> = (0..4).map(|_| serve(&mut connections).unwrap()).collect();
    // Each has received one request. The second one received it last, and the third one is in the
    // middle of a request.
    for at in [0, 2, 3, 1] {
        assert!(served[at].slot.work());
        tokio::time::sleep(Duration::from_millis(1)).await;
        served[at].slot.wait_for_request();
    }
    tokio::time::sleep(Duration::from_millis(1)).await;
    served[2].slot.begin_request();
    for at in [0, 3, 1, 2] {
        assert!(served[at].is_open());
        assert!(serve(&mut connections).is_some(), "a new connection finds a slot");
        assert!(served[at].has_ended().await, "{at} has waited longest");
        assert!(!served[at].slot.work(), "a closed connection serves nothing");
    }
    assert_eq!((report("test-longest").open, report("test-longest").evicted), (4, 4));
    drop(connections);
    drop(served);
    timeout(SHORT_WAIT, async {
        while report("test-longest").open != 0 {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("slots are counted exactly");
}

#[tokio::test]
async fn connections_that_work_are_never_closed_for_others() {
    let mut connections = Connections::new(limits("test-working", 2));
    let served: Vec<Served> = (0..2).map(|_| serve(&mut connections).unwrap()).collect();
    assert!(served.iter().all(|it| it.slot.work()));
    assert!(serve(&mut connections).is_none());
    assert!(served.iter().all(Served::is_open));
    assert_eq!(report("test-working").full, 1);
    served[1].slot.wait_for_request();
    assert!(serve(&mut connections).is_some());
    assert!(served[0].is_open() && !served[1].is_open());
}

#[tokio::test]
async fn each_wait_has_its_limit() {
    let (short, long) = (Some(Duration::from_millis(30)), Some(Duration::from_secs(3600)));
    for (name, request, idle) in [("test-request", short, long), ("test-idle", long, short)] {
        let mut connections = Connections::new(ListenerLimits { request, idle, ..limits(name, 8) });
        let mut idle_one = serve(&mut connections).unwrap();
        let mut within = serve(&mut connections).unwrap();
        let working = serve(&mut connections).unwrap();
        within.slot.wait_within_request(0);
        assert!(working.slot.work());
        let (overdue, other) =
            if request == short { (&mut within, &mut idle_one) } else { (&mut idle_one, &mut within) };
        let nobody = connections.accept(|_| Poll::<io::Result<()>>::Pending);
        tokio::select! {
            () = nobody => unreachable!(),
            ended = overdue.has_ended() => assert!(ended, "{name}: its time is over"),
        }
        assert!(other.is_open() && working.is_open(), "{name}");
        assert_eq!(report(name).timed_out, 1);
    }
}

#[tokio::test]
async fn bytes_that_trickle_do_not_prolong_a_request() {
    let mut connections = Connections::new(limits("test-trickle", 2));
    let mut slow = serve(&mut connections).unwrap();
    slow.slot.begin_request();
    let other = serve(&mut connections).unwrap();
    tokio::time::sleep(Duration::from_millis(1)).await;
    slow.slot.begin_request();
    slow.slot.wait_within_request(0);
    assert!(serve(&mut connections).is_some());
    assert!(slow.has_ended().await && other.is_open());
}

#[tokio::test]
async fn without_descriptors_the_longest_wait_gives_up_its_own() {
    let mut connections = Connections::new(limits("test-descriptors", 8));
    let (mut first, second) = (serve(&mut connections).unwrap(), serve(&mut connections).unwrap());
    let mut failures = 1;
    let accepted = connections.accept(|_| {
        let failed = failures > 0;
        failures -= 1;
        Poll::Ready(if failed { Err(io::Error::from_raw_os_error(24)) } else { Ok(7) })
    });
    assert_eq!(timeout(SHORT_WAIT, accepted).await.unwrap(), 7);
    assert!(first.has_ended().await && second.is_open());
    assert_eq!(report("test-descriptors").descriptors, 1);
}

#[tokio::test]
async fn finishing_is_bounded() {
    let mut connections = Connections::new(limits("test-finish", 8));
    let served: Vec<Served> = (0..3).map(|_| serve(&mut connections).unwrap()).collect();
    assert!(served[0].slot.work());
    assert!(connections.admit(async move |_| {}));
    assert_eq!(timeout(SHORT_WAIT, connections.finish(Duration::from_millis(20))).await.unwrap(), 3);
    assert!(served.iter().all(|it| it.ended.is_closed()));
}

#[tokio::test]
async fn places_of_ended_connections_are_free() {
    let mut connections = Connections::new(limits("test-free", 1));
    for _ in 0..1000 {
        assert!(connections.admit(async move |_| {}));
        timeout(SHORT_WAIT, connections.tasks.join_next()).await.unwrap().unwrap().unwrap();
    }
    assert_eq!((connections.open(), report("test-free").evicted), (0, 0));
}

#[test]
fn descriptors_are_shared() {
    assert_eq!(within_descriptors(1, 2), 1);
    assert_eq!(within_descriptors(usize::MAX, u64::MAX), 1);
    assert!(within_descriptors(usize::MAX, 2) >= 1);
}

/// Budget on a clock of its own, and the limits of a listener that uses it.
fn budget(name: &'static str, limit: u64) -> (Arc<ManualClock>, ByteBudget, ListenerLimits) {
    let clock = Arc::new(ManualClock::new());
    let budget = ByteBudget::new(limit, clock.clone());
    (clock, budget.clone(), ListenerLimits { budget, ..limits(name, 64) })
}

const LARGE: usize = 100 << 10;

#[tokio::test]
async fn the_longest_message_goes_when_bytes_exceed_their_limit() {
    let (clock, budget, limits) = budget("test-bytes", 3 * LARGE as u64);
    let mut connections = [Connections::new(limits.clone()), Connections::new(limits)];
    let mut served: Vec<Served> = (0..5).map(|at| serve(&mut connections[at % 2]).unwrap()).collect();
    for at in [2, 0, 1, 3] {
        clock.advance(Duration::from_millis(1));
        served[at].slot.wait_in_transfer(1 << 20);
        if at < 3 {
            served[at].slot.hold(LARGE);
        }
    }
    // Bytes that arrive, and buffers of an idle connection, change nothing in the order.
    clock.advance(Duration::from_millis(1));
    served[2].slot.wait_in_transfer(1 << 20);
    served[4].slot.hold(1);
    assert_eq!(budget.report(), ByteReport { held: 3 * LARGE as u64, limit: 3 * LARGE as u64, closed: 0 });
    served[3].slot.hold(LARGE);
    assert!(served[2].has_ended().await, "its message began first");
    assert_eq!(budget.report().closed, 1);
    served[3].slot.hold(2 * LARGE);
    assert!(served[0].has_ended().await && !served[0].slot.work());
    assert!([1, 3, 4].iter().all(|at| served[*at].is_open()));
    // A connection that works is not closed.
    assert!(served[1].slot.work());
    served[3].slot.wait_for_reader(1 << 20);
    served[1].slot.hold(2 * LARGE);
    assert!(served[3].has_ended().await && served[1].is_open());
    drop(connections);
    drop(served);
    let cleared = async {
        while !budget.is_clear() {
            tokio::task::yield_now().await;
        }
    };
    timeout(SHORT_WAIT, cleared).await.expect("bytes are counted exactly");
    assert_eq!(budget.report(), ByteReport { held: 0, limit: 3 * LARGE as u64, closed: 3 });
}

#[tokio::test]
async fn one_message_may_be_longer_than_the_limit() {
    let (_, budget, limits) = budget("test-long-message", LARGE as u64);
    let mut connections = Connections::new(limits);
    let served = serve(&mut connections).unwrap();
    served.slot.wait_in_transfer(1 << 30);
    served.slot.hold(100 * LARGE);
    assert!(served.is_open());
    assert!(!served.slot.may_keep(LARGE) && served.slot.may_keep(LARGE / 2));
    served.slot.hold(SMALL_BUFFERS);
    assert_eq!(budget.report().held, 0, "small buffers do not count");
}

/// A message above the limit goes on beside idle connections and beside short messages, whether
/// they began before it or later. Messages that exceed the limit by themselves still end the
/// longest one.
#[tokio::test]
async fn a_long_message_goes_on_beside_small_buffers() {
    let small = SMALL_BUFFERS + 1;
    let (clock, budget, limits) = budget("test-long-beside", 4 * LARGE as u64);
    let mut connections = Connections::new(limits);
    let mut served: Vec<Served> = (0..5).map(|_| serve(&mut connections).unwrap()).collect();
    // The first one is idle, the second one works, the third one has begun a message.
    served[0].slot.hold(small);
    assert!(served[1].slot.work());
    served[1].slot.hold(small);
    served[2].slot.wait_in_transfer(1 << 20);
    served[2].slot.hold(small);
    clock.advance(Duration::from_millis(1));
    served[3].slot.wait_in_transfer(1 << 30);
    for times in 1..100 {
        served[3].slot.hold(times * LARGE);
    }
    // A later message, and growing buffers of idle connections.
    clock.advance(Duration::from_millis(1));
    served[4].slot.wait_for_reader(1 << 20);
    served[4].slot.hold(small);
    served[0].slot.hold(small + 1);
    assert!(served.iter().all(Served::is_open));
    assert_eq!(budget.report().closed, 0);
    served[4].slot.hold(2 * LARGE);
    assert!(served[2].has_ended().await, "the others exceed their half, and its message began first");
    assert!([0, 1, 3, 4].iter().all(|at| served[*at].is_open()));
    clock.advance(Duration::from_millis(1));
    served[2] = serve(&mut connections).unwrap();
    served[2].slot.wait_in_transfer(1 << 30);
    served[2].slot.hold(2 * LARGE);
    assert!(
        served[3].has_ended().await && served[2].is_open(),
        "its message began before those of the others"
    );
}

/// Requests that are complete and wait for their turn are closed for their bytes, and not for
/// their time.
#[tokio::test]
async fn requests_that_wait_for_their_turn_are_closed_for_bytes() {
    let (clock, budget, limits) = budget("test-turns", 3 * LARGE as u64);
    let mut connections = Connections::new(limits);
    let mut served: Vec<Served> = (0..4).map(|_| serve(&mut connections).unwrap()).collect();
    for waiting in &served[..3] {
        assert!(waiting.slot.work());
        clock.advance(Duration::from_millis(1));
        waiting.slot.wait_for_turn();
        waiting.slot.hold(LARGE);
    }
    clock.advance(Duration::from_secs(3600));
    connections.admission.close_overdue();
    assert!(served.iter().all(Served::is_open), "the server is slow, not its peers");
    served[3].slot.wait_in_transfer(1 << 20);
    served[3].slot.hold(LARGE);
    assert!(served[0].has_ended().await && !served[0].slot.work());
    assert!(served[1..].iter().all(Served::is_open));
    // The turn of one of them comes, and its bytes are released.
    assert!(served[1].slot.work());
    served[1].slot.end_transfer();
    served[1].slot.hold(0);
    served[3].slot.hold(2 * LARGE);
    assert!(served[1..].iter().all(Served::is_open));
    assert_eq!(budget.report().closed, 1);
}

/// A backlog is one message for its bytes, and each message of it has its own minimum rate.
#[tokio::test]
async fn a_peer_that_reads_a_backlog_slowly_is_closed_for_its_bytes() {
    let (clock, budget, limits) = budget("test-backlog", 3 * LARGE as u64);
    let mut connections = Connections::new(limits);
    let mut served: Vec<Served> = (0..3).map(|_| serve(&mut connections).unwrap()).collect();
    let admission = connections.admission.clone();
    served[0].slot.wait_for_reader(100);
    served[0].slot.hold(2 * LARGE);
    clock.advance(Duration::from_secs(1));
    served[1].slot.wait_in_transfer(1 << 30);
    for _ in 0..40 {
        clock.advance(Duration::from_secs(8));
        served[0].slot.begin_next();
        served[0].slot.wait_for_reader(100);
        served[1].slot.wait_in_transfer(1 << 40);
        admission.close_overdue();
    }
    assert!(served.iter().all(Served::is_open), "each message has its time");
    served[1].slot.hold(LARGE);
    assert!(served.iter().all(Served::is_open));
    served[2].slot.wait_in_transfer(1 << 20);
    served[2].slot.hold(LARGE);
    assert!(served[0].has_ended().await, "its backlog began first");
    assert!(served[1..].iter().all(Served::is_open));
    assert_eq!(budget.report().closed, 1);
}

/// The time of a turn does not count as time of the message that is under way.
#[tokio::test]
async fn a_turn_takes_no_time_of_a_response() {
    let (clock, _, limits) = budget("test-turn-time", u64::MAX);
    let mut connections = Connections::new(limits);
    let mut served = serve(&mut connections).unwrap();
    let admission = connections.admission.clone();
    served.slot.wait_for_reader(0);
    clock.advance(Duration::from_secs(20));
    let turn = served.slot.begin_turn();
    served.slot.wait_for_turn();
    clock.advance(Duration::from_secs(100));
    admission.close_overdue();
    served.slot.end_turn(turn);
    served.slot.wait_for_reader(0);
    clock.advance(Duration::from_secs(9));
    admission.close_overdue();
    assert!(served.is_open());
    clock.advance(Duration::from_secs(2));
    admission.close_overdue();
    assert!(served.has_ended().await);
}

#[tokio::test]
async fn a_message_has_a_minimum_rate() {
    let (clock, _, limits) = budget("test-rate", u64::MAX);
    let mut connections = Connections::new(limits);
    let mut served: Vec<Served> = (0..4).map(|_| serve(&mut connections).unwrap()).collect();
    let admission = connections.admission.clone();
    let second = Duration::from_secs(1);
    // The first one sends a byte every 15 s, the second one sends its request in time, the third
    // one reads some bytes every 15 s, the fourth one reads nothing.
    served[3].slot.wait_for_reader(64 << 20);
    for step in 0..7 {
        served[0].slot.wait_in_transfer(64 << 20);
        served[1].slot.wait_in_transfer(64 << 20);
        served[2].slot.wait_for_reader(64 << 20);
        clock.advance(15 * second);
        admission.close_overdue();
        match step {
            0..2 => assert!(served.iter().all(Served::is_open)),
            2..6 => assert!(served[..3].iter().all(Served::is_open) && !served[3].is_open()),
            _ => assert!(!served[0].is_open() && served[1].is_open() && !served[2].is_open()),
        }
        if step == 5 {
            assert!(served[1].slot.work());
            served[1].slot.end_transfer();
            served[1].slot.wait_for_request();
        }
    }
    for at in [0, 2, 3] {
        assert!(served[at].has_ended().await);
    }
    assert_eq!(report("test-rate").timed_out, 3);
}
