//! Fuzz targets, one function per parser of bytes from outside. A target must not panic, hang, or
//! allocate out of proportion, and its results must survive encoding and decoding again.

mod dispatch;

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use bytes::Bytes;
use crc_fast::{CrcAlgorithm, checksum};
use futures::FutureExt;
use mooncake_core::clock::{ManualClock, Moment, Rng};
use mooncake_core::evict::PolicyKind;
use mooncake_core::meta::{Expect, MemoryMetadata, MetadataBackend};
use mooncake_disk::layout::{IndexEntry, IndexHeader, Parsed as Line, Record as OnDisk, header_len};
use mooncake_engine::TransferEngine;
use mooncake_engine::environment::VARIABLES;
use mooncake_ipc::record::{RECORD_LEN, Record, RegionListParser};
use mooncake_metadata::etcd::response::{self, WatchLine};
use mooncake_pg::agent::{AgentEffect, AgentMachine, CallId};
use mooncake_pg::coordinator::CoordinatorMachine;
use mooncake_pg::limits::{AgentLimits, CoordinatorLimits};
use mooncake_pg::parsers;
use mooncake_pg::protocol::{AttachMode, ConnectionId, GroupSpec, SessionId, ToAgent, WorldId};
use mooncake_pg::view::GlobalRank;
use mooncake_rdma::message::Connection;
use mooncake_store::local::hello;
use mooncake_store::master::{Master, MasterOptions, Snapshot};
use mooncake_store::protocol::frame::{Parsed, parse_reply, parse_request, write_request};
use mooncake_store::protocol::message::{ADDED, DISK_ADDED, DISK_TABLE, EARLIER, IPC_TABLE, Shape, TABLE};
use mooncake_store::protocol::pack::PackError;
use mooncake_store::protocol::type_signature::TypeSignature;
use mooncake_tcp::frame::{Direction, HEADER_LEN, Request, STATUS_LEN, Status};
use mooncake_tcp::hello::{HELLO_LEN, HELLO_RESPONSE_LEN, Hello, HelloResponse, Instance};
use mooncake_tcp::inbox::Inbox;
use mooncake_transport::handshake::{self, HandshakeConfig};
use mooncake_transport::http_server::parameter;
use mooncake_transport::topology::{ANYWHERE, Topology};
use mooncake_transport::{Directory, SegmentDesc};

pub use dispatch::rpc_dispatch;

/// Targets by the name of their corpus.
pub const TARGETS: &[(&str, fn(&[u8]))] = &[
    ("tcp_frame", tcp_frame),
    ("tcp_hello", tcp_hello),
    ("rpc_frame", rpc_frame),
    ("struct_pack", struct_pack),
    ("descriptor", descriptor),
    ("handshake_frame", handshake_frame),
    ("metadata_key", metadata_key),
    ("rdma_connection", rdma_connection),
    ("shm_record", shm_record),
    ("disk_layout", disk_layout),
    ("local", local),
    ("rpc_dispatch", rpc_dispatch),
    ("topology", topology),
    ("etcd_answer", etcd_answer),
    ("metadata_value", metadata_value),
    ("environment", environment),
    ("snapshot", snapshot),
    ("group_control", group_control),
    ("group_data", group_data),
];

/// Longest body that the RPC target accepts.
const MAX_BODY: usize = 1 << 20;

/// Fuzzes the data port: a stream of headers and payload, in pieces as a socket returns them, and
/// status frames.
pub fn tcp_frame(data: &[u8]) {
    if let Some(header) = data.first_chunk::<HEADER_LEN>() {
        let request = Request::decode(header);
        assert_eq!(Request::decode(&request.encode()), request);
    }
    if let Some(frame) = data.first_chunk::<STATUS_LEN>()
        && let Ok(status) = Status::decode(*frame)
    {
        assert_eq!(status.encode(), *frame);
    }
    let mut inbox = Inbox::new();
    let mut rest = data;
    let mut owed = 0u64;
    while !rest.is_empty() {
        let space = inbox.space();
        let take = space.len().min(rest.len()).min(1 + usize::from(rest[0]));
        space[..take].copy_from_slice(&rest[..take]);
        inbox.received(take);
        rest = &rest[take..];
        loop {
            owed -= inbox.payload(owed).len() as u64;
            if owed > 0 {
                break;
            }
            match inbox.next_request() {
                Some(request) => owed = request.len.min(1 << 16),
                None => break,
            }
        }
    }
}

