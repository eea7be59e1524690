//! Open RocksDB: a safe interface to the library's C functions.

use std::ffi::{CStr, CString, c_char, c_int};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::{null_mut, slice_from_raw_parts};

use mooncake_core::{Error, ErrorCode, Result};

use super::library::{Functions, Handle, Message, library};

/// Recovery mode: an incomplete record at the end of the log is ignored, and any other damage is an
/// error.
const ONLY_A_TORN_END: c_int = 0;
/// Compression setting: values are stored uncompressed, because builds of the library differ in the
/// formats that they read.
const NO_COMPRESSION: c_int = 0;
const WARNINGS: c_int = 2;
const OPEN_FILES: c_int = 64;
/// Size in bytes of the write buffer, and of a file of the library's own log.
const BUFFER: usize = 4 << 20;
const LOG: usize = 1 << 20;
/// Size in bytes of the list of files, which has some hundreds.
const LIST: usize = 64 << 10;
const LOGS: usize = 2;

/// Open database. Closed on drop.
#[derive(Debug)]
pub(super) struct Database {
    functions: &'static Functions,
    database: Handle,
    reads: Handle,
    writes: Handle,
}

// SAFETY: the library permits concurrent calls on a database and on unchanged options from any
// thread.
unsafe impl Send for Database {}
// SAFETY: as above.
unsafe impl Sync for Database {}

/// Change in a batch.
#[derive(Clone, Copy, Debug)]
pub(super) enum Change<'a> {
    Put(&'a [u8], &'a [u8]),
    Delete(&'a [u8]),
}

impl Database {
    /// Opens the database in this folder, or creates it.
    ///
    /// # Errors
    /// Returns `NOT_SUPPORTED` without the library, `CHECKSUM_MISMATCH` for damage, and
    /// `FILE_OPEN_FAIL`.
    pub(super) fn open(folder: &Path) -> Result<Self> {
        let functions = library()?;
        let path = CString::new(folder.as_os_str().as_bytes())
            .map_err(|_| Error::invalid("invalid path: it contains a zero byte"))?;
        // SAFETY: options are created, set, used and destroyed here. The path is terminated.
        unsafe {
            let options = (functions.options_create)();
            (functions.options_set_create_if_missing)(options, 1);
            (functions.options_set_paranoid_checks)(options, 1);
            (functions.options_set_wal_recovery_mode)(options, ONLY_A_TORN_END);
            (functions.options_set_compression)(options, NO_COMPRESSION);
            (functions.options_set_write_buffer_size)(options, BUFFER);
            (functions.options_set_manifest_preallocation_size)(options, LIST);
            (functions.options_set_max_open_files)(options, OPEN_FILES);
            (functions.options_set_keep_log_file_num)(options, LOGS);
            (functions.options_set_max_log_file_size)(options, LOG);
            (functions.options_set_info_log_level)(options, WARNINGS);
            let open = |message| (functions.open)(options, path.as_ptr(), message);
            let database = outcome(functions, ErrorCode::FileOpenFail, open);
            (functions.options_destroy)(options);
            let database = database?;
            if database.is_null() {
                return Err(Error::new(ErrorCode::FileOpenFail, "RocksDB returned no database"));
            }
            let (reads, writes) = ((functions.readoptions_create)(), (functions.writeoptions_create)());
            (functions.writeoptions_set_sync)(writes, 1);
            Ok(Self { functions, database, reads, writes })
        }
    }

