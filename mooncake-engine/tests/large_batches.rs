//! Batches of several hundred thousand requests.
#![cfg(all(target_os = "linux", feature = "transport-tcp", feature = "transport-shm"))]

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::ErrorCode;
use mooncake_core::clock::SystemClock;
use mooncake_core::memory::{HostMemory, MemorySource};
use mooncake_engine::{AddressRequest, TransferEngine, TransportOptions};
use mooncake_tcp::TcpConfig;
use mooncake_transport::Opcode;
use mooncake_transport::engine::LocalCopies;

/// Length of a request in bytes.
const PIECE: usize = 8;

/// Starts an engine whose memory is private, so that no request goes over shared memory.
async fn engine(tcp: TcpConfig) -> TransferEngine {
    let transports = TransportOptions { tcp: Some(tcp), ..TransportOptions::for_protocol("tcp").unwrap() };
    let builder = TransferEngine::builder().name("127.0.0.1").transports(transports);
    builder.local_copies(LocalCopies::Never).start().await.unwrap()
}

struct Pair {
    user: TransferEngine,
    _owner: TransferEngine,
    local: Arc<HostMemory>,
    remote: Arc<HostMemory>,
    requests: Vec<AddressRequest>,
}

impl Pair {
    async fn new(requests: usize, tcp: TcpConfig) -> Self {
        let (owner, user) = (engine(TcpConfig::default()).await, engine(tcp).await);
        let memory = || Arc::new(HostMemory::new(requests * PIECE).unwrap());
        let (local, remote) = (memory(), memory());
        for (index, byte) in (0..requests * PIECE).zip((0..251).cycle()) {
            // SAFETY: in range.
            unsafe { local.span().ptr.add(index).write(byte) };
        }
        let (from, to) = (local.span().addr(), remote.span().addr());
        // SAFETY: both outlive the engines.
        unsafe {
            user.register_raw(from, requests * PIECE).await.unwrap();
            owner.register_raw(to, requests * PIECE).await.unwrap();
        }
        let target = user.open(owner.name()).await.unwrap();
        let request = |index: usize| {
            let offset = (index * PIECE) as u64;
            AddressRequest {
                opcode: Opcode::Write,
                local: from + offset,
                target: target.clone(),
                remote: to + offset,
                len: PIECE,
            }
        };
        let requests = (0..requests).map(request).collect();
        Self { user, _owner: owner, local, remote, requests }
    }

    fn bytes(memory: &HostMemory) -> &[u8] {
        // SAFETY: that long, and the transfers have ended.
        unsafe { std::slice::from_raw_parts(memory.span().ptr.as_ptr(), memory.len()) }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_hundred_thousand_requests_are_one_batch() {
    let pair = Pair::new(300_000, TcpConfig::default()).await;
    let deadline = pair.user.clock().now().after(Duration::from_secs(300));
    pair.user.transfer(&pair.requests, None, Some(deadline)).await.unwrap();
    assert!(Pair::bytes(&pair.local) == Pair::bytes(&pair.remote));
}

/// The cost of failures is proportional to their number.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failures_of_many_requests_are_quick() {
    let tcp = TcpConfig { max_queued: 1000, connections: 1, ..TcpConfig::default() };
    let pair = Pair::new(300_000, tcp).await;
    let clock = SystemClock::shared();
    let began = clock.now();
    let deadline = pair.user.clock().now().after(Duration::from_secs(300));
    let error = pair.user.transfer(&pair.requests, None, Some(deadline)).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::TaskPendingLimitExceeded, "{error}");
    let took = clock.now().since(began);
    // A search of a list for each request takes minutes in this build.
    assert!(took < Duration::from_secs(40), "{took:?}");
}
