//! Client of the HTTP metadata servers of Mooncake C++: the stand-alone one and the one inside a
//! master.

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use mooncake_core::meta::{Expect, MetaCapabilities, MetaEvent, MetaValue, MetadataBackend, fingerprint};
use mooncake_core::{Error, ErrorCode, Result};

use crate::web::{Reply, Verb, Web, excerpt};

/// Metadata directory behind `GET`, `PUT` and `DELETE` of `<url>?key=<key>`. Runs on a tokio
/// runtime.
///
/// The servers have no revisions, so a read before the write checks [`Expect`]. (The servers
/// themselves refuse to overwrite keys of handshake addresses.) Listing and watching are not
/// supported.
#[derive(Debug)]
pub struct HttpMetadata {
    url: String,
    web: Web,
}

impl HttpMetadata {
    /// Creates a directory at a URL such as `http://host:8080/metadata`. Does not connect yet.
    pub fn new(url: &str) -> Result<Self> {
        if !url.starts_with("http://") {
            return Err(Error::invalid(format!(
                "metadata directory {url:?}: only http:// URLs are understood"
            )));
        }
        Ok(Self { url: url.trim_end_matches('/').to_owned(), web: Web::new() })
    }

    async fn call(&self, verb: Verb, key: &str) -> Result<Reply> {
        self.web.call(verb, format!("{}?key={}", self.url, escape(key))).await
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
            format!("cannot set metadata key: its value has changed. key={key:?} expected={expect:?}"),
        ))
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
            200 => Ok(Some(MetaValue { revision: fingerprint(&reply.body), value: reply.body.into() })),
            404 => Ok(None),
            _ => Err(unexpected("GET", key, &reply)),
        }
    }

    async fn put(&self, key: &str, value: Bytes, expect: Expect) -> Result<u64> {
        self.check(key, expect).await?;
        let revision = fingerprint(&value);
        let reply = self.call(Verb::Put(value), key).await?;
        match reply.status {
            200 => Ok(revision),
            // Response of the servers for an existing handshake address.
            400 if reply.body.starts_with(b"Duplicate") => Err(Error::new(
                ErrorCode::ObjectAlreadyExists,
                format!("metadata key {key:?} exists, and the server does not overwrite keys of this kind"),
            )),
            413 | 507 => Err(Error::new(
                ErrorCode::NoAvailableHandle,
                format!("cannot set metadata key: the server is full. key={key:?}; {}", excerpt(&reply)),
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

fn unexpected(verb: &str, key: &str, reply: &Reply) -> Error {
    let text = excerpt(reply);
    Error::new(
        ErrorCode::RpcFail,
        format!("the metadata server answered {} to {verb} of {key:?}: {text}", reply.status),
    )
}

/// Escapes everything but letters, digits and `-._~` as `%XX`. One of the servers compares keys
/// without decoding them, so only this form is the same key on both.
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
