//! Metadata directory in Redis.

use std::time::Duration;

use ::redis::aio::MultiplexedConnection;
use ::redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionAddr, FromRedisValue, IntoConnectionInfo,
    RedisConnectionInfo, RedisError, cmd,
};
use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use mooncake_core::meta::{Expect, MetaCapabilities, MetaEvent, MetaValue, MetadataBackend, fingerprint};
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::net::{DEFAULT_PORT, HostPort};
use tokio::sync::Mutex;

use crate::settings::RedisLogin;

const CONNECT: Duration = Duration::from_millis(1500);
const ANSWER: Duration = Duration::from_millis(3000);
/// Script that sets a key if it still has the value that was read, in one step.
const SET_IF_SAME: &str =
    "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('SET', KEYS[1], ARGV[2]) return 1 end return 0";

/// Script that deletes a key if it still has the value that was read, in one step.
const DELETE_IF_SAME: &str =
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0";

/// Metadata directory in Redis. Runs on a tokio runtime.
///
/// Redis has no revisions, so the revision of a value is its fingerprint. A put of the same value
/// does not change it. Durability depends on the configuration of Redis, so the capabilities do not
/// claim it.
#[derive(Debug)]
pub struct RedisMetadata {
    at: HostPort,
    client: Client,
    connection: Mutex<Option<MultiplexedConnection>>,
}

impl RedisMetadata {
    /// Creates a directory at `redis://host:port` or `host:port`. The default port is 12001, as in
    /// Mooncake C++. Does not connect yet.
    ///
    /// # Errors
    /// Returns `INVALID_PARAMS` if there is no host.
    pub fn new(url: &str, login: &RedisLogin) -> Result<Self> {
        let at = HostPort::parse(url.trim_start_matches("redis://").trim_end_matches('/'), DEFAULT_PORT);
        if at.host.is_empty() || at.host.contains('/') || at.host.contains('@') {
            return Err(Error::invalid(format!(
                "metadata directory {url:?}: expected redis://host:port; user, password and database are given apart from it"
            )));
        }
        let mut settings = RedisConnectionInfo::default().set_db(login.database.into());
        if !login.username.is_empty() {
            settings = settings.set_username(login.username.as_str());
        }
        if !login.password.is_empty() {
            settings = settings.set_password(login.password.as_str());
        }
        let info = ConnectionAddr::Tcp(at.host.clone(), at.port)
            .into_connection_info()
            .map(|info| info.set_redis_settings(settings));
        let client = info.and_then(Client::open).map_err(|error| failed(&at, error))?;
        Ok(Self { at, client, connection: Mutex::new(None) })
    }

    async fn connect(&self) -> Result<MultiplexedConnection> {
        let mut cached = self.connection.lock().await;
        if let Some(connection) = &*cached {
            return Ok(connection.clone());
        }
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(CONNECT))
            .set_response_timeout(Some(ANSWER));
        let connection = self.client.get_multiplexed_async_connection_with_config(&config).await;
        let connection = connection.map_err(|error| failed(&self.at, error))?;
        *cached = Some(connection.clone());
        Ok(connection)
    }

    /// Sends a command, and sends it once more on a new connection if the present one is closed.
    async fn query<A: FromRedisValue>(&self, command: &Cmd) -> Result<A> {
        let mut again = true;
        loop {
            let mut connection = self.connect().await?;
            match command.query_async(&mut connection).await {
                Ok(answer) => return Ok(answer),
                Err(error) => {
                    let is_broken = error.is_unrecoverable_error();
                    if is_broken {
                        *self.connection.lock().await = None;
                    }
                    if !(is_broken && std::mem::take(&mut again)) {
                        return Err(failed(&self.at, error));
                    }
                }
            }
        }
    }
}

#[async_trait]
impl MetadataBackend for RedisMetadata {
    fn capabilities(&self) -> MetaCapabilities {
        MetaCapabilities { watch: false, durable: false, atomic: true, list: true }
    }

    async fn get(&self, key: &str) -> Result<Option<MetaValue>> {
        let value: Option<Vec<u8>> = self.query(cmd("GET").arg(key)).await?;
        Ok(value.map(|value| MetaValue { revision: fingerprint(&value), value: value.into() }))
    }

