//! Arguments of calls from C, and the guard around each call.

use std::ffi::{CStr, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::slice;

use mooncake_core::{Error, Result};

/// Runs a call that returns a value, or `otherwise` when it fails. No panic leaves this function.
pub(crate) fn guarded<R>(name: &str, otherwise: R, work: impl FnOnce() -> Result<R>) -> R {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(value)) => value,
        Ok(Err(error)) => {
            tracing::warn!(call = name, "{error}");
            otherwise
        }
        // The panic message is on standard error.
        Err(_) => otherwise,
    }
}

/// Copies a string from C.
///
/// # Safety
/// The pointer is NULL, or the string ends with a zero byte.
pub(crate) unsafe fn text(from: *const c_char) -> Result<String> {
    if from.is_null() {
        return Err(Error::invalid("invalid string: NULL"));
    }
    // SAFETY: promised by the caller.
    let text = unsafe { CStr::from_ptr(from) };
    text.to_str().map(str::to_owned).map_err(|_| Error::invalid("invalid string: not UTF-8"))
}

/// Returns a list from C as a slice.
///
/// # Safety
/// There are that many entries at `from`, or it is NULL.
pub(crate) unsafe fn list<'a, T>(from: *const T, count: usize) -> Result<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    if from.is_null() || !from.is_aligned() || count > isize::MAX as usize / size_of::<T>().max(1) {
        return Err(Error::invalid(format!(
            "invalid list: pointer is NULL or not aligned, or count is too large. count={count}"
        )));
    }
    // SAFETY: promised by the caller.
    Ok(unsafe { slice::from_raw_parts(from, count) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_panic_leaves_a_call() {
        assert_eq!(guarded("test", 7, || panic!("inside of a call")), 7);
        assert_eq!(guarded("test", 7, || Ok(1)), 1);
        assert_eq!(guarded("test", 7, || Err(Error::internal("failed"))), 7);
    }

    #[test]
    fn impossible_lists_are_refused() {
        let numbers = [1u64, 2, 3];
        // SAFETY: the list has that many entries wherever it is read.
        unsafe {
            assert_eq!(list(numbers.as_ptr(), 3).unwrap(), numbers);
            assert!(list(std::ptr::null::<u64>(), 0).unwrap().is_empty());
            assert!(list(std::ptr::null::<u64>(), 1).is_err());
            assert!(list(numbers.as_ptr().cast::<u8>().wrapping_add(1).cast::<u64>(), 1).is_err());
            assert!(list(numbers.as_ptr(), usize::MAX / 8).is_err());
        }
    }
}
