//! Settings.

use std::time::Duration;

use mooncake_core::{Error, Result};

/// Settings of a [`ShmTransport`](crate::ShmTransport). Nothing here is read from the environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShmConfig {
    /// Bytes of one submission that are copied on the submitting thread; what is beyond goes to the copying threads.
    pub inline_bytes: usize,
    /// Bytes a copying thread takes at a time.
    pub piece_bytes: usize,
    /// Copying threads, started when there is something for them; at least 1.
    pub copiers: usize,
    /// How long an owner may take to answer, when it is connected and when it is asked again.
    pub answer_timeout: Duration,
    /// How long dropping a registration waits for copies of a peer that does not get on; after that the memory is cut off from it.
    pub drain_timeout: Duration,
    /// How long a peer may stay in one copy, whatever else happens; between this and twice as much, the memory is cut off from it.
    pub stall_timeout: Duration,
    /// How often links to others are looked after: those of the dead are given up, with the memory they show.
    pub upkeep_interval: Duration,
    /// Peers served at a time; further ones are refused and take another wire.
    pub max_served: usize,
}

impl Default for ShmConfig {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            inline_bytes: 1 << 20,
            piece_bytes: 1 << 20,
            copiers: cores.clamp(1, 4),
            answer_timeout: Duration::from_secs(1),
            drain_timeout: Duration::from_secs(1),
            stall_timeout: Duration::from_secs(10),
            upkeep_interval: Duration::from_secs(1),
            max_served: 1024,
        }
    }
}

impl ShmConfig {
    /// Names the first setting that cannot work.
    pub(crate) fn check(&self) -> Result<()> {
        let fault = if self.piece_bytes == 0 || self.copiers == 0 || self.max_served == 0 {
            "piece_bytes, copiers and max_served must not be 0"
        } else if self.answer_timeout.is_zero()
            || self.stall_timeout.is_zero()
            || self.upkeep_interval.is_zero()
        {
            "a time of 0 would fail everything"
        } else {
            return Ok(());
        };
        Err(Error::invalid(fault).context("shm configuration"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_work_is_named() {
        let good = ShmConfig::default();
        good.check().unwrap();
        for config in [
            ShmConfig { piece_bytes: 0, ..good.clone() },
            ShmConfig { copiers: 0, ..good.clone() },
            ShmConfig { answer_timeout: Duration::ZERO, ..good.clone() },
            ShmConfig { upkeep_interval: Duration::ZERO, ..good.clone() },
        ] {
            config.check().unwrap_err();
        }
    }
}
