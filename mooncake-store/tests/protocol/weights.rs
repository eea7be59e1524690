//! Managed weights on the wire: a conversation with a master of Mooncake C++ 0.3.14, repeated with
//! ours, and the methods of the client.

use std::sync::Arc;

use async_trait::async_trait;
use mooncake_core::Result;
use mooncake_core::clock::ManualClock;
use mooncake_core::error::{Error, ErrorCode};
use mooncake_core::evict::PolicyKind;
use mooncake_core::ids::{ClientId, SegmentId, Uuid};
use mooncake_core::replica::{DataType, ReplicaType, ReplicateConfig, Segment};
use mooncake_store::api::WriteMode;
use mooncake_store::master::{Master, MasterOptions, Put};
use mooncake_store::protocol::master_client::{MasterClient, MasterConnection};
use mooncake_store::protocol::message::*;
use mooncake_store::protocol::pack::{self, Byte, Unpack};
use mooncake_store::protocol::server::Service;
use mooncake_store::protocol::service::MasterService;
use mooncake_store::protocol::wire::*;

/// Steps: `call <name> <request> <response>` in hexadecimal; `put` or `upsert` with key, group,
/// data type, length and code; `remove <key> <code>`; `has <key> <whether it can be read>`.
const CONVERSATION: &str = include_str!("weights_recorded.txt");

const CLIENT: ClientId = ClientId(Uuid::new(1, 1));
const TENANT: &str = "default";

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

fn master() -> Arc<Master> {
    let (options, clock) = (MasterOptions::default(), Arc::new(ManualClock::new()));
    let policy = PolicyKind::default().into();
    let master = Master::with_parts(options, &Default::default(), &policy, clock, 7).unwrap();
    let segment = Segment {
        id: SegmentId(Uuid::new(3, 4)),
        name: "host:1".into(),
        base: 1 << 40,
        size: 64 << 20,
        endpoint: "host:2".into(),
        protocol: "tcp".into(),
        host_id: "host".into(),
        locality: None,
    };
    master.mount(CLIENT, &segment).unwrap();
    Arc::new(master)
}

/// Sets everything that depends on the time and on the first number of leases to fixed values.
trait Comparable {
    fn fix(&mut self, first_lease: u64);
}

impl Comparable for () {
    fn fix(&mut self, _: u64) {}
}

impl Comparable for WeightRevision {
    fn fix(&mut self, _: u64) {
        (self.created_ms, self.updated_ms) = (0, 0);
    }
}

impl Comparable for WeightView {
    fn fix(&mut self, first_lease: u64) {
        self.revision.fix(first_lease);
        self.nearest_expiry_ms = self.nearest_expiry_ms.map(|_| 0);
    }
}

impl Comparable for WeightPage {
    fn fix(&mut self, first_lease: u64) {
        self.views.iter_mut().for_each(|view| view.fix(first_lease));
    }
}

impl Comparable for WeightLease {
    fn fix(&mut self, first_lease: u64) {
        self.expires_ms = 0;
        self.id -= first_lease;
    }
}

impl Comparable for WeightOperation {
    fn fix(&mut self, _: u64) {
        (self.started_ms, self.updated_ms) = (0, 0);
    }
}

struct Replay {
    service: MasterService<Master>,
    /// Number before that of the first lease.
    first_lease: u64,
}

impl Replay {
    /// Makes a recorded call and compares the response.
    fn call<R>(&mut self, step: &str, request: &R, response: &[u8])
    where
        R: Request,
        R::Reply: for<'a> Unpack<'a>,
        R::Reply: IntoResult,
    {
        let (mut body, mut out) = (Vec::new(), Vec::new());
        pack::encode_spelled(request, &mut body);
        self.service.call(R::FUNCTION, &body, &mut out).unwrap();
        let ours = pack::decode::<R::Reply>(&out).unwrap().into_result();
        let theirs = pack::decode::<R::Reply>(response).unwrap().into_result();
        let fixed = |outcome: std::result::Result<_, WeightError>, first_lease| {
            outcome.map(|mut value: <R::Reply as IntoResult>::Value| {
                value.fix(first_lease);
                format!("{value:?}")
            })
        };
        assert_eq!(fixed(ours, self.first_lease), fixed(theirs, 0), "{step}");
    }
}

/// Response of a call about weights.
trait IntoResult {
    type Value: Comparable + std::fmt::Debug;
    fn into_result(self) -> std::result::Result<Self::Value, WeightError>;
}

impl<T: Comparable + std::fmt::Debug> IntoResult for std::result::Result<T, WeightError> {
    type Value = T;

