//! Snapshots of one cluster on disk.

use std::path::PathBuf;

use mooncake_core::{Error, ErrorCode, Result};

use super::directory_store::DirectoryStore;
use super::folder_store::{add_master, clear, copy, create, listed, prune, put_in};
use super::format::{Sink, name};
use crate::config::SnapshotConfig;
use mooncake_master::Snapshot;
use mooncake_transport::private_files;

/// Storage of a cluster's snapshots: a main location, and an optional backup folder for failures of
/// the main one.
#[derive(Debug)]
pub(super) struct SnapshotStore {
    pub(super) main: Location,
    spare: Option<Location>,
    /// Folder for a copy of each restored snapshot.
    restored: Option<PathBuf>,
    keep: usize,
}

impl SnapshotStore {
    /// Creates the folders and removes unfinished snapshots.
    ///
    /// # Errors
    /// `INVALID_PARAMS` with the folder that cannot be created; those of opening a metadata
    /// directory.
    pub(super) fn open(config: &SnapshotConfig, cluster: &str) -> Result<Self> {
        let beside = |name: &str| config.backup.as_ref().map(|folder| folder.join(name).join(cluster));
        let made = |folder: PathBuf| {
            create(&folder).map_err(|error| {
                Error::invalid(format!("cannot use the snapshot folder {}: {error}", folder.display()))
            })?;
            Ok::<_, Error>(folder)
        };
        let store = Self {
            main: match config.own() {
                Some(url) => Location::Directory(DirectoryStore::open(url, cluster)?),
                None => Location::Folder(made(config.folder.join(cluster))?),
            },
            spare: beside("mooncake_snapshot_save_backup").map(made).transpose()?.map(Location::Folder),
            restored: beside("mooncake_snapshot_restore_backup").map(made).transpose()?,
            keep: config.keep,
        };
        for place in store.places() {
            place.clear()?;
        }
        Ok(store)
    }

    fn places(&self) -> impl Iterator<Item = &Location> {
        std::iter::once(&self.main).chain(&self.spare)
    }

    /// Returns the numbers and locations of all snapshots, the latest first.
    fn all(&self) -> Vec<(u64, &Location)> {
        let numbers = |place| Location::numbers(place).into_iter().map(move |number| (number, place));
        let mut all: Vec<_> = self.places().flat_map(numbers).collect();
        all.sort_by_key(|(number, _)| std::cmp::Reverse(*number));
        all
    }

    /// Returns the latest complete snapshot.
    pub(super) fn latest(&self) -> Option<Snapshot> {
        for (number, place) in self.all() {
            let path = place.path(number);
            let bytes = place.read(number);
            match bytes.and_then(|bytes| Ok((Snapshot::read(&bytes)?, bytes))) {
                Ok((snapshot, bytes)) => {
                    let (objects, tasks, drain_jobs) =
                        (snapshot.objects(), snapshot.tasks(), snapshot.drain_jobs());
                    tracing::info!(path = %path.display(), objects, tasks, drain_jobs, "snapshot restored");
                    self.copy_restored(number, &bytes);
                    return Some(snapshot);
                }
                Err(error) => tracing::warn!(path = %path.display(), %error, "snapshot skipped"),
            }
        }
        tracing::info!(place = %self.main.path(0).display(), "no snapshot found; starting empty");
        None
    }

    /// Adds a master to the order of the masters. Returns those before it, the latest first.
    pub(super) fn begin_term(&self, own: u64) -> Vec<u64> {
        let outcome = match &self.main {
            Location::Folder(folder) => add_master(folder, own),
            Location::Directory(directory) => directory.add_master(own),
        };
        outcome.unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot record the order of masters; values of a master without a snapshot may be misses");
            Vec::new()
        })
    }

    fn copy_restored(&self, number: u64, bytes: &[u8]) {
        let Some(folder) = &self.restored else { return };
        if let Err(error) = copy(folder, number, bytes) {
            tracing::warn!(folder = %folder.display(), %error, "cannot copy the restored snapshot");
        }
        prune(folder, self.keep);
    }

    /// Writes a snapshot to the main location, or to the backup folder if that fails. Returns its
    /// path. `may` is called before the snapshot gets its final name.
    ///
    /// # Errors
    /// `PERSISTENT_FAIL`; those of `fill` and `may`.
    pub(super) fn put(
        &self,
        fill: impl Fn(&mut Sink<'_>) -> Result<()>,
        may: impl Fn() -> Result<()>,
    ) -> Result<PathBuf> {
        let number = self.all().first().map_or(0, |(number, _)| *number).saturating_add(1);
        let mut outcome = Err(Error::internal("snapshots have no location"));
        for place in self.places() {
            outcome = match place {
                Location::Folder(folder) => put_in(folder, number, &fill, &may),
                Location::Directory(directory) => {
                    directory.put(number, &fill, &may).map(|()| place.path(number))
                }
            };
            match &outcome {
                Ok(_) => {
                    place.prune(self.keep);
                    break;
                }
                Err(error) if error.code() == ErrorCode::PersistentFail => {
                    tracing::warn!(place = %place.path(number).display(), %error, "cannot write snapshot to this location");
                }
                Err(_) => break,
            }
        }
        outcome
    }
}

/// Location of snapshots.
#[derive(Debug)]
pub(super) enum Location {
    Folder(PathBuf),
    Directory(DirectoryStore),
}

impl Location {
    /// Removes unfinished snapshots of earlier masters.
    fn clear(&self) -> Result<()> {
        match self {
            Location::Folder(folder) => {
                clear(folder);
                Ok(())
            }
            Location::Directory(directory) => directory.clear(),
        }
    }

    pub(super) fn numbers(&self) -> Vec<u64> {
        match self {
            Location::Folder(folder) => listed(folder).into_iter().map(|(number, _)| number).collect(),
            Location::Directory(directory) => directory.numbers(),
        }
    }

    /// Returns the path of a snapshot for messages.
    fn path(&self, number: u64) -> PathBuf {
        match self {
            Location::Folder(folder) => folder.join(name(number)),
            Location::Directory(directory) => directory.path(number),
        }
    }

    pub(super) fn read(&self, number: u64) -> Result<Vec<u8>> {
        match self {
            Location::Folder(folder) => Ok(private_files::read(&folder.join(name(number)))?),
            Location::Directory(directory) => directory.read(number),
        }
    }

    fn prune(&self, keep: usize) {
        match self {
            Location::Folder(folder) => prune(folder, keep),
            Location::Directory(directory) => directory.prune(keep),
        }
    }
}
