//! Settings of a store and of its calls.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::{Error, Result};

use crate::schedule::Limits;

/// Settings of a store.
#[derive(Clone, Debug)]
pub struct P2pOptions {
    /// Bounds of the reads in progress; by default 4 shards per reader, and 4 reads per source.
    pub limits: Limits,
    /// Time without a heartbeat after which the entries of a node end; 30 s by default. A node
    /// sends three heartbeats in that time.
    pub lease: Duration,
    /// Time limit of the work of a call in the metadata service; 30 s by default.
    pub catalogue_timeout: Duration,
    /// Time without an arrived shard after which a read of an object fails; 120 s by default.
    pub stall_timeout: Duration,
    /// Interval at which a reader looks for new copies while nothing arrives; 200 ms by default.
    pub poll_interval: Duration,
}

impl Default for P2pOptions {
    fn default() -> Self {
        Self {
            limits: Limits { streams: 4, readers_per_source: 4 },
            lease: Duration::from_secs(30),
            catalogue_timeout: Duration::from_secs(30),
            stall_timeout: Duration::from_secs(120),
            poll_interval: Duration::from_millis(200),
        }
    }
}

impl P2pOptions {
    /// Checks the ranges of the settings.
    ///
    /// # Errors
    /// Returns `INVALID_PARAMS` with the name of a setting that is 0.
    pub(crate) fn check(&self) -> Result<()> {
        let Self { limits, lease, catalogue_timeout, stall_timeout, poll_interval } = self;
        let zero = [
            ("streams", limits.streams == 0),
            ("readers_per_source", limits.readers_per_source == 0),
            ("lease", lease.is_zero()),
            ("catalogue_timeout", catalogue_timeout.is_zero()),
            ("stall_timeout", stall_timeout.is_zero()),
            ("poll_interval", poll_interval.is_zero()),
        ];
        match zero.iter().find(|(_, is_zero)| *is_zero) {
            Some((name, _)) => {
                Err(Error::invalid(format!("cannot open P2P store: a setting is 0. setting={name}")))
            }
            None => Ok(()),
        }
    }
}

/// Settings of a registration.
#[derive(Clone, Copy, Debug)]
pub struct RegisterOptions {
    /// Maximum length of a shard in bytes, which divides 4 GiB; 64 MiB by default.
    pub max_shard_size: u64,
    /// True if another object of the same name is replaced.
    pub force_create: bool,
}

impl Default for RegisterOptions {
    fn default() -> Self {
        Self { max_shard_size: 64 << 20, force_create: false }
    }
}

/// Settings of a read.
#[derive(Clone, Default)]
pub struct GetOptions {
    /// True if shards that are in the memory already are not read, by their checksums. A reader
    /// whose memory outlives it, such as a file, continues that way after a crash.
    pub resume: bool,
    /// Function that is called after each shard that has arrived, and once before the first.
    pub on_progress: Option<Arc<dyn Fn(GetProgress) + Send + Sync>>,
}

impl fmt::Debug for GetOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GetOptions").field("resume", &self.resume).finish_non_exhaustive()
    }
}

/// Progress of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GetProgress {
    /// Bytes that have arrived, and valid bytes that were in the memory before.
    pub arrived_bytes: u64,
    /// Length of the object in bytes.
    pub total_bytes: u64,
}
