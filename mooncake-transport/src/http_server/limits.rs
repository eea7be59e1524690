//! Limits of requests, and refusals in JSON that name the limit, its value and a remedy.

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{FromRequest, Request};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures::TryStreamExt;
use mooncake_core::ErrorCode;

/// Maximum length of the address of a request in bytes: path and query.
pub const MAX_ADDRESS: usize = 65_534;
/// Maximum length of a request without its body in bytes.
pub const MAX_HEADER: usize = 417_792;
/// Maximum number of header fields of a request.
pub const MAX_HEADER_FIELDS: usize = 100;
/// Length in bytes that a request line has at most beside the address.
const METHOD_AND_VERSION: usize = 32;
/// Maximum length of a request body in bytes at a listener that sets no other limit.
const MAX_BODY: BodyLimit = BodyLimit { bytes: 2 << 20, remedy: "send a shorter body" };

/// Maximum length of request bodies, as an extension of each request.
#[derive(Clone, Copy, Debug)]
pub struct BodyLimit {
    /// Length in bytes.
    pub bytes: usize,
    /// Advice for a sender of a longer body.
    pub remedy: &'static str,
}

/// Body of a request, within the [`BodyLimit`] of its listener.
#[derive(Clone, Debug)]
pub struct Content(pub Bytes);

impl<S: Send + Sync> FromRequest<S> for Content {
    type Rejection = Refusal;

    async fn from_request(request: Request, _state: &S) -> Result<Self, Refusal> {
        let limit = request.extensions().get::<BodyLimit>().copied().unwrap_or(MAX_BODY);
        let body = request.into_body();
        // A body with a known length is refused before it is received.
        if body.size_hint().lower() > limit.bytes as u64 {
            return Err(Refusal::long_body(limit));
        }
        read_within(body, limit).await.map(Self)
    }
}

async fn read_within(body: Body, limit: BodyLimit) -> Result<Bytes, Refusal> {
    let mut parts = body.into_data_stream();
    let mut received = Vec::new();
    while let Some(part) = parts.try_next().await.map_err(|_| Refusal::BROKEN_BODY)? {
        if part.len() > limit.bytes - received.len() {
            return Err(Refusal::long_body(limit));
        }
        if received.is_empty() && parts.is_end_stream() {
            return Ok(part);
        }
        received.extend_from_slice(&part);
    }
    Ok(received.into())
}

/// Refusal of a request, before a route handles it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    status: StatusCode,
    reason: &'static str,
    /// Name and value of the limit that the request exceeds.
    limit: Option<(&'static str, u64)>,
    remedy: &'static str,
}

impl Refusal {
    const LONG_ADDRESS: Self = Self {
        status: StatusCode::URI_TOO_LONG,
        reason: "the address is too long",
        limit: Some(("max_address_bytes", MAX_ADDRESS as u64)),
        remedy: "send the list in the body of a POST request, or in several requests",
    };
    const LONG_HEADER: Self = Self {
        status: StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
        reason: "the header is too long",
        limit: Some(("max_header_bytes", MAX_HEADER as u64)),
        remedy: "send fewer or shorter header fields",
    };
    const MANY_FIELDS: Self = Self {
        status: StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
        reason: "the header has too many fields",
        limit: Some(("max_header_fields", MAX_HEADER_FIELDS as u64)),
        remedy: "send fewer header fields",
    };
    const MALFORMED: Self = Self {
        status: StatusCode::BAD_REQUEST,
        reason: "the request line or a header field is malformed",
        limit: None,
        remedy: "send HTTP/1.1 with a percent-encoded address",
    };
    const BROKEN_BODY: Self = Self {
        status: StatusCode::BAD_REQUEST,
        reason: "the body is malformed or incomplete",
        limit: None,
        remedy: "send as many bytes as Content-Length says, or complete chunks",
    };

    fn long_body(limit: BodyLimit) -> Self {
        Self {
            status: StatusCode::PAYLOAD_TOO_LARGE,
            reason: "the body is too long",
            limit: Some(("max_body_bytes", limit.bytes as u64)),
            remedy: limit.remedy,
        }
    }

    /// Creates the refusal of a list with more than `max` keys.
    pub fn many_keys(max: usize) -> Self {
        Self {
            status: StatusCode::PAYLOAD_TOO_LARGE,
            reason: "the list has too many keys",
            limit: Some(("max_keys", max as u64)),
            remedy: "send several requests",
        }
    }

    /// Returns the refusal of a header that the parser has refused with this status, after
    /// `received` bytes, of which `line` belong to the request line.
    pub(super) fn of_header(status: u16, line: usize, received: usize) -> Self {
        match status {
            414 => Self::LONG_ADDRESS,
            431 if line > MAX_ADDRESS + METHOD_AND_VERSION => Self::LONG_ADDRESS,
            431 if received >= MAX_HEADER => Self::LONG_HEADER,
            431 => Self::MANY_FIELDS,
            _ => Self::MALFORMED,
        }
    }

    fn to_json(self) -> String {
        let Self { reason, remedy, .. } = self;
        let code = ErrorCode::InvalidParams.number();
        let body = match self.limit {
            Some((limit, value)) => serde_json::json!({
                "success": false,
                "error_code": code,
                "error_message": format!("cannot read request: {reason}. limit={limit} value={value}; {remedy}"),
                "limit": limit,
                "limit_value": value,
            }),
            None => serde_json::json!({
                "success": false,
                "error_code": code,
                "error_message": format!("cannot read request: {reason}; {remedy}"),
            }),
        };
        body.to_string()
    }

    /// Returns the whole response, after which the connection ends.
    pub(super) fn to_message(self) -> Bytes {
        let (status, body) = (self.status, self.to_json());
        format!(
            "HTTP/1.1 {status}\r\nContent-Type: {JSON}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        )
        .into()
    }
}

/// Media type of refusals.
const JSON: &str = "application/json; charset=utf-8";

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        (self.status, [(header::CONTENT_TYPE, JSON)], self.to_json()).into_response()
    }
}
