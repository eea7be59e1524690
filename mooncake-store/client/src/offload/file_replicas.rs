//! File replicas: written after puts, read when no other replica is left, and removed together with
//! their objects.

use std::sync::Arc;

use mooncake_core::ids::ReplicaId;
use mooncake_core::replica::{ReplicaList, ReplicaType};
use mooncake_core::{ErrorCode, ErrorKind, Result};
use mooncake_transport::Transport;

use crate::attempt::Attempt;
use crate::buffers::COPY_CHUNK;
use crate::deadline::{Deadline, deadline_exceeded};
use crate::disk::{Files, GrantedFile, QueuePermit};
use crate::payload::Payload;
use crate::state::Inner;
use mooncake_protocol::api::{EndItem, WriteMode};

/// Number of attempts to report a written file to the master.
const MAX_ATTEMPTS: usize = 3;
/// Part of the time of a write that it waits for the files of earlier values: a file system that
/// hangs leaves time for the error.
const FILE_WAIT_DIVISOR: u32 = 4;
/// Number of keys in one request to the master.
const MAX_KEYS: usize = 1024;

/// A file that the master granted to a put.
pub(crate) struct FilePut {
    pub(crate) attempt: Attempt,
    pub(crate) key: Vec<u8>,
    pub(crate) file: FileGrant,
    pub(crate) checksum: Option<u64>,
}

/// Name of a granted file. `granted` is absent if this client has no folder for files.
pub(crate) struct FileGrant {
    path: String,
    granted: Option<GrantedFile>,
}

impl<T: Transport> Inner<T> {
    /// Registers a file that the master granted to a write, unless it is reserved.
    pub(crate) fn file_grant(&self, key: &[u8], path: &str, reserved: Option<GrantedFile>) -> FileGrant {
        let granted = || self.files.as_ref().map(|files| files.granted(key));
        FileGrant { path: path.to_owned(), granted: reserved.or_else(granted) }
    }

    /// Reserves files for new values, before they are announced to a master that does not [fence
    /// writes](mooncake_protocol::master_client::MasterClient::fences_writes). Waits until the
    /// files of earlier values are reported: the master would take a late report for that of the
    /// new file. Returns none for other masters.
    ///
    /// # Errors
    /// `RPC_TIMEOUT` if a file is not reported within a quarter of the time.
    pub(crate) async fn reserve_files<'k>(
        &self,
        keys: impl Iterator<Item = &'k [u8]>,
        deadline: &Deadline,
    ) -> Result<Vec<GrantedFile>> {
        match &self.files {
            Some(files) if !self.master.fences_writes() => {
                let keys: Vec<&[u8]> = keys.collect();
                tokio::time::timeout(deadline.left() / FILE_WAIT_DIVISOR, files.reserve(&keys))
                    .await
                    .map_err(|_| deadline_exceeded("files of earlier values"))
            }
            _ => Ok(Vec::new()),
        }
    }

    /// Writes a stored value to its file in the background. Returns `put` as the error if no file
    /// can be written.
    pub(crate) async fn write_file_in_background(
        self: &Arc<Self>,
        put: FilePut,
        value: &Payload<'_, T>,
    ) -> std::result::Result<(), FilePut> {
        let (Some(files), Some(_)) = (&self.files, &put.file.granted) else { return Err(put) };
        let Some(queue_permit) = files.acquire_queue_permit(value.len()) else { return Err(put) };
        match copy_of(value).await {
            Ok(bytes) => {
                self.runtime.spawn(write(self.clone(), files.clone(), put, bytes, queue_permit));
                Ok(())
            }
            Err(error) => {
                tracing::debug!("a value is not written to a file: {error}");
                Err(put)
            }
        }
    }

    /// Removes the files of objects that were removed.
    pub(crate) fn forget_files<'k>(&self, keys: impl Iterator<Item = &'k [u8]>) {
        let Some(files) = &self.files else { return };
        let paths = files.remove_keys(keys);
        if !paths.is_empty() {
            let files = files.clone();
            self.runtime.spawn(async move { files.unlink_all(paths).await });
        }
    }

    /// Removes the files of objects that no longer exist. Called after a removal of many unknown
    /// keys: the master is asked for the keys of all files of this client.
    pub(crate) fn remove_orphaned_files(self: &Arc<Self>) {
        let Some(files) = self.files.clone() else { return };
        let own = files.own();
        if own.is_empty() {
            return;
        }
        let client = self.clone();
        self.runtime.spawn(async move {
            for chunk in own.chunks(MAX_KEYS) {
                let keys: Vec<&[u8]> = chunk.iter().map(|(key, _)| &**key).collect();
                // No replica is named, so the only read of an object is left to its reader. Such an
                // object has no file.
                let replicas = vec![ReplicaId(0); keys.len()];
                let locate = client.master.locate_again(&client.config.tenant, &keys, &replicas);
                let Ok(results) = client.deadline().bound("replica list", locate).await else { return };
                let is_absent = |result: &Result<ReplicaList>| {
                    result.as_ref().is_err_and(|e| e.kind() == ErrorKind::NotFound)
                };
                for ((key, path), _) in chunk.iter().zip(results).filter(|(_, result)| is_absent(result)) {
                    files.forget(key, path).await;
                }
            }
        });
    }

    /// Reports keys to the master whose files are permanently unreadable. Without the report, the
    /// keys would stay occupied.
    pub(crate) fn report_files(self: &Arc<Self>, keys: Vec<Vec<u8>>) {
        if keys.is_empty() {
            return;
        }
        let client = self.clone();
        self.runtime.spawn(async move { client.report_dropped_files(&keys).await });
    }

    async fn report_dropped_files(&self, keys: &[Vec<u8>]) {
        let keys: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
        let call = self.master.drop_from_disk(self.id, &self.config.tenant, &keys, ReplicaType::Disk);
        if let Err(error) = self.deadline().bound("files that are gone", call).await {
            tracing::debug!("the master was not notified of removed files: {error}");
        }
    }
}

