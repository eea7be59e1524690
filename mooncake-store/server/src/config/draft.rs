//! Values of flags while the configuration is assembled.

use std::path::PathBuf;

use mooncake_core::fault_injection::is_planted;
use mooncake_core::{Error, Result};
use mooncake_metadata::FOLDER;

use super::{
    CleanUpConfig, EventsConfig, MasterConfig, MastersConfig, MetadataServerConfig, SnapshotConfig,
    TenantPolicy,
};
use mooncake_master::{DiskOptions, FileOptions, GRANT_USE, HotOptions, PromotionOptions};

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
    /// Parent folder of the clusters' files; empty for none.
    pub(super) files_in: String,
    pub(super) files: FileOptions,
    pub(super) promotion_on_hit: bool,
    pub(super) promotion: PromotionOptions,
    pub(super) masters: bool,
    /// Backend of the election and its location, by either name of the flag.
    pub(super) electors: String,
    pub(super) electors_at: String,
    pub(super) etcd: String,
    pub(super) snapshots: SnapshotConfig,
    /// Types of the stores for snapshots and for their list.
    pub(super) snapshots_in: String,
    pub(super) snapshot_list_in: String,
    pub(super) tenants: bool,
    /// Type and location of the store for the tenants' policy.
    pub(super) tenants_in: String,
    pub(super) tenant_policy: String,
    /// True to create replicas of hot objects, false to observe only; `None` if disabled.
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
        if !self.files_in.is_empty() {
            if matches!(&*config.cluster_id, "." | "..") {
                let text = format!(
                    "--cluster_id={}: must be a valid folder name if files are enabled",
                    config.cluster_id
                );
                return Err(Error::invalid(text));
            }
            let dir = format!("{}/{}", self.files_in.trim_end_matches('/'), config.cluster_id);
            config.options.files = Some(FileOptions { dir, ..self.files });
        }
        if self.tenants {
            if self.tenant_policy.is_empty() {
                return Err(Error::invalid(
                    "--enable_multi_tenants needs --tenant_quota_connector_uri: \
                     the path of the file with the tenants, the host:port of the etcd, or rocksdb:///path",
                ));
            }
            let key = TenantPolicy::key(&config.cluster_id);
            config.tenant_policy = Some(match self.tenants_in.as_str() {
                "etcd" => TenantPolicy::Etcd { endpoints: self.tenant_policy, key },
                "rocksdb" => TenantPolicy::Own { url: self.tenant_policy, key },
                _ => TenantPolicy::File(self.tenant_policy.into()),
            });
        }
        if self.masters {
            if !matches!(self.electors.as_str(), "" | "etcd") {
                return Err(Error::invalid(format!(
                    "--ha_backend_type={}: the election of masters supports etcd only",
                    self.electors
                )));
            }
            let etcd = if self.electors_at.is_empty() { self.etcd } else { self.electors_at };
            if etcd.is_empty() {
                return Err(Error::invalid(
                    "--enable_ha needs --etcd_endpoints (or --ha_backend_connstring): the host:port of the etcd for the election",
                ));
            }
            if etcd.contains(FOLDER) {
                return Err(Error::invalid(format!(
                    "--enable_ha: the election of masters supports etcd only; {etcd} serves one process at a time"
                )));
            }
            config.masters = Some(MastersConfig { etcd });
        }
        if self.snapshots.write || self.snapshots.restore {
            check_snapshots(&self.snapshots, &self.snapshots_in, &self.snapshot_list_in, &config.cluster_id)?;
            config.snapshots = Some(self.snapshots);
        }
        config.metadata = self.metadata_enabled.then_some(self.metadata);
        if config.masters.is_some() {
            check_shared(&config)?;
        }
        if self.clean_up {
            let server = Some(self.metadata_url).filter(|_| !self.metadata_enabled);
            if server.as_deref() == Some("") {
                return Err(Error::invalid(
                    "--enable_metadata_cleanup_on_timeout needs --enable_http_metadata_server, or \
                    --metadata_server (MOONCAKE_TE_META_DATA_SERVER) with the URL of the metadata",
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
        // Clients may write for that long after the start of a write, whatever the configuration of
        // this master.
        if !is_planted("grants-shorter-than-their-use") {
            config.options.put_release = config.options.put_release.max(GRANT_USE);
        }
        Ok(config)
    }
}

/// Checks that the stores of several masters can be shared by several processes.
fn check_shared(config: &MasterConfig) -> Result<()> {
    let snapshots = config.snapshots.as_ref().and_then(SnapshotConfig::own);
    let tenants = match &config.tenant_policy {
        Some(TenantPolicy::Own { url, .. }) => Some(url.as_str()),
        _ => None,
    };
    let metadata = config.metadata.as_ref().and_then(|server| server.kept_in.as_deref());
    match snapshots.or(tenants).or(metadata) {
        None => Ok(()),
        Some(url) => Err(Error::invalid(format!(
            "--enable_ha: {url} serves one process at a time; several masters need a shared folder for snapshots, and etcd for tenants"
        ))),
    }
}

fn check_snapshots(snapshots: &SnapshotConfig, lie_in: &str, list_in: &str, cluster: &str) -> Result<()> {
    if !matches!(lie_in, "" | "local") {
        return Err(Error::invalid(format!(
            "--snapshot_object_store_type={lie_in}: snapshots are stored in a folder only (local)"
        )));
    }
    if !matches!(list_in, "" | "embedded" | "payload") {
        return Err(Error::invalid(format!(
            "--snapshot_catalog_store_type={list_in}: the list of snapshots is always their folder (embedded)"
        )));
    }
    if snapshots.folder.as_os_str().is_empty() {
        return Err(Error::invalid(
            "--enable_snapshot and --enable_snapshot_restore need a folder: MOONCAKE_SNAPSHOT_LOCAL_PATH, or --snapshot_local_path",
        ));
    }
    if matches!(cluster, "." | "..") {
        return Err(Error::invalid(format!(
            "--cluster_id={cluster}: must be a valid folder name if snapshots are enabled"
        )));
    }
    if snapshots.keep == 0 {
        return Err(Error::invalid("--snapshot_retention_count=0: at least one snapshot must be kept"));
    }
    for (name, span) in [
        ("snapshot_interval_seconds", snapshots.interval),
        ("snapshot_child_timeout_seconds", snapshots.limit),
    ] {
        if span.is_zero() {
            return Err(Error::invalid(format!("--{name}=0: must be one second at least")));
        }
    }
    Ok(())
}