/// Fuzzes the data port: the first frame of a connection in pieces, the response to a hello, and
/// the instance in a descriptor.
pub fn tcp_hello(data: &[u8]) {
    if let Some(frame) = data.first_chunk::<HELLO_LEN>()
        && let Some(hello) = Hello::decode(frame)
    {
        assert_eq!(hello.encode(), *frame);
        // Nodes without hellos refuse a hello, which is not a valid request.
        let request = Request::decode(frame);
        assert_eq!((request.direction, request.len), (Direction::Read, 0));
    }
    if let Some(frame) = data.first_chunk::<HELLO_RESPONSE_LEN>()
        && let Some(response) = HelloResponse::decode(frame)
    {
        assert_eq!(response.encode(), *frame);
    }
    if let Some(instance) = std::str::from_utf8(data).ok().and_then(Instance::parse) {
        assert_eq!(Instance::parse(&instance.to_string()), Some(instance));
    }
    let (mut inbox, mut rest, mut first) = (Inbox::new(), data, None);
    while !rest.is_empty() && first.is_none() {
        let space = inbox.space();
        let take = space.len().min(rest.len()).min(1 + usize::from(rest[0] % 32));
        space[..take].copy_from_slice(&rest[..take]);
        inbox.received(take);
        rest = &rest[take..];
        first = inbox.hello();
    }
    let whole = data.first_chunk::<HELLO_LEN>();
    assert_eq!(first, whole.map(Hello::decode));
    if let (Some(None), Some(frame)) = (first, whole) {
        assert_eq!(inbox.next_request(), Some(Request::decode(frame)), "a request stays in the inbox");
    }
}

/// Fuzzes the RPC port: requests and responses, one after the other.
pub fn rpc_frame(data: &[u8]) {
    let mut rest = data;
    while let Ok(Parsed::Whole(request, used)) = parse_request(rest, MAX_BODY) {
        assert!(used > 0 && used <= rest.len());
        let mut again = Vec::new();
        write_request(&mut again, request.seq, request.function, |out| out.extend_from_slice(request.body));
        match parse_request(&again, MAX_BODY) {
            Ok(Parsed::Whole(same, _)) => assert_eq!((same.seq, same.body), (request.seq, request.body)),
            other => panic!("an encoded request does not parse: {other:?}"),
        }
        rest = &rest[used..];
    }
    let mut rest = data;
    while let Ok(Parsed::Whole(_, used)) = parse_reply(rest, MAX_BODY) {
        assert!(used > 0 && used <= rest.len());
        rest = &rest[used..];
    }
}

/// Fuzzes the bodies of messages: as they are, and behind the hash of a type and options that the
/// first bytes choose. A body that is read is written to a body with the same value.
pub fn struct_pack(data: &[u8]) {
    let hash = data.first_chunk().map(|head| u32::from_le_bytes(*head) & !1);
    for (at, side) in SIDES.iter().enumerate() {
        // Most types refuse a body for its hash; one of them is tried.
        if Some(side.hash) == hash || at == data.len() % SIDES.len() {
            side.round_trip(data);
        }
    }
    let [which, options, rest @ ..] = data else { return };
    let side = &SIDES[usize::from(*which) * SIDES.len() / 256];
    let head = side.hash | u32::from(*options != 0);
    let options = if *options == 0 { &[][..] } else { std::slice::from_ref(options) };
    side.round_trip(&[&head.to_le_bytes(), options, rest].concat());
}

/// Arguments or response of a call.
struct Side {
    shape: &'static Shape,
    hash: u32,
    rewrite: fn(&Shape, &[u8], bool) -> Result<Vec<u8>, PackError>,
}

