//! Tasks that a waiting thread of the caller carries out itself.
//!
//! A thread that waits for an operation becomes the *driver* of its process: it takes the messages
//! of other processes of the host, and runs the tasks that they concern. So no other thread of the
//! process has to wake up for the operation. While there is no driver, the runtime runs the tasks.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use mooncake_core::clock::{Clock, SystemClock};
use parking_lot::Mutex;
use tokio::runtime::Handle;

use crate::nearby::{Bell, FileAddress, Rest};

/// Time after the last operation for which messages of a next one may wait without a notice.
const LINGER: Duration = Duration::from_millis(5);

/// Longest sleep until several messages have come. If ranks call different operations, fewer
/// messages may come than expected, and the driver looks at those that are there.
const COUNTED_SLEEP: Duration = Duration::from_millis(10);

/// Number of times that a thread which drives no more looks for messages in a row.
const MAX_LOOKS: usize = 64;

/// Messages of other processes of the host.
pub(crate) trait Mail: Send + Sync {
    /// Takes the messages that are there.
    fn take(&self);

    /// Returns whether messages are there.
    fn is_waiting(&self) -> bool;

    /// Returns whether all other processes send their messages this way.
    fn has_all(&self) -> bool;
}

/// Place where the tasks of a process run.
pub(crate) struct Driver {
    runtime: Handle,
    bell: Bell,
    mail: Weak<dyn Mail>,
    state: Mutex<State>,
    /// Number of operations in progress.
    running: Arc<AtomicUsize>,
    /// Number of messages that the task which ran last waits for.
    expected: AtomicU32,
    clock: SystemClock,
}

#[derive(Default)]
struct State {
    /// True while a thread drives.
    is_driven: bool,
    /// Tasks that wait for the driver.
    ready: VecDeque<Arc<Task>>,
    /// Counts the drivers.
    turns: u64,
    /// True while a task waits for the end of [`LINGER`].
    lingers: bool,
}

impl Driver {
    pub(crate) fn new(runtime: Handle, bell: Bell, mail: Weak<dyn Mail>) -> Arc<Self> {
        let (state, running, clock) = (Mutex::default(), Arc::default(), SystemClock::new());
        let expected = AtomicU32::new(1);
        Arc::new(Self { runtime, bell, mail, state, running, expected, clock })
    }

    /// Returns the address of the bell of this process.
    pub(crate) fn bell(&self) -> FileAddress {
        self.bell.address()
    }

    /// Returns the count of the operations in progress.
    pub(crate) fn running(&self) -> Arc<AtomicUsize> {
        self.running.clone()
    }

    /// Says how many messages the present operation waits for. If it is the only one in progress,
    /// the driver sleeps until as many have come, or anything else happens.
    pub(crate) fn expect(&self, messages: u32) {
        self.expected.store(messages, Ordering::Relaxed);
    }

    /// Starts a task.
    pub(crate) fn spawn(self: &Arc<Self>, work: impl Future<Output = ()> + Send + 'static) {
        let task = Arc::new(Task {
            driver: self.clone(),
            state: AtomicU8::new(QUEUED),
            work: Mutex::new(Some(Box::pin(work))),
        });
        self.queue(task);
    }

    fn queue(&self, task: Arc<Task>) {
        {
            let mut state = self.state.lock();
            if state.is_driven {
                state.ready.push_back(task);
                drop(state);
                return self.bell.call();
            }
        }
        self.runtime.spawn(async move { task.run() });
    }

    /// Makes this thread the driver. Returns `None` if there is one already, or if messages come in
    /// another way.
    pub(crate) fn enter(self: &Arc<Self>) -> Option<Driving> {
        let mail = self.mail.upgrade().filter(|mail| mail.has_all())?;
        let mut state = self.state.lock();
        if state.is_driven {
            return None;
        }
        state.is_driven = true;
        state.turns += 1;
        self.bell.wake_up();
        drop(state);
        Some(Driving { driver: self.clone(), mail })
    }

    /// Takes messages after a notice, unless a driver does.
    pub(crate) fn attend(self: &Arc<Self>) {
        let Some(mail) = self.mail.upgrade() else { return };
        for _ in 0..MAX_LOOKS {
            mail.take();
            if !self.rest(&mut self.state.lock(), false) || !mail.is_waiting() {
                return;
            }
        }
        self.attend_later();
    }

    /// Takes messages after other tasks have had a turn.
    fn attend_later(self: &Arc<Self>) {
        let driver = Arc::downgrade(self);
        self.runtime.spawn(async move {
            tokio::task::yield_now().await;
            if let Some(driver) = driver.upgrade() {
                driver.attend();
            }
        });
    }

