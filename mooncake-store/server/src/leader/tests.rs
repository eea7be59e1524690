//! Tests of elections in simulated time, on a directory in memory. Masters die, freeze, are cut off
//! or lose responses; there are never two leaders.

use std::future::{pending, poll_fn, ready};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use mooncake_core::clock::{Clock, ManualClock, Rng};
use mooncake_core::meta::{Expect, MemoryMetadata, MetaCapabilities, MetaEvent, MetaValue, MetadataBackend};
use mooncake_core::{Error, ErrorCode};

use super::*;

const KEY: &str = "mooncake-store/c/master_view";
const STEP: Duration = Duration::from_millis(20);
/// Timeout of an unanswered request.
const DEAF: Duration = Duration::from_secs(2);

#[derive(Debug)]
struct Simulated(Arc<ManualClock>);

#[async_trait]
impl Pace for Simulated {
    async fn sleep(&self, span: Duration) {
        let until = self.0.now().after(span);
        poll_fn(|_| if self.0.now() >= until { Poll::Ready(()) } else { Poll::Pending }).await;
    }
}

/// Fault between a master and its directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trouble {
    Nothing,
    /// No request arrives.
    CutOff,
    /// Requests are executed, and their responses are lost.
    Deaf,
    /// Requests for the promises of earlier leaders are not answered.
    WithoutPromises,
}

/// Connection of a master to the directory.
#[derive(Debug)]
struct Way {
    directory: Arc<MemoryMetadata>,
    pace: Simulated,
    trouble: Arc<Mutex<Trouble>>,
}

impl Way {
    async fn through<T: Send>(&self, work: impl Future<Output = Result<T>> + Send) -> Result<T> {
        let trouble = *self.trouble.lock();
        let answer = if trouble == Trouble::CutOff { None } else { Some(work.await) };
        match answer {
            Some(answer) if matches!(trouble, Trouble::Nothing | Trouble::WithoutPromises) => answer,
            _ => {
                self.pace.sleep(DEAF).await;
                Err(Error::new(ErrorCode::RpcTimeout, "no response"))
            }
        }
    }
}

#[async_trait]
impl MetadataBackend for Way {
    fn capabilities(&self) -> MetaCapabilities {
        self.directory.capabilities()
    }

    async fn get(&self, key: &str) -> Result<Option<MetaValue>> {
        let trouble = *self.trouble.lock();
        if trouble == Trouble::WithoutPromises && key != KEY {
            self.pace.sleep(DEAF).await;
            return Err(Error::new(ErrorCode::RpcTimeout, "no response"));
        }
        self.through(self.directory.get(key)).await
    }

    async fn put(&self, key: &str, value: Bytes, expect: Expect) -> Result<u64> {
        self.through(self.directory.put(key, value, expect)).await
    }

    async fn delete(&self, key: &str) -> Result<bool> {
        self.through(self.directory.delete(key)).await
    }

    async fn list(&self, prefix: &str) -> Result<Vec<(String, MetaValue)>> {
        self.through(self.directory.list(prefix)).await
    }

    async fn watch(&self, prefix: &str) -> Result<BoxStream<'static, MetaEvent>> {
        let events = self.through(self.directory.watch(prefix)).await?;
        let trouble = self.trouble.clone();
        Ok(events.filter(move |_| ready(*trouble.lock() == Trouble::Nothing)).boxed())
    }
}

#[async_trait]
impl Leases for Way {
    async fn take(&self, key: &str, value: Bytes, time: Duration) -> Result<Option<Hold>> {
        self.through(self.directory.take(key, value, time)).await
    }

    async fn renew(&self, hold: &Hold) -> Result<bool> {
        self.through(self.directory.renew(hold)).await
    }

    async fn release(&self, hold: Hold) -> Result<()> {
        self.through(self.directory.release(hold)).await
    }
}

