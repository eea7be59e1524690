//! Handlers of the RPCs, one for each call of the table.
//!
//! A handler adds the prefix of the caller's tenant to the keys, if tenants are on, and calls the
//! method of [`Master`] that does the work.

use std::time::Duration;

use mooncake_core::alloc::{Extent, SegmentAllocator};
use mooncake_core::clock::SharedClock;
use mooncake_core::error::{Error, ErrorCode, Result};
use mooncake_core::evict::MergeableOrder;
use mooncake_core::ids::ClientId;
use mooncake_core::replica::ReplicaType;

use mooncake_protocol::api::{Caller, CopyToken, EndItem};
use mooncake_protocol::call::Response;
use mooncake_protocol::frame::Refusal;
use mooncake_protocol::master_client::EmbeddedMaster;
use mooncake_protocol::message::*;
use mooncake_protocol::pack::{Pack, Pairs};
use mooncake_protocol::wire::{
    DrainProgress, ItemLifetime, PromotionPlan, ReadablePrefix, TaskKind, pack_prefix,
};

use super::chains::KeyInCall;
use super::master::Master;
use crate::model::address_checks::AdvertisedAddress;
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
    ProbeKey<'a>: |master, r| Ok(master.probe_of(r.tenant, r.key));
    BatchProbeKey<'a>: |master, r| master.probe_each(r.tenant, &r.keys, r.policy);
    LocateMatching<'a>: |master, r| master.matching_page(r.tenant, r.pattern, r.position);
    BatchQueryIp<'a>: |master, r| Ok(Pairs(master.addresses(&r.clients)));
}

impl<'a, A: SegmentAllocator, E: MergeableOrder> Handle<GetReplicaList<'a>> for Master<A, E> {
    fn handle(&self, r: GetReplicaList<'a>) -> Outcome<GetReplicaList<'a>> {
        self.locate_of(r.tenant, r.key, KeyInCall::default())
    }

    fn respond(&self, r: GetReplicaList<'a>, response: &mut Response<'_>) -> Result<(), Refusal> {
        if response.may_have_members() && self.may_have_members(r.tenant) {
            response.set::<GetReplicaList<'a>>(self.handle(r));
            return Ok(());
        }
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
        self.check_reply_of(BatchGetReplicaList::NAME, r.tenant, &r.keys, false)?;
        if response.may_have_members() && self.may_have_members(r.tenant) {
            response.set::<BatchGetReplicaList<'a>>(self.handle(r));
            return Ok(());
        }
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

// Replicas without leases.
handlers! {
    GetReplicaListForAdmin<'a>: |master, r| master.list_of(r.tenant, r.key);
    BatchGetReplicaListForAdmin<'a>: |master, r| each(&r.keys, |key| master.list_of(r.tenant, key));
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

    fn respond(&self, r: LocateAgain<'a>, response: &mut Response<'_>) -> Result<(), Refusal> {
        self.check_reply_of(LocateAgain::NAME, r.tenant, &r.keys, false)?;
        response.set::<LocateAgain<'a>>(self.handle(r));
        Ok(())
    }
}

impl<'a, A: SegmentAllocator, E: MergeableOrder> Handle<LocateForRead<'a>> for Master<A, E> {
    fn handle(&self, r: LocateForRead<'a>) -> Outcome<LocateForRead<'a>> {
        let reader = self.begin_read(r.reader, r.ended);
        let read = reader.as_ref().map(|reader| (reader, r.number));
        let mut call = self.read_call(r.tenant, &r.keys);
        let locate = |at: usize| {
            let found = self.locate_of(
                r.tenant,
                r.keys[at],
                call.key(at).located(r.located.get(at).copied()).read_by(read),
            )?;
            call.record_found(at);
            Ok(found)
        };
        let found = (0..r.keys.len()).map(locate).collect();
        self.end_read(&call, r.tenant, &r.keys);
        found
    }

    fn respond(&self, r: LocateForRead<'a>, response: &mut Response<'_>) -> Result<(), Refusal> {
        self.check_reply_of(LocateForRead::NAME, r.tenant, &r.keys, false)?;
        let reader = self.begin_read(r.reader, r.ended);
        let read = reader.as_ref().map(|reader| (reader, r.number));
        if let [key] = *r.keys {
            return response.write_each::<LocateForRead<'a>, _>(1, |_, out| {
                self.locate_to(
                    r.tenant,
                    key,
                    KeyInCall::default().located(r.located.first().copied()).read_by(read),
                    out,
                )
            });
        }
        let mut call = self.read_call(r.tenant, &r.keys);
        let written = response.write_each::<LocateForRead<'a>, _>(r.keys.len(), |at, out| {
            self.locate_to(
                r.tenant,
                r.keys[at],
                call.key(at).located(r.located.get(at).copied()).read_by(read),
                out,
            )?;
            call.record_found(at);
            Ok(())
        });
        self.end_read(&call, r.tenant, &r.keys);
        written
    }
}

