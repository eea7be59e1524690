//! Client of the existing system's HTTP metadata servers, the stand-alone one and the one inside a master.

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use mooncake_core::meta::{Expect, MetaCapabilities, MetaEvent, MetaValue, MetadataBackend};
use mooncake_core::{Error, ErrorCode, Result};

/// Time for a request in all, and for its connection; those of the existing system's client.
const TOTAL: Duration = Duration::from_millis(3000);
const CONNECT: Duration = Duration::from_millis(1500);
/// Longest value that is read, in bytes.
const MAX_VALUE: u64 = 32 << 20;

/// A metadata directory behind `GET`, `PUT` and `DELETE` of `<url>?key=<key>`.
///
/// The servers know no revisions: [`Expect`] is checked by a read before the write (except that they themselves refuse to overwrite
/// keys of handshake addresses), and listing and watching are not possible. Runs on a tokio runtime.
#[derive(Debug)]
pub struct HttpMetadata {
    url: String,
    agent: ureq::Agent,
}

struct Reply {
    status: u16,
    body: Vec<u8>,
}

impl HttpMetadata {
    /// A directory at a URL such as `http://host:8080/metadata`. Does not connect yet.
    pub fn new(url: &str) -> Result<Self> {
        if !url.starts_with("http://") {
            return Err(Error::invalid(format!(
                "metadata directory {url:?}: only http:// URLs are understood"
            )));
        }
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(TOTAL))
            .timeout_connect(Some(CONNECT))
            .http_status_as_error(false)
            .max_redirects(0)
            // What the environment says about proxies is meant for the outside world.
            .proxy(None)
            .build();
        Ok(Self { url: url.trim_end_matches('/').to_owned(), agent: config.new_agent() })
    }

    async fn call(&self, verb: Verb, key: &str) -> Result<Reply> {
        let url = format!("{}?key={}", self.url, escape(key));
        let what = format!("{} {url}", verb.name());
        let agent = self.agent.clone();
        let runtime = tokio::runtime::Handle::try_current().map_err(|_| {
            Error::invalid("the HTTP metadata directory needs a tokio runtime, and there is none here")
        })?;
        let reply = runtime.spawn_blocking(move || request(&agent, verb, &url)).await;
        match reply {
            Ok(Ok(reply)) => Ok(reply),
            Ok(Err(error)) => Err(failed(error).context(what)),
            Err(error) => {
                Err(Error::internal(format!("an HTTP request was abandoned: {error}")).context(what))
            }
        }
    }

    async fn check(&self, key: &str, expect: Expect) -> Result<()> {
        let holds = match expect {
            Expect::Any => return Ok(()),
            Expect::Absent => self.get(key).await?.is_none(),
            Expect::At(revision) => self.get(key).await?.is_some_and(|now| now.revision == revision),
        };
        if holds {
            return Ok(());
        }
        Err(Error::new(
            ErrorCode::ObjectAlreadyExists,
            format!("metadata key {key:?} is not as expected ({expect:?})"),
        ))
    }
}

enum Verb {
    Get,
    Put(Bytes),
    Delete,
}

impl Verb {
    fn name(&self) -> &'static str {
        match self {
            Verb::Get => "GET",
            Verb::Put(_) => "PUT",
            Verb::Delete => "DELETE",
        }
    }
}

#[async_trait]
impl MetadataBackend for HttpMetadata {
    fn capabilities(&self) -> MetaCapabilities {
        MetaCapabilities { watch: false, durable: false, atomic: false, list: false }
    }

    async fn get(&self, key: &str) -> Result<Option<MetaValue>> {
        let reply = self.call(Verb::Get, key).await?;
        match reply.status {
            200 => Ok(Some(MetaValue { revision: revision(&reply.body), value: reply.body.into() })),
            404 => Ok(None),
            _ => Err(unexpected("GET", key, &reply)),
        }
    }

    async fn put(&self, key: &str, value: Bytes, expect: Expect) -> Result<u64> {
        self.check(key, expect).await?;
        let revision = revision(&value);
        let reply = self.call(Verb::Put(value), key).await?;
        match reply.status {
            200 => Ok(revision),
            // How the servers say that a handshake address is there already.
            400 if reply.body.starts_with(b"Duplicate") => Err(Error::new(
                ErrorCode::ObjectAlreadyExists,
                format!("metadata key {key:?} exists, and the server does not overwrite keys of this kind"),
            )),
            _ => Err(unexpected("PUT", key, &reply)),
        }
    }

    async fn delete(&self, key: &str) -> Result<bool> {
        let reply = self.call(Verb::Delete, key).await?;
        match reply.status {
            200 => Ok(true),
            404 => Ok(false),
            _ => Err(unexpected("DELETE", key, &reply)),
        }
    }

    async fn list(&self, _prefix: &str) -> Result<Vec<(String, MetaValue)>> {
        Err(Error::new(ErrorCode::NotSupported, "HTTP metadata servers cannot list keys"))
    }

    async fn watch(&self, _prefix: &str) -> Result<BoxStream<'static, MetaEvent>> {
        Err(Error::new(ErrorCode::NotSupported, "HTTP metadata servers cannot be watched"))
    }
}

fn request(agent: &ureq::Agent, verb: Verb, url: &str) -> std::result::Result<Reply, ureq::Error> {
    let mut response = match verb {
        Verb::Get => agent.get(url).call(),
        Verb::Put(value) => agent.put(url).content_type("application/json").send(&value[..]),
        Verb::Delete => agent.delete(url).call(),
    }?;
    let body = response.body_mut().with_config().limit(MAX_VALUE).read_to_vec()?;
    Ok(Reply { status: response.status().as_u16(), body })
}

fn failed(error: ureq::Error) -> Error {
    let code = match &error {
        ureq::Error::Timeout(_) => ErrorCode::RpcTimeout,
        ureq::Error::BadUri(_) => ErrorCode::InvalidParams,
        _ => ErrorCode::RpcFail,
    };
    Error::new(code, format!("the metadata server was not reached: {error}")).with_source(error)
}

fn unexpected(verb: &str, key: &str, reply: &Reply) -> Error {
    let text = String::from_utf8_lossy(&reply.body[..reply.body.len().min(200)]).into_owned();
    Error::new(
        ErrorCode::RpcFail,
        format!("the metadata server answered {} to {verb} of {key:?}: {text}", reply.status),
    )
}

/// Everything but letters, digits and `-._~` as `%XX`: one of the servers compares keys without decoding them, so that this
/// form, and no other, is the same key on both.
fn escape(key: &str) -> String {
    use std::fmt::Write;
    key.bytes().fold(String::with_capacity(key.len() * 2), |mut out, byte| {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => out.push(byte.into()),
            _ => {
                let _ = write!(out, "%{byte:02X}");
            }
        }
        out
    })
}

/// A revision for a server that has none: a fingerprint of the value (64-bit FNV-1a).
fn revision(value: &[u8]) -> u64 {
    value
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_escaped_whole() {
        assert_eq!(escape("mooncake/ram/host:1"), "mooncake%2Fram%2Fhost%3A1");
        assert_eq!(escape("aZ9-._~ é+&"), "aZ9-._~%20%C3%A9%2B%26");
    }

    #[test]
    fn only_http_is_understood() {
        assert!(HttpMetadata::new("https://h/metadata").unwrap_err().message().contains("http://"));
    }
}
