//! `mooncake`: looks at a cluster, reads and writes objects, measures, and finds out what is wrong.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command line tool talks to its terminal")]

mod admin;
mod args;
mod bench;
mod doctor;
mod local;
mod objects;
mod progress;
mod status;
mod top;

use std::ffi::OsString;
use std::io::Write;
use std::sync::OnceLock;

use clap::Parser;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::{Error, ErrorCode, Reason, Result};
use tokio::runtime::Runtime;
use tracing_subscriber::EnvFilter;

use self::admin::Admin;
use self::args::{Args, Task, To};
use mooncake_client::Client;
use mooncake_protocol::api::SegmentService;
use mooncake_protocol::client::RpcOptions;
use mooncake_protocol::remote::RemoteMaster;

/// Does what the arguments say (the first is the program's name). The exit status: 0; 1 when it failed, or a check of
/// `doctor` did; 2 for arguments that make no sense.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let args = match Args::try_parse_from(arguments) {
        Ok(args) => args,
        Err(error) => {
            // Nobody is left to be told when even this fails.
            let _ = error.print();
            return u8::try_from(error.exit_code()).unwrap_or(2);
        }
    };
    tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(crate::config::tool_default("RUST_LOG")))
        .with_writer(std::io::stderr)
        .init();
    let outcome = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(Error::from)
        .and_then(|runtime| Session { to: args.to, runtime, leader: OnceLock::new() }.run(args.task));
    match outcome {
        Ok(true) => 0,
        Ok(false) => 1,
        // Whoever read what we wrote has enough of it, as `head` does.
        Err(error) if is_broken_pipe(&error) => 0,
        Err(error) => {
            eprintln!("mooncake: {error}");
            1
        }
    }
}

fn is_broken_pipe(error: &Error) -> bool {
    let source = std::error::Error::source(error).and_then(|source| source.downcast_ref::<std::io::Error>());
    source.is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}

/// One cluster, and what this process needs to speak with it.
struct Session {
    to: To,
    runtime: Runtime,
    /// Address of the master, once it is known.
    leader: OnceLock<String>,
}

impl Session {
    /// Whether all is well.
    fn run(&self, task: Task) -> Result<bool> {
        match task {
            Task::Status => status::show(self).map(|()| true),
            Task::Ls(args) => objects::list(self, &args).map(|()| true),
            Task::Get(args) => objects::get(self, &args).map(|()| true),
            Task::Put(args) => objects::put(self, &args).map(|()| true),
            Task::Rm(args) => objects::remove(self, &args),
            Task::Top(args) => top::show(self, &args).map(|()| true),
            Task::Bench(args) => bench::run(self, &args).map(|()| true),
            Task::Doctor(args) => doctor::examine(self, &args),
        }
    }

    fn admin(&self) -> Result<Admin> {
        // An admin address that is given needs no leader.
        let master = if self.to.admin.is_some() { "" } else { self.leader()? };
        Admin::new(&self.to, master)
    }

    /// The RPC address of the master: `--master`, or that of the leader which etcd names.
    fn leader(&self) -> Result<&str> {
        if let Some(known) = self.leader.get() {
            return Ok(known);
        }
        let found = self.runtime.block_on(async {
            let place = mooncake_client::programs::master_place(&self.to.master, &self.to.cluster)?;
            place.now(self.to.timeout).await.map_err(|error| {
                let hint = format!(
                    "{} names no leader: check that address (--master) and --cluster",
                    self.to.master
                );
                error.context(hint)
            })
        })?;
        Ok(self.leader.get_or_init(|| found.to_string()))
    }

    fn remote(&self) -> Result<RemoteMaster> {
        let options = RpcOptions {
            connect_timeout: self.to.timeout,
            call_timeout: self.to.timeout,
            ..RpcOptions::default()
        };
        Ok(RemoteMaster::new(self.leader()?, options))
    }

    /// The master's version, or what may be wrong with the address.
    fn master_version(&self) -> Result<String> {
        let remote = self.remote()?;
        let asked = self.runtime.block_on(remote.version());
        asked.map_err(|error| self.explained(error))
    }

