//! Encoding of events as in Mooncake C++: three frames, the last one in MessagePack.

use std::borrow::Cow;
use std::str;

use bytes::{BufMut, Bytes, BytesMut};
use mooncake_core::ids::ObjectKey;
use rmp::encode as msgpack;

use crate::config::EventsConfig;

/// An object that became readable or was removed.
#[derive(Debug)]
pub(super) struct Event {
    pub(super) stored: bool,
    /// Tenant; usually `default`, which needs no allocation.
    pub(super) tenant: Cow<'static, str>,
    pub(super) key: ObjectKey,
    pub(super) group: String,
    /// Session that wrote the object.
    pub(super) session: Option<Box<[u8]>>,
}

/// Name of the only tier, as in the events of vLLM.
const MEDIUM: &str = "cpu";

/// Encodes these events as a message: topic (empty), sequence number, payload.
pub(super) fn message(config: &EventsConfig, sequence: u64, wall_ms: u64, events: &[(u64, Event)]) -> Bytes {
    let payload = payload(config, wall_ms, events);
    let mut wire = BytesMut::with_capacity(payload.len() + 32);
    frame(&mut wire, &[], true);
    frame(&mut wire, &sequence.to_be_bytes(), true);
    frame(&mut wire, &payload, false);
    wire.freeze()
}

/// Appends a frame of a message (ZMTP 3.0).
fn frame(wire: &mut BytesMut, body: &[u8], more: bool) {
    match u8::try_from(body.len()) {
        Ok(short) => wire.put_slice(&[u8::from(more), short]),
        Err(_) => {
            wire.put_u8(2 | u8::from(more));
            wire.put_u64(body.len() as u64);
        }
    }
    wire.put_slice(body);
}

/// Encodes the payload: `[time, [event, ..], 0]`.
fn payload(config: &EventsConfig, wall_ms: u64, events: &[(u64, Event)]) -> Vec<u8> {
    let mut out = Vec::with_capacity(events.len() * 256);
    // Writing to memory cannot fail.
    let _ = msgpack::write_array_len(&mut out, 3);
    let _ = msgpack::write_uint(&mut out, wall_ms);
    let _ = msgpack::write_array_len(&mut out, u32::try_from(events.len()).unwrap_or(u32::MAX));
    for (id, event) in events {
        let fields = fields(config, *id, wall_ms, event);
        let _ = msgpack::write_map_len(&mut out, u32::try_from(fields.len()).unwrap_or(u32::MAX));
        for (name, value) in fields {
            let _ = msgpack::write_str(&mut out, name);
            value.write(&mut out);
        }
    }
    let _ = msgpack::write_uint(&mut out, 0);
    out
}

enum Field<'a> {
    Nil,
    Number(u64),
    Text(&'a str),
    Bytes(&'a [u8]),
    Hashes(Option<u64>),
    /// Hashes as signed numbers.
    Blocks(Option<u64>),
}

impl Field<'_> {
    fn write(&self, out: &mut Vec<u8>) {
        let list = |out: &mut Vec<u8>, hash: &Option<u64>| {
            let _ = msgpack::write_array_len(out, u32::from(hash.is_some()));
        };
        match self {
            Field::Nil => {
                let _ = msgpack::write_nil(out);
            }
            Field::Number(number) => {
                let _ = msgpack::write_uint(out, *number);
            }
            Field::Text(text) => {
                let _ = msgpack::write_str(out, text);
            }
            Field::Bytes(bytes) => {
                let _ = msgpack::write_bin(out, bytes);
            }
            Field::Hashes(hash) => {
                list(out, hash);
                hash.iter().for_each(|hash| {
                    let _ = msgpack::write_uint(out, *hash);
                });
            }
            Field::Blocks(hash) => {
                list(out, hash);
                hash.iter().for_each(|hash| {
                    let _ = msgpack::write_sint(out, *hash as i64);
                });
            }
        }
    }
}

