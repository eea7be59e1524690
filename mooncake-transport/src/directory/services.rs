//! Metadata services that a connection string selects, and those that this build has.

use std::sync::Arc;

use mooncake_core::meta::{Leases, MetadataBackend};
use mooncake_core::{Error, ErrorCode, Result};

use crate::metadata_services::{P2P, RedisLogin};

/// Constructor of a backend from a connection string.
type Open = fn(&str, &RedisLogin) -> Result<Arc<dyn MetadataBackend>>;

/// Metadata service.
struct Service {
    scheme: &'static str,
    /// Example of a connection string.
    example: &'static str,
    /// Feature of a build with the service.
    feature: &'static str,
    /// Constructor, or `None` if this build lacks the feature.
    open: Option<Open>,
}

macro_rules! service {
    ($scheme:literal, $example:literal, $feature:tt, $open:expr) => {
        Service {
            scheme: $scheme,
            example: $example,
            feature: $feature,
            #[cfg(feature = $feature)]
            open: Some($open),
            #[cfg(not(feature = $feature))]
            open: None,
        }
    };
}

const SERVICES: [Service; 4] = [
    service!("http", "http://host:port/metadata", "http", |text, _| {
        Ok(Arc::new(crate::http::HttpMetadata::new(text)?))
    }),
    service!("etcd", "etcd://host:port", "metadata-etcd", |text, _| {
        Ok(Arc::new(crate::etcd::EtcdMetadata::new(text)?))
    }),
    service!("redis", "redis://host:port", "metadata-redis", |text, login| {
        Ok(Arc::new(crate::redis::RedisMetadata::new(text, login)?))
    }),
    service!("rocksdb", "rocksdb:///path", "metadata-rocksdb", |text, _| {
        Ok(Arc::new(crate::rocksdb::RocksMetadata::open(text)?))
    }),
];

/// Opens the metadata service of a connection string with this scheme.
pub(super) fn open(text: &str, scheme: &str, login: &RedisLogin) -> Result<Arc<dyn MetadataBackend>> {
    let service = SERVICES.iter().find(|service| service.scheme == scheme);
    match service.and_then(|service| service.open) {
        Some(open) => open(text, login),
        None => Err(not_built_in(text, scheme)),
    }
}

/// Opens a directory with leases in etcd: `host:port`, or several separated by commas or
/// semicolons, with or without the prefix `etcd://`. Does not connect yet.
///
/// # Errors
/// Returns `INVALID_PARAMS` if there is no host, and `NOT_SUPPORTED` without feature
/// `metadata-etcd`.
pub fn etcd(endpoints: &str) -> Result<Arc<dyn Leases>> {
    #[cfg(feature = "metadata-etcd")]
    return Ok(Arc::new(crate::etcd::EtcdMetadata::new(endpoints)?));
    #[cfg(not(feature = "metadata-etcd"))]
    Err(not_built_in(endpoints, "etcd"))
}

/// Returns the error for a scheme that this build does not support. The error contains the feature
/// that adds the scheme, and the connection strings that the build supports.
pub(super) fn not_built_in(text: &str, scheme: &str) -> Error {
    let service = SERVICES.iter().find(|service| service.scheme == scheme);
    let needs = service
        .map_or_else(String::new, |service| format!(" and needs a build with feature `{}`", service.feature));
    let built = SERVICES.iter().filter(|service| service.open.is_some()).map(|service| service.example);
    let there = std::iter::once(P2P).chain(built).collect::<Vec<_>>().join(", ");
    let text = format!("metadata directory {text:?}: {scheme:?} is not built in{needs}; there is {there}");
    Error::new(ErrorCode::NotSupported, text)
}

/// Returns whether this build has the feature of a metadata service.
#[cfg(test)]
pub(super) fn has(feature: &str) -> bool {
    SERVICES.iter().any(|service| service.feature == feature && service.open.is_some())
}
