//! Admission of connections: every listener has a maximum number of connections, and a new
//! connection is refused only if all of them work.
//!
//! A connection either works on a request or waits for its peer: for a request, for the rest of
//! one, or for the peer to read a response. At the maximum, the connection that has waited longest
//! is closed for the new one. A connection that works on a request is never closed in this way. A
//! connection that waits longer than the limits of its listener is closed in any case.
//!
//! The maximum is a share of the descriptors that the process may open. The shares of all listeners
//! of one process leave a rest for files, outgoing connections and the directory.
//!
//! The bytes that connections hold while they wait have a budget, which all listeners of a process
//! share ([`ByteBudget`]). Every request and every response has to keep a minimum rate
//! ([`TransferRate`]).

mod budget;
mod connection;

pub use self::budget::{ByteBudget, ByteReport, SMALL_BUFFERS};
use self::connection::{Connection, ENDED, IN_REQUEST, NO_TRANSFER, WORKING};

use std::collections::{BTreeMap, HashMap};
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use mooncake_core::clock::Moment;
use mooncake_core::fault_injection::is_planted;
use parking_lot::Mutex;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::task::JoinSet;
use tokio::time::{Interval, MissedTickBehavior, interval};

/// Number of connections that one search for the longest wait finds.
const BATCH: usize = 64;
/// Searches until a listener whose connections change all the time gives up.
const SEARCHES: usize = 4;
/// Minimum wait of a connection before a new one may replace it, because its request may be on the
/// way.
const GRACE: Duration = Duration::from_millis(20);
/// Pause after a failed accept. No event reports that descriptors are free again.
const PAUSE: Duration = Duration::from_millis(50);
/// Shortest and longest interval between two searches for connections that have waited too long.
const TICK: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));

/// Minimum rate of a request or a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferRate {
    /// Time that every message has, in addition to the time for its length.
    pub grace: Duration,
    /// Bytes that have to be transferred in a second.
    pub bytes_per_second: u64,
}

impl TransferRate {
    /// 30 s, and a second for each MiB.
    pub const DEFAULT: Self = Self { grace: Duration::from_secs(30), bytes_per_second: 1 << 20 };

    /// Returns the longest time for a message of this length.
    pub fn time_for(&self, len: u64) -> Duration {
        let ms = len.saturating_mul(1000) / self.bytes_per_second.max(1);
        self.grace.saturating_add(Duration::from_millis(ms))
    }
}

impl Default for TransferRate {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// Bounds of one listener.
#[derive(Clone, Debug)]
pub struct ListenerLimits {
    /// Name of the listener in metrics and logs.
    pub name: &'static str,
    /// Largest number of connections.
    pub slots: usize,
    /// Share of the process's descriptors that the connections may use: `1 / descriptor_share`.
    pub descriptor_share: u64,
    /// Longest wait for the rest of a request. `None` is unlimited.
    pub request: Option<Duration>,
    /// Longest wait for a request. `None` is unlimited.
    pub idle: Option<Duration>,
    /// Minimum rate of requests and responses.
    pub rate: TransferRate,
    /// Budget of the bytes that waiting connections hold.
    pub budget: ByteBudget,
}

impl ListenerLimits {
    /// Returns the limits of a listener whose connections may wait for ever between messages, with
    /// the default rate and the budget of the process.
    pub fn new(name: &'static str, slots: usize, descriptor_share: u64) -> Self {
        let (rate, budget) = (TransferRate::DEFAULT, ByteBudget::of_process());
        Self { name, slots, descriptor_share, request: None, idle: None, rate, budget }
    }

    /// Returns the maximum number of connections under the present limit of descriptors, at least
    /// 1.
    fn slots_within_descriptors(&self) -> usize {
        within_descriptors(self.slots, self.descriptor_share).max(1)
    }
}

/// Returns `max`, or `1 / share` of the descriptors that this process may open if that is less.
pub fn within_descriptors(max: usize, share: u64) -> usize {
    let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(files / share.max(1)).map_or(max, |part| max.min(part.max(1)))
}

/// Raises the soft limit of descriptors to the hard limit. Every connection takes one or more.
pub fn raise_descriptor_limit() {
    if is_planted("descriptor-limit-not-raised") {
        return;
    }
    let limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        // If the kernel refuses, the limit stays as it was.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    }
}

/// Counts of one listener name in this process, since its start.
#[derive(Debug, Default)]
struct Counts {
    open: AtomicU64,
    evicted: AtomicU64,
    full: AtomicU64,
    timed_out: AtomicU64,
    descriptors: AtomicU64,
}

static LISTENERS: Mutex<BTreeMap<&'static str, Arc<Counts>>> = Mutex::new(BTreeMap::new());

/// Connections of the listeners that share a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListenerReport {
    /// Name of the listener.
    pub listener: &'static str,
    /// Number of connections that are open now.
    pub open: u64,
    /// Number of connections that were closed for a new one.
    pub evicted: u64,
    /// Number of connections that were refused because all others worked on a request.
    pub full: u64,
    /// Number of connections that were closed for waiting too long.
    pub timed_out: u64,
    /// Number of failed accepts, mostly for lack of descriptors.
    pub descriptors: u64,
}

