//! Metadata directory in etcd, over the JSON gateway that its client port serves (version 3.4 and
//! newer).
//!
//! The client does not use gRPC: the crates for it need `protoc` on every build machine, and four
//! times as many dependencies as this crate has.

pub mod response;

use std::io::{BufRead, BufReader, Read};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use futures::StreamExt;
use futures::stream::BoxStream;
use mooncake_core::fault_injection::is_planted;
use mooncake_core::host_port::HostPort;
use mooncake_core::meta::{Expect, Hold, Leases, MetaCapabilities, MetaEvent, MetaValue, MetadataBackend};
use mooncake_core::{Error, ErrorCode, Result};
use serde_json::{Value, json};
use tokio::sync::{Semaphore, mpsc};
use tracing::warn;

use crate::web::{CONNECT, Verb, Web, excerpt};
use response::{Entries, WatchLine, entries, number};

/// Port of an endpoint without a port.
const PORT: u16 = 2379;
/// Maximum length of a line of a watch.
const LINE: u64 = 64 << 20;
/// Maximum number of queued events of a watch. A watch with a full queue stops reading, and etcd
/// keeps the rest.
const EVENTS: usize = 64;
/// Time without a message after which a watch is opened again. It bounds the life of a watch that
/// has no reader any more.
const WATCH_IDLE_TIMEOUT: Duration = Duration::from_secs(5);

/// Metadata directory in etcd. Runs on a tokio runtime.
///
/// The endpoints belong to one cluster. A request goes to the endpoint that responded last, then to
/// the others. Revisions are those of etcd.
#[derive(Debug)]
pub struct EtcdMetadata {
    endpoints: Vec<String>,
    /// Index of the endpoint that responded last.
    current: AtomicUsize,
    web: Web,
}

impl EtcdMetadata {
    /// Creates a directory at `host:port`, or at several, separated by commas or semicolons, with
    /// or without the prefix `etcd://`. Does not connect yet.
    ///
    /// # Errors
    /// Returns `INVALID_PARAMS` if there is no host.
    pub fn new(endpoints: &str) -> Result<Self> {
        let list = endpoints.strip_prefix("etcd://").unwrap_or(endpoints);
        let urls: Vec<String> = list
            .split([',', ';'])
            .map(|one| one.trim().trim_start_matches("http://").trim_end_matches('/'))
            .filter(|one| !one.is_empty())
            .map(|one| format!("http://{}", HostPort::parse(one, PORT)))
            .collect();
        if urls.is_empty() || urls.iter().any(|url| url.starts_with("http://:") || url.contains("://https")) {
            return Err(Error::invalid(format!(
                "metadata directory {endpoints:?}: expected etcd://host:port, or several separated by commas"
            )));
        }
        Ok(Self { endpoints: urls, current: AtomicUsize::new(0), web: Web::new() })
    }

    /// Posts to the first endpoint that responds.
    async fn post(&self, path: &str, request: &Value) -> Result<Value> {
        let body = Bytes::from(request.to_string());
        let first = self.current.load(Ordering::Relaxed);
        let mut last = None;
        for step in 0..self.endpoints.len() {
            let at = (first + step) % self.endpoints.len();
            let url = format!("{}/v3/{path}", self.endpoints[at]);
            // If the caller cancels this request, the next one begins with another endpoint.
            self.current.store((at + 1) % self.endpoints.len(), Ordering::Relaxed);
            match self.web.call(Verb::Post(body.clone()), url).await {
                Ok(reply) if reply.status == 200 => {
                    self.current.store(at, Ordering::Relaxed);
                    return response::json(&reply.body);
                }
                Ok(reply) => {
                    self.current.store(at, Ordering::Relaxed);
                    let said = excerpt(&reply);
                    let error = Error::new(
                        ErrorCode::RpcFail,
                        format!("etcd at {} answered {} to {path}: {said}", self.endpoints[at], reply.status),
                    );
                    // The endpoint has no leader. Another endpoint may have one.
                    if reply.status < 500 {
                        return Err(error);
                    }
                    last = Some(error);
                }
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(|| Error::internal("etcd directory has no endpoints")))
    }

    /// Returns the entries of a range, and the revision of the read.
    async fn range(&self, request: Value) -> Result<(Entries, u64)> {
        entries(&self.post("kv/range", &request).await?)
    }
}

#[async_trait]
impl MetadataBackend for EtcdMetadata {
    fn capabilities(&self) -> MetaCapabilities {
        MetaCapabilities { watch: true, durable: true, atomic: true, list: true }
    }