    /// Joins as a member that offers `segment` bytes.
    fn join(&self, segment: u64) -> Result<Client> {
        // Says at once what is wrong, where joining would try until its time is up.
        let version = self.master_version()?;
        mooncake_client::programs::check_version(&version)?;
        let joined = self.runtime.block_on(
            Client::builder()
                .master(self.to.master.as_str())
                .cluster_id(self.to.cluster.clone())
                .metadata(self.to.metadata.clone())
                .local_hostname(self.to.hostname.clone())
                .tenant(self.to.tenant.clone())
                .segment(segment)
                .timeout(self.to.timeout)
                .connect_timeout(self.to.timeout)
                .connect(),
        );
        joined.map_err(|error| self.explained(error))
    }

    /// Notes on standard error that a tenant was named to a master that has none, because commands then see all objects. An
    /// error for a command that removes many objects (`strict`).
    fn check_tenant(&self, strict: bool) -> Result<()> {
        let tenant = &self.to.tenant;
        if tenant == mooncake_protocol::api::DEFAULT_TENANT || is_planted("silent-tenant") {
            return Ok(());
        }
        let Ok(Some(false)) = self.admin().map(|admin| admin.has_tenants()) else { return Ok(()) };
        let text =
            format!("this master has no tenants (--enable_multi_tenants): --tenant {tenant} selects nothing");
        if strict {
            return Err(Error::invalid(format!(
                "{text}, and every object would be removed; leave --tenant out"
            )));
        }
        eprintln!("mooncake: {text}, and all objects are meant");
        Ok(())
    }

    /// Adds what a person would look at next.
    fn explained(&self, error: Error) -> Error {
        let master = self.leader.get().unwrap_or(&self.to.master);
        let hint = match error.code() {
            ErrorCode::RpcFail | ErrorCode::RpcTimeout if Admin::answers(master) => {
                format!(
                    "{master} speaks HTTP: give the RPC port of the master (--master, usually 50051), not the admin port"
                )
            }
            ErrorCode::RpcFail | ErrorCode::RpcTimeout
                if error.reason() == Some(Reason::ConnectionBroken) =>
            {
                format!("{master} is no master: something else listens there (--master)")
            }
            ErrorCode::RpcFail | ErrorCode::RpcTimeout => {
                format!(
                    "no master answers at {master}: check the address (--master, MOONCAKE_MASTER), or run `mooncake doctor`"
                )
            }
            ErrorCode::TenantNotRegistered => {
                format!(
                    "the master knows no tenant {:?}: give another one (--tenant), or register it",
                    self.to.tenant
                )
            }
            _ => return error,
        };
        error.context(hint)
    }
}

/// Writes a line to standard output.
fn say(text: impl std::fmt::Display) -> Result<()> {
    writeln!(std::io::stdout().lock(), "{text}").map_err(Error::from)
}

/// Writes a document to standard output.
fn say_json(value: &serde_json::Value) -> Result<()> {
    say(format_args!("{value:#}"))
}

/// Bytes for people.
fn human(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut unit = 0;
    let mut size = bytes as f64;
    while size >= 1024.0 && unit + 1 < UNITS.len() {
        size /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{size:.1} {}", UNITS[unit]) }
}

/// Rows under a header, each column as wide as it must be; the first to the left, the others to the right.
fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| rows.iter().filter_map(|row| Some(row.get(column)?.chars().count())).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (index, (cell, &width)) in row.iter().zip(&widths).enumerate() {
            match index {
                0 => line += &format!("{cell:<width$}"),
                _ => line += &format!("  {cell:>width$}"),
            }
        }
        text += line.trim_end();
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_line_up() {
        let rows = [["name", "bytes"], ["a", "1"], ["longer", "22"]];
        let rows: Vec<Vec<String>> =
            rows.iter().map(|row| row.iter().map(ToString::to_string).collect()).collect();
        assert_eq!(table(&rows), "name    bytes\na           1\nlonger     22\n");
        assert_eq!(human(1536), "1.5 KiB");
        assert_eq!(human(7), "7 B");
    }
}
