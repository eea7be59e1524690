//! Client of the HTTP metadata servers of Mooncake C++: the stand-alone one and the one inside a
//! master.

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use mooncake_core::meta::{Expect, MetaCapabilities, MetaEvent, MetaValue, MetadataBackend, fingerprint};
use mooncake_core::{Error, ErrorCode, Result};

use crate::token::HttpToken;
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
    ///
    /// # Errors
    /// `INVALID_PARAMS` for another scheme than `http`.
    pub fn new(url: &str) -> Result<Self> {
        Self::with_token(url, &HttpToken::default())
    }

    /// Creates a directory at a URL whose server demands a token.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for another scheme than `http`, and for a token that no header can carry.
    pub fn with_token(url: &str, token: &HttpToken) -> Result<Self> {
        token.check()?;
        if !url.starts_with("http://") {
            return Err(Error::invalid(format!(
                "metadata directory {url:?}: only http:// URLs are understood"
            )));
        }
        Ok(Self {
            url: url.trim_end_matches('/').to_owned(),
            web: Web::new().authorized(token.authorization()),
        })
    }

    async fn call(&self, verb: Verb, key: &str) -> Result<Reply> {
        self.web.call(verb, self.url_of(key)).await
    }

    fn url_of(&self, key: &str) -> String {
        format!("{}?key={}", self.url, escape(key))
    }

    /// Returns the error of a response that a metadata server does not send.
    fn unexpected(&self, verb: &str, key: &str, reply: &Reply) -> Error {
        let (url, status, text) = (self.url_of(key), reply.status, excerpt(reply));
        let hint = match status {
            301..=308 | 404 | 405 => {
                "; give the URL of a metadata server, whose path is /metadata: http://host:port/metadata"
            }
            401 => "; set the token of the server in MC_METADATA_HTTP_TOKEN",
            _ => "",
        };
        let text = if text.is_empty() { text } else { format!(" {text:?}") };
        Error::new(
            ErrorCode::RpcFail,
            format!("cannot access metadata: the server answered {status}{text}. {verb} {url}{hint}"),
        )
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
            _ => Err(self.unexpected("GET", key, &reply)),
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
            _ => Err(self.unexpected("PUT", key, &reply)),
        }
    }

    async fn delete(&self, key: &str) -> Result<bool> {
        let reply = self.call(Verb::Delete, key).await?;
        match reply.status {
            200 => Ok(true),
            404 => Ok(false),
            _ => Err(self.unexpected("DELETE", key, &reply)),
        }
    }

    async fn list(&self, _prefix: &str) -> Result<Vec<(String, MetaValue)>> {
        Err(Error::new(ErrorCode::NotSupported, "HTTP metadata servers cannot list keys"))
    }

    async fn watch(&self, _prefix: &str) -> Result<BoxStream<'static, MetaEvent>> {
        Err(Error::new(ErrorCode::NotSupported, "HTTP metadata servers cannot be watched"))
    }
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

    /// Answers every request with this status, and a text.
    fn server(status: &'static str) -> String {
        use std::io::{BufRead, BufReader, Read, Write};
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap().to_string();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = BufReader::new(stream.unwrap());
                let (mut line, mut len) = (String::new(), 0);
                while stream.read_line(&mut line).unwrap() > 2 {
                    if let Some((_, text)) =
                        line.split_once(": ").filter(|(name, _)| name.eq_ignore_ascii_case("content-length"))
                    {
                        len = text.trim().parse().unwrap();
                    }
                    line.clear();
                }
                stream.read_exact(&mut vec![0; len]).unwrap();
                let answer =
                    format!("HTTP/1.1 {status}\r\nContent-Length: 4\r\nConnection: close\r\n\r\ntext");
                stream.get_mut().write_all(answer.as_bytes()).unwrap();
            }
        });
        at
    }

    #[tokio::test]
    #[cfg_attr(miri, ignore = "connects with a timeout, which needs poll")]
    async fn an_unexpected_status_names_the_url_and_the_path_that_is_right() {
        for (status, has_hint) in [("404 Not Found", true), ("405 No", true), ("500 Broken", false)] {
            let at = server(status);
            let metadata = HttpMetadata::new(&format!("http://{at}/meta")).unwrap();
            let error = metadata.put("a/b", "1".into(), Expect::Any).await.unwrap_err().to_string();
            let url = format!("PUT http://{at}/meta?key=a%2Fb");
            assert!(error.contains(&url) && error.contains(&status[..3]), "{error}");
            assert_eq!(error.contains("http://host:port/metadata"), has_hint, "{error}");
        }
        let at = server("500 Broken");
        let metadata = HttpMetadata::new(&format!("http://{at}/metadata")).unwrap();
        assert!(
            metadata.get("k").await.unwrap_err().to_string().contains(&format!("GET http://{at}/metadata"))
        );
        assert!(metadata.delete("k").await.unwrap_err().to_string().contains("DELETE http://"));
    }

    #[test]
    fn only_http_is_understood() {
        assert!(HttpMetadata::new("https://h/metadata").unwrap_err().message().contains("http://"));
    }
}
