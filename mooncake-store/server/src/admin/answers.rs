//! Bodies of answers, field by field as the existing master writes them. What is absent is null.

use std::collections::BTreeMap;

use mooncake_core::replica::{Replica, ReplicaLocation};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What went wrong.
#[derive(Serialize, ToSchema)]
pub(super) struct Failure {
    /// False.
    pub(super) success: bool,
    /// Number of the error, below 0.
    pub(super) error_code: i32,
    /// Name of the error, or a sentence.
    pub(super) error_message: String,
}

/// How the master is.
#[derive(Serialize, ToSchema)]
pub(super) struct Health {
    /// `ok`.
    pub(super) status: &'static str,
    /// `leader` or `standby`.
    pub(super) role: &'static str,
    /// `serving`, or on the way there.
    pub(super) ha_state: &'static str,
    /// Whether calls are answered.
    pub(super) service_ready: bool,
    /// Who leads, in a cluster of several masters.
    pub(super) leader_address: Option<String>,
    /// Which election that was.
    pub(super) view_version: Option<u64>,
}

/// Who leads, in a cluster of several masters.
#[derive(Serialize, ToSchema)]
pub(super) struct Leader {
    /// Whether that is known.
    pub(super) present: bool,
    /// Its address.
    pub(super) leader_address: Option<String>,
    /// Which election that was.
    pub(super) view_version: Option<u64>,
}