impl<'a, A: SegmentAllocator, E: MergeableOrder> Handle<GetReplicaListByRegex<'a>> for Master<A, E> {
    fn handle(&self, r: GetReplicaListByRegex<'a>) -> Outcome<GetReplicaListByRegex<'a>> {
        self.locate_matching_of(r.tenant, r.pattern).map(|found| {
            Pairs(found.into_iter().map(|(key, replicas)| (key.as_bytes().to_vec(), replicas)).collect())
        })
    }

    fn respond(&self, r: GetReplicaListByRegex<'a>, response: &mut Response<'_>) -> Result<(), Refusal> {
        self.respond_matching(r, response)
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
        let requested = r.keys.len();
        if r.with_replicas {
            self.check_reply_of(LocatePrefix::NAME, r.tenant, &r.keys, true)?;
        }
        response.write_front::<LocatePrefix<'a>, ReadablePrefix>(requested, |out| {
            if r.with_replicas {
                let mut call = self.read_call(r.tenant, &r.keys);
                let hits = pack_prefix(requested, out, |at, out| {
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

pub(super) fn caller(client: ClientId, tenant: &str) -> Caller<'_> {
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
    Remove<'a>: |master, r| master.remove_of(r.tenant, r.key, r.force);
    BatchRemove<'a>: |master, r| {
        each(&r.keys, |key| master.handle(Remove { key, force: r.force, tenant: r.tenant }))
    };
    RemoveByRegex<'a>: |master, r| master.remove_matching_of(r.tenant, r.pattern, r.force).map(signed);
    RemoveAll<'a>: |master, r| Ok(signed(master.remove_all_of(r.tenant, r.force)));
    BatchReplicaClear<'a>: |master, r| {
        let cleared = master.clear_replicas_of(r.tenant, &r.keys, r.client, r.segment_name);
        Ok(cleared.iter().map(|key| key.as_bytes().to_vec()).collect())
    };
    ClearOfAnyTenant<'a>: |master, r| {
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
        master.report_unreachable(r.client, r.endpoint);
        Ok(())
    };
    MountSegment<'a>: |master, r| master.mount(r.client, &r.segment);
    ReMountSegment<'a>: |master, r| master.remount(r.client, &r.segments);
    UnmountSegment: |master, r| master.unmount(r.client, r.segment);
    HandOverSegment: |master, r| master.hand_over(r.client, r.segment);
    GracefulUnmountSegment: |master, r| {
        master.unmount_after(r.client, r.segment, Duration::from_millis(r.grace_ms))
    };
    QuerySegmentStatus<'a>: |master, r| master.segment_status_by_name(r.segment_name);
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
    StartCopy<'a>: |master, r| {
        let (key, token) = (master.scoped(r.tenant, r.key)?, CopyToken { lease: r.lease, epoch: r.epoch });
        master.hot_copy_start(numbered(r.client, r.attempt), &key, r.source, &r.targets, token)
    };
    EndCopy<'a>: |master, r| {
        let (copier, token) = (numbered(r.client, r.attempt), CopyToken { lease: r.lease, epoch: r.epoch });
        master.hot_copy_end(copier, &master.scoped_if_known(r.tenant, r.key)?, token)
    };
    RevokeCopy<'a>: |master, r| {
        let (copier, token) = (numbered(r.client, r.attempt), CopyToken { lease: r.lease, epoch: r.epoch });
        master.hot_copy_revoke(copier, &master.scoped_if_known(r.tenant, r.key)?, token)
    };
    StartMove<'a>: |master, r| {
        let (copier, key) = (numbered(r.client, r.attempt), master.scoped(r.tenant, r.key)?);
        master.move_start(copier, &key, r.source, r.target)
    };
    EndMove<'a>: |master, r| {
        let (copier, key) = (numbered(r.client, r.attempt), master.scoped_if_known(r.tenant, r.key)?);
        master.replication_end(copier, TaskKind::Move, &key)
    };
    RevokeMove<'a>: |master, r| {
        let (copier, key) = (numbered(r.client, r.attempt), master.scoped_if_known(r.tenant, r.key)?);
        master.replication_revoke(copier, TaskKind::Move, &key)
    };
    MoveStart<'a>: |master, r| {
        master.move_start(r.client, &master.scoped(r.tenant, r.key)?, r.source, r.target)
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

