//! Open RocksDB: a safe interface to the library's C functions.

use std::ffi::{CStr, CString, c_char, c_int};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::{null_mut, slice_from_raw_parts};

use mooncake_core::{Error, ErrorCode, Result};

use super::library::{Functions, Handle, library};

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
            let options = (functions.options)();
            (functions.create_if_missing)(options, 1);
            (functions.paranoid_checks)(options, 1);
            (functions.wal_recovery_mode)(options, ONLY_A_TORN_END);
            (functions.compression)(options, NO_COMPRESSION);
            (functions.write_buffer_size)(options, BUFFER);
            (functions.manifest_preallocation_size)(options, LIST);
            (functions.max_open_files)(options, OPEN_FILES);
            (functions.keep_log_file_num)(options, LOGS);
            (functions.max_log_file_size)(options, LOG);
            (functions.info_log_level)(options, WARNINGS);
            let mut said = null_mut();
            let database = (functions.open)(options, path.as_ptr(), &raw mut said);
            (functions.options_destroy)(options);
            outcome(functions, said, ErrorCode::FileOpenFail)?;
            if database.is_null() {
                return Err(Error::new(ErrorCode::FileOpenFail, "RocksDB returned no database"));
            }
            let (reads, writes) = ((functions.read_options)(), (functions.write_options)());
            (functions.sync)(writes, 1);
            Ok(Self { functions, database, reads, writes })
        }
    }

    /// Returns the value of a key.
    ///
    /// # Errors
    /// Returns `CHECKSUM_MISMATCH` or `FILE_READ_FAIL`.
    pub(super) fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        let (mut length, mut said) = (0, null_mut());
        // SAFETY: the handles are open, and the key is only read.
        let value = unsafe {
            let (key, bytes) = (key.as_ptr().cast(), key.len());
            (self.functions.get)(self.database, self.reads, key, bytes, &raw mut length, &raw mut said)
        };
        outcome(self.functions, said, ErrorCode::FileReadFail)?;
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
        let mut said = null_mut();
        // SAFETY: the batch is created, filled, written and destroyed here. It copies its
        // arguments.
        unsafe {
            let batch = (self.functions.batch)();
            for change in changes {
                match change {
                    Change::Put(key, value) => {
                        let (key, key_bytes) = (key.as_ptr().cast(), key.len());
                        (self.functions.batch_put)(batch, key, key_bytes, value.as_ptr().cast(), value.len());
                    }
                    Change::Delete(key) => {
                        (self.functions.batch_delete)(batch, key.as_ptr().cast(), key.len());
                    }
                }
            }
            (self.functions.write)(self.database, self.writes, batch, &raw mut said);
            (self.functions.batch_destroy)(batch);
        }
        outcome(self.functions, said, ErrorCode::PersistentFail)
    }

    /// Calls `each` for the keys with a prefix, in order, with their values.
    ///
    /// # Errors
    /// Returns `CHECKSUM_MISMATCH` or `FILE_READ_FAIL`, and the errors of `each`, which end the
    /// scan.
    pub(super) fn scan(&self, prefix: &[u8], mut each: impl FnMut(&[u8], &[u8]) -> Result<()>) -> Result<()> {
        let functions = self.functions;
        // SAFETY: the database is open, and outlives the iterator.
        let cursor = Cursor(functions, unsafe { (functions.iterator)(self.database, self.reads) });
        // SAFETY: the prefix is only read.
        unsafe { (functions.seek)(cursor.1, prefix.as_ptr().cast(), prefix.len()) };
        // SAFETY: the iterator is open.
        while unsafe { (functions.valid)(cursor.1) } != 0 {
            let (mut key_bytes, mut value_bytes) = (0, 0);
            // SAFETY: the iterator is at an entry, whose bytes stay valid until it moves, below.
            let (key, value) = unsafe {
                let key = (functions.key)(cursor.1, &raw mut key_bytes);
                let value = (functions.value)(cursor.1, &raw mut value_bytes);
                (bytes(key, key_bytes), bytes(value, value_bytes))
            };
            if !key.starts_with(prefix) {
                break;
            }
            each(key, value)?;
            // SAFETY: the iterator is at an entry. Key and value are not used any more.
            unsafe { (functions.next)(cursor.1) };
        }
        let mut said = null_mut();
        // SAFETY: the iterator is open.
        unsafe { (functions.iterator_error)(cursor.1, &raw mut said) };
        outcome(functions, said, ErrorCode::FileReadFail)
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        // SAFETY: the handles have no other user.
        unsafe {
            (self.functions.read_options_destroy)(self.reads);
            (self.functions.write_options_destroy)(self.writes);
            (self.functions.close)(self.database);
        }
    }
}

/// Iterator, destroyed on drop.
struct Cursor(&'static Functions, Handle);

impl Drop for Cursor {
    fn drop(&mut self) {
        // SAFETY: the handle has no other user.
        unsafe { (self.0.iterator_destroy)(self.1) };
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

/// Converts the message of a failed function into an error. The code is the given one, unless the
/// message implies another.
fn outcome(functions: &Functions, said: *mut c_char, code: ErrorCode) -> Result<()> {
    if said.is_null() {
        return Ok(());
    }
    // SAFETY: a string of the library, which this code frees.
    let text = unsafe { CStr::from_ptr(said) }.to_string_lossy().into_owned();
    // SAFETY: as above. Only the copy is used from here.
    unsafe { (functions.free)(said.cast()) };
    let code = if text.starts_with("Corruption") { ErrorCode::ChecksumMismatch } else { code };
    Err(Error::new(code, text))
}
