//! `mooncake bench`: measures puts and gets of an ordinary client.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;
use mooncake_core::clock::{Clock, Rng, SystemClock};
use mooncake_core::fault_injection::is_planted;
use mooncake_core::{Error, ErrorCode, Result};
use serde_json::json;

use super::admin::Admin;
use super::args::Bench;
use super::objects;
use super::output::{human, say, say_json, table};
use super::session::{Session, Use};
use mooncake_client::{Client, PutOutcome};

/// Times of one kind of operation.
struct Run {
    name: &'static str,
    took: Duration,
    /// Times in ascending order.
    each: Vec<Duration>,
    failed: u32,
    why: Option<Error>,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Put,
    Get,
}

/// Prefix of every key of every run.
const NAMESPACE: &str = "mooncake-bench";
/// Share of the capacity that may be used if the master does not report its watermark.
const USUAL_WATERMARK: f64 = 0.9;

pub(super) fn run(session: &Session, args: &Bench) -> Result<()> {
    if args.size == 0 {
        return Err(Error::invalid("a value must have at least one byte (--size)"));
    }
    session.check_tenant(Use::Writes)?;
    let admin = session.admin()?;
    let client = session.join(args.segment)?;
    if !args.evict && !is_planted("evicting-bench") {
        objects::leaving_if_err(session, &client, check_space(&admin, args))?;
    }
    let evicted_before = evicted(&admin);
    // A prefix per run: concurrent runs do not interfere, and leftovers of a killed run are
    // harmless.
    let prefix = format!("{NAMESPACE}/{:016x}", Rng::from_os().next_u64());
    let runs = session.runtime.block_on(async {
        let both = async {
            let put = drive(&client, args, &prefix, Kind::Put).await;
            Some([put, drive(&client, args, &prefix, Kind::Get).await])
        };
        // Remove the objects after an interrupt, too.
        let runs = tokio::select! {
            runs = both => runs,
            _ = tokio::signal::ctrl_c() => None,
        };
        let keys: Vec<String> = (0..args.count).map(|n| format!("{prefix}/{n}")).collect();
        for some in keys.chunks(500) {
            if let Err(error) = client.batch_remove(some, true).await {
                tracing::warn!(prefix, "cannot remove the objects of this run: {error}");
            }
        }
        runs.ok_or_else(|| Error::invalid("interrupted; the objects of this run are removed"))
    });
    let runs = objects::leaving(session, &client, runs)?;
    let evicted = evicted(&admin).zip(evicted_before).map(|(now, before)| now.saturating_sub(before));
    show(session, args, &runs, evicted)?;
    let failed = runs.into_iter().find_map(|run| run.why.map(|why| (run.name, run.failed, why)));
    match failed {
        Some((name, count, why)) => {
            Err(why.context(format!("{count} of {} {name}s failed, the first with", args.count)))
        }
        None => Ok(()),
    }
}

/// Returns the number of objects that the master has evicted so far.
fn evicted(admin: &Admin) -> Option<u64> {
    admin.metrics().ok()?.get("master_evicted_key_count").map(|count| *count as u64)
}

/// Refuses a run whose objects fit only if others are evicted.
fn check_space(admin: &Admin, args: &Bench) -> Result<()> {
    let (metrics, segments) = (admin.metrics()?, admin.segments()?);
    if segments.is_empty() {
        return Err(Error::new(
            ErrorCode::NoAvailableHandle,
            "cannot run the benchmark: no client contributes memory. segments=0; \
             start mooncake_client, or offer memory with --segment",
        ));
    }
    let value = |name: &str| metrics.get(name).copied();
    let capacity: u64 = segments.iter().map(|at| at.size_bytes).sum();
    let watermark = value("master_eviction_high_watermark_bytes");
    let limit = watermark.unwrap_or(capacity as f64 * USUAL_WATERMARK) as u64;
    let used: u64 = segments.iter().map(|at| at.allocator_used_bytes).sum();
    let resting = value("master_put_start_discarded_staging_size").unwrap_or(0.0) as u64;
    let wanted = args.size.saturating_mul(args.count.into());
    // A value lies in one segment completely.
    let fitting = |free: u64| free / args.size;
    let places: u64 =
        segments.iter().map(|at| fitting(at.size_bytes.saturating_sub(at.allocator_used_bytes))).sum();
    // Quarantined bytes do not count for the watermark, and cannot be used yet.
    let free = limit.saturating_sub(used.saturating_sub(resting)).min(capacity.saturating_sub(used));
    if wanted <= free && places >= args.count.into() {
        return Ok(());
    }
    Err(Error::new(
        ErrorCode::NoAvailableHandle,
        format!(
            "cannot run the benchmark: the cluster would evict objects of its users. \
             wanted={} free={} segments={}; give a smaller --count or --size, \
             offer memory with --segment, or accept evictions with --evict",
            human(wanted),
            human(free),
            segments.len(),
        ),
    ))
}

