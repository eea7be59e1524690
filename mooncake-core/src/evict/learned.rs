//! [`Learned`]: what policies have learned, kept over a restart.

use crate::Result;

/// Knowledge that the policies of one cache share, and that the policies of a later cache may begin
/// with.
pub trait Learned: Send + Sync {
    /// Returns the number of uses that the knowledge stems from. Uses long ago count less.
    fn uses(&self) -> u64;

    /// Encodes the knowledge, with the version of the encoding.
    fn save(&self) -> Vec<u8>;

    /// Replaces the knowledge. Any bytes may be passed.
    ///
    /// # Errors
    /// `PERSISTENT_FAIL` if the bytes are not those of [`save`](Self::save) of this version. The
    /// knowledge stays as it was then.
    fn load(&self, bytes: &[u8]) -> Result<()>;
}
