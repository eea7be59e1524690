//! Bridge from the log of the native half to Python's `logging`: events wait in a queue that a
//! Python thread empties. Logging never waits for the interpreter. If the queue is full, events are
//! dropped and counted.

use std::fmt::Write;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::interpreter::detached;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

/// Maximum number of queued events.
const QUEUE: usize = 1024;

/// Level as a Python number, target, and text. `None` ends the log.
type Record = Option<(u8, String, String)>;

struct Queue {
    sender: SyncSender<Record>,
    receiver: Mutex<Receiver<Record>>,
    lost: AtomicU64,
}

static QUEUED: OnceLock<Queue> = OnceLock::new();

struct ToPython;

#[derive(Default)]
struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        // Writing to a string does not fail.
        let _ = match (field.name(), self.0.is_empty()) {
            ("message", true) => write!(self.0, "{value:?}"),
            ("message", false) => write!(self.0, " {value:?}"),
            (name, true) => write!(self.0, "{name}={value:?}"),
            (name, false) => write!(self.0, " {name}={value:?}"),
        };
    }
}

impl<S: Subscriber> Layer<S> for ToPython {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let Some(queue) = QUEUED.get() else { return };
        let mut text = Text::default();
        event.record(&mut text);
        let metadata = event.metadata();
        let level = match *metadata.level() {
            Level::ERROR => 40,
            Level::WARN => 30,
            Level::INFO => 20,
            _ => 10,
        };
        if queue.sender.try_send(Some((level, metadata.target().to_owned(), text.0))).is_err() {
            queue.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Starts to record events of a level and above, by its name in Python. Returns false if this
/// process already has another log subscriber.
#[pyfunction]
pub(crate) fn _start_log(level: &str) -> bool {
    let filter = match level.to_ascii_uppercase().as_str() {
        "CRITICAL" | "FATAL" | "ERROR" => LevelFilter::ERROR,
        "INFO" => LevelFilter::INFO,
        "DEBUG" => LevelFilter::DEBUG,
        "TRACE" | "NOTSET" => LevelFilter::TRACE,
        _ => LevelFilter::WARN,
    };
    let (sender, receiver) = sync_channel(QUEUE);
    QUEUED.set(Queue { sender, receiver: Mutex::new(receiver), lost: AtomicU64::new(0) }).is_ok()
        && tracing_subscriber::registry().with(ToPython.with_filter(filter)).try_init().is_ok()
}

/// Waits for the next event: level, target and text. Returns `None` when the log has ended.
#[pyfunction]
pub(crate) fn _next_record(py: Python<'_>) -> Record {
    detached(py, || {
        let queue = QUEUED.get()?;
        let (level, origin, mut text) = queue.receiver.lock().recv().ok()??;
        let lost = queue.lost.swap(0, Ordering::Relaxed);
        if lost > 0 {
            // Writing to a string does not fail.
            let _ = write!(text, " ({lost} earlier events were dropped)");
        }
        Some((level, origin, text))
    })
}

/// Ends the log after the queued events.
#[pyfunction]
pub(crate) fn _stop_log(py: Python<'_>) {
    detached(py, || {
        if let Some(queue) = QUEUED.get() {
            // The receiver lives as long as the process.
            let _ = queue.sender.send(None);
        }
    });
}
