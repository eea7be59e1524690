//! Common parts of transports between processes of one host. An owner publishes its open memory,
//! and peers publish their copies in progress, both without messages. The transport defines the
//! exchanged description and the mapping ([`Shared`], [`Mapping`]).
//!
//! The owner listens on an abstract Unix socket. Its descriptor contains the name of the socket and
//! the id of the host's boot ([`Endpoint`]). A peer connects, and each side checks the process of
//! the other. The peer then receives the owner's *board*, a *page* of its own, and the list of open
//! regions.

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
