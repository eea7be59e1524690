//! Snapshots on disk: written now and then by a thread of their own, read when a master begins to serve. They lie in a folder, or in a directory
//! of this host's own ([`kept`]).
//!
//! Their names count up, so that no clock is asked which one is the latest. One is written under another name and synced, then its number is claimed (by a
//! file that must not be there yet), then it gets that name: it is there as a whole, and a deposed leader that goes on cannot take another's place.

mod kept;

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use mooncake_core::clock::SharedClock;
use mooncake_core::{Error, ErrorCode, Result};
use parking_lot::{Condvar, Mutex};

use self::kept::Kept;
use super::State;
use crate::config::SnapshotConfig;
use mooncake_master::{Master, Snapshot};
use mooncake_protocol::metrics::Histogram;

/// Upper bounds of the time one takes, in milliseconds, as existing dashboards know them.
const BOUNDS: [u64; 11] = [0, 500, 1000, 5000, 10_000, 30_000, 60_000, 120_000, 180_000, 240_000, 300_000];

/// What names begin with; a number of twenty digits follows.
const NAME: &str = "snapshot-";
/// What those that are being written begin with.
const UNFINISHED: &str = "unfinished-";
/// A file that names the latest, for people.
const LATEST: &str = "latest";

/// How often they were taken, and how long it took.
#[derive(Debug)]
pub(super) struct Taken {
    pub(super) success: AtomicU64,
    pub(super) failed: AtomicU64,
    /// Milliseconds.
    pub(super) took: Histogram<11>,
}

impl Default for Taken {
    fn default() -> Self {
        Self { success: AtomicU64::new(0), failed: AtomicU64::new(0), took: Histogram::new(&BOUNDS) }
    }
}

/// Takes the bytes of one.
type Sink<'a> = dyn FnMut(&[u8]) -> Result<()> + 'a;

/// Where a cluster's snapshots lie: some place, and perhaps a folder for when that one cannot be written.
#[derive(Debug)]
pub(super) struct Shelf {
    main: Place,
    spare: Option<Place>,
    /// Where what was restored is copied to.
    restored: Option<PathBuf>,
    keep: usize,
}

impl Shelf {
    /// Makes the folders. What others have left unfinished goes.
    ///
    /// # Errors
    /// `INVALID_PARAMS`, naming the folder that cannot be had; those of opening a directory.
    pub(super) fn open(config: &SnapshotConfig, cluster: &str) -> Result<Self> {
        let beside = |name: &str| config.backup.as_ref().map(|folder| folder.join(name).join(cluster));
        let made = |folder: PathBuf| {
            fs::create_dir_all(&folder).map_err(|error| {
                Error::invalid(format!("snapshots: cannot make {}: {error}", folder.display()))
            })?;
            Ok::<_, Error>(folder)
        };
        let shelf = Self {
            main: match config.own() {
                Some(url) => Place::Kept(Kept::open(url, cluster)?),
                None => Place::Folder(made(config.folder.join(cluster))?),
            },
            spare: beside("mooncake_snapshot_save_backup").map(made).transpose()?.map(Place::Folder),
            restored: beside("mooncake_snapshot_restore_backup").map(made).transpose()?,
            keep: config.keep,
        };
        for place in shelf.places() {
            place.clear()?;
        }
        Ok(shelf)
    }

    fn places(&self) -> impl Iterator<Item = &Place> {
        std::iter::once(&self.main).chain(&self.spare)
    }

    /// All there are, the latest first.
    fn all(&self) -> Vec<(u64, &Place)> {
        let numbers = |place| Place::numbers(place).into_iter().map(move |number| (number, place));
        let mut all: Vec<_> = self.places().flat_map(numbers).collect();
        all.sort_by_key(|(number, _)| std::cmp::Reverse(*number));
        all
    }

    /// The latest that is whole, if there is one.
    pub(super) fn latest(&self) -> Option<Snapshot> {
        for (number, place) in self.all() {
            let path = place.path(number);
            let bytes = place.read(number);
            match bytes.and_then(|bytes| Ok((Snapshot::read(&bytes)?, bytes))) {
                Ok((snapshot, bytes)) => {
                    let (objects, tasks, drain_jobs) =
                        (snapshot.objects(), snapshot.tasks(), snapshot.drain_jobs());
                    tracing::info!(path = %path.display(), objects, tasks, drain_jobs, "starts from a snapshot");
                    self.copy_restored(number, &bytes);
                    return Some(snapshot);
                }
                Err(error) => tracing::warn!(path = %path.display(), %error, "snapshot passed over"),
            }
        }
        tracing::info!(place = %self.main.path(0).display(), "no snapshot to start from: starts empty");
        None
    }

    fn copy_restored(&self, number: u64, bytes: &[u8]) {
        let Some(folder) = &self.restored else { return };
        if let Err(error) = fs::write(folder.join(name(number)), bytes) {
            tracing::warn!(folder = %folder.display(), %error, "the snapshot was not copied");
        }
        prune(folder, self.keep);
    }

