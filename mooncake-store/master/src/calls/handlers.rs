//! Handlers of the RPCs, one for each call of the table.
//!
//! A handler adds the prefix of the caller's tenant to the keys, if tenants are on, and calls the
//! method of [`Master`] that does the work.

use std::slice::from_ref;
use std::time::Duration;

use mooncake_core::alloc::{Extent, SegmentAllocator};
use mooncake_core::clock::SharedClock;
use mooncake_core::error::{Error, ErrorCode, Result};
use mooncake_core::evict::{Batch, MergeableOrder};
use mooncake_core::ids::ClientId;
use mooncake_core::replica::{Replica, ReplicaType, ReplicateConfig};

use mooncake_protocol::api::{Caller, CopyToken, EndItem, WriteMode};
use mooncake_protocol::call::Response;
use mooncake_protocol::frame::Refusal;
use mooncake_protocol::master_client::EmbeddedMaster;
use mooncake_protocol::message::*;
use mooncake_protocol::pack::{self, Pack, Pairs};
use mooncake_protocol::wire::{
    DrainProgress, ItemLifetime, PromotionPlan, ReadablePrefix, TaskKind, pack_prefix,
};

use super::chains::{KeyInCall, key_in};
use super::master::Master;
use super::put::Put;
use crate::model::value::Writer;

/// Implements [`Handle`] for [`Master`], one row for each call.
macro_rules! handlers {
    ($($call:ident $(<$life:lifetime>)?: |$master:ident, $request:pat_param| $handled:expr;)*) => {$(
        impl<$($life,)? A: SegmentAllocator, E: MergeableOrder> Handle<$call $(<$life>)?> for Master<A, E> {
            fn handle(&self, $request: $call $(<$life>)?) -> Outcome<$call $(<$life>)?> {
                let $master = self;
                $handled
            }
        }
    )*};
}

fn each<T, U>(items: &[T], handle: impl FnMut(&T) -> U) -> Vec<U> {
    items.iter().map(handle).collect()
}

// Reads.
handlers! {
    ExistKey<'a>: |master, r| {
        Ok(master.exists_of(r.tenant, r.key, KeyInCall::default()))
    };
    BatchExistKey<'a>: |master, r| {
        let mut call = master.call_without_use();
        let exists = |(at, key): (usize, &&[u8])| {
            let found = master.exists_of(r.tenant, key, call.key(at));
            if found {
                call.record_found(at);
            }
            Ok(found)
        };
        let found = r.keys.iter().enumerate().map(exists).collect();
        master.end_read(&call, r.tenant, &r.keys);
        found
    };
    GetReplicaListByRegex<'a>: |master, r| master.locate_matching_of(r.tenant, r.pattern).map(|found| {
        Pairs(found.into_iter().map(|(key, replicas)| (key.as_bytes().to_vec(), replicas)).collect())
    });
    BatchQueryIp<'a>: |master, r| Ok(Pairs(master.addresses(&r.clients)));
}

impl<'a, A: SegmentAllocator, E: MergeableOrder> Handle<GetReplicaList<'a>> for Master<A, E> {
    fn handle(&self, r: GetReplicaList<'a>) -> Outcome<GetReplicaList<'a>> {
        self.locate_of(r.tenant, r.key, KeyInCall::default())
    }

    fn respond(&self, r: GetReplicaList<'a>, response: &mut Response<'_>) -> Result<(), Refusal> {
        response.write_one::<GetReplicaList<'a>, _>(|out| {
            self.locate_to(r.tenant, r.key, KeyInCall::default(), out)
        })
    }
}

impl<'a, A: SegmentAllocator, E: MergeableOrder> Handle<BatchGetReplicaList<'a>> for Master<A, E> {
    fn handle(&self, r: BatchGetReplicaList<'a>) -> Outcome<BatchGetReplicaList<'a>> {
        let mut call = self.read_call(r.tenant, &r.keys);
        let locate = |at: usize| {
            let found = self.locate_of(r.tenant, r.keys[at], call.key(at))?;
            call.record_found(at);
            Ok(found)
        };
        let found = (0..r.keys.len()).map(locate).collect();
        self.end_read(&call, r.tenant, &r.keys);
        found
    }

    fn respond(&self, r: BatchGetReplicaList<'a>, response: &mut Response<'_>) -> Result<(), Refusal> {
        let mut call = self.read_call(r.tenant, &r.keys);
        let written = response.write_each::<BatchGetReplicaList<'a>, _>(r.keys.len(), |at, out| {
            self.locate_to(r.tenant, r.keys[at], call.key(at), out)?;
            call.record_found(at);
            Ok(())
        });
        self.end_read(&call, r.tenant, &r.keys);
        written
    }
}

