//! An open RocksDB: the library's C interface in safe words.

use std::ffi::{CStr, CString, c_char, c_int};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::{null_mut, slice_from_raw_parts};

use mooncake_core::{Error, ErrorCode, Result};

use super::library::{Functions, Handle, library};

/// A record that a crash cut off at the end of the log is passed over; anything else that is wrong there is an error.
const ONLY_A_TORN_END: c_int = 0;
/// Values are stored as they are: builds of the library differ in what they can unpack.
const NO_COMPRESSION: c_int = 0;
const WARNINGS: c_int = 2;
const OPEN_FILES: c_int = 64;
/// Bytes that are gathered in memory before they become a file, and a file of the library's own log.
const BUFFER: usize = 4 << 20;
const LOG: usize = 1 << 20;
/// Bytes kept for the list of files, which is some hundreds.
const LIST: usize = 64 << 10;
const LOGS: usize = 2;

/// An open database. Closed when dropped.
#[derive(Debug)]
pub(super) struct Database {
    functions: &'static Functions,
    database: Handle,
    reads: Handle,
    writes: Handle,
}

// SAFETY: the library allows calls on a database and on options that nobody changes from any thread, and from several at once.
unsafe impl Send for Database {}
// SAFETY: as above.
unsafe impl Sync for Database {}

/// One of the changes that are made together.
#[derive(Clone, Copy, Debug)]
pub(super) enum Change<'a> {
    Put(&'a [u8], &'a [u8]),
    Delete(&'a [u8]),
}

impl Database {
    /// Opens what is in this folder, or makes it.
    ///
    /// # Errors
    /// `NOT_SUPPORTED` without the library; `CHECKSUM_MISMATCH` for what is damaged; `FILE_OPEN_FAIL`.
    pub(super) fn open(folder: &Path) -> Result<Self> {
        let functions = library()?;
        let path = CString::new(folder.as_os_str().as_bytes())
            .map_err(|_| Error::invalid("a path with a zero byte in it"))?;
        // SAFETY: options are made, set, used and destroyed here; the path has an end.
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
                return Err(Error::new(ErrorCode::FileOpenFail, "RocksDB gives no database"));
            }
            let (reads, writes) = ((functions.read_options)(), (functions.write_options)());
            (functions.sync)(writes, 1);
            Ok(Self { functions, database, reads, writes })
        }
    }

    /// The value of a key.
    ///
    /// # Errors
    /// `CHECKSUM_MISMATCH`, `FILE_READ_FAIL`.
    pub(super) fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        let (mut length, mut said) = (0, null_mut());
        // SAFETY: the handles are open; the key is read only.
        let value = unsafe {
            let (key, bytes) = (key.as_ptr().cast(), key.len());
            (self.functions.get)(self.database, self.reads, key, bytes, &raw mut length, &raw mut said)
        };
        outcome(self.functions, said, ErrorCode::FileReadFail)?;
        if value.is_null() {
            return Ok(None);
        }
        // SAFETY: of this length, and ours to free.
        let copy = unsafe { bytes(value, length) }.to_vec();
        // SAFETY: made by the library, and not used any more.
        unsafe { (self.functions.free)(value.cast()) };
        Ok(Some(copy))
    }

    /// Makes all of these changes or none. They are on the disk when this returns.
    ///
    /// # Errors
    /// `PERSISTENT_FAIL`, `CHECKSUM_MISMATCH`; then they may have been made, and the database must be opened anew.
    pub(super) fn write(&self, changes: &[Change<'_>]) -> Result<()> {
        let mut said = null_mut();
        // SAFETY: the batch is made, filled, written and destroyed here; it copies what it is given.
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

    /// Keys that begin so, in order, with their values.
    ///
    /// # Errors
    /// `CHECKSUM_MISMATCH`, `FILE_READ_FAIL`; those of `each`, which ends it.
    pub(super) fn scan(&self, prefix: &[u8], mut each: impl FnMut(&[u8], &[u8]) -> Result<()>) -> Result<()> {
        let functions = self.functions;
        // SAFETY: the database is open, and outlives the iterator.
        let cursor = Cursor(functions, unsafe { (functions.iterator)(self.database, self.reads) });
        // SAFETY: the prefix is read only.
        unsafe { (functions.seek)(cursor.1, prefix.as_ptr().cast(), prefix.len()) };
        // SAFETY: the iterator is open.
        while unsafe { (functions.valid)(cursor.1) } != 0 {
            let (mut key_bytes, mut value_bytes) = (0, 0);
            // SAFETY: the iterator stands at an entry, whose bytes stay until it is moved, below.
            let (key, value) = unsafe {
                let key = (functions.key)(cursor.1, &raw mut key_bytes);
                let value = (functions.value)(cursor.1, &raw mut value_bytes);
                (bytes(key, key_bytes), bytes(value, value_bytes))
            };
            if !key.starts_with(prefix) {
                break;
            }
            each(key, value)?;
            // SAFETY: it stands at an entry; key and value are not used any more.
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
        // SAFETY: nobody has these any more.
        unsafe {
            (self.functions.read_options_destroy)(self.reads);
            (self.functions.write_options_destroy)(self.writes);
            (self.functions.close)(self.database);
        }
    }
}

/// An iterator, destroyed when dropped.
struct Cursor(&'static Functions, Handle);

impl Drop for Cursor {
    fn drop(&mut self) {
        // SAFETY: nobody has it any more.
        unsafe { (self.0.iterator_destroy)(self.1) };
    }
}

/// # Safety
/// So many bytes lie there, or none and it does not matter where, for as long as the slice is used.
unsafe fn bytes<'a>(at: *const c_char, length: usize) -> &'a [u8] {
    if length == 0 {
        return &[];
    }
    // SAFETY: promised by the caller.
    unsafe { &*slice_from_raw_parts(at.cast(), length) }
}

/// What a function has said about its failure, if it failed, as an error with this code unless it says more.
fn outcome(functions: &Functions, said: *mut c_char, code: ErrorCode) -> Result<()> {
    if said.is_null() {
        return Ok(());
    }
    // SAFETY: a text of the library's, and ours to free.
    let text = unsafe { CStr::from_ptr(said) }.to_string_lossy().into_owned();
    // SAFETY: as above; the copy is what is used from here.
    unsafe { (functions.free)(said.cast()) };
    let code = if text.starts_with("Corruption") { ErrorCode::ChecksumMismatch } else { code };
    Err(Error::new(code, text))
}