impl ListenerReport {
    /// Returns the counts of refused and closed connections with their reasons, as in the labels of
    /// the metrics.
    pub fn refused(&self) -> [(&'static str, u64); 4] {
        [
            ("evicted", self.evicted),
            ("full", self.full),
            ("timeout", self.timed_out),
            ("descriptors", self.descriptors),
        ]
    }
}

/// Returns the connections of every listener that this process has or had, in the order of their
/// names.
pub fn listeners() -> Vec<ListenerReport> {
    let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
    let report = |(name, counts): (&&'static str, &Arc<Counts>)| ListenerReport {
        listener: name,
        open: read(&counts.open),
        evicted: read(&counts.evicted),
        full: read(&counts.full),
        timed_out: read(&counts.timed_out),
        descriptors: read(&counts.descriptors),
    };
    LISTENERS.lock().iter().map(report).collect()
}

/// Connections of one listener, each served by a task. The drop closes all of them.
#[derive(Debug)]
pub struct Connections {
    admission: Arc<Admission>,
    tasks: JoinSet<()>,
    tick: Interval,
}

impl Connections {
    /// Creates the table of a listener. Must be called on a tokio runtime.
    pub fn new(limits: ListenerLimits) -> Self {
        let shortest = limits.request.into_iter().chain(limits.idle).fold(limits.rate.grace, Duration::min);
        let mut tick = interval((shortest / 4).clamp(TICK.0, TICK.1));
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { admission: Arc::new(Admission::new(limits)), tasks: JoinSet::new(), tick }
    }

