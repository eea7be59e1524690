//! Options of a master: lifetimes, watermarks, placement.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use mooncake_core::{Error, Result};

use super::tenants::TenantQuota;

/// Choice of segments for a new object. The names are those of Mooncake C++, and case matters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Placement {
    /// `random`: every segment is equally likely, then the ones after it in order.
    #[default]
    Random,
    /// `free_ratio_first`: of a few segments drawn at random, those with more free space are
    /// likelier. They are not always first: a segment that has just joined must not take every
    /// write of the cluster.
    FreeRatioFirst,
    /// `ssd_free_ratio_first`: of a few segments drawn at random, those whose client has more free
    /// space on its disk are likelier. A client that has not reported the size of its disk counts
    /// as one with an empty disk.
    SsdFreeRatioFirst,
    /// `local_first`: a single replica goes to the host of the writer, then to the hosts that
    /// follow it by name. On a host, the key selects the segment. A writer on a host without
    /// segments is near to none, so its objects go anywhere.
    LocalFirst,
    /// `cxl`: one replica, in the first segment that the put names and nowhere else.
    Cxl,
}

impl Placement {
    /// Names that parse.
    pub const NAMES: &'static [&'static str] =
        &["random", "free_ratio_first", "ssd_free_ratio_first", "local_first", "cxl"];
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Placement::Random => "random",
            Placement::FreeRatioFirst => "free_ratio_first",
            Placement::SsdFreeRatioFirst => "ssd_free_ratio_first",
            Placement::LocalFirst => "local_first",
            Placement::Cxl => "cxl",
        })
    }
}

impl FromStr for Placement {
    type Err = ParsePlacementError;

    fn from_str(text: &str) -> Result<Self, ParsePlacementError> {
        match text {
            "random" => Ok(Self::Random),
            "free_ratio_first" => Ok(Self::FreeRatioFirst),
            "ssd_free_ratio_first" => Ok(Self::SsdFreeRatioFirst),
            "local_first" => Ok(Self::LocalFirst),
            "cxl" => Ok(Self::Cxl),
            _ => Err(ParsePlacementError(text.into())),
        }
    }
}

/// Error for a text that names no placement. Holds the text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParsePlacementError(pub String);

impl fmt::Display for ParsePlacementError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unknown placement {:?}; known are {}", self.0, Placement::NAMES.join(", "))
    }
}

impl std::error::Error for ParsePlacementError {}

/// Limits of the table of tasks. The defaults are those of Mooncake C++.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskOptions {
    /// Maximum number of tasks that wait to be fetched (10000).
    pub max_pending: usize,
    /// Maximum number of tasks in progress (10000).
    pub max_processing: usize,
    /// Maximum number of ended tasks that are remembered (10000).
    pub max_finished: usize,
    /// Time after which a task that no client has fetched fails (300 s).
    pub pending_timeout: Duration,
    /// Time after the fetch at which a task that has not ended fails (300 s).
    pub processing_timeout: Duration,
    /// Number of times that a client may retry if a segment has no free space (10).
    pub max_retries: u32,
}

impl Default for TaskOptions {
    fn default() -> Self {
        Self {
            max_pending: 10_000,
            max_processing: 10_000,
            max_finished: 10_000,
            pending_timeout: Duration::from_secs(300),
            processing_timeout: Duration::from_secs(300),
            max_retries: 10,
        }
    }
}

/// Options of additional replicas for objects that are read often.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HotOptions {
    /// True if replicas are made. If not, the log names the objects that would get one.
    pub enforce: bool,
    /// Time over which reads are counted (10 s).
    pub window: Duration,
    /// Reads per second from which on an object is hot (0.8).
    pub reads_per_second: f64,
    /// Number of replicas of an object at which no more are made (2).
    pub max_replicas: usize,
}

impl Default for HotOptions {
    fn default() -> Self {
        Self { enforce: true, window: Duration::from_secs(10), reads_per_second: 0.8, max_replicas: 2 }
    }
}

impl HotOptions {
    /// Returns the number of reads in a window that make an object hot.
    pub(crate) fn threshold(&self) -> u64 {
        ((self.window.as_secs_f64() * self.reads_per_second).ceil() as u64).max(1)
    }
}

