#![doc = include_str!("../README.md")]
#![cfg(target_os = "linux")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(unsafe_code)]

mod link;
mod links;
mod owner;
pub mod record;
mod server;
#[allow(unsafe_code)]
mod shared_words;
pub mod socket;

pub use link::{CopyGuard, Link, Mapped, MappedRegion, Mapping};
pub use links::{Endpoint, Links};
pub use owner::{Limits, OpenRegion, Owner, PeerProcess, SharedObject};
pub use server::{listen, serve};