/// Returns the fields of an event, in the order of Mooncake C++.
fn fields<'a>(
    config: &'a EventsConfig,
    id: u64,
    wall_ms: u64,
    event: &'a Event,
) -> Vec<(&'static str, Field<'a>)> {
    let (name, block) = if event.stored { ("stored", "BlockStored") } else { ("removed", "BlockRemoved") };
    let text = |text: &'a str| if text.is_empty() { Field::Nil } else { Field::Text(text) };
    let number = |number: Option<u64>| number.map_or(Field::Nil, Field::Number);
    let mut fields = vec![
        ("event_id", Field::Number(id)),
        ("timestamp", Field::Number(wall_ms)),
        ("event_type", Field::Text(name)),
    ];
    if config.legacy {
        fields.push(("type", Field::Text(block)));
    }
    fields.extend([
        ("model_name", text(&config.model_name)),
        ("block_size", number(Some(config.block_size).filter(|size| *size != 0))),
        ("additional_salt", text(&config.additional_salt)),
        ("lora_name", text(&config.lora_name)),
        ("tenant_id", Field::Text(&event.tenant)),
        ("backend_id", Field::Text(&config.backend_id)),
        ("medium", Field::Text(MEDIUM)),
        ("dp_rank", number(config.dp_rank)),
        ("group_id", text(&event.group)),
    ]);
    let key = event.key.as_bytes();
    // Use a text where possible; subscribers that expect a text may reject other bytes.
    let name = |name: &'a [u8]| str::from_utf8(name).map_or(Field::Bytes(name), Field::Text);
    if config.object_key {
        fields.push(("object_key", name(key)));
    }
    let hash = hash_of(key);
    fields.push(("seq_hashes", Field::Hashes(hash)));
    if config.legacy {
        fields.push(("block_hashes", Field::Blocks(hash)));
    }
    if event.stored {
        fields.extend([
            ("session_id", event.session.as_deref().map_or(Field::Nil, name)),
            ("base_block_idx", Field::Number(0)),
            ("parent_hash", Field::Nil),
            ("token_ids", Field::Nil),
        ]);
        if config.legacy {
            fields.push(("parent_block_hash", Field::Nil));
        }
    }
    fields
}

/// Returns the hash that a key contains: a 64-bit number, decimal or hexadecimal after `0x`.
pub(super) fn hash_of(key: &[u8]) -> Option<u64> {
    let text = str::from_utf8(key).ok()?;
    let (digits, radix) = match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(digits) => (digits, 16),
        None => (text, 10),
    };
    // The parser would accept a sign.
    if !digits.starts_with(|first: char| first.is_digit(radix)) {
        return None;
    }
    u64::from_str_radix(digits, radix).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_of_keys() {
        for (key, hash) in [
            ("12345", Some(12345)),
            ("0x2a", Some(42)),
            ("0XFF", Some(255)),
            ("18446744073709551615", Some(u64::MAX)),
            ("18446744073709551616", None),
            ("", None),
            ("0x", None),
            ("-1", None),
            ("+1", None),
            ("0x-1", None),
            ("123abc", None),
        ] {
            assert_eq!(hash_of(key.as_bytes()), hash, "{key}");
        }
        assert_eq!(hash_of(&[0xff]), None);
    }

    #[test]
    fn a_session_without_text_is_bytes() {
        let has = |session: Option<&[u8]>, encoded: &[u8]| {
            let key = ObjectKey::new("k").unwrap();
            let (tenant, group, session) = ("default".into(), String::new(), session.map(Box::from));
            let event = Event { stored: true, tenant, key, group, session };
            let encoded = [b"\xaasession_id", encoded].concat();
            let payload = payload(&EventsConfig::default(), 1, &[(1, event)]);
            payload.windows(encoded.len()).any(|part| part == encoded)
        };
        assert!(has(Some(b"\xff"), &[0xc4, 1, 0xff]) && has(Some(b"a"), &[0xa1, b'a']));
        assert!(has(Some(b""), &[0xa0]) && has(None, &[0xc0]));
    }

    #[test]
    fn long_frames_have_long_lengths() {
        let mut wire = BytesMut::new();
        frame(&mut wire, &[7; 255], true);
        assert_eq!(wire[..3], [1, 255, 7]);
        wire.clear();
        frame(&mut wire, &[7; 256], false);
        assert_eq!(wire[..10], [2, 0, 0, 0, 0, 0, 0, 1, 0, 7]);
    }
}
