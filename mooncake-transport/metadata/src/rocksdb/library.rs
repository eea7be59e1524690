//! librocksdb, loaded on first use, and the functions of its C interface that this crate uses, as
//! declared in `rocksdb/c.h`.

use std::error::Error as _;
use std::ffi::{c_char, c_int, c_uchar, c_void};
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use mooncake_core::{Error, ErrorCode, Result};

/// Opaque pointer of the library.
pub(super) type Handle = *mut c_void;
/// Pointer to the error message of a failed function. The caller frees the message.
pub(super) type Message = *mut *mut c_char;

/// Versions to search for, newest first, beside a name without a version. Their C interface only
/// grows.
const MAJORS: std::ops::RangeInclusive<u32> = 6..=15;
const MINORS: std::ops::RangeInclusive<u32> = 0..=39;

/// Declares the table of functions, each by its name in the library without `rocksdb_`.
macro_rules! functions {
    ($($name:ident ($($arg:ty),*) $(-> $answer:ty)?;)*) => {
        #[derive(Debug)]
        pub(super) struct Functions {
            $(pub(super) $name: unsafe extern "C" fn($($arg),*) $(-> $answer)?,)*
        }

        impl Functions {
            fn load(library: &Library) -> Result<Self, libloading::Error> {
                Ok(Self {
                    // SAFETY: the type is that of `rocksdb/c.h`, and the library is never closed.
                    $($name: *unsafe { library.get(concat!("rocksdb_", stringify!($name)))? },)*
                })
            }
        }
    };
}

functions! {
    options_create() -> Handle;
    options_destroy(Handle);
    options_set_create_if_missing(Handle, c_uchar);
    options_set_paranoid_checks(Handle, c_uchar);
    options_set_wal_recovery_mode(Handle, c_int);
    options_set_compression(Handle, c_int);
    options_set_write_buffer_size(Handle, usize);
    options_set_manifest_preallocation_size(Handle, usize);
    options_set_max_open_files(Handle, c_int);
    options_set_keep_log_file_num(Handle, usize);
    options_set_max_log_file_size(Handle, usize);
    options_set_info_log_level(Handle, c_int);
    open(Handle, *const c_char, Message) -> Handle;
    close(Handle);
    writeoptions_create() -> Handle;
    writeoptions_destroy(Handle);
    writeoptions_set_sync(Handle, c_uchar);
    readoptions_create() -> Handle;
    readoptions_destroy(Handle);
    get(Handle, Handle, *const c_char, usize, *mut usize, Message) -> *mut c_char;
    free(*mut c_void);
    writebatch_create() -> Handle;
    writebatch_put(Handle, *const c_char, usize, *const c_char, usize);
    writebatch_delete(Handle, *const c_char, usize);
    writebatch_destroy(Handle);
    write(Handle, Handle, Handle, Message);
    create_iterator(Handle, Handle) -> Handle;
    iter_seek(Handle, *const c_char, usize);
    iter_valid(Handle) -> c_uchar;
    iter_next(Handle);
    iter_key(Handle, *mut usize) -> *const c_char;
    iter_value(Handle, *mut usize) -> *const c_char;
    iter_get_error(Handle, Message);
    iter_destroy(Handle);
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
    // The reason of a failure is in the text of the system, which begins with the name of the file.
    let text = |error: libloading::Error| error.source().map_or_else(|| error.to_string(), |e| e.to_string());
    let mut why = "is not there".to_owned();
    for name in names() {
        // SAFETY: the library's initialisers are those of every program that links it.
        match unsafe { Library::open(Some(&name), RTLD_NOW | RTLD_LOCAL) } {
            Ok(library) => {
                let functions = Functions::load(&library);
                // The functions stay valid, because the library is not closed.
                let _ = library.into_raw();
                return functions.map_err(|error| format!("is not complete ({})", text(error)));
            }
            // The message about a library that is present, but incomplete, is useful.
            Err(error) => {
                let text = text(error);
                if !text.starts_with(&name) {
                    why = format!("cannot be loaded ({text})");
                }
            }
        }
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
