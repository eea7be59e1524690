//! Requests for space, and the list of the space that a client has reserved. The end of the client
//! returns that space.

use std::fmt::Debug;
use std::sync::{Arc, Weak};

use mooncake_core::clock::Moment;
use mooncake_protocol::api::WriteMode;
use parking_lot::Mutex;

/// Request for space, and the number by which the master recognizes later calls about it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attempt {
    pub(crate) mode: WriteMode,
    pub(crate) number: u64,
    pub(crate) requested_at: Moment,
}

/// Reserved space of an object.
pub(crate) trait ReservedSpace: Debug + Send + Sync {
    /// Returns whether the space is neither committed nor given back.
    fn is_open(&self) -> bool;

    /// Refuses all later writes. Returns the request for the space if the space can be returned
    /// now.
    fn give_up(&self) -> Option<Attempt>;
}

/// Number of spaces below which dropped ones stay listed.
const MIN_LISTED: usize = 64;

/// List of the reserved spaces of a client. Spaces that were dropped leave the list later.
#[derive(Debug, Default)]
pub(crate) struct ReservedSpaces(Mutex<Listed>);

#[derive(Debug, Default)]
struct Listed {
    /// Key and space of each object.
    spaces: Vec<(Vec<u8>, Weak<dyn ReservedSpace>)>,
    /// Length at which dropped spaces are removed next.
    removal_len: usize,
}

impl ReservedSpaces {
    /// Adds the space of an object.
    pub(crate) fn add(&self, key: &[u8], space: Weak<dyn ReservedSpace>) {
        let mut listed = self.0.lock();
        if listed.spaces.len() >= listed.removal_len {
            listed.spaces.retain(|(_, space)| space.upgrade().is_some_and(|space| space.is_open()));
            // Each removal is paid for by as many additions as it has left spaces.
            listed.removal_len = (2 * listed.spaces.len()).max(MIN_LISTED);
        }
        listed.spaces.push((key.to_vec(), space));
    }

    /// Takes the keys and the spaces that are open.
    pub(crate) fn take_open(&self) -> Vec<(Vec<u8>, Arc<dyn ReservedSpace>)> {
        let listed = std::mem::take(&mut self.0.lock().spaces);
        let open = |(key, space): (Vec<u8>, Weak<dyn ReservedSpace>)| {
            Some((key, space.upgrade().filter(|space| space.is_open())?))
        };
        listed.into_iter().filter_map(open).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

    use super::*;

    #[derive(Debug)]
    struct Space(AtomicBool);

    impl ReservedSpace for Space {
        fn is_open(&self) -> bool {
            self.0.load(Relaxed)
        }

        fn give_up(&self) -> Option<Attempt> {
            None
        }
    }

    #[test]
    fn closed_and_dropped_spaces_leave_the_list() {
        let list = ReservedSpaces::default();
        let mut held: Vec<Arc<Space>> = Vec::new();
        for number in 0..10 * MIN_LISTED {
            let space = Arc::new(Space(AtomicBool::new(number % 3 > 0)));
            list.add(number.to_string().as_bytes(), Arc::downgrade(&space) as Weak<dyn ReservedSpace>);
            // One of three is dropped, and another one is closed.
            held.extend((number % 3 < 2 && held.len() < 8).then_some(space));
            assert!(list.0.lock().spaces.len() <= MIN_LISTED);
        }
        let open = list.take_open();
        assert_eq!(open.len(), 4);
        assert!(open.iter().all(|(_, space)| space.is_open()) && list.take_open().is_empty());
    }
}
