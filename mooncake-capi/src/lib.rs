#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(unsafe_code)]

#[allow(unsafe_code, non_snake_case)]
pub mod calls;
mod engines;
#[allow(non_camel_case_types, reason = "names that C programs use")]
pub mod types;
