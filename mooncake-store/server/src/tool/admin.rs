//! Client of the admin endpoints of a master.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use mooncake_core::host_port;
use mooncake_core::{Error, ErrorCode, Result};
use serde::{Deserialize, Serialize};

use super::args::To;
use super::connects::listens;

/// Default port of the admin endpoints.
const ADMIN_PORT: u16 = 9003;
/// Maximum length of a response in bytes.
const MAX_PAGE: u64 = 1 << 30;
/// Length in bytes that a list of keys in an address exceeds by no more than one key. The length of
/// an address is limited, in Mooncake C++ too.
const KEY_LIST: usize = 8 << 10;

/// Admin endpoints of a master.
#[derive(Debug)]
pub(super) struct Admin {
    at: String,
    /// RPC address of the master; empty if the admin address was given.
    master: String,
    agent: ureq::Agent,
}

/// A segment in the response of `/get_segments_detail`.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Segment {
    pub(super) segment_name: String,
    pub(super) size_bytes: u64,
    pub(super) te_endpoint: String,
    pub(super) protocol: String,
    pub(super) status: String,
    pub(super) allocator_used_bytes: u64,
    /// Reason why the address of the owner does not lead to it, as the master has found.
    pub(super) address_finding: Option<String>,
}

#[derive(Deserialize)]
struct Segments {
    segments: Vec<Segment>,
}

/// Replicas of an object in the response of `/batch_query_keys`.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Replica {
    pub(super) size_: u64,
    pub(super) transport_endpoint_: String,
}

/// Response of `/api/v1/memory_curve`.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Curve {
    pub(super) span_seconds: f64,
    pub(super) uses: u64,
    pub(super) keys_for_each_sampled: u64,
    pub(super) points: Vec<CurvePoint>,
}

/// Size of memory with its hit rate.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct CurvePoint {
    pub(super) factor: f64,
    pub(super) bytes: u64,
    pub(super) hit_rate: Option<f64>,
}

#[derive(Deserialize)]
struct Queried {
    data: BTreeMap<String, QueriedReplicas>,
}

#[derive(Deserialize)]
struct Leases {
    lease_ms: BTreeMap<String, u64>,
}

/// Response of `/api/v1/explain`.
#[derive(Debug, Deserialize)]
pub(super) struct Explained {
    pub(super) readable: bool,
    pub(super) cause: Option<String>,
    pub(super) explanation: Option<String>,
    pub(super) lease_ms: u64,
}

#[derive(Deserialize)]
struct QueriedReplicas {
    values: Option<Vec<Replica>>,
}

impl Admin {
    /// Selects the given admin address, or the default port on the host of `master`.
    pub(super) fn new(to: &To, master: &str) -> Result<Self> {
        let at = match &to.admin {
            Some(at) => at.clone(),
            None => {
                let (host, _) = host_port::split(master);
                if host.is_empty() {
                    return Err(Error::invalid(format!("--master {master:?} has no host")));
                }
                host_port::join(host, ADMIN_PORT)
            }
        };
        Ok(Self { at, master: master.to_owned(), agent: agent(to.timeout) })
    }

    /// Returns whether an HTTP server responds at the address.
    pub(super) fn answers(at: &str) -> bool {
        agent(Duration::from_secs(1)).get(format!("http://{at}/health")).call().is_ok()
    }

    pub(super) fn address(&self) -> &str {
        &self.at
    }

    /// Returns the wall clock of the master in milliseconds since 1970 UTC, rounded to seconds, if
    /// the response has a date.
    pub(super) fn wall_ms(&self) -> Result<Option<u64>> {
        let answer = self.agent.get(format!("http://{}/health", self.at)).call();
        let answer = answer.map_err(|error| Error::new(ErrorCode::RpcFail, error.to_string()))?;
        let said = answer.headers().get("date").and_then(|date| date.to_str().ok());
        let since = |time: SystemTime| time.duration_since(SystemTime::UNIX_EPOCH).ok();
        let since = said.and_then(|date| httpdate::parse_http_date(date).ok()).and_then(since);
        Ok(since.and_then(|since| u64::try_from(since.as_millis()).ok()))
    }

    /// Requests an endpoint and returns the response as text.
    pub(super) fn page(&self, path: &str) -> Result<String> {
        let url = format!("http://{}{path}", self.at);
        let failed = |error: ureq::Error| {
            let error = Error::new(ErrorCode::RpcFail, error.to_string());
            if !self.master.is_empty() && !listens(&self.master) {
                return error.context(format!(
                    "no master answers at {}, nor an admin endpoint at {}: check the address (--master, MOONCAKE_MASTER, --admin)",
                    self.master, self.at
                ));
            }
            error.context(format!(
                "cannot reach the admin endpoints at {}: give --admin HOST:PORT (the master's --metrics_port, usually {ADMIN_PORT})",
                self.at
            ))
        };
        let mut answer = self.agent.get(&url).call().map_err(failed)?;
        let body = answer.body_mut().with_config().limit(MAX_PAGE).lossy_utf8(true).read_to_string();
        let body = body.map_err(failed)?;
        if answer.status() != 200 {
            let text = format!("{url} answered {}: {}", answer.status(), body.trim_end());
            let is_unknown = answer.status() == 404;
            return Err(Error::new(
                if is_unknown { ErrorCode::NotSupported } else { ErrorCode::RpcFail },
                text,
            ));
        }
        Ok(body)
    }

