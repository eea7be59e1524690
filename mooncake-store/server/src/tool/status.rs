//! `mooncake status`.

use mooncake_core::Result;
use serde_json::{Map, Value, json};

use super::misses;
use super::output::{human, percent, say, say_json, table};
use super::session::Session;
use mooncake_protocol::message::TABLE_VERSION;

pub(super) fn show(session: &Session) -> Result<()> {
    let version = session.master_version()?;
    let admin = session.admin()?;
    let (segments, metrics) = (admin.segments()?, admin.metrics()?);
    let program = match admin.build()? {
        Some(build) => format!("mooncake-rs {build}, speaks Mooncake {TABLE_VERSION}, RPC version {version}"),
        None => format!("Mooncake C++, RPC version {version}"),
    };
    let (missed, missed_by_tenants) = admin.misses()?;
    let value = |name: &str| metrics.get(name).copied().unwrap_or(0.0);
    let used: u64 = segments.iter().map(|at| at.allocator_used_bytes).sum();
    let capacity: u64 = segments.iter().map(|at| at.size_bytes).sum();
    let (keys, clients) = (value("master_key_count") as u64, value("master_active_clients") as u64);
    if session.to.json {
        let segments: Vec<_> = segments
            .iter()
            .map(|at| {
                json!({
                    "name": at.segment_name, "endpoint": at.te_endpoint, "protocol": at.protocol, "status": at.status,
                    "used_bytes": at.allocator_used_bytes, "size_bytes": at.size_bytes,
                })
            })
            .collect();
        return say_json(&json!({
            "master": session.leader()?, "version": version, "program": program, "keys": keys, "clients": clients,
            "used_bytes": used, "capacity_bytes": capacity, "segments": segments,
            "misses": by_cause(&missed),
            "tenant_misses": missed_by_tenants.iter().map(|(name, of)| (name.clone(), by_cause(of))).collect::<Map<_, _>>(),
        }));
    }
    say(format_args!("master    {} ({program}), admin {}", session.leader()?, admin.address()))?;
    say(format_args!("clients   {clients}"))?;
    say(format_args!("keys      {keys}"))?;
    say(format_args!("memory    {} of {} ({})", human(used), human(capacity), percent(used, capacity)))?;
    say(format_args!("misses    {}", misses::line(&missed)))?;
    for (tenant, missed) in &missed_by_tenants {
        say(format_args!("          {} by tenant {tenant:?}", misses::line(missed)))?;
    }
    if segments.is_empty() {
        return say("no segment is mounted: nothing can be stored before a client offers memory");
    }
    let mut rows =
        vec![["segment", "endpoint", "transport", "state", "used", "size", ""].map(String::from).to_vec()];
    for at in &segments {
        rows.push(vec![
            at.segment_name.clone(),
            at.te_endpoint.clone(),
            at.protocol.clone(),
            at.status.clone(),
            human(at.allocator_used_bytes),
            human(at.size_bytes),
            percent(at.allocator_used_bytes, at.size_bytes),
        ]);
    }
    say(format_args!("\n{}", table(&rows).trim_end()))
}

fn by_cause(misses: &[(String, u64)]) -> Value {
    misses.iter().map(|(cause, count)| (cause.clone(), json!(count))).collect::<Map<_, _>>().into()
}
