//! Compatible fields of Mooncake C++ 0.3.14: its messages byte by byte, what a master tolerates,
//! and masters that do not know the compatible fields.

use std::borrow::Cow;
use std::sync::Arc;

use mooncake_core::error::ErrorCode;
use mooncake_core::ids::{ClientId, ObjectKey, SegmentId, Uuid};
use mooncake_core::replica::{Locality, Replica, ReplicaList, ReplicaType, ReplicateConfig, Segment};
use mooncake_store::api::{Caller, EndItem, PutItem, WriteMode};
use mooncake_store::master::{Master, MasterOptions, TenantQuota};
use mooncake_store::protocol::client::RpcOptions;
use mooncake_store::protocol::frame::Status;
use mooncake_store::protocol::master_client::MasterClient;
use mooncake_store::protocol::message::*;
use mooncake_store::protocol::pack::{self, Answer, Pairs, Unpack};
use mooncake_store::protocol::server::{Refusal, RunningServer, Server, ServerOptions, Service};
use mooncake_store::protocol::service::MasterService;
use mooncake_store::protocol::wire::{CopyPlan, ProbePolicy};
use parking_lot::Mutex;

const TENANT: &str = "default";
const CLIENT: ClientId = ClientId(Uuid::new(0x064d_d53a_cab4_4b05, 0x1522_c128_8453_b6a7));
const CALLER: Caller<'_> = Caller { client: CLIENT, tenant: TENANT, attempt: 77 };

fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
    let byte = |pair: &[u8]| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap();
    digits.chunks(2).map(byte).collect()
}

/// Bytes of parts that several messages have.
const ID: &str = "054bb4ca3ad54d06 a7b6538428c12215";
const CONFIG: &str =
    "0100000000000000 0000000000000000 0000000000000000 00 00 00 00 00 00 00 00 09 31302e39392e302e31 00";
const DEFAULT: &str = "07 64656661756c74";
const ENDPOINT: &str = "0f 31302e39392e302e313a3135303635";

/// Messages of Mooncake C++ 0.3.14: call, side, hash with options and total length, and the fields
/// behind the type signature. `{..}` stands for a common part.
#[rustfmt::skip]
const RECORDED: &[(&str, &str, &str, &str)] = &[
    ("ServiceReady", "reply", "35ccb31c 04", "01 05 322e302e30"),
    ("MountSegment", "arguments", "af0df79e 05 8100", "9e8c93ca05014f7a 932f550549f78c55 0f 31302e39392e302e313a3132363036 000000ac8b7f0000 0000000400000000 {endpoint} 03 746370 09 31302e39392e302e31 {client} 00"),
    ("ReMountSegment", "arguments", "896bc6c6 05 8300", "01 9e8c93ca05014f7a 932f550549f78c55 0f 31302e39392e302e313a3132363036 000000ac8b7f0000 0000000400000000 {endpoint} 03 746370 09 31302e39392e302e31 {client} 00"),
    ("Ping", "arguments", "e1836d3c 04", "{client}"),
    ("Ping", "reply", "538f2a74 04", "01 0000000000000000 02000000"),
    ("PutStart", "arguments", "0fbd85e3 05 8000", "{client} 02 6b31 8813000000000000 {config} {tenant} 00 00 00 00"),
    ("PutStart", "arguments", "0fbd85e3 05 a300", "{client} 02 6b31 8813000000000000 {config} {tenant} 01 01 04 73657373 01 02 06 6d6c78355f30 06 6d6c78355f31 01 01 02 02 6830 02 6831 01 01 04 61666630"),
    ("PutStart", "reply", "a72739c4 05 7100", "01 01 0800000000000000 00 6400000000000000 641b00ac8b7f0000 03 746370 {endpoint} 02000000 00"),
    ("UpsertStart", "reply", "a72739c4 05 7100", "01 01 0800000000000000 00 6400000000000000 641b00ac8b7f0000 03 746370 {endpoint} 02000000 00"),
    ("PutEnd", "arguments", "239281d1 04", "{client} 02 6b31 00 04000000 {tenant}"),
    ("BatchPutStart", "arguments", "a5c07058 05 bb00", "{client} 02 03 6b6331 03 6b6332 02 6400000000000000 6400000000000000 {config} {tenant} 01 02 02 7331 02 7332 01 02 06 6d6c78355f30 06 6d6c78355f31 01 02 02 02 6830 02 6831 00 01 02 04 61666630 04 61666631"),
    ("BatchPutStart", "reply", "036d00ad 05 a700", "02 01 01 0900000000000000 00 6400000000000000 641b00ac8b7f0000 03 746370 {endpoint} 02000000 01 01 0a00000000000000 00 6400000000000000 c81b00ac8b7f0000 03 746370 {endpoint} 02000000 00 00"),
    ("GetReplicaList", "arguments", "d91ef97c 04", "02 6b31 {tenant}"),
    ("GetReplicaList", "reply", "6d27c688 05 8800", "01 01 0100000000000000 00 8813000000000000 641b00ac8b7f0000 03 746370 {endpoint} 03000000 1027000000000000 00 00 01 {tenant}"),
    ("BatchGetReplicaList", "reply", "3b45c520 05 d500", "03 01 01 0200000000000000 00 6400000000000000 641b00ac8b7f0000 03 746370 {endpoint} 03000000 1027000000000000 00 01 01 0300000000000000 00 6400000000000000 c81b00ac8b7f0000 03 746370 {endpoint} 03000000 1027000000000000 00 00 40fdffff 00 01 {tenant} 00 01 {tenant}"),
    ("ExistKey", "arguments", "d91ef97c 04", "02 6b31 {tenant}"),
    ("ExistKey", "reply", "d300e890 04", "01 01"),
    ("BatchProbeKey", "arguments", "454d5ab7 04", "00 00000000000000 0100000000000000 02 02 7531 02 7a7a {tenant}"),
    ("BatchReplicaClear", "arguments", "1bbb9afa 04", "01 02 7532 {client} 00 {tenant}"),
    ("BatchReplicaClear", "reply", "ebbd08e1 04", "01 01 02 7532"),
    ("ClearOfAnyTenant", "arguments", "a32f2b47 04", "01 02 7532 {client} 00"),
];

