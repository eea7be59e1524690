//! What says which tenants there are and how much each may have.

use std::fmt::Write;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use mooncake_core::{Error, ErrorCode, Result};

use mooncake_master::TenantInfo;
#[cfg(feature = "cli")]
use mooncake_master::TenantQuota;

/// Where the policy of the tenants lies: YAML, `version: 1` and a list `tenants` of `name` and `quota`, in bytes or with KB, MB, GB or TB
/// (powers of 1024).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TenantPolicy {
    /// A file.
    File(PathBuf),
    /// A key in etcd.
    Etcd {
        /// `host:port`, or several with commas or semicolons between them.
        endpoints: String,
        /// The key.
        key: String,
    },
    /// A key in a directory of this host's own.
    Own {
        /// `rocksdb:///path`.
        url: String,
        /// The key.
        key: String,
    },
}

impl TenantPolicy {
    /// The key of a cluster's policy in a directory.
    pub fn key(cluster: &str) -> String {
        format!("mooncake-store/{cluster}/tenant_quota_policy")
    }
}

/// The policy, opened.
#[derive(Debug)]
pub(crate) enum Store {
    File(PathBuf),
    Kept(kept::Store),
}

impl Store {
    /// # Errors
    /// `INVALID_PARAMS` for endpoints that are none, `NOT_SUPPORTED` when etcd or RocksDB is not built in; those of opening a folder.
    pub(crate) fn open(policy: &TenantPolicy) -> Result<Self> {
        match policy {
            TenantPolicy::File(path) => Ok(Self::File(path.clone())),
            TenantPolicy::Own { url, key } => kept::Store::own(url, key).map(Self::Kept),
            #[cfg(feature = "metadata-etcd")]
            TenantPolicy::Etcd { endpoints, key } => kept::Store::etcd(endpoints, key).map(Self::Kept),
            #[cfg(not(feature = "metadata-etcd"))]
            TenantPolicy::Etcd { .. } => Err(Error::new(
                ErrorCode::NotSupported,
                "--tenant_quota_connector_type=etcd needs a build with feature `metadata-etcd`",
            )),
        }
    }

    /// The tenants.
    ///
    /// # Errors
    /// `INVALID_PARAMS`, naming the place and what is wrong there; kind `Unavailable` or `Timeout` when etcd does not answer; those of reading a folder.
    #[cfg(feature = "cli")]
    pub(crate) async fn read(&self) -> Result<Vec<TenantQuota>> {
        match self {
            Self::File(path) => read_policy(path),
            Self::Kept(store) => store.read().await,
        }
    }

    /// # Errors
    /// `NOT_SUPPORTED`: YAML is not built in.
    #[cfg(not(feature = "cli"))]
    #[allow(clippy::unused_async, reason = "the other one waits")]
    pub(crate) async fn read(&self) -> Result<Vec<mooncake_master::TenantQuota>> {
        Err(Error::new(ErrorCode::NotSupported, "a policy of tenants needs a build with feature `cli`"))
    }

    /// Puts these tenants in place of those that are there, as a whole or not at all. Blocks, on a thread of a runtime that may.
    ///
    /// # Errors
    /// `PERSISTENT_FAIL`, naming the place.
    #[cfg_attr(not(feature = "http"), allow(dead_code, reason = "the pages change them"))]
    pub(crate) fn write(&self, tenants: &[TenantInfo]) -> Result<()> {
        match self {
            Self::File(path) => write_policy(path, tenants),
            Self::Kept(store) => tokio::runtime::Handle::current().block_on(store.write(tenants)),
        }
    }
}

/// The policy in a directory.
mod kept {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    use mooncake_core::meta::{Expect, MetadataBackend};
    use mooncake_core::{Error, ErrorCode, Result};

    use mooncake_master::TenantInfo;

    #[derive(Debug)]
    pub(crate) struct Store {
        directory: Arc<dyn MetadataBackend>,
        key: String,
        /// For people.
        place: String,
        /// What to do when nothing is there; otherwise there are no tenants yet.
        #[cfg_attr(not(feature = "cli"), allow(dead_code, reason = "it is not read"))]
        begin: Option<String>,
        /// Of the value that this master knows; 0 for none.
        revision: AtomicU64,
    }

