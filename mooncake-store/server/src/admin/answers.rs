//! Bodies of responses, with the fields of Mooncake C++. An absent value is null.

use std::collections::BTreeMap;

use mooncake_core::replica::{Replica, ReplicaLocation};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Description of a failure.
#[derive(Serialize, ToSchema)]
pub(super) struct Failure {
    /// False.
    pub(super) success: bool,
    /// Number of the error, below 0.
    pub(super) error_code: i32,
    /// Name of the error, or a message.
    pub(super) error_message: String,
}

/// Health of the master.
#[derive(Serialize, ToSchema)]
pub(super) struct Health {
    /// `ok`.
    pub(super) status: &'static str,
    /// `leader` or `standby`.
    pub(super) role: &'static str,
    /// `serving`, or the step before it.
    pub(super) ha_state: &'static str,
    /// True if the master handles calls.
    pub(super) service_ready: bool,
    /// RPC address of the leader, in a cluster of several masters.
    pub(super) leader_address: Option<String>,
    /// Number of the leader's election.
    pub(super) view_version: Option<u64>,
}

/// Outcomes of changes of soft pins.
#[derive(Serialize, ToSchema)]
pub(super) struct Pins {
    /// Outcome of each key, in the order of the request.
    pub(super) results: Vec<Pin>,
}

/// Outcome of the change of a soft pin.
#[derive(Serialize, ToSchema)]
pub(super) struct Pin {
    /// Key of the object.
    pub(super) key: String,
    /// 0, or the number of an error.
    pub(super) error_code: i32,
}

/// Versions of the master.
#[derive(Serialize, ToSchema)]
pub(super) struct Version {
    /// Version of the RPC protocol.
    pub(super) version: &'static str,
    /// Version of the program, for people.
    pub(super) display_version: &'static str,
}

/// Leader of a cluster of several masters.
#[derive(Serialize, ToSchema)]
pub(super) struct Leader {
    /// True if the leader is known.
    pub(super) present: bool,
    /// RPC address of the leader.
    pub(super) leader_address: Option<String>,
    /// Number of the leader's election.
    pub(super) view_version: Option<u64>,
}

/// Estimated hit rates at several sizes of memory.
#[derive(Serialize, ToSchema)]
pub(super) struct MemoryCurve {
    /// Time in seconds that the hit rates are about: the last hour, or less after a start.
    pub(super) span_seconds: f64,
    /// Number of uses in that time: reads that found their object, and puts that stored one.
    pub(super) uses: u64,
    /// Number of keys of which one is watched.
    pub(super) keys_for_each_sampled: u64,
    /// Hit rates, the smallest memory first.
    pub(super) points: Vec<MemoryCurvePoint>,
}

/// Estimated hit rate at one size of memory.
#[derive(Serialize, ToSchema)]
pub(super) struct MemoryCurvePoint {
    /// Size as a multiple of the actual memory.
    pub(super) factor: f64,
    /// Size in bytes.
    pub(super) bytes: u64,
    /// Share of the uses that find their object.
    pub(super) hit_rate: Option<f64>,
}

/// A replica in the memory of a client.
#[derive(Serialize, ToSchema)]
pub(super) struct MemoryReplica {
    /// Length in bytes.
    pub(super) size_: u64,
    /// Address in the process of the owner.
    pub(super) buffer_address_: u64,
    /// Transport.
    pub(super) protocol_: String,
    /// Endpoint of the owner.
    pub(super) transport_endpoint_: String,
}

impl MemoryReplica {
    pub(super) fn of(replica: &Replica) -> Option<Self> {
        let ReplicaLocation::Memory(at) = &replica.location else { return None };
        Some(Self {
            size_: at.size,
            buffer_address_: at.address,
            protocol_: at.protocol.clone(),
            transport_endpoint_: at.endpoint.clone(),
        })
    }
}

/// Replicas of one object.
#[derive(Serialize, ToSchema)]
pub(super) struct Found {
    /// True.
    pub(super) success: bool,
    /// Replicas in memory.
    pub(super) data: Vec<MemoryReplica>,
}

/// Replicas of several objects.
#[derive(Serialize, ToSchema)]
pub(super) struct FoundMany {
    /// True.
    pub(super) success: bool,
    /// Replicas by key.
    pub(super) data: BTreeMap<String, OneOfMany>,
}

