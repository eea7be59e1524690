//! Writes of a shared client. A batch for which there is too little shared memory is written in
//! groups, each with one buffer, so that no call waits while it has another buffer.

use std::borrow::Cow;
use std::sync::Arc;

use mooncake_core::{Error, ErrorCode, ErrorKind, Result};
use mooncake_protocol::api::WriteMode;
use mooncake_protocol::message::WriteObjects;
use mooncake_protocol::parts::part_of;
use mooncake_protocol::wire::ObjectPieces;
use mooncake_transport::{Slice, Transport};

use super::call::PartResults;
use super::client::LocalClient;
use super::objects::{PIECE_LEN, one};
use super::shared::LocalBuf;
use crate::deadline::Deadline;
use crate::payload::PutOutcome;
use crate::put_options::PutOptions;

impl LocalClient {
    /// Stores a value under a new key. The value is copied once, into memory that the daemon also
    /// maps.
    ///
    /// # Errors
    /// Returns the errors of [`Client::put`](crate::Client::put).
    pub async fn put(&self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Result<PutOutcome> {
        self.put_with(key, value, &PutOptions::default()).await
    }

    /// Stores a value as [`put`](Self::put) does, with these settings.
    ///
    /// # Errors
    /// Returns the errors of [`Client::put_with`](crate::Client::put_with).
    pub async fn put_with(
        &self,
        key: impl AsRef<[u8]>,
        value: impl AsRef<[u8]>,
        options: &PutOptions,
    ) -> Result<PutOutcome> {
        self.write_bytes(&[(key.as_ref(), value.as_ref())], options).await.and_then(one)
    }

    /// Stores a value that already lies in shared memory, as [`put_with`](Self::put_with) does but
    /// without a copy.
    ///
    /// # Errors
    /// Returns the errors of [`put_with`](Self::put_with).
    pub async fn put_buf(
        &self,
        key: impl AsRef<[u8]>,
        value: LocalBuf,
        options: &PutOptions,
    ) -> Result<PutOutcome> {
        if !value.is_shared() {
            return self.put_with(key, &value, options).await;
        }
        let pieces = vec![value.shared_range(0, value.len())];
        let items = vec![ObjectPieces { key: key.as_ref(), pieces }];
        let (written, failure) = self.write(items, options, value, &self.inner.deadline()).await;
        failure.map_or_else(|| one(written), Err)
    }

    /// Stores many values with one call. Each value has its own result.
    ///
    /// # Errors
    /// Returns an outer error if the outcome of every value is unknown.
    pub async fn batch_put<K: AsRef<[u8]>, V: AsRef<[u8]>>(
        &self,
        items: &[(K, V)],
        options: &PutOptions,
    ) -> Result<Vec<Result<PutOutcome>>> {
        let items: Vec<_> = items.iter().map(|(key, value)| (key.as_ref(), value.as_ref())).collect();
        self.write_bytes(&items, options).await
    }

    async fn write_bytes(
        &self,
        items: &[(&[u8], &[u8])],
        options: &PutOptions,
    ) -> Result<Vec<Result<PutOutcome>>> {
        let deadline = self.inner.deadline();
        let keys: Vec<&[u8]> = items.iter().map(|(key, _)| *key).collect();
        let mut results = Vec::with_capacity(items.len());
        while results.len() < items.len() {
            let start = results.len();
            // An empty value needs no memory; the daemon refuses it.
            let lens = items[start..].iter().map(|(_, value)| value.len());
            let (mut buffer, count) = match self.inner.allocate_batch(lens, &deadline).await {
                Ok(allocated) => allocated,
                Err(error) => {
                    record_no_space(&mut results, error, items.len())?;
                    continue;
                }
            };
            let mut at = 0;
            let part = items[start..start + count].iter().map(|(key, value)| {
                let pieces = buffer.as_mut().filter(|_| !value.is_empty()).map(|buffer| {
                    buffer[at..at + value.len()].copy_from_slice(value);
                    let range = buffer.shared_range(at, value.len());
                    at += value.len();
                    range
                });
                ObjectPieces { key, pieces: pieces.into_iter().collect() }
            });
            let part = part.collect();
            self.write_group(&mut results, &keys, part, options, buffer, &deadline).await?;
        }
        Ok(results)
    }

    /// Stores many values, each from consecutive pieces. Pieces in shared memory are not copied.
    ///
    /// # Errors
    /// Returns the errors of [`batch_put`](Self::batch_put).
    pub async fn batch_put_pieces<K: AsRef<[u8]>, T: Transport>(
        &self,
        items: &[(K, Vec<Slice<T>>)],
        options: &PutOptions,
    ) -> Result<Vec<Result<PutOutcome>>> {
        let deadline = self.inner.deadline();
        let keys: Vec<&[u8]> = items.iter().map(|(key, _)| key.as_ref()).collect();
        let range = |piece: &Slice<T>| self.inner.memories.find_range(piece.addr(), piece.len());
        let copied = |piece: &Slice<T>| if range(piece).is_some() { 0 } else { piece.len() };
        let mut results = Vec::with_capacity(items.len());
        while results.len() < items.len() {
            let start = results.len();
            let lens = items[start..].iter().map(|(_, pieces)| pieces.iter().map(copied).sum());
            let (mut buffer, count) = match self.inner.allocate_batch(lens, &deadline).await {
                Ok(allocated) => allocated,
                Err(error) => {
                    record_no_space(&mut results, error, items.len())?;
                    continue;
                }
            };
            let (mut at, mut slices) = (0, Vec::new());
            let mut share = |piece: &Slice<T>| {
                if let Some(range) = range(piece) {
                    slices.push(piece.clone());
                    return Ok(range);
                }
                let start = at;
                at += piece.len();
                let into = buffer.as_mut().filter(|buffer| at <= buffer.len()).ok_or_else(unshared)?;
                piece.copy_to(0, &mut into[start..at])?;
                Ok(into.shared_range(start, piece.len()))
            };
            let group = items[start..start + count].iter().map(|(key, pieces)| {
                let pieces = pieces.iter().map(&mut share).collect::<Result<_>>()?;
                Ok(ObjectPieces { key: key.as_ref(), pieces })
            });
            let group = match group.collect::<Result<Vec<_>>>() {
                Ok(group) => group,
                Err(error) if results.is_empty() => return Err(error),
                Err(error) => {
                    // The outcomes of the earlier values are known.
                    results.resize_with(items.len(), || Err(error.clone()));
                    break;
                }
            };
            self.write_group(&mut results, &keys, group, options, (buffer, slices), &deadline).await?;
        }
        Ok(results)
    }

    /// Writes the next values of a batch, and appends their results. Returns the error if it is the
    /// outcome of the whole batch.
    async fn write_group<H: Send + Sync + 'static>(
        &self,
        results: &mut Vec<Result<PutOutcome>>,
        keys: &[&[u8]],
        group: Vec<ObjectPieces<'_>>,
        options: &PutOptions,
        held: H,
        deadline: &Deadline,
    ) -> Result<()> {
        let (at, count) = (results.len(), group.len());
        let of_group;
        let options = match count == keys.len() {
            true => options,
            false => {
                let replication = part_of(&options.replication, at, count, keys.len(), |at| keys[at]);
                of_group = PutOptions { replication: replication.into_owned(), mode: options.mode };
                &of_group
            }
        };
        let (written, failure) = self.write(group, options, held, deadline).await;
        results.extend(written);
        match failure {
            None => {}
            Some(error) if results.is_empty() => return Err(error),
            // The outcomes of the earlier values are known.
            Some(error) => results.resize_with(keys.len(), || Err(error.clone())),
        }
        Ok(())
    }

