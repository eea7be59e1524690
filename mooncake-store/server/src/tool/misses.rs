//! Misses: `mooncake explain`, and the counts that `mooncake status` shows.

use std::collections::BTreeMap;

use mooncake_core::Result;
use serde_json::json;

use super::admin::Admin;
use super::args::Explain;
use super::output::{human, percent, say, say_json};
use super::session::{Session, Use};
use mooncake_master::MissCause;

/// Metric of all misses.
const ALL: &str = "master_misses_total";

/// Metric of the misses of each tenant.
const OF_TENANTS: &str = "mooncake_tenant_misses_total";

/// Number of causes to print in a line.
const SHOWN: usize = 3;

/// Number of misses by cause, the largest first.
pub(super) type Misses = Vec<(String, u64)>;

/// Says whether an object can be read, and why not. Returns whether it can.
pub(super) fn explain(session: &Session, args: &Explain) -> Result<bool> {
    session.check_tenant(Use::Reads)?;
    let admin = session.admin()?;
    let explained = admin.explain(&session.to.tenant, &args.key)?;
    let replicas = admin.replicas(&session.to.tenant, &[&args.key])?.remove(&args.key).unwrap_or_default();
    if session.to.json {
        let endpoints: Vec<_> = replicas.iter().map(|at| &at.transport_endpoint_).collect();
        say_json(&json!({
            "key": args.key, "readable": explained.readable, "cause": explained.cause,
            "explanation": explained.explanation, "lease_ms": explained.lease_ms, "replicas": endpoints,
        }))?;
        return Ok(explained.readable);
    }
    if let Some(cause) = explained.cause {
        let known = explained.explanation.unwrap_or_default();
        say(format_args!("{:?} cannot be read: {known} ({cause})", args.key))?;
        return Ok(false);
    }
    let leased = match explained.lease_ms.div_ceil(1000) {
        0 => String::new(),
        seconds => format!(", leased for {seconds} s"),
    };
    let place = match replicas.first() {
        Some(first) => {
            let endpoints: Vec<_> = replicas.iter().map(|at| at.transport_endpoint_.as_str()).collect();
            format!("{} in memory at {}", human(first.size_), endpoints.join(" "))
        }
        None => "it is on disk only".to_owned(),
    };
    say(format_args!("{:?} can be read: {place}{leased}", args.key))?;
    Ok(true)
}

impl Admin {
    /// Returns the misses of all keys, then those of each tenant by name.
    pub(super) fn misses(&self) -> Result<(Misses, BTreeMap<String, Misses>)> {
        let page = self.page("/metrics")?;
        let mut tenants: BTreeMap<String, Misses> = BTreeMap::new();
        for (labels, count) in samples(&page, OF_TENANTS) {
            if let (Some(tenant), Some(cause)) = (label(labels, "tenant_id"), label(labels, "cause")) {
                tenants.entry(tenant.to_owned()).or_default().push((cause.to_owned(), count));
            }
        }
        let all = samples(&page, ALL);
        let all = all.filter_map(|(labels, count)| Some((label(labels, "cause")?.to_owned(), count)));
        Ok((sorted(all.collect()), tenants.into_iter().map(|(name, of)| (name, sorted(of))).collect()))
    }
}

/// Returns the labels and the value of each sample of a metric.
fn samples<'p>(page: &'p str, metric: &str) -> impl Iterator<Item = (&'p str, u64)> {
    page.lines().filter_map(move |line| {
        let (labels, value) = line.strip_prefix(metric)?.strip_prefix('{')?.rsplit_once("} ")?;
        Some((labels, value.parse::<f64>().ok()? as u64))
    })
}

/// Returns the value of a label. Names of tenants that need an escape are not found.
fn label<'l>(labels: &'l str, name: &str) -> Option<&'l str> {
    let at = |text: &'l str| text.strip_prefix(name)?.strip_prefix("=\"")?.split('"').next();
    labels.split(',').find_map(at)
}

fn sorted(mut misses: Misses) -> Misses {
    misses.retain(|(_, count)| *count > 0);
    misses.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    misses
}

/// Formats the sum and the most frequent causes.
pub(super) fn line(misses: &[(String, u64)]) -> String {
    let sum = misses.iter().fold(0u64, |sum, (_, count)| sum.saturating_add(*count));
    let causes = misses.iter().take(SHOWN).map(|(cause, count)| {
        let words = match MissCause::from_name(cause) {
            Some(known) => words(known),
            None => cause,
        };
        format!("{} {words}", percent(*count, sum))
    });
    let causes: Vec<_> = causes.collect();
    if causes.is_empty() { sum.to_string() } else { format!("{sum}: {}", causes.join(", ")) }
}

fn words(cause: MissCause) -> &'static str {
    match cause {
        MissCause::Unknown => "never stored or forgotten",
        MissCause::Evicted => "evicted",
        MissCause::EvictedWithGroup => "evicted with their group",
        MissCause::PinEnded => "evicted after a soft pin",
        MissCause::Removed => "removed",
        MissCause::OwnerLost => "lost with their client",
        MissCause::PutFailed => "not written",
        MissCause::OverQuota => "over quota",
        MissCause::Expired => "past their time to live",
        MissCause::DeletedAfterRead => "deleted after their read",
        MissCause::BehindGap => "behind a gap",
        MissCause::Unreadable => "unreadable",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_read_by_label() {
        let page = "# TYPE m counter\nm{cause=\"evicted\",x=\"1\"} 3\nm{x=\"a b\",cause=\"removed\"} 7\nmm{cause=\"x\"} 1\n";
        let found: Vec<_> =
            samples(page, "m").map(|(labels, count)| (label(labels, "cause"), count)).collect();
        assert_eq!(found, [(Some("evicted"), 3), (Some("removed"), 7)]);
    }

    #[test]
    fn the_most_frequent_causes_are_shown() {
        let of = |list: &[(&str, u64)]| sorted(list.iter().map(|(name, n)| ((*name).into(), *n)).collect());
        let misses = of(&[("removed", 0), ("evicted", 1), ("unknown", 2), ("later", 5), ("put_failed", 1)]);
        assert_eq!(line(&misses), "9: 55.6 % later, 22.2 % never stored or forgotten, 11.1 % evicted");
        assert_eq!(line(&of(&[])), "0");
    }
}
