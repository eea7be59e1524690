//! Placement: the choice of segments for a new object.

use std::sync::Arc;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::ReplicaId;
use mooncake_core::replica::ReplicateConfig;
use mooncake_core::{Error, ErrorCode, Result};
use smallvec::SmallVec;

use super::client_disks::ClientDisks;
use super::random::SharedRng;
use super::registry::Registry;
use super::state::Space;
use crate::directory::Replicas;
use crate::model::options::Placement;
use crate::model::residue::Grantee;
use crate::model::segment::{Allocation, MountedSegment, NoSpace};
use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Number of segments that `free_ratio_first` and `ssd_free_ratio_first` examine for each requested
/// replica.
const WINDOW: usize = 6;

impl<A: SegmentAllocator, E: MergeableOrder> Space<A, E> {
    /// Allocates space for as many of the requested replicas as possible, each in another segment.
    /// `hash` is that of the key.
    ///
    /// # Errors
    /// The reason why there is no space.
    pub(crate) fn place(
        &self,
        len: u64,
        hash: u64,
        grantee: Grantee,
        config: &ReplicateConfig,
        now: Moment,
    ) -> Result<Replicas<A>, NoSpace> {
        let registry = self.segments.read();
        // The list stays locked until the space is taken, so that nothing is placed in a segment
        // after its unmount.
        let wanted = usize::try_from(config.replicas).unwrap_or(usize::MAX).min(registry.list.len());
        let mut search = Search {
            registry: &registry,
            disks: &self.disks,
            random: &self.random,
            next_replica: &self.next_replica,
            len,
            hash,
            grantee,
            now,
            wanted,
            accepts_unreachable: false,
            found: Replicas::new(),
            refusal: NoSpace::Full,
        };
        search.run(config, self.options.placement);
        let all_unreachable = || registry.list.iter().all(|segment| segment.is_reported_unreachable());
        if search.found.is_empty() && self.unreachable_reports.load(Relaxed) != 0 && all_unreachable() {
            // A segment whose client may be gone is better than none.
            search.accepts_unreachable = true;
            search.run(config, self.options.placement);
        }
        if search.found.is_empty() { Err(search.refusal) } else { Ok(search.found) }
    }

    /// Allocates space in a segment of that name.
    ///
    /// # Errors
    /// `SEGMENT_NOT_FOUND`; `UNAVAILABLE_IN_CURRENT_STATUS` if the segment accepts no objects;
    /// `NO_AVAILABLE_HANDLE`.
    pub(crate) fn place_in(
        &self,
        name: &str,
        len: u64,
        grantee: Grantee,
        now: Moment,
    ) -> Result<Allocation<A>> {
        let registry = self.segments.read();
        let segments = registry.with_name(name);
        if segments.is_empty() {
            return Err(Error::new(
                ErrorCode::SegmentNotFound,
                format!("segment is not mounted. name={name}"),
            ));
        }
        if !segments.iter().any(|segment| segment.would_open(now)) {
            let text = format!("segment accepts no objects now. name={name}");
            return Err(Error::new(ErrorCode::UnavailableInCurrentStatus, text));
        }
        for segment in segments.iter().filter(|segment| segment.would_open(now) && segment.fits(len)) {
            if let Ok(extent) = segment.allocate(len, grantee) {
                let id = self.new_replica();
                return Ok(Allocation { id, segment: segment.clone(), extent });
            }
        }
        Err(Error::new(
            ErrorCode::NoAvailableHandle,
            format!("segment has not enough free space. name={name} len={len}"),
        ))
    }

    /// Returns the name of the only segment that may hold the object, if the placement binds it to
    /// one.
    pub(crate) fn only_in<'c>(&self, config: &'c ReplicateConfig) -> Option<&'c str> {
        match self.options.placement {
            Placement::Cxl => config.preferred().first().map(String::as_str),
            _ => None,
        }
    }

    /// Returns whether there are segments, and none of them could ever hold `len` bytes.
    pub(crate) fn is_too_large(&self, len: u64) -> bool {
        !self.segments.read().list.is_empty() && !self.could_hold(len)
    }

    /// Returns whether some segment could ever hold `len` bytes.
    pub(crate) fn could_hold(&self, len: u64) -> bool {
        self.segments.read().list.iter().any(|segment| len <= segment.info.size)
    }
}

struct Search<'a, A> {
    registry: &'a Registry<A>,
    disks: &'a ClientDisks,
    random: &'a SharedRng,
    next_replica: &'a AtomicU64,
    len: u64,
    hash: u64,
    grantee: Grantee,
    now: Moment,
    wanted: usize,
    /// True if segments of unreachable clients are accepted.
    accepts_unreachable: bool,
    found: Replicas<A>,
    /// Reason if nothing is found.
    refusal: NoSpace,
}

