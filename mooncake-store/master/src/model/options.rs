//! What a master can be told: lifetimes, watermarks, placement.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use mooncake_core::{Error, Result};

use super::tenants::TenantQuota;

/// How segments are chosen for a new object. The names are the existing system's and case matters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Placement {
    /// `random`: each segment alike, then whichever comes next.
    #[default]
    Random,
    /// `free_ratio_first`: of a few segments drawn at random, those with more room are likelier. Likelier, not first: a segment
    /// that has just joined must not take every write of the cluster.
    FreeRatioFirst,
    /// `ssd_free_ratio_first`: of a few segments drawn at random, those whose owner has more room on its disk are likelier. An owner
    /// that has not said how large its disk is counts as one with an empty disk.
    SsdFreeRatioFirst,
    /// `local_first`: a single replica goes to the writer's own host, then to the hosts that follow it by name; on a host, to a
    /// segment by the key. A writer on a host without segments is near to none: its objects go anywhere.
    LocalFirst,
    /// `cxl`: one replica, in the segment that the put names first and nowhere else.
    Cxl,
}

impl Placement {
    /// Every name that parses.
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

/// The text names no placement; it is kept for the message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParsePlacementError(pub String);

impl fmt::Display for ParsePlacementError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unknown placement {:?}; known are {}", self.0, Placement::NAMES.join(", "))
    }
}

impl std::error::Error for ParsePlacementError {}

/// Limits of the table of tasks. The defaults are the existing system's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskOptions {
    /// TaskTable that may wait to be fetched (10000).
    pub max_pending: usize,
    /// TaskTable that may be under way (10000).
    pub max_processing: usize,
    /// TaskTable that are over and still known (10000).
    pub max_finished: usize,
    /// A task that nobody fetched for this long has failed (300 s).
    pub pending_timeout: Duration,
    /// A task that was fetched this long ago and not ended has failed (300 s).
    pub processing_timeout: Duration,
    /// How often a client may try again where there is no room (10).
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

/// More replicas of objects that are read often.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HotOptions {
    /// Whether replicas are made; otherwise the log says which would be.
    pub enforce: bool,
    /// Time over which reads are counted (10 s).
    pub window: Duration,
    /// Reads a second from which on an object is hot (0.8).
    pub reads_per_second: f64,
    /// Replicas of an object after which no more are made (2).
    pub max_replicas: usize,
}

impl Default for HotOptions {
    fn default() -> Self {
        Self { enforce: true, window: Duration::from_secs(10), reads_per_second: 0.8, max_replicas: 2 }
    }
}

impl HotOptions {
    /// Reads in a window that make an object hot.
    pub(crate) fn threshold(&self) -> u64 {
        ((self.window.as_secs_f64() * self.reads_per_second).ceil() as u64).max(1)
    }
}

/// What a master does with clients' disks. The defaults are the existing system's.
#[derive(Clone, Debug, PartialEq)]
pub struct DiskOptions {
    /// Objects are written when they are about to be evicted, not when they are put (false).
    pub on_evict: bool,
    /// With `on_evict`: what finds no place in the queue is evicted all the same (false).
    pub force_evict: bool,
    /// Objects that may wait for one client's disk (50000).
    pub queue_limit: usize,
    /// With `on_evict`: part of the queue that may be filled between two ticks (0.5).
    pub queue_part: f64,
    /// Objects that are read from a disk come back to memory.
    pub promotion: Option<PromotionOptions>,
}

/// When an object comes back to memory. The defaults are the existing system's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromotionOptions {
    /// Reads, counted roughly and forgotten slowly, after which it does (2).
    pub threshold: u8,
    /// Objects that may be on their way, per client (50000).
    pub queue_limit: usize,
    /// Objects told to a client per heartbeat (1).
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

/// Copies of objects in files of a shared file system. The defaults are the existing system's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileOptions {
    /// The folder they lie in, by the same path for every client.
    pub dir: String,
    /// Whether clients drop files when there is no more room.
    pub evict: bool,
    /// Bytes that the files may take, 0 for nine tenths of the file system.
    pub quota: u64,
    /// Bytes that are reported as capacity; nothing depends on them.
    pub capacity: u64,
}

impl Default for FileOptions {
    fn default() -> Self {
        Self { dir: String::new(), evict: true, quota: 0, capacity: 0 }
    }
}

impl FileOptions {
    /// # Errors
    /// `INVALID_PARAMS` for a folder that is named differently from place to place.
    pub(crate) fn check(&self) -> Result<()> {
        let plain = |part: &str| part != ".." && part != "." && !part.contains('\0');
        if !self.dir.starts_with('/') || !self.dir.split('/').all(plain) {
            return Err(Error::invalid(format!(
                "root_fs_dir: {:?} is no absolute path without `.` and `..`: clients share the folder by its path",
                self.dir
            )));
        }
        Ok(())
    }
}