    /// Tells senders that no thread takes messages, unless one does. Returns false in that case.
    fn rest(self: &Arc<Self>, state: &mut State, lingers: bool) -> bool {
        if state.is_driven {
            return false;
        }
        if !lingers || self.running.load(Ordering::SeqCst) != 0 {
            self.bell.rest(Rest::Alert);
            return true;
        }
        self.bell.rest(Rest::Idle);
        if !std::mem::replace(&mut state.lingers, true) {
            let (driver, turns) = (Arc::downgrade(self), state.turns);
            self.runtime.spawn(linger(driver, turns));
        }
        true
    }
}

/// Ends the time in which messages may wait, when no driver has come for a while.
async fn linger(driver: Weak<Driver>, mut turns: u64) {
    loop {
        tokio::time::sleep(LINGER).await;
        let Some(driver) = driver.upgrade() else { return };
        {
            let mut state = driver.state.lock();
            if state.is_driven || state.turns != turns {
                turns = state.turns;
                continue;
            }
            state.lingers = false;
        }
        return driver.attend();
    }
}

impl Wake for Driver {
    fn wake(self: Arc<Self>) {
        self.bell.call();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.bell.call();
    }
}

/// Duty of a thread to carry out the operations of its process. The drop passes the remaining tasks
/// to the runtime.
pub struct Driving {
    driver: Arc<Driver>,
    mail: Arc<dyn Mail>,
}

impl Driving {
    /// Takes the messages that are there, and runs each task once that is ready. Returns whether
    /// there was a task.
    pub(crate) fn turn(&self) -> bool {
        let _inside = self.driver.runtime.enter();
        self.mail.take();
        let ready = std::mem::take(&mut self.driver.state.lock().ready);
        let any = !ready.is_empty();
        for task in ready {
            task.run();
        }
        any
    }

    /// Returns a waker of this thread.
    pub(crate) fn waker(&self) -> Waker {
        self.driver.clone().into()
    }

    /// Drives until `is_done`, for at most `limit`. Returns whether it is done.
    pub(crate) fn until(&self, limit: Duration, is_done: impl Fn() -> bool) -> bool {
        let driver = &self.driver;
        let began = driver.clock.now();
        loop {
            let any = self.turn();
            if is_done() {
                return true;
            }
            let left = limit.saturating_sub(driver.clock.now().since(began));
            if left.is_zero() {
                return false;
            }
            if any {
                continue;
            }
            let is_only = driver.running.load(Ordering::SeqCst) == 1;
            let count = if is_only { driver.expected.load(Ordering::Relaxed) } else { 1 };
            let left = if count > 1 { left.min(COUNTED_SLEEP) } else { left };
            driver.bell.sleep(count, left, || {
                !self.mail.is_waiting() && driver.state.lock().ready.is_empty() && !is_done()
            });
        }
    }
}

impl Drop for Driving {
    fn drop(&mut self) {
        let driver = &self.driver;
        let ready = {
            let mut state = driver.state.lock();
            state.is_driven = false;
            driver.rest(&mut state, true);
            std::mem::take(&mut state.ready)
        };
        for task in ready {
            driver.runtime.spawn(async move { task.run() });
        }
        // Messages that came before the bell showed the rest.
        for _ in 0..MAX_LOOKS {
            if !self.mail.is_waiting() {
                return;
            }
            self.mail.take();
            if !driver.rest(&mut driver.state.lock(), true) {
                return;
            }
        }
        driver.attend_later();
    }
}

/// States of a task: it waits for a wake-up, waits for a thread, runs, runs and was woken.
const WAITING: u8 = 0;
const QUEUED: u8 = 1;
const RUNNING: u8 = 2;
const AGAIN: u8 = 3;

struct Task {
    driver: Arc<Driver>,
    state: AtomicU8,
    work: Mutex<Option<Pin<Box<dyn Future<Output = ()> + Send>>>>,
}

impl Task {
    /// Runs the task until it waits. Called once for each time that it was queued.
    fn run(self: Arc<Self>) {
        self.state.store(RUNNING, Ordering::SeqCst);
        self.driver.expect(1);
        let waker = Waker::from(self.clone());
        let mut work = self.work.lock();
        let Some(pinned) = work.as_mut() else { return };
        let mut context = Context::from_waker(&waker);
        match catch_unwind(AssertUnwindSafe(|| pinned.as_mut().poll(&mut context))) {
            Ok(Poll::Pending) => {}
            Ok(Poll::Ready(())) => return *work = None,
            Err(_) => {
                tracing::error!("bug in mooncake, please report it: a task has panicked");
                return *work = None;
            }
        }
        drop(work);
        let waits = self.state.compare_exchange(RUNNING, WAITING, Ordering::SeqCst, Ordering::SeqCst);
        if waits.is_err() {
            self.state.store(QUEUED, Ordering::SeqCst);
            self.driver.clone().queue(self);
        }
    }
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        let step = |state| match state {
            WAITING => Some(QUEUED),
            RUNNING => Some(AGAIN),
            _ => None,
        };
        if self.state.fetch_update(Ordering::SeqCst, Ordering::SeqCst, step) == Ok(WAITING) {
            self.driver.clone().queue(self);
        }
    }
}
