//! Look-ups that follow one another. Only the first of them protects an object from puts that find
//! no other space, so that a client that polls stops no writer.

use std::time::Duration;

use mooncake_core::clock::Moment;

/// Returns the begin of the look-ups of which one happens at `now`. `since` is that of earlier ones
/// (0 for none since the last read), and `lease` the end of the lease that the last one has
/// extended. The present one extends the lease to `until`. Look-ups at most `pause` apart follow
/// one another.
pub(crate) fn begin_of_look_ups(
    since: Moment,
    lease: Moment,
    now: Moment,
    until: Moment,
    pause: Duration,
) -> Moment {
    let last = Moment(lease.0.saturating_sub(until.since(now).as_nanos() as u64));
    if since == Moment(0) || now.since(last) > pause { now } else { since }
}
