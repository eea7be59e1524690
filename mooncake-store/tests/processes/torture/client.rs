//! Process of a client that changes and reads keys of its own, and compares each result with its
//! shadow of them.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use mooncake_core::clock::Rng;
use mooncake_core::{Error, ErrorCode, ErrorKind};
use mooncake_store::client::{Client, PutOutcome};

use super::shadow::{Expected, Outcome, Shadow};
use super::timeline::Timeline;
use super::value::{HEAD, LONGEST, Label};
use super::{CLIENTS, offers_memory, tenant_of};
use crate::cluster::{argument, builder, master_address};

/// Longest duration of a call, without the time for which this process was stopped. A call has a
/// timeout of two seconds; the rest is for a busy machine.
const HANGS: Duration = Duration::from_secs(16);
/// Time after which a write or copy of a client that gave up no longer protects an object.
pub(super) const UNSETTLED: Duration = Duration::from_secs(60);
/// Interval between two reports of the counts.
const REPORT: Duration = Duration::from_secs(2);

/// Numbers of calls by outcome.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts(pub(super) [u64; NAMES.len()]);

/// Names of the counts, in the order of [`Count`].
pub(super) const NAMES: [&str; 15] = [
    "stored",
    "removed",
    "hits",
    "misses",
    "present",
    "lost",
    "outlived",
    "lost-outlived",
    "only-reads",
    "foreign-hits",
    "existed",
    "copies",
    "failed",
    "cancelled",
    "longest-ms",
];

/// Index of a count.
#[derive(Clone, Copy, Debug)]
pub(super) enum Count {
    Stored,
    Removed,
    Hits,
    Misses,
    /// Hits of values that the living master has acknowledged.
    Present,
    /// Misses of such values: their owner has died or was cut off, or they were evicted.
    Lost,
    /// Hits of values that only an earlier master has acknowledged.
    Outlived,
    LostOutlived,
    /// First reads of values that are deleted after their first read.
    OnlyReads,
    /// Hits of keys of other clients.
    ForeignHits,
    Existed,
    Copies,
    Failed,
    Cancelled,
    LongestMs,
}

impl Counts {
    pub(super) fn of(&self, count: Count) -> u64 {
        self.0[count as usize]
    }

    pub(super) fn add(&mut self, other: &Self) {
        let longest = self.of(Count::LongestMs).max(other.of(Count::LongestMs));
        self.0.iter_mut().zip(&other.0).for_each(|(sum, more)| *sum += more);
        self.0[Count::LongestMs as usize] = longest;
    }

    pub(super) fn parse(text: &str) -> Option<Self> {
        let numbers: Option<Vec<u64>> = text.split(' ').map(|word| word.parse().ok()).collect();
        Some(Self(numbers?.try_into().ok()?))
    }

    fn to_line(self) -> String {
        self.0.map(|number| number.to_string()).join(" ")
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nonzero = NAMES.iter().zip(&self.0).filter(|(_, number)| **number > 0);
        let words: Vec<_> = nonzero.map(|(name, number)| format!("{name} {number}")).collect();
        f.write_str(&words.join(", "))
    }
}

/// Client with its shadow.
pub(super) struct Actor {
    pub(super) client: Client,
    pub(super) writer: u64,
    pub(super) number: u64,
    pub(super) rng: Rng,
    pub(super) shadows: Vec<Shadow>,
    pub(super) timeline: Timeline,
    pub(super) counts: Counts,
    started: Instant,
    /// Milliseconds for which this process was stopped.
    stopped_ms: Arc<AtomicU64>,
    versions: u64,
    /// Key of a stale read.
    suspect: Option<u64>,
    /// Last version of each key of [`calm`](super::calm).
    pub(super) calm: Vec<u64>,
}

/// Outcome of a call, with its times on the clock of this client.
pub(super) struct Called<T> {
    /// `None` if the call was dropped before its end.
    pub(super) result: Option<T>,
    pub(super) began: Duration,
    pub(super) outcome: Outcome,
}

impl Actor {
    pub(super) fn key(&self, number: u64) -> String {
        key_of(self.writer, number)
    }

    pub(super) fn now(&self) -> Duration {
        self.started.elapsed()
    }

    pub(super) fn count(&mut self, count: Count) {
        self.counts.0[count as usize] += 1;
    }

    pub(super) fn next_label(&mut self, key: u64) -> Label {
        self.versions += 1;
        Label { writer: self.writer, key, version: self.versions }
    }

    /// Runs a call to its end, or drops it at a random moment.
    pub(super) async fn call<T>(
        &mut self,
        what: &str,
        operation: impl Future<Output = T>,
    ) -> Result<Called<T>, String> {
        let dropped_after = (self.rng.below(16) == 0).then(|| Duration::from_micros(self.rng.below(4000)));
        self.call_for(what, dropped_after, operation).await
    }

