//! Gate of a region, under every interleaving of requests of peers and of the owner (loom).
//!
//! The file under test is included with the primitives of loom.

#[path = "../src/gate.rs"]
mod gate;

mod sync {
    pub(crate) use loom::sync::RwLockReadGuard;
    pub(crate) use loom::sync::atomic::{AtomicBool, Ordering};

    /// Lock of loom with the interface of the lock in the crate.
    #[derive(Debug)]
    pub(crate) struct RwLock(loom::sync::RwLock<()>);

    impl RwLock {
        pub(crate) fn new() -> Self {
            Self(loom::sync::RwLock::new(()))
        }

        pub(crate) fn read(&self) -> RwLockReadGuard<'_, ()> {
            self.0.read().unwrap()
        }

        pub(crate) fn wait_for_readers(&self) {
            drop(self.0.write().unwrap());
        }
    }
}

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use gate::Gate;

/// Memory behind a gate. Loom reports an access of the owner that is concurrent with one of a peer.
struct Region {
    gate: Gate,
    memory: UnsafeCell<u32>,
}

// SAFETY: loom checks each access.
#[allow(unsafe_code)]
unsafe impl Sync for Region {}

impl Region {
    /// Reads the memory for a request of a peer. Several peers may do so at a time.
    fn serve(&self) -> Option<u32> {
        let _hold = self.gate.enter()?;
        // SAFETY: loom checks the access.
        #[allow(unsafe_code)]
        Some(self.memory.with(|bytes| unsafe { *bytes }))
    }

    /// Takes the memory back and uses it for something else, as its owner.
    fn reuse(&self) {
        self.gate.close();
        // SAFETY: as above.
        #[allow(unsafe_code)]
        self.memory.with_mut(|bytes| unsafe { *bytes = 2 });
    }
}

#[test]
fn closed_gate_has_no_readers() {
    loom::model(|| {
        let region = Arc::new(Region { gate: Gate::new(), memory: UnsafeCell::new(1) });
        let peers: Vec<_> = (0..2)
            .map(|_| {
                let region = region.clone();
                thread::spawn(move || {
                    assert!(region.serve().is_none_or(|bytes| bytes == 1), "bytes of the next owner");
                })
            })
            .collect();
        region.reuse();
        assert!(region.gate.enter().is_none(), "the gate stays closed");
        for peer in peers {
            peer.join().unwrap();
        }
    });
}
