//! Retry of a request for space while the cluster is full. Leases expire, readers end, other
//! clients remove objects, and new clients offer memory. A request that can only be refused is not
//! retried.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use mooncake_core::clock::Moment;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::replica::ReplicateConfig;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_protocol::api::{PutItem, WriteMode};
use mooncake_protocol::master_client::is_missing_call;
use mooncake_protocol::message::CheckSpace;
use mooncake_protocol::parts::{KEY_OVERHEAD, front};
use mooncake_protocol::wire::SpaceOutlook;
use mooncake_transport::Transport;

use crate::deadline::Deadline;
use crate::errors::display_key;
use crate::refusals::NO_SEGMENT;
use crate::state::Inner;

/// First pause: about the time that a master of Mooncake C++ takes to evict. Each pause is twice as
/// long as the one before, up to `MAX_PAUSE`.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const MAX_PAUSE: Duration = Duration::from_millis(500);
/// Time to ask the master whether waiting may help.
const OUTLOOK_TIMEOUT: Duration = Duration::from_secs(1);

/// Pauses of one operation, and the time of its last request for space.
pub(crate) struct RetryOnFull {
    until: Moment,
    pause: Duration,
    /// Reason why waiting cannot help.
    refusal: Option<Error>,
    /// True if the master does not say whether waiting may help.
    lacks_outlook: bool,
}

/// Maximum number of upserts that the master is asked about.
const MAX_UPSERTS: usize = 4096;

/// Age of a master up to which clients may still mount their segments again.
const REMOUNT_PERIOD: Duration = Duration::from_secs(15);

impl RetryOnFull {
    /// Starts the waiting time of an operation. The last eighth of `deadline` is left for the
    /// transfer.
    pub(crate) fn new<T: Transport>(client: &Inner<T>, deadline: &Deadline) -> Self {
        let limit = client.config.clock.now().after(client.config.space_timeout);
        let until = deadline.portion(7, 8).min(limit);
        Self { until, pause: FIRST_PAUSE, refusal: None, lacks_outlook: false }
    }

    /// Waits for one pause. Returns whether the caller asks again for these objects. Half of each
    /// pause is random, so that waiting clients do not ask at the same time.
    pub(crate) async fn wait<'i, T: Transport>(
        &mut self,
        client: &Inner<T>,
        mode: WriteMode,
        config: &ReplicateConfig,
        items: impl Iterator<Item = PutItem<'i>>,
    ) -> bool {
        let deadline = Deadline::after(&client.config.clock, OUTLOOK_TIMEOUT);
        if client.report_reads(&deadline).await && client.config.clock.now() < self.until {
            // Space that waited for these reads is free.
            return true;
        }
        let items: Vec<PutItem<'_>> = items.collect();
        if self.is_hopeless(client, mode, config, &items, &deadline).await {
            return false;
        }
        let left = self.until.since(client.config.clock.now());
        if left.is_zero() || client.usable().is_err() {
            return false;
        }
        let half = self.pause / 2;
        let jitter = client.rng.lock().below(u64::try_from(half.as_nanos()).unwrap_or(u64::MAX));
        self.pause = (self.pause * 2).min(MAX_PAUSE);
        tokio::time::sleep((half + Duration::from_nanos(jitter)).min(left)).await;
        true
    }
}

impl RetryOnFull {
    /// Asks the master whether waiting may help one of these objects. Without a response, it may.
    async fn is_hopeless<T: Transport>(
        &mut self,
        client: &Inner<T>,
        mode: WriteMode,
        config: &ReplicateConfig,
        items: &[PutItem<'_>],
        deadline: &Deadline,
    ) -> bool {
        if self.lacks_outlook || is_planted("hopeless-puts-wait") {
            return false;
        }
        let segment_name = config.preferred().first().map_or("", String::as_str);
        let len = items.iter().map(|item| item.len).min().unwrap_or_default();
        let (mut keys, mut sizes) = (Vec::new(), vec![len]);
        let mut is_complete = true;
        if mode == WriteMode::Upsert {
            let upserts = front(items, MAX_UPSERTS, |item| item.key.len() + KEY_OVERHEAD);
            is_complete = upserts.len() == items.len();
            keys = upserts.iter().map(|item| item.key).collect();
            sizes = upserts.iter().map(|item| item.len).collect();
        }
        let tenant = &client.config.tenant;
        let request = CheckSpace { keys: keys.into(), sizes: sizes.into(), segment_name, tenant };
        let call = client.master.call(request);
        let SpaceOutlook { reason, age_ms } = match deadline.bound("outlook of a put", call).await {
            Ok(outlook) => outlook,
            Err(error) => {
                self.lacks_outlook = is_missing_call(&error);
                return false;
            }
        };
        let may_return = Duration::from_millis(age_ms) < REMOUNT_PERIOD
            && (client.has_stored.load(Relaxed) || client.has_segments());
        let text = match reason {
            1 if !may_return => NO_SEGMENT.to_owned(),
            2 => format!(
                "cannot put object: no segment is large enough for it. len={len}; use larger segments"
            ),
            // Another upsert may be written over the earlier value.
            3 if !is_complete || (mode == WriteMode::Upsert && is_planted("hopeless-upserts-wait")) => {
                return false;
            }
            3 => format!(
                "cannot put object: no segment has enough free space, and every object in memory \
                 is hard-pinned. len={len}; remove objects, or add segments"
            ),
            _ => return false,
        };
        self.refusal = Some(Error::new(ErrorCode::NoAvailableHandle, text));
        true
    }

    /// Replaces the errors of objects that found no space by the reason, if waiting cannot help.
    /// `keys` has the key of each outcome.
    pub(crate) fn name_refusal<'k, R>(
        &self,
        keys: impl Iterator<Item = &'k [u8]>,
        outcomes: &mut [Result<R>],
    ) {
        let Some(reason) = &self.refusal else { return };
        for (outcome, key) in outcomes.iter_mut().zip(keys) {
            if is_full(outcome) {
                *outcome = Err(reason.clone().context(display_key(key)));
            }
        }
    }
}

/// Returns whether the request failed for lack of space.
pub(crate) fn is_full<T>(outcome: &Result<T>) -> bool {
    outcome.as_ref().is_err_and(|error| error.code() == ErrorCode::NoAvailableHandle)
}

/// Converts the error for an object that is larger than every segment into `NoAvailableHandle`, the
/// only code for lack of space that callers know.
pub(crate) fn too_large(error: Error) -> Error {
    match error.code() {
        ErrorCode::BufferOverflow => {
            Error::new(ErrorCode::NoAvailableHandle, "no segment is large enough for it").with_source(error)
        }
        _ => error,
    }
}
