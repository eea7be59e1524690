//! Reasons of puts that the master refused. A response of the master is only a code, so the client
//! finds the reason in the arguments and in the state of the cluster.

use std::time::Duration;

use mooncake_core::replica::ReplicateConfig;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_protocol::message::CountSegments;
use mooncake_transport::Transport;

use crate::errors::display_key;
use crate::state::Inner;

/// Reason of a refusal without segments.
pub(crate) const NO_SEGMENT: &str = "cannot put object: no client has mounted a segment. \
     segments=0; give a client a global_segment_size, or start mooncake_client";

/// Time to ask the master for the reason of a refusal.
const TIMEOUT: Duration = Duration::from_secs(1);

/// Replaces errors that are only a code with errors that state the reason. `keys` has the key of
/// each outcome.
pub(crate) async fn explain<'k, T: Transport, R>(
    client: &Inner<T>,
    config: &ReplicateConfig,
    keys: impl Iterator<Item = &'k [u8]>,
    outcomes: &mut [Result<R>],
) {
    let mut space = None;
    for (outcome, key) in outcomes.iter_mut().zip(keys) {
        let Err(error) = outcome else { continue };
        if error.message() != error.code().meaning() {
            continue;
        }
        let reason = match error.code() {
            ErrorCode::InvalidParams => invalid(config),
            ErrorCode::NoAvailableHandle => {
                if space.is_none() {
                    space = Some(no_space(client).await);
                }
                space.clone()
            }
            _ => None,
        };
        if let Some(reason) = reason {
            *error = Error::new(error.code(), reason).context(display_key(key)).with_source(error.clone());
        }
    }
}

/// Returns the reason why a master refuses these options.
fn invalid(config: &ReplicateConfig) -> Option<String> {
    if let Err(error) = config.check() {
        return Some(error.message().to_owned());
    }
    let ttl = config.soft_pin_ttl_ms?;
    Some(format!(
        "cannot put object: the master refuses the options, most likely a soft pin above its \
         max_kv_soft_pin_ttl. soft_pin_ttl_ms={ttl}; choose a shorter one"
    ))
}

/// Returns the reason why a master has no space.
async fn no_space<T: Transport>(client: &Inner<T>) -> String {
    let count = tokio::time::timeout(TIMEOUT, client.master.call(CountSegments {})).await;
    if matches!(count, Ok(Ok(0))) {
        return NO_SEGMENT.into();
    }
    // A master of Mooncake C++ or of an older version does not count.
    let count = count.ok().and_then(Result::ok).map_or(String::new(), |count| format!(" segments={count};"));
    format!(
        "cannot put object: no segment has enough free space, and nothing more can be evicted.\
         {count} add segments, use fewer replicas or pins, or store smaller values"
    )
}