    async fn get(&self, key: &str) -> Result<Option<MetaValue>> {
        let (mut entries, _) = self.range(json!({"key": encode(key)})).await?;
        Ok(entries.pop().map(|(_, value)| value))
    }

    async fn put(&self, key: &str, value: Bytes, expect: Expect) -> Result<u64> {
        let key64 = encode(key);
        let compare = match expect {
            Expect::Any => json!([]),
            Expect::Absent => {
                json!([{"key": key64, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}])
            }
            Expect::At(revision) => {
                json!([{"key": key64, "target": "MOD", "result": "EQUAL", "mod_revision": revision.to_string()}])
            }
        };
        let put = json!({"request_put": {"key": key64, "value": encode(&value)}});
        let response = self.post("kv/txn", &json!({"compare": compare, "success": [put]})).await?;
        if response["succeeded"] == true {
            return Ok(number(&response["header"]["revision"]));
        }
        Err(changed_error("set", key, expect))
    }

    async fn delete(&self, key: &str) -> Result<bool> {
        let response = self.post("kv/deleterange", &json!({"key": encode(key)})).await?;
        Ok(number(&response["deleted"]) > 0)
    }

    async fn delete_at(&self, key: &str, revision: u64) -> Result<()> {
        let key64 = encode(key);
        // etcd compares an absent key as one of revision 0, which no present key has.
        let compare = json!([{"key": key64, "target": "MOD", "result": "EQUAL", "mod_revision": revision.max(1).to_string()}]);
        let delete = json!({"request_delete_range": {"key": key64}});
        let response = self.post("kv/txn", &json!({"compare": compare, "success": [delete]})).await?;
        if response["succeeded"] == true {
            return Ok(());
        }
        Err(changed_error("delete", key, Expect::At(revision)))
    }

    async fn list(&self, prefix: &str) -> Result<Vec<(String, MetaValue)>> {
        let mut request = span(prefix);
        request["sort_target"] = "KEY".into();
        request["sort_order"] = "ASCEND".into();
        Ok(self.range(request).await?.0)
    }

    async fn watch(&self, prefix: &str) -> Result<BoxStream<'static, MetaEvent>> {
        let mut request = span(prefix);
        request["limit"] = 1.into();
        request["keys_only"] = true.into();
        let (_, now) = self.range(request).await?;
        let most = if is_planted("etcd-watch-unbounded") { Semaphore::MAX_PERMITS } else { EVENTS };
        let (sender, mut events) = mpsc::channel(most);
        let watch = Watch {
            endpoints: self.endpoints.clone(),
            at: self.current.load(Ordering::Relaxed),
            agent: self.web.agent().clone(),
            span: span(prefix),
            next: now.saturating_add(1),
            sender,
        };
        // The thread is separate from the runtime, so that the end of a runtime does not wait for
        // it.
        std::thread::Builder::new().name("etcd-watch".into()).spawn(move || watch.run())?;
        Ok(futures::stream::poll_fn(move |cx| events.poll_recv(cx)).boxed())
    }
}

#[async_trait]
impl Leases for EtcdMetadata {
    async fn take(&self, key: &str, value: Bytes, time: Duration) -> Result<Option<Hold>> {
        let granted = self.post("lease/grant", &json!({"TTL": time.as_secs().max(1).to_string()})).await?;
        let lease = number(&granted["ID"]).cast_signed();
        if lease == 0 {
            return Err(Error::new(
                ErrorCode::RpcFail,
                format!("cannot get lease: etcd refused it: {}", granted["error"]),
            ));
        }
        let hold = Hold { key: key.to_owned(), revision: 0, lease };
        let key64 = encode(key);
        let absent = json!({"key": key64, "target": "CREATE", "result": "EQUAL", "create_revision": "0"});
        let put = json!({"request_put": {"key": key64, "value": encode(&value), "lease": lease.to_string()}});
        let response = self.post("kv/txn", &json!({"compare": [absent], "success": [put]})).await?;
        if response["succeeded"] == true {
            return Ok(Some(Hold { revision: number(&response["header"]["revision"]), ..hold }));
        }
        self.release(hold).await?;
        Ok(None)
    }

