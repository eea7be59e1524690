//! Subscriber of the events of a master.

use std::time::Duration;

use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::net;
use tokio::io::{AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

use crate::zmtp::{COMMAND, MORE, handshake, invalid, read_frame};

/// Maximum length of a frame in bytes; a master queues no more for a subscriber.
const MAX_FRAME: u64 = 64 << 20;
/// Message that subscribes to the empty topic, and so to everything.
const SUBSCRIPTION: [u8; 3] = [0, 1, 1];

/// Connection to a publisher, subscribed to everything.
pub(super) struct Subscriber {
    input: BufReader<OwnedReadHalf>,
    /// Ends the connection when it is dropped.
    _output: OwnedWriteHalf,
    address: String,
}

impl Subscriber {
    /// Connects and subscribes.
    ///
    /// # Errors
    /// `RPC_FAIL` with the address: no publisher responds there within the time.
    pub(super) async fn connect(address: &str, limit: Duration) -> Result<Self> {
        let connected = tokio::time::timeout(limit, async {
            let stream = TcpStream::connect(address).await?;
            // A publisher that has nothing to say differs from a host that is gone.
            net::keep_connection(&stream)?;
            let (input, mut output) = stream.into_split();
            let mut input = BufReader::new(input);
            handshake(&mut input, &mut output, b"SUB").await?;
            output.write_all(&SUBSCRIPTION).await?;
            Ok(Self { input, _output: output, address: address.into() })
        });
        let connected = connected.await.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()));
        connected.map_err(|error: std::io::Error| {
            let text = format!(
                "cannot subscribe to events: {error}. address={address}; start the master with --enable_kv_events, and give its --kv_events_bind_endpoint"
            );
            Error::new(ErrorCode::RpcFail, text).with_source(error)
        })
    }

    /// Waits for the next message. Returns its number and its payload.
    ///
    /// # Errors
    /// `RPC_FAIL`: the connection ended, or the peer sent something else.
    pub(super) async fn next(&mut self) -> Result<(u64, Vec<u8>)> {
        self.message().await.map_err(|error| {
            let text = format!(
                "cannot read events: {error}. address={}; start again when the master serves",
                self.address
            );
            Error::new(ErrorCode::RpcFail, text).with_source(error)
        })
    }

    async fn message(&mut self) -> std::io::Result<(u64, Vec<u8>)> {
        let mut frames: Vec<Vec<u8>> = Vec::new();
        loop {
            let (flags, body) = read_frame(&mut self.input, MAX_FRAME).await?;
            if flags & COMMAND != 0 {
                continue;
            }
            frames.push(body);
            match (&mut frames[..], flags & MORE != 0) {
                ([] | [_] | [_, _], true) => {}
                ([_, number, payload], false) => {
                    let number = number[..].try_into().map_err(|_| invalid("a number has not 8 bytes"))?;
                    return Ok((u64::from_be_bytes(number), std::mem::take(payload)));
                }
                _ => return Err(invalid("a message has not three frames")),
            }
        }
    }
}