    /// Runs a call to its end.
    ///
    /// # Errors
    /// Names a call that takes too long.
    pub(super) async fn call_for<T>(
        &mut self,
        what: &str,
        dropped_after: Option<Duration>,
        operation: impl Future<Output = T>,
    ) -> Result<Called<T>, String> {
        let (before, began) = (self.timeline.update(), self.now());
        let stopped_before = self.stopped_ms.load(Relaxed);
        let awake = |now: Duration, stopped_ms: u64| {
            (now - began).saturating_sub(Duration::from_millis(stopped_ms - stopped_before))
        };
        tokio::pin!(operation);
        let result = if let Some(after) = dropped_after {
            tokio::time::timeout(after, operation).await.ok()
        } else {
            loop {
                match tokio::time::timeout(Duration::from_secs(1), &mut operation).await {
                    Ok(result) => break Some(result),
                    Err(_) if awake(self.now(), self.stopped_ms.load(Relaxed)) < HANGS => {}
                    Err(_) => {
                        return Err(format!("{what} hangs: {:?}; {}", self.now() - began, self.timeline));
                    }
                }
            }
        };
        let (ended, after) = (self.now(), self.timeline.update());
        let took = awake(ended, self.stopped_ms.load(Relaxed)).as_millis() as u64;
        let longest = &mut self.counts.0[Count::LongestMs as usize];
        *longest = took.max(*longest);
        if result.is_none() {
            self.count(Count::Cancelled);
        }
        let acknowledged = after.filter(|after| before.is_some_and(|before| before.life == after.life));
        let outcome = Outcome { is_certain: result.is_some(), acknowledged, ended };
        Ok(Called { result, began, outcome })
    }

    /// Returns `None` for a permitted error.
    ///
    /// # Errors
    /// Returns any other error as text.
    pub(super) fn fine<T>(&mut self, what: &str, result: Result<T, Error>) -> Result<Option<T>, String> {
        use ErrorKind::{Busy, Expired, NoSpace, Timeout, Unavailable};
        match result {
            Ok(value) => Ok(Some(value)),
            Err(error)
                if matches!(error.kind(), Busy | Expired | NoSpace | Timeout | Unavailable)
                    // The put was discarded, or its master was replaced, before its end.
                    || error.code() == ErrorCode::IllegalClient =>
            {
                self.count(Count::Failed);
                Ok(None)
            }
            Err(error) => Err(format!("{what}: an error that must not be: {error:?}: {error}")),
        }
    }

    /// Notes a write whose outcome is known, or not.
    pub(super) fn note_put(
        &mut self,
        label: Label,
        time_to_live: Option<Duration>,
        is_read_once: bool,
        stored: Option<PutOutcome>,
        outcome: Outcome,
    ) {
        if stored == Some(PutOutcome::Existed) {
            self.count(Count::Existed);
        }
        let is_certain = stored == Some(PutOutcome::Stored);
        if is_certain {
            self.count(Count::Stored);
        }
        let until = self.now() + UNSETTLED;
        let shadow = &mut self.shadows[label.key as usize];
        if !is_certain {
            shadow.unsettle(until);
        }
        shadow.put(label.version, time_to_live, is_read_once, Outcome { is_certain, ..outcome });
        shadow.prune(&self.timeline);
    }

    /// Checks a value that was read, and whether a miss was to be expected.
    pub(super) fn check_read(
        &mut self,
        key: u64,
        label: Option<Label>,
        began: Duration,
        outcome: Outcome,
    ) -> Result<(), String> {
        let expected = self.shadows[key as usize].expected(began, &self.timeline);
        let Some(label) = label else {
            self.count(Count::Misses);
            match expected {
                Expected::Present => self.count(Count::Lost),
                Expected::Outlived => self.count(Count::LostOutlived),
                Expected::Unknown => {}
            }
            return Ok(());
        };
        if (label.writer, label.key) != (self.writer, key) {
            return Err(format!("a read of key {key} of {:x} returns {label:?}", self.writer));
        }
        self.count(Count::Hits);
        match expected {
            Expected::Present => self.count(Count::Present),
            Expected::Outlived => self.count(Count::Outlived),
            Expected::Unknown => {}
        }
        if Class::of(key) == Class::OnlyRead {
            self.count(Count::OnlyReads);
        }
        let shadow = &mut self.shadows[key as usize];
        let checked = shadow.check(label.version, began, outcome, &self.timeline);
        checked.map_err(|reason| {
            self.suspect = Some(key);
            format!("stale read of key {key}: {reason}")
        })
    }
}

pub(super) fn key_of(writer: u64, number: u64) -> String {
    format!("w{writer:x}/{number}")
}

/// Kind of the objects under a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    Plain,
    Lifetime,
    OnlyRead,
    Pinned,
}

impl Class {
    pub(super) fn of(key: u64) -> Self {
        match key % 8 {
            0..=4 => Self::Plain,
            5 => Self::Lifetime,
            6 => Self::OnlyRead,
            _ => Self::Pinned,
        }
    }
}