    async fn renew(&self, hold: &Hold) -> Result<bool> {
        let response = self.post("lease/keepalive", &json!({"ID": hold.lease.to_string()})).await?;
        // A lease without a time to live has expired. A lease outlives its key if another client
        // deletes or writes the key.
        Ok(number(&response["result"]["TTL"]) > 0
            && self.get(&hold.key).await?.is_some_and(|there| there.revision == hold.revision))
    }

    async fn release(&self, hold: Hold) -> Result<()> {
        let lease = json!({"ID": hold.lease.to_string()});
        let Err(error) = self.post("lease/revoke", &lease).await else { return Ok(()) };
        // An expired lease has no granted time.
        let there = self.post("lease/timetolive", &lease).await?;
        if number(&there["grantedTTL"]) == 0 { Ok(()) } else { Err(error) }
    }
}

/// Watch that is opened again where it broke off, so that it misses no event.
struct Watch {
    endpoints: Vec<String>,
    at: usize,
    agent: ureq::Agent,
    span: Value,
    /// First revision that is not seen yet.
    next: u64,
    sender: mpsc::Sender<MetaEvent>,
}

/// Reason for the end of a read loop.
enum End {
    /// Timeout or closed connection.
    Again,
    /// The events have no reader any more, or they are lost.
    Over,
}

impl Watch {
    fn run(mut self) {
        while !self.sender.is_closed() {
            match self.read() {
                Ok(End::Again) => {}
                Ok(End::Over) => return,
                Err(error) => {
                    warn!(endpoint = self.endpoints[self.at], %error, "etcd watch failed; opening it again");
                    self.at = (self.at + 1) % self.endpoints.len();
                    if self.at == 0 {
                        // No endpoint responds, and no event reports its return.
                        std::thread::park_timeout(Duration::from_millis(500));
                    }
                }
            }
        }
    }

    fn read(&mut self) -> Result<End> {
        let mut create = self.span.clone();
        create["start_revision"] = self.next.to_string().into();
        let url = format!("{}/v3/watch", self.endpoints[self.at]);
        let request = self.agent.post(url).config();
        let request = request
            .timeout_global(None)
            .timeout_connect(Some(CONNECT))
            .timeout_per_read(Some(WATCH_IDLE_TIMEOUT))
            .build()
            .content_type("application/json");
        let broken = |error: &dyn std::fmt::Display| Error::new(ErrorCode::RpcFail, error.to_string());
        let mut response =
            request.send(json!({"create_request": create}).to_string()).map_err(|e| broken(&e))?;
        if response.status() != 200 {
            return Err(broken(&format!("etcd refused the watch with status {}", response.status())));
        }
        let mut lines = BufReader::new(response.body_mut().as_reader());
        let mut line = Vec::new();
        loop {
            line.clear();
            match lines.by_ref().take(LINE).read_until(b'\n', &mut line) {
                Ok(0) => return Ok(End::Again),
                Ok(_) => {}
                Err(error) if is_timeout(&error) => return Ok(End::Again),
                Err(error) => return Err(error.into()),
            }
            match response::watch_line(&line)? {
                WatchLine::Over(reason) => {
                    warn!(reason, "etcd ended a watch");
                    return Ok(End::Over);
                }
                WatchLine::Events(events, newest) => {
                    self.next = self.next.max(newest.saturating_add(1));
                    if events.into_iter().any(|event| self.sender.blocking_send(event).is_err()) {
                        return Ok(End::Over);
                    }
                }
            }
        }
    }
}

fn is_timeout(error: &std::io::Error) -> bool {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<ureq::Error>());
    matches!(inner, Some(ureq::Error::Timeout(_)))
        || matches!(error.kind(), std::io::ErrorKind::TimedOut | std::io::ErrorKind::WouldBlock)
}

fn changed_error(verb: &str, key: &str, expect: Expect) -> Error {
    Error::new(
        ErrorCode::ObjectAlreadyExists,
        format!("cannot {verb} metadata key: its value has changed. key={key:?} expected={expect:?}"),
    )
}

fn encode(bytes: impl AsRef<[u8]>) -> String {
    BASE64.encode(bytes)
}