struct Master {
    leadership: Arc<Leadership>,
    trouble: Arc<Mutex<Trouble>>,
    frozen: bool,
    stop_requested: Arc<Mutex<bool>>,
    /// Duration of the last work of a stopping master.
    last_work: Arc<Mutex<Duration>>,
    /// Leadership at the end of the last work.
    led_to_the_end: Arc<Mutex<Option<bool>>>,
    /// Longest promise of the master.
    promises: Arc<Mutex<Duration>>,
    /// Promise of earlier leaders that the master knew when it began to serve.
    knew: Arc<Mutex<Option<Duration>>>,
    life: BoxFuture<'static, ()>,
}

struct Cluster {
    clock: Arc<ManualClock>,
    directory: Arc<MemoryMetadata>,
    masters: Vec<Master>,
}

/// Duration of a lease where a test chooses no other.
const LEASE: Duration = Duration::from_secs(5);

impl Cluster {
    fn new(masters: usize) -> Self {
        Self::under_leases(masters, LEASE)
    }

    /// Starts masters whose leader has a lease of this duration.
    fn under_leases(masters: usize, lease: Duration) -> Self {
        let clock = Arc::new(ManualClock::new());
        let directory = Arc::new(MemoryMetadata::with_clock(clock.clone()));
        let masters = (0..masters).map(|number| Master::new(&clock, &directory, number, lease)).collect();
        Self { clock, directory, masters }
    }

    /// Returns the leader. Panics if there are two.
    fn leader(&self) -> Option<usize> {
        let leads: Vec<_> = (0..self.masters.len()).filter(|n| self.masters[*n].leadership.leads()).collect();
        assert!(leads.len() <= 1, "several lead: {leads:?}");
        leads.first().copied()
    }

    fn step(&mut self) {
        // The action of one master may wake another.
        for _ in 0..2 {
            for master in self.masters.iter_mut().filter(|master| !master.frozen) {
                let _ = master.life.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            }
            self.leader();
        }
        self.clock.advance(STEP);
        self.directory.expire();
        self.leader();
    }

    fn run(&mut self, span: Duration) {
        let end = self.clock.now().after(span);
        while self.clock.now() < end {
            self.step();
        }
    }

    /// Returns the time until a master other than `other` leads.
    fn until_another_leads(&mut self, other: usize) -> (usize, Duration) {
        let begun = self.clock.now();
        loop {
            match self.leader() {
                Some(leader) if leader != other => return (leader, self.clock.now().since(begun)),
                _ => self.step(),
            }
            assert!(self.clock.now().since(begun) < 10 * LEASE, "nobody leads");
        }
    }

    /// Starts three masters. Returns them and the leader.
    fn led() -> (Self, usize) {
        let mut cluster = Self::new(3);
        cluster.run(2 * LEASE);
        let leader = cluster.leader().unwrap();
        (cluster, leader)
    }
}

impl Master {
    fn new(
        clock: &Arc<ManualClock>,
        directory: &Arc<MemoryMetadata>,
        number: usize,
        lease: Duration,
    ) -> Self {
        let (shared, pace) = (clock.clone(), || Simulated(clock.clone()));
        let leadership = Arc::new(Leadership::among_several(shared, lease));
        let trouble = Arc::new(Mutex::new(Trouble::Nothing));
        let way = Way { directory: directory.clone(), pace: pace(), trouble: trouble.clone() };
        let mut election = Election::new(Arc::new(way), "c", format!("m{number}:1"), leadership.clone());
        election.pace = Arc::new(pace());
        let stop_requested = Arc::new(Mutex::new(false));
        let stop = stop_requested.clone();
        let (last_work, led_to_the_end) = (Arc::new(Mutex::new(Duration::ZERO)), Arc::new(Mutex::new(None)));
        let (takes, led, own) = (last_work.clone(), led_to_the_end.clone(), leadership.clone());
        let time = pace();
        let (promises, knew) = (Arc::new(Mutex::new(Duration::from_secs(30))), Arc::new(Mutex::new(None)));
        let (own_promise, earlier) = (promises.clone(), knew.clone());
        let life = Box::pin(async move {
            loop {
                let hold = election.win().await;
                let promise = *own_promise.lock();
                let stored = tokio::select! {
                    stored = election.store_promise(promise) => stored,
                    () = election.lead(&hold) => continue,
                };
                *earlier.lock() = Some(stored.earlier);
                let stopped = poll_fn(|_| if *stop.lock() { Poll::Ready(()) } else { Poll::Pending });
                tokio::select! {
                    () = election.lead(&hold) => {}
                    () = election.lower_promise(stored) => {}
                    () = stopped => {
                        let work = async {
                            let takes = *takes.lock();
                            time.sleep(takes).await;
                            *led.lock() = Some(own.leads());
                        };
                        election.resign_after(hold, work).await;
                        return pending().await;
                    }
                }
            }
        });
        Self {
            leadership,
            trouble,
            frozen: false,
            stop_requested,
            last_work,
            led_to_the_end,
            promises,
            knew,
            life,
        }
    }

