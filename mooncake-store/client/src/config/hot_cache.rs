//! Settings of the local cache of values that are read often.

/// Settings of the cache for values that a client reads from other clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HotCacheConfig {
    /// Size of the cache in bytes. Zero disables the cache.
    pub bytes: u64,
    /// Longest value that is cached, in bytes.
    pub longest: u64,
    /// Number of reads after which a key is cached; 255 at most.
    pub admission: u32,
}

impl Default for HotCacheConfig {
    fn default() -> Self {
        Self { bytes: 0, longest: 16 << 20, admission: 2 }
    }
}
