//! Source of the tenants and their quotas.

mod directory;
mod yaml;

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use mooncake_core::{Error, ErrorCode, Result};

use self::yaml::{parse, text};
use mooncake_master::{TenantInfo, TenantQuota};
use mooncake_transport::private_files::{FileMode, Folder};

/// Location of the tenants' policy. The policy is a YAML document: `version: 1` and a list
/// `tenants` of `name` and `quota`. A quota is in bytes or has a unit KB, MB, GB or TB (powers of
/// 1024).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TenantPolicy {
    /// A file.
    File(PathBuf),
    /// A key in etcd.
    Etcd {
        /// `host:port`, or several separated by commas or semicolons.
        endpoints: String,
        /// Key of the policy.
        key: String,
    },
    /// A key in a local metadata directory.
    Own {
        /// URL of the directory: `rocksdb:///path`.
        url: String,
        /// Key of the policy.
        key: String,
    },
}

impl TenantPolicy {
    /// Returns the key of a cluster's policy in a directory.
    pub fn key(cluster: &str) -> String {
        format!("mooncake-store/{cluster}/tenant_quota_policy")
    }
}

/// An opened source of the policy.
#[derive(Debug)]
pub(crate) enum Store {
    File(PathBuf),
    Directory(directory::Store),
}

impl Store {
    /// Opens the source.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for invalid endpoints, `NOT_SUPPORTED` if this build lacks etcd or RocksDB,
    /// and those of opening a directory.
    pub(crate) fn open(policy: &TenantPolicy) -> Result<Self> {
        match policy {
            TenantPolicy::File(path) => Ok(Self::File(path.clone())),
            TenantPolicy::Own { url, key } => directory::Store::own(url, key).map(Self::Directory),
            TenantPolicy::Etcd { endpoints, key } => {
                directory::Store::etcd(endpoints, key).map(Self::Directory)
            }
        }
    }

    /// Returns the tenants.
    ///
    /// # Errors
    /// `INVALID_PARAMS` with the location of an invalid policy; kind `Unavailable` or `Timeout` if
    /// etcd does not respond; `NOT_SUPPORTED` without feature `cli`; those of reading a directory.
    pub(crate) async fn read(&self) -> Result<Vec<TenantQuota>> {
        match self {
            Self::File(path) => read_policy(path),
            Self::Directory(store) => store.read().await,
        }
    }

    /// Replaces the tenants of the policy, completely or not at all. Blocks; must run on a thread
    /// of a runtime that may block.
    ///
    /// # Errors
    /// `PERSISTENT_FAIL` with the location.
    #[cfg_attr(not(feature = "http"), allow(dead_code, reason = "only the admin endpoints change tenants"))]
    pub(crate) fn write(&self, tenants: &[TenantInfo]) -> Result<()> {
        match self {
            Self::File(path) => write_policy(path, tenants),
            Self::Directory(store) => tokio::runtime::Handle::current().block_on(store.write(tenants)),
        }
    }
}

/// Reads the tenants of a file.
fn read_policy(path: &Path) -> Result<Vec<TenantQuota>> {
    let refuse = |code: ErrorCode, why: &dyn std::fmt::Display| {
        Error::new(code, format!("tenants in {}: {why}", path.display()))
    };
    let text = super::document::read(path).map_err(|error| refuse(ErrorCode::InvalidParams, &error))?;
    parse(&text).map_err(|error| refuse(error.code(), &error.message()))
}

/// Writes the tenants to a file, completely or not at all.
fn write_policy(path: &Path, tenants: &[TenantInfo]) -> Result<()> {
    let text = text(tenants);
    let refuse = |error: std::io::Error| {
        let what = format!("cannot write the tenants to {}: {error}", path.display());
        Error::new(ErrorCode::PersistentFail, what)
    };
    let write = || {
        // The file has neither keys nor values. It keeps the permissions that the operator gave it.
        let bits = std::fs::metadata(path).map_or(0o600, |about| about.mode() & 0o664 | 0o600);
        let (folder, name) = Folder::around(path)?;
        folder.replace_synced(name, text.as_bytes(), FileMode::new(bits).unwrap_or(FileMode::PRIVATE))
    };
    write().map_err(refuse)
}
