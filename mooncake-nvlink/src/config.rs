//! Settings.

use std::path::PathBuf;
use std::time::Duration;

use mooncake_core::{Error, Result};
use mooncake_transport::Protocol;

/// Settings of an [`NvlinkTransport`](crate::NvlinkTransport). Nothing here is read from the environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NvlinkConfig {
    /// The CUDA driver's library; `libcuda.so.1`, wherever the system finds it, when `None`.
    pub libcuda: Option<PathBuf>,
    /// Whether it is the wire within hosts only, which descriptors call `nvlink_intra`; `nvlink` otherwise.
    pub intra_node: bool,
    /// Whether memory made for it is exported to the whole NVLink fabric, where the devices are in one. CUDA IPC alone reaches this host only.
    pub fabric: bool,
    /// How long an owner may take to answer, when it is connected and when it is asked again.
    pub answer_timeout: Duration,
    /// How long dropping a registration waits for a peer's copies before the log says so. It waits on: a device's memory cannot be cut off.
    pub drain_timeout: Duration,
    /// How often links to others are looked after: those of the dead are given up, with the memory they show.
    pub upkeep_interval: Duration,
    /// Peers served at a time; further ones are refused and take another wire.
    pub max_served: usize,
}

impl Default for NvlinkConfig {
    fn default() -> Self {
        Self {
            libcuda: None,
            intra_node: false,
            fabric: true,
            answer_timeout: Duration::from_secs(1),
            drain_timeout: Duration::from_secs(1),
            upkeep_interval: Duration::from_secs(1),
            max_served: 1024,
        }
    }
}

impl NvlinkConfig {
    /// Names the first setting that cannot work.
    pub(crate) fn check(&self) -> Result<()> {
        let fault = if self.max_served == 0 {
            "max_served must not be 0"
        } else if self.answer_timeout.is_zero() || self.upkeep_interval.is_zero() {
            "a time of 0 would fail everything"
        } else {
            return Ok(());
        };
        Err(Error::invalid(fault).context("nvlink configuration"))
    }

    /// What descriptors call the wire.
    pub(crate) fn protocol(&self) -> Protocol {
        if self.intra_node { Protocol::new(INTRA) } else { Protocol::NVLINK }
    }
}

/// What descriptors call the wire within hosts.
pub(crate) const INTRA: &str = "nvlink_intra";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_work_is_named() {
        let good = NvlinkConfig::default();
        good.check().unwrap();
        for config in [
            NvlinkConfig { max_served: 0, ..good.clone() },
            NvlinkConfig { answer_timeout: Duration::ZERO, ..good.clone() },
            NvlinkConfig { upkeep_interval: Duration::ZERO, ..good.clone() },
        ] {
            config.check().unwrap_err();
        }
    }
}
