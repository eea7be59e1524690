//! Loading of libibverbs, when it is first needed.

use std::ffi::CStr;
use std::ptr::NonNull;
use std::sync::OnceLock;

use mooncake_core::{Error, ErrorCode, Result};

use super::ffi::Functions;

/// Returns the functions of the library, or the reason of a failed load. Loaded once per process.
pub(super) fn library() -> Result<&'static Functions> {
    #[cfg(test)]
    if let Some(fake) = super::fake::library() {
        return Ok(fake);
    }
    static LIBRARY: OnceLock<Result<Functions, String>> = OnceLock::new();
    LIBRARY.get_or_init(load).as_ref().map_err(|why| {
        Error::new(
            ErrorCode::NotSupported,
            format!("cannot use RDMA: cannot load libibverbs.so.1: {why}; install rdma-core (Debian: ibverbs-providers)"),
        )
    })
}

fn load() -> Result<Functions, String> {
    if cfg!(not(all(target_endian = "little", target_pointer_width = "64"))) {
        return Err("only 64-bit little-endian machines are supported".into());
    }
    // SAFETY: a constant name; every program that links the library runs the same initialisers.
    let handle = unsafe { libc::dlopen(c"libibverbs.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() {
        // SAFETY: after a failed `dlopen` this is a string or null, valid until the next call from
        // this thread.
        let why = unsafe { libc::dlerror() };
        return Err(match why.is_null() {
            true => "file not found".into(),
            // SAFETY: not null, as checked above.
            false => unsafe { CStr::from_ptr(why) }.to_string_lossy().into_owned(),
        });
    }
    let find = |name: &'static CStr, version: &'static CStr| {
        // SAFETY: the handle is open and never closed; both strings are constants.
        #[cfg(target_env = "gnu")]
        let address = unsafe { libc::dlvsym(handle, name.as_ptr(), version.as_ptr()) };
        // SAFETY: as above. Other C libraries have no versions and return the default one.
        #[cfg(not(target_env = "gnu"))]
        let address = unsafe { libc::dlsym(handle, name.as_ptr()) };
        let _ = version;
        NonNull::new(address)
    };
    // SAFETY: the library exports these functions under these names and versions, and is never
    // unloaded.
    unsafe { Functions::load(find) }
}
