//! Leases that expire in the middle of a read: the bytes do not count, whatever the form of the
//! read. While the read is stalled, its object is removed, the memory is overwritten, and the key
//! gets another value. Reads that renew their leases and locate the object again may return it.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use bytes::Bytes;
use mooncake_core::clock::{Clock, SystemClock};
use mooncake_core::{ErrorCode, Result};
use mooncake_shm::ShmConfig;
use mooncake_store::client::{Client, Located, PutOptions, PutOutcome, RangeOutcome, RangeRead, ReadInto};
use mooncake_store::local::{
    LocalClient, LocalConfig, LocalRange, LocalRead, LocalServer, LocalServerConfig,
};
use mooncake_store::transport_set::{TransportOptions, TransportSet};
use mooncake_tcp::TcpConfig;
use mooncake_transport::SliceMut;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc, oneshot};

use crate::cluster::{
    LONGEST, PATIENCE, argument, builder, eventually, master, master_address, start, until_end_of_input,
};
use crate::process::{Process, free_port};

const LEASE: &str = "--default_kv_lease_ttl=300";
const LEASE_TIME: Duration = Duration::from_millis(300);

/// Returns a value whose groups of eight bytes are all equal and depend on key and version.
fn striped(key: u64, version: u64, len: usize) -> Bytes {
    (key << 32 | version).to_le_bytes().repeat(len / 8).into()
}

fn is_striped(key: u64, bytes: &[u8]) -> bool {
    let (front, back) = (&bytes[..bytes.len() - 8], &bytes[8..]);
    front == back && u64::from_le_bytes(bytes[..8].try_into().unwrap()) >> 32 == key
}

fn version_of(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes[..8].try_into().unwrap()) & u64::from(u32::MAX)
}

/// Relay in front of a data port. The responses stall in the middle, once for each request.
struct Proxy {
    /// Makes responses stall.
    on: AtomicBool,
    armed: AtomicBool,
    go_on: Semaphore,
}

impl Proxy {
    /// Starts a relay from `from` to the same port of `to`, and a channel that reports each stall.
    async fn start(from: Ipv4Addr, to: Ipv4Addr, port: u16) -> (Arc<Self>, mpsc::UnboundedReceiver<()>) {
        let proxy = Self { on: false.into(), armed: false.into(), go_on: Semaphore::new(0) };
        let proxy = Arc::new(proxy);
        let (tell, stalls) = mpsc::unbounded_channel();
        let listener = TcpListener::bind((from, port)).await.unwrap();
        let ours = proxy.clone();
        tokio::spawn(async move {
            while let Ok((reader, _)) = listener.accept().await {
                let Ok(owner) = TcpStream::connect((to, port)).await else { continue };
                let ((from_reader, to_reader), (from_owner, to_owner)) =
                    (reader.into_split(), owner.into_split());
                tokio::spawn(ours.clone().asked(from_reader, to_owner));
                tokio::spawn(ours.clone().answered(from_owner, to_reader, tell.clone()));
            }
        });
        (proxy, stalls)
    }

    async fn asked(
        self: Arc<Self>,
        mut from: impl AsyncReadExt + Unpin,
        mut to: impl AsyncWriteExt + Unpin,
    ) -> std::io::Result<()> {
        let mut buffer = vec![0; 64 << 10];
        loop {
            let n = from.read(&mut buffer).await?;
            self.armed.store(true, SeqCst);
            to.write_all(&buffer[..n]).await?;
            if n == 0 {
                return to.shutdown().await;
            }
        }
    }

    async fn answered(
        self: Arc<Self>,
        mut from: impl AsyncReadExt + Unpin,
        mut to: impl AsyncWriteExt + Unpin,
        tell: mpsc::UnboundedSender<()>,
    ) -> std::io::Result<()> {
        let mut buffer = vec![0; 64 << 10];
        loop {
            let n = from.read(&mut buffer).await?;
            let (first, rest) = buffer[..n].split_at(n / 2);
            to.write_all(first).await?;
            if n > 1024 && self.on.load(SeqCst) && self.armed.swap(false, SeqCst) {
                let _ = tell.send(());
                self.go_on.acquire().await.unwrap().forget();
            }
            to.write_all(rest).await?;
            if n == 0 {
                return to.shutdown().await;
            }
        }
    }
}

