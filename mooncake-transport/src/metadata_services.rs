//! Connection strings and credentials of the metadata services that an engine knows.

use mooncake_core::{Error, ErrorCode};

/// Connection string of [`Directory::P2p`](crate::Directory::P2p).
pub const P2P: &str = "P2PHANDSHAKE";
/// Scheme of a metadata directory in a folder of this host, for the state of one process.
pub const FOLDER: &str = "rocksdb://";

/// Scheme, connection string and feature of each metadata service, and whether the build has it.
const SERVICES: [(&str, &str, &str, bool); 4] = [
    ("http", "http://host:port/metadata", "http", cfg!(feature = "http")),
    ("etcd", "etcd://host:port", "metadata-etcd", cfg!(feature = "metadata-etcd")),
    ("redis", "redis://host:port", "metadata-redis", cfg!(feature = "metadata-redis")),
    ("rocksdb", "rocksdb:///path", "metadata-rocksdb", cfg!(feature = "metadata-rocksdb")),
];

/// Credentials and database number for a Redis server.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct RedisLogin {
    /// User name. Empty selects the default user.
    pub username: String,
    /// Password. Empty sends none.
    pub password: String,
    /// Number of the database.
    pub database: u8,
}

impl std::fmt::Debug for RedisLogin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RedisLogin({:?}, database {})", self.username, self.database)
    }
}

/// Returns the error for a scheme that this build does not support. The error contains the feature
/// that adds the scheme, and the connection strings that the build supports.
pub(crate) fn not_built_in(text: &str, scheme: &str) -> Error {
    let feature = SERVICES.iter().find(|(known, ..)| *known == scheme);
    let needs = feature
        .map_or_else(String::new, |(_, _, name, _)| format!(" and needs a build with feature `{name}`"));
    let built = SERVICES.iter().filter(|(.., built)| *built).map(|(_, example, ..)| *example);
    let there = std::iter::once(P2P).chain(built).collect::<Vec<_>>().join(", ");
    let text = format!("metadata directory {text:?}: {scheme:?} is not built in{needs}; there is {there}");
    Error::new(ErrorCode::NotSupported, text)
}
