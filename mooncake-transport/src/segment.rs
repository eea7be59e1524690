//! Segment descriptor, which a node publishes so that others can reach its memory. The format is
//! the JSON of Mooncake C++.
//!
//! The type is complete for `tcp`. Fields of other transports are kept unchanged, so that their
//! descriptors survive a round trip.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use mooncake_core::{Error, ErrorCode, Result};
use serde_json::{Map, Value};

use crate::net::HostPort;
use crate::protocol::Protocol;

/// Maximum length of a descriptor that is decoded, in bytes.
pub const MAX_DESC_BYTES: usize = 16 << 20;

/// Memory of one node, and its addresses.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SegmentDesc {
    /// Name of the segment.
    pub name: String,
    /// Transports that reach the segment, usually one.
    pub protocols: Vec<Protocol>,
    /// Host of the TCP data port. Empty if it is the host of the handshake port; the engine fills
    /// it in before it calls [`connect`](crate::Transport::connect).
    pub tcp_data_host: String,
    /// TCP data port, or 0.
    pub tcp_data_port: u16,
    /// Framing of the TCP data port. An absent number means 1.
    pub tcp_proto_version: u32,
    /// Host and port in RDMA names. Empty if they are the name of the segment.
    pub rdma_server_name: String,
    /// Time of the publication, for human readers.
    pub timestamp: String,
    /// Memory open to peers.
    pub buffers: Vec<BufferDesc>,
    /// All other keys, unchanged.
    pub extra: Map<String, Value>,
    /// Address of the owner's handshake port, if the look-up found it. Not published.
    pub handshake: Option<HostPort>,
}

/// Registered range of a segment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BufferDesc {
    /// Name of the segment on TCP, a memory location (`cpu:0`) on RDMA. Not empty.
    pub name: String,
    /// First address in the owner's process. Not zero.
    pub addr: u64,
    /// Length in bytes. Not zero.
    pub length: u64,
    /// Opaque access key of the transport ([`Transport::export`](crate::Transport::export)), mostly
    /// empty.
    pub key: Vec<u8>,
    /// All other keys, unchanged (`rkey`, `lkey`, `shm_name`, ..).
    pub extra: Map<String, Value>,
}

impl BufferDesc {
    /// Returns whether `[addr, addr + len)` lies inside. Returns false on overflow and for a length
    /// of zero.
    pub fn contains(&self, addr: u64, len: u64) -> bool {
        match (addr.checked_add(len), self.addr.checked_add(self.length)) {
            (Some(end), Some(own_end)) => len != 0 && addr >= self.addr && end <= own_end,
            _ => false,
        }
    }

    /// Returns whether this buffer is the next part of the same memory, which is split because of a
    /// limit of the device. Nodes of this project publish it. Nodes with Mooncake C++ do
    /// not, so all their adjacent RDMA buffers count as one.
    pub fn continues(&self, before: &BufferDesc) -> bool {
        let says = match self.extra.get(CONTINUES) {
            Some(says) => *says == true,
            None => self.extra.contains_key("rkey"),
        };
        says && self.length != 0 && before.addr.checked_add(before.length) == Some(self.addr)
    }
}

/// Buffer key of this project: whether the buffer continues the one that ends where it begins.
pub const CONTINUES: &str = "continues";

// Transports whose buffers are not address ranges. Such buffers stay in `extra`.
const WITHOUT_ADDRESSES: [&str; 2] = ["cxl", "nvmeof"];
const ACCESS_KEY: &str = "access_key";