    fn into_result(self) -> Self {
        self
    }
}

#[test]
fn a_recorded_conversation_has_the_same_responses() {
    let master = master();
    let mut replay = Replay { service: MasterService(master.clone()), first_lease: 0 };
    let (mut calls, mut others) = (0, 0);
    for step in CONVERSATION.lines() {
        let words: Vec<&str> = step.split(' ').collect();
        match words[..] {
            ["call", name, request, response] => {
                calls += 1;
                repeat(&mut replay, step, name, &unhex(request), &unhex(response));
            }
            [mode @ ("put" | "upsert"), key, group, data_type, len, code] => {
                others += 1;
                let mode = if mode == "put" { WriteMode::Put } else { WriteMode::Upsert };
                let group = (group != "-").then_some(group);
                let group_ids = group.map(|group| vec![group.to_owned()]);
                let data_type = DataType(data_type.parse().unwrap());
                let config = ReplicateConfig { data_type, group_ids, ..ReplicateConfig::default() };
                let (writer, len, group) = (CLIENT.into(), len.parse().unwrap(), group.unwrap_or_default());
                let put =
                    Put { writer, mode, key: key.as_bytes(), len, config: &config, group, session: None };
                let started = master.put_start(&put);
                let ended =
                    started.and_then(|_| master.put_end(writer, key.as_bytes(), None, ReplicaType::All));
                // A client takes an object that exists for stored.
                let found = match ended.map_err(|error| error.code()) {
                    Ok(()) | Err(ErrorCode::ObjectAlreadyExists) => 0,
                    Err(code) => code.number(),
                };
                assert_eq!(found.to_string(), code, "{step}");
            }
            ["remove", key, code] => {
                others += 1;
                let removed = master.remove(key.as_bytes(), true);
                let found = removed.map_or_else(|error| error.code().number(), |()| 0);
                assert_eq!(found.to_string(), code, "{step}");
            }
            ["has", key, there] => {
                others += 1;
                assert_eq!(master.peek(key.as_bytes()).is_ok(), there == "1", "{step}");
            }
            _ => panic!("{step}"),
        }
    }
    assert!(calls > 120 && others > 20, "{calls} {others}");
}

