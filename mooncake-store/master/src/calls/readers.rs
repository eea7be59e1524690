//! Readers that report the end of their reads, and puts that found no space.

use std::sync::Arc;

use mooncake_core::Result;
use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::replica::ReplicaList;
use mooncake_protocol::wire::SpaceOutlook;

use super::chains::KeyInCall;
use super::master::Master;
use crate::model::options::Placement;
use crate::model::promise::millis;
use crate::model::readers::Reader;
use crate::space::outlook::NoOutlook;

/// Time after which a reader reports again, in milliseconds, if its reports free space.
const SOON: u64 = 10;
/// Time after which a reader reports again otherwise, in milliseconds.
const LATER: u64 = 1000;

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Returns the reader of a call, after it has ended its reads up to the number `ended`. `None`
    /// if there are too many readers; the read then counts until the end of its lease.
    pub(super) fn begin_read(&self, identity: u64, ended: u64) -> Option<Arc<Reader>> {
        let now = self.space().clock.now();
        let reader = self.space().readers.of(identity, now)?;
        self.space().end_reads(&reader, ended, now);
        Some(reader)
    }

    /// Returns the replicas of an object like [`Master::locate`], for a read whose reader reports
    /// its end with [`Master::report_reads`]. The numbers of a reader ascend; all of its reads up
    /// to `ended` have ended.
    ///
    /// # Errors
    /// Those of [`Master::locate`].
    pub fn locate_for_read(&self, identity: u64, number: u64, ended: u64, key: &[u8]) -> Result<ReplicaList> {
        let reader = self.begin_read(identity, ended);
        let read = reader.as_ref().map(|reader| (reader, number));
        self.locate_in(key, KeyInCall::default().read_by(read))
    }

    /// Records that all reads of a reader up to the number `ended` have ended. Space of removed
    /// objects that only such reads may have read is free from now on. Returns the time in
    /// milliseconds after which the reader reports again.
    pub fn report_reads(&self, identity: u64, ended: u64) -> u64 {
        self.begin_read(identity, ended);
        let is_wanted = self.space().readers.are_reports_wanted(self.space().clock.now());
        if is_wanted { SOON } else { LATER }
    }

    /// Returns whether waiting may help a put of `len` bytes that found no space. `preferred` is
    /// the name of the segment that the put prefers, or empty. It counts if the placement binds the
    /// put to this segment.
    pub fn check_space(&self, len: u64, preferred: &str) -> SpaceOutlook {
        let now = self.space().clock.now();
        let age_ms = millis(now.since(self.space().started));
        let is_bound = self.space().options.placement == Placement::Cxl && !preferred.is_empty();
        let only = is_bound.then_some(preferred);
        SpaceOutlook { reason: self.space().why_never(len, only, now) as u32, age_ms }
    }

    /// Returns whether waiting may help the smallest of these puts of a tenant, or one of its
    /// upserts. An upsert may be written over a value of its length, once that has no reader.
    pub(super) fn check_space_of(
        &self,
        tenant: &str,
        upserts: &[&[u8]],
        lens: &[u64],
        preferred: &str,
    ) -> SpaceOutlook {
        let outlook = self.check_space(lens.iter().copied().min().unwrap_or_default(), preferred);
        let may_overwrite = |(key, len): (&&[u8], &u64)| {
            self.scoped_if_known(tenant, key).is_ok_and(|key| self.has_value_of(&key, *len))
        };
        if outlook.reason == NoOutlook::HardPinned as u32 && upserts.iter().zip(lens).any(may_overwrite) {
            return SpaceOutlook { reason: NoOutlook::None as u32, ..outlook };
        }
        outlook
    }

    /// Returns whether an object has a value of this length in memory.
    fn has_value_of(&self, key: &[u8], len: u64) -> bool {
        let hash = self.space().directory.hash(key);
        let shard = self.space().directory.lock(hash);
        let found = shard.find(hash, key);
        found.is_some_and(|slot| shard[slot].value().is_some_and(|value| value.len == len))
    }
}
