//! Bytes of earlier objects that remain in the memory of a segment, and their removal.
//!
//! A client of this project writes every byte of an object, or the object never becomes readable. A
//! client of Mooncake C++ may end a put without a write, and readers of the object then see the
//! bytes that were there before. Such a writer is therefore granted only memory without bytes of
//! other tenants. The owner of a segment zeroes the rest, if it can; the master never touches data.

use std::collections::{BTreeMap, VecDeque};

use mooncake_core::alloc::Extent;

/// Maximum number of freed extents that wait for the owner. Further ones are zeroed once a writer
/// needs them.
const MAX_FREED: usize = 1 << 16;
/// Bytes that a shorter extent counts as in the limit of a response.
const MIN_COUNTED: u64 = 16 << 10;
/// Part of a segment that may be taken at a time so that its owner zeroes it.
const MAX_TAKEN_PART: u64 = 8;

/// Receiver of an allocation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grantee {
    /// Number of the tenant of the object.
    pub(crate) tenant: u32,
    /// True if the writer ends no write with bytes missing.
    pub(crate) writes_all: bool,
}

/// Tenants whose bytes remain in a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Remains {
    /// Bytes of one tenant.
    Of(u32),
    /// Bytes of several tenants, or of unknown ones.
    OfSeveral,
}

/// Remains of objects in one segment.
#[derive(Debug)]
pub(crate) struct Residue {
    /// End and remains of each range, by its start. The ranges do not overlap. Other bytes are
    /// zero, or were never written.
    ranges: BTreeMap<u64, (u64, Remains)>,
    /// Extents that were freed and have not been zeroed. Some may be allocated again.
    freed: VecDeque<Extent>,
    /// Taken extents that the owner shall zero.
    waiting: VecDeque<Extent>,
    /// Taken extents that the owner was asked to zero, by the number of the request.
    requested: BTreeMap<u64, Extent>,
    taken: u64,
    max_taken: u64,
    /// True if the owner asks what to zero.
    owner_zeroes: bool,
    /// True once a writer that may leave bytes out has asked for memory here.
    is_needed: bool,
}

impl Residue {
    /// Creates the state of a segment of `len` bytes. Memory that is not `fresh` has bytes of
    /// unknown tenants.
    pub(crate) fn new(len: u64, fresh: bool) -> Self {
        let mut ranges = BTreeMap::new();
        if !fresh {
            ranges.insert(0, (len, Remains::OfSeveral));
        }
        Self {
            ranges,
            freed: VecDeque::new(),
            waiting: VecDeque::new(),
            requested: BTreeMap::new(),
            taken: 0,
            max_taken: len / MAX_TAKEN_PART,
            owner_zeroes: false,
            is_needed: false,
        }
    }

    /// Returns whether a writer may receive an extent.
    pub(crate) fn admits(&mut self, extent: Extent, grantee: Grantee) -> bool {
        if grantee.writes_all {
            return true;
        }
        self.is_needed = true;
        self.remains_in(extent).all(|remains| remains == Remains::Of(grantee.tenant))
    }

    /// Records that a tenant may write to an extent from now on.
    pub(crate) fn record(&mut self, extent: Extent, tenant: u32) {
        let is_own = self.remains_in(extent).all(|remains| remains == Remains::Of(tenant));
        let remains = if is_own { Remains::Of(tenant) } else { Remains::OfSeveral };
        self.clear(extent);
        let (mut start, mut end) = (extent.offset, extent.offset + extent.len);
        // Equal neighbours become one range.
        if let Some((&before, &(at, same))) = self.ranges.range(..start).next_back()
            && (at, same) == (start, remains)
        {
            self.ranges.remove(&before);
            start = before;
        }
        if let Some(&(after, same)) = self.ranges.get(&end)
            && same == remains
        {
            self.ranges.remove(&end);
            end = after;
        }
        self.ranges.insert(start, (end, remains));
    }

    /// Records that nothing remains in an extent.
    fn clear(&mut self, Extent { offset, len }: Extent) {
        let end = offset + len;
        if let Some((&start, &(until, remains))) = self.ranges.range(..offset).next_back()
            && until > offset
        {
            self.ranges.insert(start, (offset, remains));
            if until > end {
                self.ranges.insert(end, (until, remains));
            }
        }
        while let Some((&start, &(until, remains))) = self.ranges.range(offset..end).next() {
            self.ranges.remove(&start);
            if until > end {
                self.ranges.insert(end, (until, remains));
            }
        }
    }

    /// Returns the remains in an extent, range by range.
    fn remains_in(&self, Extent { offset, len }: Extent) -> impl Iterator<Item = Remains> {
        let before = self.ranges.range(..offset).next_back().filter(|(_, (end, _))| *end > offset);
        let inside = self.ranges.range(offset..offset + len);
        before.into_iter().chain(inside).map(|(_, (_, remains))| *remains)
    }

    /// Records that an extent is free again.
    pub(crate) fn note_free(&mut self, extent: Extent) {
        if self.is_needed && self.owner_zeroes && self.freed.len() < MAX_FREED {
            self.freed.push_back(extent);
        }
    }

