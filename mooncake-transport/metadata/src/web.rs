//! HTTP requests of the metadata directories that use HTTP.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mooncake_core::{Error, ErrorCode, Result};

/// Timeout of a whole request, and of its connection, as in the client of Mooncake C++.
const TOTAL: Duration = Duration::from_millis(3000);
pub(crate) const CONNECT: Duration = Duration::from_millis(1500);
/// Maximum length of a response, in bytes.
const MAX_RESPONSE: u64 = 32 << 20;

/// Client that keeps its connections. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct Web {
    agent: ureq::Agent,
    /// Value of the header `Authorization`.
    authorization: Authorization,
}

/// Value of the header `Authorization`, which is a secret.
#[derive(Clone, Default)]
struct Authorization(Option<Arc<str>>);

impl fmt::Debug for Authorization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "authorized" } else { "not authorized" })
    }
}

pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) body: Vec<u8>,
}

/// Method of a request, with its body.
#[derive(Clone, Debug)]
#[allow(dead_code, reason = "each metadata service uses some of the methods")]
pub(crate) enum Verb {
    Get,
    Put(Bytes),
    Post(Bytes),
    Delete,
}

impl Verb {
    fn name(&self) -> &'static str {
        match self {
            Verb::Get => "GET",
            Verb::Put(_) => "PUT",
            Verb::Post(_) => "POST",
            Verb::Delete => "DELETE",
        }
    }
}

impl Web {
    pub(crate) fn new() -> Self {
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(TOTAL))
            .timeout_connect(Some(CONNECT))
            .http_status_as_error(false)
            .max_redirects(0)
            // Proxies in the environment are for other networks.
            .proxy(None)
            .build();
        Self { agent: config.new_agent(), authorization: Authorization::default() }
    }

    /// Sends this value of the header `Authorization` with each request.
    #[allow(dead_code, reason = "the metadata service over HTTP alone uses it")]
    pub(crate) fn authorized(self, value: Option<String>) -> Self {
        Self { authorization: Authorization(value.map(Into::into)), ..self }
    }

    #[allow(dead_code, reason = "the metadata service in etcd alone uses it")]
    pub(crate) fn agent(&self) -> &ureq::Agent {
        &self.agent
    }

    /// Sends a request from a thread that may block. Needs a tokio runtime.
    pub(crate) async fn call(&self, verb: Verb, url: String) -> Result<Reply> {
        let what = format!("{} {url}", verb.name());
        let (agent, authorization) = (self.agent.clone(), self.authorization.clone());
        let runtime = tokio::runtime::Handle::try_current().map_err(|_| {
            Error::invalid("a metadata directory over HTTP needs a tokio runtime, and there is none here")
        })?;
        let reply = runtime.spawn_blocking(move || request(&agent, &authorization, verb, &url)).await;
        match reply {
            Ok(Ok(reply)) => Ok(reply),
            Ok(Err(error)) => Err(failed(error).context(what)),
            Err(error) => {
                Err(Error::internal(format!("an HTTP request was abandoned: {error}")).context(what))
            }
        }
    }
}

fn request(
    agent: &ureq::Agent,
    authorization: &Authorization,
    verb: Verb,
    url: &str,
) -> std::result::Result<Reply, ureq::Error> {
    const JSON: &str = "application/json";
    let mut response = match verb {
        Verb::Get => authorized(agent.get(url), authorization).call(),
        Verb::Put(value) => authorized(agent.put(url), authorization).content_type(JSON).send(&value[..]),
        Verb::Post(value) => authorized(agent.post(url), authorization).content_type(JSON).send(&value[..]),
        Verb::Delete => authorized(agent.delete(url), authorization).call(),
    }?;
    let body = response.body_mut().with_config().limit(MAX_RESPONSE).read_to_vec()?;
    Ok(Reply { status: response.status().as_u16(), body })
}

fn authorized<B>(request: ureq::RequestBuilder<B>, authorization: &Authorization) -> ureq::RequestBuilder<B> {
    match &authorization.0 {
        Some(value) => request.header("Authorization", &**value),
        None => request,
    }
}

fn failed(error: ureq::Error) -> Error {
    let code = match &error {
        ureq::Error::Timeout(_) => ErrorCode::RpcTimeout,
        ureq::Error::BadUri(_) => ErrorCode::InvalidParams,
        _ => ErrorCode::RpcFail,
    };
    Error::new(code, format!("the metadata server was not reached: {error}")).with_source(error)
}

/// Returns the beginning of a response, for a message.
pub(crate) fn excerpt(reply: &Reply) -> String {
    String::from_utf8_lossy(&reply.body[..reply.body.len().min(200)]).trim_end().to_owned()
}
