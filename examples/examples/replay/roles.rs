//! Processes of a replay: a master, and clients that execute the requests sent to them.

use std::io::{BufRead, Write};
use std::path::Path;
use std::time::Duration;

use mooncake_core::clock::SystemClock;
use mooncake_core::{Clock, Error, ErrorKind};
use mooncake_store::client::{Client, ClientConfig, OffloadConfig, PutOptions, PutOutcome};
use mooncake_store::config::MasterConfig;
use mooncake_store::master::DiskOptions;
use mooncake_store::server::MasterServer;
use mooncake_store::transport_set::{TransportOptions, TransportSet};
use mooncake_transport::SliceMut;
use serde::Deserialize;
use serde_json::json;
use tokio::sync::mpsc;

use crate::args::{Args, Role};
use crate::master::is_at;
use crate::report::{MasterStats, Outcome};
use crate::trace::{key, payload};

/// Longest timeout of a client, whatever the limit.
const LONGEST: Duration = Duration::from_secs(24);

/// Heartbeats in the time until the master gives up a silent client. The last one before a kill
/// decides when that is.
const BEATS: u32 = 20;

/// Bytes of the buffer through which peers read from a disk.
const DISK_BUFFER: u64 = 256 << 20;
/// Page size of files on disk.
const PAGE: u64 = 4096;

impl Role {
    pub(crate) fn run(self, args: &Args) -> Result<(), String> {
        let runtime = match self {
            Role::Master => {
                tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()
            }
            // One thread does all the work of a client: a response never crosses threads.
            Role::Client => tokio::runtime::Builder::new_current_thread().enable_all().build(),
        };
        let runtime = runtime.map_err(|e| format!("cannot start the async runtime: {e}"))?;
        match self {
            Role::Master => runtime.block_on(master(args)),
            Role::Client => runtime.block_on(client(args)),
        }
    }
}

fn say(value: &serde_json::Value) -> Result<(), String> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{value}").and_then(|()| out.flush()).map_err(|e| format!("the coordinator has ended: {e}"))
}

/// Returns the lines of standard input, read on a separate thread. The channel ends with the input.
fn input() -> mpsc::UnboundedReceiver<String> {
    let (sender, receiver) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            if line.ok().and_then(|line| sender.send(line).ok()).is_none() {
                break;
            }
        }
    });
    receiver
}

async fn master(args: &Args) -> Result<(), String> {
    let mut config = MasterConfig {
        rpc_address: "127.0.0.1".into(),
        rpc_port: 0,
        metrics_host: "127.0.0.1".into(),
        metrics_port: 0,
        metric_reporting: false,
        ..MasterConfig::default()
    };
    config.options.lease_ttl = Duration::from_millis(args.lease_ms.unwrap_or(10_000));
    config.options.high_watermark = args.watermark;
    config.options.client_ttl = Duration::from_millis(args.role.silence_ms);
    config.eviction = args.policy.into();
    config.options.disks =
        args.disk_blocks.map(|_| DiskOptions { on_evict: args.offload_on_evict, ..DiskOptions::default() });
    let server = MasterServer::start(config).await.map_err(|e| e.to_string())?;
    say(&json!({"ready": server.addresses().rpc.to_string()}))?;
    let mut lines = input();
    while let Some(line) = lines.recv().await {
        let stats = server.master().stats();
        if let Ok(block) = line.parse() {
            let replicas = server.master().peek(&key(block)).unwrap_or_default();
            let holders = stats.segments.iter().filter(|held| is_at(&replicas, &held.segment.endpoint));
            let names: Vec<&str> = holders.map(|held| held.segment.name.as_str()).collect();
            say(&json!({"holders": names}))?;
            continue;
        }
        say(&json!(MasterStats {
            evicted_objects: stats.evicted_keys,
            evicted_bytes: stats.evicted_bytes,
            objects: stats.objects,
            used_bytes: stats.segments.iter().map(|s| s.used).sum(),
            capacity_bytes: stats.segments.iter().map(|s| s.segment.size).sum(),
            on_disk: stats.disks.objects,
            disk_bytes: stats.disks.used,
        }))?;
    }
    server.stop().await;
    Ok(())
}

#[derive(Debug, Deserialize)]
struct Task {
    index: usize,
    ids: Vec<u64>,
}

