//! What an owner is to do with its disk, numbered: it is said again until the owner says that it is done, so that a lost answer loses nothing.

use std::time::Duration;

use mooncake_core::Result;
use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::EvictionPolicy;
use mooncake_core::ids::{ClientId, ObjectKey};

use super::{Master, OwnerState, not_offered};
use mooncake_protocol::wire::DiskWork;

/// Most copies that do not count any more which are told at a time.
const DROPPED_AT_ONCE: usize = 4096;

/// What an owner was told last.
#[derive(Default)]
pub(super) struct Said {
    number: u64,
    clear: bool,
    dropped: Vec<ObjectKey>,
    write: Vec<(ObjectKey, u64)>,
}

impl Said {
    /// What comes next when the disk is to be emptied, and the owner counts what it is told.
    pub(super) fn emptying(&self, counted: bool) -> Self {
        Self { number: self.number + u64::from(counted), clear: counted, ..Self::default() }
    }

    fn is_empty(&self) -> bool {
        !self.clear && self.dropped.is_empty() && self.write.is_empty()
    }
}

impl<A: SegmentAllocator, E: EvictionPolicy> Master<A, E> {
    /// The heartbeat of a disk whose owner counts answers: what it is to do. What it has not done is said again; what came to it after the
    /// client first asked (`begin`, before it announces what it found), and not before, may be something that is to be dropped.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND` when the client has offered no disk, or was silent too long: it offers it again, and says what lies there.
    pub fn disk_work(&self, client: ClientId, begin: bool, done: u64) -> Result<DiskWork> {
        let tenants = self.tenants.are_on();
        let mut owner = self.disks.get(client).ok_or_else(not_offered)?;
        if begin {
            let mut state = owner.state.lock();
            (state.seen, state.follows) = (self.clock.now(), true);
            return Ok(DiskWork { tenants, ..DiskWork::default() });
        }
        let over = owner.state.lock().said.number == done;
        if over && self.clear_disk(&owner, true) {
            // Another takes its place, of whose disk nothing is known.
            owner = self.disks.get(client).ok_or_else(not_offered)?;
        }
        let mut state = owner.state.lock();
        let (now, write_out) = (self.clock.now(), self.options.put_release);
        (state.enabled, state.announcing, state.seen) = (true, false, now);
        match state.said.number == done {
            true => state.say(now, write_out),
            false => state.say_again(now),
        }
        let Said { number, clear, dropped, write } = &state.said;
        let dropped = dropped.iter().map(|key| self.offload_item(key, 0)).collect();
        let write = write.iter().map(|(key, len)| self.offload_item(key, *len)).collect();
        Ok(DiskWork { number: *number, tenants, clear: *clear, dropped, write })
    }
}

impl OwnerState {
    /// What was said last is done; this is next.
    fn say(&mut self, now: Moment, write_out: Duration) {
        let write = self.send(now, write_out);
        let dropped: Vec<_> = self.dropped.iter().take(DROPPED_AT_ONCE).cloned().collect();
        for key in &dropped {
            self.dropped.remove(key);
        }
        let number = self.said.number;
        self.said = Said { number, clear: false, dropped, write };
        self.said.number += u64::from(!self.said.is_empty());
    }

    /// The owner may not have heard what was said last, or has not come to the end of it.
    fn say_again(&mut self, now: Moment) {
        let mut write = std::mem::take(&mut self.said.write);
        write.retain(|(key, _)| match self.jobs.get_mut(key.as_bytes()) {
            Some(job) if job.sent && job.valid => {
                job.since = now;
                true
            }
            // The value is gone. Whether the owner has written it, or has an older one, is not known.
            Some(job) if job.sent => {
                let again = job.again;
                self.end(key.as_bytes());
                if let Some(len) = again {
                    self.add(key, len, now);
                }
                self.drop_copy(key);
                false
            }
            // Reported, and perhaps in line again.
            _ => false,
        });
        self.said.write = write;
    }
}
