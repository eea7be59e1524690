//! Parts of the configuration that depend on several flags.

use std::time::Duration;

use mooncake_core::fault_injection::is_planted;
use mooncake_core::settings::values::{
    Parsed, any, bytes, count, number, optional, ratio, seconds, switch, text, within,
};
use mooncake_core::{Error, Result};
use mooncake_master::{DiskOptions, FileOptions, GRANT_USE, HotOptions, MasterOptions, PromotionOptions};
use mooncake_metadata::{FOLDER, HttpToken};

use super::settings::Settings;
use super::values::{cluster_id, endpoint};
use super::{
    CleanUpConfig, EventsConfig, MasterConfig, MastersConfig, MetadataServerConfig, Origin, SnapshotConfig,
    TenantPolicy,
};

impl Settings {
    /// Assembles the configuration.
    ///
    /// # Errors
    /// `INVALID_PARAMS` with flag and origin: a value is invalid, contradicts another one, or
    /// requires a missing feature.
    pub fn config(&self) -> Result<MasterConfig> {
        let mut config = MasterConfig::default();
        self.apply(&mut config)?;
        config.log_level = self.log_level()?;
        if self.is_given("logtostderr") && self.on("logtostderr")? {
            config.log_dir = None;
        }
        self.set_liveness(&mut config.options)?;
        config.options.disks = self.disks()?;
        config.options.files = self.files(&config.cluster_id)?;
        config.options.hot = self.hot()?;
        config.metadata = self.metadata()?;
        config.tenant_policy = self.tenants(&config.cluster_id)?;
        config.masters = self.masters()?;
        config.snapshots = self.snapshots(&config.cluster_id)?;
        if config.masters.is_some() {
            check_shared(&config)?;
        }
        config.clean_up = self.clean_up(config.metadata.is_some())?;
        config.events = self.events()?;
        config.options.check()?;
        // Clients may write for that long after the start of a write, whatever the configuration of
        // this master.
        if !is_planted("grants-shorter-than-their-use") {
            config.options.put_release = config.options.put_release.max(GRANT_USE);
        }
        Ok(config)
    }

    fn on(&self, name: &str) -> Result<bool> {
        self.read(name, switch)
    }

    fn text(&self, name: &str) -> Result<String> {
        self.read(name, any)
    }

    fn is_given(&self, name: &str) -> bool {
        self.value(name).is_some_and(|value| value.origin != Origin::Default)
    }

    /// Sets the times after which clients are suspected and expire.
    fn set_liveness(&self, options: &mut MasterOptions) -> Result<()> {
        let active = self.read("client_active_ttl_sec", optional_seconds)?;
        let suspicion = self.read("client_suspicion_ttl_sec", optional_seconds)?;
        options.client_ttl = active.unwrap_or(options.client_ttl);
        options.client_suspicion = suspicion.or(active).unwrap_or_default();
        Ok(())
    }