/// A replica in a client's memory.
#[derive(Serialize, ToSchema)]
pub(super) struct MemoryReplica {
    /// Length in bytes.
    pub(super) size_: u64,
    /// Address in the owner's process.
    pub(super) buffer_address_: u64,
    /// Wire.
    pub(super) protocol_: String,
    /// Where the owner is reached.
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

/// Where one object lies.
#[derive(Serialize, ToSchema)]
pub(super) struct Found {
    /// True.
    pub(super) success: bool,
    /// Its replicas in memory.
    pub(super) data: Vec<MemoryReplica>,
}

/// Where several objects lie.
#[derive(Serialize, ToSchema)]
pub(super) struct FoundMany {
    /// True.
    pub(super) success: bool,
    /// By key.
    pub(super) data: BTreeMap<String, OneOfMany>,
}

/// Where one of several objects lies.
#[derive(Serialize, ToSchema)]
pub(super) struct OneOfMany {
    /// Whether it can be read.
    pub(super) ok: bool,
    /// Name of the error if not.
    pub(super) error: Option<String>,
    /// Its replicas in memory.
    pub(super) values: Option<Vec<MemoryReplica>>,
    /// Its replicas in files.
    pub(super) disk_values: Option<Vec<DiskReplica>>,
    /// Its replicas on the disks of clients.
    pub(super) local_disk_values: Option<Vec<LocalDiskReplica>>,
    /// Its replicas on NVMe-oF targets.
    pub(super) nof_values: Option<Vec<MemoryReplica>>,
}

/// A replica in a file.
#[derive(Serialize, ToSchema)]
pub(super) struct DiskReplica {
    /// Path.
    pub(super) file_path: String,
    /// Length in bytes.
    pub(super) object_size: u64,
}

/// A replica on the disk of a client.
#[derive(Serialize, ToSchema)]
pub(super) struct LocalDiskReplica {
    /// The owner.
    pub(super) client_id: String,
    /// Length in bytes.
    pub(super) object_size: u64,
    /// Where the owner is reached.
    pub(super) transport_endpoint: String,
}

/// No keys were named.
#[derive(Serialize, ToSchema)]
pub(super) struct NoKeys {
    /// False.
    pub(super) success: bool,
    /// What to send.
    pub(super) error: &'static str,
}

/// How many objects were removed.
#[derive(Serialize, ToSchema)]
pub(super) struct Removed {
    /// True.
    pub(super) success: bool,
    /// Objects.
    pub(super) removed_count: u64,
}

/// All segments.
#[derive(Serialize, ToSchema)]
pub(super) struct SegmentsDetail {
    /// How many.
    pub(super) total_segments: usize,
    /// Each.
    pub(super) segments: Vec<SegmentDetail>,
}

/// One segment.
#[derive(Serialize, ToSchema)]
pub(super) struct SegmentDetail {
    /// Its name.
    pub(super) segment_name: String,
    /// Its id, two decimal numbers joined by `-`.
    pub(super) segment_id: String,
    /// Its owner.
    pub(super) client_id: String,
    /// Its first address, `0x..`.
    pub(super) base_address: String,
    /// Bytes.
    pub(super) size_bytes: u64,
    /// The same, in GiB.
    pub(super) size_human: String,
    /// Where the owner is reached.
    pub(super) te_endpoint: String,
    /// Wire.
    pub(super) protocol: String,
    /// Its state.
    pub(super) status: &'static str,
    /// Bytes taken.
    pub(super) allocator_used_bytes: u64,
    /// Bytes that can be taken.
    pub(super) allocator_capacity_bytes: u64,
    /// The former in percent of the latter.
    pub(super) allocator_usage_percent: f64,
}

/// State of one segment.
#[derive(Serialize, ToSchema)]
pub(super) struct SegmentState {
    /// True.
    pub(super) success: bool,
    /// Its name.
    pub(super) segment: String,
    /// Number of its state.
    pub(super) status: i32,
    /// Name of its state.
    pub(super) status_name: &'static str,
    /// 0.
    pub(super) error_code: i32,
    /// Empty.
    pub(super) error_message: &'static str,
}

/// Publishing of events.
#[derive(Serialize, ToSchema)]
pub(super) struct Events {
    /// Whether events are published.
    pub(super) enabled: bool,
    /// Messages sent.
    pub(super) published_batches: u64,
    /// Events in them.
    pub(super) published_events: u64,
    /// Events that found the queue full.
    pub(super) dropped_events: u64,
    /// Keys without a hash in them.
    pub(super) skipped_unparsed_keys: u64,
}

/// Segments to empty.
#[derive(Deserialize, ToSchema)]
pub(super) struct DrainRequest {
    /// Their names.
    #[serde(default)]
    pub(super) segments: Vec<String>,
    /// Where their objects may go; anywhere, if there are none.
    #[serde(default)]
    pub(super) target_segments: Vec<String>,
    /// Objects that are moved at the same time.
    #[serde(default = "four")]
    pub(super) max_concurrency: u64,
}

/// A drain job was begun or ended.
#[derive(Serialize, ToSchema)]
pub(super) struct DrainChanged {
    /// True.
    pub(super) success: bool,
    /// Its id, two decimal numbers joined by `-`.
    pub(super) job_id: String,
    /// `CREATED` or `CANCELED`.
    pub(super) status: &'static str,
    /// 0.
    pub(super) error_code: i32,
    /// Empty.
    pub(super) error_message: &'static str,
}

/// Where a drain job stands.
#[derive(Serialize, ToSchema)]
pub(super) struct DrainJob {
    /// True.
    pub(super) success: bool,
    /// Its id, two decimal numbers joined by `-`.
    pub(super) job_id: String,
    /// 0.
    #[serde(rename = "type")]
    pub(super) kind: i32,
    /// `DRAIN`.
    pub(super) type_name: &'static str,
    /// Number of its state.
    pub(super) status: i32,
    /// `CREATED`, `PLANNING`, `RUNNING`, `SUCCEEDED`, `FAILED` or `CANCELED`.
    pub(super) status_name: &'static str,
    /// When it was begun, in milliseconds since 1970.
    pub(super) created_at_ms_epoch: u64,
    /// When it last changed.
    pub(super) last_updated_at_ms_epoch: u64,
    /// What it empties.
    pub(super) segments: Vec<String>,
    /// Replicas moved.
    pub(super) succeeded_units: u64,
    /// Replicas given up after three tries.
    pub(super) failed_units: u64,
    /// Replicas that have to stay for now: hard-pinned, being written or copied, or without room elsewhere.
    pub(super) blocked_units: u64,
    /// Replicas being moved.
    pub(super) active_units: u64,
    /// Bytes moved.
    pub(super) migrated_bytes: u64,
    /// The state in words, or what went wrong last.
    pub(super) message: String,
    /// 0.
    pub(super) error_code: i32,
    /// Empty.
    pub(super) error_message: &'static str,
}

fn four() -> u64 {
    4
}

/// Quotas.
#[derive(Serialize, ToSchema)]
pub(super) struct Quotas {
    /// True.
    pub(super) success: bool,
    /// One, none, or all.
    pub(super) data: QuotaData,
}

/// One quota, none, or all.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(super) enum QuotaData {
    /// What was asked for, or null where it is gone.
    One(Option<Quota>),
    /// All, by name.
    Many(Vec<Quota>),
}

/// The quota of a tenant, and what of it is used.
#[derive(Serialize, ToSchema)]
pub(super) struct Quota {
    /// Its name.
    pub(super) tenant_id: String,
    /// Bytes it is to have.
    pub(super) requested_quota_bytes: u64,
    /// Bytes it may have: less, where all together ask for more than there is.
    pub(super) effective_quota_bytes: u64,
    /// Bytes it has.
    pub(super) charged_bytes: u64,
    /// False.
    pub(super) admission_closed: bool,
    /// Whether it has more than it may.
    pub(super) over_quota: bool,
    /// True.
    pub(super) has_explicit_policy: bool,
}

/// The quota of a tenant.
#[derive(Deserialize, ToSchema)]
pub(super) struct QuotaRequest {
    /// Bytes, 1 to 2^63 - 1.
    #[serde(default)]
    pub(super) requested_quota_bytes: u64,
}
