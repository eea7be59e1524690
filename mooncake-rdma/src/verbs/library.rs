//! libibverbs, loaded when it is first needed.

use std::ffi::CStr;
use std::ptr::NonNull;
use std::sync::OnceLock;

use mooncake_core::{Error, ErrorCode, Result};

use super::ffi::Functions;

/// The functions of the library, or why there are none; asked for once per process.
pub(super) fn library() -> Result<&'static Functions> {
    #[cfg(test)]
    if let Some(fake) = super::fake::library() {
        return Ok(fake);
    }
    static LIBRARY: OnceLock<Result<Functions, String>> = OnceLock::new();
    LIBRARY.get_or_init(load).as_ref().map_err(|why| {
        Error::new(
            ErrorCode::NotSupported,
            format!("RDMA needs libibverbs.so.1 and {why}; install rdma-core (Debian: ibverbs-providers)"),
        )
    })
}

fn load() -> Result<Functions, String> {
    if cfg!(not(all(target_endian = "little", target_pointer_width = "64"))) {
        return Err("is used on 64-bit little-endian machines only".into());
    }
    // SAFETY: a constant name; the library's own initialisers are those of every program that links it.
    let handle = unsafe { libc::dlopen(c"libibverbs.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() {
        // SAFETY: after a failed `dlopen` this is a text, or null, which stays until the next call from this thread.
        let why = unsafe { libc::dlerror() };
        let why = match why.is_null() {
            true => "it is not there".into(),
            // SAFETY: not null, as just seen.
            false => unsafe { CStr::from_ptr(why) }.to_string_lossy().into_owned(),
        };
        return Err(format!("it cannot be loaded ({why})"));
    }
    let find = |name: &'static CStr, version: &'static CStr| {
        // SAFETY: the handle is open and never closed; both texts are constants.
        #[cfg(target_env = "gnu")]
        let address = unsafe { libc::dlvsym(handle, name.as_ptr(), version.as_ptr()) };
        // SAFETY: as above. Other C libraries know no versions and give the default one.
        #[cfg(not(target_env = "gnu"))]
        let address = unsafe { libc::dlsym(handle, name.as_ptr()) };
        let _ = version;
        NonNull::new(address)
    };
    // SAFETY: names and versions are those the library exports these functions by, and it is never unloaded.
    unsafe { Functions::load(find) }
}