    fn log_level(&self) -> Result<&'static str> {
        let least = match self.read("minloglevel", number)? {
            0 => "info",
            1 => "warn",
            2u8.. => "error",
        };
        Ok(match self.read("v", number)? {
            0 => least,
            1 => "debug",
            2u8.. => "trace",
        })
    }

    fn disks(&self) -> Result<Option<DiskOptions>> {
        let promotion = PromotionOptions {
            threshold: self.read("promotion_admission_threshold", number)?,
            queue_limit: self.read("promotion_queue_limit", count)?,
            per_heartbeat: self.read("promotion_max_per_heartbeat", count)?,
        };
        let disks = DiskOptions {
            on_evict: self.on("offload_on_evict")?,
            force_evict: self.on("offload_force_evict")?,
            queue_limit: self.read("offloading_queue_limit", count)?,
            queue_part: self.read("offload_cap_ratio", ratio)?,
            promotion: self.on("promotion_on_hit")?.then_some(promotion),
        };
        Ok(self.on("enable_offload")?.then_some(disks))
    }

    fn files(&self, cluster: &str) -> Result<Option<FileOptions>> {
        let parent = self.text("root_fs_dir")?;
        let capacity = self.read("global_file_segment_size", bytes)?;
        let files = FileOptions {
            dir: format!("{}/{cluster}", parent.trim_end_matches('/')),
            evict: self.on("enable_disk_eviction")?,
            quota: self.read("quota_bytes", bytes)?,
            capacity: if capacity == i64::MAX as u64 { 0 } else { capacity },
        };
        if parent.is_empty() {
            return Ok(None);
        }
        check_folder_name(cluster, "files")?;
        Ok(Some(files))
    }

    fn hot(&self) -> Result<Option<HotOptions>> {
        let mode = self.read("dynamic_replication_mode", |text| match text {
            "off" => Ok(None),
            "observe" => Ok(Some(false)),
            "enforce" => Ok(Some(true)),
            _ => Err("must be off, observe or enforce".into()),
        })?;
        let replicas = self.read("dynamic_replication_max_memory_replicas", count)?;
        let hot = HotOptions {
            enforce: mode == Some(true),
            window: self
                .read("dynamic_replication_heat_window_seconds", seconds)?
                .max(Duration::from_secs(1)),
            reads_per_second: self.read("dynamic_replication_admission_qps_threshold", reads_per_second)?,
            max_replicas: replicas.max(1),
        };
        Ok(mode.map(|_| hot))
    }

    fn metadata(&self) -> Result<Option<MetadataServerConfig>> {
        let server = MetadataServerConfig {
            host: self.read("http_metadata_server_host", text)?,
            port: self.read("http_metadata_server_port", number)?,
            token: self.metadata_token()?,
            storage_url: self.read("http_metadata_server_kept_in", optional)?,
        };
        Ok(self.on("enable_http_metadata_server")?.then_some(server))
    }

    /// Returns the token of the metadata service.
    fn metadata_token(&self) -> Result<HttpToken> {
        let token: HttpToken = self.read("metadata_http_token", any)?;
        token.check()?;
        Ok(token)
    }

    fn tenants(&self, cluster: &str) -> Result<Option<TenantPolicy>> {
        let policy = self.text("tenant_quota_connector_uri")?;
        let key = TenantPolicy::key(cluster);
        let policy = self.read("tenant_quota_connector_type", |kind| match kind {
            "file" => Ok(TenantPolicy::File(policy.as_str().into())),
            "etcd" => Ok(TenantPolicy::Etcd { endpoints: policy.clone(), key: key.clone() }),
            "rocksdb" => Ok(TenantPolicy::Own { url: policy.clone(), key: key.clone() }),
            _ => Err("must be file, etcd or rocksdb".into()),
        })?;
        let on = self.on("enable_multi_tenants")?;
        if on && self.text("tenant_quota_connector_uri")?.is_empty() {
            return Err(Error::invalid(
                "--enable_multi_tenants needs --tenant_quota_connector_uri: \
                 the path of the file with the tenants, the host:port of the etcd, or rocksdb:///path",
            ));
        }
        Ok(on.then_some(policy))
    }

    fn masters(&self) -> Result<Option<MastersConfig>> {
        let lease = self.read("ha_leader_lease_ttl_sec", leader_lease)?;
        if !self.on("enable_ha")? {
            return Ok(None);
        }
        let electors = self.text("ha_backend_type")?;
        if !matches!(electors.as_str(), "" | "etcd") {
            return Err(Error::invalid(format!(
                "--ha_backend_type={electors}: the election of masters supports etcd only"
            )));
        }
        let mut etcd = self.text("ha_backend_connstring")?;
        if etcd.is_empty() {
            etcd = self.text("etcd_endpoints")?;
        }
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
        Ok(Some(MastersConfig { etcd, lease }))
    }

    fn snapshots(&self, cluster: &str) -> Result<Option<SnapshotConfig>> {
        let snapshots = SnapshotConfig {
            write: self.on("enable_snapshot")?,
            restore: self.on("enable_snapshot_restore")?,
            interval: self.read("snapshot_interval_seconds", seconds)?,
            limit: self.read("snapshot_child_timeout_seconds", seconds)?,
            keep: self.read("snapshot_retention_count", count)?,
            folder: self.read("snapshot_local_path", any)?,
            backup: self.read("snapshot_backup_dir", optional)?,
        };
        if !snapshots.write && !snapshots.restore {
            return Ok(None);
        }
        let store = self.text("snapshot_object_store_type")?;
        if !matches!(store.as_str(), "" | "local") {
            return Err(Error::invalid(format!(
                "--snapshot_object_store_type={store}: snapshots are stored in a folder only (local)"
            )));
        }
        let list = self.text("snapshot_catalog_store_type")?;
        if !matches!(list.as_str(), "" | "embedded" | "payload") {
            return Err(Error::invalid(format!(
                "--snapshot_catalog_store_type={list}: the list of snapshots is always their folder (embedded)"
            )));
        }
        if snapshots.folder.as_os_str().is_empty() {
            return Err(Error::invalid(
                "--enable_snapshot and --enable_snapshot_restore need a folder: MOONCAKE_SNAPSHOT_LOCAL_PATH, or --snapshot_local_path",
            ));
        }
        check_folder_name(cluster, "snapshots")?;
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
        Ok(Some(snapshots))
    }

    /// Returns the removal of metadata, from the metadata service of this master if it is
    /// `served_here`.
    fn clean_up(&self, served_here: bool) -> Result<Option<CleanUpConfig>> {
        let cluster_id = self.read("metadata_cluster_id", |id| match id {
            "" => Ok(String::new()),
            id => cluster_id(id),
        })?;
        if !self.on("enable_metadata_cleanup_on_timeout")? {
            return Ok(None);
        }
        let server = Some(self.text("metadata_server")?).filter(|_| !served_here);
        match server.as_deref() {
            Some("") => Err(Error::invalid(
                "--enable_metadata_cleanup_on_timeout needs --enable_http_metadata_server, or \
                 --metadata_server (MOONCAKE_TE_META_DATA_SERVER) with the URL of the metadata",
            )),
            Some(url) if !url.starts_with("http://") => Err(Error::invalid(format!(
                "--metadata_server={url}: only http:// servers can be cleaned up"
            ))),
            _ => Ok(Some(CleanUpConfig { server, token: self.metadata_token()?, cluster_id })),
        }
    }

    fn events(&self) -> Result<Option<EventsConfig>> {
        let bound = self.read("kv_events_bind_endpoint", |text| match text {
            "" => Ok(None),
            text => endpoint(text).map(Some),
        })?;
        let events = EventsConfig {
            backend_id: self.text("kv_events_backend_id")?,
            model_name: self.text("kv_events_model_name")?,
            additional_salt: self.text("kv_events_additional_salt")?,
            lora_name: self.text("kv_events_lora_name")?,
            block_size: self.read("kv_events_block_size", event_number)?,
            dp_rank: Some(self.read("kv_events_dp_rank", event_number)?)
                .filter(|_| self.is_given("kv_events_dp_rank")),
            capacity: self.read("kv_events_queue_capacity", count)?,
            legacy: self.on("kv_events_emit_legacy_compat")?,
            object_key: self.on("kv_events_emit_object_key")?,
            look_ups: self.on("kv_events_emit_look_ups")?,
            ..EventsConfig::default()
        };
        if !self.on("enable_kv_events")? {
            return Ok(None);
        }
        let Some((host, port)) = bound else {
            return Err(Error::invalid(
                "--enable_kv_events needs --kv_events_bind_endpoint, such as tcp://*:5557",
            ));
        };
        if events.backend_id.is_empty() {
            return Err(Error::invalid(
                "--enable_kv_events needs --kv_events_backend_id, the name of this cache in events",
            ));
        }
        Ok(Some(EventsConfig { host, port, ..events }))
    }
}