/// Returns a recorded message and its call.
fn recorded(&(name, side, head, fields): &(&str, &str, &str, &str)) -> (&'static Shape, Vec<u8>) {
    let shape = TABLE.iter().chain(EARLIER).find(|shape| shape.name == name).unwrap();
    let signature = if side == "arguments" { shape.arguments } else { shape.reply };
    let parts = [("{client}", ID), ("{config}", CONFIG), ("{tenant}", DEFAULT), ("{endpoint}", ENDPOINT)];
    let fields = parts.iter().fold(fields.to_owned(), |text, (part, bytes)| text.replace(part, bytes));
    (shape, [&unhex(head)[..], signature, &[0], &unhex(&fields)].concat())
}

#[test]
fn recorded_messages_are_read_and_written_to_the_same_bytes() {
    for message in RECORDED {
        let (name, side, ..) = message;
        let (shape, body) = recorded(message);
        if body[4] & 3 == 1 {
            assert_eq!(usize::from(u16::from_le_bytes([body[5], body[6]])), body.len(), "{name} {side}");
        }
        let again = match *side {
            "arguments" => shape.rewrite_arguments(&body, true),
            _ => shape.rewrite_reply(&body, true),
        };
        assert_eq!(again.as_deref(), Ok(&*body), "{side} of {name}");
    }
}

/// Reads the recorded request at this index.
fn request<T>(at: usize, check: impl FnOnce(T))
where
    T: for<'a> Unpack<'a>,
{
    let (_, body) = recorded(&RECORDED[at]);
    check(pack::decode(&body).unwrap());
}

#[test]
fn members_of_recorded_messages_have_their_meaning() {
    let (_, body) = recorded(&RECORDED[6]);
    let put: PutStart<'_> = pack::decode(&body).unwrap();
    assert_eq!((put.client, put.key, put.size, put.tenant), (CLIENT, &b"k1"[..], 5000, TENANT));
    let config = put.config.into_owned();
    assert_eq!(config.session_ids, Some(vec![b"sess".to_vec()]));
    assert_eq!(config.preferred_hca_names, Some(vec!["mlx5_0".to_owned(), "mlx5_1".to_owned()]));
    assert_eq!(config.per_key_preferred_hca_names, Some(vec![vec!["h0".to_owned(), "h1".to_owned()]]));
    assert_eq!(config.residency_affinity_ids, Some(vec![b"aff0".to_vec()]));

    let (_, body) = recorded(&RECORDED[10]);
    let put: BatchPutStart<'_> = pack::decode(&body).unwrap();
    let config = put.config.into_owned();
    assert_eq!(config.session_ids, Some(vec![b"s1".to_vec(), b"s2".to_vec()]));
    assert_eq!(config.per_key_preferred_hca_names, Some(vec![vec!["h0".into(), "h1".into()], vec![]]));
    assert_eq!(config.residency_affinity_ids, Some(vec![b"aff0".to_vec(), b"aff1".to_vec()]));

    request::<Vec<Answer<ReplicaList>>>(14, |lists| {
        let tenants = lists.iter().map(|list| list.as_ref().map(|list| list.resolved_tenant.as_deref()));
        let default = || Ok(Some(TENANT));
        assert!(tenants.eq([default(), default(), Err(&ErrorCode::ObjectNotFound)]));
    });
}

fn locality() -> Locality {
    Locality { numa_node: 3, hca_names: vec!["mlx5_0".into(), "mlx5_1".into()] }
}

/// A locality as in a message of Mooncake C++.
const LOCALITY: &str = "01 03000000 02 06 6d6c78355f30 06 6d6c78355f31";

#[test]
fn a_locality_stands_behind_the_other_arguments() {
    let (shape, mut body) = recorded(&RECORDED[1]);
    let end = body.len() - 1;
    body.splice(end.., unhex(LOCALITY));
    let len = u16::try_from(body.len()).unwrap();
    body[5..7].copy_from_slice(&len.to_le_bytes());
    assert_eq!(shape.rewrite_arguments(&body, true).as_deref(), Ok(&*body));
    let mount: MountSegment<'_> = pack::decode(&body).unwrap();
    assert_eq!((mount.client, mount.segment.locality.as_deref()), (CLIENT, Some(&locality())));
}

