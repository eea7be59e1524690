//! C interface of the transfer engine, `transfer_engine_c.h`.

#[allow(unsafe_code, non_snake_case)]
pub mod calls;
mod engines;
#[allow(unsafe_code, non_snake_case)]
pub mod links;
#[allow(unsafe_code, non_snake_case)]
pub mod shutdown;
#[allow(non_camel_case_types, reason = "names that C programs use")]
pub mod types;
