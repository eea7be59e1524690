//! Counters of requests and failures by operation.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use mooncake_protocol::message as call;
use mooncake_protocol::message::Request;
use mooncake_protocol::service::Tally;

use super::latency::Latency;

macro_rules! operations {
    (single { $($single:ident: $($call:ident)|+;)* } batch { $($batch:ident: $batch_call:ident;)* }) => {
        /// Counters of all operations.
        #[derive(Debug, Default)]
        pub(super) struct Requests {
            $(pub(super) $single: Single,)*
            $(pub(super) $batch: Batch,)*
            /// Requests refused because of overload.
            pub(super) shed: AtomicU64,
        }

        impl Requests {
            /// Counts an answered call.
            pub(super) fn count(&self, function: u32, tally: Tally, took: Duration) {
                match as_existing(function, tally.items) {
                    $($(call::$call::FUNCTION)|+ => self.$single.count(tally, took),)*
                    $(call::$batch_call::FUNCTION => self.$batch.count(tally, took),)*
                    _ => {}
                }
            }

            /// Returns the name and the counters of every operation.
            pub(super) fn all(&self) -> (Vec<(&'static str, &Single)>, Vec<(&'static str, &Batch)>) {
                (
                    vec![$((stringify!($single), &self.$single)),*],
                    vec![$((stringify!($batch), &self.$batch)),*],
                )
            }
        }
    };
}

// Upserts count as puts, as in the dashboards of Mooncake C++.
operations! {
    single {
        put_start: PutStart | UpsertStart;
        put_end: PutEnd | UpsertEnd;
        put_revoke: PutRevoke | UpsertRevoke;
        get_replica_list: GetReplicaList;
        get_replica_list_by_regex: GetReplicaListByRegex;
        exist_key: ExistKey;
        remove: Remove;
        remove_by_regex: RemoveByRegex;
        remove_all: RemoveAll;
        mount_segment: MountSegment;
        unmount_segment: UnmountSegment | GracefulUnmountSegment;
        remount_segment: ReMountSegment;
        mount_nof_segment: MountNoFSegment;
        unmount_nof_segment: UnmountNoFSegment;
        remount_nof_segment: ReMountNoFSegment;
        evict_disk_replica: EvictDiskReplica | BatchEvictDiskReplica;
        ping: Ping;
        copy_start: CopyStart | DynamicReplicaCopyStart;
        copy_end: CopyEnd | DynamicReplicaCopyEnd;
        copy_revoke: CopyRevoke | DynamicReplicaCopyRevoke;
        move_start: MoveStart;
        move_end: MoveEnd;
        move_revoke: MoveRevoke;
        create_copy_task: CreateCopyTask;
        create_move_task: CreateMoveTask;
        query_task: QueryTask;
        fetch_tasks: FetchTasks;
        update_task: MarkTaskToComplete;
    }
    batch {
        batch_exist_key: BatchExistKey;
        batch_query_ip: BatchQueryIp;
        batch_replica_clear: BatchReplicaClear;
        batch_get_replica_list: BatchGetReplicaList;
        batch_put_start: BatchPutStart;
        batch_put_end: BatchPutEnd;
        batch_put_revoke: BatchPutRevoke;
        batch_upsert_start: BatchUpsertStart;
        batch_upsert_end: BatchUpsertEnd;
        batch_upsert_revoke: BatchUpsertRevoke;
        batch_remove: BatchRemove;
    }
}

/// Returns the call of Mooncake C++ that a numbered write counts as.
fn as_existing(function: u32, items: u64) -> u32 {
    match (function, items) {
        (call::StartWrites::FUNCTION, 1) => call::PutStart::FUNCTION,
        (call::StartWrites::FUNCTION, _) => call::BatchPutStart::FUNCTION,
        (call::EndWrites::FUNCTION, 1) => call::PutEnd::FUNCTION,
        (call::EndWrites::FUNCTION, _) => call::BatchPutEnd::FUNCTION,
        (call::RevokeWrites::FUNCTION, 1) => call::PutRevoke::FUNCTION,
        (call::RevokeWrites::FUNCTION, _) => call::BatchPutRevoke::FUNCTION,
        _ => function,
    }
}

/// Counters of a call about one object.
#[derive(Debug, Default)]
pub(super) struct Single {
    requests: AtomicU64,
    failures: AtomicU64,
    pub(super) latency: Latency,
}

/// Counters of a call about many objects.
#[derive(Debug, Default)]
pub(super) struct Batch {
    requests: AtomicU64,
    failures: AtomicU64,
    partial: AtomicU64,
    items: AtomicU64,
    failed_items: AtomicU64,
    pub(super) latency: Latency,
}

impl Single {
    fn count(&self, tally: Tally, took: Duration) {
        self.latency.note(took);
        self.requests.fetch_add(1, Relaxed);
        if tally.failed > 0 {
            self.failures.fetch_add(1, Relaxed);
        }
    }

    /// Returns requests and failures.
    pub(super) fn read(&self) -> [u64; 2] {
        [self.requests.load(Relaxed), self.failures.load(Relaxed)]
    }
}

impl Batch {
    fn count(&self, tally: Tally, took: Duration) {
        self.latency.note(took);
        self.requests.fetch_add(1, Relaxed);
        self.items.fetch_add(tally.items, Relaxed);
        if tally.failed == 0 {
            return;
        }
        self.failed_items.fetch_add(tally.failed, Relaxed);
        let counter = if tally.failed == tally.items { &self.failures } else { &self.partial };
        counter.fetch_add(1, Relaxed);
    }

    /// Returns requests, failures, partial successes, items and failed items.
    pub(super) fn read(&self) -> [u64; 5] {
        [&self.requests, &self.failures, &self.partial, &self.items, &self.failed_items]
            .map(|c| c.load(Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_tell_partial_success_from_failure() {
        let requests = Requests::default();
        let call = |outcomes: &[bool]| {
            let failed = outcomes.iter().filter(|ok| !**ok).count();
            let tally = Tally { items: outcomes.len() as u64, failed: failed as u64 };
            requests.count(call::BatchExistKey::FUNCTION, tally, Duration::from_micros(3));
        };
        call(&[true, true]);
        call(&[true, false]);
        call(&[false, false, false]);
        assert_eq!(requests.batch_exist_key.read(), [3, 1, 1, 7, 4]);
        assert_eq!(requests.batch_exist_key.latency.histogram().count(), 3);
    }
}
