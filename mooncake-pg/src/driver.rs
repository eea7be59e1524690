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

use crate::intra_host::{Doorbell, FileAddress, Unattended};

/// Time after the last operation for which messages of a next one may wait without a notice.
const LINGER: Duration = Duration::from_millis(5);

/// Longest sleep until several messages have come. If ranks call different operations, fewer
/// messages may come than expected, and the driver looks at those that are there.
const COUNTED_SLEEP: Duration = Duration::from_millis(10);

/// Number of times that a thread which drives no more looks for messages in a row.
const MAX_POLLS: usize = 64;

/// Messages of other processes of the host.
pub(crate) trait MessageSource: Send + Sync {
    /// Takes the messages that are there.
    fn take(&self);

    /// Returns whether messages are there.
    fn has_messages(&self) -> bool;

    /// Returns whether all other processes send their messages this way.
    fn covers_all_peers(&self) -> bool;
}

/// Place where the tasks of a process run.
pub(crate) struct Driver {
    runtime: Handle,
    doorbell: Doorbell,
    messages: Weak<dyn MessageSource>,
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
    driver_count: u64,
    /// True while a task waits for the end of [`LINGER`].
    is_lingering: bool,
}

impl Driver {
    pub(crate) fn new(runtime: Handle, doorbell: Doorbell, messages: Weak<dyn MessageSource>) -> Arc<Self> {
        let (state, running, clock) = (Mutex::default(), Arc::default(), SystemClock::new());
        let expected = AtomicU32::new(1);
        Arc::new(Self { runtime, doorbell, messages, state, running, expected, clock })
    }

    /// Returns the address of the doorbell of this process.
    pub(crate) fn doorbell(&self) -> FileAddress {
        self.doorbell.address()
    }

    /// Returns the count of the operations in progress.
    pub(crate) fn running(&self) -> Arc<AtomicUsize> {
        self.running.clone()
    }

    /// Says how many messages the present operation waits for. If it is the only one in progress,
    /// the driver sleeps until as many have come, or anything else happens.
    pub(crate) fn set_expected(&self, messages: u32) {
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
                return self.doorbell.wake_sleeper();
            }
        }
        self.runtime.spawn(async move { task.run() });
    }

    /// Makes this thread the driver. Returns `None` if there is one already, or if messages come in
    /// another way.
    pub(crate) fn enter(self: &Arc<Self>) -> Option<DriverGuard> {
        let messages = self.messages.upgrade().filter(|messages| messages.covers_all_peers())?;
        let mut state = self.state.lock();
        if state.is_driven {
            return None;
        }
        state.is_driven = true;
        state.driver_count += 1;
        self.doorbell.set_attended();
        drop(state);
        Some(DriverGuard { driver: self.clone(), messages })
    }

    /// Takes messages after a notice, unless a driver does.
    pub(crate) fn poll_messages(self: &Arc<Self>) {
        let Some(messages) = self.messages.upgrade() else { return };
        for _ in 0..MAX_POLLS {
            messages.take();
            if !self.set_unattended(&mut self.state.lock(), false) || !messages.has_messages() {
                return;
            }
        }
        self.poll_messages_later();
    }

    /// Takes messages after other tasks have had a turn.
    fn poll_messages_later(self: &Arc<Self>) {
        let driver = Arc::downgrade(self);
        self.runtime.spawn(async move {
            tokio::task::yield_now().await;
            if let Some(driver) = driver.upgrade() {
                driver.poll_messages();
            }
        });
    }

    /// Tells senders that no thread takes messages, unless one does. Returns false in that case.
    fn set_unattended(self: &Arc<Self>, state: &mut State, is_lingering: bool) -> bool {
        if state.is_driven {
            return false;
        }
        if !is_lingering || self.running.load(Ordering::SeqCst) != 0 {
            self.doorbell.set_unattended(Unattended::NotifyAlways);
            return true;
        }
        self.doorbell.set_unattended(Unattended::Idle);
        if !std::mem::replace(&mut state.is_lingering, true) {
            let (driver, driver_count) = (Arc::downgrade(self), state.driver_count);
            self.runtime.spawn(linger(driver, driver_count));
        }
        true
    }
}

