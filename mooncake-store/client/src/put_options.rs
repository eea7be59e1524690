//! Settings of a put.

use mooncake_core::replica::{ReplicateConfig, SoftPin};
use mooncake_protocol::api::WriteMode;

/// Settings of a put. The default stores one copy, which can be evicted, under a new key.
///
/// ```
/// # use mooncake_client::PutOptions;
/// let options = PutOptions::new().replicas(2).upsert();
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PutOptions {
    pub(crate) replication: ReplicateConfig,
    pub(crate) mode: WriteMode,
}

impl Default for PutOptions {
    fn default() -> Self {
        ReplicateConfig::default().into()
    }
}

impl From<ReplicateConfig> for PutOptions {
    fn from(replication: ReplicateConfig) -> Self {
        Self { replication, mode: WriteMode::Put }
    }
}

impl PutOptions {
    /// Creates the default settings.
    pub fn new() -> Self {
        Self::default()
    }

    /// Replaces the present value of the key if there is one. Readers see the old value or the new
    /// one, never a mixture.
    pub fn upsert(mut self) -> Self {
        self.mode = WriteMode::Upsert;
        self
    }

    /// Sets the number of copies, each in another segment. The master makes fewer copies if it has
    /// no space for all, but at least one.
    pub fn replicas(mut self, replicas: u64) -> Self {
        self.replication.replicas = replicas;
        self
    }

    /// Protects the object from eviction while other objects can be evicted.
    pub fn soft_pin(mut self) -> Self {
        self.replication.soft_pin = SoftPin::Enable;
        self
    }

    /// Protects the object from eviction. Only an explicit remove deletes the object.
    pub fn hard_pin(mut self) -> Self {
        self.replication.hard_pin = true;
        self
    }

    /// Adds the name of a segment to try first. Segments are tried in the order of these calls.
    pub fn prefer_segment(mut self, name: impl Into<String>) -> Self {
        self.replication.preferred_segments.push(name.into());
        self
    }

    /// Prefers segments on the host of the writer.
    pub fn same_node(mut self) -> Self {
        self.replication.same_node = true;
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_add_up() {
        let options = PutOptions::new().replicas(3).soft_pin().hard_pin().same_node().upsert();
        let options = options.prefer_segment("a:1").prefer_segment("b:1");
        let replication = ReplicateConfig {
            replicas: 3,
            soft_pin: SoftPin::Enable,
            hard_pin: true,
            same_node: true,
            preferred_segments: vec!["a:1".into(), "b:1".into()],
            ..ReplicateConfig::default()
        };
        assert_eq!(options, PutOptions { replication, mode: WriteMode::Upsert });
    }
}
