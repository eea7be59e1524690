//! Device memory in calls of the engine: named by its address, on either side, over the transports
//! of the build.
#![cfg(all(feature = "transport-tcp", feature = "transport-shm"))]

use std::sync::Arc;

use mooncake_core::memory::{HostMemory, HostMemoryOptions, MemorySource};
use mooncake_core::testkit::device::{TestDevice, TestDeviceMemory};
use mooncake_engine::{TransferEngine, TransportOptions};
use mooncake_shm::ShmConfig;
use mooncake_tcp::TcpConfig;
use mooncake_transport::Opcode;
use mooncake_transport::engine::{Batch, LocalCopies};

const LEN: usize = (5 << 20) + 77;

async fn engine(copies: LocalCopies) -> TransferEngine {
    let tcp = TcpConfig { data_host: "127.0.0.1".into(), ..TcpConfig::default() };
    let wires =
        TransportOptions { tcp: Some(tcp), shm: Some(ShmConfig::default()), ..TransportOptions::default() };
    let builder = TransferEngine::builder().name("127.0.0.1").transports(wires).local_copies(copies);
    builder.start().await.unwrap()
}

fn bytes(seed: usize) -> Vec<u8> {
    (0..LEN).map(|i| ((i + seed).wrapping_mul(0x9e37_79b9) >> 13) as u8).collect()
}

async fn by_address(engine: &TransferEngine, memory: &TestDeviceMemory) -> u64 {
    let address = memory.unlocated().addr();
    // SAFETY: the tests keep the memory until the engine is closed, and touch it only while no
    // transfer runs.
    #[allow(unsafe_code)]
    unsafe { engine.register_raw(address, LEN) }.await.unwrap();
    address
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_address_is_all_that_is_needed() {
    for copies in [LocalCopies::Never, LocalCopies::Process] {
        let (user_device, owner_device) = (TestDevice::new(), TestDevice::new());
        let (user_memory, owner_memory) =
            (user_device.memory(LEN).unwrap(), owner_device.memory(LEN).unwrap());
        let (user, owner) = (engine(copies).await, engine(copies).await);
        let (local, remote) =
            (by_address(&user, &user_memory).await, by_address(&owner, &owner_memory).await);
        let past_start = user_memory.unlocated().addr() + 1;
        // SAFETY: refused.
        #[allow(unsafe_code)]
        unsafe { user.register_raw(past_start, LEN) }.await.unwrap_err();
        assert_eq!(owner.descriptor().buffers.len(), 1, "it is listed like any other memory");
        user_memory.fill(&bytes(1));
        let target = user.open(owner.name()).await.unwrap();
        for (opcode, len) in
            [(Opcode::Write, LEN), (Opcode::Write, 1), (Opcode::Read, LEN), (Opcode::Read, 77)]
        {
            let mut batch = Batch::new();
            match opcode {
                Opcode::Write => _ = batch.write(&target, remote, user.regions().slice(local, len).unwrap()),
                Opcode::Read => {
                    owner_memory.fill(&bytes(2)[..len]);
                    batch.read(&target, remote, user.regions().slice_mut(local, len).unwrap());
                }
            }
            user.submit(batch, None).await.results.remove(0).unwrap();
            assert!(
                user_memory.bytes()[..len] == owner_memory.bytes()[..len],
                "{copies:?}, {opcode:?} of {len} bytes"
            );
        }
        user.unregister_raw(&[local]).await.unwrap();
        owner.unregister_raw(&[remote]).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn host_memory_of_the_same_engines_goes_its_usual_way() {
    let device = TestDevice::new();
    let (user, owner) = (engine(LocalCopies::Never).await, engine(LocalCopies::Never).await);
    let shared = HostMemoryOptions { shared: Some("device_memory".into()), ..HostMemoryOptions::default() };
    let open = owner.register(Arc::new(HostMemory::with(LEN, &shared).unwrap())).await.unwrap();
    let closed: Arc<dyn MemorySource> = Arc::new(device.memory(LEN).unwrap());
    let of_device = owner.register(closed).await.unwrap();
    let target = user.open(owner.name()).await.unwrap();
    // One batch, four ways: from host and device, to shared memory and to a device.
    let memory = Arc::new(device.memory(LEN).unwrap());
    memory.fill(&bytes(3));
    let local = user.register_local(memory).unwrap().slice(0..LEN).unwrap();
    let mut batch = Batch::new();
    let half_len = LEN / 2;
    batch.write(&target, open.addr(), bytes(4)[..half_len].to_vec());
    batch.write(&target, open.addr() + half_len as u64, local.slice(half_len..LEN).unwrap());
    batch.write(&target, of_device.addr(), bytes(5)[..half_len].to_vec());
    batch.write(&target, of_device.addr() + half_len as u64, local.slice(0..half_len).unwrap());
    user.submit(batch, None).await.results.into_iter().for_each(|result| result.unwrap());
    let read = |address| user.read(&target, address, vec![0; 2 * half_len], None);
    let (result, bytes_read) = read(open.addr()).await;
    result.unwrap();
    assert!(
        bytes_read[..half_len] == bytes(4)[..half_len]
            && bytes_read[half_len..] == bytes(3)[half_len..2 * half_len]
    );
    let (result, bytes_read) = read(of_device.addr()).await;
    result.unwrap();
    assert!(bytes_read[..half_len] == bytes(5)[..half_len] && bytes_read[half_len..] == bytes(3)[..half_len]);
    assert!(device.copies() > 0);
}
