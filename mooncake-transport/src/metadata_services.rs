//! Connection strings and credentials of the metadata services that an engine knows.

/// Connection string of [`Directory::P2p`](crate::Directory::P2p).
pub const P2P: &str = "P2PHANDSHAKE";
/// Scheme of a metadata directory in a folder of this host, for the state of one process.
pub const FOLDER: &str = "rocksdb://";

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
