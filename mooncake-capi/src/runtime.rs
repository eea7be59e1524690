//! Runtime of one engine or store. Calls wait on it in the threads of the program.

use std::time::Duration;

use mooncake_core::{Error, Result};
use mooncake_engine::environment::{log_level, unknown_log_level};

/// Time that the end of a runtime waits for its remaining tasks.
const FAREWELL: Duration = Duration::from_secs(2);

/// Runtime with threads of its own.
pub(crate) struct Runtime(Option<tokio::runtime::Runtime>);

impl Runtime {
    /// Starts a runtime, and the log on standard error. A log subscriber that the program has
    /// installed stays in use.
    pub(crate) fn start(name: &str, threads: usize) -> Result<Self> {
        let is_first = tracing_subscriber::fmt()
            .with_env_filter(log_level())
            .with_writer(std::io::stderr)
            .with_ansi(false)
            .try_init()
            .is_ok();
        if is_first && let Some(warning) = unknown_log_level() {
            tracing::warn!("{warning}");
        }
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(threads)
            .thread_name(name)
            .enable_all()
            .build()?;
        Ok(Self(Some(runtime)))
    }

    /// Waits for `work` on this thread.
    pub(crate) fn block_on<R>(&self, work: impl Future<Output = Result<R>>) -> Result<R> {
        match &self.0 {
            Some(runtime) => runtime.block_on(work),
            None => Err(Error::internal("the runtime has been shut down")),
        }
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        // A plain drop would wait without a limit.
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_timeout(FAREWELL);
        }
    }
}
