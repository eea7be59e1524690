//! Engines with GPU memory, on a fake libcuda.
#![cfg(all(feature = "transport-nvlink", feature = "transport-shm", feature = "transport-tcp"))]

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::memory::{HostMemory, HostMemoryOptions, MemorySource};
use mooncake_engine::{TransferEngine, TransportOptions, TransportSet};
use mooncake_nvlink::testkit::load;
use mooncake_nvlink::{Cuda, Device, DeviceMemory, NvlinkConfig, Stream};
use mooncake_shm::ShmConfig;
use mooncake_tcp::TcpConfig;
use mooncake_transport::engine::{Batch, LocalCopies};
use mooncake_transport::{Protocol, Region, SliceMut};

const LEN: usize = 1 << 20;
/// No transfer here takes that long.
const LIMIT: Duration = Duration::from_secs(60);

fn tcp(data_host: &str) -> Option<TcpConfig> {
    Some(TcpConfig { data_host: data_host.into(), ..TcpConfig::default() })
}

async fn engine(wires: TransportOptions) -> TransferEngine {
    load();
    let builder =
        TransferEngine::builder().name("127.0.0.1").transports(wires).local_copies(LocalCopies::Never);
    builder.start().await.unwrap()
}

fn gpu(number: u32) -> Arc<Device> {
    Cuda::open(None).unwrap().device(number).unwrap()
}

fn filled(number: u32, byte: u8) -> Arc<DeviceMemory> {
    let memory = DeviceMemory::new(&gpu(number), LEN).unwrap();
    // SAFETY: new memory without other users.
    unsafe { gpu(number).fill(memory.span(), byte) }.unwrap();
    Arc::new(memory)
}

fn shared() -> Arc<HostMemory> {
    let options = HostMemoryOptions { shared: Some("gpu".into()), ..HostMemoryOptions::default() };
    Arc::new(HostMemory::with(LEN, &options).unwrap())
}

fn holds(region: &Region<TransportSet>, byte: u8) -> bool {
    let mut bytes = vec![0; region.len()];
    region.slice(0..region.len()).unwrap().copy_to(0, &mut bytes).unwrap();
    bytes.iter().all(|b| *b == byte)
}

fn local(engine: &TransferEngine, memory: Arc<dyn MemorySource>) -> SliceMut<TransportSet> {
    engine.register_local(memory).unwrap().exclusive().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn devices_copy_themselves_and_the_rest_goes_behind() {
    // A success has not gone over TCP, because no process can connect to this address.
    let wires = |data_host: &str| TransportOptions {
        nvlink: Some(NvlinkConfig::default()),
        shm: Some(ShmConfig::default()),
        tcp: tcp(data_host),
        ..TransportOptions::default()
    };
    let (owner, user) = (engine(wires("192.0.2.1")).await, engine(wires("127.0.0.1")).await);
    let device = owner.register(filled(0, 1)).await.unwrap();
    let host = owner.register(shared()).await.unwrap();
    let target = user.open(owner.name()).await.unwrap();
    assert_eq!(target.descriptor().protocols, [Protocol::NVLINK], "older peers read one name");
    let descriptor = target.descriptor();
    let buffer = |addr| descriptor.buffers.iter().find(|buffer| buffer.addr == addr).unwrap();
    assert_eq!(buffer(device.addr()).extra["shm_name"].as_str().unwrap().len(), 128);
    assert!(!buffer(host.addr()).extra.contains_key("shm_name"));

    for number in [0, 1] {
        let (result, read) = user.read(&target, device.addr(), local(&user, filled(number, 9)), None).await;
        result.unwrap();
        let mut bytes = vec![0; LEN];
        read.copy_to(0, &mut bytes).unwrap();
        assert!(bytes == vec![1; LEN], "device {number}");
    }
    let mut batch = Batch::new();
    for i in 0..16 {
        let at = if i % 2 == 0 { &device } else { &host };
        batch.write(&target, at.addr() + (i * LEN / 16) as u64, vec![7; LEN / 16]);
    }
    assert!(user.submit(batch, None).await.results.iter().all(Result::is_ok));
    let mut bytes = vec![0; LEN];
    device.slice(0..LEN).unwrap().copy_to(0, &mut bytes).unwrap();
    assert!(bytes.chunks(LEN / 16).enumerate().all(|(i, part)| part[0] == if i % 2 == 0 { 7 } else { 1 }));
    let line = user.metrics().into_iter().find(|line| line.peer == owner.name()).unwrap();
    assert_eq!(line.wire.as_str(), "nvlink+shm+tcp");
}

/// Fillings of memory on a stream race with transfers of it.
async fn in_order(owner: &TransferEngine, user: &TransferEngine) {
    let region = owner.register(filled(0, 0)).await.unwrap();
    let memory = filled(1, 0);
    let source = user.register_local(memory.clone()).unwrap();
    let target = user.open(owner.name()).await.unwrap();
    let stream = Stream::new(&gpu(1)).unwrap();
    for round in 1..10u8 {
        let (engine, target, at) = (user.clone(), target.clone(), region.addr());
        let slice = source.slice(0..LEN).unwrap();
        // SAFETY: memory and stream live until the end, and the memory is used in the order of the
        // stream.
        unsafe {
            stream.fill(memory.span(), round).unwrap();
            user.after_stream(stream.handle(), LIMIT, async move {
                let deadline = engine.clock().now().after(Duration::from_secs(20));
                engine.write(&target, at, slice, Some(deadline)).await.0
            })
            .unwrap();
            stream.fill(memory.span(), 0xff).unwrap();
        }
        tokio::task::block_in_place(|| stream.wait()).unwrap();
        assert!(holds(&region, round), "round {round}");
    }
    tokio::task::block_in_place(|| user.settle_streams()).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transfers_are_in_the_order_of_a_stream_over_nvlink() {
    let wires = || TransportOptions { nvlink: Some(NvlinkConfig::default()), ..TransportOptions::default() };
    in_order(&engine(wires()).await, &engine(wires()).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn and_over_tcp() {
    let wires = || TransportOptions { tcp: tcp("127.0.0.1"), ..TransportOptions::default() };
    in_order(&engine(wires()).await, &engine(wires()).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failure_in_stream_order_is_reported_by_the_next_call() {
    let wires = || TransportOptions { nvlink: Some(NvlinkConfig::default()), ..TransportOptions::default() };
    let (owner, user) = (engine(wires()).await, engine(wires()).await);
    let _open = owner.register(filled(0, 0)).await.unwrap();
    let target = user.open(owner.name()).await.unwrap();
    let slice = user.register_local(filled(0, 1)).unwrap().slice(0..LEN).unwrap();
    let stream = Stream::new(&gpu(0)).unwrap();
    let write = || {
        let (engine, target, slice) = (user.clone(), target.clone(), slice.clone());
        async move { engine.write(&target, 0x1000, slice, None).await.0 }
    };
    // SAFETY: the stream lives until the end.
    unsafe { user.after_stream(stream.handle(), LIMIT, write()) }.unwrap();
    tokio::task::block_in_place(|| stream.wait()).unwrap();
    // SAFETY: as above.
    let error = unsafe { user.after_stream(stream.handle(), LIMIT, write()) }.unwrap_err();
    assert!(error.to_string().contains("0x1000"), "{error}");
    user.check_streams().unwrap();
}
