//! Tests of connections with processes that a test plays.

use bytes::BufMut;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;
use crate::message::{HELLO_BYTES, Hello};

/// Connection of a process of this host that a test plays, with a ring.
pub(crate) struct FakePeer {
    stream: TcpStream,
    ring: RingWriter,
    _doorbell: RemoteDoorbell,
}

impl FakePeer {
    /// Connects to a data plane, which has opened the ring at the end.
    pub(crate) async fn begin(plane: &DataPlane, from: u64) -> Self {
        let mut stream = TcpStream::connect(("127.0.0.1", plane.plane.port)).await.unwrap();
        let (ring, address) = RingWriter::create().unwrap();
        stream.write_all(&Hello { from, to: plane.plane.process, has_proof: false }.encode()).await.unwrap();
        stream.write_all(&Frame::Ring(address).encode()).await.unwrap();
        let mut response = [0; 4 + FileAddress::BYTES];
        stream.read_exact(&mut response).await.unwrap();
        let doorbell = RemoteDoorbell::open(FileAddress::decode(response[4..].try_into().unwrap())).unwrap();
        Self { stream, ring, _doorbell: doorbell }
    }

    /// Writes a frame into the ring, without a notice. Returns false if there is no space.
    pub(crate) fn push(&mut self, frame: &[u8]) -> bool {
        self.ring.push(1, frame)
    }

    async fn notify(&mut self) {
        self.stream.write_all(&Frame::Notice.encode()).await.unwrap();
    }
}

/// Slots of the messages that have come, in their order. `None` stands for a loss.
#[derive(Default)]
struct Recorder(Mutex<Vec<Option<u8>>>);

impl Recipient for Recorder {
    fn deliver(self: Arc<Self>, _process: u64, slot: u8, _message: Message) {
        self.0.lock().push(Some(slot));
    }

    fn lose(self: Arc<Self>, _process: u64) {
        self.0.lock().push(None);
    }

    fn forget(self: Arc<Self>, _process: u64, _communicator: u32) {}
}

const NUMBER: u32 = 1000;

fn message(slot: u8) -> Bytes {
    Envelope { communicator: NUMBER, slot, message: Message::Bye }.encode()
}

fn record(plane: &DataPlane) -> (Arc<Recorder>, Arc<dyn Recipient>) {
    let recorder = Arc::new(Recorder::default());
    let recipient: Arc<dyn Recipient> = recorder.clone();
    plane.plane.add(NUMBER, Arc::downgrade(&recipient));
    (recorder, recipient)
}

async fn plane() -> DataPlane {
    let engine = TransferEngine::builder().name("127.0.0.1").protocol("tcp").start().await.unwrap();
    DataPlane::start(engine, "127.0.0.1").unwrap()
}

