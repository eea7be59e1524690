//! `mooncake bench`: puts and gets of a client like any other.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;
use mooncake_core::clock::{Clock, Rng, SystemClock};
use mooncake_core::replica::ReplicateConfig;
use mooncake_core::{Error, Result};
use serde_json::json;

use super::args::Bench;
use super::{Session, human, objects, say, say_json, table};
use crate::client::{Client, PutOutcome};

/// Times of one kind of operation.
struct Run {
    name: &'static str,
    took: Duration,
    /// In order.
    each: Vec<Duration>,
    failed: u32,
    why: Option<Error>,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Put,
    Get,
}

pub(super) fn run(session: &Session, args: &Bench) -> Result<()> {
    if args.size == 0 {
        return Err(Error::invalid("a value has at least one byte (--size)"));
    }
    let client = session.join(args.segment)?;
    // So that two runs do not meet, and what is left of one that was killed does not matter.
    let prefix = format!("mooncake-bench/{:016x}", Rng::from_os().next_u64());
    let runs = session.runtime.block_on(async {
        let put = drive(&client, args, &prefix, Kind::Put).await;
        let get = drive(&client, args, &prefix, Kind::Get).await;
        let keys: Vec<String> = (0..args.count).map(|n| format!("{prefix}/{n}")).collect();
        for some in keys.chunks(500) {
            if let Err(error) = client.batch_remove(some, true).await {
                tracing::warn!("objects of this run are left behind: {error}");
            }
        }
        [put, get]
    });
    let runs = objects::leaving(session, &client, Ok(runs))?;
    show(session, args, &runs)?;
    let failed = runs.into_iter().find_map(|run| run.why.map(|why| (run.name, run.failed, why)));
    match failed {
        Some((name, count, why)) => {
            Err(why.context(format!("{count} of {} {name}s failed, the first with", args.count)))
        }
        None => Ok(()),
    }
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
        let (each, errors) = lane
            .unwrap_or_else(|error| (Vec::new(), vec![Error::internal(format!("a lane ended: {error}"))]));
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
        return match client.put_bytes(key, value, &ReplicateConfig::default()).await? {
            PutOutcome::Stored => Ok(()),
            PutOutcome::Existed => Err(Error::internal("a key of this run exists already")),
        };
    }
    match client.get(key).await? {
        Some(got) if got == *value => Ok(()),
        Some(_) => Err(Error::internal("other bytes came back than were put")),
        None => Err(Error::new(
            mooncake_core::ErrorCode::ObjectNotFound,
            "what was put is gone: the cluster has less room than the run needs (--count, --size)",
        )),
    }
}

fn show(session: &Session, args: &Bench, runs: &[Run]) -> Result<()> {
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
            "size": args.size, "concurrency": args.concurrency, "runs": rows.collect::<Vec<_>>(),
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
    say(table(&rows).trim_end())
}