/// How a [`Master`](crate::Master) behaves. The defaults are the existing system's where it has them.
#[derive(Clone, Debug, PartialEq)]
pub struct MasterOptions {
    /// How long a reader may rely on what it was told (10 s).
    pub lease_ttl: Duration,
    /// How long a soft pin lasts when the put does not say (30 min).
    pub soft_pin_ttl: Duration,
    /// Longest soft pin a put may ask for (24 h).
    pub max_soft_pin_ttl: Duration,
    /// Whether soft-pinned objects go when nothing else is left (true).
    pub evict_soft_pinned: bool,
    /// Above this part of the capacity, `tick` evicts (0.90).
    pub high_watermark: f64,
    /// How far below the watermark `tick` evicts, at most and as a part of the capacity (0.05). It never goes further than a
    /// hundredth: what was evicted early would have been hits, and a put that finds no room makes its own.
    pub eviction_ratio: f64,
    /// A client silent for this long is gone, and its segments with it (10 s).
    pub client_ttl: Duration,
    /// A write in progress for this long may be taken over by another writer (30 s).
    pub put_discard: Duration,
    /// How long a write grant is valid. A writer that has not ended its put by then must not touch the space any more: it
    /// is handed out again (600 s). Must exceed `put_discard`.
    pub put_release: Duration,
    /// How long the space of a revoked write rests before it is handed out again: bytes that the writer gave up on may still
    /// be on their way. Never longer than the grant was valid (10 s).
    pub revoke_rest: Duration,
    /// How long after its own start a master places nothing in segments that are mounted *again* and that it has never seen:
    /// readers and writers may hold promises of the master before it. `None` is the longest of `lease_ttl`, `put_discard`, the
    /// time for which clients use a grant, and what clients or a snapshot say of earlier masters.
    pub remount_rest: Option<Duration>,
    /// How segments are chosen.
    pub placement: Placement,
    /// TaskTable: how many, for how long.
    pub tasks: TaskOptions,
    /// Tenants, each with a quota; `None` for no tenants at all (`None`).
    pub tenants: Option<Vec<TenantQuota>>,
    /// More replicas of hot objects; `None` for none (`None`).
    pub hot: Option<HotOptions>,
    /// ClientTable' disks; `None` for memory only (`None`).
    pub disks: Option<DiskOptions>,
    /// Files on a file system that clients share; `None` for none (`None`).
    pub files: Option<FileOptions>,
    /// Shards of the directory, a power of two up to 4096 (64).
    pub shards: usize,
}

impl Default for MasterOptions {
    fn default() -> Self {
        Self {
            lease_ttl: Duration::from_secs(10),
            soft_pin_ttl: Duration::from_secs(30 * 60),
            max_soft_pin_ttl: Duration::from_secs(24 * 60 * 60),
            evict_soft_pinned: true,
            high_watermark: 0.90,
            eviction_ratio: 0.05,
            client_ttl: Duration::from_secs(10),
            put_discard: Duration::from_secs(30),
            put_release: Duration::from_secs(600),
            revoke_rest: Duration::from_secs(10),
            remount_rest: None,
            placement: Placement::default(),
            tasks: TaskOptions::default(),
            tenants: None,
            hot: None,
            disks: None,
            files: None,
            shards: 64,
        }
    }
}

impl MasterOptions {
    /// Refuses what contradicts itself.
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
        ratio("eviction_ratio", self.eviction_ratio)?;
        if self.put_release <= self.put_discard {
            return Err(Error::invalid(format!(
                "put_start_release_timeout_sec ({:?}) must be longer than put_start_discard_timeout_sec ({:?})",
                self.put_release, self.put_discard
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
            return Err(Error::invalid("client_ttl must not be 0: every client would be gone at once"));
        }
        if self.hot.is_some_and(|hot| !hot.reads_per_second.is_finite() || hot.reads_per_second <= 0.0) {
            return Err(Error::invalid("dynamic_replication_admission_qps_threshold must be above 0"));
        }
        if !self.shards.is_power_of_two() || self.shards > 4096 {
            return Err(Error::invalid(format!(
                "shards must be a power of two up to 4096, not {}",
                self.shards
            )));
        }
        Ok(())
    }

    /// Longest time for which a reader or a writer may rely on what a master with these options told it.
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
    fn contradictions_are_named_by_flag() {
        let ok = MasterOptions::default();
        ok.check().unwrap();
        for (name, bad) in [
            ("eviction_high_watermark_ratio", MasterOptions { high_watermark: 1.01, ..ok.clone() }),
            ("eviction_high_watermark_ratio", MasterOptions { high_watermark: f64::NAN, ..ok.clone() }),
            ("eviction_ratio", MasterOptions { eviction_ratio: -0.1, ..ok.clone() }),
            ("put_start_release_timeout_sec", MasterOptions { put_release: ok.put_discard, ..ok.clone() }),
            ("default_kv_soft_pin_ttl", MasterOptions { max_soft_pin_ttl: Duration::ZERO, ..ok.clone() }),
            ("client_ttl", MasterOptions { client_ttl: Duration::ZERO, ..ok.clone() }),
            ("shards", MasterOptions { shards: 3, ..ok.clone() }),
        ] {
            assert!(bad.check().unwrap_err().message().contains(name), "{name}");
        }
    }
}
