//! Who waits for devices: one thread for all copies under way, asleep when there are none.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use mooncake_core::Result;
use mooncake_core::clock::{Clock, SystemClock};
use parking_lot::{Condvar, Mutex};

use crate::cuda::Event;

/// How long it looks without a pause after something has happened: most copies are shorter, and so is the time to the next one of who makes many.
const EAGER: Duration = Duration::from_micros(50);
/// The shortest and the longest pause after that.
const PAUSES: (Duration, Duration) = (Duration::from_micros(20), Duration::from_millis(1));

/// Something to do when an event has happened. It must not wait.
pub(crate) trait Then: Send {
    fn over(self: Box<Self>, result: Result<()>);
}

impl<F: FnOnce(Result<()>) + Send> Then for F {
    fn over(self: Box<Self>, result: Result<()>) {
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
    new: Vec<Waiting>,
    running: bool,
}

struct Waiting {
    event: Event,
    then: Box<dyn Then>,
}

impl Poller {
    /// The one of this process.
    pub(crate) fn shared() -> &'static Arc<Self> {
        static SHARED: OnceLock<Arc<Poller>> = OnceLock::new();
        SHARED.get_or_init(Arc::default)
    }

    /// Has `then` called when the event has happened, on the poller's thread.
    pub(crate) fn watch(self: &Arc<Self>, event: Event, then: Box<dyn Then>) {
        let mut queue = self.queue.lock();
        if !queue.running {
            let poller = self.clone();
            let started =
                std::thread::Builder::new().name("mooncake-nvlink".into()).spawn(move || poller.run());
            if let Err(error) = started {
                drop(queue);
                tracing::warn!(%error, "no thread to wait for devices with");
                return then.over(event.wait());
            }
            queue.running = true;
        }
        queue.new.push(Waiting { event, then });
        drop(queue);
        self.work.notify_one();
    }

    fn run(&self) {
        let clock = SystemClock::new();
        let mut waiting: Vec<Waiting> = Vec::new();
        let (mut active, mut pause) = (clock.now(), PAUSES.0);
        loop {
            let before = waiting.len();
            self.take(&mut waiting, pause, clock.now().since(active) < EAGER);
            let mut happened = waiting.len() > before;
            let mut at = 0;
            while at < waiting.len() {
                match waiting[at].event.poll() {
                    None => at += 1,
                    Some(result) => {
                        let Waiting { event, then } = waiting.swap_remove(at);
                        drop(event);
                        then.over(result);
                        happened = true;
                    }
                }
            }
            if happened {
                (active, pause) = (clock.now(), PAUSES.0);
            } else if clock.now().since(active) >= EAGER {
                pause = (pause * 2).min(PAUSES.1);
            }
        }
    }

    /// What is new. Sleeps when there is nothing to wait for, and pauses otherwise, unless something is expected any moment.
    fn take(&self, waiting: &mut Vec<Waiting>, pause: Duration, eager: bool) {
        let mut queue = self.queue.lock();
        if queue.new.is_empty() && !eager {
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
        if eager {
            std::thread::yield_now();
        }
    }
}

impl std::fmt::Debug for Poller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Poller({} new)", self.queue.lock().new.len())
    }
}