static SIDES: LazyLock<Vec<Side>> = LazyLock::new(|| {
    let shapes = [TABLE, EARLIER, ADDED, DISK_TABLE, DISK_ADDED, IPC_TABLE].into_iter().flatten();
    let sides = shapes.flat_map(|shape| {
        let hash = |signature| TypeSignature::new(signature).hash();
        [
            Side { shape, hash: hash(shape.arguments), rewrite: Shape::rewrite_arguments },
            Side { shape, hash: hash(shape.reply), rewrite: Shape::rewrite_reply },
        ]
    });
    sides.collect()
});

impl Side {
    /// Reads a body and writes it in both forms.
    fn round_trip(&self, body: &[u8]) {
        for spelled in [false, true] {
            let Ok(written) = (self.rewrite)(self.shape, body, spelled) else { return };
            let again = (self.rewrite)(self.shape, &written, spelled);
            assert_eq!(again.as_deref(), Ok(&written[..]), "{} does not round-trip", self.shape.name);
        }
    }
}

/// Fuzzes snapshots of an earlier master: as they are, and with correct checksums, around pieces
/// that each have their length in front.
pub fn snapshot(data: &[u8]) {
    let mut sealed = Vec::new();
    let mut rest = data;
    while let Some((len, after)) = rest.split_first_chunk() {
        let (body, after) = after.split_at(after.len().min(usize::from(u16::from_le_bytes(*len))));
        sealed.extend((body.len() as u32).to_le_bytes());
        sealed.extend(checksum(CrcAlgorithm::Crc64Ecma182, body).to_le_bytes());
        sealed.extend(body);
        rest = after;
    }
    let sealed_as = |version: &[u8; 8]| [version, &sealed[..]].concat();
    let versions = [b"mksnap01", b"mksnap02", b"mksnap03", b"mksnap04"].map(sealed_as);
    for bytes in [data].into_iter().chain(versions.iter().map(|bytes| &bytes[..])) {
        let Ok(snapshot) = Snapshot::read(bytes) else { continue };
        let again = Snapshot::read(&snapshot.write());
        assert!(again.is_ok_and(|again| again == snapshot), "a snapshot does not round-trip");
        // The master still works after any snapshot.
        let options = MasterOptions { shards: 1, ..MasterOptions::default() };
        let clock = Arc::new(ManualClock::new());
        let policy = PolicyKind::Gittins.into();
        let master: Master = Master::with_parts(options, &Default::default(), &policy, clock, 1)
            .expect("cannot create a master");
        master.recall(snapshot);
        let mut next = Vec::new();
        let written = master.snapshot(|more| {
            next.extend_from_slice(more);
            Ok(())
        });
        assert!(written.is_ok() && Snapshot::read(&next).is_ok(), "a restored snapshot is not written again");
        assert_eq!(master.stats().keys, 0, "a snapshot makes nothing readable");
        master.tick();
    }
}

/// Fuzzes segment descriptors.
pub fn descriptor(data: &[u8]) {
    if let Ok(desc) = SegmentDesc::decode(data) {
        let again = SegmentDesc::decode(&desc.encode());
        assert!(again.is_ok_and(|again| again.same_but_for_time(&desc)), "a descriptor does not round-trip");
    }
}

/// Fuzzes the handshake port.
pub fn handshake_frame(data: &[u8]) {
    if let Ok(Some((frame, used))) = handshake::parse(data, 1 << 20) {
        assert!(used <= data.len());
        let again = handshake::encode(frame.kind, frame.legacy, frame.body);
        match handshake::parse(&again, 1 << 20) {
            Ok(Some((same, _))) => assert_eq!(same, frame),
            other => panic!("an encoded frame does not parse: {other:?}"),
        }
    }
}

/// Fuzzes queries of the HTTP metadata server.
pub fn metadata_key(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    if let Some(key) = parameter(Some(&text), "key") {
        assert!(key.len() <= text.len());
    }
}

/// Fuzzes the message of a peer that sets up an RDMA connection.
pub fn rdma_connection(data: &[u8]) {
    let Ok(value) = serde_json::from_slice(data) else { return };
    if let Ok(message) = Connection::decode(&value) {
        assert_eq!(Connection::decode(&message.encode()).ok(), Some(message));
    }
}

