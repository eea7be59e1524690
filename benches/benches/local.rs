//! IPC client beside a full client: single calls of one caller, one at a time. Master and owner
//! (the code of `mooncake_client`) run in a process of their own, both requesters in this one, in
//! turn.
#![allow(clippy::print_stdout, reason = "a command line tool prints to its terminal")]

use std::io::{BufRead, BufReader};
use std::net::Ipv4Addr;
use std::process::{Command, Stdio};
use std::time::Duration;

use mooncake_benches::local_master;
use mooncake_core::Clock;
use mooncake_core::clock::SystemClock;
use mooncake_core::error::Result;
use mooncake_store::client::{Client, ClientBuilder, PutOptions, ReadInto};
use mooncake_store::local::{LocalClient, LocalConfig, LocalRead, LocalServer, LocalServerConfig};
use mooncake_store::server::MasterServer;
use mooncake_store::transport_set::TransportSet;
use mooncake_transport::{Region, SliceMut};
use tokio::runtime::{Builder, Runtime};

const SIZES: [(&str, usize); 3] = [("4 KiB", 4 << 10), ("64 KiB", 64 << 10), ("1 MiB", 1 << 20)];
/// Duration of one measurement of a cell.
const TURN: Duration = Duration::from_millis(300);
const ROUNDS: usize = 5;

fn main() -> Result<()> {
    match std::env::args().find_map(|argument| argument.strip_prefix("--owner=").map(str::to_owned)) {
        Some(path) => runtime()?.block_on(serve(path)),
        None => measure(),
    }
}

fn runtime() -> Result<Runtime> {
    Ok(Builder::new_multi_thread().worker_threads(2).enable_all().build()?)
}

fn member(master: &str) -> ClientBuilder {
    Client::builder().master(master).local_hostname("127.0.0.1").advertise(Ipv4Addr::LOCALHOST.into())
}

async fn serve(path: String) -> Result<()> {
    let mut config = local_master();
    config.options.lease_ttl = Duration::from_secs(5);
    let master = MasterServer::start(config).await?;
    let address = master.addresses().rpc.to_string();
    let client = member(&address).segment(256 << 20).connect().await?;
    let config = LocalServerConfig { path: path.into(), ..LocalServerConfig::default() };
    let _server = LocalServer::start(client, config)?;
    println!("{address}");
    std::future::pending().await
}

/// Returns the microseconds of one call, the median of the rounds, for each of `calls`, which take
/// turns.
fn compare(runtime: &Runtime, calls: &mut [Box<dyn FnMut() -> Result<()> + '_>]) -> Result<Vec<f64>> {
    let clock = SystemClock::new();
    let mut cells: Vec<Vec<f64>> = calls.iter().map(|_| Vec::new()).collect();
    let _entered = runtime.enter();
    for _ in 0..ROUNDS {
        for (call, cell) in calls.iter_mut().zip(&mut cells) {
            let (began, mut count) = (clock.now(), 0u32);
            while clock.now().since(began) < TURN {
                call()?;
                count += 1;
            }
            cell.push(clock.now().since(began).as_secs_f64() * 1e6 / f64::from(count));
        }
    }
    let median = |mut cell: Vec<f64>| {
        cell.sort_by(f64::total_cmp);
        cell[cell.len() / 2]
    };
    Ok(cells.into_iter().map(median).collect())
}

fn measure() -> Result<()> {
    let path = std::env::temp_dir().join(format!("mooncake-bench-{}.sock", std::process::id()));
    let mut owner = Command::new(std::env::current_exe()?)
        .arg(format!("--owner={}", path.display()))
        .stdout(Stdio::piped())
        .spawn()?;
    let mut master = String::new();
    if let Some(out) = owner.stdout.take() {
        BufReader::new(out).read_line(&mut master)?;
    }
    let outcome = runtime().and_then(|runtime| table(&runtime, master.trim(), &path));
    owner.kill()?;
    owner.wait()?;
    let _ = std::fs::remove_file(&path);
    outcome
}

fn table(runtime: &Runtime, master: &str, path: &std::path::Path) -> Result<()> {
    let ordinary = runtime.block_on(member(master).segment(0).connect())?;
    let config = LocalConfig { buffer: 32 << 20, ..LocalConfig::at(path.to_string_lossy()) };
    let light = runtime.block_on(LocalClient::connect(config))?;
    println!("microseconds per call, one caller; full client (shared memory) | IPC client");
    for (name, size) in SIZES {
        let value = vec![7u8; size];
        let key = format!("hot-{size}");
        runtime.block_on(light.put(&key, &value))?;
        let get = compare(
            runtime,
            &mut [
                Box::new(|| runtime.block_on(ordinary.get(&key)).map(drop)),
                Box::new(|| runtime.block_on(light.get(&key)).map(drop)),
            ],
        )?;
        let mut theirs = Some(ordinary.memory().alloc(size)?.exclusive().expect("new memory has one handle"));
        let region: Region<TransportSet> = runtime.block_on(light.alloc_registered(size))?;
        let mut ours: Option<SliceMut<TransportSet>> =
            Some(region.exclusive().expect("new memory has one handle"));
        let get_into = compare(
            runtime,
            &mut [
                Box::new(|| {
                    let into = theirs.take().expect("the buffer was returned");
                    let ReadInto { result: read, into, .. } = runtime.block_on(ordinary.get_into(&key, into));
                    theirs = Some(into);
                    read.map(drop)
                }),
                Box::new(|| {
                    let into = ours.take().expect("the buffer was returned");
                    let LocalRead { result: read, into } = runtime.block_on(light.get_into(&key, into));
                    ours = into;
                    read.map(drop)
                }),
            ],
        )?;
        let options = PutOptions::new().upsert();
        let upsert = compare(
            runtime,
            &mut [
                Box::new(|| runtime.block_on(ordinary.put_with("written", &value, &options)).map(drop)),
                Box::new(|| runtime.block_on(light.put_with("written", &value, &options)).map(drop)),
            ],
        )?;
        let exist = compare(
            runtime,
            &mut [
                Box::new(|| runtime.block_on(ordinary.exist(&key)).map(drop)),
                Box::new(|| runtime.block_on(light.exist(&key)).map(drop)),
            ],
        )?;
        for (call, cells) in [("get", get), ("get_into", get_into), ("upsert", upsert), ("exist", exist)] {
            println!("{name:>7} {call:<9} {:>8.1} | {:>8.1}", cells[0], cells[1]);
        }
    }
    Ok(())
}