    fn have(&self, trouble: Trouble) {
        *self.trouble.lock() = trouble;
    }

    fn die(&mut self) {
        self.life = Box::pin(pending());
        // A dead master responds to no request.
        self.leadership.end();
    }
}

#[test]
fn the_next_leads_as_soon_as_the_lease_of_a_dead_one_is_over() {
    let (mut cluster, leader) = Cluster::led();
    cluster.masters[leader].die();
    let (next, took) = cluster.until_another_leads(leader);
    assert!(took <= LEASE + 2 * STEP, "{took:?}");
    assert_eq!(cluster.masters[next].leadership.status().state, "serving");
    let said = cluster.masters[3 - leader - next].leadership.status();
    assert_eq!(said.leader.map(|(at, _)| at), Some(format!("m{next}:1")), "the third has heard of it");
}

/// The lease of the leader decides when the next one leads, and how long a leader without its
/// directory handles calls.
#[test]
fn the_lease_can_be_chosen() {
    for seconds in [2, 20] {
        let lease = Duration::from_secs(seconds);
        let mut cluster = Cluster::under_leases(2, lease);
        cluster.run(lease * 2);
        let leader = cluster.leader().unwrap();
        cluster.run(lease * 2);
        assert_eq!(cluster.leader(), Some(leader), "{lease:?}: it renews its lease");
        cluster.masters[leader].frozen = true;
        let (_, took) = cluster.until_another_leads(leader);
        assert!(
            took > lease - MARGIN - lease / 5 - 2 * STEP && took <= lease + 2 * STEP,
            "{lease:?}: {took:?}"
        );
    }
}

#[test]
fn stopping_leader_hands_over_at_once() {
    let (mut cluster, leader) = Cluster::led();
    *cluster.masters[leader].stop_requested.lock() = true;
    let (_, took) = cluster.until_another_leads(leader);
    assert!(took <= 2 * STEP, "{took:?}");
}

/// A large snapshot is written while the leader stops: it leads until the snapshot is complete, so
/// that the snapshot counts.
#[test]
fn a_stopping_leader_leads_until_its_last_work_is_done() {
    let (mut cluster, leader) = Cluster::led();
    *cluster.masters[leader].last_work.lock() = 3 * LEASE;
    *cluster.masters[leader].stop_requested.lock() = true;
    let (_, took) = cluster.until_another_leads(leader);
    assert_eq!(*cluster.masters[leader].led_to_the_end.lock(), Some(true), "another led after {took:?}");
    assert!(took <= 3 * LEASE + 4 * STEP, "{took:?}");
}

/// A leader that loses the leadership while it stops still completes its work.
#[test]
fn a_stopping_leader_that_is_cut_off_ends_its_work() {
    let (mut cluster, leader) = Cluster::led();
    *cluster.masters[leader].last_work.lock() = 3 * LEASE;
    *cluster.masters[leader].stop_requested.lock() = true;
    cluster.masters[leader].have(Trouble::CutOff);
    let (_, took) = cluster.until_another_leads(leader);
    assert!(took <= 2 * LEASE, "{took:?}");
    cluster.run(3 * LEASE);
    assert_eq!(*cluster.masters[leader].led_to_the_end.lock(), Some(false));
}

