//! Random write sessions over a transport that delays, fails and times out, with calls that are
//! dropped at any await.
//!
//! Three properties hold for every sequence. A commit never makes bytes readable that were not
//! written. Committed bytes do not change. Space is not freed while bytes may land in it. Every run
//! draws new seeds. `MOONCAKE_SESSION_SEED=<seed>` repeats the run of one seed; a failure names its
//! seed.

use std::collections::{BTreeMap, VecDeque};
use std::future::poll_fn;
use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use mooncake_core::clock::Rng;
use mooncake_core::replica::ReplicateConfig;
use mooncake_core::testkit::{effort, test_seed};
use mooncake_store::client::{Client, RangeWrite, Reservation};
use mooncake_store::master::MasterOptions;
use mooncake_transport::testkit::{Fault, Faults};

use crate::faults::{Wire, World};

/// Number of seeds of one run. Each planted bug is found within these.
const SEEDS: u64 = 100;
/// Number of steps of one seed.
const STEPS: u64 = 60;
/// Length of each object.
const LEN: usize = 512;
/// Number of objects that fit into the segment of the owner.
const OBJECTS: usize = 6;

/// Byte of an object, as its writer records it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Byte {
    /// No write has been tried.
    Untouched,
    /// The last write has failed or was dropped.
    Unwritten,
    Written(u8),
}

struct Object {
    number: u64,
    reservation: Reservation,
    bytes: Vec<Byte>,
}

/// Numbers of rare events of a run: a test without them shows nothing.
#[derive(Debug, Default)]
struct Seen {
    committed: u64,
    refused: u64,
    dropped_under_way: u64,
    given_back: u64,
    kept_back: u64,
}

struct Session {
    world: World,
    owner: Client<Wire>,
    reader: Client<Wire>,
    writer: Client<Wire>,
    wire: Arc<Wire>,
    rng: Rng,
    objects: Vec<Object>,
    /// Number of the object of each transfer that the transport holds, the oldest first.
    held: VecDeque<u64>,
    committed: BTreeMap<u64, Vec<Byte>>,
    last: u64,
    seen: Seen,
}

impl Session {
    async fn new(seed: u64) -> Self {
        let world = World::new(MasterOptions::default());
        let (owner, _) = world.connect((OBJECTS * LEN) as u64).await;
        let (reader, _) = world.connect(0).await;
        let (writer, wire) = world.connect(0).await;
        Self {
            world,
            owner,
            reader,
            writer,
            wire,
            rng: Rng::seeded(seed),
            objects: Vec::new(),
            held: VecDeque::new(),
            committed: BTreeMap::new(),
            last: 0,
            seen: Seen::default(),
        }
    }

    async fn step(&mut self) -> Result<(), String> {
        match self.rng.below(16) {
            0 | 1 => self.reserve().await,
            2..=8 => self.write().await?,
            9 | 10 => self.release().await,
            11 | 12 => self.commit().await?,
            13 => self.give_back().await?,
            14 => self.check().await?,
            _ => self.advance().await,
        }
        Ok(())
    }

    fn any(&mut self) -> Option<usize> {
        let len = self.objects.len() as u64;
        (len > 0).then(|| self.rng.below(len) as usize)
    }

    async fn reserve(&mut self) {
        self.last += 1;
        let item = [(key(self.last), LEN as u64)];
        // Without free space, the call waits until its deadline, which never comes under this
        // clock.
        let reserve = async { self.writer.ranges().reserve(&item, &ReplicateConfig::default()).await };
        let Ok(outcome) = tokio::time::timeout(Duration::from_millis(20), reserve).await else { return };
        if let Ok(reservation) = outcome.unwrap().remove(0) {
            let bytes = vec![Byte::Untouched; LEN];
            self.objects.push(Object { number: self.last, reservation, bytes });
        }
    }

