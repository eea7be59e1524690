//! Parser of the responses of etcd's JSON gateway.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use mooncake_core::meta::{MetaEvent, MetaValue};
use mooncake_core::{Error, ErrorCode, Result};
use serde_json::Value;

/// Entries of a range with their keys.
pub type Entries = Vec<(String, MetaValue)>;

/// Message of a watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WatchLine {
    /// Changes, and their newest revision. Empty and 0 if the line only shows that the watch is
    /// alive.
    Events(Vec<MetaEvent>, u64),
    /// End of the watch, with the reason in etcd's words.
    Over(String),
}

/// Parses a response as JSON.
///
/// # Errors
/// Returns `INVALID_PARAMS` for another format.
pub fn json(body: &[u8]) -> Result<Value> {
    serde_json::from_slice(body)
        .map_err(|e| Error::invalid(format!("cannot parse response of etcd as JSON: {e}")))
}

/// Returns the entries in the response to a range request, and the revision of the read.
///
/// # Errors
/// Returns `INVALID_PARAMS` for bytes that are not base64, and for a key that is not UTF-8.
pub fn entries(response: &Value) -> Result<(Entries, u64)> {
    let entries = array(&response["kvs"]).iter().map(entry).collect::<Result<_>>()?;
    Ok((entries, number(&response["header"]["revision"])))
}

/// Parses a line of a watch.
///
/// # Errors
/// Returns the errors of [`json`] and [`entries`], and `RPC_FAIL` with etcd's message if it has
/// refused the watch.
pub fn watch_line(line: &[u8]) -> Result<WatchLine> {
    let message = json(line)?;
    let result = &message["result"];
    if result["canceled"] == true {
        let (reason, at) = (&result["cancel_reason"], &result["compact_revision"]);
        return Ok(WatchLine::Over(format!("{reason}, compacted at {at}")));
    }
    if result.is_null() {
        return Err(Error::new(ErrorCode::RpcFail, format!("etcd ended a watch: {}", message["error"])));
    }
    let mut newest = 0;
    let event = |event: &Value| {
        let (key, value) = entry(&event["kv"])?;
        newest = newest.max(value.revision);
        Ok(MetaEvent { key, value: (event["type"] != "DELETE").then_some(value) })
    };
    let events = array(&result["events"]).iter().map(event).collect::<Result<_>>()?;
    Ok(WatchLine::Events(events, newest))
}

/// Parses a 64-bit number, which the gateway writes as text, and omits if it is zero.
pub(super) fn number(value: &Value) -> u64 {
    value.as_str().and_then(|text| text.parse().ok()).or_else(|| value.as_u64()).unwrap_or(0)
}

fn array(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn entry(kv: &Value) -> Result<(String, MetaValue)> {
    let bytes = |field: &str| match kv[field].as_str() {
        None => Ok(Vec::new()),
        Some(text) => BASE64
            .decode(text)
            .map_err(|e| Error::invalid(format!("etcd sent a {field} that is not base64: {e}"))),
    };
    let key = String::from_utf8(bytes("key")?)
        .map_err(|_| Error::invalid("etcd returned a key that is not UTF-8"))?;
    Ok((key, MetaValue { value: bytes("value")?.into(), revision: number(&kv["mod_revision"]) }))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn entries_are_read_in_any_shape() {
        let (key, value) = entry(&json!({"key": "YQ==", "mod_revision": "7"})).unwrap();
        assert_eq!((key.as_str(), value.revision, value.value.len()), ("a", 7, 0));
        assert!(entry(&json!({"key": "*"})).unwrap_err().message().contains("base64"));
        assert!(entry(&json!({"key": "/w=="})).unwrap_err().message().contains("UTF-8"));
    }

    #[test]
    fn lines_of_a_watch() {
        let line = br#"{"result":{"events":[{"kv":{"key":"YQ==","value":"Yg==","mod_revision":"5"}},
            {"type":"DELETE","kv":{"key":"YQ==","mod_revision":"6"}}]}}"#;
        let Ok(WatchLine::Events(events, 6)) = watch_line(line) else { panic!("these are events") };
        let value = events[0].value.as_ref().map(|value| (&value.value[..], value.revision));
        assert_eq!(value, Some((&b"b"[..], 5)));
        assert_eq!((events[1].key.as_str(), &events[1].value), ("a", &None));
        assert_eq!(watch_line(br#"{"result":{"created":true}}"#).unwrap(), WatchLine::Events(Vec::new(), 0));
        let over =
            watch_line(br#"{"result":{"canceled":true,"cancel_reason":"compacted","compact_revision":"9"}}"#);
        assert!(matches!(over, Ok(WatchLine::Over(why)) if why.contains("compacted") && why.contains('9')));
        assert!(watch_line(br#"{"error":"no leader"}"#).unwrap_err().message().contains("no leader"));
    }
}