/// Implements [`Handle`] for calls of Mooncake C++ that end something without naming it by a
/// number. An operation that began after the server had read the request is not meant.
macro_rules! ends_without_number {
    ($($call:ident: |$master:ident, $key:ident, $client:ident, $receipt:ident| $ended:expr;)*) => {$(
        impl<'a, A: SegmentAllocator, E: MergeableOrder> Handle<$call<'a>> for Master<A, E> {
            fn handle(&self, r: $call<'a>) -> Outcome<$call<'a>> {
                self.end_without_number(r.tenant, r.key, |$master, $key| {
                    let ($client, $receipt) = (r.client.into(), None);
                    $ended
                })
            }

            fn respond(&self, r: $call<'a>, response: &mut Response<'_>) -> Result<(), Refusal> {
                let $receipt = response.receipt();
                response.set::<$call<'a>>(self.end_without_number(r.tenant, r.key, |$master, $key| {
                    let $client = r.client.into();
                    $ended
                }));
                Ok(())
            }
        }
    )*};
}

ends_without_number! {
    CopyEnd: |master, key, client, at| master.replication_end_at(client, TaskKind::Copy, key, at);
    CopyRevoke: |master, key, client, at| master.replication_revoke_at(client, TaskKind::Copy, key, at);
    MoveEnd: |master, key, client, at| master.replication_end_at(client, TaskKind::Move, key, at);
    MoveRevoke: |master, key, client, at| master.replication_revoke_at(client, TaskKind::Move, key, at);
    NotifyPromotionSuccess: |master, key, client, at| master.promoted_at(client, key, at);
    NotifyPromotionFailure: |master, key, client, at| master.promotion_failed_at(client, key, at);
}

impl<A: SegmentAllocator, E: MergeableOrder> Master<A, E> {
    fn end_without_number(
        &self,
        tenant: &str,
        key: &[u8],
        end: impl FnOnce(&Self, &[u8]) -> Result<()>,
    ) -> Result<()> {
        end(self, &self.scoped_if_known(tenant, key)?)
    }
}

