//! What the master says over HTTP.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use mooncake_core::{Error, ErrorCode, Result};
use serde::Deserialize;

use super::args::To;
use mooncake_client::programs::{join_port, split_port};

/// Port of the admin pages when nothing else is said.
const ADMIN_PORT: u16 = 9003;
/// Longest page read, in bytes.
const MAX_PAGE: u64 = 1 << 30;

/// The admin pages of a master.
#[derive(Debug)]
pub(super) struct Admin {
    at: String,
    agent: ureq::Agent,
}

/// A segment, as `/get_segments_detail` shows it.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Segment {
    pub(super) segment_name: String,
    pub(super) size_bytes: u64,
    pub(super) te_endpoint: String,
    pub(super) protocol: String,
    pub(super) status: String,
    pub(super) allocator_used_bytes: u64,
}

#[derive(Deserialize)]
struct Segments {
    segments: Vec<Segment>,
}

/// Where an object lies, as `/batch_query_keys` shows it.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Replica {
    pub(super) size_: u64,
    pub(super) transport_endpoint_: String,
}

#[derive(Deserialize)]
struct Queried {
    data: BTreeMap<String, Places>,
}

#[derive(Deserialize)]
struct Places {
    values: Option<Vec<Replica>>,
}

impl Admin {
    /// The pages at the address that is given, or at the usual port of the host of `master`.
    pub(super) fn new(to: &To, master: &str) -> Result<Self> {
        let at = match &to.admin {
            Some(at) => at.clone(),
            None => {
                let (host, _) = split_port(master);
                if host.is_empty() {
                    return Err(Error::invalid(format!("--master {master:?} has no host")));
                }
                join_port(host, ADMIN_PORT)
            }
        };
        Ok(Self { at, agent: agent(to.timeout) })
    }

    /// Whether something there answers an HTTP request.
    pub(super) fn answers(at: &str) -> bool {
        agent(Duration::from_secs(1)).get(format!("http://{at}/health")).call().is_ok()
    }

    pub(super) fn address(&self) -> &str {
        &self.at
    }

    /// What time of day it is there, in milliseconds since 1970 UTC, if it says so: in whole seconds.
    pub(super) fn wall_ms(&self) -> Result<Option<u64>> {
        let answer = self.agent.get(format!("http://{}/health", self.at)).call();
        let answer = answer.map_err(|error| Error::new(ErrorCode::RpcFail, error.to_string()))?;
        let said = answer.headers().get("date").and_then(|date| date.to_str().ok());
        let since = |time: SystemTime| time.duration_since(SystemTime::UNIX_EPOCH).ok();
        let since = said.and_then(|date| httpdate::parse_http_date(date).ok()).and_then(since);
        Ok(since.and_then(|since| u64::try_from(since.as_millis()).ok()))
    }

    /// A page, as text.
    pub(super) fn page(&self, path: &str) -> Result<String> {
        let url = format!("http://{}{path}", self.at);
        let failed = |error: ureq::Error| {
            let hint = format!(
                "the admin pages were not reached at {}: give --admin HOST:PORT (the master's --metrics_port, usually {ADMIN_PORT})",
                self.at
            );
            Error::new(ErrorCode::RpcFail, error.to_string()).context(hint)
        };
        let mut answer = self.agent.get(&url).call().map_err(failed)?;
        let body = answer.body_mut().with_config().limit(MAX_PAGE).lossy_utf8(true).read_to_string();
        let body = body.map_err(failed)?;
        if answer.status() != 200 {
            let text = format!("{url} answered {}: {}", answer.status(), body.trim_end());
            return Err(Error::new(ErrorCode::RpcFail, text));
        }
        Ok(body)
    }

    /// Whether the master keeps tenants apart. `None` if it does not say.
    pub(super) fn has_tenants(&self) -> Option<bool> {
        let answer = self.agent.get(format!("http://{}/api/v1/tenant_quotas", self.at)).call().ok()?;
        match answer.status().as_u16() {
            200 => Some(true),
            409 => Some(false),
            _ => None,
        }
    }

    fn document<T: for<'a> Deserialize<'a>>(&self, path: &str) -> Result<T> {
        let page = self.page(path)?;
        serde_json::from_str(&page).map_err(|error| {
            let text = format!("{}{path} is not what a master answers: {error}", self.at);
            Error::new(ErrorCode::RpcFail, text).with_source(error)
        })
    }

    pub(super) fn segments(&self) -> Result<Vec<Segment>> {
        Ok(self.document::<Segments>("/get_segments_detail")?.segments)
    }

    /// Every key of a tenant, in order.
    pub(super) fn keys(&self, tenant: &str) -> Result<Vec<String>> {
        let page = self.page(&format!("/get_all_keys?tenant_id={}", escaped(tenant)))?;
        let mut keys: Vec<String> = page.lines().map(ToOwned::to_owned).collect();
        keys.sort_unstable();
        Ok(keys)
    }

    /// Copies of each key, none for those that are gone.
    pub(super) fn places(&self, tenant: &str, keys: &[&str]) -> Result<BTreeMap<String, Vec<Replica>>> {
        let list: Vec<String> = keys.iter().map(|key| escaped(key)).collect();
        let path = format!("/batch_query_keys?keys={}&tenant_id={}", list.join(","), escaped(tenant));
        let queried: Queried = self.document(&path)?;
        Ok(queried.data.into_iter().map(|(key, at)| (key, at.values.unwrap_or_default())).collect())
    }

    /// Values of metrics without labels, and sums of those with.
    pub(super) fn metrics(&self) -> Result<BTreeMap<String, f64>> {
        Ok(sums(&self.page("/metrics")?))
    }

    /// Version of the master's program. `None` for a master that does not tell, such as one of Mooncake C++.
    pub(super) fn build(&self) -> Result<Option<String>> {
        let page = self.page("/metrics")?;
        let line = page.lines().find(|line| line.starts_with("master_build_info{"));
        let version = line.and_then(|line| line.split_once("version=\"")?.1.split('"').next());
        Ok(version.map(ToOwned::to_owned))
    }
}

fn agent(timeout: Duration) -> ureq::Agent {
    ureq::Agent::config_builder()
        .timeout_global(Some(timeout))
        .http_status_as_error(false)
        .max_redirects(0)
        // What the environment says about proxies is meant for the outside world.
        .proxy(None)
        .build()
        .new_agent()
}

/// Samples of Prometheus' text format, summed up by name.
fn sums(text: &str) -> BTreeMap<String, f64> {
    let mut sums = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let Some((series, value)) = line.rsplit_once(' ') else { continue };
        let name = series.split('{').next().unwrap_or(series);
        if let Ok(value) = value.parse::<f64>() {
            *sums.entry(name.to_owned()).or_default() += value;
        }
    }
    sums
}

/// Everything but letters, digits and `-._~` as `%XX`.
fn escaped(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    text.bytes().map(|b| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_add_up() {
        let sums = sums("# TYPE a gauge\na 1\nb{x=\"1 2\"} 2\nb{x=\"3\"} 0.5\nbroken\nnan NaN x\n");
        assert_eq!(sums.into_iter().collect::<Vec<_>>(), [("a".into(), 1.0), ("b".into(), 2.5)]);
        assert_eq!(escaped("a/b,c"), "a%2Fb%2Cc");
    }
}