async fn client(args: &Args) -> Result<(), String> {
    let config = ClientConfig::default();
    let silence = Duration::from_millis(args.role.silence_ms);
    let mut client = Client::builder()
        .config(ClientConfig { ping_interval: config.ping_interval.min(silence / BEATS), ..config })
        .master(args.role.master_at.as_str())
        .local_hostname("127.0.0.1")
        .advertise(std::net::Ipv4Addr::LOCALHOST.into())
        .segment(args.capacity / u64::from(args.processes))
        .local_buffer(0)
        // The limit of the coordinator leaves time for a slow machine; the master has a timeout of
        // its own.
        .timeout(Duration::from_secs_f64(args.limit * 0.75).min(LONGEST));
    if let (Some(folder), Some(blocks)) = (&args.role.disk_at, args.disk_blocks) {
        client = client.offload(disk(folder, blocks.div_ceil(args.processes.into()), args.block_bytes));
    }
    if let Some(protocol) = &args.protocol {
        client = client.transports(alone(protocol)?);
    }
    let client = client.connect().await.map_err(|e| e.to_string())?;
    say(&json!({"ready": client.hostname()}))?;
    let (sender, tasks) = queues(args.inflight.into());
    let mut lanes = tokio::task::JoinSet::new();
    for tasks in tasks {
        lanes.spawn(lane(
            client.clone(),
            tasks,
            args.block_bytes as usize,
            PutOptions::new().replicas(args.replicas),
        ));
    }
    let mut lines = input();
    let mut turn = 0;
    while let Some(line) = lines.recv().await {
        let task: Task = serde_json::from_str(&line).map_err(|e| format!("malformed request: {e}"))?;
        let lane = &sender[turn % sender.len()];
        turn += 1;
        lane.send(task).map_err(|_| "a worker has ended".to_owned())?;
    }
    drop(sender);
    while let Some(done) = lanes.join_next().await {
        done.map_err(|e| e.to_string())??;
    }
    client.close().await.map_err(|e| e.to_string())
}

/// Returns the settings of a disk for exactly that many blocks.
fn disk(folder: &Path, blocks: u64, block_bytes: u64) -> OffloadConfig {
    // A record is a page for its header and whole pages for its value.
    let record = PAGE + block_bytes.next_multiple_of(PAGE);
    OffloadConfig {
        capacity: (blocks * record).max(1 << 20),
        buffer: DISK_BUFFER,
        // Blocks are evicted only when others need their space.
        watermarks: None,
        ..OffloadConfig::new(folder)
    }
}

/// Returns the options of one transport without a fallback.
fn alone(protocol: &str) -> Result<TransportOptions, String> {
    let options = TransportOptions::for_protocol(protocol).map_err(|e| e.to_string())?;
    Ok(match protocol {
        "shm" => options,
        "tcp" => options.without_shared_memory(),
        _ => TransportOptions { tcp: None, ..options.without_shared_memory() },
    })
}

type Queues = (Vec<mpsc::UnboundedSender<Task>>, Vec<mpsc::UnboundedReceiver<Task>>);

fn queues(lanes: usize) -> Queues {
    (0..lanes).map(|_| mpsc::unbounded_channel()).unzip()
}

/// Executes one request after the other, with buffers of its own.
async fn lane(
    client: Client,
    mut tasks: mpsc::UnboundedReceiver<Task>,
    block: usize,
    config: PutOptions,
) -> Result<(), String> {
    let mut worker = Worker {
        slots: Vec::new(),
        scratch: vec![0; block * 2],
        client,
        block,
        config,
        clock: SystemClock::new(),
    };
    while let Some(task) = tasks.recv().await {
        let outcome = worker.request(task).await.map_err(|e| e.to_string())?;
        say(&json!(outcome))?;
    }
    Ok(())
}

struct Worker {
    client: Client,
    /// Registered blocks for reads and puts.
    slots: Vec<SliceMut<TransportSet>>,
    /// Read bytes and expected bytes.
    scratch: Vec<u8>,
    block: usize,
    config: PutOptions,
    clock: SystemClock,
}

impl Worker {
    /// Matches the prefix, gets it, and puts the rest.
    async fn request(&mut self, task: Task) -> Result<Outcome, Error> {
        let keys: Vec<Vec<u8>> = task.ids.iter().map(|&id| key(id)).collect();
        let mut outcome = Outcome { index: task.index, blocks: keys.len() as u64, ..Outcome::default() };
        let before = self.clock.now();
        let there = match self.client.batch_exist(&keys).await {
            Ok(answers) => answers.into_iter().take_while(|a| matches!(a, Ok(true))).count(),
            Err(error) => {
                outcome.failed("match", &error);
                0
            }
        };
        outcome.match_us = Some(self.us_since(before));
        let hit = self.get(&task.ids[..there], &keys[..there], &mut outcome).await?;
        self.put(&task.ids[hit..], &keys[hit..], &mut outcome).await?;
        Ok(outcome)
    }

