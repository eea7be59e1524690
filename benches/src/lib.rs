//! Shared parts of the measurements: the bin scheme to compare allocators with, the processes of
//! Mooncake C++, and the settings of masters.

pub mod bin_scheme;
pub mod peer;

use mooncake_store::config::MasterConfig;

/// Returns the settings of a master at free ports of loopback, which prints no reports.
pub fn local_master() -> MasterConfig {
    MasterConfig {
        rpc_address: "127.0.0.1".into(),
        rpc_port: 0,
        metrics_host: "127.0.0.1".into(),
        metrics_port: 0,
        metric_reporting: false,
        ..MasterConfig::default()
    }
}
