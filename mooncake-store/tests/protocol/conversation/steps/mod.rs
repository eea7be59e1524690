//! Conversation with any master, call by call. The response to each step becomes text.
//!
//! The settings of the master are `put_start_discard_timeout_sec` 2,
//! `put_start_release_timeout_sec` 5, `default_kv_lease_ttl` 1500, `max_kv_soft_pin_ttl` 10000,
//! `default_kv_soft_pin_ttl` 2000 and `client_ttl` 600. The master has no clients.

mod copies;
mod objects;
mod segments;

use std::borrow::Cow;
use std::fmt::Debug;

use mooncake_core::error::ErrorCode;
use mooncake_core::ids::{ClientId, SegmentId, Uuid};
use mooncake_core::replica::{Replica, ReplicaStatus, ReplicaType, ReplicateConfig, Segment};
use mooncake_store::api::EndItem;
use mooncake_store::protocol::client::RpcClient;
use mooncake_store::protocol::message::*;
use mooncake_store::protocol::pack::Answer;

pub(crate) const TENANT: &str = "default";
pub(crate) const MIB: u64 = 1 << 20;
/// Seconds after which a lease ends, and after which a write may be replaced.
pub(crate) const LEASE: f64 = 1.7;
pub(crate) const DISCARD: f64 = 2.2;

/// Names of the steps, and their responses.
pub(crate) type Said = Vec<(String, String)>;

/// Clock of a master, which moves on by seconds.
pub(crate) trait Pass {
    async fn pass(&mut self, seconds: f64);
}

pub(crate) struct Talk<'t, P> {
    pub(crate) rpc: &'t RpcClient,
    time: P,
    said: Said,
}

/// Executes every step in order.
pub(crate) async fn talk<P: Pass>(rpc: &RpcClient, time: P) -> Said {
    let mut talk = Talk { rpc, time, said: Vec::new() };
    talk.without_segments().await;
    talk.mounts().await;
    talk.refused_puts().await;
    talk.puts().await;
    talk.taken_over().await;
    talk.upserts().await;
    talk.leases().await;
    talk.removals().await;
    talk.clearing().await;
    talk.groups().await;
    talk.placing().await;
    talk.copies().await;
    talk.moves().await;
    talk.tasks().await;
    talk.unmounts().await;
    talk.said
}

/// Returns the id of a client: the first and the second have segments, another has none.
pub(crate) fn client(number: u64) -> ClientId {
    ClientId(Uuid::new(0xc11e, number))
}

pub(crate) fn segment(number: u64) -> Segment {
    Segment {
        id: SegmentId(Uuid::new(0x5e9, number)),
        name: format!("host{number}:1"),
        base: number << 40,
        size: 64 * MIB,
        endpoint: format!("host{number}:2"),
        protocol: "tcp".into(),
        host_id: format!("host{number}"),
        locality: None,
    }
}

pub(crate) fn plain() -> ReplicateConfig {
    ReplicateConfig::default()
}

/// Returns a number for a failure, and a word for a success.
pub(crate) fn brief<T: Debug>(answer: &Answer<T>) -> String {
    match answer {
        Ok(value) => format!("{value:?}"),
        Err(code) => number(*code),
    }
}

pub(crate) fn number(code: ErrorCode) -> String {
    code.number().to_string()
}

pub(crate) fn grants(answer: &Answer<Vec<Replica>>) -> String {
    match answer {
        Err(code) => number(*code),
        Ok(replicas) => shown(replicas),
    }
}

/// Returns lengths, states and endpoints, in the order of the endpoints.
pub(crate) fn shown(replicas: &[Replica]) -> String {
    let one = |replica: &Replica| {
        let at = replica.location.memory().unwrap();
        let status = match replica.status {
            ReplicaStatus::Complete => "complete",
            ReplicaStatus::Processing => "processing",
            _ => "odd",
        };
        format!("{} bytes at {} {status}", at.size, at.endpoint)
    };
    let mut all: Vec<_> = replicas.iter().map(one).collect();
    all.sort();
    format!("[{}]", all.join(", "))
}