/// Options of disks of clients. The defaults are those of Mooncake C++.
#[derive(Clone, Debug, PartialEq)]
pub struct DiskOptions {
    /// True if objects are written when they are about to be evicted instead of when they are put
    /// (false).
    pub on_evict: bool,
    /// With `on_evict`: whether an object that does not fit into the queue is evicted unwritten
    /// (false).
    pub force_evict: bool,
    /// Maximum number of objects that wait for the disk of one client (50000).
    pub queue_limit: usize,
    /// With `on_evict`: part of the queue that may be filled between two ticks (0.5).
    pub queue_part: f64,
    /// Options of the promotion of objects that are read from a disk; `None` for no promotion.
    pub promotion: Option<PromotionOptions>,
}

/// Options of the promotion of objects from disk to memory. The defaults are those of Mooncake C++.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromotionOptions {
    /// Number of reads after which an object is promoted (2). The count is approximate and decays.
    pub threshold: u8,
    /// Maximum number of promotions in progress per client (50000).
    pub queue_limit: usize,
    /// Number of promotions that a client receives per heartbeat (1).
    pub per_heartbeat: usize,
}

impl Default for DiskOptions {
    fn default() -> Self {
        Self { on_evict: false, force_evict: false, queue_limit: 50_000, queue_part: 0.5, promotion: None }
    }
}

impl Default for PromotionOptions {
    fn default() -> Self {
        Self { threshold: 2, queue_limit: 50_000, per_heartbeat: 1 }
    }
}

/// Options of copies in files of a shared file system. The defaults are those of Mooncake C++.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileOptions {
    /// Folder of the files. The path is the same for every client.
    pub dir: String,
    /// True if clients drop files when the file system has no more free space.
    pub evict: bool,
    /// Bytes that the files may take; 0 for nine tenths of the file system.
    pub quota: u64,
    /// Bytes that are reported as capacity. Nothing else depends on them.
    pub capacity: u64,
}

impl Default for FileOptions {
    fn default() -> Self {
        Self { dir: String::new(), evict: true, quota: 0, capacity: 0 }
    }
}

impl FileOptions {
    /// Checks the options.
    ///
    /// # Errors
    /// `INVALID_PARAMS` if the folder is not an absolute path without `.` and `..`.
    pub(crate) fn check(&self) -> Result<()> {
        let plain = |part: &str| part != ".." && part != "." && !part.contains('\0');
        if !self.dir.starts_with('/') || !self.dir.split('/').all(plain) {
            return Err(Error::invalid(format!(
                "root_fs_dir must be an absolute path without `.` and `..`: clients share the \
                 folder by its path, not {:?}",
                self.dir
            )));
        }
        Ok(())
    }
}

