//! Settings and statistics of a server of light clients.

use std::path::PathBuf;
use std::time::Duration;

/// How an owner serves.
#[derive(Clone, Debug)]
pub struct LocalServerConfig {
    /// Path of the socket.
    pub path: PathBuf,
    /// Its permissions. With those of its user alone, the kernel's word on who connects is asked
    /// for as well.
    pub mode: u32,
    /// Light clients served at once. Their control connections take at most half of the places of
    /// the socket, so that there is always one for a call. Where the socket is open to several
    /// users, one user has at most half of the light clients.
    pub max_clients: usize,
    /// Bytes one of them may share.
    pub max_memory: u64,
    /// Calls of one of them that may be under way at once.
    pub max_calls: u32,
    /// A light client that is silent for longer is forgotten.
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
    /// Returns the number of connections: of each light client one for control, and one for each
    /// call under way.
    pub(super) fn places(&self) -> usize {
        self.max_clients.saturating_mul(self.max_calls as usize + 1)
    }

    /// Returns whether only processes of one user may open the socket.
    pub(super) fn is_private(&self) -> bool {
        self.mode & 0o077 == 0
    }
}

/// What an owner's light clients hold just now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LocalStats {
    /// How many there are.
    pub clients: usize,
    /// Pieces of memory they share.
    pub memories: usize,
    /// Bytes of it.
    pub bytes: u64,
    /// Connections for calls.
    pub connections: usize,
    /// Calls under way.
    pub calls: usize,
}