/// Process of a client whose data port is behind a relay.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "child process of other tests"]
async fn owner() {
    let Some(master) = master_address() else { return };
    let port: u16 = argument("TEST_DATA_PORT").unwrap();
    let (bind, data_host) = (Some(Ipv4Addr::LOCALHOST.into()), "127.0.0.2".into());
    let tcp = TcpConfig { bind, data_host, ports: port..=port, ..TcpConfig::default() };
    let wires =
        TransportOptions { tcp: Some(tcp), shm: Some(ShmConfig::default()), ..TransportOptions::default() };
    let client =
        builder(&master, argument("TEST_SEGMENT").unwrap()).transports(wires).connect().await.unwrap();
    println!("\nready");
    let _ = until_end_of_input().await;
    client.close().await.unwrap();
}

/// Cluster of a master, an owner of memory, and a client that replaces the objects there.
struct Stage {
    master: u16,
    data: u16,
    writer: Client,
    /// Length of values.
    len: usize,
    /// Number of objects that fill the segment.
    fill: u64,
    version: AtomicU64,
    /// Number of leases that lived longer than granted.
    renewed: AtomicU64,
    _processes: [Process; 2],
}

impl Stage {
    async fn set(len: usize, fill: u64) -> Self {
        let (port, data) = (free_port(), free_port());
        // The values that are stored last must stay.
        let server = master(port, &[LEASE, "--eviction_policy=lru"]);
        // The writer has shared memory of its own, which needs no port.
        let writer = builder(&format!("127.0.0.1:{port}"), 0).timeout(LONGEST).connect().await.unwrap();
        let arguments =
            [("TEST_DATA_PORT", data.to_string()), ("TEST_SEGMENT", (fill * len as u64).to_string())];
        let mut owner = start("leases::owner", port, &arguments);
        assert!(owner.lines_after("ready").next().is_some());
        Self {
            master: port,
            data,
            writer,
            len,
            fill,
            version: AtomicU64::new(1),
            renewed: AtomicU64::new(0),
            _processes: [server, owner],
        }
    }

