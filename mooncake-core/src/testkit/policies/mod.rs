//! Eviction policies of the literature, to compare with. S3-FIFO is in [`evict`](crate::evict).
//!
//! Each policy takes the number of slots that it holds for its capacity. A cache evicts before it
//! inserts, so a policy chooses the victim without the key that follows.

mod arc;
mod lirs;
mod queue;
mod sieve;
mod tiny_lfu;

pub use self::arc::AdaptiveReplacement;
pub use self::lirs::Lirs;
pub use self::sieve::Sieve;
pub use self::tiny_lfu::TinyLfu;
pub use crate::evict::S3Fifo;

// Miri would take long, and there is no unsafe code here to check.
#[cfg(all(test, not(miri)))]
mod scripts;