/// Parses a time above 0 in seconds, if there is one.
fn optional_seconds(text: &str) -> Parsed<Option<Duration>> {
    match text {
        "" => Ok(None),
        text => match seconds(text)? {
            Duration::ZERO => Err("must be more than 0".into()),
            time => Ok(Some(time)),
        },
    }
}

/// Parses a number in events.
fn event_number(text: &str) -> Parsed<u64> {
    within(text, 0, u32::MAX.into())
}

/// Parses the lease of a leader.
fn leader_lease(text: &str) -> Parsed<Duration> {
    match seconds(text)? {
        lease if (Duration::from_secs(2)..=Duration::from_secs(60)).contains(&lease) => Ok(lease),
        _ => Err("must be from 2 to 60 seconds".into()),
    }
}

fn reads_per_second(text: &str) -> Parsed<f64> {
    match number(text) {
        Ok(rate) if rate > 0.0 && rate <= 1e9 => Ok(rate),
        _ => Err("must be a number above 0, at most 1000000000".into()),
    }
}

/// Checks that the stores of several masters can be shared by several processes.
fn check_shared(config: &MasterConfig) -> Result<()> {
    let snapshots = config.snapshots.as_ref().and_then(SnapshotConfig::own);
    let tenants = match &config.tenant_policy {
        Some(TenantPolicy::Own { url, .. }) => Some(url.as_str()),
        _ => None,
    };
    let metadata = config.metadata.as_ref().and_then(|server| server.storage_url.as_deref());
    match snapshots.or(tenants).or(metadata) {
        None => Ok(()),
        Some(url) => Err(Error::invalid(format!(
            "--enable_ha: {url} serves one process at a time; several masters need a shared folder for snapshots, and etcd for tenants"
        ))),
    }
}

/// Checks that a cluster id is the name of a folder for `content`.
fn check_folder_name(cluster: &str, content: &str) -> Result<()> {
    match cluster {
        "." | ".." => Err(Error::invalid(format!(
            "--cluster_id={cluster}: must be a valid folder name if {content} are enabled"
        ))),
        _ => Ok(()),
    }
}
