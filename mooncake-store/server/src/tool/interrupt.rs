//! Signals that end a command.

use mooncake_core::Result;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Signals that end the program in order: SIGINT and SIGTERM.
pub(super) struct Interrupt([Signal; 2]);

impl Interrupt {
    /// Takes the signals over from now on.
    pub(super) fn new() -> Result<Self> {
        Ok(Self([signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?]))
    }

    /// Waits for the next signal.
    pub(super) async fn wait(&mut self) {
        let [interrupt, terminate] = &mut self.0;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    }
}