impl SegmentDesc {
    /// Creates an empty segment.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), tcp_proto_version: 1, ..Self::default() }
    }

    /// Returns whether the segment can be reached by that transport.
    pub fn supports(&self, protocol: &Protocol) -> bool {
        self.protocols.contains(protocol)
    }

    /// Returns whether all of `[addr, addr + len)` lies in one buffer, or in one memory that was
    /// registered in parts. Sorts the buffers at each call.
    pub fn holds(&self, addr: u64, len: u64) -> bool {
        HeldRanges::of(self).hold(addr, len)
    }

    /// Returns whether two descriptors are equal except for the timestamp.
    pub fn same_but_for_time(&self, other: &SegmentDesc) -> bool {
        self.name == other.name
            && self.protocols == other.protocols
            && (&self.tcp_data_host, self.tcp_data_port) == (&other.tcp_data_host, other.tcp_data_port)
            && self.tcp_proto_version == other.tcp_proto_version
            && self.rdma_server_name == other.rdma_server_name
            && self.buffers == other.buffers
            && self.extra == other.extra
    }

    /// Encodes the descriptor as compact JSON with sorted keys.
    pub fn encode(&self) -> Vec<u8> {
        let mut out: BTreeMap<&str, Value> = self.extra.iter().map(|(k, v)| (&**k, v.clone())).collect();
        out.insert("name", self.name.as_str().into());
        out.insert(
            "protocol",
            match self.protocols.as_slice() {
                [one] => one.as_str().into(),
                many => many.iter().map(|p| Value::from(p.as_str())).collect(),
            },
        );
        out.insert("tcp_data_host", self.tcp_data_host.as_str().into());
        out.insert("tcp_data_port", self.tcp_data_port.into());
        out.insert("tcp_proto_version", self.tcp_proto_version.into());
        out.insert("rdma_server_name", self.rdma_server_name.as_str().into());
        out.insert("timestamp", self.timestamp.as_str().into());
        if !self.without_addresses() {
            out.insert("buffers", self.buffers.iter().map(BufferDesc::to_value).collect());
        }
        // A map with text keys always has a JSON form.
        serde_json::to_vec(&out).unwrap_or_default()
    }

    /// Parses the output of [`encode`](Self::encode) or of Mooncake C++. Unknown keys are kept, and
    /// missing ones are empty. An error contains the faulty key and the reason.
    pub fn decode(text: &[u8]) -> Result<Self> {
        if text.len() > MAX_DESC_BYTES {
            return Err(bad(format!(
                "too long. len={} max={MAX_DESC_BYTES}; at most that many bytes are read",
                text.len()
            )));
        }
        let value: Value = serde_json::from_slice(text).map_err(|e| bad(format!("not JSON: {e}")))?;
        let Value::Object(map) = value else { return Err(bad("not a JSON object")) };
        let mut map = Fields(map);
        let mut desc = Self {
            name: map.text("name")?,
            protocols: map.protocols()?,
            tcp_data_host: map.text("tcp_data_host")?,
            tcp_data_port: map.number("tcp_data_port", 0)?,
            tcp_proto_version: map.number("tcp_proto_version", 1)?,
            rdma_server_name: map.text("rdma_server_name")?,
            timestamp: map.text("timestamp")?,
            buffers: Vec::new(),
            extra: Map::new(),
            handshake: None,
        };
        if !desc.without_addresses() {
            desc.buffers = match map.0.remove("buffers") {
                None | Some(Value::Null) => Vec::new(),
                Some(Value::Array(items)) => items
                    .into_iter()
                    .enumerate()
                    .map(|(i, item)| {
                        BufferDesc::from_value(item).map_err(|e| e.context(format!("buffer {i}")))
                    })
                    .collect::<Result<_>>()?,
                Some(_) => return Err(bad("\"buffers\" is not an array")),
            };
        }
        desc.extra = map.0;
        Ok(desc)
    }

    fn without_addresses(&self) -> bool {
        matches!(self.protocols.as_slice(), [p] if WITHOUT_ADDRESSES.contains(&p.as_str()))
    }
}

impl BufferDesc {
    fn to_value(&self) -> Value {
        let mut map = self.extra.clone();
        map.insert("name".into(), self.name.as_str().into());
        map.insert("addr".into(), self.addr.into());
        map.insert("length".into(), self.length.into());
        if !self.key.is_empty() {
            map.insert(ACCESS_KEY.into(), hex(&self.key).into());
        }
        Value::Object(map)
    }

