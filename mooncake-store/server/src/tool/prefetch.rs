//! `mooncake prefetch`: brings objects that are only on disks back to memory.

use mooncake_core::{Error, ErrorCode, Result};
use serde_json::json;

use super::args::PrefetchKeys;
use super::objects::leaving;
use super::output::{say, say_json};
use super::session::{Session, Use};
use mooncake_client::Prefetch;

/// Maximum number of reasons to print.
const SHOWN: usize = 20;

/// Requests that objects return to memory. Returns whether all of them are there or return.
pub(super) fn request(session: &Session, args: &PrefetchKeys) -> Result<bool> {
    session.check_tenant(Use::Reads)?;
    let client = session.join(0)?;
    let states = session.runtime.block_on(client.replicas().prefetch(&args.keys));
    let states = leaving(session, &client, states).map_err(|error| match error.code() {
        ErrorCode::NotSupported => error.context("the master lacks prefetches"),
        _ => session.explained(error),
    })?;
    let (mut requested, mut in_memory, mut failed) = (0, 0, Vec::new());
    for (key, state) in args.keys.iter().zip(states) {
        match reason(state) {
            Ok(Prefetch::InMemory) => in_memory += 1,
            Ok(_) => requested += 1,
            Err(why) => failed.push(format!("{key:?} {why}")),
        }
    }
    if session.to.json {
        say_json(&json!({"requested": requested, "in_memory": in_memory, "failed": failed}))?;
    } else {
        say(format_args!("{requested} requested, {in_memory} in memory, {} failed", failed.len()))?;
    }
    failed.iter().take(SHOWN).for_each(|why| eprintln!("mooncake: {why}"));
    if failed.len() > SHOWN {
        eprintln!("mooncake: .. and {} more", failed.len() - SHOWN);
    }
    Ok(failed.is_empty())
}

/// Returns the state of an object that is in memory or returns there, or the reason why it does not
/// return.
fn reason(state: Result<Prefetch, Error>) -> Result<Prefetch, String> {
    Err(match state {
        Ok(state @ (Prefetch::InMemory | Prefetch::Requested | Prefetch::Recent)) => return Ok(state),
        Ok(Prefetch::Missing) => "cannot be read: run `mooncake explain` for the cause".to_owned(),
        Ok(Prefetch::InFile) => "is in a shared file only: files are not prefetched".to_owned(),
        Ok(_) => {
            "is refused by the owner of the disk: it is busy or unreachable, or memory is full".to_owned()
        }
        Err(error) => format!("cannot be prefetched: {error}"),
    })
}
