//! Snapshots of a master on disk.
//!
//! A thread writes snapshots periodically; a starting master reads the latest. They are stored in a
//! folder or in a local metadata directory ([`directory_store`]).
//!
//! Names contain ascending numbers, so that the order needs no clock. A snapshot is written to a
//! temporary file and synced. Its number is then claimed by creating the final file, which must not
//! exist, and the temporary file is renamed. A snapshot is therefore always complete, and a deposed
//! leader cannot replace the snapshot of another one.
//!
//! Beside the snapshots is the order of the masters that restored one of them. A master that
//! crashes before its first snapshot is in this order, too, so the next one knows which values are
//! later.

mod directory_store;
mod folder_store;
mod format;
mod store;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use mooncake_core::clock::SharedClock;
use mooncake_core::{Error, Result};
use parking_lot::{Condvar, Mutex};

use self::format::Sink;
use self::store::SnapshotStore;
use super::state::State;
use crate::config::SnapshotConfig;
use mooncake_master::Master;

/// Restores a master from the latest snapshot.
///
/// # Errors
/// Those of [`SnapshotStore::open`].
pub(super) async fn restore(config: &SnapshotConfig, cluster: &str, master: &Arc<Master>) -> Result<()> {
    let (config, cluster, master) = (config.clone(), cluster.to_owned(), master.clone());
    let restored = tokio::task::spawn_blocking(move || {
        let store = SnapshotStore::open(&config, &cluster)?;
        if let Some(snapshot) = store.latest() {
            master.recall(snapshot);
        }
        master.follow(&store.begin_term(master.epoch()));
        Ok(())
    });
    restored.await.map_err(|error| Error::internal(format!("cannot read snapshots: {error}")))?
}

/// Thread that writes snapshots.
#[derive(Debug)]
pub(super) struct SnapshotWriter {
    control: Arc<WriterControl>,
    thread: Option<std::thread::JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct WriterControl {
    orders: Mutex<Orders>,
    wake: Condvar,
    /// True if the snapshot in progress shall be abandoned.
    at_once: AtomicBool,
}

#[derive(Debug, Default)]
struct Orders {
    stop: bool,
    /// True if the thread shall write one more before it stops.
    last: bool,
}

impl SnapshotWriter {
    /// Starts the thread, if snapshots are enabled.
    ///
    /// # Errors
    /// Those of [`SnapshotStore::open`]; `INTERNAL_ERROR` if no thread can be started.
    pub(super) async fn start(state: &Arc<State>) -> Result<Option<Self>> {
        let Some(config) = state.config.snapshots.clone().filter(|config| config.write) else {
            return Ok(None);
        };
        let (place, cluster) = (config.clone(), state.config.cluster_id.clone());
        let store = tokio::task::spawn_blocking(move || SnapshotStore::open(&place, &cluster)).await;
        let store = store.map_err(|error| Error::internal(format!("cannot open snapshots: {error}")))??;
        let control = Arc::new(WriterControl::default());
        let (of_thread, state) = (control.clone(), state.clone());
        let thread = std::thread::Builder::new()
            .name("mooncake-snap".into())
            .spawn(move || run(&state, &config, &store, &of_thread))
            .map_err(|error| Error::internal("cannot start the snapshot thread").with_source(error))?;
        Ok(Some(Self { control, thread: Some(thread) }))
    }

    /// Writes a last snapshot and stops. The master must not change any more.
    pub(super) fn finish(mut self) {
        *self.control.orders.lock() = Orders { stop: true, last: true };
        self.control.wake.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for SnapshotWriter {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.control.at_once.store(true, Relaxed);
            self.control.orders.lock().stop = true;
            self.control.wake.notify_all();
        }
    }
}

fn run(state: &State, config: &SnapshotConfig, store: &SnapshotStore, control: &WriterControl) {
    loop {
        let clock = state.master.clock();
        let due = clock.now().after(config.interval);
        let last = {
            let mut orders = control.orders.lock();
            while !orders.stop && clock.now() < due {
                control.wake.wait_for(&mut orders, due.since(clock.now()));
            }
            if orders.stop && !orders.last {
                return;
            }
            orders.stop
        };
        // A standby has no state to store.
        if state.leadership.leads() {
            take(state, config, store, control, clock);
        }
        if last {
            return;
        }
    }
}

fn take(
    state: &State,
    config: &SnapshotConfig,
    store: &SnapshotStore,
    control: &WriterControl,
    clock: &SharedClock,
) {
    let begun = clock.now();
    let may = || {
        let ended = |why: &'static str| Err(Error::internal(why));
        if control.at_once.load(Relaxed) {
            ended("the master stops")
        } else if begun.after(config.limit) <= clock.now() {
            ended("timed out (--snapshot_child_timeout_seconds)")
        } else if !state.leadership.leads() {
            ended("another master may lead")
        } else {
            Ok(())
        }
    };
    let objects = AtomicU64::new(0);
    let fill = |sink: &mut Sink<'_>| {
        let noted = state.master.snapshot(|bytes| {
            may()?;
            sink(bytes)
        })?;
        objects.store(noted, Relaxed);
        Ok(())
    };
    let outcome = store.put(fill, may);
    let took = clock.now().since(begun);
    let taken = &state.snapshots;
    match outcome {
        Ok(path) => {
            taken.took.note(u64::try_from(took.as_millis()).unwrap_or(u64::MAX));
            taken.success.fetch_add(1, Relaxed);
            let objects = objects.into_inner();
            tracing::info!(path = %path.display(), objects, ?took, "snapshot written");
        }
        Err(error) => {
            taken.failed.fetch_add(1, Relaxed);
            tracing::warn!(%error, ?took, "cannot write snapshot");
        }
    }
}

#[cfg(test)]
#[path = "snapshots/tests.rs"]
mod tests;
