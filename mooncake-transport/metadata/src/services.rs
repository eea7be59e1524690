//! Metadata services that a connection string selects, and those that this build has.

use std::sync::Arc;

use mooncake_core::fault_injection::is_planted;
use mooncake_core::meta::{Leases, MetaKeys, MetadataBackend};
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::Directory;

use crate::settings::{DirectoryOptions, FOLDER, P2P};

/// Constructor of a backend from a connection string.
type Open = fn(&str, &DirectoryOptions) -> Result<Arc<dyn MetadataBackend>>;

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
    service!("http", "http://host:port/metadata", "metadata-http", |text, options| {
        Ok(Arc::new(crate::http::HttpMetadata::with_token(text, &options.token)?))
    }),
    service!("etcd", "etcd://host:port", "metadata-etcd", |text, _| {
        Ok(Arc::new(crate::etcd::EtcdMetadata::new(text)?))
    }),
    service!("redis", "redis://host:port", "metadata-redis", |text, options| {
        Ok(Arc::new(crate::redis::RedisMetadata::new(text, &options.redis)?))
    }),
    service!("rocksdb", "rocksdb:///path", "metadata-rocksdb", |text, _| {
        Ok(Arc::new(crate::rocksdb::RocksMetadata::open(text)?))
    }),
];

/// Connects to the directory of a connection string: `P2PHANDSHAKE`, `http://host:port/path`,
/// `etcd://host:port,host:port`, `redis://host:port` or `rocksdb:///path`. A string without a
/// scheme selects etcd. A folder is opened at once; the others connect later.
///
/// # Errors
/// Returns `NOT_SUPPORTED`, with the missing feature, if this build lacks the service.
pub fn connect(text: &str, options: &DirectoryOptions) -> Result<Directory> {
    if text == P2P {
        return Ok(Directory::P2p);
    }
    if text.eq_ignore_ascii_case(P2P) && !is_planted("p2p-in-small-letters") {
        return Err(Error::invalid(format!(
            "cannot connect to the metadata service {text:?}: did you mean {P2P}?"
        )));
    }
    // As in Mooncake C++, a string without a scheme selects etcd.
    let scheme = text.split_once("://").map_or("etcd", |(scheme, _)| scheme);
    let backend = open(text, scheme, options)?;
    let keys = MetaKeys::new(&options.cluster_id);
    let keys = if scheme == "http" { keys } else { keys.with_newline() };
    Ok(Directory::Metadata { backend, keys })
}

/// Opens a directory for the state of one host, such as a master's: `rocksdb:///path`. Blocks for
/// some milliseconds.
///
/// # Errors
/// Returns `INVALID_PARAMS` for another scheme, `NOT_SUPPORTED` if the build lacks the feature, and
/// the errors of the open.
pub fn open_folder(url: &str) -> Result<Arc<dyn MetadataBackend>> {
    if !url.starts_with(FOLDER) {
        return Err(Error::invalid(format!("{url:?}: expected {FOLDER} and an absolute path")));
    }
    open(url, "rocksdb", &DirectoryOptions::default())
}

/// Opens a directory with leases in etcd: `host:port`, or several separated by commas or
/// semicolons, with or without the prefix `etcd://`. Does not connect yet.
///
/// # Errors
/// Returns `INVALID_PARAMS` if there is no host, and `NOT_SUPPORTED` without feature
/// `metadata-etcd`.
pub fn open_etcd(endpoints: &str) -> Result<Arc<dyn Leases>> {
    #[cfg(feature = "metadata-etcd")]
    return Ok(Arc::new(crate::etcd::EtcdMetadata::new(endpoints)?));
    #[cfg(not(feature = "metadata-etcd"))]
    Err(not_built_in(endpoints, "etcd"))
}

/// Opens the metadata service of a connection string with this scheme.
fn open(text: &str, scheme: &str, options: &DirectoryOptions) -> Result<Arc<dyn MetadataBackend>> {
    let service = SERVICES.iter().find(|service| service.scheme == scheme);
    match service.and_then(|service| service.open) {
        Some(open) => open(text, options),
        None => Err(not_built_in(text, scheme)),
    }
}

/// Returns the error for a scheme that this build does not support. The error contains the feature
/// that adds the scheme, and the connection strings that the build supports.
fn not_built_in(text: &str, scheme: &str) -> Error {
    let service = SERVICES.iter().find(|service| service.scheme == scheme);
    let needs = service
        .map_or_else(String::new, |service| format!(" and needs a build with feature `{}`", service.feature));
    let built = SERVICES.iter().filter(|service| service.open.is_some()).map(|service| service.example);
    let there = std::iter::once(P2P).chain(built).collect::<Vec<_>>().join(", ");
    let text = format!("metadata directory {text:?}: {scheme:?} is not built in{needs}; there is {there}");
    Error::new(ErrorCode::NotSupported, text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use mooncake_core::ErrorKind;

    /// Returns whether this build has the feature of a metadata service.
    fn has(feature: &str) -> bool {
        SERVICES.iter().any(|service| service.feature == feature && service.open.is_some())
    }

    #[test]
    fn connection_strings() {
        let options = DirectoryOptions::default();
        assert!(connect(P2P, &options).unwrap().is_p2p());
        for (text, word, built_in) in [
            ("127.0.0.1:2379", "feature `metadata-etcd`", has("metadata-etcd")),
            ("etcd://a:1,b:2", "feature `metadata-etcd`", has("metadata-etcd")),
            ("redis://h:1", "feature `metadata-redis`", has("metadata-redis")),
            ("http://h/metadata", "feature `metadata-http`", has("metadata-http")),
            ("https://h/metadata", "\"https\" is not built in; there is", false),
            ("rocksdb:///srv/own", "feature `metadata-rocksdb`", has("metadata-rocksdb")),
        ] {
            if built_in && text.starts_with(FOLDER) {
                // This string would open a folder.
                continue;
            }
            let connected = connect(text, &options);
            if built_in {
                assert!(connected.is_ok_and(|directory| !directory.is_p2p()), "{text}");
                continue;
            }
            let error = connected.unwrap_err();
            assert!(error.kind() == ErrorKind::Unsupported && error.message().contains(word), "{error}");
            assert!(error.message().contains(P2P), "it says what there is: {error}");
        }
    }

    #[test]
    fn a_folder_that_is_not_built_in() {
        let error = if has("metadata-rocksdb") {
            not_built_in("rocksdb:///srv/own", "rocksdb")
        } else {
            open_folder("rocksdb:///srv/own").unwrap_err()
        };
        assert_eq!(error.code(), ErrorCode::NotSupported);
        let said = error.message();
        assert!(said.contains("rocksdb:///srv/own") && said.contains("feature `metadata-rocksdb`"), "{said}");
    }
}
