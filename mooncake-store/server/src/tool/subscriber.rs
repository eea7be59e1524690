//! Subscriber of the events of a master (ZMTP 3.0, mechanism NULL).

use std::time::Duration;

use mooncake_core::{Error, ErrorCode, Result};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, BufStream};
use tokio::net::TcpStream;

/// Maximum length of a frame in bytes; a master queues no more for a subscriber.
const MAX_FRAME: u64 = 64 << 20;
/// Flags of frames.
const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;
/// Length of the number of a message.
const NUMBER: usize = 8;

/// Connection to a publisher, subscribed to everything.
pub(super) struct Subscriber {
    stream: BufStream<TcpStream>,
    address: String,
}

impl Subscriber {
    /// Connects and subscribes.
    ///
    /// # Errors
    /// `RPC_FAIL` with the address: no publisher responds there within the time.
    pub(super) async fn connect(address: &str, limit: Duration) -> Result<Self> {
        let connected = tokio::time::timeout(limit, async {
            let stream = BufStream::new(TcpStream::connect(address).await?);
            let mut subscriber = Self { stream, address: address.into() };
            subscriber.subscribe().await.map(|()| subscriber)
        });
        connected.await.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into())).map_err(|error| {
            let text = format!(
                "cannot subscribe to events: {error}. address={address}; start the master with --enable_kv_events, and give its --kv_events_bind_endpoint"
            );
            Error::new(ErrorCode::RpcFail, text).with_source(error)
        })
    }

    async fn subscribe(&mut self) -> std::io::Result<()> {
        let mut greeting = [0; 64];
        greeting[0] = 0xff;
        greeting[9] = 0x7f;
        greeting[10] = 3;
        greeting[12..16].copy_from_slice(b"NULL");
        self.stream.write_all(&greeting).await?;
        self.stream.write_all(b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB").await?;
        // A message with 1 subscribes to a topic, here to the empty one.
        self.stream.write_all(&[0, 1, 1]).await?;
        self.stream.flush().await?;
        let mut theirs = [0; 64];
        self.stream.read_exact(&mut theirs).await?;
        if theirs[0] != 0xff || theirs[9] != 0x7f || theirs[10] < 3 {
            return Err(invalid("the peer does not speak ZMTP 3"));
        }
        let (flags, body) = self.frame().await?;
        if flags & COMMAND == 0 || !body.starts_with(b"\x05READY") {
            return Err(invalid("the peer refuses the handshake"));
        }
        Ok(())
    }

    /// Waits for the next message. Returns its number and its payload.
    ///
    /// # Errors
    /// `RPC_FAIL`: the connection ended, or the peer sent something else.
    pub(super) async fn next(&mut self) -> Result<(u64, Vec<u8>)> {
        self.message().await.map_err(|error| {
            let text = format!("events ended: {error}. address={}", self.address);
            Error::new(ErrorCode::RpcFail, text).with_source(error)
        })
    }

    async fn message(&mut self) -> std::io::Result<(u64, Vec<u8>)> {
        let mut frames: Vec<Vec<u8>> = Vec::new();
        loop {
            let (flags, body) = self.frame().await?;
            if flags & COMMAND != 0 {
                continue;
            }
            frames.push(body);
            if flags & MORE != 0 {
                continue;
            }
            let [_, number, payload] = &mut frames[..] else {
                return Err(invalid("a message has not three frames"));
            };
            let number: [u8; NUMBER] =
                number[..].try_into().map_err(|_| invalid("the number of a message has not 8 bytes"))?;
            return Ok((u64::from_be_bytes(number), std::mem::take(payload)));
        }
    }

    async fn frame(&mut self) -> std::io::Result<(u8, Vec<u8>)> {
        let flags = self.stream.read_u8().await?;
        let len = match flags & LONG {
            0 => u64::from(self.stream.read_u8().await?),
            _ => self.stream.read_u64().await?,
        };
        if len > MAX_FRAME {
            return Err(invalid("a frame is too long"));
        }
        // The length is a claim: memory is taken as bytes arrive.
        let mut body = Vec::new();
        let read = (&mut self.stream).take(len).read_to_end(&mut body).await?;
        if read as u64 != len {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        Ok((flags, body))
    }
}

fn invalid(what: &'static str) -> std::io::Error {
    std::io::Error::new(std::io::ErrorKind::InvalidData, what)
}