#[test]
fn a_frozen_leader_that_goes_on_when_another_leads_is_deposed() {
    let (mut cluster, leader) = Cluster::led();
    cluster.masters[leader].frozen = true;
    let (next, took) = cluster.until_another_leads(leader);
    assert!(took <= LEASE + 2 * STEP, "{took:?}");
    assert!(!cluster.masters[leader].leadership.leads(), "what it is asked now it does not answer");
    cluster.masters[leader].frozen = false;
    cluster.run(3 * LEASE);
    assert_eq!(cluster.leader(), Some(next));
    assert_eq!(cluster.masters[leader].leadership.status().state, "standby");
}

#[test]
fn a_frozen_leader_that_goes_on_before_another_leads_goes_on_leading() {
    let (mut cluster, leader) = Cluster::led();
    cluster.masters[leader].frozen = true;
    while cluster.leader() == Some(leader) {
        cluster.step();
    }
    assert_eq!(cluster.leader(), None, "its own time is over, and nobody else's has begun");
    cluster.masters[leader].frozen = false;
    cluster.run(2 * STEP);
    assert_eq!(cluster.leader(), Some(leader), "the lease was its own yet");
    cluster.run(3 * LEASE);
    assert_eq!(cluster.leader(), Some(leader));
}

#[test]
fn who_is_cut_off_or_deaf_stops_in_time_and_stands_by() {
    for trouble in [Trouble::CutOff, Trouble::Deaf] {
        let (mut cluster, leader) = Cluster::led();
        cluster.masters[leader].have(trouble);
        let (next, took) = cluster.until_another_leads(leader);
        // A master without responses may have renewed its lease until the end of its own time.
        assert!(took <= 2 * LEASE, "{trouble:?}: {took:?}");
        cluster.masters[leader].have(Trouble::Nothing);
        cluster.run(2 * LEASE);
        assert_eq!(cluster.leader(), Some(next), "{trouble:?}");
        assert_eq!(cluster.masters[leader].leadership.status().state, "standby", "{trouble:?}");
    }
}

#[test]
fn whose_key_is_deleted_by_others_stops() {
    let (mut cluster, leader) = Cluster::led();
    let deleted = cluster.directory.delete(KEY).now_or_never();
    assert!(matches!(deleted, Some(Ok(true))));
    // The others notice at once, so for a while there would be two leaders: an operator who deletes
    // the key is responsible for that.
    for master in &mut cluster.masters {
        master.frozen = true;
    }
    cluster.masters[leader].frozen = false;
    cluster.run(LEASE / 5 + 2 * STEP);
    let hold = cluster.masters[leader].leadership.status();
    assert!(hold.state == "standby" || hold.state == "serving", "{hold:?}");
    assert_ne!(hold.leader.map(|(_, election)| election), Some(1), "it is another election than the first");
}

/// Returns the promise in the metadata service.
fn stored_promise(cluster: &Cluster) -> Option<String> {
    let found = cluster.directory.get("mooncake-store/c/longest_promise_ms").now_or_never().unwrap();
    found.unwrap().map(|found| String::from_utf8_lossy(&found.value).into_owned())
}

/// A leader with leases of 300 s dies. Each later leader knows of these leases before it serves,
/// until all of them have expired.
#[test]
fn a_new_leader_knows_the_promises_of_the_one_before() {
    let seconds = Duration::from_secs;
    let mut cluster = Cluster::new(3);
    for master in &mut cluster.masters[1..] {
        master.frozen = true;
    }
    *cluster.masters[0].promises.lock() = seconds(300);
    cluster.run(2 * LEASE);
    assert_eq!(cluster.leader(), Some(0));
    assert_eq!(stored_promise(&cluster).as_deref(), Some("300000"));

    cluster.masters[1].frozen = false;
    cluster.masters[0].die();
    cluster.run(2 * LEASE);
    assert_eq!(cluster.leader(), Some(1));
    assert_eq!(*cluster.masters[1].knew.lock(), Some(seconds(300)));

    cluster.run(seconds(200));
    cluster.masters[2].frozen = false;
    cluster.masters[1].die();
    cluster.run(2 * LEASE);
    assert_eq!(cluster.leader(), Some(2));
    assert_eq!(*cluster.masters[2].knew.lock(), Some(seconds(300)), "leases of the first may hold");
    assert_eq!(stored_promise(&cluster).as_deref(), Some("300000"));
    cluster.run(seconds(310));
    assert_eq!(stored_promise(&cluster).as_deref(), Some("30000"), "no lease of the first holds any more");
}

