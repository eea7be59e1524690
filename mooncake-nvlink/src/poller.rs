//! Thread that waits for devices: one for all copies in progress, asleep when there are none.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use mooncake_core::Result;
use mooncake_core::clock::{Clock, SystemClock};
use parking_lot::{Condvar, Mutex};

use crate::cuda::Event;

/// Time of polling without a pause after an event: most copies are shorter, and so is the time to
/// the next one of a busy caller.
const BUSY_POLL: Duration = Duration::from_micros(50);
/// Shortest and longest pause after that.
const PAUSES: (Duration, Duration) = (Duration::from_micros(20), Duration::from_millis(1));

/// Callback for an event. It must not wait.
pub(crate) trait OnEvent: Send {
    fn complete(self: Box<Self>, result: Result<()>);
}

impl<F: FnOnce(Result<()>) + Send> OnEvent for F {
    fn complete(self: Box<Self>, result: Result<()>) {
        self(result);
    }
}

#[derive(Default)]
pub(crate) struct Poller {
    queue: Mutex<Queue>,
    work: Condvar,
}

#[derive(Default)]
struct Queue {
    new: Vec<WatchedEvent>,
    running: bool,
}

struct WatchedEvent {
    event: Event,
    then: Box<dyn OnEvent>,
}

impl Poller {
    /// Returns the poller of this process.
    pub(crate) fn shared() -> &'static Arc<Self> {
        static SHARED: OnceLock<Arc<Poller>> = OnceLock::new();
        SHARED.get_or_init(Arc::default)
    }

    /// Calls `then` after the event, on the thread of the poller.
    pub(crate) fn watch(self: &Arc<Self>, event: Event, then: Box<dyn OnEvent>) {
        let mut queue = self.queue.lock();
        if !queue.running {
            let poller = self.clone();
            let started =
                std::thread::Builder::new().name("mooncake-nvlink".into()).spawn(move || poller.run());
            if let Err(error) = started {
                drop(queue);
                tracing::warn!(%error, "cannot start the thread that waits for devices");
                return then.complete(event.wait());
            }
            queue.running = true;
        }
        queue.new.push(WatchedEvent { event, then });
        drop(queue);
        self.work.notify_one();
    }

    fn run(&self) {
        let clock = SystemClock::new();
        let mut waiting: Vec<WatchedEvent> = Vec::new();
        let (mut active, mut pause) = (clock.now(), PAUSES.0);
        loop {
            let before = waiting.len();
            self.take(&mut waiting, pause, clock.now().since(active) < BUSY_POLL);
            let mut has_progress = waiting.len() > before;
            let mut at = 0;
            while at < waiting.len() {
                match waiting[at].event.poll() {
                    None => at += 1,
                    Some(result) => {
                        let WatchedEvent { event, then } = waiting.swap_remove(at);
                        drop(event);
                        then.complete(result);
                        has_progress = true;
                    }
                }
            }
            if has_progress {
                (active, pause) = (clock.now(), PAUSES.0);
            } else if clock.now().since(active) >= BUSY_POLL {
                pause = (pause * 2).min(PAUSES.1);
            }
        }
    }

    /// Takes new entries. Sleeps when there is nothing to wait for. Otherwise it pauses, unless an
    /// event is expected at any moment.
    fn take(&self, waiting: &mut Vec<WatchedEvent>, pause: Duration, busy_poll: bool) {
        let mut queue = self.queue.lock();
        if queue.new.is_empty() && !busy_poll {
            if waiting.is_empty() {
                while queue.new.is_empty() {
                    self.work.wait(&mut queue);
                }
            } else {
                self.work.wait_for(&mut queue, pause);
            }
        }
        waiting.append(&mut queue.new);
        drop(queue);
        if busy_poll {
            std::thread::yield_now();
        }
    }
}

impl std::fmt::Debug for Poller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Poller({} new)", self.queue.lock().new.len())
    }
}
