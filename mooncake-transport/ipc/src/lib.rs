#![doc = include_str!("../README.md")]
#![cfg(target_os = "linux")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(unsafe_code)]

#[allow(unsafe_code)]
mod board;
mod link;
mod links;
mod owner;
pub mod record;
mod server;
pub mod socket;

pub use link::{Inside, Link, Mapped, MappedRegion, Mapping};
pub use links::{Endpoint, Links};
pub use owner::{Limits, Owner, Seat, Shared, Visitor};
pub use server::{listen, serve};
