//! Engines of this process, by number.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_engine::transport_set::{self, rdma_devices};
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
    /// Names of the opened segments. The engine itself holds their connections.
    segments: Mutex<Segments>,
}

impl Engine {
    /// Starts an engine. Returns its number.
    pub(crate) fn start(metadata: &str, name: &str) -> Result<usize> {
        let runtime = Runtime::start("transfer-engine", 2)?;
        let mut builder = TransferEngine::builder().environment().metadata(metadata).name(name);
        if rdma_devices().is_ok_and(|devices| !devices.is_empty()) {
            builder = builder.protocol("rdma").allow_tcp_fallback();
        }
        let engine = runtime.block_on(builder.start())?;
        Ok(ENGINES.add(Self { runtime, engine, segments: Mutex::default() }))
    }

    /// Returns the engine of a number.
    pub(crate) fn find(id: usize) -> Result<Arc<Self>> {
        ENGINES.find(id)
    }

    /// Closes all engines of this process, each within this time.
    pub(crate) fn close_all(limit: Duration) {
        std::thread::scope(|scope| {
            for engine in ENGINES.all() {
                scope.spawn(move || {
                    let closed = engine.block_on(async {
                        let closed = tokio::time::timeout(limit, engine.engine.close()).await;
                        closed.unwrap_or_else(|_| {
                            Err(Error::new(ErrorCode::RpcTimeout, "the metadata service does not respond"))
                        })
                    });
                    if let Err(error) = closed {
                        tracing::warn!("cannot close engine {}: {error}", engine.engine.name());
                    }
                });
            }
        });
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

    /// Returns the number of a segment, and opens it if it is not open yet. `refresh` forces a
    /// fresh lookup.
    pub(crate) fn open(&self, name: &str, refresh: bool) -> Result<i32> {
        let name = name.trim_start_matches('/');
        if name == self.engine.name() {
            return Ok(0);
        }
        if refresh {
            self.engine.forget(name);
        } else if let Some(at) = self.segments.lock().number_of(name) {
            return number(at);
        }
        let target = self.block_on(self.engine.open(name))?;
        // The segment may be open under another form of the name: with or without a port, brackets
        // around an address.
        if target.name() == self.engine.name() {
            return Ok(0);
        }
        number(self.segments.lock().add(target.name()))
    }

    /// Returns an error unless the engine has a transport of this name.
    pub(crate) fn check_transport(&self, name: &str) -> Result<()> {
        let served = transport_set::served(&self.engine.descriptor());
        if served.iter().any(|transport| transport == name) {
            return Ok(());
        }
        Err(Error::invalid(format!("unknown transport {name:?}; use one of {}", served.join(", "))))
    }

    /// Removes a segment from the cache, so that its next use looks it up again.
    pub(crate) fn forget(&self, name: &str) -> Result<()> {
        let name = name.trim_start_matches('/');
        if name.is_empty() {
            return Err(Error::invalid("cannot remove segment: the name is empty"));
        }
        self.engine.forget(name);
        Ok(())
    }

    /// Returns the segment of a number. The engine closes segments that are neither used nor
    /// connected, so that the segment may be looked up again.
    pub(crate) fn target(&self, id: i64) -> Result<Target<TransportSet>> {
        match self.name_of(id) {
            Some(name) => self.block_on(self.engine.open(&name)),
            // The engine's own segment is opened when it is first needed, so that it contains the
            // memory registered by then.
            None if id == 0 => self.block_on(self.engine.open(self.engine.name())),
            None => Err(unknown(id)),
        }
    }

    /// Returns an error unless the number is that of a segment.
    pub(crate) fn check_number(&self, id: i64) -> Result<()> {
        if id == 0 || self.name_of(id).is_some() { Ok(()) } else { Err(unknown(id)) }
    }

    fn name_of(&self, id: i64) -> Option<Arc<str>> {
        self.segments.lock().name_of(usize::try_from(id).ok()?)
    }

    /// Refreshes the descriptors of all opened segments, many at a time. A descriptor without a
    /// response stays: peers come and go.
    pub(crate) fn sync(&self) -> Result<()> {
        let names = self.segments.lock().by_number.clone();
        let refresh = async |name: Arc<str>| {
            if let Err(error) = self.engine.refresh(&name).await {
                tracing::info!(segment = %name, %error, "cannot refresh segment; its descriptor stays");
            }
        };
        let refresh_all = futures::stream::iter(names).for_each_concurrent(LOOK_UPS, refresh);
        self.block_on(async {
            refresh_all.await;
            Ok(())
        })
    }
}

/// Number of segments that are looked up at the same time.
const LOOK_UPS: usize = 64;

fn unknown(id: i64) -> Error {
    Error::new(ErrorCode::InvalidParams, format!("unknown segment {id}; open it first"))
        .with_engine_code(EngineCode::InvalidArgument)
}

/// Names of the opened segments. The number of a name is never reused; 0 is the engine's own
/// segment.
#[derive(Default)]
struct Segments {
    /// Names of the numbers from 1 on.
    by_number: Vec<Arc<str>>,
    by_name: HashMap<Arc<str>, usize>,
}

impl Segments {
    fn number_of(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    fn name_of(&self, number: usize) -> Option<Arc<str>> {
        self.by_number.get(number.checked_sub(1)?).cloned()
    }

    /// Returns the number of a name, which gets one if it has none.
    fn add(&mut self, name: &str) -> usize {
        if let Some(number) = self.number_of(name) {
            return number;
        }
        let name: Arc<str> = name.into();
        self.by_number.push(name.clone());
        self.by_name.insert(name, self.by_number.len());
        self.by_number.len()
    }
}

fn number(at: usize) -> Result<i32> {
    i32::try_from(at).map_err(|_| Error::internal("too many segments"))
}
