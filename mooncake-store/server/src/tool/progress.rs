//! Progress of a transfer on the terminal.

use std::io::{IsTerminal, Write};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use mooncake_core::clock::{Moment, SharedClock, SystemClock};

use super::output::human;

/// Time before the first line, and between two lines.
const PERIOD: Duration = Duration::from_millis(500);

/// Progress of a transfer, shown on standard error if that is a terminal. Short transfers show
/// nothing.
pub(super) struct Progress {
    shown: Option<(Sender<()>, JoinHandle<bool>)>,
    clock: SharedClock,
    begun: Moment,
}

impl Progress {
    pub(super) fn start(title: String) -> Self {
        Self::start_with(move || title.clone())
    }

    /// Starts a progress whose title changes.
    pub(super) fn start_with(title: impl Fn() -> String + Send + 'static) -> Self {
        let clock = SystemClock::shared();
        let begun = clock.now();
        let shown = std::io::stderr().is_terminal().then(|| {
            let ((end, ended), clock) = (channel(), clock.clone());
            (end, std::thread::spawn(move || draw(title, &ended, &clock, begun)))
        });
        Self { shown, clock, begun }
    }

    /// Shows the duration, if the progress was shown.
    pub(super) fn end(mut self, bytes: usize) {
        if self.stop() {
            let seconds = self.clock.now().since(self.begun).as_secs_f64().max(1e-3);
            let rate = human((bytes as f64 / seconds) as u64);
            eprintln!("{} in {seconds:.1} s, {rate}/s", human(bytes as u64));
        }
    }

    /// Stops the output. Returns whether anything was shown.
    fn stop(&mut self) -> bool {
        let Some((end, thread)) = self.shown.take() else { return false };
        drop(end);
        thread.join().unwrap_or(false)
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.stop();
    }
}

fn draw(title: impl Fn() -> String, ended: &Receiver<()>, clock: &SharedClock, begun: Moment) -> bool {
    let mut shown = false;
    while let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(PERIOD) {
        let seconds = clock.now().since(begun).as_secs_f64();
        eprint!("\rmooncake: {}, {seconds:.1} s ", title());
        // A failure means that the terminal is gone.
        let _ = std::io::stderr().flush();
        shown = true;
    }
    if shown {
        eprintln!();
    }
    shown
}