/// Fuzzes the socket of shared memory: records, and a response made of them, each region with the
/// size of its file in front.
pub fn shm_record(data: &[u8]) {
    // The same socket with GPU memory has a handle and its allocation behind each region.
    let (records, _) = data.as_chunks::<RECORD_LEN>();
    for records in records.windows(2) {
        if let Ok(again) = mooncake_nvlink::reencode_records(records) {
            assert_eq!(again, records);
        }
    }
    let (chunks, _) = data.as_chunks::<{ 8 + RECORD_LEN }>();
    let mut listing: Option<RegionListParser> = None;
    let mut taken: Vec<(u64, u64)> = Vec::new();
    for chunk in chunks {
        let (size, record) = chunk.split_at(8);
        let (Ok(size), Ok(record)) = (size.try_into().map(u64::from_le_bytes), record.try_into()) else {
            return;
        };
        let Ok(record) = Record::decode(record) else { continue };
        assert_eq!(Record::decode(&record.encode()).ok(), Some(record));
        match &mut listing {
            None => listing = RegionListParser::begin(record).ok(),
            Some(listing) => {
                if let Ok(region) = listing.push(record, size) {
                    assert!(region.offset + region.len <= size && region.len > 0);
                    assert!(taken.iter().all(|(from, end)| region.addr >= *end || region.end() <= *from));
                    taken.push((region.addr, region.end()));
                }
            }
        }
    }
}

/// Fuzzes the files of a disk cache: the header of an index, its notes, and the header of a record.
pub fn disk_layout(data: &[u8]) {
    if let Some(header) = IndexHeader::decode(data) {
        assert_eq!(IndexHeader::decode(&header.encode()), Some(header));
    }
    if let Some(record) = OnDisk::decode(data) {
        let len = header_len(record.key.len(), record.value_len);
        let mut again = vec![0; len as usize];
        record.encode(&mut again);
        assert_eq!(OnDisk::decode(&again), Some(record));
    }
    let mut rest = data;
    while !rest.is_empty() {
        match IndexEntry::parse(rest) {
            Line::Complete(note, used) => {
                assert!(used <= rest.len());
                let mut again = Vec::new();
                note.encode(&mut again);
                assert_eq!(again, rest[..used]);
                rest = &rest[used..];
            }
            Line::Incomplete(len) => {
                assert!(len > rest.len(), "the length exceeds the available bytes");
                rest = &rest[1..];
            }
            Line::Invalid => rest = &rest[1..],
        }
    }
}

/// Fuzzes the socket of IPC clients: a hello, and requests behind it. Bodies belong to
/// [`struct_pack`].
pub fn local(data: &[u8]) {
    let Some((first, rest)) = data.split_first_chunk::<RECORD_LEN>() else { return };
    if hello::check(first).is_ok() {
        assert_eq!(hello::encode(), *first);
        rpc_frame(rest);
    }
}

/// Fuzzes priority matrices: a custom file, or part of a descriptor.
pub fn topology(data: &[u8]) {
    let Ok(topology) = Topology::parse(&String::from_utf8_lossy(data)) else { return };
    assert_eq!(Topology::from_json(&topology.to_json()).as_ref().ok(), Some(&topology));
    assert_eq!(
        Topology::parse(&topology.styled()).as_ref().ok(),
        Some(&topology),
        "the displayed form round-trips"
    );
    let all = topology.devices();
    for (location, _) in topology.places().chain([(ANYWHERE, &Default::default())]) {
        let near = topology.near(location);
        for attempt in 0..4 {
            let chosen = near.choose(attempt, data.len() as u64);
            assert!(chosen.is_none_or(|device| all.contains(&device)));
            assert_eq!(chosen.is_none(), near.preferred.is_empty() && near.others.is_empty());
        }
    }
}

/// Fuzzes the response of etcd's JSON gateway to a range, and a line of a watch.
pub fn etcd_answer(data: &[u8]) {
    let Ok(json) = response::json(data) else { return };
    if let Ok((entries, _)) = response::entries(&json) {
        assert!(
            entries.iter().map(|(key, value)| key.len() + value.value.len()).sum::<usize>() <= data.len()
        );
    }
    if let Ok(WatchLine::Events(events, newest)) = response::watch_line(data) {
        let revisions = events.iter().filter_map(|event| Some(event.value.as_ref()?.revision));
        assert!(revisions.max().is_none_or(|revision| revision <= newest));
    }
}

