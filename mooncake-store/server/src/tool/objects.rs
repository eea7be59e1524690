//! `mooncake ls`, `get`, `put` and `rm`.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, IsTerminal, Read, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use bytes::Bytes;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::{Error, ErrorCode, ErrorKind, Result};
use serde_json::json;

use super::args::{Get, Ls, Put, Rm};
use super::output::{human, say, say_json, table};
use super::progress::Progress;
use super::session::{Session, Use};
use mooncake_client::{Client, PutOptions, PutOutcome};

pub(super) fn list(session: &Session, args: &Ls) -> Result<()> {
    session.check_tenant(Use::Reads)?;
    let admin = session.admin()?;
    let mut keys = admin.keys(&session.to.tenant)?;
    keys.retain(|key| key.starts_with(&args.prefix));
    if !args.long {
        return if session.to.json { say_json(&json!(keys)) } else { keys.iter().try_for_each(say) };
    }
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let mut replicas = admin.replicas(&session.to.tenant, &keys)?;
    // Objects that were removed meanwhile are not listed.
    let found =
        keys.into_iter().filter_map(|key| Some((key, replicas.remove(key).filter(|at| !at.is_empty())?)));
    let found: Vec<_> = found.collect();
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
    session.check_tenant(Use::Reads)?;
    let client = session.join(0)?;
    let shown = Progress::start(format!("get {:?}", args.key));
    let got = session.runtime.block_on(client.get(&args.key)).map_err(|error| session.explained(error));
    let value = leaving(session, &client, got)?.ok_or_else(|| {
        let text = format!("no object has the key {:?} (tenant {})", args.key, session.to.tenant);
        Error::new(ErrorCode::ObjectNotFound, text)
    })?;
    shown.end(value.len());
    if target.is_none()
        && std::io::stdout().is_terminal()
        && is_binary(&value)
        && !is_planted("binary-to-tty")
    {
        return Err(Error::invalid(format!(
            "cannot write the value to a terminal: it is binary. key={:?} bytes={}; give --output FILE, or pipe it",
            args.key,
            value.len()
        )));
    }
    match target {
        Some(path) => write_value(path, &value).map_err(|error| file_error("write", path, error)),
        None => {
            let mut out = std::io::stdout().lock();
            out.write_all(&value).and_then(|()| out.flush()).map_err(Error::from)
        }
    }
}

/// Writes a value to a file. A new file is private to this user.
fn write_value(path: &Path, value: &[u8]) -> std::io::Result<()> {
    let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path);
    file?.write_all(value)
}

pub(super) fn put(session: &Session, args: &Put) -> Result<()> {
    let value = Bytes::from(input(args.file.as_deref())?);
    let len = value.len();
    if len == 0 {
        return Err(Error::invalid("cannot store an empty value: a value must have at least one byte"));
    }
    session.check_tenant(Use::Writes)?;
    let client = session.join(0)?;
    let shown = Progress::start(format!("put {:?}, {}", args.key, human(len as u64)));
    let options = PutOptions::new().replicas(args.replicas);
    let options = if args.replace { options.upsert() } else { options };
    let stored = session.runtime.block_on(client.put_with(&args.key, &value, &options));
    shown.end(len);
    let stored = leaving(session, &client, stored).map_err(|error| match error.kind() {
        ErrorKind::NoSpace => {
            error.context(format!("the cluster has no space for {} ({len} bytes)", human(len as u64)))
        }
        _ => session.explained(error),
    })?;
    if stored == PutOutcome::Existed {
        return Err(Error::new(
            ErrorCode::ObjectAlreadyExists,
            format!("the key {:?} exists: replace its value with --replace, or remove it first", args.key),
        ));
    }
    match session.to.json {
        true => say_json(&json!({"key": args.key, "bytes": len})),
        false => Ok(()),
    }
}

/// An object that was not removed, and the reason.
struct Left {
    key: String,
    why: String,
    is_leased: bool,
}

/// Removes objects. Returns whether all of them are gone.
pub(super) fn remove(session: &Session, args: &Rm) -> Result<bool> {
    let checked = args.matching.as_deref().filter(|_| !is_planted("pattern-unchecked"));
    let pattern = checked.map(compiled).transpose()?;
    let many = args.all || pattern.is_some();
    session.check_tenant(if many { Use::RemovesMany } else { Use::Reads })?;
    if args.all && !confirmed(session, args)? {
        return Ok(false);
    }
    let client = session.join(0)?;
    let outcome = session.runtime.block_on(async {
        if args.all {
            return client.remove_all(args.force).await.map(|count| (count, Vec::new()));
        }
        if let Some(pattern) = &args.matching {
            return client.remove_matching(pattern, args.force).await.map(|count| (count, Vec::new()));
        }
        let answers = client.batch_remove(&args.keys, args.force).await?;
        let answers = args.keys.iter().zip(answers);
        let left: Vec<_> = answers.filter_map(|(key, answer)| left_by(key, answer, args.force)).collect();
        Ok(((args.keys.len() - left.len()) as u64, left))
    });
    let outcome = outcome.and_then(|(removed, left)| {
        match &pattern {
            _ if is_planted("silent-rm") => Ok((removed, left)),
            Some(pattern) => left_over(session, &client, args, |key| pattern.is_match(key)),
            None if args.all => left_over(session, &client, args, |_| true),
            None => Ok((0, left)),
        }
        .map(|(later, left)| (removed + later, left))
    });
    let (removed, mut left) = leaving(session, &client, outcome).map_err(|error| session.explained(error))?;
    explain_leases(session, &mut left);
    match session.to.json {
        true => {
            let left: Vec<&str> = left.iter().map(|left| left.why.as_str()).collect();
            say_json(&json!({"removed": removed, "failed": left}))?;
        }
        false => say(format_args!("{removed} removed"))?,
    }
    if args.keys.is_empty() && !left.is_empty() {
        eprintln!("mooncake: {} left:", left.len());
    }
    left.iter().take(SHOWN).for_each(|left| eprintln!("mooncake: {}", left.why));
    if left.len() > SHOWN {
        eprintln!("mooncake: .. and {} more", left.len() - SHOWN);
    }
    Ok(left.is_empty())
}