async fn write<T: Transport>(
    client: Arc<Inner<T>>,
    files: Arc<Files>,
    put: FilePut,
    bytes: Vec<u8>,
    queue_permit: QueuePermit,
) {
    let mark = client.rng.lock().next_u64();
    let (path, len) = (&*put.file.path, bytes.len() as u64);
    let (written, evicted_keys) = files.write(path, bytes, mark).await;
    if !evicted_keys.is_empty() {
        client.report_dropped_files(&evicted_keys).await;
    }
    match (written, &put.file.granted) {
        (Ok(()), Some(granted)) if report_written(&client, &put).await => {
            files.record_written(granted, path, len).await;
        }
        // The key has another value by now, or none. The file is removed before a reader takes it
        // for the value of the key.
        (Ok(()), _) => files.discard(path, len).await,
        (Err(_), _) => {
            put.attempt.refuse_files(&client, &[&put.key]).await;
            // The file of an earlier value.
            files.forget(&put.key, std::path::Path::new(path)).await;
        }
    }
    drop(queue_permit);
}

/// Reports a written file to the master. Returns whether the master lists the file now.
async fn report_written<T: Transport>(client: &Inner<T>, put: &FilePut) -> bool {
    let items = [EndItem { key: &put.key, checksum: put.checksum }];
    for _ in 0..MAX_ATTEMPTS {
        if !put.attempt.is_unambiguous(client) {
            return false;
        }
        let caller = client.caller(put.attempt.number);
        let end = client.master.put_end(caller, WriteMode::Put, &items, ReplicaType::Disk);
        match client.deadline().bound("end of a file", end).await {
            Ok(results) => return results.iter().all(Result::is_ok),
            Err(error) => tracing::debug!("the master was not notified of a file: {error}"),
        }
    }
    false
}

async fn copy_of<T: Transport>(value: &Payload<'_, T>) -> Result<Vec<u8>> {
    let mut bytes = vec![0; value.len()];
    for (part, chunk) in bytes.chunks_mut(COPY_CHUNK).enumerate() {
        if part > 0 {
            tokio::task::yield_now().await;
        }
        value.copy_to(part * COPY_CHUNK, chunk)?;
    }
    Ok(bytes)
}

/// Returns whether an error of a file is probably permanent.
pub(crate) fn is_missing_file(error: &mooncake_core::Error) -> bool {
    error.code() == ErrorCode::TransferFail
}
