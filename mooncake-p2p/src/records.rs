//! Records of this project beside the catalogue. The Go library neither reads nor writes them.
//!
//! | key | value |
//! |---|---|
//! | `mooncake/p2p/nodes/<segment>` | [`NodeRecord`]: heartbeats of a node |
//! | `mooncake/p2p/reads/<segment>/<slot>` | [`ReadRecord`]: read in progress from a segment |
//! | `mooncake/p2p/checksums/<object>/<segment>` | [`ChecksumRecord`]: checksums of a node's copy |

use std::sync::Arc;

use bytes::Bytes;
use mooncake_core::meta::{Expect, MetaValue, MetadataBackend};
use mooncake_core::{Error, ErrorKind, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

const NODES: &str = "mooncake/p2p/nodes/";
const READS: &str = "mooncake/p2p/reads/";
const CHECKSUMS: &str = "mooncake/p2p/checksums/";

/// Heartbeats of a node. The record of a live node changes regularly.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NodeRecord {
    /// Random number of the process.
    pub(crate) instance: u64,
    /// Number of heartbeats so far.
    pub(crate) heartbeats: u64,
    /// True if the lease has ended and another node removes the entries of this one.
    #[serde(default)]
    pub(crate) has_expired: bool,
}

/// Read in progress.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ReadRecord {
    /// Segment of the reader.
    pub(crate) reader: String,
    /// Name of the object.
    pub(crate) name: String,
    /// Number of the shard.
    pub(crate) shard: usize,
}

/// Checksums of the shards of an object in one segment. A shard that is not there has none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ChecksumRecord {
    /// CRC-64/ECMA-182 of each shard.
    pub(crate) crc64: Vec<Option<u64>>,
}

/// Read record with its key.
#[derive(Clone, Debug)]
pub(crate) struct SlotOfSource {
    pub(crate) source: String,
    pub(crate) slot: usize,
    pub(crate) revision: u64,
    pub(crate) read: ReadRecord,
}

/// Records in a metadata service.
#[derive(Clone, Debug)]
pub(crate) struct Records {
    backend: Arc<dyn MetadataBackend>,
}

fn slot_key(source: &str, slot: usize) -> String {
    format!("{READS}{source}/{slot}")
}

fn checksum_key(name: &str, segment: &str) -> String {
    format!("{CHECKSUMS}{name}/{segment}")
}

fn encode(record: &impl Serialize) -> Result<Bytes> {
    let text = serde_json::to_vec(record);
    text.map(Bytes::from).map_err(|error| Error::internal(format!("cannot encode record: {error}")))
}

/// Parses a record. Malformed ones count as absent: another version may have written them.
fn decode<R: DeserializeOwned>(value: &MetaValue) -> Option<R> {
    serde_json::from_slice(&value.value).ok()
}

/// Returns false for an error of a condition that does not hold.
fn held<T>(result: Result<T>) -> Result<bool> {
    match result {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(error),
    }
}

impl Records {
    pub(crate) fn new(backend: Arc<dyn MetadataBackend>) -> Self {
        Self { backend }
    }

    /// Returns the record of a node with its revision.
    pub(crate) async fn node(&self, segment: &str) -> Result<Option<(Option<NodeRecord>, u64)>> {
        let value = self.backend.get(&format!("{NODES}{segment}")).await?;
        Ok(value.map(|value| (decode(&value), value.revision)))
    }

    /// Writes the record of a node. Returns the new revision, or `None` if `expect` does not hold.
    pub(crate) async fn put_node(
        &self,
        segment: &str,
        node: &NodeRecord,
        expect: Expect,
    ) -> Result<Option<u64>> {
        match self.backend.put(&format!("{NODES}{segment}"), encode(node)?, expect).await {
            Ok(revision) => Ok(Some(revision)),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Deletes the record of a node if it has this revision. Returns false if it changed.
    pub(crate) async fn delete_node(&self, segment: &str, revision: u64) -> Result<bool> {
        held(self.backend.delete_at(&format!("{NODES}{segment}"), revision).await)
    }

    /// Returns the segments of all nodes and the revisions of their records.
    pub(crate) async fn nodes(&self) -> Result<Vec<(String, u64)>> {
        let found = self.backend.list(NODES).await?;
        let segment =
            |(key, value): (String, MetaValue)| Some((key.strip_prefix(NODES)?.to_owned(), value.revision));
        Ok(found.into_iter().filter_map(segment).collect())
    }

    /// Takes a slot of a source. Returns the revision of the record, or `None` if another reader
    /// has the slot.
    pub(crate) async fn take_slot(
        &self,
        source: &str,
        slot: usize,
        read: &ReadRecord,
    ) -> Result<Option<u64>> {
        match self.backend.put(&slot_key(source, slot), encode(read)?, Expect::Absent).await {
            Ok(revision) => Ok(Some(revision)),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Frees a slot that was taken at this revision. A slot that another reader has stays.
    pub(crate) async fn free_slot(&self, source: &str, slot: usize, revision: u64) -> Result<()> {
        held(self.backend.delete_at(&slot_key(source, slot), revision).await).map(drop)
    }

    /// Returns all reads in progress.
    pub(crate) async fn reads(&self) -> Result<Vec<SlotOfSource>> {
        let found = self.backend.list(READS).await?;
        let parse = |(key, value): &(String, MetaValue)| {
            let (source, slot) = key.strip_prefix(READS)?.rsplit_once('/')?;
            let (source, slot) = (source.to_owned(), slot.parse().ok()?);
            Some(SlotOfSource { source, slot, revision: value.revision, read: decode(value)? })
        };
        Ok(found.iter().filter_map(parse).collect())
    }

    /// Returns the checksums of an object in a segment, which are none for segments of other
    /// software.
    pub(crate) async fn checksums(&self, name: &str, segment: &str) -> Result<ChecksumRecord> {
        let value = self.backend.get(&checksum_key(name, segment)).await?;
        Ok(value.as_ref().and_then(decode).unwrap_or_default())
    }

    /// Writes the checksums of an object in a segment. Only the node of the segment calls this.
    pub(crate) async fn put_checksums(
        &self,
        name: &str,
        segment: &str,
        record: &ChecksumRecord,
    ) -> Result<()> {
        self.backend.put(&checksum_key(name, segment), encode(record)?, Expect::Any).await.map(drop)
    }

    /// Deletes the checksums of an object in a segment, if there are any.
    pub(crate) async fn delete_checksums(&self, name: &str, segment: &str) -> Result<()> {
        self.backend.delete(&checksum_key(name, segment)).await.map(drop)
    }
}