/// Options of a [`Master`](crate::Master). The defaults are those of Mooncake C++ where it has
/// them.
#[derive(Clone, Debug, PartialEq)]
pub struct MasterOptions {
    /// Time for which a reader may rely on the replicas that it received (10 s).
    pub lease_ttl: Duration,
    /// Last part of a lease during which the object may be removed and evicted (0). Its space stays
    /// in quarantine until the end of the lease.
    pub unprotected_lease: Duration,
    /// Time for which a look-up protects an object from puts that find no other space; without it,
    /// a tenth of the lease. A get that follows its look-up needs that time.
    pub look_up_protection: Option<Duration>,
    /// Duration of a soft pin if the put does not state one (30 min).
    pub soft_pin_ttl: Duration,
    /// Longest soft pin that a put may request (7 days).
    pub max_soft_pin_ttl: Duration,
    /// True if soft-pinned objects are evicted when nothing else is left (true).
    pub evict_soft_pinned: bool,
    /// Part of the capacity above which `tick` evicts (0.90).
    pub high_watermark: f64,
    /// Distance below the watermark down to which `tick` evicts, as a part of the capacity (0.05).
    /// The distance is never more than a hundredth: an object that was evicted early could have
    /// been a hit, and a put that finds no free space evicts by itself.
    pub eviction_ratio: f64,
    /// Time without a heartbeat after which a client and its segments expire, or are suspected
    /// (10 s).
    pub client_ttl: Duration,
    /// Further time without a heartbeat in which a client is suspected, before it expires (0).
    /// Nothing is read from a suspected client, and nothing is placed there. All its objects can be
    /// read again after a heartbeat.
    pub client_suspicion: Duration,
    /// Age from which on another writer may take over a write in progress (30 s).
    pub put_discard: Duration,
    /// Time for which the allocation of a write is valid (600 s). A writer that has not ended its
    /// put by then must not touch the space any more, because the space is reused. Must exceed
    /// `put_discard`.
    pub put_release: Duration,
    /// Time for which the space of a revoked write stays in quarantine, because bytes that the
    /// writer gave up on may still arrive (10 s). The quarantine never ends after the allocation
    /// would have.
    pub revoke_rest: Duration,
    /// Time after the start of the master during which it places nothing in segments that are
    /// mounted *again* and that it has never seen: readers and writers may hold promises of its
    /// predecessor. `None` selects the longest of `lease_ttl`, `put_discard`, the time for which
    /// clients use an allocation, and the promises of earlier masters that clients or a snapshot
    /// report.
    pub remount_rest: Option<Duration>,
    /// Choice of segments for a new object.
    pub placement: Placement,
    /// Limits of the table of tasks.
    pub tasks: TaskOptions,
    /// Tenants with their quotas; `None` for no tenants (`None`).
    pub tenants: Option<Vec<TenantQuota>>,
    /// With tenants: whether a writer that may end a put with bytes missing, such as a client of
    /// Mooncake C++, is granted only memory without bytes of other tenants (true). Owners of
    /// segments zero memory for that.
    pub zero_across_tenants: bool,
    /// Additional replicas of hot objects; `None` for none (`None`).
    pub hot: Option<HotOptions>,
    /// Disks of clients; `None` for memory only (`None`).
    pub disks: Option<DiskOptions>,
    /// Files on a file system that clients share; `None` for none (`None`).
    pub files: Option<FileOptions>,
    /// Memory in bytes that all changes may take that owners of segments have not fetched yet
    /// (256 MiB). Beyond it, the owner with the most changes has to fetch its whole inventory.
    pub ledger_bytes: u64,
    /// Time without a put after which an unfinished import of weights is aborted (5 min).
    pub weight_import_idle: Duration,
    /// Number of shards of the directory, a power of two up to 4096 (64).
    pub shards: usize,
}

impl Default for MasterOptions {
    fn default() -> Self {
        Self {
            lease_ttl: Duration::from_secs(10),
            unprotected_lease: Duration::ZERO,
            look_up_protection: None,
            soft_pin_ttl: Duration::from_secs(30 * 60),
            max_soft_pin_ttl: Duration::from_secs(7 * 24 * 60 * 60),
            evict_soft_pinned: true,
            high_watermark: 0.90,
            eviction_ratio: 0.05,
            client_ttl: Duration::from_secs(10),
            client_suspicion: Duration::ZERO,
            put_discard: Duration::from_secs(30),
            put_release: Duration::from_secs(600),
            revoke_rest: Duration::from_secs(10),
            remount_rest: None,
            placement: Placement::default(),
            tasks: TaskOptions::default(),
            tenants: None,
            zero_across_tenants: true,
            hot: None,
            disks: None,
            files: None,
            ledger_bytes: 256 << 20,
            weight_import_idle: Duration::from_secs(300),
            shards: 64,
        }
    }
}

impl MasterOptions {
    /// Returns the time without a heartbeat after which a client and its segments expire.
    pub fn client_lifetime(&self) -> Duration {
        self.client_ttl.saturating_add(self.client_suspicion)
    }