/// Fuzzes the values of a segment's two keys in a metadata directory (over HTTP, in etcd, in
/// Redis).
pub fn metadata_value(data: &[u8]) {
    let backend = Arc::new(MemoryMetadata::new());
    for key in ["mooncake/rpc_meta/n", "mooncake/ram/n"] {
        let put = backend.put(key, Bytes::copy_from_slice(data), Expect::Any).now_or_never();
        assert!(matches!(put, Some(Ok(_))));
    }
    let directory = Directory::new(backend);
    let (limits, now) = (HandshakeConfig::default(), "the future is ready at once");
    let at = directory.locate("n").now_or_never().expect(now);
    if let Ok(Some(at)) = &at {
        assert!(at.host.len() <= 3 * data.len());
    }
    if let Ok(desc) = directory.descriptor("n", b"{}", &limits).now_or_never().expect(now) {
        let again = SegmentDesc::decode(&desc.encode());
        assert!(again.is_ok_and(|again| again.same_but_for_time(&desc)), "a descriptor does not round-trip");
    }
}

/// Fuzzes values of the engine's variables: one value for all, and the lines of the input for one
/// after the other.
pub fn environment(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let lines: Vec<&str> = text.split('\n').collect();
    let names = || VARIABLES.iter().flat_map(|variable| variable.names());
    let clock = Arc::new(ManualClock::new());
    let read = |get: &dyn Fn(usize) -> String| {
        let environment = names().enumerate().map(|(number, name)| (name, get(number))).collect();
        format!("{:?}", TransferEngine::builder().clock(clock.clone()).environment_of(&environment))
    };
    assert_eq!(read(&|_| text.to_string()), read(&|_| text.to_string()));
    read(&|number| lines[number % lines.len()].to_owned());
}

/// Fuzzes the control plane of process groups: hellos, and streams of messages that a coordinator
/// and an agent process.
pub fn group_control(data: &[u8]) {
    parsers::control_hello(data);
    let mut now = Moment(1_000_000_000);
    let mut coordinator = CoordinatorMachine::new(WorldId(1), CoordinatorLimits::default(), now);
    let mut effects = Vec::new();
    for (number, message) in parsers::to_coordinator(data).into_iter().enumerate() {
        now = now.after(Duration::from_millis(300));
        // Two connections in turn.
        coordinator.receive(ConnectionId(number as u64 % 2), message, now, &mut effects);
        coordinator.tick(now, &mut effects);
        effects.clear();
    }
    let messages = parsers::to_agent(data);
    if messages.is_empty() {
        return;
    }
    let (limits, rng) = (AgentLimits::default(), Rng::seeded(1));
    let mut agent = AgentMachine::new(GlobalRank(0), SessionId(1), String::new(), limits, rng, now);
    let mut effects = Vec::new();
    agent.tick(now, &mut effects);
    let connect = |effect: &AgentEffect| match effect {
        AgentEffect::Connect(connection) => Some(*connection),
        _ => None,
    };
    let Some(connection) = effects.iter().find_map(connect) else { return };
    agent.connected(connection, now, &mut effects);
    let registered = ToAgent::Registered { world: WorldId(1), incarnation: 1 };
    agent.receive(connection, registered, now, &mut effects);
    let spec = GroupSpec {
        name: "group".into(),
        order: vec![GlobalRank(0), GlobalRank(1)],
        capacity: 2,
        mode: AttachMode::CreateOrAttach,
        auto_deactivate: true,
    };
    agent.register_group(CallId(1), spec, now, &mut effects);
    for message in messages {
        now = now.after(Duration::from_millis(300));
        agent.receive(connection, message, now, &mut effects);
        agent.tick(now, &mut effects);
        effects.clear();
    }
}

/// Fuzzes the data plane of process groups: the start of a connection, its messages in pieces, and
/// published endpoints.
pub fn group_data(data: &[u8]) {
    let piece = data.first().map_or(1, |first| 1 + usize::from(*first));
    parsers::data_plane(data, piece);
    if let Some((_, rest)) = data.split_first_chunk::<24>() {
        // The messages behind a hello.
        parsers::data_plane(rest, piece);
    }
}
