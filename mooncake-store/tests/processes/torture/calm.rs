//! The end of a run, without faults: removal of all keys, and objects that a restart of the master
//! must not lose.

use std::time::Duration;

use mooncake_store::client::{PutOptions, PutOutcome};

use super::client::{Actor, UNSETTLED};
use super::value::{HEAD, Label};

/// Number of objects in a batch.
const BATCH: usize = 2000;
/// Maximum number of objects of a client that a restart without other faults must not lose.
const MAX_KEYS: usize = 20_000;
/// First number of their keys.
const FIRST: u64 = 1 << 32;
/// Longest time for the calls of one step.
const LIMIT: Duration = UNSETTLED.saturating_mul(2);

impl Actor {
    /// Removes all keys, with repetitions while writes that were given up protect them.
    pub(super) async fn remove_own(&mut self) -> Result<(), String> {
        let client = self.client.clone();
        let calm = FIRST..FIRST + std::mem::take(&mut self.calm).len() as u64;
        let mut left: Vec<u64> = (0..self.shadows.len() as u64).chain(calm).collect();
        let limit = self.now() + LIMIT;
        while !left.is_empty() {
            let keys: Vec<String> = left.iter().map(|key| self.key(*key)).collect();
            let called = self.call_for("batch_remove", None, client.batch_remove(&keys, true)).await?;
            let results = called.result.unwrap_or_else(|| Ok(Vec::new()));
            let results = self.fine("batch_remove", results)?.unwrap_or_default();
            let mut results = results.into_iter();
            for key in std::mem::take(&mut left) {
                let removed = results.next().map(|result| self.fine("batch_remove", result)).transpose()?;
                match self.shadows.get_mut(key as usize) {
                    _ if removed.flatten().is_none() => left.push(key),
                    Some(shadow) => shadow.remove(called.outcome),
                    None => {}
                }
            }
            if self.now() > limit {
                return Err(format!("cannot remove keys for {LIMIT:?}: {left:?}"));
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        Ok(())
    }

    /// Stores objects in batches, and replaces some of them, beside a whole snapshot of the master.
    /// The last write of each is acknowledged.
    pub(super) async fn store_calmly(&mut self) -> Result<(), String> {
        let (limit, begun) = (self.now() + LIMIT, self.timeline.update());
        let is_done = |actor: &Self| begun.is_none_or(|begun| actor.timeline.is_in_snapshot(begun));
        while !is_done(self) {
            let first = self.calm.len();
            if first < MAX_KEYS {
                self.calm.resize(first + BATCH, 0);
                self.store_batch((first..first + BATCH).collect()).await?;
            }
            let replaced = self.rng.below(self.calm.len() as u64) as usize;
            self.store_batch(vec![replaced]).await?;
            if self.now() > limit {
                return Err(format!("no snapshot for {LIMIT:?}"));
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let mut left: Vec<usize> = (0..self.calm.len()).filter(|key| self.calm[*key] == 0).collect();
        while !left.is_empty() {
            left = self.store_batch(left).await?;
            if self.now() > limit {
                return Err(format!("cannot store keys for {LIMIT:?}: {left:?}"));
            }
        }
        Ok(())
    }

    /// Puts a value for each of these keys. Returns the keys whose put is not acknowledged.
    async fn store_batch(&mut self, keys: Vec<usize>) -> Result<Vec<usize>, String> {
        let client = self.client.clone();
        let labels: Vec<Label> = keys.iter().map(|key| self.next_label(FIRST + *key as u64)).collect();
        let items: Vec<_> =
            labels.iter().map(|label| (self.key(label.key), label.value(HEAD + 50))).collect();
        let upsert = PutOptions::new().upsert();
        let called = self.call_for("batch_put", None, client.batch_put(&items, &upsert)).await?;
        let results = called.result.unwrap_or_else(|| Ok(Vec::new()));
        let mut results = self.fine("batch_put", results)?.unwrap_or_default().into_iter();
        let mut failed = Vec::new();
        for (key, label) in keys.into_iter().zip(labels) {
            let stored = results.next().map(|result| self.fine("batch_put", result)).transpose()?.flatten();
            let is_stored = stored == Some(PutOutcome::Stored);
            self.calm[key] = if is_stored { label.version } else { 0 };
            if !is_stored {
                failed.push(key);
            }
        }
        Ok(failed)
    }

    /// Reads these objects until all are there. Returns the number of missing ones.
    pub(super) async fn count_missing(&mut self) -> Result<usize, String> {
        let client = self.client.clone();
        let limit = self.now() + UNSETTLED;
        let mut missing: Vec<usize> = (0..self.calm.len()).collect();
        loop {
            for keys in std::mem::take(&mut missing).chunks(BATCH) {
                let names: Vec<String> = keys.iter().map(|key| self.key(FIRST + *key as u64)).collect();
                let called = self.call_for("batch_get", None, client.batch_get(&names)).await?;
                let reads = called.result.unwrap_or_else(|| Ok(Vec::new()));
                let mut reads = self.fine("batch_get", reads)?.unwrap_or_default().into_iter();
                for key in keys {
                    let read = reads.next().map(|read| self.fine("batch_get", read)).transpose()?;
                    let Some(bytes) = read.flatten().flatten() else {
                        missing.push(*key);
                        continue;
                    };
                    let label = Label::of(&bytes)?;
                    let wanted =
                        Label { writer: self.writer, key: FIRST + *key as u64, version: self.calm[*key] };
                    if label != wanted {
                        return Err(format!("the restart brings {label:?} back in place of {wanted:?}"));
                    }
                }
            }
            if missing.is_empty() || self.now() > limit {
                return Ok(missing.len());
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}