/// Returns the client of a numbered copy.
fn numbered(client: ClientId, attempt: u64) -> Writer {
    Writer { client, attempt }
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
    RegisterPrefetchTask<'a>: |master, r| {
        master.register_prefetch(r.client, &master.scoped_if_known(r.tenant, r.key)?)
    };
    StartPromotion<'a>: |master, r| {
        let (promoter, key) = (numbered(r.client, r.attempt), master.scoped_if_known(r.tenant, r.key)?);
        let memory = master.promotion_start(promoter, &key, r.size, &r.preferred)?;
        Ok(PromotionPlan { memory })
    };
    EndPromotion<'a>: |master, r| {
        let promoter = numbered(r.client, r.attempt);
        master.promoted(promoter, &master.scoped_if_known(r.tenant, r.key)?)
    };
    RevokePromotion<'a>: |master, r| {
        let promoter = numbered(r.client, r.attempt);
        master.promotion_failed(promoter, &master.scoped_if_known(r.tenant, r.key)?)
    };
    ReportOffloaded<'a>: |master, r| {
        master.report_offloaded(r.client, r.work, &r.offloaded, &r.places)
    };
    ReportDropped<'a>: |master, r| {
        each(&r.keys, |key| {
            let key = master.scoped_if_known(r.tenant, key)?;
            master.report_dropped(r.client, r.work, &key)
        })
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
    EvictDiskReplicaIfCurrent<'a>: |master, r| {
        let key = master.scoped_if_known(r.tenant, r.key)?;
        match r.replicas {
            ReplicaType::LocalDisk => master.dropped_from_disk_if_current(r.client, &key, r.replica),
            _ => master.find(&key).map(|()| false),
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

// Managed weights.
handlers! {
    BeginWeightImport<'a>: |master, r| master.begin_weight_import(r.tenant, r.import);
    CommitWeightImport<'a>: |master, r| master.commit_weight_import(r.tenant, r.commit);
    AbortWeightImport<'a>: |master, r| master.abort_weight_import(r.tenant, r.change);
    GetWeightRevision<'a>: |master, r| master.weight_revision(r.tenant, r.query);
    ListWeightRevisions<'a>: |master, r| master.weight_revisions(r.tenant, r.list);
    AcquireWeightRevisionLease<'a>: |master, r| master.lease_weights(r.tenant, r.request);
    RenewWeightRevisionLease<'a>: |master, r| master.renew_weight_lease(r.tenant, r.renewal);
    ReleaseWeightRevisionLease<'a>: |master, r| master.release_weight_lease(r.tenant, r.release);
    DeleteWeightRevision<'a>: |master, r| master.delete_weights(r.tenant, r.change);
    StartWeightResidencyOperation<'a>: |master, r| master.start_weight_move(r.tenant, r.movement);
    QueryWeightOperation<'a>: |master, r| master.weight_move(r.tenant, r.operation);
}

// Objects that outlive the master or their client.
handlers! {
    FetchInventory: |master, r| Ok(master.inventory(r.client, r.after));
    FetchTimedInventory: |master, r| Ok(master.timed_inventory(r.client, r.after));
    ReportReads: |master, r| Ok(master.report_reads(r.reader, r.ended));
    CheckSpace<'a>: |master, r| Ok(master.check_space_of(r.tenant, &r.keys, &r.sizes, r.segment_name));
    CountSegments: |master, _| Ok(master.segment_stats().len() as u64);
    MountKeptSegment<'a>: |master, r| master.mount_with_objects(r.client, &r.segment);
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
        master.reserve_extents(r.client, r.segment, &extents, r.open)
    };
    CheckAddress<'a>: |master, r| {
        let (endpoint, instance) = (r.endpoint.to_owned(), r.instance.to_owned());
        master.check_address(AdvertisedAddress { client: r.client, endpoint, instance }, r.again)
    };
    ExchangeKeyForm: |master, r| Ok(master.exchange_key_form(r.client, r.held));
    AnnounceReplicas<'a>: |master, r| {
        master.log_refused(r.client, each(&r.stored, |stored| master.announce(r.client, stored)))
    };
    AnnounceTimed<'a>: |master, r| {
        let mut lifetimes = vec![None; r.stored.len()];
        for ItemLifetime { index, lifetime } in r.lifetimes.iter() {
            if let Some(of) = usize::try_from(*index).ok().and_then(|index| lifetimes.get_mut(index)) {
                *of = Some(*lifetime);
            }
        }
        let announced = r.stored.iter().zip(lifetimes);
        let announce = |(stored, lifetime)| master.announce_timed(r.client, stored, lifetime);
        master.log_refused(r.client, announced.map(announce).collect())
    };
    ReleaseKept: |master, r| master.release_reserved(r.client, r.segment);
    ExchangePromise: |master, r| Ok(master.exchange_promise(r.client, r.promise_ms));
    DrainClient: |master, r| {
        let job = master.drain_client(r.client)?;
        Ok(DrainProgress {
            done: job.status.is_over(),
            moved: job.succeeded,
            bytes: job.migrated_bytes,
            left: job.active + job.waiting + job.blocked + job.failed,
        })
    };
    FetchZeroWork<'a>: |master, r| Ok(master.zero_work(r.client, &r.zeroed));
    FetchExpired: |master, r| Ok(master.expired(r.client, r.segment, r.after));
    FetchUnclaimed: |master, r| Ok(master.unclaimed(r.client, r.segment, r.after));
    ExchangeEpochs<'a>: |master, r| Ok(master.exchange_epochs_of(r.client, &r.epochs));
    AnnounceExpired<'a>: |master, r| {
        master.log_refused(r.client, each(&r.stored, |stored| master.announce_expired(r.client, stored)))
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
