//! Settings of the transport over shared memory.

use std::time::Duration;

use mooncake_core::{Error, Result};

use super::TransportConfig;

/// Settings of the transport over shared memory (crate `mooncake-shm`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShmConfig {
    /// Bytes of one submission that the submitting thread copies. The copying threads copy the
    /// rest.
    pub inline_bytes: usize,
    /// Bytes that a copying thread takes at a time.
    pub piece_bytes: usize,
    /// Number of copying threads, started on demand; at least 1.
    pub copy_threads: usize,
    /// Timeout for the response of an owner, to the connection and to each request for its regions.
    pub response_timeout: Duration,
    /// Time for which dropping a registration waits for copies of a stalled peer. After that, the
    /// memory is detached from the peer.
    pub drain_timeout: Duration,
    /// Time for which a peer may stay in one copy. Between this and twice as much, the memory is
    /// detached from the peer.
    pub stall_timeout: Duration,
    /// Interval of the check of connections to owners. The connections of dead owners are closed,
    /// and their memory is unmapped.
    pub upkeep_interval: Duration,
    /// Maximum number of peers served at a time. Further ones are refused and use another
    /// transport.
    pub max_served: usize,
}

impl Default for ShmConfig {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            inline_bytes: 1 << 20,
            piece_bytes: 1 << 20,
            copy_threads: cores.clamp(1, 4),
            response_timeout: Duration::from_secs(1),
            drain_timeout: Duration::from_secs(1),
            stall_timeout: Duration::from_secs(10),
            upkeep_interval: Duration::from_secs(1),
            max_served: 1024,
        }
    }
}

impl ShmConfig {
    /// Checks the settings.
    ///
    /// # Errors
    /// `INVALID_PARAMS` with the name of the first invalid setting.
    pub fn check(&self) -> Result<()> {
        let fault = if self.piece_bytes == 0 || self.copy_threads == 0 || self.max_served == 0 {
            "piece_bytes, copy_threads and max_served must not be 0"
        } else if self.response_timeout.is_zero()
            || self.stall_timeout.is_zero()
            || self.upkeep_interval.is_zero()
        {
            "response_timeout, stall_timeout and upkeep_interval must not be 0"
        } else {
            return Ok(());
        };
        Err(Error::invalid(fault).context("cannot use ShmConfig"))
    }
}

impl TransportConfig for ShmConfig {
    const TRANSPORT: &'static str = "shm";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_setting_is_refused() {
        let valid = ShmConfig::default();
        valid.check().unwrap();
        for config in [
            ShmConfig { piece_bytes: 0, ..valid.clone() },
            ShmConfig { copy_threads: 0, ..valid.clone() },
            ShmConfig { response_timeout: Duration::ZERO, ..valid.clone() },
            ShmConfig { upkeep_interval: Duration::ZERO, ..valid.clone() },
        ] {
            config.check().unwrap_err();
        }
    }
}
