//! Custom metadata backend through which two clients find each other, checked by the public
//! conformance suite.
//!
//! A folder with one file per key: enough for a cluster whose machines share a file system.
#![allow(clippy::print_stdout, reason = "an example prints to its terminal")]

use std::fmt::Write as _;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use mooncake_core::meta::{Expect, MetaCapabilities, MetaEvent, MetaValue, MetadataBackend};
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_store::client::Client;
use mooncake_store::config::MasterConfig;
use mooncake_store::server::MasterServer;
use mooncake_transport::Directory;

/// Metadata backend with one file per key. A revision is eight bytes in front of the value.
#[derive(Debug)]
pub struct FolderMetadata {
    folder: PathBuf,
}

impl FolderMetadata {
    /// Creates a backend with its files in this folder, which is created if missing.
    pub fn new(folder: impl Into<PathBuf>) -> Result<Self> {
        let folder = folder.into();
        std::fs::create_dir_all(&folder)?;
        Ok(Self { folder })
    }

    fn path(&self, key: &str) -> PathBuf {
        // Hex keeps every key distinct, and every character valid for the file system.
        let name = key.bytes().fold(String::new(), |mut name, byte| {
            let _ = write!(name, "{byte:02x}");
            name
        });
        self.folder.join(name)
    }
}

#[async_trait]
impl MetadataBackend for FolderMetadata {
    fn capabilities(&self) -> MetaCapabilities {
        MetaCapabilities { watch: false, durable: true, atomic: false, list: true }
    }

    async fn get(&self, key: &str) -> Result<Option<MetaValue>> {
        match std::fs::read(self.path(key)) {
            Ok(bytes) => parse(key, bytes).map(Some),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    async fn put(&self, key: &str, value: Bytes, expect: Expect) -> Result<u64> {
        let current = self.get(key).await?.map(|entry| entry.revision);
        let holds = match expect {
            Expect::Any => true,
            Expect::Absent => current.is_none(),
            Expect::At(revision) => current == Some(revision),
        };
        if !holds {
            return Err(Error::new(
                ErrorCode::ObjectAlreadyExists,
                format!("cannot write metadata key: revision differs. key={key:?} revision={current:?}"),
            ));
        }
        let revision = current.unwrap_or(0) + 1;
        let mut bytes = revision.to_le_bytes().to_vec();
        bytes.extend_from_slice(&value);
        // A rename replaces the file atomically: no reader sees half a value.
        let path = self.path(key);
        let fresh = path.with_extension("new");
        std::fs::write(&fresh, bytes)?;
        std::fs::rename(&fresh, &path)?;
        Ok(revision)
    }

    async fn delete(&self, key: &str) -> Result<bool> {
        match std::fs::remove_file(self.path(key)) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    async fn list(&self, prefix: &str) -> Result<Vec<(String, MetaValue)>> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir(&self.folder)? {
            let name = entry?.file_name();
            let Some(key) = name.to_str().and_then(unhex) else { continue };
            if key.starts_with(prefix) {
                // A file that was removed after the listing is skipped.
                found.extend(self.get(&key).await?.map(|value| (key, value)));
            }
        }
        found.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(found)
    }

    async fn watch(&self, _prefix: &str) -> Result<BoxStream<'static, MetaEvent>> {
        Err(Error::new(ErrorCode::NotSupported, "cannot watch a folder"))
    }
}

fn parse(key: &str, bytes: Vec<u8>) -> Result<MetaValue> {
    let Some((revision, _)) = bytes.split_first_chunk::<8>() else {
        return Err(Error::new(
            ErrorCode::DeserializeFail,
            format!("cannot read metadata: the file is too short. key={key:?}"),
        ));
    };
    let revision = u64::from_le_bytes(*revision);
    Ok(MetaValue { value: Bytes::from(bytes).slice(8..), revision })
}

fn unhex(name: &str) -> Option<String> {
    let digits = name.as_bytes().chunks(2);
    let bytes: Option<Vec<u8>> =
        digits.map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()).collect();
    String::from_utf8(bytes?).ok()
}

#[cfg(test)]
#[test]
fn folder_metadata_conforms() {
    let folder = tempfile::tempdir().expect("cannot create a folder");
    let backend = Arc::new(FolderMetadata::new(folder.path()).expect("cannot create a backend"));
    futures::executor::block_on(mooncake_core::testkit::meta::check(backend));
}

#[tokio::main]
async fn main() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let server = MasterServer::start(MasterConfig {
        rpc_address: "127.0.0.1".into(),
        rpc_port: 0,
        metrics_port: 0,
        ..MasterConfig::default()
    })
    .await?;
    let join = |name: &str| {
        let backend = FolderMetadata::new(folder.path());
        let builder = Client::builder().master(server.addresses().rpc.to_string()).local_hostname(name);
        async move {
            let directory = Directory::new(Arc::new(backend?));
            builder.directory(directory).advertise(std::net::Ipv4Addr::LOCALHOST.into()).connect().await
        }
    };
    let (alice, bob) = (join("alice").await?, join("bob").await?);
    alice.put("greeting", "found through a folder").await?;
    let value = bob.get("greeting").await?.ok_or_else(|| Error::internal("the value is missing"))?;
    println!("bob read: {}", String::from_utf8_lossy(&value));
    println!("files: {}", std::fs::read_dir(folder.path())?.count());
    alice.close().await?;
    bob.close().await
}
