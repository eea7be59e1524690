//! Snapshots in a local metadata directory, such as `rocksdb:///path`.
//!
//! A snapshot is stored in parts under keys that are not listed. A second kind of key, written
//! last, contains the number of parts. A third kind marks a number as unfinished: its parts may
//! lack the second key, and the next master removes them.

use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use mooncake_core::meta::{Expect, MetadataBackend};
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_metadata::open_folder;
use tokio::runtime::Handle;

use super::format::{ORDER, Sink, add_to_order, name};

/// Size of a part in bytes: small enough for one write, large enough that syncing does not
/// dominate.
const PART: usize = 1 << 20;

#[derive(Debug)]
pub(super) struct DirectoryStore {
    directory: Arc<dyn MetadataBackend>,
    url: String,
    cluster: String,
    runtime: Handle,
}

impl DirectoryStore {
    /// Opens the directory. Must be called on a thread of a tokio runtime.
    ///
    /// # Errors
    /// Those of [`open_folder`].
    pub(super) fn open(url: &str, cluster: &str) -> Result<Self> {
        let directory = open_folder(url).map_err(|error| error.context("snapshots"))?;
        let runtime = Handle::try_current()
            .map_err(|_| Error::internal("cannot open snapshots: not on a thread of a tokio runtime"))?;
        Ok(Self { directory, url: url.to_owned(), cluster: cluster.to_owned(), runtime })
    }

    /// Removes unfinished snapshots.
    ///
    /// # Errors
    /// Those of the directory.
    pub(super) fn clear(&self) -> Result<()> {
        let unfinished = self.key("unfinished", "");
        for (key, _) in self.block_on(self.directory.list(&unfinished))? {
            let Ok(number) = key[unfinished.len()..].parse() else { continue };
            // With the second key the snapshot is complete.
            if self.block_on(self.directory.get(&self.listed(number)))?.is_none() {
                self.remove_parts(number)?;
            }
            self.block_on(self.directory.delete(&key))?;
        }
        Ok(())
    }

    /// Adds a master to the order of the masters. Returns those before it, the latest first.
    ///
    /// # Errors
    /// Those of the directory.
    pub(super) fn add_master(&self, own: u64) -> Result<Vec<u64>> {
        let key = self.key(ORDER, "");
        let before = self.block_on(self.directory.get(&key))?.map_or_else(Bytes::new, |found| found.value);
        let (order, earlier) = add_to_order(&before, own);
        self.block_on(self.directory.put(&key, order.into(), Expect::Any))?;
        Ok(earlier)
    }

