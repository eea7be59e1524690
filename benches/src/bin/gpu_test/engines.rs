//! Engines and stores with device memory.

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::memory::{HostMemory, MemorySource, MemorySpan, copy_memory};
use mooncake_core::{Result, clock::Rng};
use mooncake_engine::{TransferEngine, TransportOptions};
use mooncake_nvlink::testkit::{device, filled};
use mooncake_nvlink::{DeviceMemory, NvlinkConfig, Stream};
use mooncake_store::client::{Client, ReadInto};
use mooncake_store::master::{Master, MasterOptions};
use mooncake_tcp::TcpConfig;
use mooncake_transport::engine::LocalCopies;
use tokio::runtime::Runtime;

use crate::machine::Machine;

const ROUNDS: u8 = 50;
/// Longest wait of a stream for a transfer.
const LIMIT: Duration = Duration::from_secs(60);

type PartResult = std::result::Result<String, String>;

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("cannot start a runtime")
}

fn to_text(error: mooncake_core::Error) -> String {
    error.to_string()
}

fn tcp() -> TransportOptions {
    let tcp = TcpConfig { data_host: "127.0.0.1".into(), ..TcpConfig::default() };
    TransportOptions { tcp: Some(tcp), ..TransportOptions::default() }
}

async fn engine(wires: TransportOptions) -> Result<TransferEngine> {
    TransferEngine::builder()
        .name("127.0.0.1")
        .transports(wires)
        .local_copies(LocalCopies::Never)
        .start()
        .await
}

/// Returns bytes that are specific to the seed.
fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    Rng::seeded(seed).fill(&mut bytes);
    bytes
}

fn to_device(memory: &DeviceMemory, bytes: &mut [u8]) -> Result<()> {
    let from = MemorySpan::new(std::ptr::NonNull::from(&mut *bytes).cast(), bytes.len());
    // SAFETY: both have this length, and no other user.
    unsafe { copy_memory(from, memory.span()) }
}

/// Lets fillings of memory on a stream race with transfers of it, over NVLink and over TCP. The
/// other node must see each filling whole.
pub(crate) fn order(machine: Machine) -> PartResult {
    let nvlink = TransportOptions { nvlink: Some(NvlinkConfig::default()), ..TransportOptions::default() };
    let len = machine.bytes(64 << 20);
    let runtime = runtime();
    for (name, wires) in [("nvlink", nvlink), ("tcp", tcp())] {
        runtime.block_on(race(wires, len)).map_err(|error| format!("over {name}: {error}"))?;
    }
    Ok(format!("   {ROUNDS} fillings of {} MiB raced with a transfer over nvlink, and over tcp", len >> 20))
}

async fn race(wires: TransportOptions, len: usize) -> std::result::Result<(), String> {
    let (owner, user) =
        (engine(wires.clone()).await.map_err(to_text)?, engine(wires).await.map_err(to_text)?);
    let (open, memory) = (filled(&device(0), len, 0), filled(&device(0), len, 0));
    let region = owner.register(open).await.map_err(to_text)?;
    let source = user.register_local(memory.clone()).map_err(to_text)?;
    let target = user.open(owner.name()).await.map_err(to_text)?;
    let stream = Stream::new(&device(0)).map_err(to_text)?;
    for round in 1..=ROUNDS {
        let (engine, target, at) = (user.clone(), target.clone(), region.addr());
        let slice = source.slice(0..len).map_err(to_text)?;
        let write = async move {
            let deadline = engine.clock().now().after(Duration::from_secs(30));
            engine.write(&target, at, slice, Some(deadline)).await.0
        };
        // SAFETY: memory and stream live until the end, and the memory is used in the order of the
        // stream.
        unsafe {
            stream.fill(memory.span(), round).map_err(to_text)?;
            user.after_stream(stream.handle(), LIMIT, write).map_err(to_text)?;
            stream.fill(memory.span(), 0xff).map_err(to_text)?;
        }
        tokio::task::block_in_place(|| stream.wait()).map_err(to_text)?;
        let mut bytes = vec![0; len];
        region.slice(0..len).and_then(|all| all.copy_to(0, &mut bytes)).map_err(to_text)?;
        if let Some(at) = bytes.iter().position(|byte| *byte != round) {
            return Err(format!("in round {round} byte {at} is {}", bytes[at]));
        }
    }
    tokio::task::block_in_place(|| user.settle_streams()).map_err(to_text)
}

/// Transfers from one device to host memory over TCP, and back to another device.
pub(crate) fn over_tcp(machine: Machine) -> PartResult {
    let len = machine.bytes(256 << 20) + 4097;
    runtime().block_on(there_and_back(machine, len)).map_err(to_text)?;
    Ok(format!("   {len} bytes, compared"))
}

async fn there_and_back(machine: Machine, len: usize) -> Result<()> {
    let (owner, user) = (engine(tcp()).await?, engine(tcp()).await?);
    let region = owner.register(Arc::new(HostMemory::new(len)?)).await?;
    let target = user.open(owner.name()).await?;
    let (from, to) = (filled(&device(0), len, 0), filled(&device(machine.devices - 1), len, 0));
    let mut bytes = pattern(1, len);
    to_device(&from, &mut bytes)?;
    let local = user.register_local(from)?.slice(0..len)?;
    user.write(&target, region.addr(), local, None).await.0?;
    let mut got = vec![0; len];
    region.slice(0..len)?.copy_to(0, &mut got)?;
    assert!(got == bytes, "the received bytes differ from the sent ones");
    let local = user.register_local(to)?.exclusive().expect("the region has one handle");
    let (result, local) = user.read(&target, region.addr(), local, None).await;
    result?;
    got.fill(0);
    local.copy_to(0, &mut got)?;
    assert!(got == bytes, "the returned bytes differ from the sent ones");
    Ok(())
}

/// Puts and gets values from and to device memory, by two clients of a cluster.
pub(crate) fn store(machine: Machine) -> PartResult {
    let len = machine.bytes(64 << 20) - 3;
    runtime().block_on(put_and_get(machine, len)).map_err(to_text)?;
    Ok(format!("   values of 1 byte to {len} bytes, inside a process and over TCP, compared"))
}

async fn put_and_get(machine: Machine, longest: usize) -> Result<()> {
    for wires in [None, Some(tcp())] {
        let master = Arc::new(Master::new(MasterOptions::default())?);
        let member = || {
            let member = Client::builder().master(master.clone()).segment(256 << 20).checksum(true);
            match &wires {
                Some(wires) => {
                    member.transports(wires.clone()).copy_in_process(false).local_hostname("127.0.0.1")
                }
                None => member,
            }
        };
        let (writer, reader) = (member().connect().await?, member().connect().await?);
        for (number, len) in [1, 5000, longest].into_iter().enumerate() {
            let (key, mut bytes) = (format!("value {number}"), pattern(number as u64, len));
            let (from, to) = (filled(&device(0), len, 0), filled(&device(machine.devices - 1), len, 0));
            to_device(&from, &mut bytes)?;
            let from = writer.memory().register(from)?.slice(0..len)?;
            writer.put(&key, &from).await?;
            let into = reader.memory().register(to)?.exclusive().expect("the region has one handle");
            let ReadInto { result: found, into, .. } = reader.get_into(&key, into).await;
            assert_eq!(found?, Some(len));
            let mut got = vec![0; len];
            into.copy_to(0, &mut got)?;
            assert!(got == bytes, "{key}: the read value differs from the written one");
        }
        writer.close().await?;
        reader.close().await?;
    }
    Ok(())
}
