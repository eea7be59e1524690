//! Catalogue of the objects, with the keys and values of the Go library.

mod go_json;
mod payload;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mooncake_core::clock::Rng;
use mooncake_core::meta::{Expect, MetaValue, MetadataBackend};
use mooncake_core::{Error, ErrorCode, ErrorKind, Result};
use parking_lot::Mutex;

pub use payload::{Location, Payload, Role, Shard, shard_sizes};

/// Prefix of the keys of objects.
const PREFIX: &str = "mooncake/checkpoint/";
/// Number of attempts to change an object that other nodes change, too.
const MAX_ATTEMPTS: u32 = 100;
/// Longest pause between two attempts.
const MAX_PAUSE: Duration = Duration::from_millis(100);

/// Object with the revision of its entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The object.
    pub payload: Payload,
    /// Revision of the entry in the metadata service.
    pub revision: u64,
}

/// Catalogue in a metadata service.
pub struct Catalogue {
    backend: Arc<dyn MetadataBackend>,
    rng: Mutex<Rng>,
}

impl fmt::Debug for Catalogue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Catalogue").field("backend", &self.backend).finish()
    }
}

fn key(name: &str) -> String {
    format!("{PREFIX}{name}")
}

impl Catalogue {
    /// Creates the catalogue of a metadata service.
    ///
    /// # Errors
    /// Returns `NOT_SUPPORTED` if the service cannot compare and set, or cannot list keys.
    pub fn new(backend: Arc<dyn MetadataBackend>, rng: Rng) -> Result<Self> {
        let can = backend.capabilities();
        if !can.atomic || !can.list {
            return Err(Error::new(
                ErrorCode::NotSupported,
                format!(
                    "cannot keep a catalogue: the metadata service cannot compare and set, or \
                     cannot list keys. atomic={} list={}; use etcd, Redis or RocksDB",
                    can.atomic, can.list
                ),
            ));
        }
        Ok(Self { backend, rng: Mutex::new(rng) })
    }

    /// Returns an object, or `None` if no node has entered it.
    ///
    /// # Errors
    /// Returns the errors of the metadata service and of [`Payload::decode`].
    pub async fn read(&self, name: &str) -> Result<Option<Entry>> {
        self.backend.get(&key(name)).await?.as_ref().map(entry).transpose()
    }

    /// Enters an object, in place of any other one of its name if `replace` is set. Returns the
    /// entry.
    ///
    /// # Errors
    /// Returns `OBJECT_ALREADY_EXISTS` for a name that is in use, and the errors of the metadata
    /// service.
    pub async fn create(&self, payload: Payload, replace: bool) -> Result<Entry> {
        let expect = if replace { Expect::Any } else { Expect::Absent };
        let value = Bytes::from(payload.encode());
        match self.backend.put(&key(&payload.name), value, expect).await {
            Ok(revision) => Ok(Entry { payload, revision }),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Err(name_in_use(&payload.name)),
            Err(error) => Err(error),
        }
    }

    /// Returns the objects whose names have this prefix, in the order of their names. Malformed
    /// entries are left out.
    ///
    /// # Errors
    /// Returns the errors of the metadata service.
    pub async fn list(&self, prefix: &str) -> Result<Vec<Entry>> {
        let found = self.backend.list(&key(prefix)).await?;
        let parse = |(key, value): &(String, MetaValue)| {
            entry(value).inspect_err(|error| tracing::warn!(key, %error, "malformed catalogue entry")).ok()
        };
        Ok(found.iter().filter_map(parse).collect())
    }

    /// Changes an object by `change`, which returns whether it changed anything, and which is
    /// called again when another node changed the object meanwhile. Deletes an object that is left
    /// without copies. Returns the entry as this call left it, or `None` if the catalogue does not
    /// have the object.
    ///
    /// # Errors
    /// Returns `OBJECT_REPLICA_BUSY` if other nodes changed the object before each of 100 attempts,
    /// and the errors of the metadata service.
    pub async fn edit(
        &self,
        name: &str,
        mut change: impl FnMut(&mut Payload) -> bool,
    ) -> Result<Option<Entry>> {
        let key = key(name);
        for attempt in 0..MAX_ATTEMPTS {
            let Some(Entry { mut payload, revision }) = self.read(name).await? else { return Ok(None) };
            if !change(&mut payload) {
                return Ok(Some(Entry { payload, revision }));
            }
            let written = if payload.has_copies() {
                let value = Bytes::from(payload.encode());
                self.backend.put(&key, value, Expect::At(revision)).await.map(Some)
            } else {
                self.backend.delete_at(&key, revision).await.map(|()| None)
            };
            match written {
                Ok(revision) => return Ok(revision.map(|revision| Entry { payload, revision })),
                Err(error) if error.kind() == ErrorKind::AlreadyExists => self.pause(attempt).await,
                Err(error) => return Err(error),
            }
        }
        Err(Error::new(
            ErrorCode::ObjectReplicaBusy,
            format!(
                "cannot change object: other nodes changed it first. name={name:?} attempts={MAX_ATTEMPTS}; retry"
            ),
        ))
    }

    /// Waits for a random time that grows with the attempts.
    async fn pause(&self, attempt: u32) {
        let longest = Duration::from_millis(2 << attempt.min(8)).min(MAX_PAUSE);
        let micros = u64::try_from(longest.as_micros()).unwrap_or(u64::MAX);
        let micros = self.rng.lock().below(micros);
        tokio::time::sleep(Duration::from_micros(micros)).await;
    }
}

/// Returns the error of an object whose name is in use.
pub(crate) fn name_in_use(name: &str) -> Error {
    Error::new(
        ErrorCode::ObjectAlreadyExists,
        format!(
            "cannot enter object: the catalogue has one of this name. name={name:?}; unregister it \
             first, or force the creation"
        ),
    )
}

fn entry(value: &MetaValue) -> Result<Entry> {
    Ok(Entry { payload: Payload::decode(&value.value)?, revision: value.revision })
}