    /// Waits for the next connection. The future may be dropped and called again.
    ///
    /// Connections that have waited too long are closed in the meantime. If the process has no free
    /// descriptor, the connection that has waited longest is closed.
    pub async fn accept<T>(
        &mut self,
        mut poll_accept: impl FnMut(&mut Context<'_>) -> Poll<io::Result<T>>,
    ) -> T {
        loop {
            if let Some(remaining) = self.admission.time_to_free_slot() {
                tokio::select! {
                    () = tokio::time::sleep(remaining) => {}
                    Some(_) = self.tasks.join_next() => {}
                }
                continue;
            }
            let accepted = poll_fn(|cx| {
                while let Poll::Ready(Some(_)) = self.tasks.poll_join_next(cx) {}
                while self.tick.poll_tick(cx).is_ready() {
                    self.admission.close_overdue();
                }
                poll_accept(cx)
            });
            match accepted.await {
                Ok(accepted) => return accepted,
                Err(error) => {
                    self.admission.counts.descriptors.fetch_add(1, Ordering::Relaxed);
                    let evicted = self.admission.evict_longest_waiting(&mut self.admission.registry.lock());
                    tracing::warn!(
                        listener = self.admission.limits.name, %error, evicted,
                        "cannot accept a connection"
                    );
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }

    /// Serves a connection on a task of its own. Returns false if no position is available; `serve`
    /// is then dropped with its state. The task may be aborted whenever its connection waits.
    pub fn admit<F>(&mut self, serve: impl FnOnce(ConnectionSlot) -> F) -> bool
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let Some(slot) = self.admission.admit() else { return false };
        let connection = slot.connection.clone();
        let task = self.tasks.spawn(serve(slot));
        if let Err(task) = connection.task.set(task) {
            // Not reached, because each connection gets one task.
            task.abort();
        }
        if connection.state.load(Ordering::SeqCst) == ENDED {
            connection.abort();
        }
        true
    }

    /// Number of connections that are open.
    pub fn open(&self) -> usize {
        self.admission.registry.lock().connections.len()
    }

    /// Waits until every connection has ended, for at most `timeout`, then closes the others.
    /// Returns the number of connections that were closed.
    pub async fn finish(mut self, timeout: Duration) -> usize {
        let all = async { while self.tasks.join_next().await.is_some() {} };
        if tokio::time::timeout(timeout, all).await.is_ok() {
            return 0;
        }
        let remaining = self.tasks.len();
        tracing::warn!(
            listener = self.admission.limits.name,
            connections = remaining,
            "connections that wait for their peers are closed"
        );
        self.tasks.shutdown().await;
        remaining
    }
}

#[derive(Debug)]
struct Admission {
    limits: ListenerLimits,
    slots: usize,
    counts: Arc<Counts>,
    registry: Mutex<Registry>,
}

#[derive(Debug, Default)]
struct Registry {
    connections: HashMap<u64, Arc<Connection>>,
    /// Connections, by number and state, that had waited longest at the last search. The longest
    /// wait is last.
    longest_waiting: Vec<(u64, u64)>,
    /// True if the last connection was refused.
    full: bool,
}

impl Registry {
    /// Returns the number and the state of the connection that has waited longest, which is then
    /// the last entry of `longest_waiting`.
    fn find_longest_waiting(&mut self) -> Option<(u64, u64)> {
        while let Some((number, seen)) = self.longest_waiting.last().copied() {
            if self.connections.get(&number).is_some_and(|it| it.waiting_since() == Some(seen)) {
                return Some((number, seen));
            }
            self.longest_waiting.pop();
        }
        let waiting = self.connections.iter();
        let mut waiting: Vec<(u64, u64)> =
            waiting.filter_map(|(number, it)| Some((*number, it.waiting_since()?))).collect();
        let count = waiting.len().min(BATCH);
        if count > 0 {
            waiting.select_nth_unstable_by_key(count - 1, |(number, since)| (*since, *number));
            waiting.truncate(count);
            waiting.sort_unstable_by_key(|(number, since)| std::cmp::Reverse((*since, *number)));
        }
        self.longest_waiting = waiting;
        self.longest_waiting.last().copied()
    }
}

impl Admission {
    fn new(limits: ListenerLimits) -> Self {
        let counts = LISTENERS.lock().entry(limits.name).or_default().clone();
        let slots = limits.slots_within_descriptors();
        Self { limits, slots, counts, registry: Mutex::default() }
    }

    fn now(&self) -> u64 {
        // 2^62 ns are 146 years.
        (self.limits.budget.now().0 << 1).min(ENDED - 2)
    }

    fn admit(self: &Arc<Self>) -> Option<ConnectionSlot> {
        let mut registry = self.registry.lock();
        if registry.connections.len() >= self.slots {
            if is_planted("full-listener-refuses") || !self.evict_longest_waiting(&mut registry) {
                self.counts.full.fetch_add(1, Ordering::Relaxed);
                if !std::mem::replace(&mut registry.full, true) {
                    tracing::warn!(
                        listener = self.limits.name,
                        slots = self.slots,
                        "connections are refused: every other one works on a request"
                    );
                }
                return None;
            }
            self.counts.evicted.fetch_add(1, Ordering::Relaxed);
        }
        registry.full = false;
        let connection = Arc::new(Connection::new(self.limits.name, self.now()));
        registry.connections.insert(connection.number, connection.clone());
        self.counts.open.fetch_add(1, Ordering::Relaxed);
        Some(ConnectionSlot { admission: self.clone(), connection })
    }

    /// Closes the connection that has waited longest. Returns whether one waited.
    fn evict_longest_waiting(&self, registry: &mut Registry) -> bool {
        for _ in 0..SEARCHES {
            let Some((number, seen)) = registry.find_longest_waiting() else { return false };
            registry.longest_waiting.pop();
            if registry.connections.get(&number).is_some_and(|it| it.end(seen)) {
                self.remove(registry, number);
                return true;
            }
        }
        false
    }

    /// Returns the time until a connection may be replaced. A connection whose wait has just begun
    /// gets some time.
    fn time_to_free_slot(&self) -> Option<Duration> {
        let mut registry = self.registry.lock();
        if registry.connections.len() < self.slots {
            return None;
        }
        let (_, since) = registry.find_longest_waiting()?;
        let waited = Duration::from_nanos(self.now().saturating_sub(since) >> 1);
        GRACE.checked_sub(waited).filter(|remaining| !remaining.is_zero())
    }

    /// Closes connections that have waited longer than their limits.
    fn close_overdue(&self) {
        if is_planted("connections-wait-for-ever") {
            return;
        }
        let (now, moment) = (self.now(), self.limits.budget.now().0);
        let before = |limit: Option<Duration>| {
            let limit = u64::try_from(limit?.as_nanos()).unwrap_or(u64::MAX >> 1);
            now.checked_sub(limit.saturating_mul(2))
        };
        let (request, idle) = (before(self.limits.request), before(self.limits.idle));
        let mut registry = self.registry.lock();
        let is_overdue = |since: u64| {
            let limit = if since & IN_REQUEST == 0 { idle } else { request };
            limit.is_some_and(|limit| since < limit)
        };
        let is_slow = |it: &Connection| {
            it.deadline.load(Ordering::Relaxed) < moment && !is_planted("transfers-without-a-rate")
        };
        let ends = |it: &Connection| {
            it.waiting_since().is_some_and(|since| (is_overdue(since) || is_slow(it)) && it.end(since))
        };
        let waiting = registry.connections.iter();
        let overdue: Vec<u64> = waiting.filter(|(_, it)| ends(it)).map(|(number, _)| *number).collect();
        for number in overdue {
            self.counts.timed_out.fetch_add(1, Ordering::Relaxed);
            self.remove(&mut registry, number);
        }
    }

    fn remove(&self, registry: &mut Registry, number: u64) {
        if registry.connections.remove(&number).is_some() {
            self.counts.open.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Wait of a connection for its turn.
#[derive(Clone, Copy, Debug)]
pub struct Turn {
    since: Moment,
    /// Begin of the message that was under way before.
    began: Option<Moment>,
}

/// Position of one connection in the table of its listener. The connection waits for a request at
/// first. The drop frees the position.
#[derive(Debug)]
pub struct ConnectionSlot {
    admission: Arc<Admission>,
    connection: Arc<Connection>,
}

impl ConnectionSlot {
    /// Names the peer in the log.
    pub fn set_peer(&self, peer: SocketAddr) {
        // Set once, by the task that accepted the connection.
        let _ = self.connection.peer.set(peer);
    }

    /// Sets the size of the buffers of the connection in bytes. Sizes up to [`SMALL_BUFFERS`] do
    /// not count. Above the limit of the budget, the connection whose message has been under way
    /// for longest is closed, which may be this one.
    pub fn hold(&self, bytes: usize) {
        let bytes = if bytes <= SMALL_BUFFERS { 0 } else { bytes as u64 };
        if self.connection.held.load(Ordering::Relaxed) != bytes {
            self.admission.limits.budget.hold(&self.connection, bytes);
        }
    }

    /// Returns whether the connection may keep buffers of this size while it is idle.
    pub fn may_keep(&self, bytes: usize) -> bool {
        let before = self.connection.held.load(Ordering::Relaxed);
        bytes <= SMALL_BUFFERS || self.admission.limits.budget.may_keep(before, bytes as u64)
    }

    /// Marks the connection as waiting for the rest of a request of `len` bytes, of which a part
    /// has just arrived. The first wait since [`end_transfer`](Self::end_transfer) fixes the time
    /// that the whole request has.
    pub fn wait_in_transfer(&self, len: u64) {
        self.begin_transfer(len);
        self.wait(IN_REQUEST);
    }

    /// Marks the connection as waiting for its peer to read the rest of a response of `len` bytes,
    /// of which a part has just been sent. The first wait since
    /// [`end_transfer`](Self::end_transfer) fixes the time that the whole response has. A response
    /// without progress for the grace of the rate is closed, too.
    pub fn wait_for_reader(&self, len: u64) {
        self.begin_transfer(len);
        let limits = &self.admission.limits;
        let stalled = limits.budget.now().after(limits.rate.grace);
        self.connection.deadline.fetch_min(stalled.0, Ordering::Relaxed);
        self.wait(0);
    }

    /// Begins the time that the message has, unless it has begun.
    fn begin_transfer(&self, len: u64) {
        let connection = &self.connection;
        if connection.began.load(Ordering::Relaxed) == NO_TRANSFER {
            let now = self.admission.limits.budget.now().0;
            connection.began.store(now, Ordering::Relaxed);
            connection.paced.store(now, Ordering::Relaxed);
        }
        let paced = Moment(connection.paced.load(Ordering::Relaxed));
        let deadline = paced.after(self.admission.limits.rate.time_for(len));
        connection.deadline.store(deadline.0, Ordering::Relaxed);
    }

    /// Ends the time of a message that has been transferred.
    pub fn end_transfer(&self) {
        if self.connection.began.load(Ordering::Relaxed) != NO_TRANSFER {
            self.connection.began.store(NO_TRANSFER, Ordering::Relaxed);
            self.connection.deadline.store(u64::MAX, Ordering::Relaxed);
        }
    }

    /// Begins the time of the next message of a backlog. For the limit of bytes, the whole backlog
    /// is one message.
    pub fn begin_next(&self) {
        self.connection.paced.store(self.admission.limits.budget.now().0, Ordering::Relaxed);
    }

    /// Marks the connection as waiting for its turn with a whole request. The connection may be
    /// closed for a new one, and for the bytes of its request, but not for its rate.
    pub fn wait_for_turn(&self) {
        let connection = &self.connection;
        if connection.began.load(Ordering::Relaxed) == NO_TRANSFER && !is_planted("waiting-requests-stay") {
            let now = self.admission.limits.budget.now().0;
            connection.began.store(now, Ordering::Relaxed);
            connection.paced.store(now, Ordering::Relaxed);
        }
        connection.deadline.store(u64::MAX, Ordering::Relaxed);
        self.wait(0);
    }

    /// Begins the wait for a turn in the middle of an exchange. Returns what
    /// [`end_turn`](Self::end_turn) needs.
    pub fn begin_turn(&self) -> Turn {
        let began = self.connection.began.load(Ordering::Relaxed);
        Turn {
            since: self.admission.limits.budget.now(),
            began: Some(Moment(began)).filter(|it| it.0 != NO_TRANSFER),
        }
    }

    /// Ends the wait for a turn. The message that was under way before does not lose the time.
    pub fn end_turn(&self, turn: Turn) {
        let waited = self.admission.limits.budget.now().since(turn.since);
        let began = turn.began.map_or(NO_TRANSFER, |began| began.after(waited).0);
        self.connection.began.store(began, Ordering::Relaxed);
        self.connection.paced.store(began, Ordering::Relaxed);
    }

    /// Marks the connection as waiting for a request from now on.
    pub fn wait_for_request(&self) {
        if is_planted("connections-never-idle-again") {
            return;
        }
        self.wait(0);
    }

    /// Marks the connection as waiting for the rest of a request of `len` bytes, from now on. A
    /// connection that is already marked so keeps the moment when its wait began. The time of the
    /// whole request is that of [`wait_in_transfer`](Self::wait_in_transfer).
    pub fn wait_within_request(&self, len: u64) {
        self.begin_transfer(len);
        let state = self.connection.state.load(Ordering::Relaxed);
        if state >= ENDED || state & IN_REQUEST == 0 {
            self.wait(IN_REQUEST);
        }
    }

    /// Marks the connection as waiting for the rest of a request of which a part has just arrived.
    pub fn wait_for_more(&self) {
        self.wait(IN_REQUEST);
    }

    /// Marks the connection as waiting for the rest of a request if it waited for a request. Its
    /// first bytes have arrived.
    pub fn begin_request(&self) {
        if self.connection.waiting_since().is_some_and(|since| since & IN_REQUEST == 0) {
            self.begin_transfer(0);
            self.wait(IN_REQUEST);
        }
    }

    /// Marks the connection as working on a request, so that it is not replaced until it waits
    /// again. Returns false if it was already closed; the connection then ends without serving the
    /// received bytes.
    #[must_use]
    pub fn work(&self) -> bool {
        let state = &self.connection.state;
        let seen = state.load(Ordering::Relaxed);
        // Other tasks change a waiting state to `ENDED` only, so that one attempt decides.
        seen == WORKING
            || (seen != ENDED
                && state.compare_exchange(seen, WORKING, Ordering::SeqCst, Ordering::Relaxed).is_ok())
    }

    fn wait(&self, kind: u64) {
        let seen = self.connection.state.load(Ordering::Relaxed);
        if seen != ENDED {
            let since = (self.admission.now() & !IN_REQUEST) | kind;
            // Fails only if the connection has been closed in the meantime.
            let _ = self.connection.state.compare_exchange(seen, since, Ordering::SeqCst, Ordering::Relaxed);
        }
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.admission.limits.budget.release(&self.connection);
        self.admission.remove(&mut self.admission.registry.lock(), self.connection.number);
    }
}

#[cfg(all(test, not(miri)))]
mod tests;