    /// Writes values. Returns the outcomes of the values from the front whose calls were answered,
    /// and the error of the call about the others.
    async fn write<H: Send + Sync + 'static>(
        &self,
        items: Vec<ObjectPieces<'_>>,
        options: &PutOptions,
        held: H,
        deadline: &Deadline,
    ) -> (Vec<Result<PutOutcome>>, Option<Error>) {
        let PutOptions { replication, mode } = options;
        let len = |item: &ObjectPieces<'_>| item.key.len() + PIECE_LEN * (item.pieces.len() + 1);
        let held = Arc::new(held);
        let written = self.inner.call_each_in_parts(
            &items,
            len,
            |at, part| {
                let config = part_of(replication, at, part.len(), items.len(), |at| items[at].key);
                let hints = config.hints.as_deref().cloned().unwrap_or_default();
                WriteObjects {
                    replace: *mode == WriteMode::Upsert,
                    config,
                    hints: Cow::Owned(hints),
                    objects: Cow::Borrowed(part),
                }
            },
            |_| held.clone(),
            deadline,
        );
        match written.await {
            Ok(PartResults { results, failure, .. }) => {
                let outcome = |existed| if existed { PutOutcome::Existed } else { PutOutcome::Stored };
                (results.into_iter().map(|existed| existed.map(outcome)).collect(), failure)
            }
            Err(error) => (Vec::new(), Some(error)),
        }
    }
}

/// Records that there is no memory for the next of `count` values. If that is a lack of space, the
/// later ones may be shorter. Returns the error if it is the outcome of the whole batch.
fn record_no_space(results: &mut Vec<Result<PutOutcome>>, error: Error, count: usize) -> Result<()> {
    match error.kind() {
        ErrorKind::NoSpace => results.push(Err(error)),
        _ if results.is_empty() => return Err(error),
        _ => results.resize_with(count, || Err(error.clone())),
    }
    Ok(())
}

fn unshared() -> Error {
    Error::new(ErrorCode::RpcFail, "cannot write: memory is not shared any more; mooncake_client was lost")
}
