//! Encoding of events as in Mooncake C++: three frames, the last one in MessagePack.

use std::borrow::Cow;
use std::collections::HashSet;
use std::hash::{DefaultHasher, Hasher as _};
use std::str;

use bytes::{Bytes, BytesMut};
use mooncake_core::ids::ObjectKey;
use rmp::encode as msgpack;

use crate::block_key;
use crate::config::EventsConfig;
use crate::zmtp::put_frame;

/// A change or a use of objects.
#[derive(Debug)]
pub(super) enum Event {
    Object(ObjectEvent),
    LookUp(LookUp),
}

impl Event {
    /// Returns the share of the event in a full queue.
    pub(super) fn weight(&self) -> usize {
        match self {
            Self::Object(_) => 1,
            Self::LookUp(look_up) => look_up.blocks.len(),
        }
    }

    /// Returns whether the event has a hash.
    pub(super) fn has_hash(&self) -> bool {
        match self {
            Self::Object(object) => block_key::read(object.key.as_bytes()).1.is_some(),
            Self::LookUp(_) => true,
        }
    }
}

/// Blocks that a client looked up in one call.
#[derive(Debug)]
pub(super) struct LookUp {
    pub(super) tenant: Cow<'static, str>,
    /// Numbers that stand for the blocks, in their order, each once.
    pub(super) blocks: Vec<u64>,
}

impl LookUp {
    /// Creates the event about a look-up of these keys. The keys of several ranks, and of keys and
    /// values, name the same block.
    pub(super) fn new(tenant: Cow<'static, str>, keys: &[&[u8]]) -> Self {
        let mut seen = HashSet::with_capacity(keys.len());
        let id_of = |key: &&[u8]| block_key::read(key).1.unwrap_or_else(|| digest_of(key));
        let blocks = keys.iter().map(id_of).filter(|id| seen.insert(*id)).collect();
        Self { tenant, blocks }
    }
}

/// Returns a number for a key without a hash, the same in each process of this build.
fn digest_of(key: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(key);
    hasher.finish()
}

/// An object that became readable or was removed.
#[derive(Debug)]
pub(super) struct ObjectEvent {
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
    put_frame(&mut wire, &[], true);
    put_frame(&mut wire, &sequence.to_be_bytes(), true);
    put_frame(&mut wire, &payload, false);
    wire.freeze()
}

/// Encodes the payload: `[time, [event, ..], 0]`.
fn payload(config: &EventsConfig, wall_ms: u64, events: &[(u64, Event)]) -> Vec<u8> {
    let mut out = Vec::with_capacity(events.len() * 256);
    // Writing to memory cannot fail.
    let _ = msgpack::write_array_len(&mut out, 3);
    let _ = msgpack::write_uint(&mut out, wall_ms);
    let _ = msgpack::write_array_len(&mut out, u32::try_from(events.len()).unwrap_or(u32::MAX));
    for (id, event) in events {
        let fields = match event {
            Event::Object(event) => fields(config, *id, wall_ms, event),
            Event::LookUp(event) => fields_of_look_up(config, *id, wall_ms, event),
        };
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
    Numbers(&'a [u64]),
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
            Field::Numbers(numbers) => {
                let _ = msgpack::write_array_len(out, u32::try_from(numbers.len()).unwrap_or(u32::MAX));
                numbers.iter().for_each(|number| {
                    let _ = msgpack::write_uint(out, *number);
                });
            }
        }
    }
}

/// Returns a text where possible; subscribers that expect a text may reject other bytes.
fn text_or_bytes(name: &[u8]) -> Field<'_> {
    str::from_utf8(name).map_or(Field::Bytes(name), Field::Text)
}

/// Returns the fields of an event about a look-up.
fn fields_of_look_up<'a>(
    config: &'a EventsConfig,
    id: u64,
    wall_ms: u64,
    event: &'a LookUp,
) -> Vec<(&'static str, Field<'a>)> {
    vec![
        ("event_id", Field::Number(id)),
        ("timestamp", Field::Number(wall_ms)),
        ("event_type", Field::Text("looked_up")),
        ("tenant_id", Field::Text(&event.tenant)),
        ("backend_id", Field::Text(&config.backend_id)),
        ("block_ids", Field::Numbers(&event.blocks)),
    ]
}