    fn from_value(value: Value) -> Result<Self> {
        let Value::Object(map) = value else { return Err(bad("not a JSON object")) };
        let mut map = Fields(map);
        let buffer = Self {
            name: map.text("name")?,
            addr: map.number("addr", 0)?,
            length: map.number("length", 0)?,
            key: unhex(&map.text(ACCESS_KEY)?)
                .ok_or_else(|| bad(format!("{ACCESS_KEY:?} is not hexadecimal")))?,
            extra: map.0,
        };
        if buffer.name.is_empty() {
            return Err(bad("\"name\" is empty"));
        }
        if buffer.addr == 0 || buffer.length == 0 {
            return Err(bad(format!(
                "\"addr\" and \"length\" must not be zero. addr={} length={}",
                buffer.addr, buffer.length
            )));
        }
        if buffer.addr.checked_add(buffer.length).is_none() {
            return Err(bad(format!("range overflows. length={} addr={}", buffer.length, buffer.addr)));
        }
        Ok(buffer)
    }
}

struct Fields(Map<String, Value>);

impl Fields {
    fn text(&mut self, key: &str) -> Result<String> {
        match self.0.remove(key) {
            None | Some(Value::Null) => Ok(String::new()),
            Some(Value::String(text)) => Ok(text),
            Some(other) => Err(bad(format!("{key:?} is {}, not a text", shape(&other)))),
        }
    }

    fn number<N: TryFrom<u64>>(&mut self, key: &str, absent: N) -> Result<N> {
        let Some(value) = self.0.remove(key) else { return Ok(absent) };
        let number =
            value.as_u64().ok_or_else(|| bad(format!("{key:?} is {}, not a whole number", shape(&value))))?;
        N::try_from(number).map_err(|_| bad(format!("{key:?} is {number}, out of range")))
    }

    fn protocols(&mut self) -> Result<Vec<Protocol>> {
        let one = |value: Value| match value {
            Value::String(name) if !name.is_empty() => Ok(Protocol::new(name)),
            other => Err(bad(format!("\"protocol\" is {}, not a name", shape(&other)))),
        };
        match self.0.remove("protocol") {
            None => Err(bad("\"protocol\" is missing")),
            Some(Value::Array(names)) => names.into_iter().map(one).collect(),
            Some(name) => Ok(vec![one(name)?]),
        }
    }
}

fn shape(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// Formats bytes in hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Parses hexadecimal digits. Returns `None` for any other text.
pub fn unhex(text: &str) -> Option<Vec<u8>> {
    let digit = |c: u8| char::from(c).to_digit(16).and_then(|d| u8::try_from(d).ok());
    text.as_bytes()
        .chunks(2)
        .map(|pair| match *pair {
            [high, low] => Some(digit(high)? << 4 | digit(low)?),
            _ => None,
        })
        .collect()
}

fn bad(what: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorCode::InvalidParams, what).context("segment descriptor")
}

/// Memories of a segment, for tests whether they hold a range.
#[derive(Clone, Debug)]
pub(crate) struct HeldRanges {
    /// Begin of each memory, in order, and the last end of it and of those before.
    ends: Vec<(u64, u64)>,
}

impl HeldRanges {
    /// Returns the memories of a segment. Parts of one memory count as one.
    pub(crate) fn of(desc: &SegmentDesc) -> Self {
        let mut parts: Vec<_> = desc
            .buffers
            .iter()
            .filter_map(|part| Some((part, part.addr.checked_add(part.length)?)))
            .collect();
        parts.sort_unstable_by_key(|(part, end)| (part.addr, *end));
        // Part that ends at an address, and the begin of its memory.
        let mut before: HashMap<u64, (&BufferDesc, u64)> = HashMap::new();
        let mut ends: Vec<(u64, u64)> = Vec::with_capacity(parts.len());
        for (part, end) in parts {
            let begins = before.get(&part.addr).filter(|(before, _)| part.continues(before));
            let begin = begins.map_or(part.addr, |(_, begin)| *begin);
            let first = before.entry(end).or_insert((part, begin));
            if begin < first.1 {
                *first = (part, begin);
            }
            ends.push((begin, end));
        }
        ends.sort_unstable();
        let mut last = 0;
        for (_, end) in &mut ends {
            last = last.max(*end);
            *end = last;
        }
        Self { ends }
    }