impl<P: Pass> Talk<'_, P> {
    pub(crate) fn note(&mut self, step: &str, answer: impl Into<String>) {
        assert!(self.said.iter().all(|(other, _)| other != step), "{step} stands for two");
        self.said.push((step.to_owned(), answer.into()));
    }

    pub(crate) async fn ask<R>(&mut self, step: &str, call: &R)
    where
        R: Request<Reply = Answer<()>> + Sync,
    {
        let answer = self.rpc.call(call).await.unwrap();
        self.note(step, answer.map_or_else(number, |()| "ok".into()));
    }

    pub(crate) async fn show<R, T: Debug>(&mut self, step: &str, call: &R)
    where
        R: Request<Reply = Answer<T>> + Sync,
    {
        let answer = self.rpc.call(call).await.unwrap();
        self.note(step, brief(&answer));
    }

    pub(crate) async fn pass(&mut self, seconds: f64) {
        self.time.pass(seconds).await;
    }

    pub(crate) async fn start(
        &mut self,
        step: &str,
        who: u64,
        key: &str,
        size: u64,
        config: &ReplicateConfig,
    ) {
        let key = key.as_bytes();
        let call = PutStart { client: client(who), key, size, config: Cow::Borrowed(config), tenant: TENANT };
        let answer = self.rpc.call(&call).await.unwrap();
        self.note(step, grants(&answer));
    }

    pub(crate) async fn upsert(
        &mut self,
        step: &str,
        who: u64,
        key: &str,
        size: u64,
        config: &ReplicateConfig,
    ) {
        let key = key.as_bytes();
        let config = Cow::Borrowed(config);
        let call = UpsertStart { client: client(who), key, size, config, tenant: TENANT };
        let answer = self.rpc.call(&call).await.unwrap();
        self.note(step, grants(&answer));
    }

    pub(crate) async fn end(&mut self, step: &str, who: u64, key: &str, replicas: ReplicaType) {
        let item = EndItem { key: key.as_bytes(), checksum: None };
        self.ask(step, &PutEnd { client: client(who), item, replicas, tenant: TENANT }).await;
    }

    pub(crate) async fn revoke(&mut self, step: &str, who: u64, key: &str, replicas: ReplicaType) {
        let key = key.as_bytes();
        self.ask(step, &PutRevoke { client: client(who), key, replicas, tenant: TENANT }).await;
    }

    pub(crate) async fn upsert_end(&mut self, step: &str, who: u64, key: &str) {
        let item = EndItem { key: key.as_bytes(), checksum: None };
        let call = UpsertEnd { client: client(who), item, replicas: ReplicaType::All, tenant: TENANT };
        self.ask(step, &call).await;
    }

    pub(crate) async fn remove(&mut self, step: &str, key: &str, force: bool) {
        self.ask(step, &Remove { key: key.as_bytes(), force, tenant: TENANT }).await;
    }

    pub(crate) async fn exist(&mut self, step: &str, key: &str) {
        self.show(step, &ExistKey { key: key.as_bytes(), tenant: TENANT }).await;
    }

    pub(crate) async fn locate(&mut self, step: &str, key: &str) {
        let answer = self.rpc.call(&GetReplicaList { key: key.as_bytes(), tenant: TENANT }).await.unwrap();
        let text = answer.map_or_else(number, |list| {
            format!("{} lease {} checksum {:?}", shown(&list.replicas), list.lease.as_millis(), list.checksum)
        });
        self.note(step, text);
    }

    /// Puts an object without a lease on it.
    pub(crate) async fn put(&mut self, who: u64, key: &str, config: &ReplicateConfig) {
        let (client, name) = (client(who), key.as_bytes());
        let config = Cow::Borrowed(config);
        let start = PutStart { client, key: name, size: 100, config, tenant: TENANT };
        self.rpc.call(&start).await.unwrap().unwrap_or_else(|code| panic!("start of {key}: {code:?}"));
        let item = EndItem { key: name, checksum: None };
        let end = PutEnd { client, item, replicas: ReplicaType::All, tenant: TENANT };
        self.rpc.call(&end).await.unwrap().unwrap_or_else(|code| panic!("end of {key}: {code:?}"));
    }
}
