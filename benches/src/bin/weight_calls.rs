//! Calls about managed weights, for scripts: each line of standard input is a call in JSON, and its
//! response is a line of standard output. Run by `cargo xtask interop`, because no Python of either
//! project makes these calls.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command line tool prints to its terminal")]

use std::io::BufRead;
use std::process::ExitCode;

use mooncake_core::error::Error;
use mooncake_store::protocol::client::RpcOptions;
use mooncake_store::protocol::master_client::MasterClient;
use mooncake_store::protocol::pack::Byte;
use mooncake_store::protocol::wire::{
    WeightChange, WeightCommit, WeightError, WeightId, WeightImport, WeightLease, WeightLeaseRelease,
    WeightLeaseRenewal, WeightLeaseRequest, WeightList, WeightManifest, WeightMoveRequest, WeightOperation,
    WeightOperationQuery, WeightPage, WeightResidency, WeightRevision, WeightView,
};
use serde_json::{Value, json};

const TENANT: &str = "default";

fn main() -> ExitCode {
    let Some(master) = std::env::args().nth(1) else {
        eprintln!("weight_calls: missing HOST:PORT of a master; run `cargo xtask interop`");
        return ExitCode::FAILURE;
    };
    match respond_to_all(master) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("weight_calls: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Makes the calls of standard input until its end.
fn respond_to_all(master: String) -> Result<(), String> {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(1).enable_all().build().map_err(|e| e.to_string())?;
    let master = MasterClient::remote(master, RpcOptions::default());
    for line in std::io::stdin().lock().lines() {
        let call: Value = serde_json::from_str(&line.map_err(|e| e.to_string())?)
            .map_err(|e| format!("cannot read call: {e}"))?;
        let response = runtime.block_on(respond(&master, &call))?;
        println!("=>{}", json!({ "returned": response }));
    }
    Ok(())
}

/// Fields of a call. An absent text is empty, and an absent number is 0.
#[derive(Clone, Copy)]
struct Fields<'a>(&'a Value);

impl Fields<'_> {
    fn text(self, name: &str) -> String {
        self.0[name].as_str().unwrap_or_default().to_owned()
    }

    fn number(self, name: &str) -> u64 {
        self.0[name].as_u64().unwrap_or_default()
    }

    fn id(self) -> WeightId {
        WeightId {
            tenant: TENANT.into(),
            namespace: self.text("namespace"),
            resource: self.text("resource"),
            revision: self.text("revision"),
            generation: self.number("generation"),
        }
    }

    fn manifest(self) -> WeightManifest {
        WeightManifest {
            manifest_key: self.text("manifest_key"),
            sha256: self.text("sha256"),
            group: self.text("group"),
            keys_sha256: self.text("keys_sha256"),
            payloads: self.number("payloads"),
            bytes: self.number("bytes"),
        }
    }

    fn change(self) -> WeightChange {
        WeightChange { id: self.id(), metadata_generation: self.number("metadata_generation") }
    }

    fn residency(self) -> Result<Byte, String> {
        let name = self.text("target");
        let residency = WeightResidency::ALL.iter().find(|value| format!("{value:?}") == name);
        residency.map(|value| Byte(*value as u8)).ok_or_else(|| format!("unknown residency: {name}"))
    }
}

/// Makes a call. Returns the value, the name of the error of the call, or `{"failed": code}` if no
/// valid response arrived.
async fn respond(master: &MasterClient, call: &Value) -> Result<Value, String> {
    let fields = Fields(call);
    let (id, tenant) = (fields.id(), TENANT.to_owned());
    let metadata_generation = fields.number("metadata_generation");
    let (lease, ttl_ms) = (fields.number("lease"), fields.number("ttl_ms"));
    Ok(match &*fields.text("call") {
        "begin" => {
            let (payloads, bytes) = (fields.number("payloads"), fields.number("bytes"));
            let import = WeightImport { id, group: String::new(), payloads, bytes };
            shown(master.begin_weight_import(TENANT, import).await, revision)
        }
        "commit" => {
            let commit = WeightCommit { id, metadata_generation, manifest: fields.manifest() };
            shown(master.commit_weight_import(TENANT, commit).await, revision)
        }
        "abort" => shown(master.abort_weight_import(TENANT, fields.change()).await, revision),
        "view" => shown(master.weight_revision(TENANT, id).await, view),
        "list" => {
            let WeightId { namespace, resource, .. } = id;
            let (token, limit) = (fields.text("token"), fields.number("limit") as u32);
            let list = WeightList { tenant, namespace, resource, token, limit };
            shown(master.weight_revisions(TENANT, list).await, page)
        }
        "lease" => {
            let holder = fields.text("holder");
            let request = WeightLeaseRequest { id, metadata_generation, holder, ttl_ms };
            shown(master.lease_weights(TENANT, request).await, |lease| lease_of(&lease))
        }
        "renew" => {
            let renewal = WeightLeaseRenewal { tenant, lease, ttl_ms };
            shown(master.renew_weight_lease(TENANT, renewal).await, |lease| lease_of(&lease))
        }
        "release" => {
            let release = WeightLeaseRelease { tenant, lease };
            shown(master.release_weight_lease(TENANT, release).await, |()| Value::Null)
        }
        "delete" => shown(master.delete_weights(TENANT, fields.change()).await, revision),
        "move" => {
            let movement = WeightMoveRequest { id, metadata_generation, target: fields.residency()? };
            shown(master.start_weight_move(TENANT, movement).await, operation)
        }
        "query" => {
            let query = WeightOperationQuery { tenant, operation: fields.number("operation") };
            shown(master.weight_move(TENANT, query).await, operation)
        }
        other => return Err(format!("unknown call: {other}")),
    })
}

fn shown<T>(outcome: Result<Result<T, WeightError>, Error>, show: impl FnOnce(T) -> Value) -> Value {
    match outcome {
        Ok(Ok(value)) => show(value),
        Ok(Err(error)) => json!(format!("{error:?}")),
        Err(error) => json!({ "failed": error.code().number() }),
    }
}

fn revision(revision: WeightRevision) -> Value {
    json!({
        "revision": revision.id.revision,
        "group": revision.manifest.group,
        "manifest_key": revision.manifest.manifest_key,
        "payloads": revision.manifest.payloads,
        "bytes": revision.manifest.bytes,
        "availability": format!("{:?}", revision.availability),
        "residency": format!("{:?}", revision.residency),
        "operation": format!("{:?}", revision.operation),
        "metadata_generation": revision.metadata_generation,
    })
}

fn view(view: WeightView) -> Value {
    let mut shown = revision(view.revision);
    shown["leases"] = json!(view.leases);
    shown["nearest_expiry_ms"] = json!(view.nearest_expiry_ms);
    shown
}

fn page(page: WeightPage) -> Value {
    json!({ "views": page.views.into_iter().map(view).collect::<Vec<_>>(), "next": page.next })
}

fn lease_of(lease: &WeightLease) -> Value {
    json!({
        "lease": lease.id,
        "revision": lease.revision.revision,
        "holder": lease.holder,
        "expires_ms": lease.expires_ms,
    })
}

fn operation(operation: WeightOperation) -> Value {
    json!({
        "operation": operation.id,
        "revision": operation.revision.revision,
        "kind": format!("{:?}", operation.kind),
        "target": format!("{:?}", operation.target),
        "done": operation.done,
        "total": operation.total,
        "message": operation.message,
    })
}
