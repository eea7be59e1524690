//! Master without HTTP endpoints, for a build without feature `http`.

use std::sync::atomic::AtomicU64;

use mooncake_core::replica::Segment;

use crate::config::tenants;

/// State that the HTTP endpoints of one master share.
#[derive(Debug)]
pub(super) struct EndpointState {
    /// Always zero, because nothing serves metadata.
    pub(super) entries_refused: AtomicU64,
}

impl EndpointState {
    pub(super) fn new(_: Option<tenants::Store>) -> Self {
        Self { entries_refused: AtomicU64::new(0) }
    }

    pub(super) fn note_expired(&self, _: &[Segment]) {}
}
