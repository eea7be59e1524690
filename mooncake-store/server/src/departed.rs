//! Names of segments whose client died.

use std::collections::HashSet;

use mooncake_core::replica::Segment;
use parking_lot::Mutex;

/// Names that are remembered at most.
const MOST: usize = 1 << 16;

/// Whose names may be taken by others.
#[derive(Debug, Default)]
pub(super) struct Departed(Mutex<HashSet<String>>);

impl Departed {
    /// The clients of these were silent too long.
    pub(super) fn note(&self, segments: &[Segment]) {
        let mut names = self.0.lock();
        if names.len() + segments.len() > MOST {
            names.clear();
        }
        names.extend(segments.iter().map(|segment| segment.name.clone()));
    }

    /// Whether the client of this name died.
    #[cfg(feature = "http")]
    pub(super) fn has(&self, name: &str) -> bool {
        self.0.lock().contains(name)
    }

    /// Somebody else goes by this name from now on.
    #[cfg(feature = "http")]
    pub(super) fn forget(&self, name: &str) {
        self.0.lock().remove(name);
    }
}
