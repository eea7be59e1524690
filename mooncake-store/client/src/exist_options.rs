//! Settings of an existence check.

/// Settings of an existence check. The default has no effect beyond the check.
///
/// ```
/// # use mooncake_client::ExistOptions;
/// let options = ExistOptions::new().prefetch_to_memory(true);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExistOptions {
    pub(crate) prefetch_to_memory: bool,
}

impl ExistOptions {
    /// Creates the default settings.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets whether objects that are found only on disks return to memory, in the background. The
    /// client needs [`PrefetchConfig::on_exist`](crate::PrefetchConfig::on_exist).
    pub fn prefetch_to_memory(mut self, yes: bool) -> Self {
        self.prefetch_to_memory = yes;
        self
    }
}
