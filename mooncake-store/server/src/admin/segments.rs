//! Segments: list, use and state.

use axum::extract::{RawQuery, State};
use axum::http::StatusCode;
use axum::response::Response;
use mooncake_core::replica::SegmentStatus;

use super::answers::{Failure, SegmentDetail, SegmentState, SegmentsDetail};
use super::query::{decoded, form_text, raw};
use super::reply::{Shared, bad_request, failure, page, status_of, text, text_failure};
use mooncake_master::SegmentStats;

/// Returns the names of all segments, one per line. Without segments, the body is an empty line:
/// SGLang with `check_server` waits for a body before it mounts its own segment.
#[utoipa::path(
    get,
    path = "/get_all_segments",
    responses((status = 200, body = String, content_type = "text/plain"))
)]
pub(super) async fn all_segments(State(state): Shared) -> Response {
    let mut names: String =
        state.master.segment_stats().iter().map(|at| format!("{}\n", at.segment.name)).collect();
    if names.is_empty() {
        names.push('\n');
    }
    text(names)
}

/// Returns all segments with owner, address, state and use.
#[utoipa::path(get, path = "/get_segments_detail", responses((status = 200, body = SegmentsDetail)))]
pub(super) async fn segments_detail(State(state): Shared) -> Response {
    let stats = state.master.segment_stats();
    let detail = |at| detail(at, state.master.address_finding(at.client));
    let segments: Vec<_> = stats.iter().map(detail).collect();
    page(&SegmentsDetail { total_segments: segments.len(), segments })
}

fn detail(at: &SegmentStats, address_finding: Option<String>) -> SegmentDetail {
    let gib = at.segment.size as f64 / (1u64 << 30) as f64;
    SegmentDetail {
        segment_name: at.segment.name.clone(),
        segment_id: at.segment.id.to_string(),
        client_id: at.client.to_string(),
        base_address: format!("{:#x}", at.segment.base),
        size_bytes: at.segment.size,
        size_human: format!("{} GiB", six_digits(gib)),
        te_endpoint: at.segment.endpoint.clone(),
        protocol: at.segment.protocol.clone(),
        status: status_name(at.status),
        allocator_used_bytes: at.used,
        allocator_capacity_bytes: at.segment.size,
        allocator_usage_percent: at.used as f64 * 100.0 / at.segment.size as f64,
        address_finding,
    }
}

/// Returns the use of one segment. The name is used as sent, and percent-decoded if no such segment
/// exists.
#[utoipa::path(
    get,
    path = "/query_segment",
    params(("segment" = String, Query, description = "Name of the segment")),
    responses((status = 200, body = String, content_type = "text/plain"), (status = 500, body = String, content_type = "text/plain"))
)]
pub(super) async fn query_segment(State(state): Shared, RawQuery(query): RawQuery) -> Response {
    let name = raw(query.as_deref(), "segment").unwrap_or_default();
    let stats = state.master.segment_stats();
    let use_of = |name: &str| {
        let segments: Vec<_> = stats.iter().filter(|at| at.segment.name == name).collect();
        let used = segments.iter().fold(0u64, |sum, at| sum.saturating_add(at.used));
        let capacity = segments.iter().fold(0u64, |sum, at| sum.saturating_add(at.segment.size));
        (!segments.is_empty()).then(|| format!("{name}\nUsed(bytes): {used}\nCapacity(bytes) : {capacity}\n"))
    };
    match use_of(name).or_else(|| use_of(&String::from_utf8_lossy(&decoded(name)))) {
        Some(body) => text(body),
        None => text_failure(StatusCode::INTERNAL_SERVER_ERROR, "Failed to query segment"),
    }
}

/// Returns the state of one segment.
#[utoipa::path(
    get,
    path = "/api/v1/segments/status",
    params(("segment" = String, Query, description = "Name of the segment")),
    responses((status = 200, body = SegmentState), (status = 400, body = Failure), (status = 404, body = Failure))
)]
pub(super) async fn status(State(state): Shared, RawQuery(query): RawQuery) -> Response {
    let Some(segment) = form_text(query.as_deref(), "segment") else {
        return bad_request("Missing segment query parameter");
    };
    match state.master.segment_status_by_name(&segment) {
        Ok(status) => page(&SegmentState {
            success: true,
            segment,
            status: status as i32,
            status_name: status_name(status),
            error_code: 0,
            error_message: "",
        }),
        Err(error) => failure(status_of(&error), error.code()),
    }
}

fn status_name(status: SegmentStatus) -> &'static str {
    match status {
        SegmentStatus::Undefined => "UNDEFINED",
        SegmentStatus::Ok => "OK",
        SegmentStatus::Draining => "DRAINING",
        SegmentStatus::Drained => "DRAINED",
        SegmentStatus::GracefullyUnmounting => "GRACEFULLY_UNMOUNTING",
        SegmentStatus::Unmounting => "UNMOUNTING",
    }
}

/// Formats a number with six significant digits and without trailing zeros.
fn six_digits(number: f64) -> String {
    let before_the_point = if number < 1.0 { 0.0 } else { number.log10().floor() + 1.0 };
    let zeros = if number > 0.0 && number < 1.0 { (-number.log10().floor() - 1.0).max(0.0) } else { 0.0 };
    let digits = (6.0 - before_the_point + zeros).max(0.0) as usize;
    let text = format!("{number:.digits$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::six_digits;

    #[test]
    fn sizes_as_the_existing_master_writes_them() {
        for (number, text) in [
            (0.0, "0"),
            (0.0625, "0.0625"),
            (0.09765625, "0.0976562"),
            (1.0, "1"),
            (3.125, "3.125"),
            (100.0, "100"),
            (1234.5678, "1234.57"),
            (1_048_576.0, "1048576"),
        ] {
            assert_eq!(six_digits(number), text);
        }
    }
}