#[test]
fn a_large_batch_has_wide_lengths() {
    let names: Vec<String> = (0..3000).map(|number| format!("key {number}")).collect();
    let keys: Vec<&[u8]> = names.iter().map(String::as_bytes).collect();
    let sessions = names.iter().map(|name| name.clone().into_bytes()).collect();
    let config = ReplicateConfig { session_ids: Some(sessions), ..ReplicateConfig::default() };
    let request = BatchPutStart {
        client: CLIENT,
        keys: keys.into(),
        sizes: vec![100; 3000].into(),
        config: Cow::Owned(config),
        tenant: TENANT,
    };
    let mut body = Vec::new();
    pack::encode_spelled(&request, &mut body);
    assert_eq!(body[4], 0x0e, "type signature, total length of four bytes, lengths of two");
    assert_eq!(u32::from_le_bytes(body[5..9].try_into().unwrap()) as usize, body.len());
    assert_eq!(pack::decode::<BatchPutStart<'_>>(&body), Ok(request));
}

/// Total length of a body.
#[derive(Clone, Copy, PartialEq)]
enum Total {
    None,
    /// The real one, with this code of its width.
    Real(u8),
    /// Another one, with two bytes.
    Claimed(usize),
    /// Hash of the part without compatible fields.
    Ordinary,
}

/// Returns a body of `PutStart` with these compatible fields behind the ordinary part.
fn put_start(key: &[u8], spelled: bool, extra_options: u8, total: Total, members: &[u8]) -> Vec<u8> {
    let config = Cow::Owned(ReplicateConfig::default());
    let mut ordinary = Vec::new();
    pack::encode(&PutStart { client: CLIENT, key, size: 100, config, tenant: TENANT }, &mut ordinary);
    let signature = TABLE.iter().find(|shape| shape.name == "PutStart").unwrap().arguments;
    let width = match total {
        Total::None => 0,
        Total::Real(width) => width,
        Total::Claimed(_) | Total::Ordinary => 1,
    };
    let mut body = ordinary[..4].to_vec();
    body[0] |= 1;
    body.push(extra_options | width | if spelled { 4 } else { 0 });
    let bytes = [0, 2, 4, 8][usize::from(width)];
    let spelling = if spelled { [signature, &[0]].concat() } else { Vec::new() };
    let behind = [&spelling[..], &ordinary[4..]].concat();
    let without_members = 5 + bytes + behind.len();
    let value = match total {
        Total::None | Total::Real(_) => without_members + members.len(),
        Total::Claimed(len) => len,
        Total::Ordinary => without_members,
    };
    body.extend(&value.to_le_bytes()[..bytes]);
    body.extend(behind);
    body.extend(members);
    body
}

const ABSENT: &str = "00 00 00 00";
const ONE: &str = "01 01 04 73657373";
const TWO: &str = "01 01 02 6830";
const THREE: &str = "01 01 01 02 6830";
const FOUR: &str = "01 01 02 6166";

/// Name, whether the type signature is there, further option bits, total length, compatible fields,
/// and the number of compatible fields that count. The master refuses a message without one.
type Case = (&'static str, bool, u8, Total, Vec<u8>, Option<usize>);

/// Returns the cases that a master of Mooncake C++ 0.3.14 was tried with.
fn cases() -> Vec<Case> {
    let members = |some: &[&str]| unhex(&some.concat());
    let all = || members(&[ONE, TWO, THREE, FOUR]);
    let unknown = |len: usize| [all(), vec![0xa7; len]].concat();
    let cut = || {
        let mut cut = all();
        cut.truncate(cut.len() - unhex(FOUR).len() - 2);
        cut
    };
    let real = Total::Real(1);
    vec![
        ("form of 0.3.13 with its signature", true, 0, Total::None, vec![], Some(0)),
        ("form of 0.3.13 without it", false, 0, Total::None, vec![], Some(0)),
        ("all absent, with the signature", true, 0, real, members(&[ABSENT]), Some(0)),
        ("all absent, without it", false, 0, real, members(&[ABSENT]), Some(0)),
        ("members 1 to 4", true, 0, real, all(), Some(4)),
        ("members 1 to 4 without the signature", false, 0, real, all(), Some(4)),
        ("only 1", true, 0, real, members(&[ONE]), Some(1)),
        ("1 and 2", true, 0, real, members(&[ONE, TWO]), Some(2)),
        ("1 to 3", true, 0, real, members(&[ONE, TWO, THREE]), Some(3)),
        ("5 bytes of an unknown member", true, 0, real, unknown(5), Some(4)),
        ("300 bytes of an unknown member", true, 0, real, unknown(300), Some(4)),
        ("members without a total length", true, 0, Total::None, all(), Some(0)),
        ("total length 0", true, 0, Total::Claimed(0), all(), Some(0)),
        ("total length without the members", true, 0, Total::Ordinary, all(), Some(0)),
        ("total length 60000", true, 0, Total::Claimed(60_000), all(), Some(4)),
        ("total length of four bytes", true, 0, Total::Real(2), all(), Some(4)),
        ("total length of eight bytes", true, 0, Total::Real(3), all(), Some(4)),
        ("end inside member 3", true, 0, Total::Claimed(60_000), cut(), None),
        ("end inside member 3, as the total length says", true, 0, real, cut(), Some(2)),
        ("unused option", true, 0x20, real, all(), Some(4)),
        ("all unused options", true, 0xe0, Total::None, vec![], Some(0)),
    ]
}

fn master_with(options: MasterOptions) -> Arc<Master> {
    let master = Arc::new(Master::new(options).unwrap());
    master.mount(CLIENT, &segment(None)).unwrap();
    master
}

fn master() -> Arc<Master> {
    master_with(MasterOptions::default())
}

fn segment(locality: Option<Locality>) -> Segment {
    Segment {
        id: SegmentId(Uuid::new(3, 4)),
        name: "host:1".into(),
        base: 1 << 40,
        size: 64 << 20,
        endpoint: "host:2".into(),
        protocol: "tcp".into(),
        host_id: "host".into(),
        locality: locality.map(Box::new),
    }
}

#[test]
fn a_master_tolerates_what_mooncake_cpp_does() {
    let service = MasterService(master());
    for (at, (name, spelled, options, total, members, count)) in cases().into_iter().enumerate() {
        let key = format!("key {at}");
        let body = put_start(key.as_bytes(), spelled, options, total, &members);
        let mut out = Vec::new();
        let called = service.call(PutStart::FUNCTION, &body, &mut out);
        let Some(count) = count else {
            assert_eq!(called.unwrap_err().0, Status::InvalidArguments, "{name}");
            continue;
        };
        called.unwrap_or_else(|(_, text)| panic!("{name}: {text}"));
        let granted: Answer<Vec<Replica>> = pack::decode(&out).unwrap();
        assert_eq!(granted.unwrap().len(), 1, "{name}");
        let config = pack::decode::<PutStart<'_>>(&body).unwrap().config.into_owned();
        let set = [
            config.session_ids == Some(vec![b"sess".to_vec()]),
            config.preferred_hca_names == Some(vec!["h0".into()]),
            config.per_key_preferred_hca_names == Some(vec![vec!["h0".into()]]),
            config.residency_affinity_ids == Some(vec![b"af".to_vec()]),
        ];
        assert_eq!(set, [0, 1, 2, 3].map(|at| at < count), "{name}: {config:?}");
    }
}

/// A compatible field can be longer than the body only by its own lengths, which are checked.
#[test]
fn no_memory_is_reserved_for_a_length_in_a_member() {
    for tail in ["01 ff", "01 01 ff", "00 01 ff", "00 00 01 ff", "00 00 01 01 ff", "00 00 00 01 ff"] {
        for total in [Total::Claimed(60_000), Total::Real(1), Total::Real(3)] {
            let body = put_start(b"k", true, 0, total, &unhex(tail));
            let read = pack::decode::<PutStart<'_>>(&body).map(|put| put.config.into_owned());
            match total {
                Total::Claimed(_) => assert!(read.is_err(), "{tail}"),
                _ => assert_eq!(read, Ok(ReplicateConfig::default()), "{tail}"),
            }
        }
    }
}

/// Makes a call as a client of Mooncake C++ does. Returns the response and its body.
fn spelled_call<R, T>(service: &MasterService<Master>, request: &R) -> (T, Vec<u8>)
where
    R: Request,
    T: for<'a> Unpack<'a>,
{
    let (mut body, mut out) = (Vec::new(), Vec::new());
    pack::encode_spelled(request, &mut body);
    service.call(R::FUNCTION, &body, &mut out).unwrap();
    (pack::decode(&out).unwrap(), out)
}

/// Makes a call as a client of this system does.
fn plain_call<R: Request, T: for<'a> Unpack<'a>>(service: &MasterService<Master>, request: &R) -> T {
    let (mut body, mut out) = (Vec::new(), Vec::new());
    pack::encode(request, &mut body);
    service.call(R::FUNCTION, &body, &mut out).unwrap();
    assert!(out[0] & 1 == 0 || out[4] & 3 == 0, "an earlier version refuses a total length");
    pack::decode(&out).unwrap()
}

fn has_total(body: &[u8]) -> bool {
    body[0] & 1 == 1 && body[4] & 3 != 0
}

fn locality_of(replica: &Replica) -> Option<&Locality> {
    replica.location.memory().unwrap().locality.as_deref()
}

fn start_of<'a>(key: &'a [u8], config: &'a ReplicateConfig) -> PutStart<'a> {
    PutStart { client: CLIENT, key, size: 100, config: Cow::Borrowed(config), tenant: TENANT }
}

/// Every response with a description of memory tells its locality to a client of Mooncake C++.
#[test]
fn localities_come_back_in_descriptions() {
    let service = MasterService(Arc::new(Master::new(MasterOptions::default()).unwrap()));
    let mount = MountSegment { segment: Cow::Owned(segment(Some(locality()))), client: CLIENT };
    let (mounted, _) = spelled_call::<_, Answer<()>>(&service, &mount);
    mounted.unwrap();
    let other = Segment {
        id: SegmentId(Uuid::new(5, 6)),
        name: "other:1".into(),
        endpoint: "other:2".into(),
        base: 1 << 41,
        host_id: "other".into(),
        ..segment(None)
    };
    service.0.mount(ClientId(Uuid::new(8, 9)), &other).unwrap();

    let config = ReplicateConfig { preferred_segment: "host:1".into(), ..ReplicateConfig::default() };
    let (granted, body) = spelled_call::<_, Answer<Vec<Replica>>>(&service, &start_of(b"a", &config));
    assert_eq!(locality_of(&granted.unwrap()[0]), Some(&locality()));
    assert!(body.ends_with(&unhex(LOCALITY)), "{body:02x?}");
    let granted: Answer<Vec<Replica>> = plain_call(&service, &start_of(b"b", &config));
    assert_eq!(locality_of(&granted.unwrap()[0]), None);
    let batch = BatchPutStart {
        client: CLIENT,
        keys: vec![&b"c"[..], b"d"].into(),
        sizes: vec![100, 1 << 40].into(),
        config: Cow::Borrowed(&config),
        tenant: TENANT,
    };
    let (granted, _) = spelled_call::<_, Vec<Answer<Vec<Replica>>>>(&service, &batch);
    assert_eq!(locality_of(&granted[0].as_ref().unwrap()[0]), Some(&locality()));
    assert_eq!(granted[1], Err(ErrorCode::NoAvailableHandle), "an error has no members");
    for key in [&b"a"[..], b"b", b"c"] {
        service.0.put_end(CLIENT.into(), key, None, ReplicaType::All).unwrap();
    }

    let (list, body) =
        spelled_call::<_, Answer<ReplicaList>>(&service, &GetReplicaList { key: b"a", tenant: TENANT });
    assert_eq!(locality_of(&list.unwrap().replicas[0]), Some(&locality()));
    assert!(has_total(&body));
    let keys = || vec![&b"a"[..], b"none", b"b"];
    let (lists, _) = spelled_call::<_, Vec<Answer<ReplicaList>>>(
        &service,
        &BatchGetReplicaList { keys: keys().into(), tenant: TENANT },
    );
    let found: Vec<_> =
        lists.iter().map(|list| Some(locality_of(&list.as_ref().ok()?.replicas[0]))).collect();
    assert_eq!(found, [Some(Some(&locality())), None, Some(Some(&locality()))]);
    let lists: Vec<Answer<ReplicaList>> =
        plain_call(&service, &BatchGetReplicaList { keys: keys().into(), tenant: TENANT });
    assert_eq!(lists[0].as_ref().map(|list| locality_of(&list.replicas[0])), Ok(None));
    let (matching, _) = spelled_call::<_, Answer<Pairs<Vec<u8>, Vec<Replica>>>>(
        &service,
        &GetReplicaListByRegex { pattern: "^a$", tenant: TENANT },
    );
    assert_eq!(locality_of(&matching.unwrap().0[0].1[0]), Some(&locality()));
    let copy = CopyStart {
        client: CLIENT,
        key: b"a",
        tenant: TENANT,
        source: "host:1",
        targets: vec!["other:1"].into(),
    };
    let (plan, _) = spelled_call::<_, Answer<CopyPlan>>(&service, &copy);
    let plan = plan.unwrap();
    assert_eq!((locality_of(&plan.source), locality_of(&plan.targets[0])), (Some(&locality()), None));
}

#[test]
fn a_long_locality_is_refused_by_name() {
    let service = MasterService(Arc::new(Master::new(MasterOptions::default()).unwrap()));
    let of = |count: usize, len: usize| Locality { numa_node: -1, hca_names: vec!["m".repeat(len); count] };
    for (locality, is_accepted) in
        [(of(1, 300), true), (of(20, 12), true), (of(400, 1), false), (of(1, 2000), false)]
    {
        let mount = MountSegment { segment: Cow::Owned(segment(Some(locality))), client: CLIENT };
        let (mounted, _) = spelled_call::<_, Answer<()>>(&service, &mount);
        assert_eq!(mounted, if is_accepted { Ok(()) } else { Err(ErrorCode::InvalidParams) });
        if is_accepted {
            let key = b"k";
            let config = ReplicateConfig::default();
            let (granted, _) = spelled_call::<_, Answer<Vec<Replica>>>(&service, &start_of(key, &config));
            assert_eq!(locality_of(&granted.unwrap()[0]), mount.segment.locality.as_deref());
            service.0.unmount(CLIENT, mount.segment.id).unwrap();
        }
    }
}

/// Without tenants, all objects are those of the default tenant.
#[test]
fn a_tenant_is_resolved_if_it_differs() {
    let service = MasterService(master());
    let config = ReplicateConfig::default();
    spelled_call::<_, Answer<Vec<Replica>>>(&service, &start_of(b"k", &config)).0.unwrap();
    service.0.put_end(CLIENT.into(), b"k", None, ReplicaType::All).unwrap();
    for (tenant, resolved) in [("default", None), ("", None), ("other", Some("default"))] {
        let one = GetReplicaList { key: b"k", tenant };
        let (list, body) = spelled_call::<_, Answer<ReplicaList>>(&service, &one);
        assert_eq!(list.unwrap().resolved_tenant.as_deref(), resolved, "{tenant:?}");
        assert_eq!(has_total(&body), resolved.is_some());
        let many = BatchGetReplicaList { keys: vec![&b"k"[..], b"none"].into(), tenant };
        let (lists, _) = spelled_call::<_, Vec<Answer<ReplicaList>>>(&service, &many);
        assert_eq!(lists[0].as_ref().unwrap().resolved_tenant.as_deref(), resolved, "{tenant:?}");
        let list: Answer<ReplicaList> = plain_call(&service, &one);
        assert_eq!(list.unwrap().resolved_tenant, None);
    }
}

/// Master behind a check of its requests, which notes the calls that it handles.
struct Checked {
    service: MasterService<Master>,
    refuses: fn(u32, &[u8]) -> Option<Status>,
    handled: Mutex<Vec<u32>>,
    refused: Mutex<usize>,
}

impl Checked {
    async fn start(
        master: Arc<Master>,
        refuses: fn(u32, &[u8]) -> Option<Status>,
    ) -> (Arc<Self>, RunningServer, MasterClient) {
        let checked = Arc::new(Self {
            service: MasterService(master),
            refuses,
            handled: Mutex::default(),
            refused: Mutex::default(),
        });
        let server =
            Server::bind("127.0.0.1:0", ServerOptions::default()).await.unwrap().start(checked.clone());
        let client = MasterClient::remote(server.local_addr().to_string(), RpcOptions::default());
        (checked, server, client)
    }

    fn refused(&self) -> usize {
        std::mem::take(&mut self.refused.lock())
    }
}

impl Service for Checked {
    fn call(&self, function: u32, body: &[u8], out: &mut Vec<u8>) -> Result<(), Refusal> {
        if let Some(status) = (self.refuses)(function, body) {
            *self.refused.lock() += 1;
            return Err((status, "invalid rpc function arguments".into()));
        }
        self.handled.lock().push(function);
        self.service.call(function, body, out)
    }
}

fn is_of_cpp(function: u32) -> bool {
    TABLE.iter().any(|shape| shape.function == function)
}

fn with_sessions(count: usize) -> ReplicateConfig {
    ReplicateConfig {
        session_ids: Some(vec![b"s".to_vec(); count]),
        preferred_hca_names: Some(vec!["mlx5_0".into()]),
        ..ReplicateConfig::default()
    }
}

/// An earlier version of this system refuses a total length. Its clients lose the session ids, and
/// nothing else.
#[tokio::test]
async fn a_master_that_refuses_members_gets_none() {
    let refuses = |_, body: &[u8]| (!body.is_empty() && has_total(body)).then_some(Status::InvalidArguments);
    let (checked, _server, client) = Checked::start(master(), refuses).await;
    for (number, refused) in [(0, 1), (1, 0), (2, 0)] {
        for mode in [WriteMode::Put, WriteMode::Upsert] {
            let key = format!("{mode:?} {number}");
            let items = [PutItem { key: key.as_bytes(), len: 7 }];
            let caller = Caller { attempt: CALLER.attempt + number, ..CALLER };
            let granted = client.put_start(caller, mode, &items, &with_sessions(1)).await.unwrap();
            assert_eq!(granted[0].as_ref().unwrap().len(), 1);
            let ends = [EndItem { key: key.as_bytes(), checksum: None }];
            client.put_end(caller, mode, &ends, ReplicaType::All).await.unwrap()[0].as_ref().unwrap();
            let is_first = mode == WriteMode::Put;
            assert_eq!(checked.refused(), if is_first { refused } else { 0 }, "{number}");
        }
    }
    client.expect_another_master();
    let items = [PutItem { key: b"again", len: 7 }];
    client.put_start(CALLER, WriteMode::Put, &items, &with_sessions(1)).await.unwrap()[0].as_ref().unwrap();
    assert_eq!(checked.refused(), 1, "another master may accept them");
    assert!(client.fences_writes());
}

/// Mooncake C++ accepts compatible fields in its own calls, and lacks ours.
#[tokio::test]
async fn members_reach_a_master_of_mooncake_cpp() {
    let refuses = |function, _: &[u8]| (!is_of_cpp(function)).then_some(Status::NotRegistered);
    let (checked, _server, client) = Checked::start(master(), refuses).await;
    let items = [PutItem { key: b"k", len: 7 }];
    client.put_start(CALLER, WriteMode::Put, &items, &with_sessions(1)).await.unwrap()[0].as_ref().unwrap();
    assert_eq!(*checked.handled.lock(), [PutStart::FUNCTION]);
    let wrong = client.put_start(CALLER, WriteMode::Put, &items, &with_sessions(2)).await.unwrap();
    let error = wrong[0].as_ref().unwrap_err();
    assert_eq!(error.code(), ErrorCode::InvalidParams, "{error}");
}

async fn refusals(config: ReplicateConfig, keys: usize) -> Vec<Option<ErrorCode>> {
    let (_checked, _server, client) = Checked::start(master(), |_, _| None).await;
    let names: Vec<String> = (0..keys).map(|number| format!("k{number}")).collect();
    let items: Vec<_> = names.iter().map(|key| PutItem { key: key.as_bytes(), len: 7 }).collect();
    let caller = Caller { attempt: 0, ..CALLER };
    let started = client.put_start(caller, WriteMode::Put, &items, &config).await.unwrap();
    started.iter().map(|one| one.as_ref().err().map(|error| error.code())).collect()
}

#[tokio::test]
async fn lists_for_each_key_are_checked() {
    let default = ReplicateConfig::default;
    let sessions = |all: &[&[u8]]| {
        let session_ids = Some(all.iter().map(|id| id.to_vec()).collect());
        ReplicateConfig { session_ids, ..default() }
    };
    let affinities = |all: &[&[u8]]| {
        let residency_affinity_ids = Some(all.iter().map(|id| id.to_vec()).collect());
        ReplicateConfig { residency_affinity_ids, ..default() }
    };
    let devices = |count: usize| {
        let per_key_preferred_hca_names = Some(vec![vec!["mlx5_0".to_owned()]; count]);
        ReplicateConfig { per_key_preferred_hca_names, ..default() }
    };
    let (longest, longer) = (vec![0xff; 256], vec![0xff; 257]);
    let invalid = Some(ErrorCode::InvalidParams);
    for (what, config, keys, refused) in [
        ("a session", sessions(&[b"s"]), 1, vec![None]),
        ("an empty name", sessions(&[b"", b"s"]), 2, vec![None, None]),
        ("the longest name", sessions(&[&longest]), 1, vec![None]),
        ("a name that is too long", sessions(&[b"s", &longer]), 2, vec![None, invalid]),
        ("no session", sessions(&[]), 1, vec![invalid]),
        ("sessions of more keys", sessions(&[b"s", b"t"]), 1, vec![invalid]),
        ("sessions of fewer keys", sessions(&[b"s"]), 2, vec![invalid; 2]),
        ("affinities", affinities(&[b"a", b""]), 2, vec![None, None]),
        ("affinities of fewer keys", affinities(&[]), 2, vec![invalid; 2]),
        ("devices", devices(2), 2, vec![None, None]),
        ("devices of no key", devices(0), 2, vec![None, None]),
        ("devices of fewer keys", devices(1), 2, vec![invalid; 2]),
        ("devices of one key, any number", devices(3), 1, vec![None]),
    ] {
        assert_eq!(refusals(config, keys).await, refused, "{what}");
    }
}

/// Lists for each key are split with the keys.
#[tokio::test]
async fn a_split_batch_keeps_its_lists() {
    let (_checked, _server, client) = Checked::start(master(), |_, _| None).await;
    let count = 20_000;
    let names: Vec<String> = (0..count).map(|number| format!("k{number}")).collect();
    let items: Vec<_> = names.iter().map(|key| PutItem { key: key.as_bytes(), len: 7 }).collect();
    let ids = || Some(names.iter().map(|name| name.clone().into_bytes()).collect());
    let config = ReplicateConfig {
        session_ids: ids(),
        residency_affinity_ids: ids(),
        per_key_preferred_hca_names: Some(vec![vec![]; count]),
        ..ReplicateConfig::default()
    };
    let started = client.put_start(CALLER, WriteMode::Put, &items, &config).await.unwrap();
    assert!(started.len() == count && started.iter().all(Result::is_ok));
}

fn clear<'a>(tenant: &'a str) -> BatchReplicaClear<'a> {
    BatchReplicaClear { keys: vec![&b"k"[..]].into(), client: CLIENT, segment_name: "", tenant }
}

