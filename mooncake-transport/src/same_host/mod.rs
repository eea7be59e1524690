//! What wires between processes of one host have in common: an owner says what of its memory is open, peers say when they are in the middle of a copy, and
//! neither needs a message for it. What is shown, and how it is mapped, is the wire's own ([`Shared`], [`Mapping`]).
//!
//! The owner listens on an abstract Unix socket whose name its descriptor carries, with the id of the host's boot ([`Endpoint`]). A peer connects, each side
//! looks at whose process the other is, and the peer is given the owner's *board*, a *page* of its own, and the list of open regions.

mod link;
mod links;
mod owner;
pub mod record;
mod server;
pub mod socket;
#[allow(unsafe_code)]
mod words;

pub use link::{Inside, Link, Mapped, MappedRegion, Mapping};
pub use links::{Endpoint, Links};
pub use owner::{Limits, Owner, Seat, Shared, Visitor};
pub use server::{listen, serve};
