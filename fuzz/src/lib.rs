//! One function per parser of bytes from outside. It must not panic, hang, or allocate out of proportion, and what it
//! understood must survive being written and read again.

mod dispatch;

use mooncake_disk::layout::{IndexHeader, Note, Parsed as Line, Record as OnDisk, header_len};
use mooncake_rdma::message::Connection;
use mooncake_shm::record::{Listing, RECORD_LEN, Record};
use mooncake_store::local::message::{self, HEAD_LEN, Verb};
use mooncake_store::local::record::Record as LocalRecord;
use mooncake_store::protocol::frame::{Parsed, parse_reply, parse_request, write_request};
use mooncake_store::protocol::message::{ADDED, Shape, TABLE};
use mooncake_store::protocol::pack::PackError;
use mooncake_tcp::frame::{HEADER_LEN, Inbox, Request, STATUS_LEN, Status};
use mooncake_transport::SegmentDesc;
use mooncake_transport::handshake;
use mooncake_transport::http_server::parameter;

pub use dispatch::rpc_dispatch;

/// All of them, by the name of their corpus.
pub const TARGETS: &[(&str, fn(&[u8]))] = &[
    ("tcp_frame", tcp_frame),
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
];

/// Longest body taken by the RPC target.
const MAX_BODY: usize = 1 << 20;

/// The data port: a stream of headers and payload, in pieces as a socket gives them, and status frames.
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

/// The RPC port: requests and replies, one after the other.
pub fn rpc_frame(data: &[u8]) {
    let mut rest = data;
    while let Ok(Parsed::Whole(request, used)) = parse_request(rest, MAX_BODY) {
        assert!(used > 0 && used <= rest.len());
        let mut again = Vec::new();
        write_request(&mut again, request.seq, request.function, |out| out.extend_from_slice(request.body));
        match parse_request(&again, MAX_BODY) {
            Ok(Parsed::Whole(same, _)) => assert_eq!((same.seq, same.body), (request.seq, request.body)),
            other => panic!("a request of ours is not one: {other:?}"),
        }
        rest = &rest[used..];
    }
    let mut rest = data;
    while let Ok(Parsed::Whole(_, used)) = parse_reply(rest, MAX_BODY) {
        assert!(used > 0 && used <= rest.len());
        rest = &rest[used..];
    }
}

/// Bodies: the bytes as arguments and as answer of every call.
pub fn struct_pack(data: &[u8]) {
    for shape in TABLE.iter().chain(ADDED) {
        for rewrite in [Shape::rewrite_arguments as Rewrite, Shape::rewrite_reply] {
            let Ok(written) = rewrite(shape, data, false) else { continue };
            let again = rewrite(shape, &written, false);
            assert_eq!(again.as_deref(), Ok(&written[..]), "{} does not come back", shape.name);
        }
    }
}

type Rewrite = fn(&Shape, &[u8], bool) -> Result<Vec<u8>, PackError>;

/// Segment descriptors.
pub fn descriptor(data: &[u8]) {
    if let Ok(desc) = SegmentDesc::decode(data) {
        let again = SegmentDesc::decode(&desc.encode());
        assert!(again.is_ok_and(|again| again.same_but_for_time(&desc)), "a descriptor does not come back");
    }
}

/// The handshake port.
pub fn handshake_frame(data: &[u8]) {
    if let Ok(Some((frame, used))) = handshake::parse(data, 1 << 20) {
        assert!(used <= data.len());
        let again = handshake::encode(frame.kind, frame.legacy, frame.body);
        match handshake::parse(&again, 1 << 20) {
            Ok(Some((same, _))) => assert_eq!(same, frame),
            other => panic!("a frame of ours is not one: {other:?}"),
        }
    }
}

/// Queries of the HTTP metadata server.
pub fn metadata_key(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    if let Some(key) = parameter(Some(&text), "key") {
        assert!(key.len() <= text.len());
    }
}

/// What a peer says when it sets up an RDMA connection.
pub fn rdma_connection(data: &[u8]) {
    let Ok(value) = serde_json::from_slice(data) else { return };
    if let Ok(message) = Connection::decode(&value) {
        assert_eq!(Connection::decode(&message.encode()).ok(), Some(message));
    }
}

/// The socket of shared memory: records, and an answer made of them, each region with the size of its file before it.
pub fn shm_record(data: &[u8]) {
    let (chunks, _) = data.as_chunks::<{ 8 + RECORD_LEN }>();
    let mut listing: Option<Listing> = None;
    let mut taken: Vec<(u64, u64)> = Vec::new();
    for chunk in chunks {
        let (size, record) = chunk.split_at(8);
        let (Ok(size), Ok(record)) = (size.try_into().map(u64::from_le_bytes), record.try_into()) else {
            return;
        };
        let Ok(record) = Record::decode(record) else { continue };
        assert_eq!(Record::decode(&record.encode()).ok(), Some(record));
        match &mut listing {
            None => listing = Listing::begin(record).ok(),
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

/// A disk cache's files: the header of an index and what is appended to it, and the header of a record.
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
        match Note::parse(rest) {
            Line::Whole(note, used) => {
                assert!(used <= rest.len());
                let mut again = Vec::new();
                note.encode(&mut again);
                assert_eq!(again, rest[..used]);
                rest = &rest[used..];
            }
            Line::More(len) => {
                assert!(len > rest.len(), "what is there is enough");
                rest = &rest[1..];
            }
            Line::Bad => rest = &rest[1..],
        }
    }
}

/// The socket of light clients: control records, heads, and bodies as every call and every answer.
pub fn local(data: &[u8]) {
    if let Some(bytes) = data.first_chunk::<RECORD_LEN>()
        && let Ok(record) = LocalRecord::decode(bytes)
    {
        assert_eq!(record.encode(), *bytes);
        let _ = record.done();
    }
    let Some((head, body)) = data.split_first_chunk::<HEAD_LEN>() else { return };
    if let Ok((verb, len)) = message::parse_call(*head) {
        assert_eq!(message::head(len, verb as u8), *head);
    }
    if let Ok((status, len)) = message::parse_answer(*head) {
        assert_eq!(message::head(len, status as u8), *head);
    }
    for verb in Verb::ALL {
        for answer in [false, true] {
            let Ok(written) = message::rewrite(verb, answer, body) else { continue };
            let again = message::rewrite(verb, answer, &written);
            assert_eq!(again.as_deref(), Ok(&written[..]), "{verb:?} does not come back");
        }
    }
}