/// Replicas of one of several objects.
#[derive(Serialize, ToSchema)]
pub(super) struct OneOfMany {
    /// True if the object can be read.
    pub(super) ok: bool,
    /// Name of the error, if the object cannot be read.
    pub(super) error: Option<String>,
    /// Replicas in memory.
    pub(super) values: Option<Vec<MemoryReplica>>,
    /// Replicas in files.
    pub(super) disk_values: Option<Vec<DiskReplica>>,
    /// Replicas on disks of clients.
    pub(super) local_disk_values: Option<Vec<LocalDiskReplica>>,
    /// Replicas on NVMe-oF targets.
    pub(super) nof_values: Option<Vec<MemoryReplica>>,
}

/// A replica in a file.
#[derive(Serialize, ToSchema)]
pub(super) struct DiskReplica {
    /// Path of the file.
    pub(super) file_path: String,
    /// Length in bytes.
    pub(super) object_size: u64,
}

/// A replica on the disk of a client.
#[derive(Serialize, ToSchema)]
pub(super) struct LocalDiskReplica {
    /// Client that owns the disk.
    pub(super) client_id: String,
    /// Length in bytes.
    pub(super) object_size: u64,
    /// Endpoint of the owner.
    pub(super) transport_endpoint: String,
}

/// Failure of a request without keys.
#[derive(Serialize, ToSchema)]
pub(super) struct NoKeys {
    /// False.
    pub(super) success: bool,
    /// Hint for a correct request.
    pub(super) error: &'static str,
}

/// Leases of readers.
#[derive(Serialize, ToSchema)]
pub(super) struct Leases {
    /// True.
    pub(super) success: bool,
    /// Time in milliseconds until the last lease on each object ends.
    pub(super) lease_ms: BTreeMap<String, u64>,
}

/// State of a key.
#[derive(Serialize, ToSchema)]
pub(super) struct Explained {
    /// True.
    pub(super) success: bool,
    /// True if the object can be read.
    pub(super) readable: bool,
    /// Cause of a miss, as in the label `cause` of `master_misses_total`.
    pub(super) cause: Option<&'static str>,
    /// Cause of a miss in words.
    pub(super) explanation: Option<&'static str>,
    /// Time in milliseconds until the last lease on the object ends; 0 without a lease.
    pub(super) lease_ms: u64,
}

/// Number of removed objects.
#[derive(Serialize, ToSchema)]
pub(super) struct Removed {
    /// True.
    pub(super) success: bool,
    /// Removed objects.
    pub(super) removed_count: u64,
}

/// All segments.
#[derive(Serialize, ToSchema)]
pub(super) struct SegmentsDetail {
    /// Number of segments.
    pub(super) total_segments: usize,
    /// Details of each segment.
    pub(super) segments: Vec<SegmentDetail>,
}

/// Details of one segment.
#[derive(Serialize, ToSchema)]
pub(super) struct SegmentDetail {
    /// Name of the segment.
    pub(super) segment_name: String,
    /// Id of the segment: two decimal numbers joined by `-`.
    pub(super) segment_id: String,
    /// Client that owns the segment.
    pub(super) client_id: String,
    /// First address, `0x..`.
    pub(super) base_address: String,
    /// Length in bytes.
    pub(super) size_bytes: u64,
    /// Length in GiB.
    pub(super) size_human: String,
    /// Endpoint of the owner.
    pub(super) te_endpoint: String,
    /// Transport.
    pub(super) protocol: String,
    /// State of the segment.
    pub(super) status: &'static str,
    /// Used bytes.
    pub(super) allocator_used_bytes: u64,
    /// Allocatable bytes.
    pub(super) allocator_capacity_bytes: u64,
    /// Used bytes in percent of the allocatable bytes.
    pub(super) allocator_usage_percent: f64,
    /// Reason why the address of the owner does not lead to it; absent if none was found.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) address_finding: Option<String>,
}

/// State of one segment.
#[derive(Serialize, ToSchema)]
pub(super) struct SegmentState {
    /// True.
    pub(super) success: bool,
    /// Name of the segment.
    pub(super) segment: String,
    /// Number of the state.
    pub(super) status: i32,
    /// Name of the state.
    pub(super) status_name: &'static str,
    /// 0.
    pub(super) error_code: i32,
    /// Empty.
    pub(super) error_message: &'static str,
}