/// Counts the time for which this process does not run.
fn watch_stops() -> Arc<AtomicU64> {
    let stopped = Arc::new(AtomicU64::new(0));
    let counter = stopped.clone();
    std::thread::spawn(move || {
        const PAUSE: Duration = Duration::from_millis(50);
        while Arc::strong_count(&counter) > 1 {
            let before = Instant::now();
            std::thread::sleep(PAUSE);
            let more = before.elapsed().saturating_sub(3 * PAUSE).as_millis() as u64;
            counter.fetch_add(more, Relaxed);
        }
    });
    stopped
}

/// Connects as soon as the master responds.
pub(super) async fn connect(make: impl Fn() -> mooncake_store::client::ClientBuilder) -> Client {
    loop {
        match make().connect().await {
            Ok(client) => return client,
            Err(error) if matches!(error.kind(), ErrorKind::Timeout | ErrorKind::Unavailable) => {
                eprintln!("cannot connect yet: {error}");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            Err(error) => {
                println!("\n> wrong cannot connect: {error:?}: {error}");
                std::process::exit(1);
            }
        }
    }
}

/// Returns the lines of the standard input of this process.
pub(super) fn commands() -> mpsc::Receiver<String> {
    let (send, lines) = mpsc::channel();
    std::thread::spawn(move || {
        std::io::stdin().lines().map_while(Result::ok).for_each(|line| drop(send.send(line)));
    });
    lines
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "child process of other tests"]
async fn client() {
    let (Some(master), Some(number)) = (master_address(), argument::<u64>("TEST_NUMBER")) else { return };
    let commands = commands();
    let seed: u64 = argument("TEST_SEED").unwrap();
    let generation: u64 = argument("TEST_GENERATION").unwrap();
    let make = || {
        let segment = if offers_memory(number) { 8 << 20 } else { 0 };
        let cache = if number % 3 == 1 { 4 << 20 } else { 0 };
        let builder = builder(&master, segment).hot_cache(cache).tenant(tenant_of(number));
        builder.share_memory((number + seed).is_multiple_of(2)).checksum(number == 2)
    };
    let client = connect(make).await;
    let mut actor = Actor {
        client: client.clone(),
        writer: generation * CLIENTS + number,
        number,
        rng: Rng::seeded(seed ^ ((generation * CLIENTS + number) << 32)),
        shadows: vec![Shadow::default(); argument("TEST_KEYS").unwrap()],
        timeline: Timeline::open(&argument::<std::path::PathBuf>("TEST_TIMELINE").unwrap()),
        counts: Counts::default(),
        started: Instant::now(),
        stopped_ms: watch_stops(),
        versions: 0,
        suspect: None,
        calm: Vec::new(),
    };
    println!("\n> ready {}", client.hostname());
    if let Err(wrong) = serve(&mut actor, &commands).await {
        let replicas = match actor.suspect {
            Some(key) => format!("{:?}", client.replicas().list(actor.key(key)).await),
            None => String::new(),
        };
        println!("> wrong client {number}, generation {generation}: {wrong}; {replicas}");
        std::process::exit(1);
    }
    let closed = client.close().await;
    println!("> left {closed:?}");
}

/// Works until the parent wants something else, and to the end of the input.
async fn serve(actor: &mut Actor, commands: &mpsc::Receiver<String>) -> Result<(), String> {
    let pause = Duration::from_secs(2) / argument::<u32>("TEST_RATE").unwrap();
    let (mut works, mut reported) = (true, actor.now());
    loop {
        match commands.try_recv().as_deref() {
            Ok("quiet") => {
                works = false;
                actor.remove_own().await?;
                println!("> quiet");
            }
            Ok("store") => {
                actor.store_calmly().await?;
                println!("> stored {}", actor.calm.len());
            }
            Ok("lasting") => println!("> lasting {}", actor.client.status().lasting_objects().await),
            Ok("verify") => println!("> missing {}", actor.count_missing().await?),
            Ok(other) => return Err(format!("an unknown command: {other}")),
            Err(mpsc::TryRecvError::Disconnected) => break,
            Err(mpsc::TryRecvError::Empty) if works => actor.step().await?,
            Err(mpsc::TryRecvError::Empty) => {}
        }
        if actor.now() - reported > REPORT {
            reported = actor.now();
            println!("> counts {}", actor.counts.to_line());
        }
        let micros = actor.rng.below(pause.as_micros() as u64);
        tokio::time::sleep(Duration::from_micros(micros)).await;
    }
    actor.remove_own().await?;
    println!("> counts {}", actor.counts.to_line());
    let used = actor.client.status().local_buffer_used();
    if used != 0 { Err(format!("{used} bytes of the local buffer are in use at the end")) } else { Ok(()) }
}

/// Longest value of a key, so that a few long ones do not fill the memory.
pub(super) fn lengths(rng: &mut Rng) -> usize {
    match rng.below(8) {
        0 => HEAD + rng.below(200) as usize,
        1..=3 => HEAD + 4000 + rng.below(200) as usize,
        4..=6 => 30_000 + rng.below(10_000) as usize,
        _ => LONGEST - rng.below(50_000) as usize,
    }
}
