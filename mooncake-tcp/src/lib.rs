#![deny(unsafe_code)]
//! placeholder