    pub(super) fn numbers(&self) -> Vec<u64> {
        let listed = self.key("whole", "");
        let found = self.block_on(self.directory.list(&listed)).unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot list snapshots");
            Vec::new()
        });
        found.into_iter().filter_map(|(key, _)| key[listed.len()..].parse().ok()).collect()
    }

    /// Returns the path of a snapshot for messages.
    pub(super) fn path(&self, number: u64) -> PathBuf {
        format!("{}/{}/{}", self.url, self.cluster, name(number)).into()
    }

    /// Reads a snapshot.
    ///
    /// # Errors
    /// `FILE_NOT_FOUND`, and those of the directory.
    pub(super) fn read(&self, number: u64) -> Result<Vec<u8>> {
        let missing = |what: &str| {
            Error::new(ErrorCode::FileNotFound, format!("{}: {what} is missing", self.path(number).display()))
        };
        let parts = self.block_on(self.directory.get(&self.listed(number)))?.ok_or_else(|| missing("it"))?;
        let parts: Option<u64> = str::from_utf8(&parts.value).ok().and_then(|parts| parts.parse().ok());
        let mut bytes = Vec::new();
        for part in 0..parts.ok_or_else(|| missing("the number of parts"))? {
            let found = self.block_on(self.directory.get(&self.part(number, part)))?;
            bytes.extend_from_slice(&found.ok_or_else(|| missing("a part"))?.value);
        }
        Ok(bytes)
    }

    /// Writes a snapshot under a free number. No other process writes here. `may` is called before
    /// the snapshot becomes visible.
    ///
    /// # Errors
    /// `PERSISTENT_FAIL`; those of `fill` and `may`.
    pub(super) fn put(
        &self,
        number: u64,
        fill: &impl Fn(&mut Sink<'_>) -> Result<()>,
        may: &impl Fn() -> Result<()>,
    ) -> Result<()> {
        let failed = |error: Error| Error::new(ErrorCode::PersistentFail, error.to_string());
        let set = |key: &str, value: Bytes| {
            self.block_on(self.directory.put(key, value, Expect::Any)).map(drop).map_err(failed)
        };
        let unfinished = self.unfinished(number);
        set(&unfinished, Bytes::new())?;
        let (mut part, mut parts) = (Vec::new(), 0);
        let mut write = |part: &mut Vec<u8>| {
            let key = self.part(number, parts);
            parts += 1;
            set(&key, std::mem::take(part).into())
        };
        let written = fill(&mut |mut bytes| {
            while !bytes.is_empty() {
                let (taken, rest) = bytes.split_at(bytes.len().min(PART - part.len()));
                part.extend_from_slice(taken);
                bytes = rest;
                if part.len() == PART {
                    write(&mut part)?;
                }
            }
            Ok(())
        });
        let written = written.and_then(|()| write(&mut part)).and_then(|()| {
            may()?;
            set(&self.listed(number), parts.to_string().into())
        });
        if written.is_err()
            && let Err(error) = self.remove_parts(number)
        {
            // The next master finds the parts by the mark that remains.
            tracing::warn!(%error, "cannot remove parts of an abandoned snapshot");
            return written;
        }
        if let Err(error) = self.block_on(self.directory.delete(&unfinished)) {
            tracing::warn!(%error, "cannot remove the mark of an unfinished snapshot");
        }
        written
    }

    /// Removes all but the latest `keep` snapshots.
    pub(super) fn prune(&self, keep: usize) {
        let mut numbers = self.numbers();
        numbers.sort_unstable();
        for number in numbers.iter().rev().skip(keep) {
            if let Err(error) = self.remove(*number) {
                tracing::warn!(path = %self.path(*number).display(), %error, "cannot remove old snapshot");
            }
        }
    }

    fn remove(&self, number: u64) -> Result<()> {
        let unfinished = self.unfinished(number);
        self.block_on(self.directory.put(&unfinished, Bytes::new(), Expect::Any))?;
        self.block_on(self.directory.delete(&self.listed(number)))?;
        self.remove_parts(number)?;
        self.block_on(self.directory.delete(&unfinished)).map(drop)
    }

    /// Removes the parts of a snapshot. The last part goes first, so that the remaining parts can
    /// be found again.
    fn remove_parts(&self, number: u64) -> Result<()> {
        let mut parts = 0;
        while self.block_on(self.directory.get(&self.part(number, parts)))?.is_some() {
            parts += 1;
        }
        for part in (0..parts).rev() {
            self.block_on(self.directory.delete(&self.part(number, part)))?;
        }
        Ok(())
    }

    fn key(&self, what: &str, rest: &str) -> String {
        format!("mooncake-store/{}/snapshots/{what}/{rest}", self.cluster)
    }

    fn listed(&self, number: u64) -> String {
        self.key("whole", &format!("{number:020}"))
    }

    fn unfinished(&self, number: u64) -> String {
        self.key("unfinished", &format!("{number:020}"))
    }

    fn part(&self, number: u64, part: u64) -> String {
        self.key("part", &format!("{number:020}/{part:08}"))
    }

    fn block_on<A>(&self, call: impl Future<Output = Result<A>>) -> Result<A> {
        self.runtime.block_on(call)
    }
}
