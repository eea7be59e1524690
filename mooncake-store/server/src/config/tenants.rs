//! What says which tenants there are and how much each may have.

mod directory;
mod yaml;

use std::io::Write as _;
use std::path::{Path, PathBuf};

use mooncake_core::{Error, ErrorCode, Result};

#[cfg(feature = "cli")]
use self::yaml::parse;
use self::yaml::text;
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
    Directory(directory::Store),
}

impl Store {
    /// # Errors
    /// `INVALID_PARAMS` for endpoints that are none, `NOT_SUPPORTED` when etcd or RocksDB is not built in; those of opening a folder.
    pub(crate) fn open(policy: &TenantPolicy) -> Result<Self> {
        match policy {
            TenantPolicy::File(path) => Ok(Self::File(path.clone())),
            TenantPolicy::Own { url, key } => directory::Store::own(url, key).map(Self::Directory),
            #[cfg(feature = "metadata-etcd")]
            TenantPolicy::Etcd { endpoints, key } => {
                directory::Store::etcd(endpoints, key).map(Self::Directory)
            }
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
            Self::Directory(store) => store.read().await,
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
            Self::Directory(store) => tokio::runtime::Handle::current().block_on(store.write(tenants)),
        }
    }
}

/// Reads the tenants of a file.
#[cfg(feature = "cli")]
fn read_policy(path: &Path) -> Result<Vec<TenantQuota>> {
    let refuse =
        |why: &dyn std::fmt::Display| Error::invalid(format!("tenants in {}: {why}", path.display()));
    let text = super::document::read(path).map_err(|error| refuse(&error))?;
    parse(&text).map_err(|why| refuse(&why))
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
