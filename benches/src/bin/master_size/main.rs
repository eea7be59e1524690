//! Master with many objects: memory per object, the duration of an eviction pass, and the latency
//! of requests meanwhile. Run by `cargo xtask bench --master-size`. With `--snapshots`, run by
//! `cargo xtask bench --snapshots`, it measures the costs of snapshots instead.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command line tool prints to its terminal")]

mod load;
mod snapshots;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use load::{BATCH, FILLED, LIMIT, PORT, Spans, Watch, fill, key, mount, put_all, resident, rpc};
use mooncake_benches::peer::{Process, Result, wait_for_port};
use mooncake_core::Clock;
use mooncake_core::clock::SystemClock;
use tokio::runtime::Runtime;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match words.as_slice() {
        ["--master", master, "--objects", count, mode @ ..] => match (count.parse(), mode) {
            (Ok(count), []) => run(PathBuf::from(master), count),
            (Ok(count), ["--snapshots"]) => snapshots::run(PathBuf::from(master), count),
            _ => Err(format!("invalid number of objects or mode: {count} {mode:?}")),
        },
        other => Err(format!(
            "unknown arguments {other:?}; run `cargo xtask bench --master-size` or `--snapshots`"
        )),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("master_size: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(binary: PathBuf, objects: u64) -> Result<()> {
    let mut command = Command::new(binary);
    command.args([format!("--rpc_port={PORT}"), format!("--metrics_port={}", PORT + 1)]);
    // A short lease, so that it protects none of the filled objects.
    command.arg("--default_kv_lease_ttl=100");
    let master = Process::start(command, "mooncake_master")?;
    wait_for_port(PORT)?;
    let runtime = Runtime::new().map_err(|e| e.to_string())?;
    runtime.block_on(async {
        mount(objects).await?;
        let before = resident(master.id())?;
        let filled = Arc::new(AtomicU64::new(0));
        let watch = Watch::start(&filled);
        let clock = SystemClock::new();
        let begun = clock.now();
        fill(objects, &filled).await?;
        let took = clock.now().since(begun);
        println!("{objects} objects put in {took:.1?}, {BATCH} a call, 4 connections");
        println!("  meanwhile, {}", watch.stop().await?);
        let each = resident(master.id())?.saturating_sub(before) as f64 / objects as f64;
        println!("{each:.0} bytes of memory for each, keys of {} bytes", key(0).len());
        let next = control(objects, &filled).await?;
        pass(next, &filled).await
    })
}

/// Makes the same requests without an eviction, to measure their latency on this machine. Returns
/// the number of the next object.
async fn control(objects: u64, filled: &Arc<AtomicU64>) -> Result<u64> {
    let (clock, rpc, mut next) = (SystemClock::new(), rpc(), objects);
    let (watch, begun, mut puts) = (Watch::start(filled), clock.now(), Vec::new());
    let end = (objects as f64 * 0.8999 / FILLED) as u64;
    while next < end {
        puts.push(put_all(&rpc, &[key(next)]).await?);
        next += 1;
        if next.is_multiple_of(200) {
            evicted()?;
        }
    }
    let took = clock.now().since(begun);
    let gets = watch.stop().await?;
    println!("no eviction for {took:.1?}\n  meanwhile, {gets}\n  and {}", Spans(puts).summary("puts"));
    Ok(next)
}

/// Puts one object after the other until eviction begins and ends.
async fn pass(objects: u64, filled: &Arc<AtomicU64>) -> Result<()> {
    let (clock, rpc, mut next) = (SystemClock::new(), rpc(), objects);
    let watch = Watch::start(filled);
    let mut puts = Vec::new();
    // The last read before the eviction began is the latest possible start of the pass.
    let mut begun = clock.now();
    let (mut count, mut changed) = (0, begun);
    while count == 0 || clock.now().since(changed) < Duration::from_millis(500) {
        for _ in 0..200 {
            puts.push(put_all(&rpc, &[key(next)]).await?);
            next += 1;
        }
        let now = evicted()?;
        if now == 0 {
            begun = clock.now();
        } else if count == 0 || now - count > 400 {
            // More than these puts themselves evict.
            (count, changed) = (now, clock.now());
        }
        if next > objects + objects / 10 {
            return Err("the eviction does not begin or does not end".into());
        }
    }
    println!("a pass of eviction: {count} objects within {:.0?}", changed.since(begun));
    let gets = watch.stop().await?;
    let puts = Spans(puts).summary("puts");
    println!("  meanwhile, {gets}\n  and {puts}");
    let longest = gets.longest.max(puts.longest);
    if longest > LIMIT { Err(format!("a request took {longest:?}; the limit is {LIMIT:?}")) } else { Ok(()) }
}

/// Returns the number of evicted objects in the metrics of the master.
fn evicted() -> Result<u64> {
    let mut page = String::new();
    let mut stream = TcpStream::connect(("127.0.0.1", PORT + 1)).map_err(|e| e.to_string())?;
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").map_err(|e| e.to_string())?;
    stream.read_to_string(&mut page).map_err(|e| e.to_string())?;
    let line = page.lines().find_map(|line| line.strip_prefix("master_evicted_key_count "));
    line.and_then(|number| number.trim().parse().ok())
        .ok_or("the metrics have no count of evicted objects".into())
}