/// A leader that cannot read the promises of earlier leaders stays the leader, and does not begin
/// to serve.
#[test]
fn a_leader_that_cannot_read_promises_does_not_serve() {
    let mut cluster = Cluster::new(1);
    cluster.masters[0].have(Trouble::WithoutPromises);
    cluster.run(3 * LEASE);
    assert_eq!(cluster.leader(), Some(0));
    assert_eq!(*cluster.masters[0].knew.lock(), None);
    cluster.masters[0].have(Trouble::Nothing);
    cluster.run(LEASE);
    assert_eq!(*cluster.masters[0].knew.lock(), Some(Duration::ZERO), "there was no leader before");
}

/// Random faults in a random order: there are never two leaders, and one leader in the end.
#[test]
fn never_do_two_lead() {
    for seed in 0..60 {
        let mut rng = Rng::seeded(seed);
        let mut cluster = Cluster::new(3);
        for _ in 0..120 {
            let at = rng.below(3) as usize;
            let master = &mut cluster.masters[at];
            match rng.below(6) {
                0 => master.frozen = true,
                1 => master.have(Trouble::CutOff),
                2 => master.have(Trouble::Deaf),
                3 => master.have(Trouble::Nothing),
                _ => master.frozen = false,
            }
            let span = if rng.below(3) == 0 { LEASE } else { Duration::from_millis(300) };
            cluster.run(Duration::from_nanos(rng.below(span.as_nanos() as u64)));
        }
        for master in &mut cluster.masters {
            master.frozen = false;
            master.have(Trouble::Nothing);
        }
        cluster.run(3 * LEASE);
        assert!(cluster.leader().is_some(), "seed {seed}: nobody leads in the end");
    }
}

/// HTTP endpoints respond like calls: not after the leadership has expired, even before the leader
/// is cut off.
#[cfg(feature = "http")]
#[tokio::test]
async fn the_pages_of_a_deposed_leader_say_nothing() {
    use crate::MasterServer;
    use crate::config::{MasterConfig, MetadataServerConfig};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    let clock = Arc::new(ManualClock::new());
    let leadership = Arc::new(Leadership::among_several(clock.clone(), LEASE));
    leadership.extend(clock.now());
    let host = || "127.0.0.1".to_owned();
    let config = MasterConfig {
        rpc_address: host(),
        rpc_port: 0,
        metrics_host: host(),
        metrics_port: 0,
        metadata: Some(MetadataServerConfig { host: host(), port: 0, ..MetadataServerConfig::default() }),
        ..MasterConfig::default()
    };
    let server = MasterServer::start_as(config, clock.clone(), leadership, Duration::ZERO).await.unwrap();
    let at = server.addresses();
    let send = async |port: Option<std::net::SocketAddr>, line: &str| {
        let mut stream = tokio::net::TcpStream::connect(port.unwrap()).await.unwrap();
        let request = format!("{line} HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        let status: u16 = answer.split(' ').nth(1).unwrap().parse().unwrap();
        (status, answer.rsplit_once("\r\n\r\n").map_or(String::new(), |(_, body)| body.to_owned()))
    };
    let pages = ["GET /get_all_keys", "GET /metrics", "GET /get_all_segments", "POST /api/v1/drain_jobs"];
    for page in pages {
        assert_ne!(send(at.admin, page).await.0, 503, "{page}");
    }
    assert_eq!(send(at.metadata, "PUT /metadata?key=k").await.0, 200);
    clock.advance(LEASE - MARGIN);
    for page in pages {
        assert_eq!(send(at.admin, page).await.0, 503, "{page}");
    }
    assert_eq!(send(at.metadata, "GET /metadata?key=k").await.0, 503);
    assert_eq!(send(at.admin, "GET /role").await, (200, "standby".to_owned()));
    assert_eq!(send(at.admin, "GET /health").await.0, 200);
    server.stop().await;
}
