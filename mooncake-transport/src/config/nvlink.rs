//! Settings of the NVLink transport.

use std::path::PathBuf;
use std::time::Duration;

use super::TransportConfig;
use crate::protocol::Protocol;
use mooncake_core::{Error, Result};

/// Settings of the NVLink transport (crate `mooncake-nvlink`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NvlinkConfig {
    /// Library of the CUDA driver. `None` stands for the `libcuda.so.1` that the system finds.
    pub libcuda: Option<PathBuf>,
    /// Limits the transport to one host. Descriptors then contain `nvlink_intra`, and `nvlink`
    /// otherwise.
    pub intra_node: bool,
    /// Exports memory of the transport's allocator to the whole NVLink fabric, if the devices are
    /// in one. CUDA IPC alone reaches only this host.
    pub fabric: bool,
    /// Timeout for the response of an owner, to the connection and to each request for its regions.
    pub response_timeout: Duration,
    /// Time after which the log reports that dropping a registration waits for copies of a peer.
    /// The wait continues: device memory cannot be detached.
    pub drain_timeout: Duration,
    /// Interval of the check of connections to owners. The connections of dead owners are closed,
    /// and their memory is unmapped.
    pub upkeep_interval: Duration,
    /// Maximum number of peers served at a time. Further ones are refused and use another
    /// transport.
    pub max_served: usize,
}

impl Default for NvlinkConfig {
    fn default() -> Self {
        Self {
            libcuda: None,
            intra_node: false,
            fabric: true,
            response_timeout: Duration::from_secs(1),
            drain_timeout: Duration::from_secs(1),
            upkeep_interval: Duration::from_secs(1),
            max_served: 1024,
        }
    }
}

impl NvlinkConfig {
    /// Checks the settings.
    ///
    /// # Errors
    /// `INVALID_PARAMS` with the name of the first invalid setting.
    pub fn check(&self) -> Result<()> {
        let fault = if self.max_served == 0 {
            "max_served must not be 0"
        } else if self.response_timeout.is_zero() || self.upkeep_interval.is_zero() {
            "response_timeout and upkeep_interval must not be 0"
        } else {
            return Ok(());
        };
        Err(Error::invalid(fault).context("cannot use NvlinkConfig"))
    }

    /// Name of the transport in descriptors.
    pub fn protocol(&self) -> Protocol {
        if self.intra_node { Protocol::NVLINK_INTRA } else { Protocol::NVLINK }
    }
}

impl TransportConfig for NvlinkConfig {
    const TRANSPORT: &'static str = "nvlink";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_setting_is_refused() {
        let valid = NvlinkConfig::default();
        valid.check().unwrap();
        for config in [
            NvlinkConfig { max_served: 0, ..valid.clone() },
            NvlinkConfig { response_timeout: Duration::ZERO, ..valid.clone() },
            NvlinkConfig { upkeep_interval: Duration::ZERO, ..valid.clone() },
        ] {
            config.check().unwrap_err();
        }
    }
}
