//! Master without HTTP servers, for a build without feature `http`.

use std::future::{Ready, ready};
use std::net::SocketAddr;
use std::sync::Arc;

use mooncake_core::{Error, ErrorCode, Result};

use super::state::State;

/// HTTP server, which no build without the feature starts.
#[derive(Debug)]
pub(super) enum Pages {}

impl Pages {
    pub(super) fn stop(self) -> Ready<()> {
        match self {}
    }
}

type Started = (Vec<Pages>, Option<SocketAddr>, Option<SocketAddr>);

pub(super) fn start_all(state: &Arc<State>) -> Ready<Result<Started>> {
    ready(match state.config.metadata {
        None => Ok((Vec::new(), None, None)),
        Some(_) => Err(Error::new(
            ErrorCode::NotSupported,
            "cannot start the metadata service: --enable_http_metadata_server needs a build with feature `http`",
        )),
    })
}