fn clear_of_any<'a>() -> ClearOfAnyTenant<'a> {
    ClearOfAnyTenant { keys: vec![&b"k"[..]].into(), client: CLIENT, segment_name: "" }
}

fn master_with_tenants() -> Arc<Master> {
    let quota = |name: &str| TenantQuota { name: name.into(), bytes: 1 << 20 };
    let tenants = Some(vec![quota("a"), quota("b")]);
    master_with(MasterOptions { tenants, ..MasterOptions::default() })
}

fn store(service: &MasterService<Master>, tenant: &str) {
    let config = Cow::Owned(ReplicateConfig::default());
    let start = PutStart { client: CLIENT, key: b"k", size: 100, config, tenant };
    plain_call::<_, Answer<Vec<Replica>>>(service, &start).unwrap();
    let item = EndItem { key: b"k", checksum: None };
    let end = PutEnd { client: CLIENT, item, replicas: ReplicaType::All, tenant };
    plain_call::<_, Answer<()>>(service, &end).unwrap();
}

fn is_stored(service: &MasterService<Master>, tenant: &str) -> bool {
    plain_call::<_, Answer<bool>>(service, &ProbeKey { key: b"k", tenant }).unwrap()
}

/// The hash of the arguments decides: four of Mooncake C++ 0.3.14, three of 0.3.13.
#[test]
fn replicas_are_cleared_in_both_forms() {
    assert_eq!(clear_function::<BatchReplicaClear<'_>>(), clear_function::<ClearOfAnyTenant<'_>>());
    let service = MasterService(master_with_tenants());
    for is_spelled in [true, false] {
        for tenant in ["a", "b"] {
            store(&service, tenant);
        }
        let cleared: Answer<Vec<Vec<u8>>> = if is_spelled {
            spelled_call(&service, &clear("a")).0
        } else {
            plain_call(&service, &clear("a"))
        };
        assert_eq!(cleared, Ok(vec![b"k".to_vec()]));
        assert_eq!(["a", "b"].map(|tenant| is_stored(&service, tenant)), [false, true]);
        let cleared: Answer<Vec<Vec<u8>>> = plain_call(&service, &clear("unknown"));
        assert_eq!(cleared, Ok(Vec::new()));
        let cleared: Answer<Vec<Vec<u8>>> = if is_spelled {
            spelled_call(&service, &clear_of_any()).0
        } else {
            plain_call(&service, &clear_of_any())
        };
        assert_eq!(cleared, Ok(vec![b"k".to_vec()]));
        assert_eq!(["a", "b"].map(|tenant| is_stored(&service, tenant)), [false, false]);
    }
}

