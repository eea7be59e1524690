//! C interface of the store, `store_c.h`.

#[allow(unsafe_code)]
pub mod calls;
#[allow(unsafe_code)]
mod prefix;
#[allow(unsafe_code)]
mod stores;
#[allow(non_camel_case_types, reason = "names that C programs use")]
pub mod types;
