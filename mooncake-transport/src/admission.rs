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

use std::collections::{BTreeMap, HashMap};
use std::future::poll_fn;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use mooncake_core::clock::{Clock, SystemClock};
use mooncake_core::fault_injection::is_planted;
use parking_lot::Mutex;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Interval, MissedTickBehavior, interval};

/// State of a connection that works on a request.
const WORKING: u64 = u64::MAX;
/// State of a connection that has been closed for a new one, or because it waited too long.
const ENDED: u64 = u64::MAX - 1;
/// Lowest bit of the state of a waiting connection: set inside a request. The other bits are the
/// moment when the wait began.
const IN_REQUEST: u64 = 1;
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

/// Bounds of one listener.
#[derive(Clone, Copy, Debug)]
pub struct ListenerLimits {
    /// Name of the listener in metrics and logs.
    pub name: &'static str,
    /// Largest number of connections.
    pub slots: usize,
    /// Share of the process's descriptors that the connections may use: `1 / descriptor_share`.
    pub descriptor_share: u64,
    /// Longest wait for the rest of a request. `None` is unlimited.
    pub request: Option<Duration>,
    /// Longest wait for a request, or for the peer to read a response. `None` is unlimited.
    pub idle: Option<Duration>,
}

impl ListenerLimits {
    /// Returns the maximum number of connections under the present limit of descriptors, at least
    /// 1.
    fn slots_within_descriptors(&self) -> usize {
        within_descriptors(self.slots, self.descriptor_share).max(1)
    }
}

/// Returns `most`, or `1 / share` of the descriptors that this process may open if that is less.
pub fn within_descriptors(most: usize, share: u64) -> usize {
    let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(files / share.max(1)).map_or(most, |part| most.min(part.max(1)))
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
    tick: Option<Interval>,
}

