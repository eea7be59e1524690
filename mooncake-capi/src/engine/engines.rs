//! Engines of this process, by number.

use std::sync::Arc;

use mooncake_core::{Error, ErrorCode, Result};
use mooncake_engine::transport_set::rdma_devices;
use mooncake_engine::{TransferEngine, TransportSet};
use mooncake_transport::engine::{EngineCode, Target};
use parking_lot::Mutex;

use crate::handles::Handles;
use crate::runtime::Runtime;

static ENGINES: Handles<Engine> = Handles::new("engine");

/// Engine, and the segments that C programs refer to by numbers.
pub(crate) struct Engine {
    // Dropped first: no task outlives what it uses.
    runtime: Runtime,
    pub(crate) engine: TransferEngine,
    /// Opened segments. The first is the engine's own.
    segments: Mutex<Vec<Option<Target<TransportSet>>>>,
}

impl Engine {
    /// Starts an engine. Returns its number.
    pub(crate) fn start(metadata: &str, name: &str) -> Result<usize> {
        let runtime = Runtime::start("transfer-engine", 2)?;
        let mut builder = TransferEngine::builder().environment().metadata(metadata).name(name);
        if rdma_devices().is_ok_and(|devices| !devices.is_empty()) {
            builder = builder.protocol("rdma").or_tcp();
        }
        let engine = runtime.block_on(builder.start())?;
        Ok(ENGINES.add(Self { runtime, engine, segments: Mutex::new(vec![None]) }))
    }

    /// Returns the engine of a number.
    pub(crate) fn find(id: usize) -> Result<Arc<Self>> {
        ENGINES.find(id)
    }

    /// Stops an engine. When it returns, no call uses registered memory any more, even if other
    /// threads are in the middle of calls.
    pub(crate) fn destroy(id: usize) -> Result<()> {
        let engine = ENGINES.take(id)?;
        engine.block_on(async {
            let closed = engine.engine.close().await;
            engine.engine.regions().clear().await;
            closed
        })
    }

    pub(crate) fn block_on<R>(&self, work: impl Future<Output = Result<R>>) -> Result<R> {
        self.runtime.block_on(work)
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

fn number(at: usize) -> Result<i32> {
    i32::try_from(at).map_err(|_| Error::internal("too many segments"))
}