impl<A: SegmentAllocator> Search<'_, A> {
    fn run(&mut self, config: &ReplicateConfig, placement: Placement) {
        if placement == Placement::Cxl {
            let segments = config.preferred().first().map_or(&[][..], |name| self.registry.with_name(name));
            return self.scan(segments, 1, |_| true);
        }
        for name in config.preferred() {
            self.scan(self.registry.with_name(name), usize::MAX, |_| true);
        }
        if config.replicas == 1 && (placement == Placement::LocalFirst || config.same_node) {
            self.nearest(&config.host_id);
        }
        self.spread(placement, true);
        if self.found.len() < self.wanted {
            self.spread(placement, false);
        }
    }

    /// Places on that host, or on the next one by name; nowhere if the host has no segment.
    fn nearest(&mut self, own: &str) {
        let list = &self.registry.list;
        if own.is_empty() || !list.iter().any(|segment| segment.info.host_id == own) {
            return;
        }
        self.on_host(own);
        if self.found.len() >= self.wanted {
            return;
        }
        let mut hosts: Vec<&str> = list.iter().map(|segment| segment.info.host_id.as_str()).collect();
        hosts.sort_unstable_by_key(|host| (*host < own, *host));
        hosts.dedup();
        for host in hosts.into_iter().filter(|host| *host != own) {
            self.on_host(host);
        }
    }

    /// Places in one of the segments of a host. The key selects the first that is tried.
    fn on_host(&mut self, host: &str) {
        let here: SmallVec<[_; 8]> =
            self.registry.list.iter().filter(|segment| segment.info.host_id == host).collect();
        // The low bits choose the bucket of the shard; any bits will do here.
        let start = (self.hash % here.len().max(1) as u64) as usize;
        for segment in here[start..].iter().chain(&here[..start]) {
            if self.found.len() >= self.wanted {
                return;
            }
            self.take(segment);
        }
    }

    /// Places the remaining replicas anywhere; with `hosts`, only on hosts without a replica.
    fn spread(&mut self, placement: Placement, hosts: bool) {
        match placement {
            Placement::FreeRatioFirst => self.spread_by_free_ratio(hosts, |segment| segment.free_ratio()),
            Placement::SsdFreeRatioFirst => {
                let disks = self.disks;
                self.spread_by_free_ratio(hosts, |segment| disks.free_ratio(segment.client));
            }
            Placement::Random | Placement::LocalFirst | Placement::Cxl => {}
        }
        while self.found.len() < self.wanted {
            let before = self.found.len();
            let taken: Vec<_> =
                if hosts { self.found.iter().map(|held| held.segment.clone()).collect() } else { Vec::new() };
            self.scan(&self.registry.list, before + 1, |segment| {
                taken.iter().all(|other| host(other) != host(segment))
            });
            if self.found.len() == before {
                return;
            }
        }
    }

    /// Tries the segments in order from a random start, until `limit` replicas are placed in all.
    fn scan(
        &mut self,
        segments: &[Arc<MountedSegment<A>>],
        limit: usize,
        wanted: impl Fn(&MountedSegment<A>) -> bool,
    ) {
        if segments.is_empty() {
            return;
        }
        let start = self.random.below(segments.len());
        for segment in segments[start..].iter().chain(&segments[..start]) {
            if self.found.len() >= self.wanted.min(limit) {
                return;
            }
            if wanted(segment) {
                self.take(segment);
            }
        }
    }

    /// Tries a few segments from a random start, in an order drawn with the free ratios as weights.
    fn spread_by_free_ratio(&mut self, hosts: bool, free_ratio: impl Fn(&MountedSegment<A>) -> f64) {
        let list = &self.registry.list;
        if list.is_empty() {
            return;
        }
        let missing = self.wanted.saturating_sub(self.found.len());
        let start = self.random.below(list.len());
        let window = list[start..].iter().chain(&list[..start]).take(missing.saturating_mul(WINDOW));
        let mut drawn: Vec<_> = window
            .map(|segment| (self.random.unit().powf(1.0 / free_ratio(segment).max(1e-9)), segment))
            .collect();
        drawn.sort_by(|a, b| b.0.total_cmp(&a.0));
        for (_, segment) in drawn {
            if self.found.len() >= self.wanted {
                return;
            }
            if !hosts || self.found.iter().all(|held| host(&held.segment) != host(segment)) {
                self.take(segment);
            }
        }
    }

    fn take(&mut self, segment: &Arc<MountedSegment<A>>) {
        let open =
            if self.accepts_unreachable { segment.would_open(self.now) } else { segment.is_open(self.now) };
        let usable = open
            && segment.fits(self.len)
            && self.found.iter().all(|held| !Arc::ptr_eq(&held.segment, segment));
        if !usable {
            return;
        }
        match segment.allocate(self.len, self.grantee) {
            Ok(extent) => {
                let id = ReplicaId(self.next_replica.fetch_add(1, Relaxed));
                self.found.push(Allocation { id, segment: segment.clone(), extent });
            }
            Err(NoSpace::Remains) => self.refusal = NoSpace::Remains,
            Err(NoSpace::Full) => {}
        }
    }
}

/// Returns the unit of failure: the host, or the client if the host is not known.
fn host<A: SegmentAllocator>(segment: &MountedSegment<A>) -> (&str, Option<mooncake_core::ids::ClientId>) {
    match segment.info.host_id.as_str() {
        "" => ("", Some(segment.client)),
        host => (host, None),
    }
}
