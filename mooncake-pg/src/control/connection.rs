//! Connections that carry messages in both directions.

use std::io;
use std::time::Duration;

use mooncake_core::fork::ParentOnly;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::timeout;

use crate::protocol::SessionId;
use crate::secret::{self, Claim, Secret};
use crate::wire::{
    ANSWER_LENGTH, Answer, HELLO_LENGTH, Hello, Message, Purpose, VERSION, Verdict, decode, encode,
    message_length,
};

/// Bytes that one write takes at most, unless a message is longer.
const MAX_WRITE: usize = 64 << 10;
/// Longest wait for the other side to close a connection after this one has.
const LINGER: Duration = Duration::from_secs(1);

/// Secret of a process, and what it claims to be.
#[derive(Clone, Debug)]
pub(super) struct Identity {
    pub(super) secret: Secret,
    pub(super) claim: Claim,
}

/// Connects to an address and exchanges hellos. The caller sets the time limit.
///
/// # Errors
/// Returns an error that names the reason: no connection, another version, another process, or
/// another secret.
pub(super) async fn open(
    address: &str,
    purpose: Purpose,
    session: SessionId,
    identity: Option<&Identity>,
) -> io::Result<ParentOnly<TcpStream>> {
    let (host, port) = mooncake_core::host_port::split(address);
    let port = port.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the address has no port"))?;
    let stream = mooncake_transport::net::connect(host, port).await?;
    mooncake_transport::net::keep_connection(&stream)?;
    let mut stream = ParentOnly::new(stream);
    let hello = Hello { version: VERSION, purpose, has_proof: identity.is_some(), session }.encode();
    let proof = match identity {
        Some(identity) => Some((identity, secret::begin(&mut *stream, &hello, identity.claim).await?)),
        None => None,
    };
    if proof.is_none() {
        stream.write_all(&hello).await?;
    }
    let mut bytes = [0; ANSWER_LENGTH];
    stream.read_exact(&mut bytes).await?;
    match (secret::Verdict::decode(&bytes), &proof) {
        (None, _) => {}
        (Some(secret::Verdict::Challenge), Some((identity, opening))) => {
            secret::finish(&mut *stream, &identity.secret, &hello, opening).await?;
            return Ok(stream);
        }
        (verdict, _) => return Err(secret::Verdict::refusal(verdict)),
    }
    let refused = |text: String| Err(io::Error::new(io::ErrorKind::InvalidData, text));
    match Answer::decode(&bytes) {
        None => refused("another program listens at the address".to_owned()),
        Some(answer) if answer.version != VERSION => refused(format!(
            "the processes have different versions. own={VERSION} other={}; use one version",
            answer.version
        )),
        Some(Answer { verdict: Verdict::Accepted, .. }) if proof.is_some() => {
            Err(secret::Verdict::refusal(None))
        }
        Some(Answer { verdict: Verdict::Accepted, .. }) => Ok(stream),
        Some(_) => refused("another process listens at the address".to_owned()),
    }
}

/// Reads a hello and responds. Returns the claim of the other process if there is a secret.
///
/// # Errors
/// Returns the errors of the connection, and an error for a hello that is refused.
pub(super) async fn accept(
    stream: &mut TcpStream,
    secret: Option<&Secret>,
    is_expected: impl FnOnce(&Hello) -> bool,
) -> io::Result<Option<Claim>> {
    mooncake_transport::net::keep_connection(&*stream)?;
    let mut bytes = [0; HELLO_LENGTH];
    stream.read_exact(&mut bytes).await?;
    let refused = |text| io::Error::new(io::ErrorKind::InvalidData, text);
    let hello = Hello::decode(&bytes).ok_or_else(|| refused("the connection has another protocol"))?;
    let is_expected = is_expected(&hello);
    let verdict = if hello.version != VERSION {
        Verdict::OtherVersion
    } else {
        let claim = secret::accept(stream, secret, &bytes, hello.has_proof, is_expected).await?;
        if claim.is_some() {
            return Ok(claim);
        }
        if is_expected { Verdict::Accepted } else { Verdict::OtherProcess }
    };
    stream.write_all(&Answer { version: VERSION, verdict }.encode()).await?;
    match verdict {
        Verdict::Accepted => Ok(None),
        Verdict::OtherVersion => Err(refused("the other process has another version")),
        Verdict::OtherProcess => Err(refused("the connection is for another process")),
    }
}

/// Carries messages until the connection ends, or until all senders of `outgoing` are gone and
/// their messages are written.
///
/// # Errors
/// Returns the error that has ended the connection.
pub(super) async fn carry<In: Message, Out: Message>(
    mut stream: ParentOnly<TcpStream>,
    mut outgoing: mpsc::Receiver<Out>,
    write_limit: Duration,
    mut received: impl FnMut(In) -> io::Result<()>,
) -> io::Result<()> {
    let (mut reader, mut writer) = stream.split();
    let read = async {
        let mut body = Vec::new();
        loop {
            let mut header = [0; 4];
            reader.read_exact(&mut header).await?;
            let length = message_length(header).map_err(io::Error::other)?;
            body.clear();
            // The buffer grows with the received bytes, not with the announced length.
            if (&mut reader).take(length as u64).read_to_end(&mut body).await? < length {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            received(decode(&body).map_err(io::Error::other)?)?;
        }
    };
    let write = async {
        let mut frames = Vec::new();
        while let Some(message) = outgoing.recv().await {
            frames.clear();
            encode(&message, &mut frames);
            while frames.len() < MAX_WRITE
                && let Ok(message) = outgoing.try_recv()
            {
                encode(&message, &mut frames);
            }
            timeout(write_limit, writer.write_all(&frames)).await.map_err(|_| io::ErrorKind::TimedOut)??;
        }
        writer.shutdown().await
    };
    tokio::select! {
        ended = read => return ended,
        ended = write => ended?,
    }
    // An early close would discard messages that the other side has not read yet.
    let rest = async { tokio::io::copy(&mut *stream, &mut tokio::io::sink()).await };
    let _ = timeout(LINGER, rest).await;
    Ok(())
}
