//! Files as segments of a peer, beside `fio` with the same block size and depth on the same file in
//! the same run, and a store of objects on top:
//! `cargo run --release -p mooncake-benches --bin disk_bench -- DIR [MiB] [KiB per block] [depth]`
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command line tool prints to its terminal")]

use std::collections::VecDeque;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures::executor::block_on;
use mooncake_core::clock::{Clock, SystemClock};
use mooncake_core::{Error, Result};
use mooncake_disk::{
    DiskConfig, DiskTransport, EngineKind, FileStore, Frame, OpenSegment, RunningEngine, StoreConfig,
};
use mooncake_transport::transfer::{self, Transfer};

/// Number of measurements of each kind, in turn. The best counts, because a shared disk is slow at
/// times.
const ROUNDS: usize = 3;

#[derive(Clone, Copy)]
struct Load {
    total: u64,
    block: usize,
    depth: usize,
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, default: u64| args.get(at).map_or(Ok(default), |n| n.parse());
    let (Some(dir), Ok(mib), Ok(kib), Ok(depth)) =
        (args.first(), number(1, 1024), number(2, 1024), number(3, 16))
    else {
        eprintln!("usage: disk_bench DIR [MiB] [KiB per block] [depth]");
        return ExitCode::FAILURE;
    };
    let load = Load { total: mib << 20, block: (kib << 10) as usize, depth: depth as usize };
    match run(Path::new(dir), load) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("disk_bench: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(dir: &Path, load: Load) -> Result<()> {
    let path = dir.join("disk_bench.data");
    let Load { total, block, depth } = load;
    println!("{} in blocks of {} KiB, {depth} at a time, {} MiB", path.display(), block >> 10, total >> 20);
    let with_fio = Command::new("fio").arg("--version").output().is_ok();
    if !with_fio {
        println!("cannot compare: fio is not installed (Debian: apt-get install fio)");
    }
    let kinds = [EngineKind::Auto, EngineKind::Threads];
    let mut best = [[0f64; 3]; 2];
    for _ in 0..ROUNDS {
        for (way, write) in [(0, true), (1, false)] {
            for (column, kind) in kinds.into_iter().enumerate() {
                let (rate, engine) = ours(&path, kind, load, write)?;
                best[way][column] = best[way][column].max(rate);
                if kind == EngineKind::Auto && engine != RunningEngine::Uring {
                    println!("the kernel refuses io_uring; the first column is threads, too");
                }
            }
            if with_fio {
                best[way][2] = best[way][2].max(fio(&path, load, write)?);
            }
        }
    }
    println!("{:<8}{:>14}{:>14}{:>14}{:>10}", "MB/s", "io_uring", "threads", "fio", "ratio");
    for (name, [uring, threads, fio]) in ["write", "read"].into_iter().zip(best) {
        println!("{name:<8}{uring:>14.0}{threads:>14.0}{fio:>14.0}{:>10.2}", uring / fio);
    }
    std::fs::remove_file(&path).map_err(Error::from)?;
    store(&dir.join("disk_bench.store"), load)
}

/// Returns the rate in millions of bytes per second.
fn rate(clock: &SystemClock, start: mooncake_core::clock::Moment, bytes: u64) -> f64 {
    bytes as f64 / clock.now().since(start).as_secs_f64() / 1e6
}

fn ours(path: &Path, engine: EngineKind, load: Load, write: bool) -> Result<(f64, RunningEngine)> {
    let Load { total, block, depth } = load;
    let config = DiskConfig { engine, depth, threads: depth, zero_copy: true, ..DiskConfig::default() };
    let disk = DiskTransport::start(config)?;
    let segment = disk.open(&OpenSegment { path: path.into(), len: total, grows: false })?;
    let clock = SystemClock::new();
    let mut free: Vec<Frame> = (0..depth).map(|_| Frame::new(block)).collect::<Result<_>>()?;
    free.iter_mut().for_each(|frame| frame.fill(7));
    let start = clock.now();
    let mut under_way = VecDeque::new();
    for at in (0..total - total % block as u64).step_by(block) {
        let frame = match free.pop() {
            Some(frame) => frame,
            None => finish(under_way.pop_front())?,
        };
        let transfer = [Transfer::new(segment.addr() + at, frame)];
        under_way.push_back(match write {
            true => transfer::write(&disk, &disk.own_peer(), transfer, None),
            false => transfer::read(&disk, &disk.own_peer(), transfer, None),
        });
    }
    while !under_way.is_empty() {
        finish(under_way.pop_front())?;
    }
    Ok((rate(&clock, start, total), disk.engine()))
}

fn finish(ticket: Option<mooncake_transport::Ticket<[Transfer<Frame>; 1]>>) -> Result<Frame> {
    let ticket = ticket.ok_or_else(|| Error::internal("no transfer is in progress"))?;
    let (result, [transfer]) = ticket.wait();
    result.map(|()| transfer.buffer)
}

fn fio(path: &Path, load: Load, write: bool) -> Result<f64> {
    let output = Command::new("fio")
        .args(["--name=disk_bench", "--ioengine=io_uring", "--direct=1", "--output-format=json", "--thread"])
        .arg(format!("--filename={}", path.display()))
        .arg(format!("--rw={}", if write { "write" } else { "read" }))
        .arg(format!("--bs={}", load.block))
        .arg(format!("--iodepth={}", load.depth))
        .arg(format!("--size={}", load.total))
        .output()
        .map_err(Error::from)?;
    let text = String::from_utf8_lossy(&output.stdout);
    // fio may print messages before the JSON.
    let json = text.find('{').map_or("", |at| &text[at..]);
    let report: serde_json::Value = serde_json::from_str(json)
        .map_err(|e| Error::internal(format!("cannot parse the output of fio: {e}. output={text:?}")))?;
    let way = if write { "write" } else { "read" };
    let rate = report["jobs"][0][way]["bw_bytes"].as_f64();
    rate.map(|rate| rate / 1e6).ok_or_else(|| Error::internal("fio reports no rate"))
}

/// Measures objects of one block each: put, then read and verified, by as many threads as blocks
/// are in flight above.
fn store(dir: &Path, load: Load) -> Result<()> {
    let Load { total, block, depth } = load;
    let objects = total / block as u64;
    let config = StoreConfig::new(dir, (total + (objects + 1) * 8192).next_multiple_of(4096));
    let disk = DiskConfig { depth, threads: depth, ..DiskConfig::default() };
    let store = Arc::new(FileStore::open(disk, config)?.0);
    let clock = SystemClock::new();
    let each = |work: &(dyn Fn(u64) -> Result<()> + Sync)| -> Result<f64> {
        let (next, start) = (AtomicU64::new(0), clock.now());
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..depth)
                .map(|_| {
                    scope.spawn(|| {
                        loop {
                            let n = next.fetch_add(1, Ordering::Relaxed);
                            if n >= objects {
                                return Ok(());
                            }
                            work(n)?;
                        }
                    })
                })
                .collect();
            workers
                .into_iter()
                .try_for_each(|w| w.join().unwrap_or_else(|_| Err(Error::internal("a worker panicked"))))
        })?;
        Ok(rate(&clock, start, objects * block as u64))
    };
    let put = each(&|n| {
        let mut put = store.value(&n.to_le_bytes(), block)?;
        put.value().fill(n as u8);
        block_on(store.put(put))
    })?;
    let get = each(&|n| {
        let (result, value) = block_on(store.read(&n.to_le_bytes(), Frame::new(block)?));
        result?;
        if value[block - 1] == n as u8 { Ok(()) } else { Err(Error::internal("wrong byte in a value")) }
    })?;
    println!("store    put {put:.0} MB/s, get {get:.0} MB/s, checksums included");
    drop(store);
    std::fs::remove_dir_all(dir).map_err(Error::from)
}