    async fn put(&self, key: &str, value: Bytes, expect: Expect) -> Result<u64> {
        let done = match expect {
            Expect::Any => self.query::<Option<String>>(cmd("SET").arg(key).arg(&value[..])).await?.is_some(),
            Expect::Absent => {
                self.query::<Option<String>>(cmd("SET").arg(key).arg(&value[..]).arg("NX")).await?.is_some()
            }
            Expect::At(revision) => match self.get(key).await? {
                Some(now) if now.revision == revision => {
                    let mut script = cmd("EVAL");
                    script.arg(SET_IF_SAME).arg(1).arg(key).arg(&now.value[..]).arg(&value[..]);
                    self.query::<u8>(&script).await? == 1
                }
                _ => false,
            },
        };
        if done {
            return Ok(fingerprint(&value));
        }
        Err(changed_error("set", key, expect))
    }

    async fn delete(&self, key: &str) -> Result<bool> {
        Ok(self.query::<u64>(cmd("DEL").arg(key)).await? > 0)
    }

    async fn delete_at(&self, key: &str, revision: u64) -> Result<()> {
        if let Some(now) = self.get(key).await?.filter(|now| now.revision == revision) {
            let mut script = cmd("EVAL");
            script.arg(DELETE_IF_SAME).arg(1).arg(key).arg(&now.value[..]);
            if self.query::<u8>(&script).await? == 1 {
                return Ok(());
            }
        }
        Err(changed_error("delete", key, Expect::At(revision)))
    }

    async fn list(&self, prefix: &str) -> Result<Vec<(String, MetaValue)>> {
        let pattern = format!("{}*", literally(prefix));
        let mut keys: Vec<String> = Vec::new();
        let mut cursor = 0u64;
        loop {
            let page: (u64, Vec<String>) =
                self.query(cmd("SCAN").arg(cursor).arg("MATCH").arg(&pattern).arg("COUNT").arg(1000)).await?;
            keys.extend(page.1);
            cursor = page.0;
            if cursor == 0 {
                break;
            }
        }
        // A scan may return a key twice.
        keys.sort_unstable();
        keys.dedup();
        let mut entries = Vec::with_capacity(keys.len());
        for some in keys.chunks(500) {
            let values: Vec<Option<Vec<u8>>> = self.query(cmd("MGET").arg(some)).await?;
            let there = some.iter().zip(values).filter_map(|(key, value)| Some((key.clone(), value?)));
            entries.extend(
                there.map(|(key, value)| {
                    (key, MetaValue { revision: fingerprint(&value), value: value.into() })
                }),
            );
        }
        Ok(entries)
    }

    async fn watch(&self, _prefix: &str) -> Result<BoxStream<'static, MetaEvent>> {
        Err(Error::new(ErrorCode::NotSupported, "a metadata directory in Redis cannot be watched"))
    }
}

/// Converts a text into a pattern that matches only the text.
fn literally(text: &str) -> String {
    let mut pattern = String::with_capacity(text.len());
    for c in text.chars() {
        if matches!(c, '*' | '?' | '[' | ']' | '\\' | '^' | '-') {
            pattern.push('\\');
        }
        pattern.push(c);
    }
    pattern
}

fn changed_error(verb: &str, key: &str, expect: Expect) -> Error {
    Error::new(
        ErrorCode::ObjectAlreadyExists,
        format!("cannot {verb} metadata key: its value has changed. key={key:?} expected={expect:?}"),
    )
}

fn failed(at: &HostPort, error: RedisError) -> Error {
    let code = if error.is_timeout() { ErrorCode::RpcTimeout } else { ErrorCode::RpcFail };
    Error::new(code, format!("Redis at {at}: {error}")).with_source(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        let at = |url: &str| RedisMetadata::new(url, &RedisLogin::default()).map(|redis| redis.at);
        assert_eq!(at("redis://h:6379").unwrap(), HostPort::new("h", 6379));
        assert_eq!(at("redis://h").unwrap(), HostPort::new("h", DEFAULT_PORT));
        assert_eq!(at("[::1]:7").unwrap(), HostPort::new("::1", 7));
        for url in ["redis://", "redis://:1", "redis://h/3", "redis://user:secret@h:1"] {
            assert!(at(url).unwrap_err().message().contains("redis://host:port"), "{url}");
        }
    }

    #[test]
    fn prefixes_are_no_patterns() {
        assert_eq!(literally("a*[b]\\"), "a\\*\\[b\\]\\\\");
    }
}
