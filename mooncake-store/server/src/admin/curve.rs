//! Hits by size of memory.

use axum::extract::State;
use axum::response::Response;

use super::answers::{MemoryCurve, MemoryCurvePoint};
use super::reply::{Shared, page};

/// Returns how often objects would be found with half, one, two and four times the memory.
#[utoipa::path(get, path = "/api/v1/memory_curve", responses((status = 200, body = MemoryCurve)))]
pub(super) async fn memory_curve(State(state): Shared) -> Response {
    let curve = state.master.memory_curve();
    let points = curve.points.iter().map(|point| MemoryCurvePoint {
        factor: point.factor,
        bytes: point.bytes,
        hit_rate: point.hit_rate,
    });
    page(&MemoryCurve {
        span_seconds: curve.span.as_secs_f64(),
        uses: curve.uses,
        keys_for_each_sampled: curve.keys_for_each_sampled,
        points: points.collect(),
    })
}