/// Ends the time in which messages may wait, when no driver has come for a while.
async fn linger(driver: Weak<Driver>, mut driver_count: u64) {
    loop {
        tokio::time::sleep(LINGER).await;
        let Some(driver) = driver.upgrade() else { return };
        {
            let mut state = driver.state.lock();
            if state.is_driven || state.driver_count != driver_count {
                driver_count = state.driver_count;
                continue;
            }
            state.is_lingering = false;
        }
        return driver.poll_messages();
    }
}

impl Wake for Driver {
    fn wake(self: Arc<Self>) {
        self.doorbell.wake_sleeper();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.doorbell.wake_sleeper();
    }
}

/// Duty of a thread to carry out the operations of its process. The drop passes the remaining tasks
/// to the runtime.
pub struct DriverGuard {
    driver: Arc<Driver>,
    messages: Arc<dyn MessageSource>,
}

impl DriverGuard {
    /// Takes the messages that are there, and runs each task once that is ready. Returns whether
    /// there was a task.
    pub(crate) fn run_ready(&self) -> bool {
        let _runtime_guard = self.driver.runtime.enter();
        self.messages.take();
        let ready = std::mem::take(&mut self.driver.state.lock().ready);
        let ran_task = !ready.is_empty();
        for task in ready {
            task.run();
        }
        ran_task
    }

    /// Returns a waker of this thread.
    pub(crate) fn waker(&self) -> Waker {
        self.driver.clone().into()
    }

    /// Drives until `is_done`, for at most `limit`. Returns whether it is done.
    pub(crate) fn drive_until(&self, limit: Duration, is_done: impl Fn() -> bool) -> bool {
        let driver = &self.driver;
        let began = driver.clock.now();
        loop {
            let ran_task = self.run_ready();
            if is_done() {
                return true;
            }
            let remaining = limit.saturating_sub(driver.clock.now().since(began));
            if remaining.is_zero() {
                return false;
            }
            if ran_task {
                continue;
            }
            let is_only = driver.running.load(Ordering::SeqCst) == 1;
            let count = if is_only { driver.expected.load(Ordering::Relaxed) } else { 1 };
            let remaining = if count > 1 { remaining.min(COUNTED_SLEEP) } else { remaining };
            driver.doorbell.sleep(count, remaining, || {
                !self.messages.has_messages() && driver.state.lock().ready.is_empty() && !is_done()
            });
        }
    }
}

impl Drop for DriverGuard {
    fn drop(&mut self) {
        let driver = &self.driver;
        let ready = {
            let mut state = driver.state.lock();
            state.is_driven = false;
            driver.set_unattended(&mut state, true);
            std::mem::take(&mut state.ready)
        };
        for task in ready {
            driver.runtime.spawn(async move { task.run() });
        }
        // Messages that came before the doorbell showed that no thread takes them.
        for _ in 0..MAX_POLLS {
            if !self.messages.has_messages() {
                return;
            }
            self.messages.take();
            if !driver.set_unattended(&mut driver.state.lock(), true) {
                return;
            }
        }
        driver.poll_messages_later();
    }
}

/// States of a task: it waits for a wake-up, waits for a thread, runs, runs and was woken.
const WAITING: u8 = 0;
const QUEUED: u8 = 1;
const RUNNING: u8 = 2;
const WOKEN_WHILE_RUNNING: u8 = 3;

struct Task {
    driver: Arc<Driver>,
    state: AtomicU8,
    work: Mutex<Option<Pin<Box<dyn Future<Output = ()> + Send>>>>,
}

impl Task {
    /// Runs the task until it waits. Called once for each time that it was queued.
    fn run(self: Arc<Self>) {
        self.state.store(RUNNING, Ordering::SeqCst);
        self.driver.set_expected(1);
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
            RUNNING => Some(WOKEN_WHILE_RUNNING),
            _ => None,
        };
        if self.state.fetch_update(Ordering::SeqCst, Ordering::SeqCst, step) == Ok(WAITING) {
            self.driver.clone().queue(self);
        }
    }
}