async fn drive(client: &Client, args: &Bench, prefix: &str, kind: Kind) -> Run {
    let mut value = vec![0; args.size as usize];
    Rng::seeded(1).fill(&mut value);
    let value = Bytes::from(value);
    let (clock, next) = (SystemClock::new(), Arc::new(AtomicU32::new(0)));
    let begun = clock.now();
    let mut lanes = tokio::task::JoinSet::new();
    for _ in 0..args.concurrency {
        let (client, value, next, count) = (client.clone(), value.clone(), next.clone(), args.count);
        let (prefix, clock) = (prefix.to_owned(), SystemClock::new());
        lanes.spawn(async move {
            let (mut each, mut errors) = (Vec::new(), Vec::new());
            loop {
                let n = next.fetch_add(1, Relaxed);
                if n >= count {
                    return (each, errors);
                }
                let before = clock.now();
                match one(&client, &format!("{prefix}/{n}"), &value, kind).await {
                    Ok(()) => each.push(clock.now().since(before)),
                    Err(error) => errors.push(error),
                }
            }
        });
    }
    let name = if kind == Kind::Put { "put" } else { "get" };
    let mut run = Run { name, took: Duration::ZERO, each: Vec::new(), failed: 0, why: None };
    while let Some(lane) = lanes.join_next().await {
        let (each, errors) = lane.unwrap_or_else(|error| {
            (Vec::new(), vec![Error::internal(format!("benchmark task failed: {error}"))])
        });
        run.each.extend(each);
        run.failed += errors.len() as u32;
        run.why = run.why.or(errors.into_iter().next());
    }
    run.took = clock.now().since(begun);
    run.each.sort_unstable();
    run
}

async fn one(client: &Client, key: &str, value: &Bytes, kind: Kind) -> Result<()> {
    if kind == Kind::Put {
        return match client.put(key, value).await? {
            PutOutcome::Stored => Ok(()),
            PutOutcome::Existed => Err(Error::internal("internal error: a key of this run exists already")),
        };
    }
    match client.get(key).await? {
        Some(got) if got == *value => Ok(()),
        Some(_) => Err(Error::internal("the value differs from the stored one")),
        None => Err(Error::new(
            ErrorCode::ObjectNotFound,
            "an object was evicted: the run needs more space than the cluster has; reduce --count or --size",
        )),
    }
}

fn show(session: &Session, args: &Bench, runs: &[Run], evicted: Option<u64>) -> Result<()> {
    let rate = |run: &Run| run.each.len() as f64 / run.took.as_secs_f64().max(1e-9);
    let micros = |run: &Run, part: f64| {
        let at = ((run.each.len() as f64 * part) as usize).min(run.each.len().saturating_sub(1));
        run.each.get(at).map_or(0.0, |took| took.as_secs_f64() * 1e6)
    };
    if session.to.json {
        let rows = runs.iter().map(|run| {
            json!({
                "operation": run.name, "done": run.each.len(), "failed": run.failed, "seconds": run.took.as_secs_f64(),
                "per_second": rate(run), "bytes_per_second": rate(run) * args.size as f64,
                "p50_us": micros(run, 0.5), "p99_us": micros(run, 0.99),
            })
        });
        return say_json(&json!({
            "size": args.size, "concurrency": args.concurrency, "evicted": evicted,
            "runs": rows.collect::<Vec<_>>(),
        }));
    }
    say(format_args!("{} objects of {}, {} at a time", args.count, human(args.size), args.concurrency))?;
    let header = ["", "per second", "throughput", "p50 µs", "p99 µs", "failed"];
    let mut rows = vec![header.map(String::from).to_vec()];
    rows.extend(runs.iter().map(|run| {
        vec![
            run.name.to_owned(),
            format!("{:.0}", rate(run)),
            format!("{}/s", human((rate(run) * args.size as f64) as u64)),
            format!("{:.0}", micros(run, 0.5)),
            format!("{:.0}", micros(run, 0.99)),
            run.failed.to_string(),
        ]
    }));
    say(table(&rows).trim_end())?;
    match evicted {
        Some(0) => say(format_args!("keys {NAMESPACE}/* are removed; no object was evicted during the run")),
        Some(count) => {
            say(format_args!("keys {NAMESPACE}/* are removed; {count} objects were evicted during the run"))
        }
        None => say(format_args!("keys {NAMESPACE}/* are removed")),
    }
}
