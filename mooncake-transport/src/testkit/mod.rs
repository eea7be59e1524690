//! For tests of your own wires (feature `testkit`): the conformance suite of [`Transport`] and a fault injector.
//!
//! ```ignore
//! mod my_wire {
//!     mooncake_transport::transport_conformance!(MyFixture::new());
//! }
//! ```

#[allow(unsafe_code)]
mod begun;
pub mod cases;
#[allow(unsafe_code)]
mod faulty;
mod on_device;
mod world;

use std::future::Future;
use std::sync::Arc;

use mooncake_core::clock::SharedClock;
use mooncake_core::memory::{HostMemory, MemorySource};

use crate::transport::Transport;

pub use begun::write_when_begun;
pub use faulty::{Fault, Faults, Faulty};
pub use on_device::{OnDevice, Sides};

/// How the conformance suite makes nodes of a wire.
pub trait Fixture {
    /// The wire.
    type T: Transport;

    /// A new node that the other nodes of this fixture can reach once they have its descriptor.
    fn node(&mut self) -> Arc<Self::T>;

    /// Makes a node die as by `kill -9`: it answers nobody any more, now or later.
    fn kill(&mut self, node: &Arc<Self::T>);

    /// Runs a future where the wire's own tasks get on.
    fn block_on<F: Future>(&self, future: F) -> F::Output;

    /// The clock that deadlines are moments of.
    fn clock(&self) -> SharedClock;

    /// Zero-filled memory that nodes of this wire can open to each other.
    fn memory(&self, len: usize) -> Arc<dyn MemorySource> {
        Arc::new(HostMemory::new(len).expect("host memory"))
    }

    /// The same for the local side of operations; `None` where ordinary memory does.
    fn local_memory(&self, len: usize) -> Option<Arc<dyn MemorySource>> {
        let _ = len;
        None
    }

    /// Size of the large transfers, in bytes.
    fn large(&self) -> usize {
        if cfg!(miri) { 5000 } else { (8 << 20) + 13 }
    }
}

/// One `#[test]` per sentence of the [`Transport`] contract, on the fixture this expression makes.
/// Put it into a module of its own.
#[macro_export]
macro_rules! transport_conformance {
    ($fixture:expr) => {
        $crate::transport_conformance! { @list @cases $fixture }
    };
    (@list $($to:tt)*) => {
        $crate::transport_conformance! { $($to)*;
            read_brings_exactly_the_remote_bytes
            completed_write_is_applied
            refused_ranges_change_nothing
            ranges_across_registrations_are_refused
            local_memory_is_closed_to_peers
            read_only_memory_is_not_written
            dropped_registration_is_refused
            one_completion_for_many_operations
            operations_fail_one_by_one
            no_operations_finish_at_once
            large_transfers_arrive_whole
            finished_means_untouched
            dropped_ticket_goes_on_and_frees_later
            concurrent_submissions
            dead_peer_is_an_error_by_the_deadline
            passed_deadline_sends_nothing
            unregistered_local_memory_as_capabilities_say
            descriptor_survives_its_json
            own_node_is_a_peer_too
        }
    };
    (@all $fixture:ident; $($case:ident)*) => {
        vec![$((stringify!($case), $crate::testkit::cases::$case::<$fixture>)),*]
    };
    (@cases $fixture:expr; $($case:ident)*) => {
        $(#[test]
        fn $case() {
            $crate::testkit::cases::$case(&mut $fixture);
        })*
    };
}

/// A case of the conformance suite: its name, and what runs it.
pub type Case<F> = (&'static str, fn(&mut F));

/// All cases of the conformance suite, for programs that run them outside of a test harness.
pub fn all_cases<F: Fixture>() -> Vec<Case<F>> {
    transport_conformance! { @list @all F }
}