    /// Checks that the options do not contradict each other.
    ///
    /// # Errors
    /// `INVALID_PARAMS`, naming the option by its flag.
    pub fn check(&self) -> Result<()> {
        let ratio = |name: &str, value: f64| {
            if (0.0..=1.0).contains(&value) {
                Ok(())
            } else {
                Err(Error::invalid(format!("{name} must be between 0 and 1, not {value}")))
            }
        };
        ratio("eviction_high_watermark_ratio", self.high_watermark)?;
        if self.high_watermark == 0.0 {
            return Err(Error::invalid(
                "eviction_high_watermark_ratio must be more than 0: every object would be evicted at once",
            ));
        }
        ratio("eviction_ratio", self.eviction_ratio)?;
        if self.put_release <= self.put_discard {
            return Err(Error::invalid(format!(
                "put_start_release_timeout_sec ({:?}) must be longer than put_start_discard_timeout_sec ({:?})",
                self.put_release, self.put_discard
            )));
        }
        if self.unprotected_lease > self.lease_ttl {
            return Err(Error::invalid(format!(
                "unprotected_lease ({:?}) must not exceed lease_ttl ({:?})",
                self.unprotected_lease, self.lease_ttl
            )));
        }
        if self.soft_pin_ttl > self.max_soft_pin_ttl {
            return Err(Error::invalid(format!(
                "default_kv_soft_pin_ttl ({:?}) must not exceed max_kv_soft_pin_ttl ({:?})",
                self.soft_pin_ttl, self.max_soft_pin_ttl
            )));
        }
        if let Some(disks) = &self.disks {
            ratio("offload_cap_ratio", disks.queue_part)?;
            if !(1..=100_000_000).contains(&disks.queue_limit) {
                return Err(Error::invalid(format!(
                    "offloading_queue_limit must be between 1 and 100000000, not {}",
                    disks.queue_limit
                )));
            }
            if disks.promotion.is_some_and(|promotion| promotion.threshold == 0) {
                return Err(Error::invalid("promotion_admission_threshold must be between 1 and 255, not 0"));
            }
        }
        if let Some(files) = &self.files {
            files.check()?;
        }
        let tenants = self.tenants.as_deref().unwrap_or_default();
        for (at, tenant) in tenants.iter().enumerate() {
            tenant.check()?;
            if tenants[..at].iter().any(|other| other.name == tenant.name) {
                return Err(Error::invalid(format!("tenant {} has two quotas", tenant.name)));
            }
        }
        if self.client_ttl.is_zero() {
            return Err(Error::invalid("client_ttl must not be 0: every client would expire at once"));
        }
        if self.hot.is_some_and(|hot| !hot.reads_per_second.is_finite() || hot.reads_per_second <= 0.0) {
            return Err(Error::invalid("dynamic_replication_admission_qps_threshold must be above 0"));
        }
        if self.weight_import_idle.is_zero() {
            return Err(Error::invalid(
                "weight_import_idle_timeout_ms must not be 0: every import would be aborted at once",
            ));
        }
        if !self.shards.is_power_of_two() || self.shards > 4096 {
            return Err(Error::invalid(format!(
                "shards must be a power of two up to 4096, not {}",
                self.shards
            )));
        }
        Ok(())
    }

    /// Returns the time for which a look-up protects an object from puts that find no other space.
    pub fn look_up_floor(&self) -> Duration {
        self.look_up_protection.unwrap_or(self.lease_ttl / 10).min(self.lease_ttl)
    }

    /// Returns the longest time between two look-ups of an object that count as one. Polls that are
    /// further apart leave as much time to puts as they take.
    pub(crate) fn look_up_pause(&self) -> Duration {
        2 * self.look_up_floor()
    }

    /// Returns the longest time for which a reader or a writer may rely on a response of a master
    /// with these options.
    pub fn longest_promise(&self) -> Duration {
        self.lease_ttl.max(self.put_discard)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placement_names_are_case_sensitive() {
        for name in Placement::NAMES {
            assert_eq!(name.parse::<Placement>().map(|p| p.to_string()).as_deref(), Ok(*name));
        }
        let error = "Random".parse::<Placement>().unwrap_err();
        assert!(error.to_string().starts_with("unknown placement \"Random\"; known are random, "));
    }

    #[test]
    fn contradiction_error_states_flag() {
        let ok = MasterOptions::default();
        ok.check().unwrap();
        for (name, bad) in [
            ("eviction_high_watermark_ratio", MasterOptions { high_watermark: 1.01, ..ok.clone() }),
            ("eviction_high_watermark_ratio", MasterOptions { high_watermark: f64::NAN, ..ok.clone() }),
            ("eviction_high_watermark_ratio", MasterOptions { high_watermark: 0.0, ..ok.clone() }),
            ("eviction_ratio", MasterOptions { eviction_ratio: -0.1, ..ok.clone() }),
            ("put_start_release_timeout_sec", MasterOptions { put_release: ok.put_discard, ..ok.clone() }),
            ("default_kv_soft_pin_ttl", MasterOptions { max_soft_pin_ttl: Duration::ZERO, ..ok.clone() }),
            ("client_ttl", MasterOptions { client_ttl: Duration::ZERO, ..ok.clone() }),
            (
                "weight_import_idle_timeout_ms",
                MasterOptions { weight_import_idle: Duration::ZERO, ..ok.clone() },
            ),
            ("shards", MasterOptions { shards: 3, ..ok.clone() }),
        ] {
            assert!(bad.check().unwrap_err().message().contains(name), "{name}");
        }
    }
}
