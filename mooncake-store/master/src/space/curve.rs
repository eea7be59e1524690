//! Hits that the memory would find if it were smaller or larger.
//!
//! Calls feed the uses of sampled keys into a queue. The tick lets a curve follow them, so that
//! calls do not wait for it.

use std::time::Duration;

use mooncake_core::alloc::SegmentAllocator;
use mooncake_core::clock::Moment;
use mooncake_core::evict::{CURVE_HALVES, MergeableOrder};

use super::curve_state::{CurveMark, CurveState};
use super::state::Space;
use crate::model::curve::{CurvePoint, CurveReport};

/// Time between two marks.
const MARK_EVERY: Duration = Duration::from_secs(300);

/// Number of marks: those of the last hour.
const MARKS: usize = 12;

impl<A: SegmentAllocator, E: MergeableOrder> Space<A, E> {
    /// Lets the curve follow the events since the last call.
    pub(crate) fn follow_curve(&self, now: Moment) {
        self.follow(&mut self.curve.state.lock(), now);
    }

    fn follow(&self, state: &mut CurveState<E>, now: Moment) {
        let feed = &self.curve.feed;
        feed.take(&mut state.events);
        if !state.events.events.is_empty() {
            state.load.1 += state.events.events.len() as u64 + state.events.lost;
            state.curve.set_memory(self.memory_for_objects());
            state.curve.follow(&state.events);
        }
        state.adapt(feed, now);
        if state.marks.back().is_none_or(|mark| now.since(mark.at) >= MARK_EVERY) {
            state.marks.push_back(CurveMark { at: now, uses: self.uses(), misses: state.curve.misses() });
            if state.marks.len() > MARKS {
                state.marks.pop_front();
            }
        }
    }

    /// Returns the curve up to now.
    pub(crate) fn report_curve(&self, now: Moment) -> CurveReport {
        let mut state = self.curve.state.lock();
        self.follow(&mut state, now);
        let (uses, misses, memory) = (self.uses(), state.curve.misses(), self.memory_for_objects());
        let origin = CurveMark { at: now, uses, misses };
        let mark = state.marks.front().copied().unwrap_or(origin);
        let span_uses = uses.saturating_sub(mark.uses);
        let point = |(at, halves): (usize, &u64)| {
            let missed = (misses[at] - mark.misses[at]) / span_uses as f64;
            CurvePoint {
                factor: *halves as f64 / 2.0,
                bytes: (memory / 2).saturating_mul(*halves),
                hit_rate: (span_uses > 0).then(|| (1.0 - missed).clamp(0.0, 1.0)),
                total_misses: misses[at].round() as u64,
            }
        };
        CurveReport {
            span: now.since(mark.at),
            uses: span_uses,
            total_uses: uses,
            keys_for_each_sampled: 1 << self.curve.feed.sample().shift(),
            points: CURVE_HALVES.iter().enumerate().map(point).collect(),
        }
    }

    /// Returns the bytes that objects may take before some are evicted.
    fn memory_for_objects(&self) -> u64 {
        (self.occupancy().1 as f64 * self.options.high_watermark) as u64
    }

    /// Returns the number of uses so far.
    fn uses(&self) -> u64 {
        let found: u64 = self.directory.shards().map(|shard| shard.reads.hits).sum();
        found + self.counters.values()
    }
}