/// Connects to a data plane with these first bytes, and returns the start of its response.
async fn respond(plane: &DataPlane, first: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(("127.0.0.1", plane.plane.port)).await.unwrap();
    stream.write_all(first).await.unwrap();
    let mut response = vec![0; 4];
    match timeout(Duration::from_secs(60), stream.read(&mut response)).await.unwrap() {
        Ok(read) => response.truncate(read),
        // Unread bytes make the close a reset.
        Err(_) => response.clear(),
    }
    response
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn strangers_and_malformed_messages_are_closed() {
    let plane = plane().await;
    let process = plane.plane.process;
    let hello = Hello { from: 1, to: process, has_proof: false }.encode();
    let mut malformed = hello.to_vec();
    malformed.put_u32_le(6);
    malformed.extend([0, 0, 0, 0, 0, 99]);
    let mut too_long = hello.to_vec();
    too_long.put_u32_le(u32::MAX);
    let other = Hello { from: 1, to: process.wrapping_add(1), has_proof: false }.encode();
    for first in [&[b'x'; HELLO_BYTES][..], &other, &malformed, &too_long] {
        assert!(respond(&plane, first).await.is_empty());
    }
    // A connection without a first message is closed after a while.
    assert!(respond(&plane, &hello[..3]).await.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_ring_that_cannot_be_opened_is_refused() {
    let plane = plane().await;
    let mut first = Hello { from: 1, to: plane.plane.process, has_proof: false }.encode().to_vec();
    first.extend(Frame::Ring(FileAddress::NONE).encode());
    assert_eq!(respond(&plane, &first).await, [0; 4]);
    // Messages still come through the connection.
    assert!(!plane.plane.covers_all_peers() && plane.plane.driver.enter().is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_message_for_an_unknown_communicator_is_refused() {
    let plane = plane().await;
    let mut first = Hello { from: 1, to: plane.plane.process, has_proof: false }.encode().to_vec();
    first.extend(Envelope { communicator: 999, slot: 0, message: Message::Bye }.encode());
    assert_eq!(respond(&plane, &first).await, 999u32.to_le_bytes());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn nothing_of_an_earlier_connection_comes_after_a_later_one() {
    let plane = plane().await;
    let (recorder, _recipient) = record(&plane);
    let mut first = FakePeer::begin(&plane, 1).await;
    assert!(first.push(&message(1)));
    let mut second = FakePeer::begin(&plane, 1).await;
    assert_eq!(*recorder.0.lock(), [Some(1), None]);
    assert!(first.push(&message(2)) && second.push(&message(3)));
    second.notify().await;
    while recorder.0.lock().last() != Some(&Some(3)) {
        tokio::task::yield_now().await;
    }
    assert_eq!(*recorder.0.lock(), [Some(1), None, Some(3)]);
    // The end of the first connection is not that of the second one.
    drop(first);
    assert!(second.push(&message(4)));
    second.notify().await;
    while recorder.0.lock().last() != Some(&Some(4)) {
        tokio::task::yield_now().await;
    }
    assert_eq!(*recorder.0.lock(), [Some(1), None, Some(3), Some(4)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn an_earlier_connection_that_comes_late_is_refused() {
    let plane = plane().await;
    let (recorder, _recipient) = record(&plane);
    let mut present = FakePeer::begin(&plane, 1).await;
    let number = plane.plane.incoming.lock().get(&1).copied().unwrap();
    let (listener, state) = (TcpListener::bind("127.0.0.1:0").await.unwrap(), Mutex::default);
    for (connection, is_taken) in [(number + 2, true), (number + 1, false)] {
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let socket = ParentOnly::new(stream);
        let incoming_link = Arc::new(IncomingLink { process: 1, connection, socket, state: state() });
        assert_eq!(plane.plane.add_incoming(&incoming_link), is_taken);
    }
    assert!(present.push(&message(1)));
    assert_eq!(*recorder.0.lock(), [None], "one connection was replaced");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn the_task_of_a_replaced_connection_leaves_the_later_one_alone() {
    let plane = plane().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let host = "127.0.0.1".to_owned();
    let endpoint = Endpoint { process: 5, communicator: 1, host, port, engine: String::new() };
    let link = plane.plane.link(&endpoint);
    link.close();
    // The first connection is ready only now.
    let soon = Duration::from_secs(10);
    assert!(timeout(soon, link.run_connection(1, 0)).await.expect("it uses the later one").is_err());
    let is_untouched = |outbox: &Outbox| outbox.socket.is_none() && outbox.offered.is_none();
    assert!(is_untouched(&link.outbox.lock()) && link.outbox.lock().frames == 0);

    link.open();
    while is_untouched(&link.outbox.lock()) {
        tokio::task::yield_now().await;
    }
    let socket = link.outbox.lock().socket.clone().unwrap();
    let other = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    let doorbell = plane.plane.driver.doorbell();
    assert!(link.begin_ring(0, doorbell).is_err() && link.flush(&other, 0).is_err());
    assert!(timeout(soon, link.serve(1, 0)).await.expect("it uses the later one").is_err());
    {
        let outbox = link.outbox.lock();
        assert!(outbox.socket.as_ref().is_some_and(|present| Arc::ptr_eq(present, &socket)));
        assert!(outbox.offered.is_some() && outbox.ring.is_none() && outbox.task.is_some());
    }
    assert!(link.begin_ring(1, doorbell).is_ok() && link.outbox.lock().ring.is_some());
}

/// Process that writes a message for each one that is taken.
struct Endless {
    visit: Mutex<FakePeer>,
    taken: AtomicUsize,
}

impl Recipient for Endless {
    fn deliver(self: Arc<Self>, _process: u64, slot: u8, _message: Message) {
        // The test ends, even if the ring is read to its end.
        if self.taken.fetch_add(1, Ordering::SeqCst) < 3 * MAX_MESSAGES {
            assert!(self.visit.lock().push(&message(slot)));
        }
    }

    fn lose(self: Arc<Self>, _process: u64) {}

    fn forget(self: Arc<Self>, _process: u64, _communicator: u32) {}
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_ring_without_end_does_not_keep_the_thread() {
    let plane = plane().await;
    let mut visit = FakePeer::begin(&plane, 1).await;
    assert!(visit.push(&message(1)));
    let endless = Arc::new(Endless { visit: Mutex::new(visit), taken: AtomicUsize::new(0) });
    let recipient: Arc<dyn Recipient> = endless.clone();
    plane.plane.add(NUMBER, Arc::downgrade(&recipient));
    for round in 1..3 {
        plane.plane.take();
        assert_eq!(endless.taken.load(Ordering::SeqCst), round * MAX_MESSAGES);
        assert!(plane.plane.has_messages());
    }
}

async fn plane_with(secret: Option<&str>) -> DataPlane {
    let engine = TransferEngine::builder().name("127.0.0.1").protocol("tcp").start().await.unwrap();
    let secret = secret.map(|secret| Secret::new(secret).unwrap());
    DataPlane::start_with_secret(engine, "127.0.0.1", secret).unwrap()
}

/// Sends a message from one data plane to another, and returns what the receiver has recorded and
/// whether the sender has noticed a loss.
async fn send_between(from: Option<&str>, to: Option<&str>) -> (Vec<Option<u8>>, bool) {
    let (from, to) = (plane_with(from).await, plane_with(to).await);
    let (sent, _sender) = record(&from);
    let (received, _receiver) = record(&to);
    let link = from.plane.link(&to.plane.endpoint(NUMBER));
    link.send(&Envelope { communicator: NUMBER, slot: 4, message: Message::Bye });
    let outcome = async {
        while received.0.lock().is_empty() && sent.0.lock().is_empty() {
            tokio::task::yield_now().await;
        }
    };
    timeout(Duration::from_secs(30), outcome).await.expect("nothing has happened");
    (received.0.lock().clone(), !sent.0.lock().is_empty())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn messages_come_from_processes_with_the_same_secret() {
    assert_eq!(send_between(Some("a"), Some("a")).await, (vec![Some(4)], false));
    assert_eq!(send_between(None, None).await, (vec![Some(4)], false));
    for (from, to) in [(Some("a"), Some("b")), (Some("a"), None), (None, Some("a"))] {
        assert_eq!(send_between(from, to).await, (vec![], true), "{from:?} {to:?}");
    }
}

/// The number of a process is not a secret: others may learn it. Neither a connection nor a ring of
/// such a process is taken, whatever it sends.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn strangers_are_refused_by_name_where_a_secret_is_set() {
    let plane = plane_with(Some("a secret")).await;
    let (recorder, _recipient) = record(&plane);
    let process = plane.plane.process;
    let plain = Hello { from: 1, to: process, has_proof: false }.encode();
    let proved = Hello { from: 1, to: process, has_proof: true }.encode();
    let (ring, address) = RingWriter::create().unwrap();
    let offer = Frame::Ring(address).encode();
    let opening = [0; 48];
    for first in [
        [&plain[..], &offer].concat(),
        [&plain[..], &message(1)].concat(),
        [&proved[..], &opening, &message(1)].concat(),
        [&proved[..], &opening, &[0; 32], &offer].concat(),
    ] {
        assert_eq!(respond(&plane, &first).await, b"MC-P");
    }
    assert!(recorder.0.lock().is_empty() && plane.plane.incoming.lock().is_empty());
    drop(ring);
}
