//! Master without HTTP endpoints, for a build without feature `http`.

use mooncake_core::replica::Segment;

use crate::config::tenants;

/// State that the HTTP endpoints of one master share.
#[derive(Debug)]
pub(super) struct EndpointState;

impl EndpointState {
    pub(super) fn new(_: Option<tenants::Store>) -> Self {
        Self
    }

    pub(super) fn note_expired(&self, _: &[Segment]) {}
}
