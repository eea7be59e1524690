//! Writer of a full pool beside loops that only look keys up, and gets that follow their look-up in
//! time. Master, owner and clients share one process and talk over TCP.
#![allow(clippy::print_stdout, reason = "a command line tool prints to its terminal")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use mooncake_benches::local_master;
use mooncake_core::Clock;
use mooncake_core::clock::{Rng, SystemClock};
use mooncake_core::error::Result;
use mooncake_store::client::{Client, ClientBuilder, PutOutcome};
use mooncake_store::server::MasterServer;
use tokio::runtime::Builder;
use tokio::task::JoinHandle;

/// Number of loops that look keys up, and number of keys of one look-up.
const LOOPS: usize = 64;
const KEYS: u64 = 16;
/// Length of an object, and number of objects in the pool.
const LEN: usize = 64 << 10;
const OBJECTS: u64 = 1024;
/// Duration of one measurement.
const TURN: Duration = Duration::from_secs(10);
const LEASE: Duration = Duration::from_secs(5);
/// Time between a look-up and its get: half of the time for which a look-up protects.
const PAUSE: Duration = Duration::from_millis(250);

/// Cluster whose pool is full, and the number of the last object.
struct Pool {
    master: MasterServer,
    _owner: Client,
    last: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
}

fn main() -> Result<()> {
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(measure())
}

async fn measure() -> Result<()> {
    println!(
        "{:<34}{:>8}{:>9}{:>10}{:>10}{:>10}{:>12}",
        "writer beside", "puts", "refused", "p50 ms", "p99 ms", "max ms", "look-ups"
    );
    // A look-up that protects for its whole lease is what masters without the setting do.
    for (loops, protection) in [(0, None), (LOOPS, None), (LOOPS, Some(LEASE))] {
        let pool = Pool::start(protection).await?;
        let looking = (0..loops).map(|at| pool.look_up(at as u64)).collect::<Vec<_>>();
        let (mut times, refused) = pool.write().await?;
        pool.stop.store(true, Relaxed);
        let mut look_ups = 0;
        for task in looking {
            look_ups += task.await.unwrap_or(Ok(0))?;
        }
        times.sort_unstable();
        let at =
            |part: usize| times.get(times.len() * part / 1000).map_or(f64::NAN, |t| t.as_secs_f64() * 1e3);
        let max = times.last().map_or(f64::NAN, |t| t.as_secs_f64() * 1e3);
        let whole = if protection.is_some() { ", whole leases" } else { "" };
        let name = format!("{loops} look-up loops{whole}");
        println!(
            "{name:<34}{:>8}{refused:>9}{:>10.2}{:>10.2}{max:>10.2}{look_ups:>12}",
            times.len(),
            at(500),
            at(990)
        );
    }
    let pool = Pool::start(None).await?;
    let getting = (0..LOOPS).map(|at| pool.get_after_look_up(at as u64)).collect::<Vec<_>>();
    pool.write().await?;
    pool.stop.store(true, Relaxed);
    let (mut looked_up, mut found) = (0, 0);
    for task in getting {
        let (of_loop, of_gets) = task.await.unwrap_or(Ok((0, 0)))?;
        (looked_up, found) = (looked_up + of_loop, found + of_gets);
    }
    let part = found as f64 / looked_up as f64 * 100.0;
    println!("gets {PAUSE:?} after a look-up that found the key: {found} of {looked_up} hit ({part:.3} %)");
    Ok(())
}

impl Pool {
    /// Starts a cluster whose look-ups protect for this time.
    async fn start(protection: Option<Duration>) -> Result<Self> {
        let mut config = local_master();
        config.options.lease_ttl = LEASE;
        config.options.look_up_protection = protection;
        config.options.high_watermark = 1.0;
        let master = MasterServer::start(config).await?;
        let owner = member(&master).segment(OBJECTS * LEN as u64).connect().await?;
        for number in 0..OBJECTS {
            owner.put(name(number), &[7; LEN][..]).await?;
        }
        let (last, stop) = (Arc::new(AtomicU64::new(OBJECTS - 1)), Arc::default());
        Ok(Self { master, _owner: owner, last, stop })
    }

    /// Puts new objects one after the other. Returns the time of each put that was stored, and the
    /// number of those that were refused.
    async fn write(&self) -> Result<(Vec<Duration>, u64)> {
        let client = member(&self.master).segment(0).connect().await?;
        let (clock, value) = (SystemClock::new(), vec![7; LEN]);
        let (begun, mut times, mut refused) = (clock.now(), Vec::new(), 0);
        while clock.now().since(begun) < TURN {
            let number = self.last.load(Relaxed) + 1;
            let start = clock.now();
            match client.put(name(number), &value[..]).await {
                Ok(PutOutcome::Stored) => {
                    times.push(clock.now().since(start));
                    self.last.store(number, Relaxed);
                }
                Ok(PutOutcome::Existed) | Err(_) => refused += 1,
            }
        }
        Ok((times, refused))
    }

    /// Starts a loop that looks keys of the pool up. Returns the number of its look-ups.
    fn look_up(&self, seed: u64) -> JoinHandle<Result<u64>> {
        let (builder, last, stop) = (member(&self.master), self.last.clone(), self.stop.clone());
        tokio::spawn(async move {
            let client = builder.segment(0).connect().await?;
            let (mut rng, mut look_ups) = (Rng::seeded(seed), 0);
            while !stop.load(Relaxed) {
                let first = last.load(Relaxed).saturating_sub(rng.below(OBJECTS));
                let keys: Vec<String> = (first..first + KEYS).map(name).collect();
                client.batch_exist(&keys).await?;
                look_ups += 1;
            }
            Ok(look_ups)
        })
    }

    /// Starts a loop that gets a key a while after its look-up. Returns the number of keys that a
    /// look-up found, and of those that the get found.
    fn get_after_look_up(&self, seed: u64) -> JoinHandle<Result<(u64, u64)>> {
        let (builder, last, stop) = (member(&self.master), self.last.clone(), self.stop.clone());
        tokio::spawn(async move {
            let client = builder.segment(0).connect().await?;
            let (mut rng, mut looked_up, mut found) = (Rng::seeded(seed), 0, 0);
            while !stop.load(Relaxed) {
                let key = name(last.load(Relaxed).saturating_sub(rng.below(OBJECTS)));
                if client.exist(&key).await? {
                    tokio::time::sleep(PAUSE).await;
                    looked_up += 1;
                    found += u64::from(client.get(&key).await?.is_some());
                }
            }
            Ok((looked_up, found))
        })
    }
}

fn name(number: u64) -> String {
    format!("block {number}")
}

fn member(master: &MasterServer) -> ClientBuilder {
    let address = master.addresses().rpc.to_string();
    Client::builder()
        .master(address)
        .local_hostname("127.0.0.1")
        .advertise(std::net::Ipv4Addr::LOCALHOST.into())
}
