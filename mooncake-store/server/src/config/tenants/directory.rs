//! Policy of the tenants under a key of a metadata directory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use mooncake_core::meta::{Expect, MetadataBackend};
use mooncake_core::{Error, ErrorCode, Result};

use super::yaml::{parse, text};
use mooncake_master::TenantInfo;

#[derive(Debug)]
pub(crate) struct Store {
    directory: Arc<dyn MetadataBackend>,
    key: String,
    /// Location for messages.
    place: String,
    /// Remedy for a missing policy, which is an error; without a remedy there are no tenants yet.
    begin: Option<String>,
    /// Revision of the value that this master knows; 0 for none.
    revision: AtomicU64,
}

impl Store {
    pub(super) fn etcd(endpoints: &str, key: &str) -> Result<Self> {
        let etcd = mooncake_metadata::open_etcd(endpoints)
            .map_err(|error| error.context("--tenant_quota_connector_uri"))?;
        let begin = format!("Store a policy there first: etcdctl put {key} \"$(cat tenants.yaml)\"");
        Ok(Self::new(etcd, format!("{key} in etcd at {endpoints}"), key, Some(begin)))
    }

    pub(super) fn own(url: &str, key: &str) -> Result<Self> {
        let directory = mooncake_metadata::open_folder(url)
            .map_err(|error| error.context("--tenant_quota_connector_uri"))?;
        Ok(Self::new(directory, format!("{key} in {url}"), key, None))
    }

    fn new(directory: Arc<dyn MetadataBackend>, place: String, key: &str, begin: Option<String>) -> Self {
        Self { directory, key: key.to_owned(), place, begin, revision: AtomicU64::new(0) }
    }

    pub(super) async fn read(&self) -> Result<Vec<mooncake_master::TenantQuota>> {
        let place = format!("tenants under {}", self.place);
        let value = self.directory.get(&self.key).await.map_err(|error| error.context(place.clone()))?;
        let Some(value) = value else {
            return match &self.begin {
                Some(begin) => Err(Error::invalid(format!("{place}: there is no policy. {begin}"))),
                None => Ok(Vec::new()),
            };
        };
        self.revision.store(value.revision, Relaxed);
        let text =
            std::str::from_utf8(&value.value).map_err(|error| Error::invalid(format!("{place}: {error}")))?;
        parse(text).map_err(|why| Error::new(why.code(), format!("{place}: {}", why.message())))
    }

    /// Writes the tenants, unless another process has changed the policy: its change must not be
    /// lost.
    pub(super) async fn write(&self, tenants: &[TenantInfo]) -> Result<()> {
        let text = text(tenants);
        let known = match self.revision.load(Relaxed) {
            0 => Expect::Absent,
            revision => Expect::At(revision),
        };
        let written = self.directory.put(&self.key, text.into(), known).await.map_err(|error| {
            let why = match error.code() {
                ErrorCode::ObjectAlreadyExists => {
                    "another process has changed them since this master read them at its start".into()
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
