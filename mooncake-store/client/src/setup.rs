//! Setup of a store in the form of Mooncake C++, for bindings to other languages.

use std::time::Duration;

use mooncake_core::Result;

use crate::builder::ClientBuilder;
use crate::config::{ClientConfig, ClientEnvironment};

/// Arguments of `setup` of Mooncake C++.
#[derive(Clone, Debug, Default)]
pub struct StoreSetup {
    /// Name of this client, `host` or `host:port`.
    pub local_hostname: String,
    /// Metadata service, or `P2PHANDSHAKE`.
    pub metadata_server: String,
    /// Bytes of memory that the client offers to the cluster.
    pub segment: u64,
    /// Bytes of the local buffer.
    pub local_buffer: u64,
    /// Transport. Empty for `tcp`.
    pub protocol: String,
    /// RDMA devices with commas between them. Empty for all.
    pub devices: String,
    /// Address of the master.
    pub master: String,
    /// Tenant. Empty for `default`.
    pub tenant: String,
}

impl StoreSetup {
    /// Default timeout of a call.
    pub const TIMEOUT: Duration = Duration::from_secs(20);

    /// Reads the settings from the environment of this process.
    pub fn environment() -> ClientEnvironment {
        ClientEnvironment::over(ClientConfig { timeout: Self::TIMEOUT, ..Default::default() })
    }

    /// Returns a builder of the client, with the settings of `config` for all else.
    ///
    /// # Errors
    /// Returns `NOT_SUPPORTED` for a protocol that is not built in.
    pub fn builder(self, mut config: ClientConfig) -> Result<ClientBuilder> {
        let or = |text: String, default: &str| if text.is_empty() { default.to_owned() } else { text };
        let protocol = or(self.protocol, "tcp");
        if !self.devices.is_empty() && protocol != "rdma" {
            tracing::warn!(devices = self.devices, "RDMA devices are ignored with protocol {protocol}");
        }
        config.segment_file.take_if(|_| self.segment == 0);
        (config.directory, config.handshake) = ClientEnvironment::meeting(&self.metadata_server);
        let transports = ClientEnvironment::transports(&protocol, &self.devices)?;
        Ok(ClientBuilder::new()
            .config(config)
            .local_hostname(self.local_hostname)
            .metadata(self.metadata_server)
            .master(self.master)
            .segment(self.segment)
            .local_buffer(self.local_buffer)
            .protocol(protocol)
            .transports(transports)
            .tenant(or(self.tenant, "default")))
    }
}
