//! `mooncake doctor`: checks the setup step by step, and prints fixes.

use std::time::Duration;

use mooncake_core::clock::{Clock, SystemClock};
use mooncake_core::host_port;
use mooncake_core::{ErrorKind, Result};
use serde_json::json;

use super::admin::{Admin, Segment};
use super::args::Doctor;
use super::connects::{connects, listens};
use super::finding::{Finding, Grade};
use super::keys;
use super::local;
use super::output::{say, say_json};
use super::session::Session;
use mooncake_client::MASTER_VERSIONS;
use mooncake_client::programs::{check_version, host_id};

/// Maximum number of segments to check one by one; a cluster may have thousands.
const MAX_CHECKED_SEGMENTS: usize = 64;

/// Maximum difference of clocks that does not confuse readers of logs.
const SAME_TIME: Duration = Duration::from_secs(1);
/// Maximum age of the date in an HTTP response, in milliseconds.
const MAX_DATE_AGE_MS: u64 = 2000;

/// Runs the checks. Returns whether none has failed.
pub(super) fn examine(session: &Session, args: &Doctor) -> Result<bool> {
    let findings = match &args.keys[..] {
        [] if args.local => local::examine(),
        [] => [local::examine(), cluster(session)].concat(),
        lists => keys::compare(lists)?,
    };
    let broken = findings.iter().filter(|at| at.grade == Grade::Bad).count();
    if session.to.json {
        let rows = findings.iter().map(|at| {
            json!({"subject": at.subject, "grade": at.word().to_lowercase(), "found": at.found, "fix": at.fix})
        });
        say_json(&json!({"healthy": broken == 0, "findings": rows.collect::<Vec<_>>()}))?;
        return Ok(broken == 0);
    }
    for at in &findings {
        say(format_args!("{:<5} {:<18} {}", at.word(), at.subject, at.found))?;
        if !at.fix.is_empty() {
            say(format_args!("      {:<18} -> {}", "", at.fix))?;
        }
    }
    match broken {
        0 => say("no check failed")?,
        1 => say("1 check failed")?,
        more => say(format_args!("{more} checks failed"))?,
    }
    Ok(broken == 0)
}

fn cluster(session: &Session) -> Vec<Finding> {
    let mut findings = vec![rpc(session), metadata(session)];
    let admin = match session.admin() {
        Ok(admin) => admin,
        Err(error) => {
            findings.push(Finding::bad("admin port", error.to_string(), "give --master HOST:PORT"));
            return findings;
        }
    };
    match admin.segments() {
        Ok(segments) => {
            findings.push(Finding::good("admin port", format!("{} responds", admin.address())));
            findings.push(time_of_day(&admin));
            findings.extend(reach(&segments, session));
        }
        Err(error) => findings.push(Finding::bad(
            "admin port",
            error.to_string(),
            "start the master with --metrics_port, open it in the firewall, or give --admin HOST:PORT",
        )),
    }
    findings
}

/// Compares the wall clocks. Leases do not depend on them, but logs, events and dashboards do.
fn time_of_day(admin: &Admin) -> Finding {
    let clock = SystemClock::new();
    let before = clock.wall_ms();
    match admin.wall_ms() {
        Ok(Some(there)) => compared(there, before, clock.wall_ms()),
        Ok(None) => Finding::unknown("time of day", format!("{} does not report its time", admin.address())),
        Err(error) => Finding::unknown("time of day", error.to_string()),
    }
}

/// Compares the wall clock of the master with two readings of the local clock around the request.
/// The master reports whole seconds, possibly the previous one.
fn compared(there: u64, before: u64, after: u64) -> Finding {
    let (ahead, behind) =
        (there.saturating_sub(after), before.saturating_sub(there.saturating_add(MAX_DATE_AGE_MS)));
    let off = Duration::from_millis(ahead.max(behind));
    if off <= SAME_TIME {
        return Finding::good("time of day", "this host and the master agree");
    }
    let which = if ahead > 0 { "ahead of" } else { "behind" };
    Finding::hint(
        "time of day",
        format!(
            "the master's clock is {} s {which} this host's: logs and events of the two do not match",
            off.as_secs()
        ),
        "synchronize both with one source: timedatectl set-ntp true, or chronyd (chronyc tracking shows which one is off)",
    )
}

