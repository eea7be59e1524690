//! Connection strings and options of the metadata services.

use crate::token::HttpToken;

/// Connection string of [`Directory::P2p`](mooncake_transport::Directory::P2p).
pub const P2P: &str = "P2PHANDSHAKE";
/// Scheme of a metadata directory in a folder of this host, for the state of one process.
pub const FOLDER: &str = "rocksdb://";

/// Options that a connection string does not carry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DirectoryOptions {
    /// Prefix that separates the keys of a cluster from those of others in the same directory.
    /// Empty adds none.
    pub cluster_id: String,
    /// Credentials for a directory in Redis.
    pub redis: RedisLogin,
    /// Token of an HTTP metadata server.
    pub token: HttpToken,
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_not_printed() {
        let login = RedisLogin { username: "u".into(), password: "secret".into(), database: 3 };
        assert_eq!(format!("{login:?}"), "RedisLogin(\"u\", database 3)");
    }
}