impl<'a, A: SegmentAllocator, E: MergeableOrder> Handle<LocateAgain<'a>> for Master<A, E> {
    fn handle(&self, r: LocateAgain<'a>) -> Outcome<LocateAgain<'a>> {
        let mut call = self.read_call(r.tenant, &r.keys);
        let locate = |at: usize| {
            let located = r.located.get(at).copied();
            let found = self.locate_of(r.tenant, r.keys[at], call.key(at).located(located))?;
            call.record_found(at);
            Ok(found)
        };
        let found = (0..r.keys.len()).map(locate).collect();
        self.end_read(&call, r.tenant, &r.keys);
        found
    }
}

impl<'a, A: SegmentAllocator, E: MergeableOrder> Handle<LocatePrefix<'a>> for Master<A, E> {
    fn handle(&self, r: LocatePrefix<'a>) -> Outcome<LocatePrefix<'a>> {
        if !r.with_replicas {
            return Ok(ReadablePrefix { count: self.prefix_hits(&r) as u64, ..ReadablePrefix::default() });
        }
        let mut call = self.read_call(r.tenant, &r.keys);
        let locate = |at: usize| {
            let found = self.locate_of(r.tenant, r.keys[at], call.key(at)).ok()?;
            call.record_found(at);
            Some(found)
        };
        let replicas: Vec<_> = (0..r.keys.len()).map_while(locate).collect();
        self.end_prefix(&call, r.tenant, &r.keys);
        Ok(ReadablePrefix { count: replicas.len() as u64, replicas })
    }

    fn respond(&self, r: LocatePrefix<'a>, response: &mut Response<'_>) -> Result<(), Refusal> {
        let asked = r.keys.len();
        response.write_front::<LocatePrefix<'a>, ReadablePrefix>(asked, |out| {
            if r.with_replicas {
                let mut call = self.read_call(r.tenant, &r.keys);
                let hits = pack_prefix(asked, out, |at, out| {
                    self.locate_to(r.tenant, r.keys[at], call.key(at), out)?;
                    call.record_found(at);
                    Ok(())
                });
                self.end_prefix(&call, r.tenant, &r.keys);
                return hits;
            }
            let hits = self.prefix_hits(&r);
            ReadablePrefix { count: hits as u64, ..ReadablePrefix::default() }.pack(out);
            hits
        })
    }
}

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    /// Counts the keys from the front whose objects can be read, and grants leases on these.
    fn prefix_hits(&self, r: &LocatePrefix<'_>) -> usize {
        let mut call = self.call_without_use();
        for (at, key) in r.keys.iter().enumerate() {
            if !self.exists_of(r.tenant, key, call.key(at)) {
                break;
            }
            call.record_found(at);
        }
        self.end_prefix(&call, r.tenant, &r.keys);
        call.found()
    }
}

/// Writes that one call starts.
struct Starts<'r> {
    caller: Caller<'r>,
    mode: WriteMode,
    keys: &'r [&'r [u8]],
    sizes: &'r [u64],
    config: &'r ReplicateConfig,
}

