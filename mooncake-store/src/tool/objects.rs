//! `mooncake ls`, `get`, `put` and `rm`.

use std::fs::File;
use std::io::{IsTerminal, Read, Write};
use std::path::Path;

use bytes::Bytes;
use mooncake_core::replica::ReplicateConfig;
use mooncake_core::{Error, ErrorKind, Result};
use serde_json::json;

use super::args::{Get, Ls, Put, Rm};
use super::{Session, human, say, say_json, table};
use crate::client::{Client, PutOutcome};

/// Keys asked about in one request: a URL has its limits.
const AT_ONCE: usize = 50;

pub(super) fn list(session: &Session, args: &Ls) -> Result<()> {
    let admin = session.admin()?;
    let mut keys = admin.keys(&session.to.tenant)?;
    keys.retain(|key| key.starts_with(&args.prefix));
    if !args.long {
        return if session.to.json { say_json(&json!(keys)) } else { keys.iter().try_for_each(say) };
    }
    let mut found = Vec::new();
    for some in keys.chunks(AT_ONCE) {
        let some: Vec<&str> = some.iter().map(String::as_str).collect();
        let mut places = admin.places(&session.to.tenant, &some)?;
        // What went meanwhile is not listed.
        found.extend(
            some.iter().filter_map(|key| Some((*key, places.remove(*key).filter(|at| !at.is_empty())?))),
        );
    }
    if session.to.json {
        let objects = found.iter().map(|(key, at)| {
            let endpoints: Vec<&str> = at.iter().map(|at| at.transport_endpoint_.as_str()).collect();
            json!({"key": key, "bytes": at[0].size_, "replicas": endpoints})
        });
        return say_json(&json!(objects.collect::<Vec<_>>()));
    }
    let mut rows = vec![["key", "size", "replicas"].map(String::from).to_vec()];
    rows.extend(found.iter().map(|(key, at)| {
        let endpoints: Vec<&str> = at.iter().map(|at| at.transport_endpoint_.as_str()).collect();
        vec![(*key).to_owned(), human(at[0].size_), endpoints.join(" ")]
    }));
    say(table(&rows).trim_end())
}

pub(super) fn get(session: &Session, args: &Get) -> Result<()> {
    let target = args.output.as_deref().filter(|path| *path != Path::new("-"));
    let client = session.join(0)?;
    let got = session.runtime.block_on(client.get(&args.key)).map_err(|error| session.explained(error));
    let value = leaving(session, &client, got)?.ok_or_else(|| {
        let text = format!("no object has the key {:?} (tenant {})", args.key, session.to.tenant);
        Error::new(mooncake_core::ErrorCode::ObjectNotFound, text)
    })?;
    match target {
        Some(path) => std::fs::write(path, &value).map_err(|error| file_error("write", path, error)),
        None => {
            let mut out = std::io::stdout().lock();
            out.write_all(&value).and_then(|()| out.flush()).map_err(Error::from)
        }
    }
}

pub(super) fn put(session: &Session, args: &Put) -> Result<()> {
    let value = Bytes::from(input(args.file.as_deref())?);
    let len = value.len();
    if len == 0 {
        return Err(Error::invalid("there is nothing to store: a value has at least one byte"));
    }
    let client = session.join(0)?;
    let config = ReplicateConfig::replicas(args.replicas);
    let stored = session.runtime.block_on(async {
        if args.replace {
            let mut answers = client.batch_upsert(&[(&args.key, &value)], &config).await?;
            answers.pop().unwrap_or_else(|| Err(Error::internal("no answer"))).map(|()| PutOutcome::Stored)
        } else {
            client.put_bytes(&args.key, &value, &config).await
        }
    });
    let stored = leaving(session, &client, stored).map_err(|error| match error.kind() {
        ErrorKind::NoSpace => error.context(format!(
            "the cluster has no room for {} ({len} bytes): `mooncake status` shows its segments, and a value must fit into one",
            human(len as u64)
        )),
        _ => session.explained(error),
    })?;
    if stored == PutOutcome::Existed {
        return Err(Error::new(
            mooncake_core::ErrorCode::ObjectAlreadyExists,
            format!("the key {:?} exists: replace its value with --replace, or remove it first", args.key),
        ));
    }
    match session.to.json {
        true => say_json(&json!({"key": args.key, "bytes": len})),
        false => Ok(()),
    }
}

/// Whether each key is gone.
pub(super) fn remove(session: &Session, args: &Rm) -> Result<bool> {
    let client = session.join(0)?;
    let outcome = session.runtime.block_on(async {
        if args.all {
            return client.remove_all(args.force).await.map(|count| (count, Vec::new()));
        }
        if let Some(pattern) = &args.matching {
            return client.remove_matching(pattern, args.force).await.map(|count| (count, Vec::new()));
        }
        let answers = client.batch_remove(&args.keys, args.force).await?;
        let mut left = Vec::new();
        for (key, answer) in args.keys.iter().zip(answers) {
            match answer {
                Ok(true) => {}
                Ok(false) => left.push(format!("no object has the key {key:?}")),
                Err(error) if error.kind() == ErrorKind::Busy => {
                    left.push(format!("{key:?} is in use ({error}): wait, or remove it with --force"));
                }
                Err(error) => left.push(format!("{key:?}: {error}")),
            }
        }
        Ok(((args.keys.len() - left.len()) as u64, left))
    });
    let (removed, left) = leaving(session, &client, outcome).map_err(|error| session.explained(error))?;
    match session.to.json {
        true => say_json(&json!({"removed": removed, "failed": left}))?,
        false => say(format_args!("{removed} removed"))?,
    }
    left.iter().for_each(|line| eprintln!("mooncake: {line}"));
    Ok(left.is_empty())
}

/// Leaves the cluster, whatever came of it.
pub(super) fn leaving<T>(session: &Session, client: &Client, outcome: Result<T>) -> Result<T> {
    if let Err(error) = session.runtime.block_on(client.close()) {
        tracing::debug!("leaving: {error}");
    }
    outcome
}

fn input(file: Option<&Path>) -> Result<Vec<u8>> {
    let mut value = Vec::new();
    match file.filter(|path| *path != Path::new("-")) {
        Some(path) => {
            let read = File::open(path).and_then(|mut file| file.read_to_end(&mut value));
            read.map_err(|error| file_error("read", path, error))?;
        }
        None => {
            if std::io::stdin().is_terminal() {
                eprintln!("mooncake: reading the value from the terminal, until Ctrl-D");
            }
            std::io::stdin().lock().read_to_end(&mut value)?;
        }
    }
    Ok(value)
}

fn file_error(what: &str, path: &Path, error: std::io::Error) -> Error {
    Error::invalid(format!("cannot {what} {}: {error}", path.display())).with_source(error)
}
