//! Connections that carry messages in both directions.

use std::io;
use std::time::Duration;

use mooncake_core::fork::ParentOnly;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::timeout;

use crate::protocol::SessionId;
use crate::wire::{
    ANSWER_LENGTH, Answer, HELLO_LENGTH, Hello, Message, Purpose, VERSION, Verdict, decode, encode,
    message_length,
};

/// Bytes that one write takes at most, unless a message is longer.
const MAX_WRITE: usize = 64 << 10;
/// Longest wait for the other side to close a connection after this one has.
const LINGER: Duration = Duration::from_secs(1);

/// Connects to an address and exchanges hellos. The caller sets the time limit.
///
/// # Errors
/// Returns an error that names the reason: no connection, another version, or another process.
pub(super) async fn open(
    address: &str,
    purpose: Purpose,
    session: SessionId,
) -> io::Result<ParentOnly<TcpStream>> {
    let (host, port) = mooncake_core::host_port::split(address);
    let port = port.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the address has no port"))?;
    let stream = mooncake_transport::net::connect(host, port).await?;
    mooncake_transport::net::keep_connection(&stream)?;
    let mut stream = ParentOnly::new(stream);
    stream.write_all(&Hello { version: VERSION, purpose, session }.encode()).await?;
    let mut bytes = [0; ANSWER_LENGTH];
    stream.read_exact(&mut bytes).await?;
    let refused = |text: String| Err(io::Error::new(io::ErrorKind::InvalidData, text));
    match Answer::decode(&bytes) {
        None => refused("another program listens at the address".to_owned()),
        Some(answer) if answer.version != VERSION => refused(format!(
            "the processes have different versions. own={VERSION} other={}; use one version",
            answer.version
        )),
        Some(Answer { verdict: Verdict::Accepted, .. }) => Ok(stream),
        Some(_) => refused("another process listens at the address".to_owned()),
    }
}

/// Reads a hello and responds. Returns it if the connection is accepted.
///
/// # Errors
/// Returns the errors of the connection, and an error for a hello that is refused.
pub(super) async fn accept(
    stream: &mut TcpStream,
    is_expected: impl FnOnce(&Hello) -> bool,
) -> io::Result<Hello> {
    mooncake_transport::net::keep_connection(&*stream)?;
    let mut bytes = [0; HELLO_LENGTH];
    stream.read_exact(&mut bytes).await?;
    let refused = |text| io::Error::new(io::ErrorKind::InvalidData, text);
    let hello = Hello::decode(&bytes).ok_or_else(|| refused("the connection has another protocol"))?;
    let verdict = if hello.version != VERSION {
        Verdict::OtherVersion
    } else if is_expected(&hello) {
        Verdict::Accepted
    } else {
        Verdict::OtherProcess
    };
    stream.write_all(&Answer { version: VERSION, verdict }.encode()).await?;
    match verdict {
        Verdict::Accepted => Ok(hello),
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
    mut received: impl FnMut(In),
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
            received(decode(&body).map_err(io::Error::other)?);
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