impl Starts<'_> {
    /// Starts the write of the object at this index by `start`.
    fn start<A: SegmentAllocator, E: MergeableOrder, R>(
        &self,
        master: &Master<A, E>,
        at: usize,
        start: impl FnOnce(&Put<'_>) -> Result<R>,
    ) -> Result<R> {
        if self.keys.len() != self.sizes.len() {
            return Err(Error::invalid(format!(
                "cannot start writes: {} lengths for {} objects",
                self.sizes.len(),
                self.keys.len()
            )));
        }
        let (tenant, len) = (self.caller.tenant, self.sizes[at]);
        let (key, group) = (master.scoped(tenant, self.keys[at])?, self.group(at)?);
        let group = master.scoped_group(tenant, group);
        let (writer, mode, config) = (self.caller.into(), self.mode, self.config);
        let put = Put { writer, mode, key: &key, len, config, group: &group };
        start(&put).map_err(|error| self.refusal(master, len, error))
    }

    /// Returns the chain of the keys, if the policy has a use for it.
    fn chain<A: SegmentAllocator, E: MergeableOrder>(&self, master: &Master<A, E>) -> Option<Batch> {
        let Caller { client, tenant, .. } = self.caller;
        master.put_chain(client, tenant, self.keys, self.config.hints.as_deref())
    }

    /// Returns the group of the object at this index; empty for none.
    fn group(&self, at: usize) -> Result<&str> {
        match &self.config.group_ids {
            None => Ok(""),
            Some(groups) if groups.len() == self.keys.len() => Ok(&groups[at]),
            Some(groups) => Err(Error::invalid(format!(
                "cannot start writes: {} group ids for {} objects",
                groups.len(),
                self.keys.len()
            ))),
        }
    }

    /// Returns the error that the caller of a refused put receives.
    fn refusal<A: SegmentAllocator, E: MergeableOrder>(
        &self,
        master: &Master<A, E>,
        len: u64,
        error: Error,
    ) -> Error {
        // Mooncake C++ does not number writes, so it does not receive this error: no client need
        // wait for free space that cannot exist.
        if self.caller.attempt != 0
            && error.code() == ErrorCode::NoAvailableHandle
            && master.space().is_too_large(len)
        {
            return Error::new(ErrorCode::BufferOverflow, "no segment is large enough").with_source(error);
        }
        error
    }
}

/// Implements [`Handle`] for the starts of writes.
macro_rules! starts {
    ($($how:ident $call:ident: |$master:ident, $r:ident| $starts:expr;)*) => {$(
        impl<'a, A: SegmentAllocator, E: MergeableOrder> Handle<$call<'a>> for Master<A, E> {
            fn handle(&self, $r: $call<'a>) -> Outcome<$call<'a>> {
                let $master = self;
                let starts = $starts;
                let chain = starts.chain($master);
                let start = |at| starts.start(self, at, |put| self.put_start_in(put, key_in(chain.as_ref(), at)));
                starts!(@handle $how starts start)
            }

            fn respond(&self, $r: $call<'a>, response: &mut Response<'_>) -> Result<(), Refusal> {
                let $master = self;
                let starts = $starts;
                let chain = starts.chain($master);
                let start = |at, out: &mut pack::Writer<'_>| {
                    starts.start(self, at, |put| self.put_start_to(put, key_in(chain.as_ref(), at), out))
                };
                starts!(@respond $how $call starts start response)
            }
        }
    )*};
    (@handle one $starts:ident $start:ident) => { $start(0) };
    (@handle many $starts:ident $start:ident) => { (0..$starts.keys.len()).map($start).collect() };
    (@respond one $call:ident $starts:ident $start:ident $response:ident) => {
        $response.write_one::<$call<'a>, Vec<Replica>>(|out| $start(0, out))
    };
    (@respond many $call:ident $starts:ident $start:ident $response:ident) => {
        $response.write_each::<$call<'a>, Vec<Replica>>($starts.keys.len(), $start)
    };
}

starts! {
    one PutStart: |_master, r| Starts {
        caller: caller(r.client, r.tenant),
        mode: WriteMode::Put,
        keys: from_ref(&r.key),
        sizes: from_ref(&r.size),
        config: &r.config,
    };
    one UpsertStart: |_master, r| Starts {
        caller: caller(r.client, r.tenant),
        mode: WriteMode::Upsert,
        keys: from_ref(&r.key),
        sizes: from_ref(&r.size),
        config: &r.config,
    };
    many BatchPutStart: |_master, r| Starts {
        caller: caller(r.client, r.tenant),
        mode: WriteMode::Put,
        keys: &r.keys,
        sizes: &r.sizes,
        config: &r.config,
    };
    many BatchUpsertStart: |_master, r| Starts {
        caller: caller(r.client, r.tenant),
        mode: WriteMode::Upsert,
        keys: &r.keys,
        sizes: &r.sizes,
        config: &r.config,
    };
    many StartHintedWrites: |master, r| Starts {
        caller: Caller { client: r.client, tenant: r.tenant, attempt: r.attempt },
        mode: if r.replace { WriteMode::Upsert } else { WriteMode::Put },
        keys: &r.keys,
        sizes: &r.sizes,
        config: &master.hinted(r.tenant, &r.keys, &r.config, &r.hints),
    };
    many StartWrites: |_master, r| Starts {
        caller: Caller { client: r.client, tenant: r.tenant, attempt: r.attempt },
        mode: if r.replace { WriteMode::Upsert } else { WriteMode::Put },
        keys: &r.keys,
        sizes: &r.sizes,
        config: &r.config,
    };
}