    impl Store {
        #[cfg(feature = "metadata-etcd")]
        pub(super) fn etcd(endpoints: &str, key: &str) -> Result<Self> {
            let etcd = mooncake_transport::etcd::EtcdMetadata::new(endpoints)
                .map_err(|error| error.context("--tenant_quota_connector_uri"))?;
            let begin = format!("Store a policy there first: etcdctl put {key} \"$(cat tenants.yaml)\"");
            Ok(Self::new(Arc::new(etcd), format!("{key} in etcd at {endpoints}"), key, Some(begin)))
        }

        pub(super) fn own(url: &str, key: &str) -> Result<Self> {
            let directory = mooncake_transport::directory::own(url)
                .map_err(|error| error.context("--tenant_quota_connector_uri"))?;
            Ok(Self::new(directory, format!("{key} in {url}"), key, None))
        }

        fn new(directory: Arc<dyn MetadataBackend>, place: String, key: &str, begin: Option<String>) -> Self {
            Self { directory, key: key.to_owned(), place, begin, revision: AtomicU64::new(0) }
        }

        #[cfg(feature = "cli")]
        pub(super) async fn read(&self) -> Result<Vec<mooncake_master::TenantQuota>> {
            let place = format!("tenants under {}", self.place);
            let value = self.directory.get(&self.key).await.map_err(|error| error.context(place.clone()))?;
            let Some(value) = value else {
                return match &self.begin {
                    Some(begin) => Err(Error::invalid(format!("{place}: there is nothing. {begin}"))),
                    None => Ok(Vec::new()),
                };
            };
            self.revision.store(value.revision, Relaxed);
            let text = std::str::from_utf8(&value.value)
                .map_err(|error| Error::invalid(format!("{place}: {error}")))?;
            super::parse(text).map_err(|why| Error::invalid(format!("{place}: {why}")))
        }

        /// Refused when somebody else has changed the policy: that must not get lost.
        pub(super) async fn write(&self, tenants: &[TenantInfo]) -> Result<()> {
            let text = super::text(tenants);
            let known = match self.revision.load(Relaxed) {
                0 => Expect::Absent,
                revision => Expect::At(revision),
            };
            let written = self.directory.put(&self.key, text.into(), known).await.map_err(|error| {
                let why = match error.code() {
                    ErrorCode::ObjectAlreadyExists => {
                        "somebody else has changed them since this master read them; it reads them at its start".into()
                    }
                    _ => error.to_string(),
                };
                let text = format!("cannot write the tenants to {}: {why}", self.place);
                Error::new(ErrorCode::PersistentFail, text)
            })?;
            self.revision.store(written, Relaxed);
            Ok(())
        }
    }
}

/// Reads the tenants of a file.
#[cfg(feature = "cli")]
fn read_policy(path: &Path) -> Result<Vec<TenantQuota>> {
    let refuse =
        |why: &dyn std::fmt::Display| Error::invalid(format!("tenants in {}: {why}", path.display()));
    let text = super::file::read(path).map_err(|error| refuse(&error))?;
    parse(&text).map_err(|why| refuse(&why))
}

#[cfg(feature = "cli")]
fn parse(text: &str) -> Result<Vec<TenantQuota>, String> {
    #[derive(serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Policy {
        version: u64,
        tenants: Vec<Entry>,
    }
    #[derive(serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Entry {
        name: String,
        quota: serde_json::Value,
    }
    let policy: Policy = yaml_serde::from_str(text).map_err(|error| error.to_string())?;
    if policy.version != 1 {
        return Err(format!("version {} is not known, only 1", policy.version));
    }
    let quota = |entry: Entry| {
        let written = match &entry.quota {
            serde_json::Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        let bytes = bytes(&written).ok_or_else(|| {
            format!("tenant {}: quota {written:?} is no number of bytes, KB, MB, GB or TB", entry.name)
        })?;
        let quota = TenantQuota { name: entry.name, bytes };
        quota.check().map_err(|error| error.message().to_owned())?;
        Ok(quota)
    };
    policy.tenants.into_iter().map(quota).collect()
}

