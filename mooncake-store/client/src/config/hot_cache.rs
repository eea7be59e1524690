//! Settings of the local cache of values that are read often.

/// How much of what is read from other members a client keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HotCacheConfig {
    /// Bytes of memory for it. Zero: nothing is kept.
    pub bytes: u64,
    /// Longest value that is kept, in bytes.
    pub longest: u64,
    /// A key is kept from this read on; 255 at most.
    pub admission: u32,
}

impl Default for HotCacheConfig {
    fn default() -> Self {
        Self { bytes: 0, longest: 16 << 20, admission: 2 }
    }
}