/// Returns the range of all keys with a prefix: from the prefix to the first key greater than all
/// of them.
fn span(prefix: &str) -> Value {
    let mut end = prefix.as_bytes().to_vec();
    // UTF-8 has no byte 255, so the last byte can always be incremented. An empty prefix means all
    // keys.
    match end.last_mut() {
        Some(last) => *last += 1,
        None => return json!({"key": encode([0]), "range_end": encode([0])}),
    }
    json!({"key": encode(prefix), "range_end": encode(end)})
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    use mooncake_core::ErrorKind;

    use super::*;

    /// Bytes of the value of an event in [`Flood`].
    const VALUE: usize = 64 << 10;

    /// Reads one request and returns its first line.
    fn request(stream: &mut BufReader<TcpStream>) -> String {
        let (mut first, mut len) = (String::new(), 0);
        stream.read_line(&mut first).unwrap();
        loop {
            let mut line = String::new();
            stream.read_line(&mut line).unwrap();
            match line.trim_end().to_ascii_lowercase().split_once(": ") {
                Some(("content-length", count)) => len = count.parse().unwrap(),
                Some(_) => {}
                None => break,
            }
        }
        stream.read_exact(&mut vec![0; len]).unwrap();
        first
    }

    /// Serves a range, and then a watch with events until the reader stops reading. Returns the
    /// number of bytes that the reader accepted.
    fn flood(listener: &TcpListener, most: usize) -> usize {
        let accept = || BufReader::new(listener.accept().unwrap().0);
        let mut stream = accept();
        assert!(request(&mut stream).contains("range"));
        let body = r#"{"header":{"revision":"1"}}"#;
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
        stream.get_mut().write_all(format!("{head}{body}").as_bytes()).unwrap();
        drop(stream);
        let mut stream = accept();
        assert!(request(&mut stream).contains("watch"));
        let out = stream.get_mut();
        // The timeout is longer than a slow reader needs.
        out.set_write_timeout(Some(Duration::from_secs(3))).unwrap();
        out.write_all(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n").unwrap();
        let (value, mut sent) = (encode(vec![7; VALUE]), 0);
        for revision in 2.. {
            let kv = format!(r#"{{"key":"{}","value":"{value}","mod_revision":"{revision}"}}"#, encode("w"));
            let line = format!("{{\"result\":{{\"events\":[{{\"kv\":{kv}}}]}}}}\n");
            if sent >= most || out.write_all(line.as_bytes()).is_err() {
                break;
            }
            sent += line.len();
        }
        sent
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_watch_that_nobody_reads_holds_few_events() {
        const MOST: usize = 64 << 20;
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let etcd = EtcdMetadata::new(&listener.local_addr().unwrap().to_string()).unwrap();
        let server = std::thread::spawn(move || flood(&listener, MOST));
        let mut events = etcd.watch("w").await.unwrap();
        let sent = tokio::task::spawn_blocking(move || server.join().unwrap()).await.unwrap();
        assert!(sent < MOST, "the watch has read {sent} bytes that nobody has taken");
        // All received events are present, in order.
        for revision in 2..2 + EVENTS as u64 {
            let event = events.next().await.unwrap();
            assert_eq!(event.value.map(|value| value.revision), Some(revision));
        }
    }

    #[test]
    fn endpoints_are_parsed_as_in_mooncake_cpp() {
        let urls = |text: &str| EtcdMetadata::new(text).map(|etcd| etcd.endpoints);
        assert_eq!(urls("etcd://a:1,b:2").unwrap(), ["http://a:1", "http://b:2"]);
        assert_eq!(urls("a:1;b").unwrap(), ["http://a:1", "http://b:2379"]);
        assert_eq!(urls("etcd://[::1]:5").unwrap(), ["http://[::1]:5"]);
        for text in ["", "etcd://", "etcd://,;", "etcd://:1"] {
            let error = urls(text).unwrap_err();
            assert!(
                error.kind() == ErrorKind::Invalid && error.message().contains("etcd://host:port"),
                "{error}"
            );
        }
    }

    #[test]
    fn a_prefix_is_a_span_of_keys() {
        assert_eq!(span("a/"), json!({"key": encode("a/"), "range_end": encode("a0")}));
    }
}