    /// Returns the value of a key.
    ///
    /// # Errors
    /// Returns `CHECKSUM_MISMATCH` or `FILE_READ_FAIL`.
    pub(super) fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        let mut length = 0;
        // SAFETY: the handles are open, and the key is only read.
        let value = outcome(self.functions, ErrorCode::FileReadFail, |message| unsafe {
            let (key, bytes) = (key.as_ptr().cast(), key.len());
            (self.functions.get)(self.database, self.reads, key, bytes, &raw mut length, message)
        })?;
        if value.is_null() {
            return Ok(None);
        }
        // SAFETY: the buffer has this length, and this code frees it.
        let copy = unsafe { bytes(value, length) }.to_vec();
        // SAFETY: allocated by the library, and not used any more.
        unsafe { (self.functions.free)(value.cast()) };
        Ok(Some(copy))
    }

    /// Applies all of these changes or none. They are on the disk when the call returns.
    ///
    /// # Errors
    /// Returns `PERSISTENT_FAIL` or `CHECKSUM_MISMATCH`. The changes may then have been applied,
    /// and the database must be opened again.
    pub(super) fn write(&self, changes: &[Change<'_>]) -> Result<()> {
        let functions = self.functions;
        // SAFETY: the batch is created, filled, written and destroyed here. It copies its
        // arguments.
        outcome(functions, ErrorCode::PersistentFail, |message| unsafe {
            let batch = (functions.writebatch_create)();
            for change in changes {
                match change {
                    Change::Put(key, value) => {
                        let (key, key_bytes) = (key.as_ptr().cast(), key.len());
                        (functions.writebatch_put)(batch, key, key_bytes, value.as_ptr().cast(), value.len());
                    }
                    Change::Delete(key) => {
                        (functions.writebatch_delete)(batch, key.as_ptr().cast(), key.len());
                    }
                }
            }
            (functions.write)(self.database, self.writes, batch, message);
            (functions.writebatch_destroy)(batch);
        })
    }

    /// Calls `each` for the keys with a prefix, in order, with their values.
    ///
    /// # Errors
    /// Returns `CHECKSUM_MISMATCH` or `FILE_READ_FAIL`, and the errors of `each`, which end the
    /// scan.
    pub(super) fn scan(&self, prefix: &[u8], mut each: impl FnMut(&[u8], &[u8]) -> Result<()>) -> Result<()> {
        let functions = self.functions;
        // SAFETY: the database is open, and outlives the iterator.
        let cursor = Cursor(functions, unsafe { (functions.create_iterator)(self.database, self.reads) });
        // SAFETY: the prefix is only read.
        unsafe { (functions.iter_seek)(cursor.1, prefix.as_ptr().cast(), prefix.len()) };
        // SAFETY: the iterator is open.
        while unsafe { (functions.iter_valid)(cursor.1) } != 0 {
            let (mut key_bytes, mut value_bytes) = (0, 0);
            // SAFETY: the iterator is at an entry, whose bytes stay valid until it moves, below.
            let (key, value) = unsafe {
                let key = (functions.iter_key)(cursor.1, &raw mut key_bytes);
                let value = (functions.iter_value)(cursor.1, &raw mut value_bytes);
                (bytes(key, key_bytes), bytes(value, value_bytes))
            };
            if !key.starts_with(prefix) {
                break;
            }
            each(key, value)?;
            // SAFETY: the iterator is at an entry. Key and value are not used any more.
            unsafe { (functions.iter_next)(cursor.1) };
        }
        // SAFETY: the iterator is open.
        let error = |message| unsafe { (functions.iter_get_error)(cursor.1, message) };
        outcome(functions, ErrorCode::FileReadFail, error)
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        // SAFETY: the handles have no other user.
        unsafe {
            (self.functions.readoptions_destroy)(self.reads);
            (self.functions.writeoptions_destroy)(self.writes);
            (self.functions.close)(self.database);
        }
    }
}

/// Iterator, destroyed on drop.
struct Cursor(&'static Functions, Handle);

impl Drop for Cursor {
    fn drop(&mut self) {
        // SAFETY: the handle has no other user.
        unsafe { (self.0.iter_destroy)(self.1) };
    }
}

/// # Safety
/// While the slice is used, `length` bytes at `at` are valid. `at` may be invalid if `length` is 0.
unsafe fn bytes<'a>(at: *const c_char, length: usize) -> &'a [u8] {
    if length == 0 {
        return &[];
    }
    // SAFETY: promised by the caller.
    unsafe { &*slice_from_raw_parts(at.cast(), length) }
}

/// Calls a function and converts its error message. The code of the error is the given one, unless
/// the message implies another.
fn outcome<T>(functions: &Functions, code: ErrorCode, call: impl FnOnce(Message) -> T) -> Result<T> {
    let mut message = null_mut();
    let answer = call(&raw mut message);
    if message.is_null() {
        return Ok(answer);
    }
    // SAFETY: a string of the library, which this code frees.
    let text = unsafe { CStr::from_ptr(message) }.to_string_lossy().into_owned();
    // SAFETY: as above. Only the copy is used from here.
    unsafe { (functions.free)(message.cast()) };
    let code = if text.starts_with("Corruption") { ErrorCode::ChecksumMismatch } else { code };
    Err(Error::new(code, text))
}