/// Publishing of events.
#[derive(Serialize, ToSchema)]
pub(super) struct Events {
    /// True if events are published.
    pub(super) enabled: bool,
    /// Number of sent messages.
    pub(super) published_batches: u64,
    /// Number of events in the messages.
    pub(super) published_events: u64,
    /// Number of events dropped because the queue was full.
    pub(super) dropped_events: u64,
    /// Number of events about keys that are not a hash.
    pub(super) skipped_unparsed_keys: u64,
}

/// Segments to drain.
#[derive(Deserialize, ToSchema)]
pub(super) struct DrainRequest {
    /// Names of the segments.
    #[serde(default)]
    pub(super) segments: Vec<String>,
    /// Names of the target segments; any segment if empty.
    #[serde(default)]
    pub(super) target_segments: Vec<String>,
    /// Maximum number of objects that move at the same time.
    #[serde(default = "four")]
    pub(super) max_concurrency: u64,
}

/// Start or end of a drain job.
#[derive(Serialize, ToSchema)]
pub(super) struct DrainChanged {
    /// True.
    pub(super) success: bool,
    /// Id of the job: two decimal numbers joined by `-`.
    pub(super) job_id: String,
    /// `CREATED` or `CANCELED`.
    pub(super) status: &'static str,
    /// 0.
    pub(super) error_code: i32,
    /// Empty.
    pub(super) error_message: &'static str,
}

/// State of a drain job.
#[derive(Serialize, ToSchema)]
pub(super) struct DrainJob {
    /// True.
    pub(super) success: bool,
    /// Id of the job: two decimal numbers joined by `-`.
    pub(super) job_id: String,
    /// 0.
    #[serde(rename = "type")]
    pub(super) kind: i32,
    /// `DRAIN`.
    pub(super) type_name: &'static str,
    /// Number of the state.
    pub(super) status: i32,
    /// `CREATED`, `PLANNING`, `RUNNING`, `SUCCEEDED`, `FAILED` or `CANCELED`.
    pub(super) status_name: &'static str,
    /// Start of the job in milliseconds since 1970.
    pub(super) created_at_ms_epoch: u64,
    /// Last change in milliseconds since 1970.
    pub(super) last_updated_at_ms_epoch: u64,
    /// Names of the segments that the job drains.
    pub(super) segments: Vec<String>,
    /// Number of moved replicas.
    pub(super) succeeded_units: u64,
    /// Number of replicas that failed three times.
    pub(super) failed_units: u64,
    /// Number of replicas that cannot move now: hard-pinned, being written or copied, or without
    /// free space elsewhere.
    pub(super) blocked_units: u64,
    /// Number of replicas that are moving.
    pub(super) active_units: u64,
    /// Moved bytes.
    pub(super) migrated_bytes: u64,
    /// Description of the state, or the last error.
    pub(super) message: String,
    /// 0.
    pub(super) error_code: i32,
    /// Empty.
    pub(super) error_message: &'static str,
}

fn four() -> u64 {
    4
}

/// Quotas of tenants.
#[derive(Serialize, ToSchema)]
pub(super) struct Quotas {
    /// True.
    pub(super) success: bool,
    /// The requested quota, none, or all.
    pub(super) data: QuotaData,
}

/// The requested quota, none, or all.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(super) enum QuotaData {
    /// The requested quota, or null after its removal.
    One(Option<Quota>),
    /// All quotas by name.
    Many(Vec<Quota>),
}

/// Quota of a tenant, and its use.
#[derive(Serialize, ToSchema)]
pub(super) struct Quota {
    /// Name of the tenant.
    pub(super) tenant_id: String,
    /// Requested quota in bytes.
    pub(super) requested_quota_bytes: u64,
    /// Effective quota in bytes; less than requested if all quotas together exceed the capacity.
    pub(super) effective_quota_bytes: u64,
    /// Used bytes.
    pub(super) charged_bytes: u64,
    /// False.
    pub(super) admission_closed: bool,
    /// True if the tenant uses more than its effective quota.
    pub(super) over_quota: bool,
    /// True.
    pub(super) has_explicit_policy: bool,
}

/// Quota of a tenant.
#[derive(Deserialize, ToSchema)]
pub(super) struct QuotaRequest {
    /// Quota in bytes, 1 to 2^63 - 1.
    #[serde(default)]
    pub(super) requested_quota_bytes: u64,
}