fn caller(client: ClientId, tenant: &str) -> Caller<'_> {
    Caller { client, tenant, attempt: 0 }
}

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    fn end_write(&self, caller: Caller<'_>, item: &EndItem<'_>, replicas: ReplicaType) -> Result<()> {
        self.end_write_at(caller, item, replicas, None)
    }

    fn end_write_at(
        &self,
        caller: Caller<'_>,
        item: &EndItem<'_>,
        replicas: ReplicaType,
        use_number: Option<u64>,
    ) -> Result<()> {
        let key = self.scoped_if_known(caller.tenant, item.key)?;
        self.put_end_at(Writer::from(caller), &key, item.checksum, replicas, use_number)
    }

    /// Ends a batch of writes, whose last key counts as the least recently used.
    fn end_writes(
        &self,
        caller: Caller<'_>,
        items: &[EndItem<'_>],
        replicas: ReplicaType,
    ) -> Vec<Result<()>> {
        let directory = &self.space().directory;
        let largest = directory.ranks_by_value().then(|| directory.next_use_numbers(items.len()));
        let end = |(at, item)| {
            let use_number = largest.map(|largest| largest - at as u64);
            self.end_write_at(caller, item, replicas, use_number)
        };
        // In an order of time, the last object to be stored is the last one to be evicted.
        if largest.is_none() && items.len() > 1 && self.write_keeps_front(caller.tenant, items[0].key) {
            let mut outcomes: Vec<_> = items.iter().enumerate().rev().map(end).collect();
            outcomes.reverse();
            return outcomes;
        }
        items.iter().enumerate().map(end).collect()
    }

    fn revoke_write(&self, caller: Caller<'_>, key: &[u8], replicas: ReplicaType) -> Result<()> {
        self.put_revoke(Writer::from(caller), &self.scoped_if_known(caller.tenant, key)?, replicas)
    }
}

// Ends of writes.
handlers! {
    PutEnd<'a>: |master, r| master.end_write(caller(r.client, r.tenant), &r.item, r.replicas);
    UpsertEnd<'a>: |master, r| master.end_write(caller(r.client, r.tenant), &r.item, r.replicas);
    BatchPutEnd<'a>: |master, r| {
        master.end_writes(caller(r.client, r.tenant), &r.items, r.replicas)
    };
    BatchUpsertEnd<'a>: |master, r| {
        master.end_writes(caller(r.client, r.tenant), &r.items, ReplicaType::All)
    };
    EndWrites<'a>: |master, r| {
        let caller = Caller { client: r.client, tenant: r.tenant, attempt: r.attempt };
        master.end_writes(caller, &r.items, r.replicas)
    };
    PutRevoke<'a>: |master, r| master.revoke_write(caller(r.client, r.tenant), r.key, r.replicas);
    UpsertRevoke<'a>: |master, r| master.revoke_write(caller(r.client, r.tenant), r.key, r.replicas);
    BatchPutRevoke<'a>: |master, r| {
        each(&r.keys, |key| master.revoke_write(caller(r.client, r.tenant), key, r.replicas))
    };
    BatchUpsertRevoke<'a>: |master, r| {
        each(&r.keys, |key| master.revoke_write(caller(r.client, r.tenant), key, ReplicaType::All))
    };
    RevokeWrites<'a>: |master, r| {
        let caller = Caller { client: r.client, tenant: r.tenant, attempt: r.attempt };
        each(&r.keys, |key| master.revoke_write(caller, key, r.replicas))
    };
}

// Removals.
handlers! {
    Remove<'a>: |master, r| master.remove(&master.scoped_if_known(r.tenant, r.key)?, r.force);
    BatchRemove<'a>: |master, r| {
        each(&r.keys, |key| master.handle(Remove { key, force: r.force, tenant: r.tenant }))
    };
    RemoveByRegex<'a>: |master, r| master.remove_matching_of(r.tenant, r.pattern, r.force).map(signed);
    RemoveAll<'a>: |master, r| Ok(signed(master.remove_all_of(r.tenant, r.force)));
    BatchReplicaClear<'a>: |master, r| {
        let cleared = master.clear_replicas_anywhere(&r.keys, r.client, r.segment_name);
        Ok(cleared.iter().map(|key| key.as_bytes().to_vec()).collect())
    };
}

