//! State shared on the completion path, under every interleaving of the thread of a device and
//! callers (loom).
//!
//! The file under test is included here with the atomics and locks of loom; nothing else of the
//! crate is.

#![allow(dead_code, reason = "the tests use a part of the file")]

#[path = "../src/send_credits.rs"]
mod send_credits;

mod sync {
    pub(crate) use loom::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

    /// Lock of loom with the interface of the crate's lock.
    #[derive(Debug)]
    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> loom::sync::MutexGuard<'_, T> {
            self.0.lock().unwrap()
        }
    }
}

use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use loom::thread;

use send_credits::{Alarm, Credits, Starved, WakeableQueue, may_sleep};

/// State shared by both sides.
struct Shared {
    credits: Credits,
    starved: Starved<u8>,
    alarm: Alarm,
    /// Number of waiting messages, guarded like the lock of a connection.
    waiting: sync::Mutex<usize>,
    /// True if a caller has signalled the poller.
    wake_event: AtomicBool,
}

impl Shared {
    fn new(credits: usize) -> Arc<Self> {
        Arc::new(Self {
            credits: Credits::new(credits),
            starved: Starved::new(),
            alarm: Alarm::new(),
            waiting: sync::Mutex::new(0),
            wake_event: AtomicBool::new(false),
        })
    }

    /// Acts as a caller: takes credit or waits on the list. Returns true when it got credit.
    fn send(&self) -> bool {
        if self.credits.take(1) == 1 {
            return true;
        }
        if self.starved.add(1, &self.credits) {
            self.alarm.set(0);
            self.wake_event.store(true, Ordering::SeqCst);
        }
        false
    }

    /// Acts as the poller after completions, or when it is woken: waiting senders try again.
    fn feed(&self) -> usize {
        let mut starved = Vec::new();
        self.starved.take(&mut starved);
        starved.into_iter().filter(|_| self.send()).count()
    }
}

#[test]
fn no_operation_waits_for_available_credit() {
    loom::model(|| {
        let shared = Shared::new(0);
        let caller = {
            let shared = shared.clone();
            thread::spawn(move || shared.send())
        };
        // A completion of another sender.
        shared.credits.release(1);
        let mut sent = shared.feed();
        sent += usize::from(caller.join().unwrap());
        // The poller wakes only if a caller has signalled it.
        if shared.wake_event.swap(false, Ordering::SeqCst) && shared.alarm.at() == 0 {
            shared.alarm.clear();
            sent += shared.feed();
        }
        assert_eq!(sent, 1, "a message waits although credit is free");
    });
}

#[test]
fn credit_is_granted_once() {
    loom::model(|| {
        let shared = Shared::new(3);
        let taken = Arc::new(AtomicUsize::new(0));
        let callers: Vec<_> = (0..2)
            .map(|_| {
                let (shared, taken) = (shared.clone(), taken.clone());
                thread::spawn(move || {
                    let n = shared.credits.take(2);
                    let all = taken.fetch_add(n, Ordering::SeqCst) + n;
                    assert!(all <= 3, "{all} of 3 credits: the queue would overflow");
                    taken.fetch_sub(n, Ordering::SeqCst);
                    shared.credits.release(n);
                })
            })
            .collect();
        callers.into_iter().for_each(|caller| caller.join().unwrap());
        assert_eq!(shared.credits.take(9), 3, "all credit comes back");
    });
}

#[test]
fn no_deadline_is_slept_through() {
    loom::model(|| {
        let shared = Shared::new(0);
        let caller = {
            let shared = shared.clone();
            thread::spawn(move || {
                *shared.waiting.lock() += 1;
                if shared.alarm.set(10) {
                    shared.wake_event.store(true, Ordering::SeqCst);
                }
            })
        };
        // A look at the clock that is due for another reason, and its plan.
        shared.alarm.clear();
        if *shared.waiting.lock() > 0 {
            shared.alarm.set(10);
        }
        let asleep_until = shared.alarm.at();
        caller.join().unwrap();
        let woken = shared.wake_event.load(Ordering::SeqCst);
        assert!(asleep_until == 10 || woken, "asleep until {asleep_until}, and no signal was sent");
    });
}

/// Completion queue of a device, as the verbs interface describes it: armed, it signals once, at
/// the next completion. All operations on it are ordered.
struct Queue(sync::Mutex<State>);

#[derive(Debug, Default)]
struct State {
    completed: usize,
    armed: bool,
    woken: bool,
}

impl Queue {
    fn complete(&self) {
        let mut state = self.0.lock();
        state.completed += 1;
        state.woken |= std::mem::take(&mut state.armed);
    }
}

/// Polling thread, with the number of completions that it took.
struct Poller(Arc<Queue>, usize);

impl WakeableQueue for Poller {
    type Error = std::convert::Infallible;

    fn take(&mut self) -> Result<bool, Self::Error> {
        let found = std::mem::take(&mut self.0.0.lock().completed);
        self.1 += found;
        Ok(found != 0)
    }

    fn arm(&mut self) -> Result<(), Self::Error> {
        self.0.0.lock().armed = true;
        Ok(())
    }
}

#[test]
fn no_completion_is_slept_through() {
    loom::model(|| {
        let queue = Arc::new(Queue(sync::Mutex::new(State::default())));
        let device = {
            let queue = queue.clone();
            thread::spawn(move || (0..2).for_each(|_| queue.complete()))
        };
        let mut poller = Poller(queue.clone(), 0);
        // Polls until the thread sleeps.
        while !may_sleep(&mut poller).unwrap() {}
        device.join().unwrap();
        let woken = queue.0.lock().woken;
        assert!(poller.1 == 2 || woken, "asleep although a completion is available, and no signal was sent");
        while !may_sleep(&mut poller).unwrap() {}
        assert_eq!(poller.1, 2, "each completion is taken once");
    });
}
