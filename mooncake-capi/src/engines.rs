//! The engines of this process, by number.

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

/// How long the end of an engine waits for what its tasks still do.
const FAREWELL: Duration = Duration::from_secs(2);

static ENGINES: RwLock<Option<HashMap<usize, Arc<Engine>>>> = RwLock::new(None);
/// The next engine's number. No address is that small, so that none is taken for one.
static NEXT: AtomicUsize = AtomicUsize::new(1);

/// An engine and what C programs name by numbers in it.
pub(crate) struct Engine {
    pub(crate) engine: TransferEngine,
    /// Opened segments; the first is our own.
    segments: Mutex<Vec<Option<Target<TransportSet>>>>,
    runtime: Option<Runtime>,
}

impl Engine {
    /// Starts an engine; its number.
    pub(crate) fn start(metadata: &str, name: &str) -> Result<usize> {
        // Somebody else's log is as good.
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

    /// The engine of a number.
    pub(crate) fn of(id: usize) -> Result<Arc<Self>> {
        let known = ENGINES.read().as_ref().and_then(|engines| engines.get(&id).cloned());
        known.ok_or_else(|| {
            Error::invalid(format!("{id:#x} is no engine: it was destroyed, or never created"))
        })
    }

    /// Ends an engine: when it returns, nobody uses registered memory any more, whatever calls of other threads are under way.
    pub(crate) fn destroy(id: usize) -> Result<()> {
        let engine = ENGINES.write().as_mut().and_then(|engines| engines.remove(&id));
        let engine = engine.ok_or_else(|| Error::invalid(format!("{id:#x} is no engine")))?;
        engine.block_on(async {
            let closed = engine.engine.close().await;
            engine.engine.regions().clear().await;
            closed
        })
    }

    pub(crate) fn block_on<R>(&self, work: impl Future<Output = Result<R>>) -> Result<R> {
        match &self.runtime {
            Some(runtime) => runtime.block_on(work),
            None => Err(Error::internal("the engine has no runtime any more")),
        }
    }

    /// The number of a segment, opened if it is not yet; `again` looks it up anew.
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
        // It may have other names: with or without a port, brackets around an address.
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

    /// The segment of a number.
    pub(crate) fn target(&self, id: i64) -> Result<Target<TransportSet>> {
        let at = usize::try_from(id).ok();
        let slot = at.and_then(|at| self.segments.lock().get(at).cloned());
        match slot {
            Some(Some(target)) => Ok(target),
            // Our own is opened when it is first needed, so that it shows what is registered by then.
            Some(None) => {
                let target = self.block_on(self.engine.open(self.engine.name()))?;
                self.segments.lock()[0] = Some(target.clone());
                Ok(target)
            }
            None => Err(Error::new(ErrorCode::InvalidParams, format!("{id} is no opened segment"))
                .with_engine_code(EngineCode::InvalidArgument)),
        }
    }

    /// Looks all opened segments up anew; the first failure.
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
        // Not by dropping it, which waits without an end.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(FAREWELL);
        }
    }
}

fn number(at: usize) -> Result<i32> {
    i32::try_from(at).map_err(|_| Error::internal("too many segments"))
}
