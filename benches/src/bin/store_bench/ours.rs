//! This project: a master and an owner in processes of their own, and the requester in this one.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use mooncake_benches::local_master;
use mooncake_benches::peer::Result;
use mooncake_core::Clock;
use mooncake_core::clock::SystemClock;
use mooncake_store::client::{Client, PutOptions, ReadInto};
use mooncake_store::server::MasterServer;
use mooncake_store::transport_set::TransportSet;
use mooncake_transport::{Slice, SliceMut};
use tokio::runtime::{Builder, Runtime};

use crate::child::first_line;
use crate::table::{Cell, Way};

/// Bytes of registered memory of the requester; the largest value fits.
const REGISTERED: usize = 16 << 20;

/// Runs the process of the master.
pub(crate) fn master(lease_ms: u64) -> Result<()> {
    let runtime =
        Builder::new_multi_thread().worker_threads(2).enable_all().build().map_err(|e| e.to_string())?;
    runtime.block_on(async {
        let mut config = local_master();
        config.options.lease_ttl = Duration::from_millis(lease_ms);
        let server = MasterServer::start(config).await.map_err(|e| e.to_string())?;
        println!("{}", server.addresses().rpc);
        std::future::pending::<Result<()>>().await
    })
}

/// Runs the process of a client that only provides memory.
pub(crate) fn owner(master: &str, segment: u64) -> Result<()> {
    let runtime = Builder::new_current_thread().enable_all().build().map_err(|e| e.to_string())?;
    runtime.block_on(async {
        let client = join(master, segment, true).await?;
        println!("{}", client.hostname());
        std::future::pending::<Result<()>>().await
    })
}

async fn join(master: &str, segment: u64, share_memory: bool) -> Result<Client> {
    Client::builder()
        .master(master)
        .local_hostname("127.0.0.1")
        .advertise(std::net::Ipv4Addr::LOCALHOST.into())
        .segment(segment)
        .share_memory(share_memory)
        .local_buffer(0)
        .connect()
        .await
        .map_err(|e| e.to_string())
}

/// Requesters, one for each transport, and the processes of their cluster.
pub(crate) struct Ours {
    tcp: Requester,
    same_host: Requester,
    runtime: Runtime,
    children: [Child; 2],
}

struct Requester {
    client: Client,
    slice: Option<SliceMut<TransportSet>>,
    clock: SystemClock,
}

impl Ours {
    pub(crate) fn start() -> Result<Self> {
        let program = std::env::current_exe().map_err(|e| e.to_string())?;
        let start = |words: &[&str]| {
            let mut child = Command::new(&program)
                .args(words)
                .stdout(Stdio::piped())
                .spawn()
                .map_err(|e| format!("cannot start {words:?}: {e}"))?;
            first_line(&mut child).map(|line| (child, line))
        };
        let (master, address) = start(&["--role", "master"])?;
        let (owner, _) = start(&["--role", "owner", &address])?;
        let runtime = Builder::new_current_thread().enable_all().build().map_err(|e| e.to_string())?;
        let requester = |share_memory| -> Result<Requester> {
            let client = runtime.block_on(join(&address, 0, share_memory))?;
            let region = client.memory().alloc(REGISTERED).map_err(|e| e.to_string())?;
            let slice = region.exclusive().map_err(|_| "a new region has another handle")?;
            Ok(Requester { client, slice: Some(slice), clock: SystemClock::new() })
        };
        let (tcp, same_host) = (requester(false)?, requester(true)?);
        Ok(Self { tcp, same_host, runtime, children: [master, owner] })
    }

    /// Returns the times of `count` calls in microseconds.
    pub(crate) fn times(&mut self, way: Way, cell: Cell, prefix: &str, count: usize) -> Result<Vec<f64>> {
        let prefix = format!("{way:?}/{prefix}");
        let requester = match way {
            Way::Tcp => &mut self.tcp,
            Way::SameHost => &mut self.same_host,
        };
        self.runtime.block_on(requester.times(cell, &prefix, count))
    }

