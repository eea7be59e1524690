//! I/O engines: threads that call the kernel.

mod threads;
#[cfg(feature = "disk-io-uring")]
mod uring;
mod worker;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use mooncake_core::{Error, ErrorCode, Result};
use tracing::{info, warn};

use crate::config::{DiskConfig, EngineKind};
use crate::queue::Queue;

/// Engine chosen at start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunningEngine {
    /// io_uring on a thread of its own.
    Uring,
    /// Threads that call pread and pwrite.
    Threads,
}

/// Starts the configured engine on a queue that `queue` creates.
pub(crate) fn start(
    config: &DiskConfig,
    queue: impl Fn(Option<OwnedFd>) -> Queue,
) -> Result<(Arc<Queue>, RunningEngine)> {
    let tried = match config.engine {
        EngineKind::Threads => None,
        EngineKind::Auto | EngineKind::Uring => Some(start_uring(config, &queue)),
    };
    let (queue, engine) = match tried {
        Some(Ok(queue)) => {
            info!(depth = config.depth, "disk I/O started with io_uring");
            (queue, RunningEngine::Uring)
        }
        Some(Err(error)) if config.engine == EngineKind::Uring => {
            return Err(Error::new(ErrorCode::NotSupported, format!("cannot use io_uring: {error}"))
                .with_source(error));
        }
        other => {
            if let Some(Err(error)) = other {
                warn!(%error, threads = config.threads, "cannot use io_uring; disk I/O started with threads");
            } else {
                info!(threads = config.threads, "disk I/O started with threads");
            }
            let queue = Arc::new(queue(None));
            threads::start(config, &queue).map_err(no_thread)?;
            (queue, RunningEngine::Threads)
        }
    };
    let watched = queue.clone();
    worker::spawn("disk-deadlines", move || watched.watch()).map_err(|e| {
        queue.close();
        no_thread(e)
    })?;
    Ok((queue, engine))
}

#[cfg(feature = "disk-io-uring")]
fn start_uring(config: &DiskConfig, queue: &impl Fn(Option<OwnedFd>) -> Queue) -> io::Result<Arc<Queue>> {
    use rustix::event::{EventfdFlags, eventfd};
    let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    let queue = Arc::new(queue(Some(event)));
    uring::start(config, queue.clone())?;
    Ok(queue)
}

#[cfg(not(feature = "disk-io-uring"))]
fn start_uring(_: &DiskConfig, _: &impl Fn(Option<OwnedFd>) -> Queue) -> io::Result<Arc<Queue>> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "built without the feature disk-io-uring"))
}

fn no_thread(e: io::Error) -> Error {
    Error::new(ErrorCode::InternalError, format!("cannot start a thread for disk I/O: {e}")).with_source(e)
}