fn clear_function<R: Request>() -> u32 {
    R::FUNCTION
}

#[tokio::test]
async fn a_client_clears_replicas_at_masters_of_both_forms() {
    let takes_three = |function, body: &[u8]| {
        let is_clear = function == BatchReplicaClear::FUNCTION;
        (is_clear && !EARLIER[0].takes(body)).then_some(Status::InvalidArguments)
    };
    let takes_four = |function, body: &[u8]| {
        let is_clear = function == BatchReplicaClear::FUNCTION;
        (is_clear && EARLIER[0].takes(body)).then_some(Status::InvalidArguments)
    };
    for (refuses, refused) in [(takes_three as fn(u32, &[u8]) -> Option<Status>, 1), (takes_four, 0)] {
        let (checked, _server, client) = Checked::start(master(), refuses).await;
        for refused in [refused, 0, 0] {
            store(&checked.service, TENANT);
            let cleared = client.clear_replicas(CALLER, &[b"k", b"none"], "").await.unwrap();
            assert_eq!(cleared.iter().map(ObjectKey::as_bytes).collect::<Vec<_>>(), [b"k"]);
            assert!(!is_stored(&checked.service, TENANT));
            assert_eq!(checked.refused(), refused, "remembered for this master");
        }
        client.expect_another_master();
        client.clear_replicas(CALLER, &[b"k"], "").await.unwrap();
        assert_eq!(checked.refused(), refused, "another master may take the tenant");
    }
}