    pub(crate) fn clear(&self) -> Result<()> {
        self.runtime.block_on(self.tcp.client.remove_all(true)).map(drop).map_err(|e| e.to_string())
    }

    /// Returns the bytes of the requesters' registered memory.
    pub(crate) fn registered(&self) -> u64 {
        2 * REGISTERED as u64
    }

    /// Returns the peak resident size of this process without its registered memory, the mapped
    /// memory of the owner, and `other` bytes of other memory.
    pub(crate) fn peak_beyond_registered(&self, other: u64) -> Result<u64> {
        let status = std::fs::read_to_string("/proc/self/status").map_err(|e| e.to_string())?;
        let kib = |name: &str| -> Result<u64> {
            let line = status
                .lines()
                .find_map(|line| line.strip_prefix(name))
                .ok_or("a line of /proc/self/status is missing")?;
            Ok(line
                .split_whitespace()
                .next()
                .and_then(|n| n.parse().ok())
                .ok_or("a line of /proc/self/status is malformed")?)
        };
        let own = (kib("VmHWM:")? - kib("RssShmem:")?) << 10;
        Ok(own.saturating_sub(self.registered() + other))
    }
}

impl Requester {
    async fn times(&mut self, cell: Cell, prefix: &str, count: usize) -> Result<Vec<f64>> {
        let keys: Vec<String> = (0..count).map(|i| format!("{prefix}{i}")).collect();
        let whole = self.slice.take().ok_or("the registered memory was lost")?;
        let (times, whole) = async {
            match cell {
                Cell::Put(size) => self.puts(&keys, whole, size).await,
                Cell::Get(size) => self.gets(&keys, whole, size).await,
                Cell::Exist => {
                    let mut times = Vec::with_capacity(count);
                    for key in &keys {
                        let before = self.clock.now();
                        self.client.exist(key).await.map_err(|e| e.to_string())?;
                        times.push(self.us_since(before));
                    }
                    Ok((times, whole))
                }
                Cell::BatchExist(many) => {
                    let keys: Vec<String> = (0..many).map(|i| format!("{prefix}{i}")).collect();
                    let mut times = Vec::with_capacity(count);
                    for _ in 0..count {
                        let before = self.clock.now();
                        self.client.batch_exist(&keys).await.map_err(|e| e.to_string())?;
                        times.push(self.us_since(before));
                    }
                    Ok::<_, String>((times, whole))
                }
            }
        }
        .await?;
        self.slice = Some(whole);
        Ok(times)
    }

    async fn puts(&self, keys: &[String], whole: SliceMut<TransportSet>, size: usize) -> Result<Timed> {
        let shared: Slice<TransportSet> = whole.into_shared();
        let value = shared.slice(0..size).map_err(|e| e.to_string())?;
        let config = PutOptions::default();
        let mut times = Vec::with_capacity(keys.len());
        for key in keys {
            let before = self.clock.now();
            self.client.put_with(key, &value, &config).await.map_err(|e| e.to_string())?;
            times.push(self.us_since(before));
        }
        drop(value);
        shared
            .exclusive()
            .map(|whole| (times, whole))
            .map_err(|_| "a completed put still holds its value".into())
    }

    async fn gets(&self, keys: &[String], whole: SliceMut<TransportSet>, size: usize) -> Result<Timed> {
        let mut times = Vec::with_capacity(keys.len());
        let mut whole = whole;
        for key in keys {
            let before = self.clock.now();
            let ReadInto { result, into: back, .. } = self.client.get_into(key, whole).await;
            times.push(self.us_since(before));
            whole = back;
            match result {
                Ok(Some(len)) if len == size => {}
                other => return Err(format!("get of {key}: {other:?}")),
            }
        }
        Ok((times, whole))
    }

    fn us_since(&self, before: mooncake_core::clock::Moment) -> f64 {
        self.clock.now().since(before).as_secs_f64() * 1e6
    }
}

type Timed = (Vec<f64>, SliceMut<TransportSet>);

impl Drop for Ours {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
