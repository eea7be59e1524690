//! Directory of segments: segments are published and looked up at their own handshake port, or in a
//! metadata service.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mooncake_core::meta::{Expect, MetaKeys, MetadataBackend, fingerprint};
use mooncake_core::{Error, ErrorCode, ErrorKind, Result};
use serde_json::{Value, json};
use tracing::{info, warn};

use crate::handshake::{self, HandshakeConfig};
use crate::net::{DEFAULT_PORT, HostPort};
use crate::protocol::Protocol;
use crate::segment::SegmentDesc;

/// Time that the owner of a name has to answer a probe before its name may be taken over.
const PROBE: Duration = Duration::from_millis(1500);
/// Number of attempts to claim a name that other engines claim too.
const CLAIMS: usize = 8;

/// Method by which engines find each other.
#[derive(Clone, Debug)]
pub enum Directory {
    /// The name of a segment is the address of its handshake port, which serves its descriptor.
    P2p,
    /// A metadata service holds handshake addresses and descriptors.
    Metadata {
        /// Metadata service.
        backend: Arc<dyn MetadataBackend>,
        /// Format of its keys.
        keys: MetaKeys,
    },
}

impl Directory {
    /// Creates a directory in a backend, with the default keys of Mooncake C++.
    pub fn new(backend: Arc<dyn MetadataBackend>) -> Self {
        Self::Metadata { backend, keys: MetaKeys::default() }
    }

    /// Returns whether names are addresses.
    pub fn is_p2p(&self) -> bool {
        matches!(self, Directory::P2p)
    }

    /// Claims `name` for the engine whose handshake port is at `at`. The name of an engine that
    /// does not respond any more is taken over.
    ///
    /// # Errors
    /// Returns `AlreadyExists` if the name is in use.
    pub async fn announce(&self, name: &str, at: &HostPort, config: &HandshakeConfig) -> Result<()> {
        let Directory::Metadata { backend, keys } = self else { return Ok(()) };
        let key = keys.rpc_meta(name);
        let value = keys.value(json!({"ip_or_host_name": at.host, "rpc_port": at.port}).to_string());
        let announcing = |error: Error| error.context(format!("announcing segment {name:?}"));
        // Other engines may claim the same name. After each lost race, the winner is probed.
        for _ in 0..CLAIMS {
            match backend.put(&key, value.clone(), Expect::Absent).await {
                Ok(_) => return Ok(()),
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => return Err(announcing(error)),
            }
            let Some(entry) = backend.get(&key).await.map_err(announcing)? else { continue };
            let owner = address(name, &entry.value)?;
            if owner != *at && handshake::probe(&owner, PROBE, config).await {
                return Err(in_use(name, &owner));
            }
            warn!(name, %owner, "taking over a segment name whose last owner does not answer");
            if backend.capabilities().atomic {
                match backend.put(&key, value.clone(), Expect::At(entry.revision)).await {
                    Ok(_) => return Ok(()),
                    Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                    Err(error) => return Err(announcing(error)),
                }
            } else if backend.get(&key).await.map_err(announcing)?.is_some_and(|now| now.value == entry.value)
            {
                // The write takes two steps, because the servers of Mooncake C++ refuse to
                // overwrite these keys.
                backend.delete(&key).await.map_err(announcing)?;
            }
        }
        let text = format!("the segment name {name:?} goes from one engine to the next; choose another name");
        Err(Error::new(ErrorCode::SegmentAlreadyExists, text))
    }

    /// Publishes a descriptor and replaces the present one. With `must_be_new`, a present one is an
    /// error. Returns the fingerprint of the entry, if names are not addresses.
    pub async fn publish(&self, desc: &SegmentDesc, must_be_new: bool) -> Result<Option<u64>> {
        let Directory::Metadata { backend, keys } = self else { return Ok(None) };
        let expect = if must_be_new { Expect::Absent } else { Expect::Any };
        let value = keys.value(desc.encode());
        let print = fingerprint(&value);
        match backend.put(&keys.segment(&desc.name), value, expect).await {
            Ok(_) => Ok(Some(print)),
            Err(error) => Err(error.context(format!("publishing segment {:?}", desc.name))),
        }
    }

    /// Returns the descriptor of a segment as the metadata service stores it, or `None` if it has
    /// none.
    pub(crate) async fn entry(&self, name: &str) -> Result<Option<Bytes>> {
        let Directory::Metadata { backend, keys } = self else { return Ok(None) };
        Ok(backend.get(&keys.segment(name)).await?.map(|entry| entry.value))
    }

    /// Removes descriptor and address. An address other than `at` stays, because the name then has
    /// a new owner.
    pub async fn withdraw(&self, name: &str, at: Option<&HostPort>) -> Result<()> {
        let Directory::Metadata { backend, keys } = self else { return Ok(()) };
        if let Some(at) = at {
            match self.locate(name).await? {
                Some(owner) if owner != *at => {
                    info!(name, %owner, "the segment name has a new owner: nothing to withdraw");
                    return Ok(());
                }
                Some(_) => _ = backend.delete(&keys.rpc_meta(name)).await?,
                // A new owner announces itself first, so the descriptor still belongs to this
                // engine.
                None => {}
            }
        }
        backend.delete(&keys.segment(name)).await?;
        Ok(())
    }