    /// Returns whether the master has tenants. `None` if the response does not show it.
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
            let text = format!("invalid response of {}{path}: {error}", self.at);
            Error::new(ErrorCode::RpcFail, text).with_source(error)
        })
    }

    pub(super) fn segments(&self) -> Result<Vec<Segment>> {
        Ok(self.document::<Segments>("/get_segments_detail")?.segments)
    }

    /// Returns how often objects would be found at several sizes of memory.
    pub(super) fn curve(&self) -> Result<Curve> {
        self.document("/api/v1/memory_curve")
    }

    /// Returns all keys of a tenant in ascending order.
    pub(super) fn keys(&self, tenant: &str) -> Result<Vec<String>> {
        let page = self.page(&format!("/get_all_keys?tenant_id={}", escaped(tenant)))?;
        let mut keys: Vec<String> = page.lines().map(ToOwned::to_owned).collect();
        keys.sort_unstable();
        Ok(keys)
    }

    /// Returns the replicas of each key; none for a missing object.
    pub(super) fn replicas(&self, tenant: &str, keys: &[&str]) -> Result<BTreeMap<String, Vec<Replica>>> {
        let mut replicas = BTreeMap::new();
        for list in key_lists(keys) {
            let path = format!("/batch_query_keys?keys={list}&tenant_id={}", escaped(tenant));
            let queried: Queried = self.document(&path)?;
            replicas.extend(queried.data.into_iter().map(|(key, at)| (key, at.values.unwrap_or_default())));
        }
        Ok(replicas)
    }

    /// Returns the remaining time of the leases on these keys. Keys without a lease are left out.
    pub(super) fn leases(&self, tenant: &str, keys: &[&str]) -> Result<BTreeMap<String, Duration>> {
        let mut leases = BTreeMap::new();
        for list in key_lists(keys) {
            let path = format!("/api/v1/leases?keys={list}&tenant_id={}", escaped(tenant));
            let answer: Leases = self.document(&path)?;
            leases.extend(answer.lease_ms.into_iter().map(|(key, ms)| (key, Duration::from_millis(ms))));
        }
        Ok(leases)
    }

    /// Returns whether a key can be read, and why not.
    pub(super) fn explain(&self, tenant: &str, key: &str) -> Result<Explained> {
        let path = format!("/api/v1/explain?key={}&tenant_id={}", escaped(key), escaped(tenant));
        self.document(&path).map_err(|error| match error.code() {
            ErrorCode::NotSupported => error.context(
                "cannot explain a key: the master does not tell (Mooncake C++ and earlier versions)",
            ),
            _ => error,
        })
    }

    /// Returns the values of metrics without labels, and the sums of metrics with labels.
    pub(super) fn metrics(&self) -> Result<BTreeMap<String, f64>> {
        Ok(sums(&self.page("/metrics")?))
    }

    /// Returns the version of the master's program. `None` for a master of Mooncake C++, which does
    /// not report it.
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
        // Proxies of the environment are not meant for the cluster.
        .proxy(None)
        .build()
        .new_agent()
}

/// Sums the samples of each name in the text format of Prometheus.
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

/// Returns the keys as lists for an address: escaped, and separated by commas.
fn key_lists(keys: &[&str]) -> Vec<String> {
    let mut lists: Vec<String> = Vec::new();
    for key in keys {
        match lists.last_mut().filter(|list| list.len() < KEY_LIST) {
            Some(list) => {
                list.push(',');
                list.push_str(&escaped(key));
            }
            None => lists.push(escaped(key)),
        }
    }
    lists
}

/// Percent-encodes everything except letters, digits and `-._~`.
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

    #[test]
    fn long_lists_of_keys_are_split() {
        assert_eq!(key_lists(&["a", "b,"]), ["a,b%2C"]);
        assert!(key_lists(&[]).is_empty());
        let key = "k".repeat(2000);
        let lists = key_lists(&vec![key.as_str(); 100]);
        assert_eq!(lists.iter().map(|list| list.split(',').count()).sum::<usize>(), 100);
        assert!(lists.len() > 1 && lists.iter().all(|list| list.len() < KEY_LIST + key.len() + 1));
    }
}