/// A list of replicas for admin has what a reader gets, and counts as no read.
#[test]
fn replicas_are_listed_without_leases() {
    let service = MasterService(master_with_tenants());
    store(&service, "a");
    let list =
        |key, tenant| plain_call::<_, Answer<ReplicaList>>(&service, &GetReplicaListForAdmin { key, tenant });
    let found = list(b"k", "a").unwrap();
    assert_eq!((found.replicas.len(), found.resolved_tenant), (1, None));
    let other = Err(ErrorCode::ObjectNotFound);
    assert_eq!(list(b"k", "b").map(|list| list.replicas), other);
    let keys = vec![&b"none"[..], b"k"];
    let request = BatchGetReplicaListForAdmin { keys: keys.into(), tenant: "a" };
    let each = plain_call::<_, Vec<Answer<ReplicaList>>>(&service, &request);
    let each: Vec<_> = each.into_iter().map(|list| list.map(|list| list.replicas)).collect();
    assert_eq!(each, [other, Ok(found.replicas.clone())]);
    let key = service.0.scoped("a", b"k").unwrap();
    assert_eq!((service.0.leased_for(&key), service.0.stats().reads), (None, 0));
    let start = PutStart {
        client: CLIENT,
        key: b"unfinished",
        size: 100,
        config: Cow::Owned(ReplicateConfig::default()),
        tenant: "a",
    };
    plain_call::<_, Answer<Vec<Replica>>>(&service, &start).unwrap();
    assert_eq!(list(b"unfinished", "a").map(|list| list.replicas), Err(ErrorCode::ReplicaIsNotReady));
    let read =
        plain_call::<_, Answer<ReplicaList>>(&service, &GetReplicaList { key: b"k", tenant: "a" }).unwrap();
    assert_eq!(read.replicas, found.replicas);
    assert!(service.0.leased_for(&key).is_some());
}