fn signed(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

// Clients and segments.
handlers! {
    ServiceReady: |_master, _| Ok(MASTER_VERSION.to_owned());
    GetStorageConfig: |master, _| Ok(master.storage());
    GetFsdir: |master, _| Ok(master.storage().fs_dir);
    Ping: |master, r| Ok(master.ping(r.client));
    ReportUnreachable<'a>: |master, r| {
        master.doubt(r.client, r.endpoint);
        Ok(())
    };
    MountSegment<'a>: |master, r| master.mount(r.client, &r.segment);
    ReMountSegment<'a>: |master, r| master.remount(r.client, &r.segments);
    UnmountSegment: |master, r| master.unmount(r.client, r.segment);
    GracefulUnmountSegment: |master, r| {
        master.unmount_after(r.client, r.segment, Duration::from_millis(r.grace_ms))
    };
    QuerySegmentStatus<'a>: |master, r| master.segment_status_named(r.segment_name);
    QuerySegmentStatusById: |master, r| master.segment_status(r.segment);
}

// Tasks, copies and moves.
handlers! {
    FetchTasks: |master, r| Ok(master.fetch_tasks(r.client, r.limit));
    CreateCopyTask<'a>: |master, r| master.create_copy(&master.scoped(r.tenant, r.key)?, &r.targets);
    CreateMoveTask<'a>: |master, r| {
        master.create_move(&master.scoped(r.tenant, r.key)?, r.source, r.target)
    };
    QueryTask: |master, r| master.task(r.task);
    MarkTaskToComplete: |master, r| master.complete_task(r.client, &r.report);
    CopyStart<'a>: |master, r| {
        master.copy_start(r.client, &master.scoped(r.tenant, r.key)?, r.source, &r.targets)
    };
    CopyEnd<'a>: |master, r| {
        master.replication_end(r.client, TaskKind::Copy, &master.scoped_if_known(r.tenant, r.key)?)
    };
    CopyRevoke<'a>: |master, r| {
        master.replication_revoke(r.client, TaskKind::Copy, &master.scoped_if_known(r.tenant, r.key)?)
    };
    MoveStart<'a>: |master, r| {
        master.move_start(r.client, &master.scoped(r.tenant, r.key)?, r.source, r.target)
    };
    MoveEnd<'a>: |master, r| {
        master.replication_end(r.client, TaskKind::Move, &master.scoped_if_known(r.tenant, r.key)?)
    };
    MoveRevoke<'a>: |master, r| {
        master.replication_revoke(r.client, TaskKind::Move, &master.scoped_if_known(r.tenant, r.key)?)
    };
    DynamicReplicaCopyStart<'a>: |master, r| {
        let (key, token) = (master.scoped(r.tenant, r.key)?, CopyToken { lease: r.lease, epoch: r.epoch });
        master.hot_copy_start(r.client, &key, r.source, &r.targets, token)
    };
    DynamicReplicaCopyEnd<'a>: |master, r| {
        let token = CopyToken { lease: r.lease, epoch: r.epoch };
        master.hot_copy_end(r.client, &master.scoped_if_known(r.tenant, r.key)?, token)
    };
    DynamicReplicaCopyRevoke<'a>: |master, r| {
        let token = CopyToken { lease: r.lease, epoch: r.epoch };
        master.hot_copy_revoke(r.client, &master.scoped_if_known(r.tenant, r.key)?, token)
    };
}