    /// Writes one, beside if it cannot be written where it belongs; where it lies. `may` is asked before it is given its name.
    ///
    /// # Errors
    /// `PERSISTENT_FAIL`; those of `fill` and `may`.
    pub(super) fn put(
        &self,
        fill: impl Fn(&mut Sink<'_>) -> Result<()>,
        may: impl Fn() -> Result<()>,
    ) -> Result<PathBuf> {
        let number = self.all().first().map_or(0, |(number, _)| *number).saturating_add(1);
        let mut outcome = Err(Error::internal("there is no folder"));
        for place in self.places() {
            outcome = match place {
                Place::Folder(folder) => put_in(folder, number, &fill, &may),
                Place::Kept(kept) => kept.put(number, &fill, &may).map(|()| place.path(number)),
            };
            match &outcome {
                Ok(_) => {
                    place.prune(self.keep);
                    break;
                }
                Err(error) if error.code() == ErrorCode::PersistentFail => {
                    tracing::warn!(place = %place.path(number).display(), %error, "a snapshot cannot be written here");
                }
                Err(_) => break,
            }
        }
        outcome
    }
}

/// Where some of them lie.
#[derive(Debug)]
enum Place {
    Folder(PathBuf),
    Kept(Kept),
}

impl Place {
    /// What others have left unfinished goes.
    fn clear(&self) -> Result<()> {
        match self {
            Place::Folder(folder) => {
                for name in names(folder).into_iter().filter(|name| name.starts_with(UNFINISHED)) {
                    let _ = fs::remove_file(folder.join(name));
                }
                Ok(())
            }
            Place::Kept(kept) => kept.clear(),
        }
    }

    fn numbers(&self) -> Vec<u64> {
        match self {
            Place::Folder(folder) => listed(folder).into_iter().map(|(number, _)| number).collect(),
            Place::Kept(kept) => kept.numbers(),
        }
    }

    /// For people.
    fn path(&self, number: u64) -> PathBuf {
        match self {
            Place::Folder(folder) => folder.join(name(number)),
            Place::Kept(kept) => kept.path(number),
        }
    }

    fn read(&self, number: u64) -> Result<Vec<u8>> {
        match self {
            Place::Folder(folder) => Ok(fs::read(folder.join(name(number)))?),
            Place::Kept(kept) => kept.read(number),
        }
    }

