//! First bytes of a connection between two data planes.

use std::io;
use std::time::Duration;

use mooncake_core::{Error, ErrorCode, Result};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::message::{HELLO_BYTES, Hello};
use crate::secret::{self, Claim, Secret, VERDICT_LENGTH, Verdict};

/// Longest time for a new connection, and for its first bytes.
pub(super) const CONNECT_WITHIN: Duration = Duration::from_secs(5);

/// Sends the first bytes of a connection. With a secret, both sides prove it.
///
/// # Errors
/// `RPC_TIMEOUT` if the other process does not respond in time, or the reason of a refusal.
pub(super) async fn greet(stream: &mut TcpStream, from: u64, to: u64, secret: Option<&Secret>) -> Result<()> {
    let hello = Hello { from, to, has_proof: secret.is_some() }.encode();
    let timed_out = || Error::new(ErrorCode::RpcTimeout, "cannot connect: no response in time");
    let greeting = async {
        let Some(secret) = secret else { return stream.write_all(&hello).await };
        let opening = secret::begin(stream, &hello, Claim::default()).await?;
        let mut verdict = [0; VERDICT_LENGTH];
        stream.read_exact(&mut verdict).await?;
        match Verdict::decode(&verdict) {
            Some(Verdict::Challenge) => secret::finish(stream, secret, &hello, &opening).await,
            verdict => Err(Verdict::refusal(verdict)),
        }
    };
    timeout(CONNECT_WITHIN, greeting).await.map_err(|_| timed_out())?.map_err(Error::from)
}

/// Reads the first bytes of a connection to process `own`. Returns the number of the process that
/// has opened the connection.
///
/// # Errors
/// An error if the connection is meant for another process, or if the other process has not proved
/// the secret in time.
pub(super) async fn receive_greeting(
    stream: &mut TcpStream,
    own: u64,
    secret: Option<&Secret>,
) -> Result<u64> {
    let mut bytes = [0; HELLO_BYTES];
    stream.read_exact(&mut bytes).await.map_err(Error::from)?;
    let other = || Error::new(ErrorCode::RpcFail, "cannot serve connection: it is meant for another process");
    let hello = Hello::decode(&bytes).ok_or_else(other)?;
    let proved = secret::accept(stream, secret, &bytes, hello.has_proof, hello.to == own);
    let timed_out = || Error::new(ErrorCode::RpcTimeout, "cannot serve connection: no proof in time");
    timeout(CONNECT_WITHIN, proved).await.map_err(|_| timed_out())?.map_err(Error::from)?;
    if hello.to == own { Ok(hello.from) } else { Err(other()) }
}

/// Logs the end of a connection. An error about the secret is a warning, because an operator has to
/// mend it.
pub(super) fn log_end(other: &str, error: &Error) {
    if error.to_string().contains(secret::VARIABLE) {
        tracing::warn!(other, %error, "connection refused");
    } else {
        tracing::debug!(other, %error, "connection ended");
    }
}

/// Returns the error that another process has sent in place of the number of a communicator: it
/// expects a proof of the secret. `None` if the bytes are something else.
///
/// # Errors
/// `UnexpectedEof` if more bytes are needed to tell.
pub(super) fn refusal(bytes: &[u8]) -> io::Result<Option<Error>> {
    if !bytes.starts_with(&secret::MAGIC[..4]) {
        return Ok(None);
    }
    let verdict = bytes.first_chunk().ok_or(io::ErrorKind::UnexpectedEof)?;
    Ok(Some(Verdict::refusal(Verdict::decode(verdict)).into()))
}