// Disks of clients, and files.
handlers! {
    MountLocalDiskSegment: |master, r| master.mount_disk(r.client, r.enabled);
    UnmountLocalDiskSegment: |master, r| master.unmount_disk(r.client);
    OffloadObjectHeartbeat: |master, r| master.to_offload(r.client, r.enabled);
    NotifyOffloadSuccess<'a>: |master, r| master.offloaded(r.client, &r.offloaded, &r.places);
    PollRemoveAll: |master, r| master.must_clear_disk(r.client);
    FetchDiskWork: |master, r| master.disk_work(r.client, r.begin, r.done);
    ReportSsdCapacity: |master, r| master.disk_capacity(r.client, r.bytes);
    PromotionObjectHeartbeat: |master, r| master.to_promote(r.client);
    PromotionAllocStart<'a>: |master, r| {
        let key = master.scoped_if_known(r.tenant, r.key)?;
        master.promotion_start(r.client, &key, r.size, &r.preferred).map(|memory| PromotionPlan { memory })
    };
    NotifyPromotionSuccess<'a>: |master, r| {
        master.promoted(r.client, &master.scoped_if_known(r.tenant, r.key)?)
    };
    NotifyPromotionFailure<'a>: |master, r| {
        master.promotion_failed(r.client, &master.scoped_if_known(r.tenant, r.key)?)
    };
    EvictDiskReplica<'a>: |master, r| {
        let key = master.scoped_if_known(r.tenant, r.key)?;
        match r.replicas {
            ReplicaType::LocalDisk => master.dropped_from_disk(r.client, &key),
            ReplicaType::Disk => master.dropped_file(r.client, &key),
            other => master
                .find(&key)
                .and(Err(Error::invalid(format!("expected a replica type on disk. type={other:?}")))),
        }
    };
    BatchEvictDiskReplica<'a>: |master, r| each(&r.keys, |key| {
        master.handle(EvictDiskReplica { client: r.client, key, tenant: r.tenant, replicas: r.replicas })
    });
}

// NVMe-oF targets, which this master does not support: the responses of Mooncake C++ without them.
handlers! {
    MountNoFSegment<'a>: |_master, _| Err(no_nof());
    ReMountNoFSegment<'a>: |_master, _| Err(no_nof());
    UnmountNoFSegment: |_master, _| Err(no_nof());
    GetAllNoFSegments: |_master, _| Ok(Vec::new());
    GetNoFSegmentsByName<'a>: |_master, r| {
        let text = format!("NVMe-oF target not found. name={}", r.segment_name);
        Err(Error::new(ErrorCode::SegmentNotFound, text))
    };
}

fn no_nof() -> Error {
    Error::new(ErrorCode::UnavailableInCurrentMode, "this master does not support NVMe-oF targets")
}

// Objects that outlive the master or their client.
handlers! {
    FetchInventory: |master, r| Ok(master.inventory(r.client, r.after));
    FetchTimedInventory: |master, r| Ok(master.timed_inventory(r.client, r.after));
    MountKeptSegment<'a>: |master, r| master.mount_kept(r.client, &r.segment);
    KeepExtents<'a>: |master, r| {
        if r.offsets.len() != r.lengths.len() {
            return Err(Error::invalid(format!(
                "cannot reserve extents: {} lengths for {} offsets",
                r.lengths.len(),
                r.offsets.len()
            )));
        }
        let extents = r.offsets.iter().zip(r.lengths.iter());
        let extents: Vec<_> = extents.map(|(&offset, &len)| Extent { offset, len }).collect();
        master.keep(r.client, r.segment, &extents, r.open)
    };
    AnnounceReplicas<'a>: |master, r| each(&r.stored, |stored| master.announce(r.client, stored));
    AnnounceTimed<'a>: |master, r| {
        let mut lifetimes = vec![None; r.stored.len()];
        for ItemLifetime { index, lifetime } in r.lifetimes.iter() {
            if let Some(of) = usize::try_from(*index).ok().and_then(|index| lifetimes.get_mut(index)) {
                *of = Some(*lifetime);
            }
        }
        let announced = r.stored.iter().zip(lifetimes);
        announced.map(|(stored, lifetime)| master.announce_timed(r.client, stored, lifetime)).collect()
    };
    ReleaseKept: |master, r| master.release_kept(r.client, r.segment);
    ExchangePromise: |master, r| Ok(master.exchange_promise(r.client, r.promise_ms));
    DrainClient: |master, r| {
        let job = master.drain_client(r.client)?;
        Ok(DrainProgress {
            done: job.status.is_over(),
            moved: job.succeeded,
            bytes: job.migrated_bytes,
            left: job.active + job.blocked + job.failed,
        })
    };
    FetchExpired: |master, r| Ok(master.expired(r.client, r.segment, r.after));
    AnnounceExpired<'a>: |master, r| {
        each(&r.stored, |stored| master.announce_expired(r.client, stored))
    };
}

impl<A: SegmentAllocator, E: MergeableOrder> EmbeddedMaster for Master<A, E> {
    fn clock(&self) -> &SharedClock {
        self.clock()
    }

    fn do_due_work(&self) {
        self.tick();
    }
}
