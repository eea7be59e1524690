//! Parsers for values of flags of the master.

use std::time::Duration;

use mooncake_core::settings::values::{Parsed, seconds};
use mooncake_transport::net::address_of;

/// Parses seconds, where 0 stands for no limit.
pub(super) fn limit(text: &str) -> Parsed<Duration> {
    seconds(text).map(|limit| if limit.is_zero() { Duration::MAX } else { limit })
}

/// Parses a cluster id: 1 to 128 characters that are valid in directory keys.
pub(super) fn cluster_id(text: &str) -> Parsed<String> {
    let fine = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
    if text.is_empty() || text.len() > 128 || !text.chars().all(fine) {
        return Err("must be 1 to 128 of A-Z a-z 0-9 _ . -".into());
    }
    Ok(text.into())
}

/// Parses an endpoint of ZeroMQ for binding, `tcp://host:port`. The host is an address, a name, an
/// interface, or `*` for every address. The port is a number; `*` and 0 select a free one.
pub(super) fn endpoint(text: &str) -> Parsed<(String, u16)> {
    let refuse = |reason: &str| {
        format!(
            "{reason}: must be tcp://host:port, with * for every address or a free port; the host may be an interface"
        )
    };
    let at = text.trim().strip_prefix("tcp://").ok_or_else(|| refuse("only tcp is supported"))?;
    let (host, port) = at.rsplit_once(':').ok_or_else(|| refuse("has no port"))?;
    let port = match port {
        "*" => 0,
        // `!` is a form of CZMQ, which ZeroMQ refuses.
        port => port.parse().map_err(|_| refuse("the port is neither a number nor *"))?,
    };
    let host = match host {
        "" => return Err(refuse("has no host")),
        "*" => "0.0.0.0".into(),
        _ if host.contains(';') => return Err(refuse("has a source address, which only subscribers have")),
        // An interface has precedence over a name, as in ZeroMQ.
        _ => address_of(host).map_or_else(|_| host.to_owned(), |address| address.to_string()),
    };
    Ok((host, port))
}

/// Returns the known name with the smallest distance, if it is similar.
pub(super) fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let (distance, nearest) = known.map(|known| (distance(name, known), known)).min()?;
    (distance <= 2 + name.len() / 4).then_some(nearest)
}

/// Returns the number of letters to change, insert or remove.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut corner = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let above = row[j + 1];
            row[j + 1] = (corner + usize::from(x != y)).min(above + 1).min(row[j] + 1);
            corner = above;
        }
    }
    row[b.len()]
}