    /// Returns whether all of `[addr, addr + len)` lies in one memory. Returns false for a length
    /// of zero.
    pub(crate) fn hold(&self, addr: u64, len: u64) -> bool {
        let after = self.ends.partition_point(|(begin, _)| *begin <= addr);
        let end = after.checked_sub(1).map(|at| self.ends[at].1);
        len != 0 && addr.checked_add(len).zip(end).is_some_and(|(last, end)| last <= end)
    }
}

/// Address ranges of the buffers in a descriptor, sorted. Clones share them.
#[derive(Clone, Debug)]
pub struct KnownRegions(Arc<[(u64, u64)]>);

impl KnownRegions {
    /// Returns the ranges of the buffers of a segment.
    pub fn of(desc: &SegmentDesc) -> Self {
        let range = |buffer: &BufferDesc| Some((buffer.addr, buffer.addr.checked_add(buffer.length)?));
        let mut regions: Vec<_> = desc.buffers.iter().filter_map(range).collect();
        regions.sort_unstable();
        Self(regions.into())
    }

    /// Returns whether the range lies in one region, as far as this node knows. The peer decides at
    /// each request. The result only tells whether the range may be split.
    pub fn contains(&self, addr: u64, len: usize) -> bool {
        let after = self.0.partition_point(|&(first, _)| first <= addr);
        let Some(&(_, end)) = after.checked_sub(1).and_then(|i| self.0.get(i)) else { return false };
        addr.checked_add(len as u64).is_some_and(|last| last <= end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PEER: &str = r#"{"buffers":[{"addr":139868396052496,"length":1048576,"name":"nodeA:12345"}],"name":"nodeA:12345","protocol":"tcp","rdma_server_name":"","tcp_data_host":"127.0.0.1","tcp_data_port":15145,"tcp_proto_version":2,"timestamp":"2026-11-20 18:22:15.141581"}"#;

    fn refused(text: &str) -> String {
        SegmentDesc::decode(text.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn the_peers_descriptor_comes_back_byte_for_byte() {
        let desc = SegmentDesc::decode(PEER.as_bytes()).unwrap();
        assert!(desc.supports(&Protocol::TCP));
        assert_eq!(
            (desc.tcp_data_host.as_str(), desc.tcp_data_port, desc.tcp_proto_version),
            ("127.0.0.1", 15145, 2)
        );
        assert_eq!(desc.buffers[0].addr, 139868396052496);
        assert_eq!(String::from_utf8(desc.encode()).unwrap(), PEER);
    }

    #[test]
    fn an_rdma_descriptor_survives() {
        let text = r#"{"buffers":[{"addr":4096,"length":8192,"lkey":[7],"name":"cpu:0","rkey":[4294967295]}],"devices":[{"gid":"00:ff","lid":0,"name":"mlx5_0"}],"name":"n","priority_matrix":{"cpu:0":[["mlx5_0"],[]]},"protocol":"rdma","rdma_server_name":"h:1","tcp_data_host":"","tcp_data_port":0,"tcp_proto_version":1,"timestamp":""}"#;
        let desc = SegmentDesc::decode(text.as_bytes()).unwrap();
        assert_eq!(desc.buffers[0].extra["rkey"], serde_json::json!([4294967295u32]));
        assert_eq!(String::from_utf8(desc.encode()).unwrap(), text);
    }

    #[test]
    fn buffers_without_addresses_and_several_wires_survive() {
        for text in [
            r#"{"buffers":[{"file_path":"/f","length":1,"local_path_map":{"h":"/p"}}],"name":"n","protocol":"nvmeof","rdma_server_name":"","tcp_data_host":"","tcp_data_port":0,"tcp_proto_version":1,"timestamp":""}"#,
            r#"{"buffers":[{"addr":1,"length":1,"name":"a","protocol":"tcp"}],"name":"n","protocol":["tcp","rdma"],"rdma_server_name":"","tcp_data_host":"","tcp_data_port":0,"tcp_proto_version":1,"timestamp":""}"#,
        ] {
            let desc = SegmentDesc::decode(text.as_bytes()).unwrap();
            assert_eq!(String::from_utf8(desc.encode()).unwrap(), text);
        }
    }

    #[test]
    fn missing_and_unknown_keys_are_fine() {
        let desc = SegmentDesc::decode(br#"{"protocol":"tcp","tcp_data_port":1,"later":{"x":[1]}}"#).unwrap();
        assert_eq!((desc.tcp_proto_version, desc.buffers.len()), (1, 0));
        assert_eq!(desc.extra["later"], serde_json::json!({"x": [1]}));
    }

    #[test]
    fn malformed_descriptor_error_states_cause() {
        for (text, word) in [
            ("", "not JSON"),
            ("[]", "not a JSON object"),
            ("{}", "\"protocol\" is missing"),
            (r#"{"protocol":1}"#, "protocol"),
            (r#"{"protocol":"tcp","tcp_data_port":"x"}"#, "tcp_data_port"),
            (r#"{"protocol":"tcp","tcp_data_port":-1}"#, "tcp_data_port"),
            (r#"{"protocol":"tcp","tcp_data_port":65536}"#, "out of range"),
            (r#"{"protocol":"tcp","buffers":{}}"#, "buffers"),
            (r#"{"protocol":"tcp","buffers":[{"name":"","addr":1,"length":1}]}"#, "\"name\" is empty"),
            (r#"{"protocol":"tcp","buffers":[{"name":"a","addr":0,"length":1}]}"#, "buffer 0"),
            (r#"{"protocol":"tcp","buffers":[{"name":"a","addr":1,"length":0}]}"#, "zero"),
            (
                r#"{"protocol":"tcp","buffers":[{"name":"a","addr":18446744073709551615,"length":1}]}"#,
                "overflow",
            ),
            (
                r#"{"protocol":"tcp","buffers":[{"name":"a","addr":1,"length":1,"access_key":"0g"}]}"#,
                "hexadecimal",
            ),
        ] {
            let error = refused(text);
            assert!(error.contains(word) && error.contains("segment descriptor"), "{text}: {error}");
        }
        assert!(refused(&"[".repeat(100_000)).contains("not JSON"));
        assert!(refused(&" ".repeat(MAX_DESC_BYTES + 1)).contains("at most"));
    }

    /// The ranges that a plain search of all buffers finds.
    fn searched(desc: &SegmentDesc, addr: u64, len: u64) -> bool {
        let holds_to = |end| addr.checked_add(len).is_some_and(|last| last <= end);
        let mut reached: Vec<_> = desc.buffers.iter().filter(|part| part.contains(addr, 1)).collect();
        let mut at = 0;
        while let Some(part) = reached.get(at).copied() {
            if holds_to(part.addr + part.length) {
                return len != 0;
            }
            for next in desc.buffers.iter().filter(|next| next.continues(part)) {
                if !reached.iter().any(|known| std::ptr::eq(*known, next)) {
                    reached.push(next);
                }
            }
            at += 1;
        }
        false
    }

    proptest! {
        #[test]
        fn sorted_ranges_hold_what_a_search_finds(
            parts in prop::collection::vec((1u64..12, 1u64..5, any::<bool>()), 0..9),
            (addr, len) in (0u64..18, 0u64..9),
        ) {
            let mut desc = SegmentDesc::new("node:1");
            desc.buffers.extend(parts.into_iter().map(|(addr, length, continues)| {
                let extra = [(CONTINUES.to_owned(), continues.into())].into_iter().collect();
                BufferDesc { name: "cpu:0".into(), addr, length, extra, ..BufferDesc::default() }
            }));
            prop_assert_eq!(desc.holds(addr, len), searched(&desc, addr, len));
        }
    }

    /// A batch of 300,000 requests that fail asks as often, with 20,000 buffers.
    #[test]
    #[cfg_attr(miri, ignore = "slow")]
    fn many_ranges_are_looked_up_among_many_buffers() {
        let mut desc = SegmentDesc::new("node:1");
        desc.buffers.extend((1..=20_000u64).rev().map(|at| BufferDesc {
            name: "cpu:0".into(),
            addr: at << 20,
            length: 4096,
            ..BufferDesc::default()
        }));
        let held = HeldRanges::of(&desc);
        let found = (0..300_000u64).filter(|at| held.hold(at << 16, 4096)).count();
        assert_eq!(found, 300_000 / 16 - 1);
    }

    #[test]
    fn buffers_are_found_by_whole_ranges() {
        let desc = SegmentDesc::decode(br#"{"protocol":"tcp","buffers":[{"name":"a","addr":100,"length":50},{"name":"b","addr":150,"length":50}]}"#).unwrap();
        for (addr, len, held) in
            [(100, 50, true), (199, 1, true), (149, 2, false), (100, 0, false), (u64::MAX, 2, false)]
        {
            assert_eq!(desc.holds(addr, len), held, "{len} bytes at {addr}");
        }
        let mut parts = desc;
        parts.buffers[1].extra.insert(CONTINUES.into(), true.into());
        for (addr, len, held) in [(149, 2, true), (100, 100, true), (100, 101, false), (150, 0, false)] {
            assert_eq!(parts.holds(addr, len), held, "{len} bytes at {addr} in two parts");
        }
        let later = |extra: serde_json::Value| BufferDesc {
            extra: extra.as_object().unwrap().clone(),
            ..parts.buffers[1].clone()
        };
        assert!(
            later(serde_json::json!({"rkey": [1]})).continues(&parts.buffers[0]),
            "the buffer of a node with Mooncake C++"
        );
        assert!(!later(serde_json::json!({"rkey": [1], "continues": false})).continues(&parts.buffers[0]));
        assert!(!later(serde_json::json!({})).continues(&parts.buffers[0]));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 2 } else { 128 }, failure_persistence: None, ..Default::default() })]

        #[test]
        #[cfg_attr(miri, ignore = "safe code, and half a minute there")]
        fn any_descriptor_round_trips(
            name in "\\PC*", host in "[a-z0-9.:]*", port: u16, version: u32, wires in prop::collection::vec("[a-z]{1,8}", 0..3),
            buffers in prop::collection::vec(("\\PC{1,8}", 1u64..1 << 60, 1u64..1 << 60, prop::collection::vec(any::<u8>(), 0..8)), 0..5),
        ) {
            let mut desc = SegmentDesc::new(name);
            desc.tcp_data_host = host;
            desc.tcp_data_port = port;
            desc.tcp_proto_version = version;
            desc.protocols = wires.into_iter().map(Protocol::new).collect();
            if !desc.without_addresses() {
                desc.buffers = buffers.into_iter().map(|(name, addr, length, key)| BufferDesc { name, addr, length, key, extra: Map::new() }).collect();
            }
            prop_assert_eq!(SegmentDesc::decode(&desc.encode()).unwrap(), desc);
        }

        #[test]
        fn noise_is_refused_without_a_panic(text in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = SegmentDesc::decode(&text);
        }
    }

    #[test]
    fn a_range_is_held_by_one_region() {
        let regions = KnownRegions([(100, 200), (200, 300)].into());
        for (addr, len, inside) in [
            (100, 100, true),
            (100, 101, false),
            (99, 2, false),
            (250, 50, true),
            (300, 1, false),
            (u64::MAX, 2, false),
        ] {
            assert_eq!(regions.contains(addr, len), inside, "{addr}+{len}");
        }
    }
}
