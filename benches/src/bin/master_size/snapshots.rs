//! Costs of snapshots: bytes, time to write one, latency of calls meanwhile, and time to start from
//! one.

use std::fs;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use mooncake_benches::peer::{Process, Result};
use mooncake_core::Clock;
use mooncake_core::clock::SystemClock;
use tokio::runtime::Runtime;

use crate::load::{PORT, Spans, Watch, fill, mount, resident};

/// Time from the end of one snapshot to the beginning of the next.
const INTERVAL: Duration = Duration::from_secs(15);
/// Number of measured snapshots.
const ROUNDS: usize = 3;
/// Timeout of a measurement without progress.
const PATIENCE: Duration = Duration::from_secs(120);
/// Polling interval: no event reports a change of a folder or a port.
const PAUSE: Duration = Duration::from_millis(2);

pub(crate) fn run(binary: PathBuf, objects: u64) -> Result<()> {
    let folder = tempfile::tempdir().map_err(|e| e.to_string())?;
    let runtime = Runtime::new().map_err(|e| e.to_string())?;
    runtime.block_on(async {
        let (master, empty) = start(&binary, folder.path()).await?;
        mount(objects).await?;
        let filled = Arc::new(AtomicU64::new(0));
        fill(objects, &filled).await?;
        // After the end of a snapshot there is time to measure calls before the next begins.
        wait(|| is_written(folder.path())).await?;
        wait(|| !is_written(folder.path())).await?;
        for _ in 0..ROUNDS {
            one(folder.path(), objects, &filled).await?;
        }
        let before = resident(master.id())?;
        // Dropping the process kills it with SIGKILL.
        drop(master);
        let (master, took) = start(&binary, folder.path()).await?;
        let after = resident(master.id())?;
        println!(
            "started from the snapshot: the first response after {took:.2?}, without a snapshot after {empty:.2?}; \
             {:.0} MiB of memory, {:.0} MiB before",
            after as f64 / f64::from(1 << 20),
            before as f64 / f64::from(1 << 20)
        );
        Ok(())
    })
}

/// Starts a master on that folder. Returns it with the time until it was reachable.
async fn start(binary: &Path, folder: &Path) -> Result<(Process, Duration)> {
    let mut command = Command::new(binary);
    command.args([format!("--rpc_port={PORT}"), format!("--metrics_port={}", PORT + 1)]);
    command.args(["--enable_snapshot", "--enable_snapshot_restore"]);
    command.arg(format!("--snapshot_interval_seconds={}", INTERVAL.as_secs()));
    command.arg(format!("--snapshot_local_path={}", folder.display()));
    let clock = SystemClock::new();
    let begun = clock.now();
    let master = Process::start(command, "mooncake_master")?;
    wait(|| TcpStream::connect(("127.0.0.1", PORT)).is_ok()).await?;
    Ok((master, clock.now().since(begun)))
}

/// Measures the next snapshot, with calls before and during it.
async fn one(folder: &Path, objects: u64, filled: &Arc<AtomicU64>) -> Result<()> {
    let clock = SystemClock::new();
    let old = latest(folder);
    let watch = Watch::start(filled);
    let watched = clock.now();
    wait(|| is_written(folder)).await?;
    let begun = clock.now();
    wait(|| !is_written(folder)).await?;
    let (took, calls) = (clock.now().since(begun), watch.calls().await?);
    let (number, bytes) =
        latest(folder).filter(|new| old.as_ref() != Some(new)).ok_or("the snapshot was not written")?;
    println!(
        "{number}: {objects} objects, {bytes} bytes, {:.1} for each, written in {took:.2?}",
        bytes as f64 / objects as f64
    );
    // Calls in progress at the beginning count as calls during the snapshot. The first calls are
    // skipped, because they connect.
    let settled = watched.after(Duration::from_millis(200));
    let calls = calls.into_iter().filter(|(at, _)| *at > settled);
    let (before, meanwhile): (Vec<_>, Vec<_>) = calls.partition(|(at, span)| at.after(*span) < begun);
    for (when, calls) in [("before", before), ("meanwhile", meanwhile)] {
        if calls.is_empty() {
            return Err(format!("no calls {when}: too few objects to measure"));
        }
        let spans = Spans(calls.into_iter().map(|(_, span)| span).collect());
        println!("  {when}, {}", spans.summary("single requests"));
    }
    Ok(())
}

async fn wait(there: impl Fn() -> bool) -> Result<()> {
    let clock = SystemClock::new();
    let begun = clock.now();
    while !there() {
        if clock.now().since(begun) > PATIENCE {
            return Err("the master writes no snapshot, or does not start".into());
        }
        tokio::time::sleep(PAUSE).await;
    }
    Ok(())
}

fn names(folder: &Path) -> Vec<PathBuf> {
    let cluster = fs::read_dir(folder.join("mooncake_cluster"));
    cluster.into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

fn begins(path: &Path, word: &str) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(word))
}

/// Returns whether a snapshot is being written.
fn is_written(folder: &Path) -> bool {
    names(folder).iter().any(|path| begins(path, "unfinished-0"))
}

/// Returns the name and the length of the latest snapshot.
fn latest(folder: &Path) -> Option<(String, u64)> {
    let whole = names(folder).into_iter().filter(|path| begins(path, "snapshot-")).max()?;
    let bytes = fs::metadata(&whole).ok()?.len();
    Some((whole.file_name()?.to_string_lossy().into_owned(), bytes))
}
