//! Opening of a disk: its store, its memory, and the server for readers.

use mooncake_core::clock::Rng;
use mooncake_core::host_port;
use mooncake_core::memory::HostMemory;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_disk::{DiskConfig, EngineKind, FileStore, StoreConfig};
use mooncake_protocol::server::{RunningServer, Server, ServerOptions};
use mooncake_transport::Transport;
use mooncake_transport::engine::Engine;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize};

use super::owner::{Counts, Disk, Loans};
use super::serve::Owner;
use super::shelf::Shelf;
use crate::config::OffloadConfig;

/// Maximum number of connections of readers.
const MAX_CONNECTIONS: usize = 4096;

/// Opens a disk and starts its server. The disk is not offered to the master yet.
pub(crate) async fn open<T: Transport>(
    config: OffloadConfig,
    engine: &Engine<T>,
    name: &str,
) -> Result<(Arc<Disk<T>>, Option<RunningServer>)> {
    let opened = config.clone();
    let store = tokio::task::spawn_blocking(move || open_store(&opened))
        .await
        .map_err(|error| Error::internal(format!("opening a disk failed: {error}")))??;
    let len = usize::try_from(config.buffer).map_err(|_| Error::invalid("offload: buffer is too large"))?;
    let memory = Arc::new(HostMemory::new(len).map_err(|error| error.context("offload buffer"))?);
    let shelf = Shelf::new(engine.register(memory).await?);
    let host = host_port::split(name).0;
    let server = match config.serve {
        true => {
            let any = if host.contains(':') { "[::]:0" } else { "0.0.0.0:0" };
            let options = ServerOptions {
                listener: "disk",
                max_connections: MAX_CONNECTIONS,
                descriptor_share: 32,
                ..ServerOptions::default()
            };
            Some(Server::bind(any, options).await?)
        }
        false => None,
    };
    let endpoint = server.as_ref().map(|server| host_port::join(host, server.local_addr().port()));
    let disk = Arc::new(Disk {
        config,
        store,
        endpoint: endpoint.unwrap_or_default(),
        counts: Counts::default(),
        wake: tokio::sync::Notify::new(),
        tenants: AtomicBool::new(true),
        behind: AtomicUsize::new(0),
        shelf,
        memory: name.to_owned(),
        clock: engine.clock().clone(),
        lent: Mutex::new(Loans { rng: Rng::from_os(), batches: HashMap::new() }),
    });
    tracing::info!(path = %disk.config.path.display(), endpoint = disk.endpoint, "disk open");
    let server = server.map(|server| server.start(Arc::new(Owner(disk.clone()))));
    Ok((disk, server))
}

fn open_store(config: &OffloadConfig) -> Result<FileStore> {
    let engine = if config.threads { EngineKind::Threads } else { EngineKind::Auto };
    let capacity = capacity(config)?;
    let mut store = StoreConfig::new(&config.path, capacity);
    store.max_objects = config.max_objects;
    store.eviction = config.eviction.into();
    (store.high_watermark, store.low_watermark) = config.watermarks.unwrap_or((1.0, 1.0));
    let disk = DiskConfig { engine, faults: config.faults.clone(), ..DiskConfig::default() };
    Ok(FileStore::open(disk, store)?.0)
}

/// Returns the configured capacity, limited to 90 % of the space that is free or already taken by
/// the store.
fn capacity(config: &OffloadConfig) -> Result<u64> {
    let failed = |error: std::io::Error| {
        let text = format!("cannot use {} for objects: {error}", config.path.display());
        Error::new(ErrorCode::FileOpenFail, text).with_source(error)
    };
    std::fs::create_dir_all(&config.path).map_err(failed)?;
    let about = rustix::fs::statvfs(&config.path).map_err(|errno| failed(errno.into()))?;
    let free = about.f_bavail.saturating_mul(about.f_frsize);
    let there = free.saturating_add(allocated(&config.path.join("objects")));
    let most = there / 10 * 9;
    Ok((config.capacity.min(most) / 4096 * 4096).max(4096))
}

fn allocated(file: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(file).map_or(0, |about| about.blocks().saturating_mul(512))
}
