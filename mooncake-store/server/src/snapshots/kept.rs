//! Snapshots in a directory of this host's own, such as `rocksdb:///path`.
//!
//! One lies in parts, under keys that are not listed; another key, written last, says how many parts there are. As long as a third one says that a number is
//! unfinished, its parts may be without that key, and go when the next master begins.

use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use mooncake_core::meta::{Expect, MetadataBackend};
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::directory;
use tokio::runtime::Handle;

use super::{Sink, name};

/// Bytes of a part: small enough to be written at once, large enough that syncing them is not what takes the time.
const PART: usize = 1 << 20;

#[derive(Debug)]
pub(super) struct Kept {
    directory: Arc<dyn MetadataBackend>,
    url: String,
    cluster: String,
    runtime: Handle,
}

impl Kept {
    /// Opens the directory. On a thread of a runtime.
    ///
    /// # Errors
    /// Those of [`directory::own`].
    pub(super) fn open(url: &str, cluster: &str) -> Result<Self> {
        let directory = directory::own(url).map_err(|error| error.context("snapshots"))?;
        let runtime = Handle::try_current().map_err(|_| Error::internal("snapshots need a runtime"))?;
        Ok(Self { directory, url: url.to_owned(), cluster: cluster.to_owned(), runtime })
    }

    /// Unfinished ones go.
    ///
    /// # Errors
    /// Those of the directory.
    pub(super) fn clear(&self) -> Result<()> {
        let unfinished = self.key("unfinished", "");
        for (key, _) in self.ask(self.directory.list(&unfinished))? {
            let Ok(number) = key[unfinished.len()..].parse() else { continue };
            // It was finished but for this word.
            if self.ask(self.directory.get(&self.listed(number)))?.is_none() {
                self.remove_parts(number)?;
            }
            self.ask(self.directory.delete(&key))?;
        }
        Ok(())
    }

    pub(super) fn numbers(&self) -> Vec<u64> {
        let listed = self.key("whole", "");
        let found = self.ask(self.directory.list(&listed)).unwrap_or_else(|error| {
            tracing::warn!(%error, "snapshots cannot be listed");
            Vec::new()
        });
        found.into_iter().filter_map(|(key, _)| key[listed.len()..].parse().ok()).collect()
    }

    /// For people.
    pub(super) fn path(&self, number: u64) -> PathBuf {
        format!("{}/{}/{}", self.url, self.cluster, name(number)).into()
    }

    /// # Errors
    /// `FILE_NOT_FOUND`, and those of the directory.
    pub(super) fn read(&self, number: u64) -> Result<Vec<u8>> {
        let missing = |what: &str| {
            Error::new(ErrorCode::FileNotFound, format!("{}: {what} is missing", self.path(number).display()))
        };
        let parts = self.ask(self.directory.get(&self.listed(number)))?.ok_or_else(|| missing("it"))?;
        let parts: Option<u64> = str::from_utf8(&parts.value).ok().and_then(|parts| parts.parse().ok());
        let mut bytes = Vec::new();
        for part in 0..parts.ok_or_else(|| missing("the number of its parts"))? {
            let found = self.ask(self.directory.get(&self.part(number, part)))?;
            bytes.extend_from_slice(&found.ok_or_else(|| missing("a part"))?.value);
        }
        Ok(bytes)
    }

    /// Writes one under a number that is free; nobody else writes here. `may` is asked before it counts.
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
            self.ask(self.directory.put(key, value, Expect::Any)).map(drop).map_err(failed)
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
            // The next master finds them by the word that stays.
            tracing::warn!(%error, "parts of a snapshot that was given up stay");
            return written;
        }
        if let Err(error) = self.ask(self.directory.delete(&unfinished)) {
            tracing::warn!(%error, "a snapshot still counts as unfinished");
        }
        written
    }

    /// Keeps the last ones.
    pub(super) fn prune(&self, keep: usize) {
        let mut numbers = self.numbers();
        numbers.sort_unstable();
        for number in numbers.iter().rev().skip(keep) {
            if let Err(error) = self.remove(*number) {
                tracing::warn!(path = %self.path(*number).display(), %error, "an old snapshot stays");
            }
        }
    }

    fn remove(&self, number: u64) -> Result<()> {
        let unfinished = self.unfinished(number);
        self.ask(self.directory.put(&unfinished, Bytes::new(), Expect::Any))?;
        self.ask(self.directory.delete(&self.listed(number)))?;
        self.remove_parts(number)?;
        self.ask(self.directory.delete(&unfinished)).map(drop)
    }

    /// The last one first, so that those that stay can be found again.
    fn remove_parts(&self, number: u64) -> Result<()> {
        let mut parts = 0;
        while self.ask(self.directory.get(&self.part(number, parts)))?.is_some() {
            parts += 1;
        }
        for part in (0..parts).rev() {
            self.ask(self.directory.delete(&self.part(number, part)))?;
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

    fn ask<A>(&self, call: impl Future<Output = Result<A>>) -> Result<A> {
        self.runtime.block_on(call)
    }
}
