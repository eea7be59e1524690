//! Flags as they come in, before they are put together.

use std::path::PathBuf;

use mooncake_core::{Error, Result};

use super::{CleanUpConfig, EventsConfig, MasterConfig, MastersConfig, MetadataServerConfig, TenantPolicy};
use crate::master::{DiskOptions, HotOptions, PromotionOptions};

#[derive(Default)]
pub(super) struct Draft {
    pub(super) config: MasterConfig,
    pub(super) metadata: MetadataServerConfig,
    pub(super) metadata_enabled: bool,
    pub(super) metadata_url: String,
    pub(super) metadata_cluster: String,
    pub(super) clean_up: bool,
    pub(super) events: EventsConfig,
    pub(super) events_enabled: bool,
    pub(super) events_somewhere: bool,
    pub(super) offload: bool,
    pub(super) disks: DiskOptions,
    pub(super) promotion_on_hit: bool,
    pub(super) promotion: PromotionOptions,
    pub(super) masters: bool,
    /// Who elects, and where that is, by either name.
    pub(super) electors: String,
    pub(super) electors_at: String,
    pub(super) etcd: String,
    pub(super) tenants: bool,
    /// Whether their policy is in etcd, and where there, or in which file.
    pub(super) tenants_in_etcd: bool,
    pub(super) tenant_policy: String,
    /// Whether hot keys get more replicas in earnest; `None` for not at all.
    pub(super) hot_mode: Option<bool>,
    pub(super) hot: HotOptions,
    pub(super) verbosity: u8,
    pub(super) log_dir: Option<PathBuf>,
    pub(super) to_stderr: Option<bool>,
}

impl Draft {
    pub(super) fn finish(self) -> Result<MasterConfig> {
        let mut config = self.config;
        match self.verbosity {
            0 => {}
            1 => config.log_level = "debug",
            _ => config.log_level = "trace",
        }
        if self.to_stderr != Some(true) {
            config.log_dir = self.log_dir;
        }
        if self.offload {
            let promotion = self.promotion_on_hit.then_some(self.promotion);
            config.options.disks = Some(DiskOptions { promotion, ..self.disks });
        }
        if self.tenants {
            if self.tenant_policy.is_empty() {
                return Err(Error::invalid(
                    "--enable_multi_tenants needs --tenant_quota_connector_uri: the path of the file that says which \
                     tenants there are, or the host:port of the etcd",
                ));
            }
            config.tenant_policy = Some(match self.tenants_in_etcd {
                false => TenantPolicy::File(self.tenant_policy.into()),
                true => TenantPolicy::Etcd {
                    endpoints: self.tenant_policy,
                    key: TenantPolicy::etcd_key(&config.cluster_id),
                },
            });
        }
        if self.masters {
            if !matches!(self.electors.as_str(), "" | "etcd") {
                return Err(Error::invalid(format!(
                    "--ha_backend_type={}: masters are elected in etcd only",
                    self.electors
                )));
            }
            let etcd = if self.electors_at.is_empty() { self.etcd } else { self.electors_at };
            if etcd.is_empty() {
                return Err(Error::invalid(
                    "--enable_ha needs --etcd_endpoints (or --ha_backend_connstring): the host:port of the etcd that masters are elected in",
                ));
            }
            config.masters = Some(MastersConfig { etcd });
        }
        if self.clean_up {
            let server = Some(self.metadata_url).filter(|_| !self.metadata_enabled);
            if server.as_deref() == Some("") {
                return Err(Error::invalid(
                    "--enable_metadata_cleanup_on_timeout needs --enable_http_metadata_server, or --metadata_server \
                     (MOONCAKE_TE_META_DATA_SERVER) to say where the metadata is",
                ));
            }
            if let Some(url) = server.as_deref().filter(|url| !url.starts_with("http://")) {
                return Err(Error::invalid(format!(
                    "--metadata_server={url}: only http:// servers can be cleaned up"
                )));
            }
            config.clean_up = Some(CleanUpConfig { server, cluster_id: self.metadata_cluster });
        }
        config.options.hot = self.hot_mode.map(|enforce| HotOptions { enforce, ..self.hot });
        config.metadata = self.metadata_enabled.then_some(self.metadata);
        if self.events_enabled {
            if !self.events_somewhere {
                return Err(Error::invalid(
                    "--enable_kv_events needs --kv_events_bind_endpoint, such as tcp://*:5557",
                ));
            }
            if self.events.backend_id.is_empty() {
                return Err(Error::invalid(
                    "--enable_kv_events needs --kv_events_backend_id, the name of this cache in events",
                ));
            }
            config.events = Some(self.events);
        }
        config.options.check()?;
        Ok(config)
    }
}
