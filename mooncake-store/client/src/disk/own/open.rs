//! Opening of a disk: its store, its memory, and the server for readers.

use mooncake_core::clock::Rng;
use mooncake_core::host_port;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_disk::{DiskConfig, EngineKind, FileStore, LockedDir, StoreConfig};
use mooncake_protocol::server::{RunningServer, Server, ServerOptions};
use mooncake_transport::Transport;
use mooncake_transport::engine::Engine;
use mooncake_transport::private_files::Folder;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize};

use super::loan_buffer::LoanBuffer;
use super::owner::{Disk, DiskCounts, Loans};
use super::prefetch_queue::PrefetchQueue;
use super::serve::DiskService;
use super::verify::VerifyOwn;
use crate::config::OffloadConfig;
use crate::disk::Prefetches;

/// Maximum number of connections of readers.
const MAX_CONNECTIONS: usize = 4096;

/// Opens a disk and starts its server at `bound`, or at every address. The disk is not offered to
/// the master yet.
pub(crate) async fn open<T: Transport>(
    mut config: OffloadConfig,
    engine: &Engine<T>,
    name: &str,
    bound: Option<IpAddr>,
    client: Arc<dyn VerifyOwn<T>>,
    prefetches: Arc<Prefetches>,
) -> Result<(Arc<Disk<T>>, RunningServer)> {
    let opened = config.clone();
    let (store, path) = tokio::task::spawn_blocking(move || open_store(&opened))
        .await
        .map_err(|error| Error::internal(format!("opening a disk failed: {error}")))??;
    config.path = path;
    let loan_buffer = LoanBuffer::new(engine, config.buffer).await?;
    let host = host_port::split(name).0;
    let any = if host.contains(':') { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() };
    let at = SocketAddr::new(bound.unwrap_or(any), 0);
    let options = ServerOptions {
        listener: "disk",
        max_connections: MAX_CONNECTIONS,
        descriptor_share: 32,
        ..ServerOptions::default()
    };
    let server = Server::bind(&at.to_string(), options).await?;
    let disk = Arc::new(Disk {
        config,
        store,
        endpoint: host_port::join(host, server.local_addr().port()),
        counts: DiskCounts::default(),
        wake: tokio::sync::Notify::new(),
        tenants: AtomicBool::new(true),
        overdue_operations: AtomicUsize::new(0),
        loan_buffer,
        memory_endpoint: name.to_owned(),
        clock: engine.clock().clone(),
        prefetches: PrefetchQueue::new(prefetches),
        loans: Mutex::new(Loans { rng: Rng::from_os(), batches: HashMap::new() }),
    });
    tracing::info!(path = %disk.config.path.display(), endpoint = disk.endpoint, "disk open");
    let server = server.start(Arc::new(DiskService { disk: disk.clone(), client }));
    Ok((disk, server))
}

/// Opens the store in the folder of the configuration, or in a folder below it if other processes
/// use the folder. Returns the store and its folder.
fn open_store(config: &OffloadConfig) -> Result<(FileStore, PathBuf)> {
    let locked = LockedDir::lock_shared(&config.path)?;
    let path = locked.path().to_owned();
    let engine = if config.threads { EngineKind::Threads } else { EngineKind::Auto };
    let mut store = StoreConfig::new(&path, capacity(config, &path)?);
    store.max_objects = config.max_objects;
    store.eviction = config.eviction.into();
    (store.high_watermark, store.low_watermark) = config.watermarks.unwrap_or((1.0, 1.0));
    let disk = DiskConfig { engine, faults: config.faults.clone(), ..DiskConfig::default() };
    Ok((FileStore::open_locked(disk, store, locked)?.0, path))
}

/// Returns the configured capacity, limited to 90 % of the space that is free or already taken by
/// the store.
fn capacity(config: &OffloadConfig, path: &Path) -> Result<u64> {
    let failed = |error: std::io::Error| {
        let text = format!("cannot use {} for objects: {error}", path.display());
        Error::new(ErrorCode::FileOpenFail, text).with_source(error)
    };
    let folder = Folder::own(path).map_err(failed)?;
    let statistics = rustix::fs::fstatvfs(&folder).map_err(|errno| failed(errno.into()))?;
    let free = statistics.f_bavail.saturating_mul(statistics.f_frsize);
    let available = free.saturating_add(allocated(&path.join("objects")));
    let max = available / 10 * 9;
    Ok((config.capacity.min(max) / 4096 * 4096).max(4096))
}

fn allocated(file: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::symlink_metadata(file).map_or(0, |metadata| metadata.blocks().saturating_mul(512))
}