/// A size with a unit.
#[cfg(feature = "cli")]
fn bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (count, unit) = text.split_at(digits);
    let shift = match unit.trim_start().to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" | "KB" | "KIB" => 10,
        "M" | "MB" | "MIB" => 20,
        "G" | "GB" | "GIB" => 30,
        "T" | "TB" | "TIB" => 40,
        _ => return None,
    };
    count.parse::<u64>().ok()?.checked_mul(1 << shift)
}

/// The tenants as YAML.
fn text(tenants: &[TenantInfo]) -> String {
    let mut text = "version: 1\ntenants:".to_owned();
    if tenants.is_empty() {
        text.push_str(" []");
    }
    text.push('\n');
    for tenant in tenants {
        // A JSON string is a YAML string. Writing to a string does not fail.
        let name = serde_json::Value::from(tenant.name.as_str());
        let _ = write!(text, "  - name: {name}\n    quota: {}\n", tenant.requested);
    }
    text
}

/// Writes the tenants to a file, as a whole or not at all.
fn write_policy(path: &Path, tenants: &[TenantInfo]) -> Result<()> {
    let text = text(tenants);
    let refuse = |error: std::io::Error| {
        let what = format!("cannot write the tenants to {}: {error}", path.display());
        Error::new(ErrorCode::PersistentFail, what)
    };
    let new = path.with_extension("new");
    let write = || {
        let mut file = std::fs::File::create(&new)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        std::fs::rename(&new, path)
    };
    write().map_err(refuse)
}

#[cfg(all(test, feature = "cli"))]
mod tests {
    use super::*;

    #[test]
    fn policies() {
        let policy = |tenants: &str| parse(&format!("version: 1\ntenants:\n{tenants}"));
        let read = policy("  - name: a\n    quota: 2GB\n  - {name: 'b c', quota: 12345}\n").unwrap();
        let expected = [("a", 2 << 30), ("b c", 12345)];
        assert_eq!(read, expected.map(|(name, bytes)| TenantQuota { name: name.into(), bytes }));
        assert_eq!(policy("  []").unwrap(), []);
        for (bad, says) in [
            ("version: 2\ntenants: []", "version 2"),
            ("version: 1", "tenants"),
            ("version: 1\ntenants: [{name: a, quota: 1GB, x: 1}]", "x"),
            ("version: 1\ntenants: [{name: a, quota: 1.5GB}]", "1.5GB"),
            ("version: 1\ntenants: [{name: a, quota: 5 miles}]", "5 miles"),
            ("version: 1\ntenants: [{name: a, quota: 0}]", "not 0"),
            ("version: 1\ntenants: [{name: a, quota: 99999999TB}]", "99999999TB"),
            ("version: 1\ntenants: [{name: _a, quota: 1}]", "_a"),
        ] {
            let why = parse(bad).unwrap_err();
            assert!(why.contains(says), "{bad}: {why}");
        }
    }

    #[test]
    fn what_is_written_can_be_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tenants.yaml");
        let info = |name: &str, requested| TenantInfo {
            name: name.into(),
            requested,
            effective: 0,
            charged: 0,
            evicted: 0,
            rejected: 0,
        };
        for tenants in [vec![], vec![info("a", 1), info("\"é: - #", i64::MAX as u64), info("yes", 7)]] {
            write_policy(&path, &tenants).unwrap();
            let read = read_policy(&path).unwrap();
            let names: Vec<_> = read.iter().map(|quota| (&*quota.name, quota.bytes)).collect();
            assert_eq!(names, tenants.iter().map(|t| (&*t.name, t.requested)).collect::<Vec<_>>());
        }
        let nowhere = folder.path().join("none").join("tenants.yaml");
        assert_eq!(write_policy(&nowhere, &[]).unwrap_err().code(), ErrorCode::PersistentFail);
        assert!(read_policy(&nowhere).unwrap_err().message().contains("tenants.yaml"));
    }
}
