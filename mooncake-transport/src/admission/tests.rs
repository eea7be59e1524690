use std::future::pending;

use tokio::sync::mpsc;
use tokio::time::timeout;

use super::*;

const SOON: Duration = Duration::from_secs(10);

fn limits(name: &'static str, slots: usize) -> ListenerLimits {
    ListenerLimits { name, slots, descriptor_share: 2, request: None, idle: None }
}

/// Connection that reports its end, and receives commands through its entry in the table.
struct Served {
    slot: Arc<ConnectionSlot>,
    ended: mpsc::Receiver<()>,
}

fn serve(connections: &mut Connections) -> Option<Served> {
    let (alive, ended) = mpsc::channel(1);
    let (tell, mut told) = mpsc::unbounded_channel();
    let admitted = connections.admit(|slot| {
        let slot = Arc::new(slot);
        // The entry is free when the task drops its share, so the test keeps a weak one.
        let _ = tell.send(Arc::downgrade(&slot));
        async move {
            let _held = (slot, alive);
            pending::<()>().await;
        }
    });
    let slot = told.try_recv().ok().and_then(|slot| slot.upgrade());
    admitted.then(|| Served { slot: slot.unwrap(), ended })
}

impl Served {
    async fn has_ended(&mut self) -> bool {
        timeout(SOON, self.ended.recv()).await.is_ok_and(|message| message.is_none())
    }

    fn is_open(&self) -> bool {
        !self.ended.is_closed() && self.slot.connection.state.load(Ordering::SeqCst) != ENDED
    }
}

fn report(name: &str) -> ListenerReport {
    listeners().into_iter().find(|report| report.listener == name).unwrap()
}

#[tokio::test]
async fn the_longest_wait_makes_room_whatever_was_asked_before() {
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
    timeout(SOON, async {
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
        within.slot.wait_within_request();
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
    slow.slot.wait_within_request();
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
    assert_eq!(timeout(SOON, accepted).await.unwrap(), 7);
    assert!(first.has_ended().await && second.is_open());
    assert_eq!(report("test-descriptors").descriptors, 1);
}

#[tokio::test]
async fn finishing_is_bounded() {
    let mut connections = Connections::new(limits("test-finish", 8));
    let served: Vec<Served> = (0..3).map(|_| serve(&mut connections).unwrap()).collect();
    assert!(served[0].slot.work());
    assert!(connections.admit(async move |_| {}));
    assert_eq!(timeout(SOON, connections.finish(Duration::from_millis(20))).await.unwrap(), 3);
    assert!(served.iter().all(|it| it.ended.is_closed()));
}

#[tokio::test]
async fn places_of_ended_connections_are_free() {
    let mut connections = Connections::new(limits("test-free", 1));
    for _ in 0..1000 {
        assert!(connections.admit(async move |_| {}));
        timeout(SOON, connections.tasks.join_next()).await.unwrap().unwrap().unwrap();
    }
    assert_eq!((connections.open(), report("test-free").evicted), (0, 0));
}

#[test]
fn descriptors_are_shared() {
    assert_eq!(within_descriptors(1, 2), 1);
    assert_eq!(within_descriptors(usize::MAX, u64::MAX), 1);
    assert!(within_descriptors(usize::MAX, 2) >= 1);
}
