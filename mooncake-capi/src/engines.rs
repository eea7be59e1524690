//! Engines of this process, by number.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use mooncake_core::{Error, ErrorCode, Result};
use mooncake_engine::environment::log_level;
use mooncake_engine::transport_set::rdma_devices;
use mooncake_engine::{TransferEngine, TransportSet};
use mooncake_transport::engine::{EngineCode, Target};
use parking_lot::{Mutex, RwLock};
use tokio::runtime::Runtime;

/// Time that the end of an engine waits for its remaining tasks.
const FAREWELL: Duration = Duration::from_secs(2);

static ENGINES: RwLock<Option<HashMap<usize, Arc<Engine>>>> = RwLock::new(None);
/// Number of the next engine. No address is that small, so that no address is taken for an engine.
static NEXT: AtomicUsize = AtomicUsize::new(1);

/// Engine, and the segments that C programs refer to by numbers.
pub(crate) struct Engine {
    pub(crate) engine: TransferEngine,
    /// Opened segments. The first is the engine's own.
    segments: Mutex<Vec<Option<Target<TransportSet>>>>,
    runtime: Option<Runtime>,
}

impl Engine {
    /// Starts an engine. Returns its number.
    pub(crate) fn start(metadata: &str, name: &str) -> Result<usize> {
        // A log subscriber that the program has installed stays in use.
        let _ = tracing_subscriber::fmt()
            .with_env_filter(log_level())
            .with_writer(std::io::stderr)
            .with_ansi(false)
            .try_init();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("transfer-engine")
            .enable_all()
            .build()?;
        let mut builder = TransferEngine::builder().environment().metadata(metadata).name(name);
        if rdma_devices().is_ok_and(|devices| !devices.is_empty()) {
            builder = builder.protocol("rdma").or_tcp();
        }
        let engine = runtime.block_on(builder.start())?;
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let engine = Self { engine, segments: Mutex::new(vec![None]), runtime: Some(runtime) };
        ENGINES.write().get_or_insert_default().insert(id, Arc::new(engine));
        Ok(id)
    }

    /// Returns the engine of a number.
    pub(crate) fn find(id: usize) -> Result<Arc<Self>> {
        let known = ENGINES.read().as_ref().and_then(|engines| engines.get(&id).cloned());
        known.ok_or_else(|| {
            Error::invalid(format!("unknown engine {id:#x}: it was destroyed, or never created"))
        })
    }

    /// Stops an engine. When it returns, no call uses registered memory any more, even if other
    /// threads are in the middle of calls.
    pub(crate) fn destroy(id: usize) -> Result<()> {
        let engine = ENGINES.write().as_mut().and_then(|engines| engines.remove(&id));
        let engine = engine.ok_or_else(|| Error::invalid(format!("unknown engine {id:#x}")))?;
        engine.block_on(async {
            let closed = engine.engine.close().await;
            engine.engine.regions().clear().await;
            closed
        })
    }

    pub(crate) fn block_on<R>(&self, work: impl Future<Output = Result<R>>) -> Result<R> {
        match &self.runtime {
            Some(runtime) => runtime.block_on(work),
            None => Err(Error::internal("the runtime of the engine has been shut down")),
        }
    }

    /// Returns the number of a segment, and opens it if it is not open yet. `again` forces a fresh
    /// lookup.
    pub(crate) fn open(&self, name: &str, again: bool) -> Result<i32> {
        let name = name.trim_start_matches('/');
        if name == self.engine.name() {
            return Ok(0);
        }
        let known = |segments: &[Option<Target<TransportSet>>], name: &str| {
            segments.iter().position(|target| target.as_ref().is_some_and(|target| target.name() == name))
        };
        if again {
            self.engine.forget(name);
        } else if let Some(at) = known(&self.segments.lock(), name) {
            return number(at);
        }
        let target = self.block_on(self.engine.open(name))?;
        // The segment may be open under another form of the name: with or without a port, brackets
        // around an address.
        let name = target.name().to_owned();
        if name == self.engine.name() {
            return Ok(0);
        }
        let mut segments = self.segments.lock();
        let at = known(&segments, &name).unwrap_or(segments.len());
        if at == segments.len() {
            segments.push(Some(target));
        } else {
            segments[at] = Some(target);
        }
        number(at)
    }

    /// Returns the segment of a number.
    pub(crate) fn target(&self, id: i64) -> Result<Target<TransportSet>> {
        let at = usize::try_from(id).ok();
        let slot = at.and_then(|at| self.segments.lock().get(at).cloned());
        match slot {
            Some(Some(target)) => Ok(target),
            // The engine's own segment is opened when it is first needed, so that it contains the
            // memory registered by then.
            Some(None) => {
                let target = self.block_on(self.engine.open(self.engine.name()))?;
                self.segments.lock()[0] = Some(target.clone());
                Ok(target)
            }
            None => Err(Error::new(ErrorCode::InvalidParams, format!("unknown segment {id}; open it first"))
                .with_engine_code(EngineCode::InvalidArgument)),
        }
    }

    /// Refreshes the descriptors of all opened segments. Returns the first failure.
    pub(crate) fn sync(&self) -> Result<()> {
        let names: Vec<String> =
            self.segments.lock().iter().flatten().map(|target| target.name().to_owned()).collect();
        let mut first = Ok(());
        for name in names.iter().filter(|name| *name != self.engine.name()) {
            first = first.and(self.open(name, true).map(drop));
        }
        first
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // A plain drop of the runtime would wait without a limit.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(FAREWELL);
        }
    }
}

fn number(at: usize) -> Result<i32> {
    i32::try_from(at).map_err(|_| Error::internal("too many segments"))
}
