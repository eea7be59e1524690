//! Master that publishes no events, for a build without feature `events-zmq`.

use std::future::{Ready, ready};
use std::net::SocketAddr;
use std::sync::Arc;

use mooncake_core::clock::SharedClock;
use mooncake_core::ids::ObjectKey;
use mooncake_core::{Error, ErrorCode, Result};

use super::event_stats::EventStats;
use crate::config::EventsConfig;
use mooncake_master::Journal;

/// Queue of unpublished events, which no build without the feature creates.
#[derive(Debug)]
pub(super) enum Feed {}

/// Tasks of a feed, which no build without the feature creates.
#[derive(Debug)]
pub(super) enum Publisher {}

pub(super) fn start(_: &EventsConfig, _: SharedClock) -> Ready<Result<(Arc<Feed>, Publisher, SocketAddr)>> {
    let text = "cannot publish events: --enable_kv_events needs a build with feature `events-zmq`";
    ready(Err(Error::new(ErrorCode::NotSupported, text)))
}

impl Feed {
    pub(super) fn stats(&self) -> EventStats {
        match *self {}
    }

    pub(super) fn observe(&self, _: u32, _: &[u8]) {
        match *self {}
    }
}

impl Journal for Feed {
    fn stored(&self, _: &str, _: &ObjectKey, _: &str, _: Option<&[u8]>) {
        match *self {}
    }

    fn removed(&self, _: &str, _: &ObjectKey, _: &str) {
        match *self {}
    }
}
