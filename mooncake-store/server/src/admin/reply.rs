//! Responses of the admin endpoints: JSON, plain text and failures.

use std::fmt;
use std::sync::Arc;

use axum::body::Body;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use mooncake_core::{Error, ErrorCode};
use serde::Serialize;
use serde::de::{DeserializeOwned, Deserializer, IgnoredAny, SeqAccess, Visitor};

use super::answers::Failure;
use crate::state::State;
use mooncake_protocol::http::JSON;

/// Media type of the metrics.
pub(super) const TEXT: &str = "text/plain; version=0.0.4";

/// Extractor of the state of the master.
pub(super) type Shared = axum::extract::State<Arc<State>>;

pub(super) fn page(body: &impl Serialize) -> Response {
    answer(StatusCode::OK, body)
}

pub(super) fn text(body: String) -> Response {
    ([(header::CONTENT_TYPE, TEXT)], body).into_response()
}

pub(super) fn text_stream(body: Body) -> Response {
    ([(header::CONTENT_TYPE, TEXT)], body).into_response()
}

pub(super) fn text_failure(status: StatusCode, body: &'static str) -> Response {
    (status, [(header::CONTENT_TYPE, TEXT)], body).into_response()
}

pub(super) fn answer(status: StatusCode, body: &impl Serialize) -> Response {
    match serde_json::to_vec(body) {
        Ok(body) => (status, [(header::CONTENT_TYPE, JSON)], body).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

/// Parses the body as a JSON object, or returns the response that describes the error. The parser
/// builds no values but those of the request, so that its memory is that of the fields.
pub(super) fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T, Box<Response>> {
    let refuse = |error: &dyn fmt::Display| Box::new(bad_request(&format!("Invalid JSON body: {error}")));
    // The parser would also accept a list as a struct.
    if body.trim_ascii_start().first().is_some_and(|first| *first != b'{') {
        return Err(refuse(&"expected an object"));
    }
    serde_json::from_slice(body).map_err(|error| refuse(&error))
}

/// Parses a list of strings, and keeps at most `MAX` of them and one more, which tells that the
/// list is too long.
pub(super) fn strings_within<'de, D, const MAX: usize>(list: D) -> Result<Vec<String>, D::Error>
where
    D: Deserializer<'de>,
{
    struct Strings<const MAX: usize>;

    impl<'de, const MAX: usize> Visitor<'de> for Strings<MAX> {
        type Value = Vec<String>;

        fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
            out.write_str("a list of strings")
        }

        fn visit_seq<S: SeqAccess<'de>>(self, mut list: S) -> Result<Vec<String>, S::Error> {
            let mut strings = Vec::new();
            while strings.len() <= MAX {
                let Some(string) = list.next_element()? else { return Ok(strings) };
                strings.push(string);
            }
            while list.next_element::<IgnoredAny>()?.is_some() {}
            Ok(strings)
        }
    }

    list.deserialize_seq(Strings::<MAX>)
}

/// Returns a failure whose message is the name of the error.
pub(super) fn failure(status: StatusCode, code: ErrorCode) -> Response {
    refusal(status, code, code.name())
}

/// Returns a failure with a message.
pub(super) fn refusal(status: StatusCode, code: ErrorCode, message: &str) -> Response {
    let body = Failure { success: false, error_code: code.number(), error_message: message.to_owned() };
    answer(status, &body)
}

pub(super) fn bad_request(message: &str) -> Response {
    refusal(StatusCode::BAD_REQUEST, ErrorCode::InvalidParams, message)
}

/// Returns the HTTP status of an error, as in Mooncake C++.
pub(super) fn status_of(error: &Error) -> StatusCode {
    match error.code() {
        ErrorCode::InvalidParams => StatusCode::BAD_REQUEST,
        ErrorCode::SegmentNotFound | ErrorCode::JobNotFound | ErrorCode::ObjectNotFound => {
            StatusCode::NOT_FOUND
        }
        ErrorCode::UnavailableInCurrentMode
        | ErrorCode::UnavailableInCurrentStatus
        | ErrorCode::TenantNotEmpty => StatusCode::CONFLICT,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Few {
        #[serde(deserialize_with = "strings_within::<_, 2>")]
        keys: Vec<String>,
    }

    #[test]
    fn long_lists_are_not_kept() {
        let len =
            |keys: &str| read::<Few>(format!(r#" {{"keys":[{keys}]}}"#).as_bytes()).map(|it| it.keys.len());
        assert_eq!([len("").unwrap(), len(r#""a","b""#).unwrap()], [0, 2]);
        let long = vec![r#""c""#; 1000].join(",");
        assert_eq!(len(&long).unwrap(), 3, "one more than allowed");
        assert!(len("1").is_err() && len(r#""a",[]"#).is_err());
    }

    #[test]
    fn only_objects_are_read() {
        for body in ["", "[]", r#"[["a"]]"#, "null", r#"{"keys":["a"],"others":[]}"#, r#"{"keys":["a"]"#] {
            let refused = read::<Few>(body.as_bytes()).unwrap_err();
            assert_eq!(refused.status(), StatusCode::BAD_REQUEST, "{body}");
        }
    }
}
