//! Segment names of expired clients.

use std::collections::HashSet;

use mooncake_core::replica::Segment;
use parking_lot::Mutex;

/// Maximum number of names.
const MAX_NAMES: usize = 1 << 16;

/// Segment names of expired clients, which other clients may take.
#[derive(Debug, Default)]
pub(crate) struct ExpiredClients(Mutex<HashSet<String>>);

impl ExpiredClients {
    /// Adds the segments of clients that have expired.
    pub(super) fn note(&self, segments: &[Segment]) {
        let mut names = self.0.lock();
        if names.len() + segments.len() > MAX_NAMES {
            names.clear();
        }
        names.extend(segments.iter().map(|segment| segment.name.clone()));
    }

    /// Returns whether the client with this name has expired.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.0.lock().contains(name)
    }

    /// Removes a name that a client uses again.
    pub(crate) fn forget(&self, name: &str) {
        self.0.lock().remove(name);
    }
}
