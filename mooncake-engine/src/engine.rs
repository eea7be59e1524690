//! The engine over all built-in wires, and how it is started.

use std::ops::Deref;
use std::sync::Arc;

use mooncake_core::clock::{SharedClock, SystemClock};
use mooncake_core::{Error, Result};
use mooncake_transport::Directory;
use mooncake_transport::directory::{DirectoryOptions, P2P, RedisLogin};
use mooncake_transport::engine::{Engine, HandshakePort, LocalCopies};
use tokio::runtime::Handle;

use crate::transport_set::{TransportOptions, TransportSet};

/// A transfer engine. A handle: clones are the same engine; the last one withdraws its segment.
///
/// What it can do is what [`Engine`] can, over all built-in wires.
#[derive(Clone, Debug)]
pub struct TransferEngine {
    engine: Engine<TransportSet>,
}

impl TransferEngine {
    /// Settings; [`start`](TransferEngineBuilder::start) starts it.
    pub fn builder() -> TransferEngineBuilder {
        TransferEngineBuilder::default()
    }

    /// The engine inside, for what is generic in the wire.
    pub fn engine(&self) -> &Engine<TransportSet> {
        &self.engine
    }
}

impl Deref for TransferEngine {
    type Target = Engine<TransportSet>;

    fn deref(&self) -> &Engine<TransportSet> {
        &self.engine
    }
}

/// Settings of a [`TransferEngine`].
#[derive(Clone, Debug)]
#[must_use = "nothing happens before `start`"]
pub struct TransferEngineBuilder {
    name: String,
    metadata: String,
    options: DirectoryOptions,
    directory: Option<Directory>,
    protocol: String,
    wires: Option<TransportOptions>,
    handshake: HandshakePort,
    local_copies: Option<LocalCopies>,
    clock: SharedClock,
}

impl Default for TransferEngineBuilder {
    fn default() -> Self {
        Self {
            name: String::new(),
            metadata: P2P.into(),
            options: DirectoryOptions::default(),
            directory: None,
            protocol: String::new(),
            wires: None,
            handshake: HandshakePort::default(),
            local_copies: None,
            clock: SystemClock::shared(),
        }
    }
}

impl TransferEngineBuilder {
    /// The segment's name, under which others open it. With `P2PHANDSHAKE` only its host counts, and the handshake port is added:
    /// see [`Engine::name`] of what was started.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Where segments are found, as the existing system spells it: `P2PHANDSHAKE` (the default), `http://host:port/metadata`,
    /// `etcd://host:port,host:port` or `redis://host:port` (features `metadata-etcd`, `metadata-redis`).
    pub fn metadata(mut self, text: impl Into<String>) -> Self {
        self.metadata = text.into();
        self
    }

    /// What tells the keys of this cluster from those of others in the same directory (`MC_METADATA_CLUSTER_ID`).
    pub fn cluster_id(mut self, id: impl Into<String>) -> Self {
        self.options.cluster_id = id.into();
        self
    }

    /// Who we are to a directory in Redis (`MC_REDIS_USERNAME`, `MC_REDIS_PASSWORD`, `MC_REDIS_DB_INDEX`).
    pub fn redis_login(mut self, login: RedisLogin) -> Self {
        self.options.redis = login;
        self
    }

    /// A directory of the caller's, in place of [`metadata`](Self::metadata).
    pub fn directory(mut self, directory: Directory) -> Self {
        self.directory = Some(directory);
        self
    }

    /// The wire between hosts by its name (`tcp`); the best one built in when empty. Shared memory is used beside it.
    pub fn protocol(mut self, protocol: impl Into<String>) -> Self {
        self.protocol = protocol.into();
        self
    }

    /// The wires one by one, in place of [`protocol`](Self::protocol).
    pub fn wires(mut self, wires: TransportOptions) -> Self {
        self.wires = Some(wires);
        self
    }

    /// The handshake port: host, address and ports to choose from.
    pub fn handshake(mut self, port: HandshakePort) -> Self {
        self.handshake = port;
        self
    }

    /// Which transfers are plain copies; by default those inside this process.
    pub fn local_copies(mut self, which: LocalCopies) -> Self {
        self.local_copies = Some(which);
        self
    }

    /// The clock of deadlines.
    pub fn clock(mut self, clock: SharedClock) -> Self {
        self.clock = clock;
        self
    }

    /// Opens the wires and the handshake port, takes the name and publishes an empty segment. All runs on the current tokio runtime.
    ///
    /// # Errors
    /// `NOT_SUPPORTED` for a wire or directory that is not built in, `INVALID_PARAMS` outside a runtime, `SEGMENT_ALREADY_EXISTS`
    /// for a name in use; a port that is in use, or a directory that does not answer, by name.
    pub async fn start(self) -> Result<TransferEngine> {
        let runtime = Handle::try_current().map_err(|_| {
            Error::invalid("a transfer engine is started on a tokio runtime, and there is none here")
        })?;
        let wires = match self.wires {
            Some(wires) => wires,
            None => TransportOptions::named(&self.protocol)?,
        };
        let directory = match self.directory {
            Some(directory) => directory,
            None => Directory::connect_with(&self.metadata, &self.options)?,
        };
        let transport = Arc::new(wires.open(&runtime, &self.clock)?);
        let mut engine = Engine::builder(transport)
            .name(self.name)
            .directory(directory)
            .handshake(self.handshake)
            .clock(self.clock);
        if let Some(which) = self.local_copies {
            engine = engine.local_copies(which);
        }
        Ok(TransferEngine { engine: engine.start().await? })
    }
}