/// Checks the RPC port and the version of the master.
fn rpc(session: &Session) -> Finding {
    let master = match session.leader() {
        Ok(master) => master,
        Err(error) => {
            let fix = "start the masters with --enable_ha, or give the address of one (--master HOST:PORT)";
            return Finding::bad("master", error.to_string(), fix);
        }
    };
    match session.unexplained_version() {
        Ok(version) => match check_version(&version) {
            Ok(()) => Finding::good("master", format!("{master} answers, version {version}")),
            Err(error) => Finding::bad(
                "master",
                error.to_string(),
                &format!(
                    "use a master of version {}, or a client as old as the master",
                    MASTER_VERSIONS.join(" or ")
                ),
            ),
        },
        Err(error) => {
            let (found, fix) = match error.kind() {
                _ if Admin::answers(master) => (
                    format!("{master} speaks HTTP"),
                    "give the RPC port (--rpc_port of the master, usually 50051)",
                ),
                ErrorKind::Timeout if listens(master) => (
                    format!("{master} listens and does not answer: {error}"),
                    "the process is stopped, or overloaded: look at its state (ps) and at its log",
                ),
                ErrorKind::Timeout => (
                    error.to_string(),
                    "a firewall drops packets, or the address is wrong: nc -vz HOST PORT from here",
                ),
                _ => (
                    format!("no master answers at {master}: {error}"),
                    "start mooncake_master there, or give its address (--master HOST:PORT)",
                ),
            };
            Finding::bad("master", found, fix)
        }
    }
}

fn metadata(session: &Session) -> Finding {
    let at = &session.to.metadata;
    if at == "P2PHANDSHAKE" {
        return Finding::good("metadata", "P2PHANDSHAKE: nodes find each other by address");
    }
    let Some(rest) = at.strip_prefix("http://") else {
        return Finding::unknown("metadata", format!("{at} is not checked: not an http:// URL"));
    };
    let authority = rest.split('/').next().unwrap_or(rest);
    let authority = if host_port::split(authority).1.is_some() {
        authority.to_owned()
    } else {
        format!("{authority}:80")
    };
    match connects(&authority, session.to.timeout) {
        Ok(()) => Finding::good("metadata", format!("{at} answers")),
        Err(error) => Finding::bad(
            "metadata",
            format!("{at}: {error}"),
            "start the master with --enable_http_metadata_server, or use P2PHANDSHAKE everywhere (--metadata)",
        ),
    }
}

/// Checks that each segment can be reached from here, and that its address is valid on other hosts.
fn reach(segments: &[Segment], session: &Session) -> Vec<Finding> {
    if segments.is_empty() {
        let fix = "start a client that offers memory (global_segment_size, MOONCAKE_GLOBAL_SEGMENT_SIZE)";
        return vec![Finding::bad("segments", "none is mounted; objects cannot be stored", fix)];
    }
    let mut findings = Vec::new();
    let mut reached = 0;
    let master_is_here = session.leader().is_ok_and(|master| host_id(master).is_empty());
    for at in segments.iter().take(MAX_CHECKED_SEGMENTS) {
        let endpoint = &at.te_endpoint;
        if let Some(finding) = &at.address_finding {
            findings.push(Finding::bad(
                "advertised address",
                format!("segment {} has the address {endpoint}: {finding}", at.segment_name),
                "give its client an address that leads to its own process (local_hostname, MOONCAKE_LOCAL_HOSTNAME)",
            ));
        }
        if host_id(endpoint).is_empty() && !master_is_here {
            findings.push(Finding::bad(
                "advertised address",
                format!(
                    "segment {} has the address {endpoint}, which other hosts resolve to themselves",
                    at.segment_name
                ),
                "give its client an address that other hosts can reach (local_hostname, MOONCAKE_LOCAL_HOSTNAME)",
            ));
        } else if host_port::split(endpoint).1.is_none() {
            findings.push(Finding::unknown(
                "segment",
                format!("{}: {endpoint} is a name in the metadata service", at.segment_name),
            ));
        } else {
            match connects(endpoint, session.to.timeout) {
                Ok(()) => reached += 1,
                Err(error) if is_unresolved(&error) => findings.push(Finding::bad(
                    "segment",
                    format!("{} at {endpoint} cannot be reached: {error}", at.segment_name),
                    "DNS: the host name has no address here; give its client a name or an address that resolves (local_hostname)",
                )),
                Err(error) => findings.push(Finding::bad(
                    "segment",
                    format!("{} at {endpoint} cannot be reached: {error}", at.segment_name),
                    "open that port between the nodes; if the process has ended, the master removes the segment by itself (--client_ttl)",
                )),
            }
        }
    }
    findings
        .push(Finding::good("segments", format!("{reached} of {} can be reached from here", segments.len())));
    findings
}

/// Returns whether the host name has no address.
fn is_unresolved(error: &std::io::Error) -> bool {
    // The standard library has no error kind for failures of `getaddrinfo`.
    error.kind() == std::io::ErrorKind::NotFound || error.to_string().contains("failed to lookup address")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_differing_clocks_are_reported() {
        let said = |there, before, after| format!("{:?}", compared(there, before, after));
        for there in [8_000, 8_500, 10_000, 11_000] {
            assert!(said(there, 10_000, 10_020).contains("Good"), "{there}");
        }
        assert!(said(20_000, 10_000, 10_000).contains("10 s ahead"));
        assert!(said(1_000, 10_000, 10_000).contains("7 s behind"));
        assert!(said(0, u64::MAX, u64::MAX).contains("behind") && said(u64::MAX, 0, 0).contains("ahead"));
    }
}
