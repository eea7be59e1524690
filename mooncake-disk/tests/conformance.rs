//! The public conformance suite, on memory that maps a file and is accessed through the file.

mod common;

use std::future::Future;
use std::sync::Arc;

use common::fake_faults;
use mooncake_core::clock::{SharedClock, SystemClock};
use mooncake_core::memory::{HostMemory, MemorySource};
use mooncake_disk::{DiskConfig, DiskTransport, EngineKind, IoFault, RunningEngine};
use mooncake_transport::testkit::{Fixture, OnDevice, Sides};
use tempfile::TempDir;

struct OnFiles {
    config: DiskConfig,
    clock: SharedClock,
    dir: TempDir,
}

impl OnFiles {
    fn new(config: DiskConfig) -> Self {
        Self { config, clock: SystemClock::shared(), dir: common::dir() }
    }
}

impl Fixture for OnFiles {
    type T = DiskTransport;

    fn node(&mut self) -> Arc<DiskTransport> {
        let node = DiskTransport::start_with_clock(self.config.clone(), self.clock.clone()).unwrap();
        if self.config.engine == EngineKind::Uring {
            assert_eq!(node.engine(), RunningEngine::Uring);
        }
        Arc::new(node)
    }

    fn kill(&mut self, node: &Arc<DiskTransport>) {
        node.stop();
    }

    fn block_on<F: Future>(&self, future: F) -> F::Output {
        futures::executor::block_on(future)
    }

    fn clock(&self) -> SharedClock {
        self.clock.clone()
    }

    fn memory(&self, len: usize) -> Arc<dyn MemorySource> {
        let file = tempfile::tempfile_in(self.dir.path()).unwrap();
        file.set_len(len.next_multiple_of(4096) as u64).unwrap();
        Arc::new(HostMemory::map_listed(file, 0, len).unwrap())
    }
}

fn with(engine: EngineKind) -> DiskConfig {
    DiskConfig { engine, ..DiskConfig::default() }
}

mod uring {
    use super::*;
    // The kernel may refuse io_uring, mostly to containers. Then the suite runs on threads once
    // more.
    mooncake_transport::transport_conformance!(OnFiles::new(with(EngineKind::Auto)));
}

mod uring_zero_copy {
    use super::*;
    mooncake_transport::transport_conformance!(OnFiles::new(DiskConfig {
        zero_copy: true,
        depth: 2,
        piece_bytes: 8192,
        ..with(EngineKind::Auto)
    }));
}

mod threads {
    use super::*;
    mooncake_transport::transport_conformance!(OnFiles::new(with(EngineKind::Threads)));
}

mod threads_through_the_page_cache {
    use super::*;
    mooncake_transport::transport_conformance!(OnFiles::new(DiskConfig {
        zero_copy: true,
        direct: false,
        threads: 3,
        ..with(EngineKind::Threads)
    }));
}

/// Cuts half of the requests short, and interrupts some. The results must not change.
fn short(config: DiskConfig) -> OnFiles {
    let faults = fake_faults(|n, request| match n % 4 {
        0 => IoFault::Short(1 + request.len / 3),
        1 if n % 8 == 1 => IoFault::Errno(4),
        2 if request.len > 8192 => IoFault::Short(4096),
        _ => IoFault::None,
    });
    OnFiles::new(DiskConfig { faults, ..config })
}

mod uring_with_short_answers {
    use super::*;
    mooncake_transport::transport_conformance!(short(with(EngineKind::Auto)));
}

mod threads_with_short_answers {
    use super::*;
    mooncake_transport::transport_conformance!(short(DiskConfig {
        direct: false,
        ..with(EngineKind::Threads)
    }));
}

mod from_a_device {
    use super::*;
    mooncake_transport::transport_conformance!(OnDevice::new(
        OnFiles::new(with(EngineKind::Auto)),
        Sides::Local
    ));
}
