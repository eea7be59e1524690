//! Settings and statistics of a server of shared clients.

use std::path::PathBuf;
use std::time::Duration;

/// Settings of the server of a daemon.
#[derive(Clone, Debug)]
pub struct LocalServerConfig {
    /// Path of the socket.
    pub path: PathBuf,
    /// Permissions of the socket. If they admit only its user, the daemon also checks the user that
    /// the kernel reports for each connection.
    pub mode: u32,
    /// Maximum number of shared clients at once. Their control connections take at most half of the
    /// connections of the socket, so that connections for calls remain. On a socket for several
    /// users, one user has at most half of the shared clients.
    pub max_clients: usize,
    /// Maximum number of bytes that one shared client may share.
    pub max_memory: u64,
    /// Maximum number of calls in progress of one shared client.
    pub max_calls: u32,
    /// Timeout after which a shared client that has sent no record is removed.
    pub silence: Duration,
}

impl Default for LocalServerConfig {
    fn default() -> Self {
        Self {
            path: super::default_path(super::DEFAULT_PORT),
            mode: 0o600,
            max_clients: 256,
            max_memory: 1 << 40,
            max_calls: 64,
            silence: Duration::from_secs(10),
        }
    }
}

impl LocalServerConfig {
    /// Returns the maximum number of connections: for each shared client, one for control, one that
    /// shares memory, and one for each call in progress.
    pub(super) fn slots(&self) -> usize {
        self.max_clients.saturating_mul(self.max_calls as usize + 2)
    }

    /// Returns whether only processes of one user may open the socket.
    pub(super) fn is_private(&self) -> bool {
        self.mode & 0o077 == 0
    }
}

/// Statistics of the shared clients of a daemon, at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LocalStats {
    /// Number of shared clients.
    pub clients: usize,
    /// Number of memory blocks that they share.
    pub memories: usize,
    /// Total size in bytes of the shared memory blocks.
    pub bytes: u64,
    /// Number of open connections for calls.
    pub connections: usize,
    /// Number of calls in progress.
    pub calls: usize,
    /// Number of located objects that shared clients may read parts of.
    pub located: usize,
}
