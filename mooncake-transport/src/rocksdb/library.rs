//! librocksdb, loaded on first use, and the functions of its C interface that this crate uses, as
//! declared in `rocksdb/c.h`.

use std::ffi::{CStr, CString, c_char, c_int, c_uchar, c_void};
use std::sync::OnceLock;

use mooncake_core::{Error, ErrorCode, Result};

/// Opaque pointer of the library.
pub(super) type Handle = *mut c_void;
/// Pointer to the error message of a failed function. The caller frees the message.
pub(super) type Said = *mut *mut c_char;

/// Versions to search for, newest first, beside a name without a version. Their C interface only
/// grows.
const MAJORS: std::ops::RangeInclusive<u32> = 6..=15;
const MINORS: std::ops::RangeInclusive<u32> = 0..=39;

macro_rules! functions {
    ($($name:ident = $symbol:literal ($($arg:ty),*) $(-> $answer:ty)?;)*) => {
        #[derive(Debug)]
        pub(super) struct Functions {
            $(pub(super) $name: unsafe extern "C" fn($($arg),*) $(-> $answer)?,)*
        }

        impl Functions {
            /// Takes function addresses from `find`. Returns the name of the first missing function
            /// otherwise.
            ///
            /// # Safety
            /// The results of `find` are RocksDB's functions of these names, for the life of the
            /// process.
            unsafe fn load(find: impl Fn(&CStr) -> *mut c_void) -> Result<Self, &'static str> {
                Ok(Self {
                    $($name: {
                        let found = find($symbol);
                        if found.is_null() {
                            return Err($symbol.to_str().unwrap_or("a function"));
                        }
                        // SAFETY: promised by the caller.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) $(-> $answer)?>(found) }
                    },)*
                })
            }
        }
    };
}

functions! {
    options = c"rocksdb_options_create" () -> Handle;
    options_destroy = c"rocksdb_options_destroy" (Handle);
    create_if_missing = c"rocksdb_options_set_create_if_missing" (Handle, c_uchar);
    paranoid_checks = c"rocksdb_options_set_paranoid_checks" (Handle, c_uchar);
    wal_recovery_mode = c"rocksdb_options_set_wal_recovery_mode" (Handle, c_int);
    compression = c"rocksdb_options_set_compression" (Handle, c_int);
    write_buffer_size = c"rocksdb_options_set_write_buffer_size" (Handle, usize);
    manifest_preallocation_size = c"rocksdb_options_set_manifest_preallocation_size" (Handle, usize);
    max_open_files = c"rocksdb_options_set_max_open_files" (Handle, c_int);
    keep_log_file_num = c"rocksdb_options_set_keep_log_file_num" (Handle, usize);
    max_log_file_size = c"rocksdb_options_set_max_log_file_size" (Handle, usize);
    info_log_level = c"rocksdb_options_set_info_log_level" (Handle, c_int);
    open = c"rocksdb_open" (Handle, *const c_char, Said) -> Handle;
    close = c"rocksdb_close" (Handle);
    write_options = c"rocksdb_writeoptions_create" () -> Handle;
    write_options_destroy = c"rocksdb_writeoptions_destroy" (Handle);
    sync = c"rocksdb_writeoptions_set_sync" (Handle, c_uchar);
    read_options = c"rocksdb_readoptions_create" () -> Handle;
    read_options_destroy = c"rocksdb_readoptions_destroy" (Handle);
    get = c"rocksdb_get" (Handle, Handle, *const c_char, usize, *mut usize, Said) -> *mut c_char;
    free = c"rocksdb_free" (*mut c_void);
    batch = c"rocksdb_writebatch_create" () -> Handle;
    batch_put = c"rocksdb_writebatch_put" (Handle, *const c_char, usize, *const c_char, usize);
    batch_delete = c"rocksdb_writebatch_delete" (Handle, *const c_char, usize);
    batch_destroy = c"rocksdb_writebatch_destroy" (Handle);
    write = c"rocksdb_write" (Handle, Handle, Handle, Said);
    iterator = c"rocksdb_create_iterator" (Handle, Handle) -> Handle;
    seek = c"rocksdb_iter_seek" (Handle, *const c_char, usize);
    valid = c"rocksdb_iter_valid" (Handle) -> c_uchar;
    next = c"rocksdb_iter_next" (Handle);
    key = c"rocksdb_iter_key" (Handle, *mut usize) -> *const c_char;
    value = c"rocksdb_iter_value" (Handle, *mut usize) -> *const c_char;
    iterator_error = c"rocksdb_iter_get_error" (Handle, Said);
    iterator_destroy = c"rocksdb_iter_destroy" (Handle);
}

/// Returns the library's functions, or the reason for their absence. The search runs once per
/// process.
///
/// # Errors
/// Returns `NOT_SUPPORTED`, with the package to install.
pub(super) fn library() -> Result<&'static Functions> {
    static LIBRARY: OnceLock<Result<Functions, String>> = OnceLock::new();
    LIBRARY.get_or_init(load).as_ref().map_err(|why| {
        Error::new(
            ErrorCode::NotSupported,
            format!("needs the library of RocksDB, which {why}; install it (Debian 12: librocksdb7.8)"),
        )
    })
}

fn load() -> Result<Functions, String> {
    let mut why = "is not there".to_owned();
    for name in names() {
        let Ok(name) = CString::new(name) else { continue };
        // SAFETY: a terminated string. The library's initialisers are those of every program that
        // links it.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            // The message about a library that is present, but incomplete, is useful.
            let said = said();
            if !said.starts_with(&*name.to_string_lossy()) {
                why = format!("cannot be loaded ({said})");
            }
            continue;
        }
        // SAFETY: the handle is open and never closed. Names are constants, under which the library
        // exports these functions.
        let functions = unsafe { Functions::load(|symbol| libc::dlsym(handle, symbol.as_ptr())) };
        return functions.map_err(|symbol| format!("as {} has no {symbol}", name.to_string_lossy()));
    }
    Err(why)
}

fn names() -> impl Iterator<Item = String> {
    let (start, end) =
        if cfg!(target_os = "macos") { ("librocksdb", ".dylib") } else { ("librocksdb.so", "") };
    let numbered = MAJORS.rev().flat_map(move |major| {
        let minors = MINORS.rev().map(move |minor| format!("{start}.{major}.{minor}{end}"));
        std::iter::once(format!("{start}.{major}{end}")).chain(minors)
    });
    std::iter::once(format!("{start}{end}")).chain(numbered)
}

fn said() -> String {
    // SAFETY: after a failed `dlopen` this is a string, or null, valid until the next call from
    // this thread.
    let said = unsafe { libc::dlerror() };
    match said.is_null() {
        true => "no reason reported".into(),
        // SAFETY: not null, as checked above.
        false => unsafe { CStr::from_ptr(said) }.to_string_lossy().into_owned(),
    }
}