    /// Puts a new value for each of these keys, with few requests.
    async fn put(&self, keys: impl Iterator<Item = u64>) {
        let mut items: Vec<_> = keys
            .map(|key| (format!("k{key}"), striped(key, self.version.fetch_add(1, SeqCst), self.len)))
            .collect();
        let mut last = String::new();
        let stored = tokio::time::timeout(PATIENCE, async {
            while !items.is_empty() {
                let some = &items[..items.len().min(self.fill as usize / 4)];
                let outcomes = self.writer.batch_put(some, &PutOptions::new()).await;
                last = format!("{}: {outcomes:?}", some[0].0);
                let mut outcomes = outcomes.unwrap_or_default().into_iter();
                items.retain(|_| !matches!(outcomes.next(), Some(Ok(PutOutcome::Stored))));
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        assert!(stored.await.is_ok(), "{} values are not stored. last={last}", items.len());
    }

    /// Removes these keys, overwrites all memory, and puts other values. The keys of a reader that
    /// renews its leases are removed by force.
    async fn replace(&self, keys: u64, by_force: bool) {
        if by_force {
            // The wait exceeds the lease with which the reader began.
            tokio::time::sleep(3 * LEASE_TIME).await;
            let refused =
                self.writer.remove("k0", false).await.is_err_and(|e| e.code() == ErrorCode::ObjectHasLease);
            self.renewed.fetch_add(refused.into(), SeqCst);
        }
        for key in 0..keys {
            eventually("the key is removed", PATIENCE, async || {
                let removed = self.writer.remove(format!("k{key}"), by_force).await;
                matches!(removed, Ok(was_there) if was_there || by_force)
            })
            .await;
        }
        if by_force {
            // The memory is free when the last lease has ended.
            tokio::time::sleep(LEASE_TIME).await;
        }
        let others = 1000 + self.version.load(SeqCst) * 100;
        self.put(others..others + 2 * self.fill).await;
        self.put(0..keys).await;
    }
}

/// Form of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Get,
    BatchGet,
    GetInto,
    BatchGetInto,
    /// Located, and then read in two parts.
    Ranges,
    /// Located and read once before with the same lease.
    Session,
}

const FORMS: [Form; 6] =
    [Form::Get, Form::BatchGet, Form::GetInto, Form::BatchGetInto, Form::Ranges, Form::Session];
impl Form {
    /// Returns whether the read locates its object itself, and so may locate it again.
    fn locates(self) -> bool {
        !matches!(self, Self::Ranges | Self::Session)
    }
}

/// Number of keys of a batch.
const KEYS: u64 = 4;

fn names(keys: u64) -> Vec<String> {
    (0..keys).map(|key| format!("k{key}")).collect()
}

type Values = Vec<Result<Option<Bytes>>>;
type Slice = SliceMut<TransportSet>;

fn owned(read: Result<Option<usize>>, into: &Slice) -> Result<Option<Bytes>> {
    let mut bytes = vec![0; into.len()];
    into.copy_to(0, &mut bytes).unwrap();
    Ok(read?.map(|len| Bytes::from(bytes).slice(..len)))
}

fn halves(len: usize, memory: Slice) -> [(u64, Slice); 2] {
    let (front, back) = memory.split_at(len / 2).unwrap();
    [(0, front), (len as u64 / 2, back)]
}

fn part(object: &Located, offset: u64, into: Slice) -> RangeRead<TransportSet> {
    RangeRead { object: object.clone(), offset, into }
}

/// Joins all parts, or returns the reason why one is missing.
fn joined(parts: impl Iterator<Item = Result<Option<Bytes>>>) -> Result<Option<Bytes>> {
    let parts: Result<Vec<_>> = parts.collect();
    let parts: Option<Vec<_>> = parts?.into_iter().collect();
    Ok(parts.map(|parts| parts.concat().into()))
}

/// Reads with an ordinary client. `first` is called before the read that counts.
async fn read(client: &Client, form: Form, len: usize, first: impl FnOnce()) -> Values {
    let memory = || client.memory().alloc(len).unwrap().exclusive().unwrap();
    match form {
        Form::Get => {
            first();
            vec![client.get("k0").await]
        }
        Form::BatchGet => {
            first();
            client.batch_get(&names(KEYS)).await.unwrap()
        }
        Form::GetInto => {
            let into = memory();
            first();
            let ReadInto { result: read, into, .. } = client.get_into("k0", into).await;
            vec![owned(read, &into)]
        }
        Form::BatchGetInto => {
            let items: Vec<_> = names(KEYS).into_iter().map(|key| (key, memory())).collect();
            first();
            let batch = client.batch_get_into(items).await;
            batch.located.unwrap();
            batch.reads.into_iter().map(|read| owned(read.result, &read.into)).collect()
        }
        Form::Ranges | Form::Session => {
            let Some(object) = client.ranges().locate(&["k0"]).await.unwrap().remove(0).unwrap() else {
                return vec![Ok(None)];
            };
            if form == Form::Session {
                let ranges = halves(len, memory());
                client.ranges().read(ranges.map(|(offset, into)| part(&object, offset, into)).into()).await;
            }
            let ranges = halves(len, memory());
            first();
            let read =
                client.ranges().read(ranges.map(|(offset, into)| part(&object, offset, into)).into()).await;
            let part = |read: RangeOutcome<_>| owned(read.result.map(|()| Some(len / 2)), &read.into);
            vec![joined(read.into_iter().map(part))]
        }
    }
}

/// Reads in the same way with a shared client.
async fn read_lightly(client: &LocalClient, form: Form, len: usize, first: impl FnOnce()) -> Values {
    let back = |LocalRead { result, into }: LocalRead<Option<usize>, _>| match into {
        Some(into) => owned(result, &into),
        None => result.map(|_| None),
    };
    let mut memory = Vec::new();
    for _ in 0..KEYS + 1 {
        memory.push(client.alloc_registered(len).await.unwrap().exclusive().unwrap());
    }
    let into = memory.pop().unwrap();
    match form {
        Form::Get => {
            first();
            vec![client.get("k0").await]
        }
        Form::BatchGet => {
            first();
            client.batch_get(&names(KEYS)).await.unwrap()
        }
        Form::GetInto => {
            first();
            vec![back(client.get_into("k0", into).await)]
        }
        Form::BatchGetInto => {
            let items = names(KEYS).into_iter().zip(memory).collect();
            first();
            client.batch_get_into(items).await.into_iter().map(back).collect()
        }
        Form::Ranges | Form::Session => {
            let object = client.locate(&["k0"]).await.unwrap().remove(0).unwrap().unwrap();
            let part = |(offset, into)| LocalRange { object: object.clone(), offset, into };
            if form == Form::Session {
                client.read_ranges(halves(len, memory.remove(0)).map(part).into()).await;
            }
            first();
            let read = client.read_ranges(halves(len, into).map(part).into()).await;
            let half = |read: LocalRead<(), _>| {
                back(LocalRead { result: read.result.map(|()| Some(len / 2)), into: read.into })
            };
            vec![joined(read.into_iter().map(half))]
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_that_runs_out_in_the_middle_of_a_read() {
    let stage = Stage::set(256 << 10, 16).await;
    let (proxy, mut stalls) =
        Proxy::start(Ipv4Addr::new(127, 0, 0, 2), Ipv4Addr::LOCALHOST, stage.data).await;
    // The client must wait for a stalled connection.
    let tcp = TcpConfig { probe_after: PATIENCE, ..TcpConfig::default() };
    let wires = TransportOptions { tcp: Some(tcp), ..TransportOptions::default() };
    let reader = builder(&format!("127.0.0.1:{}", stage.master), 0).transports(wires).share_memory(false);
    let reader = reader.timeout(LONGEST).connect().await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("owner.sock");
    let config = LocalServerConfig { path: path.clone(), ..LocalServerConfig::default() };
    let server = LocalServer::start(reader.clone(), config).unwrap();
    let config =
        LocalConfig { timeout: LONGEST, buffer: 16 << 20, ..LocalConfig::at(path.to_str().unwrap()) };
    let light = LocalClient::connect(config).await.unwrap();
    stage.put(0..KEYS).await;
    for (form, lightly) in FORMS.into_iter().flat_map(|form| [(form, false), (form, true)]) {
        let len = stage.len;
        let read = async |first: &dyn Fn()| match lightly {
            false => read(&reader, form, len, first).await,
            true => read_lightly(&light, form, len, first).await,
        };
        let mut before = Vec::new();
        for (key, value) in read(&|| {}).await.into_iter().enumerate() {
            let value = value.unwrap().unwrap();
            assert!(is_striped(key as u64, &value), "{form:?} when nothing is slow");
            before.push(version_of(&value));
        }
        let on = || proxy.on.store(true, SeqCst);
        let (clock, times) = (SystemClock::new(), AtomicU64::new(0));
        let (tell, mut ended) = oneshot::channel();
        // A replacement that has begun is completed: the next form needs the objects.
        let replaced = async {
            loop {
                tokio::select! {
                    biased;
                    Some(()) = stalls.recv() => {
                        times.fetch_add(1, SeqCst);
                        stage.replace(KEYS, true).await;
                        proxy.go_on.add_permits(1);
                    }
                    _ = &mut ended => return,
                }
            }
        };
        let begun = clock.now();
        let reading = async {
            let values = read(&on).await;
            proxy.on.store(false, SeqCst);
            let _ = tell.send(());
            (values, clock.now().since(begun))
        };
        let ((values, took), ()) = tokio::join!(reading, replaced);
        let times = times.into_inner();
        // An earlier value, or bytes of other values, would be wrong.
        let is_right = |(key, value): (usize, &Result<Option<Bytes>>)| match value {
            Err(error) => error.code() == ErrorCode::LeaseExpired,
            Ok(None) => form.locates(),
            Ok(Some(bytes)) => {
                form.locates() && is_striped(key as u64, bytes) && version_of(bytes) > before[key]
            }
        };
        // The first bytes tell the version of a value.
        let shown: Vec<_> = values
            .iter()
            .map(|value| value.as_ref().map(|value| value.as_ref().map(|bytes| bytes.slice(..8))))
            .collect();
        assert!(
            times > 0 && values.iter().enumerate().all(is_right),
            "{form:?}, shared client {lightly}: {shown:?} after {times} stalls and {took:?}"
        );
        println!("{form:?}, shared client {lightly}: {shown:?} after {times} stalls, {took:?}");
    }
    // A busy machine may be too late now and then.
    let renewed = stage.renewed.load(SeqCst);
    assert!(renewed > 0, "no lease was renewed");
    println!("{renewed} leases renewed until the object was gone");
    drop(light);
    server.stop().await;
}

/// Process of a reader: reads in every form, again and again, through shared memory.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "child process of other tests"]
async fn reader() {
    let Some(master) = master_address() else { return };
    let len = argument("TEST_LEN").unwrap();
    let client = builder(&master, 0).timeout(LONGEST).local_buffer(4 * len as u64).connect().await.unwrap();
    println!("\n> ready");
    let leave = until_end_of_input();
    let (mut hits, mut misses, mut expired) = (0, 0, 0);
    while !leave.is_finished() {
        // A session that has read a part never continues with another value, so it detects bytes
        // that arrive too late.
        for form in FORMS {
            for (key, value) in read(&client, form, len, || {}).await.into_iter().enumerate() {
                match value {
                    Ok(Some(bytes)) if is_striped(key as u64, &bytes) => hits += 1,
                    Ok(Some(_)) => println!("> wrong bytes by {form:?}"),
                    Ok(None) => misses += 1,
                    Err(error) if error.code() == ErrorCode::LeaseExpired => {
                        expired += 1;
                        println!("> expired");
                    }
                    Err(error) => println!("> {error}"),
                }
            }
        }
    }
    client.close().await.unwrap();
    println!("> {hits} hits, {misses} misses, {expired} expired");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_in_shared_memory_that_is_stopped_until_its_lease_is_over() {
    let stage = Stage::set(8 << 20, 4).await;
    // A reader that was stopped for long loses its shared memory, and goes on over TCP.
    let _relay = Proxy::start(Ipv4Addr::new(127, 0, 0, 2), Ipv4Addr::LOCALHOST, stage.data).await;
    stage.put(0..1).await;
    let mut reader = start("leases::reader", stage.master, &[("TEST_LEN", stage.len.to_string())]);
    let mut said = reader.lines_after("> ");
    assert_eq!(said.next().as_deref(), Some("ready"));
    let (mut expired, mut rounds) = (0, 0);
    while rounds < 8 || (expired == 0 && rounds < 100) {
        rounds += 1;
        reader.freeze();
        stage.replace(1, false).await;
        reader.thaw();
        // The reader completes a read before it is stopped again, at any point of a read.
        tokio::time::sleep(Duration::from_millis(50 + rounds * 7 % 20)).await;
        for line in said.arrived() {
            assert_eq!(line, "expired");
            expired += 1;
        }
    }
    drop(reader.0.stdin.take());
    let rest: Vec<String> = said.collect();
    assert!(reader.ended().success(), "{rest:?}");
    let (figures, before) = rest.split_last().unwrap();
    assert!(before.iter().all(|line| line == "expired") && figures.contains(" hits"), "{rest:?}");
    println!("stopped {rounds} times: {figures}, no wrong byte");
    assert!(expired + before.len() > 0, "{figures}");
}