#[tokio::test]
async fn probes_of_a_client() {
    let (checked, _server, client) = Checked::start(master(), |_, _| None).await;
    store(&checked.service, TENANT);
    let found = |answers: Vec<mooncake_core::Result<bool>>| -> Vec<_> {
        answers.into_iter().map(|answer| answer.map_err(|error| error.code())).collect()
    };
    let none = ProbePolicy::NONE;
    let keys: &[&[u8]] = &[b"k", b"none"];
    assert_eq!(found(client.probe(TENANT, keys, none).await.unwrap()), [Ok(true), Ok(false)]);
    assert_eq!(found(client.probe(TENANT, &keys[..1], none).await.unwrap()), [Ok(true)]);
    assert_eq!(found(client.probe(TENANT, &keys[1..], none).await.unwrap()), [Ok(false)]);
    assert!(client.probe(TENANT, &[], none).await.unwrap().is_empty());
    let handled = std::mem::take(&mut *checked.handled.lock());
    assert_eq!(handled, [BatchProbeKey::FUNCTION, ProbeKey::FUNCTION, ProbeKey::FUNCTION]);
    assert!(checked.service.0.leased_for(b"k").is_none(), "no lease is granted");
    let invalid = Err(ErrorCode::InvalidParams);
    let unknown = ProbePolicy { mode: 2, candidate_size: 1 };
    assert_eq!(found(client.probe(TENANT, keys, unknown).await.unwrap()), [invalid, invalid]);
    let of_three = ProbePolicy::last_hit_only(3);
    assert_eq!(found(client.probe(TENANT, keys, of_three).await.unwrap()), [invalid, invalid]);
    assert!(checked.service.0.leased_for(b"k").is_none());
    let each = ProbePolicy::last_hit_only(1);
    assert_eq!(found(client.probe(TENANT, keys, each).await.unwrap()), [Ok(true), Ok(false)]);
    assert!(checked.service.0.leased_for(b"k").is_some(), "the last group that can be read is leased");
}