/// Returns the fields of an event, in the order of Mooncake C++; what only the key of a block tells
/// is at the end. vLLM's classes of events have no optional block size, and a list of tokens: with
/// the older fields, an unknown size is 0 and unknown tokens are an empty list.
fn fields<'a>(
    config: &'a EventsConfig,
    id: u64,
    wall_ms: u64,
    event: &'a ObjectEvent,
) -> Vec<(&'static str, Field<'a>)> {
    let (name, kind) = if event.stored { ("stored", "BlockStored") } else { ("removed", "BlockRemoved") };
    let text = |text: &'a str| if text.is_empty() { Field::Nil } else { Field::Text(text) };
    let number = |number: Option<u64>| number.map_or(Field::Nil, Field::Number);
    let key = event.key.as_bytes();
    let (block, hash) = block_key::read(key);
    let model = Some(config.model_name.as_str()).filter(|name| !name.is_empty());
    let model = model.or_else(|| block.as_ref()?.model);
    let mut fields = vec![
        ("event_id", Field::Number(id)),
        ("timestamp", Field::Number(wall_ms)),
        ("event_type", Field::Text(name)),
    ];
    if config.legacy {
        fields.push(("type", Field::Text(kind)));
    }
    fields.extend([
        ("model_name", text(model.unwrap_or_default())),
        ("block_size", number(Some(config.block_size).filter(|size| *size != 0 || config.legacy))),
        ("additional_salt", text(&config.additional_salt)),
        ("lora_name", text(&config.lora_name)),
        ("tenant_id", Field::Text(&event.tenant)),
        ("backend_id", Field::Text(&config.backend_id)),
        ("medium", Field::Text(MEDIUM)),
        ("dp_rank", number(config.dp_rank)),
        ("group_id", text(&event.group)),
    ]);
    if config.object_key {
        fields.push(("object_key", text_or_bytes(key)));
    }
    fields.push(("seq_hashes", Field::Hashes(hash)));
    if config.legacy {
        fields.push(("block_hashes", Field::Blocks(hash)));
    }
    if event.stored {
        fields.push(("session_id", event.session.as_deref().map_or(Field::Nil, text_or_bytes)));
    }
    fields.push(("base_block_idx", Field::Number(0)));
    if event.stored {
        fields.push(("parent_hash", Field::Nil));
        fields.push(("token_ids", if config.legacy { Field::Hashes(None) } else { Field::Nil }));
        if config.legacy {
            fields.extend([("parent_block_hash", Field::Nil), ("lora_id", Field::Nil)]);
        }
    }
    let known = [
        ("group_idx", block.and_then(|block| block.cache_group)),
        ("tp_rank", block.and_then(|block| block.tp_rank)),
        ("pp_rank", block.and_then(|block| block.pp_rank)),
        ("worker_id", block.and_then(|block| block.worker)),
    ];
    fields.extend(known.into_iter().filter_map(|(name, value)| Some((name, Field::Number(value?)))));
    fields
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_without_text_is_bytes() {
        let has = |session: Option<&[u8]>, encoded: &[u8]| {
            let key = ObjectKey::new("k").unwrap();
            let (tenant, group, session) = ("default".into(), String::new(), session.map(Box::from));
            let event = Event::Object(ObjectEvent { stored: true, tenant, key, group, session });
            let encoded = [b"\xaasession_id", encoded].concat();
            let payload = payload(&EventsConfig::default(), 1, &[(1, event)]);
            payload.windows(encoded.len()).any(|part| part == encoded)
        };
        assert!(has(Some(b"\xff"), &[0xc4, 1, 0xff]) && has(Some(b"a"), &[0xa1, b'a']));
        assert!(has(Some(b""), &[0xa0]) && has(None, &[0xc0]));
    }
}