/// Repeats one call. Numbers of leases in a request become ours.
fn repeat(replay: &mut Replay, step: &str, name: &str, request: &[u8], response: &[u8]) {
    let decoded = "the request is decoded";
    let first = replay.first_lease;
    match name {
        "BeginWeightImport" => {
            replay.call(step, &pack::decode::<BeginWeightImport<'_>>(request).expect(decoded), response);
        }
        "CommitWeightImport" => {
            replay.call(step, &pack::decode::<CommitWeightImport<'_>>(request).expect(decoded), response);
        }
        "AbortWeightImport" => {
            replay.call(step, &pack::decode::<AbortWeightImport<'_>>(request).expect(decoded), response);
        }
        "GetWeightRevision" => {
            replay.call(step, &pack::decode::<GetWeightRevision<'_>>(request).expect(decoded), response);
        }
        "ListWeightRevisions" => {
            replay.call(step, &pack::decode::<ListWeightRevisions<'_>>(request).expect(decoded), response);
        }
        "AcquireWeightRevisionLease" => {
            let request = pack::decode::<AcquireWeightRevisionLease<'_>>(request).expect(decoded);
            if first == 0
                && let Ok(Ok(recorded)) =
                    pack::decode::<std::result::Result<WeightLease, WeightError>>(response)
            {
                // The same holder receives the same lease again.
                let ours = replay.service.0.lease_weights(TENANT, request.request.clone()).unwrap();
                replay.first_lease = ours.id - recorded.id;
            }
            replay.call(step, &request, response);
        }
        "RenewWeightRevisionLease" => {
            let mut request = pack::decode::<RenewWeightRevisionLease<'_>>(request).expect(decoded);
            request.renewal.lease += if request.renewal.lease == 0 { 0 } else { first };
            replay.call(step, &request, response);
        }
        "ReleaseWeightRevisionLease" => {
            let mut request = pack::decode::<ReleaseWeightRevisionLease<'_>>(request).expect(decoded);
            request.release.lease += if request.release.lease == 0 { 0 } else { first };
            replay.call(step, &request, response);
        }
        "DeleteWeightRevision" => {
            replay.call(step, &pack::decode::<DeleteWeightRevision<'_>>(request).expect(decoded), response);
        }
        "StartWeightResidencyOperation" => {
            let request = pack::decode::<StartWeightResidencyOperation<'_>>(request).expect(decoded);
            replay.call(step, &request, response);
        }
        _ => panic!("{step}"),
    }
}

/// Connection to a master in this process, over the bytes of the protocol.
#[derive(Debug)]
struct Direct(MasterService<Master>);

#[async_trait]
impl MasterConnection for Direct {
    async fn call(&self, function: u32, body: &[u8]) -> Result<Vec<u8>> {
        let mut out = Vec::new();
        match self.0.call(function, body, &mut out) {
            Ok(()) => Ok(out),
            Err((_, text)) => Err(Error::new(ErrorCode::NotSupported, text)),
        }
    }
}

/// Connection to a master that lacks every call.
#[derive(Debug)]
struct Lacking;

#[async_trait]
impl MasterConnection for Lacking {
    async fn call(&self, _: u32, _: &[u8]) -> Result<Vec<u8>> {
        Err(Error::new(ErrorCode::NotSupported, "unknown function"))
    }
}

#[tokio::test]
async fn the_client_has_a_method_for_each_call() {
    let master = master();
    for client in [
        MasterClient::custom(Arc::new(Direct(MasterService(master.clone())))),
        MasterClient::embedded(master.clone()),
    ] {
        let names = ["", "ns", "model", "r"];
        let [tenant, namespace, resource, revision] = names.map(str::to_owned);
        let generation = master.weight_revisions(TENANT, list()).unwrap().views.len() as u64 + 1;
        let id = WeightId { tenant, namespace, resource, revision, generation };
        let import = WeightImport { id: id.clone(), group: String::new(), payloads: 1, bytes: 1 };
        let begun = client.begin_weight_import(TENANT, import).await.unwrap().unwrap();
        assert_eq!((&*begun.id.tenant, begun.availability), (TENANT, WeightAvailability::Importing));
        let view = client.weight_revision(TENANT, id.clone()).await.unwrap().unwrap();
        assert_eq!(view.revision, begun);
        let page = client.weight_revisions(TENANT, list()).await.unwrap().unwrap();
        assert_eq!(page.views.last(), Some(&view));
        let manifest = WeightManifest {
            manifest_key: format!("weights/ns/model/r/{generation}/manifest"),
            sha256: "0".repeat(64),
            keys_sha256: "0".repeat(64),
            ..begun.manifest
        };
        let commit = WeightCommit { id: id.clone(), metadata_generation: 1, manifest };
        let committed = client.commit_weight_import(TENANT, commit).await.unwrap();
        assert_eq!(committed, Err(WeightError::NotFound));
        let (holder, ttl_ms) = ("h".to_owned(), 1000);
        let request = WeightLeaseRequest { id: id.clone(), metadata_generation: 1, holder, ttl_ms };
        let leased = client.lease_weights(TENANT, request).await.unwrap();
        assert_eq!(leased, Err(WeightError::NotReady));
        let renewal = WeightLeaseRenewal { tenant: String::new(), lease: 7, ttl_ms };
        let renewed = client.renew_weight_lease(TENANT, renewal).await.unwrap();
        assert_eq!(renewed, Err(WeightError::NotFound));
        let release = WeightLeaseRelease { tenant: String::new(), lease: 7 };
        assert_eq!(client.release_weight_lease(TENANT, release).await.unwrap(), Ok(()));
        let change = || WeightChange { id: id.clone(), metadata_generation: 1 };
        let deleted = client.delete_weights(TENANT, change()).await.unwrap();
        assert_eq!(deleted, Err(WeightError::NotReady));
        let target = Byte(WeightResidency::Hot as u8);
        let movement = WeightMoveRequest { id: id.clone(), metadata_generation: 1, target };
        let moved = client.start_weight_move(TENANT, movement).await.unwrap();
        assert_eq!(moved, Err(WeightError::NotReady));
        let query = WeightOperationQuery { tenant: String::new(), operation: 7 };
        assert_eq!(client.weight_move(TENANT, query).await.unwrap(), Err(WeightError::NotFound));
        let aborted = client.abort_weight_import(TENANT, change()).await.unwrap().unwrap();
        assert_eq!(aborted.availability, WeightAvailability::Deleting);
    }
    let lacking = MasterClient::custom(Arc::new(Lacking));
    let error = lacking.weight_revisions(TENANT, list()).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::NotSupported);
    assert!(error.to_string().contains("ListWeightRevisions"), "{error}");
}

fn list() -> WeightList {
    let [tenant, namespace, resource, token] = ["", "ns", "model", ""].map(str::to_owned);
    WeightList { tenant, namespace, resource, token, limit: 100 }
}