    /// Returns the address of a segment's handshake port, or `None` if it has none.
    pub async fn locate(&self, name: &str) -> Result<Option<HostPort>> {
        let Directory::Metadata { backend, keys } = self else {
            return Ok(Some(HostPort::parse(name, DEFAULT_PORT)));
        };
        let entry = backend.get(&keys.rpc_meta(name)).await?;
        entry.map(|entry| address(name, &entry.value)).transpose()
    }

    /// Returns the descriptor of a segment, with the host of its data port filled in.
    /// `own_descriptor` is the local descriptor, which a handshake sends to the peer.
    pub async fn descriptor(
        &self,
        name: &str,
        own_descriptor: &[u8],
        config: &HandshakeConfig,
    ) -> Result<SegmentDesc> {
        let mut desc = match self {
            Directory::P2p => {
                let at = HostPort::parse(name, DEFAULT_PORT);
                handshake::fetch_descriptor(&at, own_descriptor, config).await?
            }
            Directory::Metadata { backend, keys } => {
                let entry = backend.get(&keys.segment(name)).await?.ok_or_else(|| {
                    Error::new(
                        ErrorCode::SegmentNotFound,
                        format!("segment {name:?} is not in the metadata directory"),
                    )
                })?;
                SegmentDesc::decode(&entry.value).map_err(|e| e.context(format!("segment {name:?}")))?
            }
        };
        // Transports that set up connections need the whole address. TCP needs the host at most.
        if desc.tcp_data_host.is_empty() || !desc.supports(&Protocol::TCP) {
            desc.handshake = self.locate(name).await?;
        }
        if desc.tcp_data_host.is_empty()
            && let Some(at) = &desc.handshake
        {
            desc.tcp_data_host.clone_from(&at.host);
        }
        Ok(desc)
    }
}

/// Parses the address of a name's owner, as the directory stores it.
fn address(name: &str, entry: &[u8]) -> Result<HostPort> {
    let bad = |what: &str| Error::invalid(format!("address of segment {name:?} in the directory: {what}"));
    let value: Value = serde_json::from_slice(entry).map_err(|e| bad(&e.to_string()))?;
    let host = value["ip_or_host_name"].as_str().ok_or_else(|| bad("no \"ip_or_host_name\""))?;
    let port = value["rpc_port"].as_u64().and_then(|port| u16::try_from(port).ok());
    Ok(HostPort::new(host, port.ok_or_else(|| bad("no usable \"rpc_port\""))?))
}

fn in_use(name: &str, owner: &HostPort) -> Error {
    let text = format!(
        "the segment name {name:?} is in use by an engine that answers at {owner}; choose another name, or stop that one"
    );
    Error::new(ErrorCode::SegmentAlreadyExists, text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;
    use mooncake_core::meta::MemoryMetadata;

    fn now<F: Future>(future: F) -> F::Output {
        future.now_or_never().expect("nothing to wait for")
    }

    #[test]
    fn what_is_published_is_found_and_withdrawn() {
        let backend = Arc::new(MemoryMetadata::new());
        let directory = Directory::new(backend.clone());
        let (config, at) = (HandshakeConfig::default(), HostPort::new("10.0.0.1", 15000));
        now(directory.announce("n", &at, &config)).unwrap();
        let stored = now(backend.get("mooncake/rpc_meta/n")).unwrap().unwrap();
        assert_eq!(stored.value, r#"{"ip_or_host_name":"10.0.0.1","rpc_port":15000}"#);
        let mut desc = SegmentDesc::new("n");
        desc.protocols.push(crate::Protocol::TCP);
        now(directory.publish(&desc, true)).unwrap();
        assert_eq!(now(directory.publish(&desc, true)).unwrap_err().kind(), ErrorKind::AlreadyExists);
        now(directory.publish(&desc, false)).unwrap();
        let found = now(directory.descriptor("n", b"{}", &config)).unwrap();
        assert_eq!(found.tcp_data_host, "10.0.0.1", "the handshake host stands in for a missing data host");
        now(directory.withdraw("n", Some(&HostPort::new("10.0.0.2", 15000)))).unwrap();
        assert!(now(directory.locate("n")).unwrap().is_some(), "somebody else's name is left alone");
        now(directory.withdraw("n", Some(&at))).unwrap();
        assert_eq!(now(directory.locate("n")).unwrap(), None);
        let missing = now(directory.descriptor("n", b"{}", &config)).unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::NotFound);
    }

    #[test]
    fn an_own_stale_name_is_taken_over() {
        let directory = Directory::new(Arc::new(MemoryMetadata::new()));
        let (config, at) = (HandshakeConfig::default(), HostPort::new("10.0.0.1", 15000));
        for _ in 0..2 {
            now(directory.announce("n", &at, &config)).unwrap();
        }
    }

    #[test]
    fn malformed_entry_error_states_name() {
        let backend = Arc::new(MemoryMetadata::new());
        let directory = Directory::new(backend.clone());
        for text in ["", "[]", r#"{"ip_or_host_name":"h"}"#, r#"{"ip_or_host_name":"h","rpc_port":70000}"#] {
            now(backend.put("mooncake/rpc_meta/n", Bytes::from_static(text.as_bytes()), Expect::Any))
                .unwrap();
            assert!(now(directory.locate("n")).unwrap_err().message().contains("\"n\""), "{text}");
        }
    }
}
