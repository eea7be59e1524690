//! Tests of custom transports (feature `testkit`): the conformance suite of
//! [`Transport`](crate::Transport) and a fault injector.
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
mod fixture;
mod on_device;
mod world;

pub use begun::write_when_begun;
pub use faulty::{Fault, Faults, Faulty};
pub use fixture::Fixture;
pub use on_device::{OnDevice, Sides};

/// Defines a `#[test]` per sentence of the [`Transport`](crate::Transport) contract, on the fixture
/// of this expression. The macro needs a module of its own.
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
            local_registrations_may_overlap
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