/// A probe of more keys than one message has grants leases on the last group only.
#[tokio::test]
async fn a_long_probe_leases_the_last_group() {
    let (checked, _server, client) = Checked::start(master(), |_, _| None).await;
    let names: Vec<String> = (0..40_000).map(|number| format!("k{number}")).collect();
    let keys: Vec<&[u8]> = names.iter().map(String::as_bytes).collect();
    let master = &checked.service.0;
    for at in [0, 1, 100, 101, 200] {
        let config = ReplicateConfig::default();
        plain_call::<_, Answer<Vec<Replica>>>(&checked.service, &start_of(keys[at], &config)).unwrap();
        master.put_end(CLIENT.into(), keys[at], None, ReplicaType::All).unwrap();
    }
    let found = client.probe(TENANT, &keys, ProbePolicy::last_hit_only(2)).await.unwrap();
    let readable: Vec<usize> =
        found.iter().enumerate().filter(|(_, found)| matches!(found, Ok(true))).map(|(at, _)| at).collect();
    assert_eq!((found.len(), readable), (40_000, vec![0, 1, 100, 101, 200]));
    let leased = [0, 1, 100, 101, 200].map(|at| master.leased_for(keys[at]).is_some());
    assert_eq!(leased, [false, false, true, true, false]);
}

#[tokio::test]
async fn a_master_without_probes_is_named() {
    let refuses = |function, _: &[u8]| {
        [ProbeKey::FUNCTION, BatchProbeKey::FUNCTION].contains(&function).then_some(Status::NotRegistered)
    };
    let (_checked, _server, client) = Checked::start(master(), refuses).await;
    for keys in [&[&b"k"[..]][..], &[b"k", b"l"]] {
        let error = client.probe(TENANT, keys, ProbePolicy::NONE).await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::NotSupported, "{error}");
    }
}
