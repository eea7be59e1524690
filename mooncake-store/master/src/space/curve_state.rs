//! State of the curve of hits by memory: the feed, the curve, and its sample.

use std::collections::VecDeque;
use std::time::Duration;

use mooncake_core::clock::Moment;
use mooncake_core::evict::{CURVE_HALVES, CURVE_OBJECTS, CacheEvents, MemoryCurve, MergeableOrder, UseFeed};

use crate::sync::Mutex;

/// Number of sampled uses in a second above which the sample shrinks. A use takes about a
/// microsecond, so the curve takes a hundredth of one processor at most.
const MAX_USES_PER_SECOND: f64 = 10_000.0;

/// Time over which uses are counted before the sample changes.
const LOAD_SPAN: Duration = Duration::from_secs(1);

/// Time of low load after which a sample grows again.
const QUIET: Duration = Duration::from_secs(60);

/// Curve of a space, with the feed of its events.
pub(crate) struct SpaceCurve<E: MergeableOrder> {
    pub(crate) feed: UseFeed,
    pub(super) state: Mutex<CurveState<E>>,
}

/// Curve with the counts that surround it.
pub(super) struct CurveState<E> {
    pub(super) curve: MemoryCurve<E>,
    /// Events of the last call, for reuse.
    pub(super) events: CacheEvents,
    /// Start of the count of sampled uses, and their number.
    pub(super) load: (Moment, u64),
    quiet_since: Moment,
    /// Earlier counts.
    pub(super) marks: VecDeque<CurveMark>,
}

/// Counts at a point of time.
#[derive(Clone, Copy, Debug)]
pub(super) struct CurveMark {
    pub(super) at: Moment,
    pub(super) uses: u64,
    pub(super) misses: [f64; CURVE_HALVES.len()],
}

impl<E: MergeableOrder> SpaceCurve<E> {
    pub(crate) fn new(config: &E::Config, now: Moment) -> Self {
        let feed = UseFeed::new();
        let start = CurveMark { at: now, uses: 0, misses: [0.0; CURVE_HALVES.len()] };
        let state = CurveState {
            curve: MemoryCurve::new(config, feed.sample(), CURVE_OBJECTS),
            events: CacheEvents::default(),
            load: (now, 0),
            quiet_since: now,
            marks: VecDeque::from([start]),
        };
        Self { feed, state: Mutex::new(state) }
    }
}

impl<E: MergeableOrder> CurveState<E> {
    /// Adapts the size of the sample to the load.
    pub(super) fn adapt(&mut self, feed: &UseFeed, now: Moment) {
        let span = now.since(self.load.0);
        if span < LOAD_SPAN {
            return;
        }
        let load = self.load.1 as f64 / span.as_secs_f64() / MAX_USES_PER_SECOND;
        self.load = (now, 0);
        if load > 1.0 {
            self.curve.shrink_sample(load.log2().ceil() as u32);
        }
        if load > 0.25 || feed.sample().shift() == 0 {
            self.quiet_since = now;
        } else if now.since(self.quiet_since) >= QUIET {
            self.curve.grow_sample();
            self.quiet_since = now;
        }
    }
}