    /// Writes one or two ranges of an object, or drops the call after a few polls.
    async fn write(&mut self) -> Result<(), String> {
        let Some(at) = self.any() else { return Ok(()) };
        let fault = [Fault::Fail, Fault::Cut, Fault::Delay, Fault::LandLate, Fault::LoseResponse]
            [self.rng.below(5) as usize];
        let rates =
            Faults::none().with(Fault::Delay, 300).with(fault, [0, 100, 300][self.rng.below(3) as usize]);
        self.wire.set(rates);
        let cut = self.rng.range(1..LEN as u64) as usize;
        let whole = self.rng.below(2) == 0;
        let mut ranges: Vec<Range<usize>> = vec![if whole { 0 } else { cut / 2 }..cut, cut..LEN];
        ranges.truncate(if whole { 2 } else { 1 });
        let values: Vec<Vec<u8>> = ranges
            .iter()
            .map(|range| {
                let mut bytes = vec![0; range.len()];
                self.rng.fill(&mut bytes);
                bytes
            })
            .collect();
        let (polls, drops) = (self.rng.below(6), self.rng.below(2) == 0);
        let object = &self.objects[at];
        let writes: Vec<RangeWrite<'_, Wire>> = ranges
            .iter()
            .zip(&values)
            .map(|(range, bytes)| {
                let mut from = self.writer.memory().alloc(range.len()).unwrap().exclusive().unwrap();
                from.copy_from(0, bytes).unwrap();
                RangeWrite {
                    object: &object.reservation,
                    offset: range.start as u64,
                    from: from.into_shared(),
                }
            })
            .collect();
        let mut polled = false;
        let outcomes = {
            let mut call = pin!(self.writer.ranges().write(writes));
            let mut outcomes = None;
            for _ in 0..polls {
                polled = true;
                let poll = poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx))).await;
                if let Poll::Ready(ready) = poll {
                    outcomes = Some(ready);
                    break;
                }
                tokio::task::yield_now().await;
            }
            if outcomes.is_none() && !drops {
                polled = true;
                // The loop runs until all transfers have ended or are held.
                let pause = Duration::from_millis(10);
                outcomes = tokio::time::timeout(pause, call.as_mut()).await.ok();
                if outcomes.is_none() {
                    self.wire.release(usize::MAX);
                    self.held.clear();
                    let end = tokio::time::timeout(Duration::from_secs(10), call.as_mut()).await;
                    outcomes = Some(end.map_err(|_| "a write did not end after its transfers")?);
                }
            }
            outcomes
        };
        while self.held.len() < self.wire.held() {
            self.held.push_back(self.objects[at].number);
            self.seen.dropped_under_way += u64::from(outcomes.is_none());
        }
        let object = &mut self.objects[at];
        for (i, (range, bytes)) in ranges.into_iter().zip(values).enumerate() {
            match &outcomes {
                Some(outcomes) if outcomes[i].is_ok() => {
                    let written = bytes.into_iter().map(Byte::Written);
                    object.bytes[range].iter_mut().zip(written).for_each(|(byte, new)| *byte = new);
                }
                None if !polled => {}
                _ => object.bytes[range].fill(Byte::Unwritten),
            }
        }
        Ok(())
    }

    /// Lands some of the held transfers.
    async fn release(&mut self) {
        let most = self.rng.below(4) as usize;
        let released = self.wire.release(most);
        self.held.drain(..released);
        self.settle().await;
    }

    /// Runs the tasks of dropped calls.
    async fn settle(&self) {
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
    }

    async fn commit(&mut self) -> Result<(), String> {
        let Some(at) = self.any() else { return Ok(()) };
        let outcome = self.writer.ranges().commit(&[&self.objects[at].reservation]).await.unwrap().remove(0);
        if outcome.is_err() {
            self.seen.refused += 1;
            return Ok(());
        }
        self.seen.committed += 1;
        let Object { number, bytes, .. } = self.objects.swap_remove(at);
        if let Some(byte) = bytes.iter().position(|byte| *byte == Byte::Unwritten) {
            return Err(format!("object {number} was committed, and its byte {byte} was not written"));
        }
        self.committed.insert(number, bytes);
        self.check().await
    }

    async fn give_back(&mut self) -> Result<(), String> {
        let Some(at) = self.any() else { return Ok(()) };
        let given = self.writer.ranges().give_back(&[&self.objects[at].reservation]).await;
        let number = self.objects.swap_remove(at).number;
        self.seen.given_back += u64::from(given);
        self.seen.kept_back += u64::from(!given);
        if given && self.held.contains(&number) {
            return Err(format!("space of object {number} was given back, and a write of it is under way"));
        }
        self.settle().await;
        // Space with a transfer in progress is still allocated, whatever call frees it.
        let granted = self.world.master.stats().writing as usize;
        let mut under_way: Vec<u64> = self.held.iter().copied().collect();
        under_way.sort_unstable();
        under_way.dedup();
        under_way.retain(|number| !self.committed.contains_key(number));
        if granted < under_way.len() {
            return Err(format!(
                "{granted} objects are granted, and writes of {} are under way",
                under_way.len()
            ));
        }
        Ok(())
    }

    async fn advance(&mut self) {
        self.world.clock.advance(Duration::from_millis(self.rng.below(2500)));
        for client in [&self.owner, &self.reader, &self.writer] {
            client.status().is_healthy().await;
        }
        self.world.master.tick();
    }

    /// Compares all committed objects with the written bytes. An object may be evicted, but must
    /// not have other bytes.
    async fn check(&self) -> Result<(), String> {
        for (number, bytes) in &self.committed {
            let Some(got) = self.reader.get(key(*number)).await.unwrap() else { continue };
            for (at, (byte, got)) in bytes.iter().zip(got.iter()).enumerate() {
                if !matches!(byte, Byte::Untouched) && *byte != Byte::Written(*got) {
                    return Err(format!("byte {at} of object {number} is {got}, and {byte:?} was expected"));
                }
            }
        }
        Ok(())
    }

    /// Lands all transfers.
    async fn finish(&mut self) -> Result<(), String> {
        self.wire.set(Faults::none());
        self.wire.release(usize::MAX);
        self.held.clear();
        self.settle().await;
        self.check().await
    }
}