/// Maximum number of reasons to print.
const SHOWN: usize = 20;

/// Returns the reason why a key was not removed, if it was not.
fn left_by(key: &str, answer: Result<bool>, force: bool) -> Option<Left> {
    let is_leased = matches!(&answer, Err(error) if error.code() == ErrorCode::ObjectHasLease);
    let why = match answer {
        Ok(true) => return None,
        Ok(false) => format!("no object has the key {key:?}"),
        Err(error) if is_leased => {
            format!(
                "{key:?} is in use, a reader has a lease on it ({error}): wait, or remove it with --force"
            )
        }
        Err(error) if error.kind() == ErrorKind::Busy && force => {
            format!("{key:?} is being written, copied or moved ({error}): try again")
        }
        Err(error) if error.kind() == ErrorKind::Busy => {
            format!("{key:?} is in use ({error}): wait, or remove it with --force")
        }
        Err(error) => format!("{key:?}: {error}"),
    };
    Some(Left { key: key.to_owned(), why, is_leased })
}

/// Adds the remaining time of leases to the reasons. A master of Mooncake C++ does not report it.
fn explain_leases(session: &Session, left: &mut [Left]) {
    let mut leased: Vec<_> = left.iter_mut().take(SHOWN).filter(|left| left.is_leased).collect();
    if leased.is_empty() || is_planted("lease-time-untold") {
        return;
    }
    let keys: Vec<&str> = leased.iter().map(|left| left.key.as_str()).collect();
    let leases = session.admin().and_then(|admin| admin.leases(&session.to.tenant, &keys));
    let leases = match leases {
        Ok(leases) => leases,
        Err(error) => return tracing::debug!("cannot query the leases: {error}"),
    };
    for left in &mut leased {
        // A lease that has ended meanwhile only needs another attempt.
        let seconds = leases.get(&left.key).map_or(0, |rest| rest.as_millis().div_ceil(1000));
        left.why = match seconds {
            0 => format!("{:?} was leased until now: try again, or remove it with --force", left.key),
            _ => format!("{:?} is in use, leased for {seconds} s: wait, or remove it with --force", left.key),
        };
    }
}

/// Removes the objects that remain after a batch one by one, so that each of them has a reason.
fn left_over(
    session: &Session,
    client: &Client,
    args: &Rm,
    wanted: impl Fn(&[u8]) -> bool,
) -> Result<(u64, Vec<Left>)> {
    let listed = session.admin().and_then(|admin| admin.keys(&session.to.tenant));
    let mut keys = match listed {
        Ok(keys) => keys,
        Err(error) => {
            eprintln!("mooncake: cannot list the remaining objects: {error}");
            return Ok((0, Vec::new()));
        }
    };
    keys.retain(|key| wanted(key.as_bytes()));
    let (mut removed, mut left) = (0, Vec::new());
    for some in keys.chunks(500) {
        let answers = session.runtime.block_on(client.batch_remove(some, args.force))?;
        for (key, answer) in some.iter().zip(answers) {
            match answer {
                // Another process has removed the object.
                Ok(false) => {}
                answer => match left_by(key, answer, args.force) {
                    None => removed += 1,
                    Some(why) => left.push(why),
                },
            }
        }
    }
    Ok((removed, left))
}

/// Compiles the pattern as the master does, so that an error message shows the position of a
/// mistake.
fn compiled(pattern: &str) -> Result<regex::bytes::Regex> {
    mooncake_master::pattern::compile(pattern).map_err(|error| {
        error.context(format!(
            "cannot remove by pattern: {pattern:?} is not a regular expression (--matching)"
        ))
    })
}

/// Returns whether the user, or `--yes`, confirms the removal of all objects.
fn confirmed(session: &Session, args: &Rm) -> Result<bool> {
    if args.yes || is_planted("rm-all-unasked") {
        return Ok(true);
    }
    let count = session.admin().and_then(|admin| admin.keys(&session.to.tenant)).map(|keys| keys.len());
    let objects = count.map_or_else(|_| "all objects".to_owned(), |count| format!("all {count} objects"));
    let whose = format!("{objects} of tenant {:?} at {}", session.to.tenant, session.leader()?);
    if !std::io::stdin().is_terminal() {
        return Err(Error::invalid(format!(
            "cannot ask whether to remove {whose}: standard input is not a terminal; give --yes"
        )));
    }
    eprint!("Remove {whose}? [y/N] ");
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer)?;
    let yes = matches!(answer.trim().to_ascii_lowercase().as_str(), "y" | "yes");
    if !yes {
        eprintln!("mooncake: nothing is removed");
    }
    Ok(yes)
}

/// Returns whether a terminal cannot show the value, or would interpret it as commands.
fn is_binary(value: &[u8]) -> bool {
    std::str::from_utf8(value)
        .map_or(true, |text| text.chars().any(|c| c.is_control() && !matches!(c, '\n' | '\r' | '\t')))
}

/// Leaves the cluster if the outcome is an error.
pub(super) fn leaving_if_err<T>(session: &Session, client: &Client, outcome: Result<T>) -> Result<T> {
    match outcome {
        Ok(value) => Ok(value),
        Err(error) => leaving(session, client, Err(error)),
    }
}

/// Leaves the cluster and returns the outcome.
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
