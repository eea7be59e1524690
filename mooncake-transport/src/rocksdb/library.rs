//! librocksdb, loaded when it is first needed, and those functions of its C interface that are used here, as its header `rocksdb/c.h` declares them.

use std::ffi::{CStr, CString, c_char, c_int, c_uchar, c_void};
use std::sync::OnceLock;

use mooncake_core::{Error, ErrorCode, Result};

/// Everything the library makes is a pointer to what only it looks into.
pub(super) type Handle = *mut c_void;
/// Where a function leaves a text when it fails; ours to free.
pub(super) type Said = *mut *mut c_char;

/// Versions that are looked for, beside one without a version, the latest first: their C interface only grows.
const MAJORS: std::ops::RangeInclusive<u32> = 6..=15;
const MINORS: std::ops::RangeInclusive<u32> = 0..=39;

macro_rules! functions {
    ($($name:ident = $symbol:literal ($($arg:ty),*) $(-> $answer:ty)?;)*) => {
        #[derive(Debug)]
        pub(super) struct Functions {
            $(pub(super) $name: unsafe extern "C" fn($($arg),*) $(-> $answer)?,)*
        }

        impl Functions {
            /// Takes addresses from `find`; the name of the first that is missing otherwise.
            ///
            /// # Safety
            /// What `find` gives for a name is RocksDB's function of that name, for good.
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

/// The library's functions, or why there are none; asked for once per process.
///
/// # Errors
/// `NOT_SUPPORTED`, and what to install.
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
        // SAFETY: a text with an end; the library's own initialisers are those of every program that links it.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            // What it says of a library that is there, but lacks something, is worth knowing.
            let said = said();
            if !said.starts_with(&*name.to_string_lossy()) {
                why = format!("cannot be loaded ({said})");
            }
            continue;
        }
        // SAFETY: the handle is open and never closed; names are constants, and those the library exports these functions by.
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
    // SAFETY: after a failed `dlopen` this is a text, or null, which stays until the next call from this thread.
    let said = unsafe { libc::dlerror() };
    match said.is_null() {
        true => "nobody says why".into(),
        // SAFETY: not null, as just seen.
        false => unsafe { CStr::from_ptr(said) }.to_string_lossy().into_owned(),
    }
}