impl Connections {
    /// Creates the table of a listener. Must be called on a tokio runtime.
    pub fn new(limits: ListenerLimits) -> Self {
        let shortest = limits.request.into_iter().chain(limits.idle).min();
        let tick = shortest.map(|limit| {
            let mut tick = interval((limit / 4).clamp(TICK.0, TICK.1));
            tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
            tick
        });
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
            if let Some(rest) = self.admission.time_to_room() {
                tokio::select! {
                    () = tokio::time::sleep(rest) => {}
                    Some(_) = self.tasks.join_next() => {}
                }
                continue;
            }
            let accepted = poll_fn(|cx| {
                while let Poll::Ready(Some(_)) = self.tasks.poll_join_next(cx) {}
                if let Some(tick) = &mut self.tick {
                    while tick.poll_tick(cx).is_ready() {
                        self.admission.close_overdue();
                    }
                }
                poll_accept(cx)
            });
            match accepted.await {
                Ok(accepted) => return accepted,
                Err(error) => {
                    self.admission.counts.descriptors.fetch_add(1, Ordering::Relaxed);
                    let evicted = self.admission.evict_longest(&mut self.admission.registry.lock());
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

    /// Waits until every connection has ended, for at most `patience`, then closes the others.
    /// Returns the number of connections that were closed.
    pub async fn finish(mut self, patience: Duration) -> usize {
        let all = async { while self.tasks.join_next().await.is_some() {} };
        if tokio::time::timeout(patience, all).await.is_ok() {
            return 0;
        }
        let left = self.tasks.len();
        tracing::warn!(
            listener = self.admission.limits.name,
            connections = left,
            "connections that wait for their peers are closed"
        );
        self.tasks.shutdown().await;
        left
    }
}

#[derive(Debug)]
struct Admission {
    limits: ListenerLimits,
    slots: usize,
    counts: Arc<Counts>,
    clock: SystemClock,
    registry: Mutex<Registry>,
}

#[derive(Debug, Default)]
struct Registry {
    connections: HashMap<u64, Arc<Connection>>,
    next: u64,
    /// Connections, by number and state, that had waited longest at the last search. The longest
    /// wait is last.
    longest: Vec<(u64, u64)>,
    /// True if the last connection was refused.
    full: bool,
}

impl Registry {
    /// Returns the number and the state of the connection that has waited longest, which is then
    /// the last entry of `longest`.
    fn longest_wait(&mut self) -> Option<(u64, u64)> {
        while let Some((number, seen)) = self.longest.last().copied() {
            if self.connections.get(&number).is_some_and(|it| it.waits_since() == Some(seen)) {
                return Some((number, seen));
            }
            self.longest.pop();
        }
        let waiting = self.connections.iter();
        let mut waiting: Vec<(u64, u64)> =
            waiting.filter_map(|(number, it)| Some((*number, it.waits_since()?))).collect();
        let count = waiting.len().min(BATCH);
        if count > 0 {
            waiting.select_nth_unstable_by_key(count - 1, |(number, since)| (*since, *number));
            waiting.truncate(count);
            waiting.sort_unstable_by_key(|(number, since)| std::cmp::Reverse((*since, *number)));
        }
        self.longest = waiting;
        self.longest.last().copied()
    }
}

#[derive(Debug)]
struct Connection {
    state: AtomicU64,
    task: OnceLock<AbortHandle>,
}

impl Connection {
    fn waits_since(&self) -> Option<u64> {
        Some(self.state.load(Ordering::Relaxed)).filter(|state| *state < ENDED)
    }

    /// Closes the connection if its state is still `seen`.
    fn end(&self, seen: u64) -> bool {
        let ended = self.state.compare_exchange(seen, ENDED, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        if ended {
            self.abort();
        }
        ended
    }

    fn abort(&self) {
        if let Some(task) = self.task.get() {
            task.abort();
        }
    }
}

impl Admission {
    fn new(limits: ListenerLimits) -> Self {
        let counts = LISTENERS.lock().entry(limits.name).or_default().clone();
        let (slots, clock) = (limits.slots_within_descriptors(), SystemClock::new());
        Self { limits, slots, counts, clock, registry: Mutex::default() }
    }

    fn now(&self) -> u64 {
        // 2^62 ns are 146 years.
        (self.clock.now().0 << 1).min(ENDED - 2)
    }

    fn admit(self: &Arc<Self>) -> Option<ConnectionSlot> {
        let mut registry = self.registry.lock();
        if registry.connections.len() >= self.slots {
            if is_planted("full-listener-refuses") || !self.evict_longest(&mut registry) {
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
        let connection = Arc::new(Connection { state: AtomicU64::new(self.now()), task: OnceLock::new() });
        let number = registry.next;
        registry.next += 1;
        registry.connections.insert(number, connection.clone());
        self.counts.open.fetch_add(1, Ordering::Relaxed);
        Some(ConnectionSlot { admission: self.clone(), number, connection })
    }

    /// Closes the connection that has waited longest. Returns whether one waited.
    fn evict_longest(&self, registry: &mut Registry) -> bool {
        for _ in 0..SEARCHES {
            let Some((number, seen)) = registry.longest_wait() else { return false };
            registry.longest.pop();
            if registry.connections.get(&number).is_some_and(|it| it.end(seen)) {
                self.remove(registry, number);
                return true;
            }
        }
        false
    }

    /// Returns the time until a connection may be replaced. A connection whose wait has just begun
    /// gets some time.
    fn time_to_room(&self) -> Option<Duration> {
        let mut registry = self.registry.lock();
        if registry.connections.len() < self.slots {
            return None;
        }
        let (_, since) = registry.longest_wait()?;
        let waited = Duration::from_nanos(self.now().saturating_sub(since) >> 1);
        GRACE.checked_sub(waited).filter(|rest| !rest.is_zero())
    }

    /// Closes connections that have waited longer than their limits.
    fn close_overdue(&self) {
        if is_planted("connections-wait-for-ever") {
            return;
        }
        let now = self.now();
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
        let waiting = registry.connections.iter();
        let overdue: Vec<u64> = waiting
            .filter(|(_, it)| it.waits_since().is_some_and(|since| is_overdue(since) && it.end(since)))
            .map(|(number, _)| *number)
            .collect();
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

/// Position of one connection in the table of its listener. The connection waits for a request at
/// first. The drop frees the position.
#[derive(Debug)]
pub struct ConnectionSlot {
    admission: Arc<Admission>,
    number: u64,
    connection: Arc<Connection>,
}

impl ConnectionSlot {
    /// Marks the connection as waiting for a request, or for its peer to read a response, from now
    /// on.
    pub fn wait_for_request(&self) {
        if is_planted("connections-never-idle-again") {
            return;
        }
        self.wait(0);
    }

    /// Marks the connection as waiting for the rest of a request, from now on. A connection that is
    /// already marked so keeps the moment when its wait began.
    pub fn wait_within_request(&self) {
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
        if self.connection.waits_since().is_some_and(|since| since & IN_REQUEST == 0) {
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
        self.admission.remove(&mut self.admission.registry.lock(), self.number);
    }
}

#[cfg(all(test, not(miri)))]
mod tests;