    /// Takes an allocated extent that its writer must not receive, so that the owner zeroes it.
    /// Returns whether it was taken; otherwise the caller frees it.
    pub(crate) fn take(&mut self, extent: Extent) -> bool {
        let takes = self.owner_zeroes && self.taken + extent.len <= self.max_taken.max(extent.len);
        if takes {
            self.taken += extent.len;
            self.waiting.push_back(extent);
        }
        takes
    }

    /// Returns extents for the owner to zero, with the number of each request: those without an
    /// acknowledgement, and further ones up to `most` bytes in all. `reserve` allocates an extent
    /// if it is still free.
    pub(crate) fn request(
        &mut self,
        most: u64,
        mut number: impl FnMut() -> u64,
        mut reserve: impl FnMut(Extent) -> bool,
    ) -> Vec<(u64, Extent)> {
        self.owner_zeroes = true;
        let counted = |extent: &Extent| extent.len.max(MIN_COUNTED);
        let mut bytes: u64 = self.requested.values().map(counted).sum();
        while bytes < most {
            let extent = match self.waiting.pop_front() {
                Some(extent) => extent,
                None => {
                    let Some(extent) = self.freed.pop_front() else { break };
                    if self.remains_in(extent).next().is_none() || !reserve(extent) {
                        continue;
                    }
                    self.taken += extent.len;
                    extent
                }
            };
            bytes += counted(&extent);
            self.requested.insert(number(), extent);
        }
        self.requested.iter().map(|(number, extent)| (*number, *extent)).collect()
    }

    /// Records that the owner has zeroed the extent of a request. Returns the extent, which is to
    /// be freed.
    pub(crate) fn acknowledge(&mut self, number: u64) -> Option<Extent> {
        let extent = self.requested.remove(&number)?;
        self.taken -= extent.len;
        self.clear(extent);
        Some(extent)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Length of the segment of the property, in bytes.
    const LEN: u64 = 48;

    fn at(offset: u64, len: u64) -> Extent {
        Extent { offset, len }
    }

    proptest! {
        /// The oracle has the remains of each byte.
        #[test]
        fn ranges_agree_with_remains_per_byte(
            fresh: bool,
            steps in prop::collection::vec((0..LEN, 1..LEN, 0..3u32), 0..40),
        ) {
            let mut residue = Residue::new(LEN, fresh);
            let start = if fresh { None } else { Some(Remains::OfSeveral) };
            let mut bytes = [start; LEN as usize];
            for (offset, len, tenant) in steps {
                let extent = at(offset, len.min(LEN - offset));
                let range = offset as usize..(offset + extent.len) as usize;
                let is_own = |byte: &Option<Remains>| byte.is_none_or(|byte| byte == Remains::Of(tenant));
                let own = bytes[range.clone()].iter().all(is_own);
                prop_assert_eq!(residue.admits(extent, Grantee { tenant, writes_all: false }), own);
                let is_admitted = residue.admits(extent, Grantee { tenant, writes_all: true });
                prop_assert!(is_admitted);
                if tenant == 0 {
                    residue.clear(extent);
                    bytes[range].fill(None);
                } else {
                    residue.record(extent, tenant);
                    bytes[range].fill(Some(if own { Remains::Of(tenant) } else { Remains::OfSeveral }));
                }
                for (byte, remains) in bytes.iter().enumerate() {
                    prop_assert_eq!(residue.remains_in(at(byte as u64, 1)).next(), *remains);
                }
                let ends = residue.ranges.iter().map(|(start, (end, _))| (*start, *end));
                let ends: Vec<_> = ends.collect();
                prop_assert!(ends.iter().all(|(start, end)| start < end));
                prop_assert!(ends.windows(2).all(|pair| pair[0].1 <= pair[1].0));
            }
        }
    }

    #[test]
    fn an_extent_is_requested_until_it_is_acknowledged() {
        let mut residue = Residue::new(1024, false);
        assert!(!residue.take(at(0, 64)), "nobody would zero it");
        let mut numbers = 7..;
        let mut number = || numbers.next().unwrap_or_default();
        let most = 3 * MIN_COUNTED;
        assert!(residue.request(most, &mut number, |_| true).is_empty());
        assert!(residue.take(at(0, 64)) && residue.take(at(64, 64)));
        assert!(!residue.take(at(128, 64)), "more than an eighth");
        let first = residue.request(most, &mut number, |_| true);
        assert_eq!(first, [(7, at(0, 64)), (8, at(64, 64))]);
        assert_eq!(residue.request(most, &mut number, |_| true), first);
        assert_eq!(residue.acknowledge(7), Some(at(0, 64)));
        assert_eq!(residue.acknowledge(7), None);
        assert_eq!(residue.request(1, &mut number, |_| true), [(8, at(64, 64))]);
        let grantee = Grantee { tenant: 1, writes_all: false };
        assert!(residue.admits(at(0, 64), grantee) && !residue.admits(at(0, 65), grantee));
        // Only what is still free, and has remains.
        residue.note_free(at(0, 64));
        residue.note_free(at(256, 64));
        residue.note_free(at(512, 64));
        let more = residue.request(most, &mut number, |extent| extent.offset == 512);
        assert_eq!(more, [(8, at(64, 64)), (9, at(512, 64))]);
    }
}