fn key(number: u64) -> String {
    format!("object {number}")
}

async fn run(seed: u64) -> Result<Seen, String> {
    let mut session = Session::new(seed).await;
    for step in 0..STEPS {
        session.step().await.map_err(|why| format!("step {step}: {why}"))?;
    }
    session.finish().await?;
    Ok(session.seen)
}

/// Returns the seed to repeat, if the environment names one.
#[allow(clippy::disallowed_methods, reason = "a setting of the test")]
fn named_seed() -> Option<u64> {
    std::env::var("MOONCAKE_SESSION_SEED").ok()?.parse().ok()
}

#[tokio::test]
#[allow(clippy::print_stdout, reason = "the seeds of a run that fails otherwise")]
async fn sessions_commit_what_was_written_and_keep_space_while_bytes_may_land() {
    let (first, seeds) = named_seed().map_or_else(|| (test_seed(), effort(30, SEEDS)), |seed| (seed, 1));
    println!("seeds {first} to {}", first + seeds - 1);
    let mut all = Seen::default();
    for seed in first..first + seeds {
        let seen = match run(seed).await {
            Ok(seen) => seen,
            Err(why) => {
                panic!("{why}\nrepeat with MOONCAKE_SESSION_SEED={seed} (seed number {})", seed - first + 1)
            }
        };
        all.committed += seen.committed;
        all.refused += seen.refused;
        all.dropped_under_way += seen.dropped_under_way;
        all.given_back += seen.given_back;
        all.kept_back += seen.kept_back;
    }
    println!("{all:?}");
    let rare = [all.committed, all.refused, all.dropped_under_way, all.given_back, all.kept_back];
    assert!(seeds == 1 || rare.iter().all(|count| *count > 0), "every event must be seen: {all:?}");
}
