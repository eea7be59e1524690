//! Settings of a put.

use std::time::Duration;

use mooncake_core::hints::{KeepPart, PutHints};
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

    /// Names the key of the block before the first key of the call. The eviction policy `gittins`
    /// uses it in place of a guess.
    ///
    /// ```
    /// # use mooncake_client::PutOptions;
    /// // The blocks of a prompt whose first two blocks are stored.
    /// let options = PutOptions::new().parent_key("block 1").position(2);
    /// ```
    pub fn parent_key(mut self, key: impl AsRef<[u8]>) -> Self {
        self.hints_mut().parent = Some(key.as_ref().to_vec());
        self
    }

    /// Sets the number of blocks of the chain before the first key of the call; 0 for a call that
    /// begins a chain.
    pub fn position(mut self, position: u64) -> Self {
        self.hints_mut().position = Some(position);
        self
    }

    /// Names the part of the chain of keys that is of use if not all of its blocks stay.
    pub fn keep(mut self, part: KeepPart) -> Self {
        self.hints_mut().keep = part;
        self
    }

    /// Limits the time for which the objects can be read. It begins at the end of the put, on the
    /// clock of the master.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use mooncake_client::PutOptions;
    /// let options = PutOptions::new().time_to_live(Duration::from_secs(600));
    /// ```
    pub fn time_to_live(mut self, span: Duration) -> Self {
        self.hints_mut().ttl_ms = Some(u64::try_from(span.as_millis()).unwrap_or(u64::MAX));
        self
    }

    /// Deletes each object after its first read. Existence checks are not reads.
    pub fn delete_after_read(mut self) -> Self {
        self.hints_mut().delete_after_read = true;
        self
    }

    /// Replaces all hints.
    pub fn hints(mut self, hints: PutHints) -> Self {
        self.replication.hints = (!hints.is_empty()).then(|| Box::new(hints));
        self
    }

    fn hints_mut(&mut self) -> &mut PutHints {
        self.replication.hints.get_or_insert_default()
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

    #[test]
    fn hints_add_up() {
        let options = PutOptions::new().parent_key("p").position(3).keep(KeepPart::Front);
        let options = options.time_to_live(Duration::from_secs(2)).delete_after_read();
        let hints = PutHints {
            parent: Some(b"p".to_vec()),
            position: Some(3),
            keep: KeepPart::Front,
            ttl_ms: Some(2000),
            delete_after_read: true,
        };
        assert_eq!(options.replication.hints.as_deref(), Some(&hints));
        assert_eq!(PutOptions::new().hints(hints), options);
        assert_eq!(options.hints(PutHints::default()), PutOptions::new());
    }
}