    /// Returns how many blocks were read, from the first on, until one failed.
    async fn get(&mut self, ids: &[u64], keys: &[Vec<u8>], outcome: &mut Outcome) -> Result<usize, Error> {
        if ids.is_empty() {
            return Ok(0);
        }
        let slots = self.take(ids.len())?;
        let (before, lent) = (self.clock.now(), self.client.status().disk_reads());
        let batch = self.client.batch_get_into(keys.iter().zip(slots).collect()).await;
        outcome.get_us = Some(self.us_since(before));
        outcome.from_disk = self.client.status().disk_reads() - lent;
        if let Err(error) = batch.located {
            outcome.failed("get", &error);
        }
        let mut unbroken = true;
        for (&id, read) in ids.iter().zip(batch.reads) {
            let slot = read.into;
            match read.result {
                Ok(Some(len)) if len == self.block && self.is_right(id, &slot)? => {
                    outcome.hit += u64::from(unbroken)
                }
                Ok(Some(_)) => outcome.mismatches += 1,
                Ok(None) => {
                    outcome.lost += 1;
                    unbroken = false;
                }
                Err(error) => {
                    // A response after its lease counts as a miss.
                    match error.kind() {
                        ErrorKind::Expired => outcome.lost += 1,
                        ErrorKind::Unavailable => outcome.unreachable += 1,
                        _ => outcome.failed("get", &error),
                    }
                    unbroken = false;
                }
            }
            self.slots.push(slot);
        }
        Ok(outcome.hit as usize)
    }

    async fn put(&mut self, ids: &[u64], keys: &[Vec<u8>], outcome: &mut Outcome) -> Result<(), Error> {
        if ids.is_empty() {
            return Ok(());
        }
        let mut items = Vec::with_capacity(ids.len());
        for ((&id, key), mut slot) in ids.iter().zip(keys).zip(self.take(ids.len())?) {
            payload(id, &mut self.scratch[..self.block]);
            slot.copy_from(0, &self.scratch[..self.block])?;
            items.push((key, slot.into_shared()));
        }
        let before = self.clock.now();
        let results = self.client.batch_put(&items, &self.config).await;
        outcome.put_us = Some(self.us_since(before));
        match results {
            Ok(results) => results.iter().for_each(|result| match result {
                Ok(PutOutcome::Stored) => outcome.put += 1,
                Ok(PutOutcome::Existed) => {
                    outcome.put += 1;
                    outcome.existed += 1;
                }
                Err(error) if error.kind() == ErrorKind::NoSpace => outcome.out_of_space += 1,
                Err(error) if error.kind() == ErrorKind::Unavailable => outcome.unreachable += 1,
                Err(error) => outcome.failed("put", error),
            }),
            Err(error) => outcome.failed("put", &error),
        }
        // A slot that is still in use is dropped; a new one replaces it when needed.
        self.slots.extend(items.into_iter().filter_map(|(_, slot)| slot.exclusive().ok()));
        Ok(())
    }

    /// Compares a block with the bytes that its id requires.
    fn is_right(&mut self, id: u64, slot: &SliceMut<TransportSet>) -> Result<bool, Error> {
        let (got, expected) = self.scratch.split_at_mut(self.block);
        slot.copy_to(0, got)?;
        payload(id, expected);
        Ok(got == expected)
    }

    fn take(&mut self, count: usize) -> Result<Vec<SliceMut<TransportSet>>, Error> {
        while self.slots.len() < count {
            let region = self.client.memory().alloc(self.block)?;
            let slot = region.exclusive().map_err(|_| Error::internal("a new region has another handle"))?;
            self.slots.push(slot);
        }
        Ok(self.slots.split_off(self.slots.len() - count))
    }

    fn us_since(&self, before: mooncake_core::clock::Moment) -> u64 {
        u64::try_from(self.clock.now().since(before).as_micros()).unwrap_or(u64::MAX)
    }
}

impl Outcome {
    fn failed(&mut self, what: &str, error: &Error) {
        *self.failures.entry(format!("{what}: {error}")).or_default() += 1;
    }
}
