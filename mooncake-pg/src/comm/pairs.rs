//! State of point-to-point operations, by the slot of the other rank.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use mooncake_core::clock::Rng;
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::counted::Counted;
use crate::call::Buffer;
use crate::message::Payload;
use crate::operation::{Outcome, Pending};
use crate::staging::{MemoryGuard, Staged};

/// Largest number of announced messages per pair that the receiver has not taken.
pub(super) const MAX_ANNOUNCED: usize = 64;
/// Largest number of bytes in announcements per pair that the receiver has not taken. Messages
/// beyond are staged.
pub(super) const MAX_INLINE: usize = 1 << 20;

/// Point-to-point operations of a communicator.
pub(super) struct PointToPoint {
    pub(super) state: Mutex<State>,
    pub(super) next: AtomicU64,
}

impl Default for PointToPoint {
    fn default() -> Self {
        // Numbers of an earlier process of this rank mean nothing to the others.
        Self { state: Mutex::default(), next: AtomicU64::new(Rng::from_os().next_u64() >> 1) }
    }
}

#[derive(Default)]
pub(super) struct State {
    pub(super) pairs: HashMap<u8, Pair>,
    /// Receives from any slot.
    pub(super) any_receives: VecDeque<Receive>,
}

/// Operations with one slot.
#[derive(Default)]
pub(super) struct Pair {
    /// Sends that are not announced yet.
    pub(super) sends: VecDeque<Outgoing>,
    /// True while a task announces the sends, which is from the first of them on.
    pub(super) is_announcing: bool,
    /// Wakes that task when the receiver has taken a message.
    pub(super) message_taken: Arc<Notify>,
    /// Announced sends by their numbers.
    pub(super) announced: HashMap<u64, Announced>,
    pub(super) inline: usize,
    pub(super) receives: VecDeque<Receive>,
    /// Messages that have been announced to this rank.
    pub(super) arrived: VecDeque<(u64, Payload)>,
    /// Number of receives that read their bytes now.
    pub(super) reading: usize,
    /// True while a task examines the process after each timeout.
    pub(super) is_watched: bool,
    /// Counts the steps of progress.
    pub(super) steps: u64,
    /// Counts the failures of the pair. A task of an earlier count is out of date.
    pub(super) failures: u64,
}

impl Pair {
    pub(super) fn is_idle(&self) -> bool {
        // A send that is being staged is in no list.
        !self.is_announcing && self.announced.is_empty() && self.receives.is_empty() && self.reading == 0
    }
}

pub(super) struct Outgoing {
    pub(super) tensor: Buffer,
    pub(super) guard: MemoryGuard,
    pub(super) pending: Pending,
    pub(super) counted: Counted,
}

pub(super) struct Announced {
    /// Operation to finish. A message without bytes has finished its operation already.
    pub(super) end: Option<End>,
    pub(super) inline: usize,
    pub(super) staged: Option<Staged>,
}

pub(super) struct Receive {
    pub(super) tensor: Buffer,
    pub(super) end: End,
}

/// Steps at the end of an operation.
pub(super) struct End {
    pub(super) guard: MemoryGuard,
    pub(super) pending: Pending,
    pub(super) _counted: Counted,
}

impl End {
    pub(super) fn finish(self, outcome: Outcome) {
        drop(self.guard);
        drop(self._counted);
        self.pending.finish(outcome);
    }
}