    fn prune(&self, keep: usize) {
        match self {
            Place::Folder(folder) => prune(folder, keep),
            Place::Kept(kept) => kept.prune(keep),
        }
    }
}

fn put_in(
    folder: &Path,
    number: u64,
    fill: &impl Fn(&mut Sink<'_>) -> Result<()>,
    may: &impl Fn() -> Result<()>,
) -> Result<PathBuf> {
    let failed = |what: &str, error: std::io::Error| {
        Error::new(ErrorCode::PersistentFail, format!("{what} in {}: {error}", folder.display()))
    };
    let unfinished = folder.join(format!("{UNFINISHED}{number:020}-{}", std::process::id()));
    let written = (|| {
        // Keys are nobody else's business.
        let own = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&unfinished);
        let mut file = own.map_err(|error| failed("a file", error))?;
        fill(&mut |bytes| append(&mut file, bytes))?;
        file.sync_all().map_err(|error| failed("syncing", error))?;
        may()?;
        let path = folder.join(name(number));
        // Whoever else has that number leads, or led later.
        let claim = OpenOptions::new().write(true).create_new(true).open(&path);
        claim.map_err(|error| {
            Error::new(ErrorCode::ObjectAlreadyExists, format!("{}: {error}", path.display()))
        })?;
        fs::rename(&unfinished, &path).map_err(|error| {
            let _ = fs::remove_file(&path);
            failed("renaming", error)
        })?;
        sync(folder).map_err(|error| failed("syncing the folder", error))?;
        Ok(path)
    })();
    if written.is_err() {
        let _ = fs::remove_file(&unfinished);
        return written;
    }
    // Nothing here reads it, so a failure is no failure.
    let pointer = folder.join(format!("{UNFINISHED}{LATEST}"));
    let pointed = fs::write(&pointer, format!("{}\n", name(number)))
        .and_then(|()| fs::rename(&pointer, folder.join(LATEST)));
    if let Err(error) = pointed {
        tracing::debug!(%error, "the latest snapshot is not pointed to");
    }
    written
}

/// Bytes into a file.
fn append(file: &mut File, bytes: &[u8]) -> Result<()> {
    file.write_all(bytes).map_err(|error| Error::new(ErrorCode::PersistentFail, format!("writing: {error}")))
}

fn sync(folder: &Path) -> std::io::Result<()> {
    File::open(folder)?.sync_all()
}

fn name(number: u64) -> String {
    format!("{NAME}{number:020}")
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

fn listed(folder: &Path) -> Vec<(u64, PathBuf)> {
    let number = |found: &String| {
        let number = found.strip_prefix(NAME)?.parse().ok()?;
        // Whatever else is there is not ours.
        (*found == name(number)).then(|| (number, folder.join(found)))
    };
    names(folder).iter().filter_map(number).collect()
}

/// Keeps the last ones.
fn prune(folder: &Path, keep: usize) {
    let mut all = listed(folder);
    all.sort_by(|a, b| b.cmp(a));
    for (_, path) in all.into_iter().skip(keep) {
        if let Err(error) = fs::remove_file(&path) {
            tracing::warn!(path = %path.display(), %error, "an old snapshot stays");
        }
    }
}

/// Gives a master what the one before wrote down.
///
/// # Errors
/// Those of [`Shelf::open`].
pub(super) async fn restore(config: &SnapshotConfig, cluster: &str, master: &Arc<Master>) -> Result<()> {
    let (config, cluster, master) = (config.clone(), cluster.to_owned(), master.clone());
    let restored = tokio::task::spawn_blocking(move || {
        let shelf = Shelf::open(&config, &cluster)?;
        if let Some(snapshot) = shelf.latest() {
            master.recall(snapshot);
        }
        Ok(())
    });
    restored.await.map_err(|error| Error::internal(format!("reading snapshots: {error}")))?
}

/// The thread that takes them.
#[derive(Debug)]
pub(super) struct Photographer {
    told: Arc<Told>,
    thread: Option<std::thread::JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Told {
    orders: Mutex<Orders>,
    wake: Condvar,
    /// What is under way is not wanted any more.
    at_once: AtomicBool,
}

#[derive(Debug, Default)]
struct Orders {
    stop: bool,
    /// With one more to end with.
    last: bool,
}

impl Photographer {
    /// # Errors
    /// Those of [`Shelf::open`]; `INTERNAL_ERROR` without threads.
    pub(super) async fn start(state: &Arc<State>) -> Result<Option<Self>> {
        let Some(config) = state.config.snapshots.clone().filter(|config| config.write) else {
            return Ok(None);
        };
        let (place, cluster) = (config.clone(), state.config.cluster_id.clone());
        let shelf = tokio::task::spawn_blocking(move || Shelf::open(&place, &cluster)).await;
        let shelf = shelf.map_err(|error| Error::internal(format!("opening snapshots: {error}")))??;
        let told = Arc::new(Told::default());
        let (heard, state) = (told.clone(), state.clone());
        let thread = std::thread::Builder::new()
            .name("mooncake-snap".into())
            .spawn(move || run(&state, &config, &shelf, &heard))
            .map_err(|error| Error::internal("cannot start a thread").with_source(error))?;
        Ok(Some(Self { told, thread: Some(thread) }))
    }

    /// Takes one more, and ends. Nobody may be changing anything.
    pub(super) fn finish(mut self) {
        *self.told.orders.lock() = Orders { stop: true, last: true };
        self.told.wake.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Photographer {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.told.at_once.store(true, Relaxed);
            self.told.orders.lock().stop = true;
            self.told.wake.notify_all();
        }
    }
}

fn run(state: &State, config: &SnapshotConfig, shelf: &Shelf, told: &Told) {
    loop {
        let clock = state.master.clock();
        let due = clock.now().after(config.interval);
        let last = {
            let mut orders = told.orders.lock();
            while !orders.stop && clock.now() < due {
                told.wake.wait_for(&mut orders, due.since(clock.now()));
            }
            if orders.stop && !orders.last {
                return;
            }
            orders.stop
        };
        // A standby knows nothing that is worth keeping.
        if state.standing.leads() {
            take(state, config, shelf, told, clock);
        }
        if last {
            return;
        }
    }
}

fn take(state: &State, config: &SnapshotConfig, shelf: &Shelf, told: &Told, clock: &SharedClock) {
    let begun = clock.now();
    let may = || {
        let ended = |why: &'static str| Err(Error::internal(why));
        if told.at_once.load(Relaxed) {
            ended("this master stops")
        } else if begun.after(config.limit) <= clock.now() {
            ended("it took longer than --snapshot_child_timeout_seconds")
        } else if !state.standing.leads() {
            ended("another master may lead by now")
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
    let outcome = shelf.put(fill, may);
    let took = clock.now().since(begun);
    let taken = &state.snapshots;
    match outcome {
        Ok(path) => {
            taken.took.note(u64::try_from(took.as_millis()).unwrap_or(u64::MAX));
            taken.success.fetch_add(1, Relaxed);
            let objects = objects.into_inner();
            tracing::info!(path = %path.display(), objects, ?took, "snapshot taken");
        }
        Err(error) => {
            taken.failed.fetch_add(1, Relaxed);
            tracing::warn!(%error, ?took, "no snapshot was taken");
        }
    }
}

#[cfg(test)]
#[path = "snapshots/tests.rs"]
mod tests;
