//! First exchange on a connection between nodes of this project: the initiator names the process
//! that it expects.
//!
//! Each [`TcpTransport`](crate::TcpTransport) draws an [`Instance`], publishes it in its descriptor
//! and expects it in the hello. The initiator sends its first request after the response, so no
//! byte of a request reaches a process that did not accept the hello: neither another node, nor
//! Mooncake C++, nor an unrelated program. Nodes without an instance in their descriptor get no
//! hello.
//!
//! To Mooncake C++, a hello is a request header: a read of no bytes with status frame, which every
//! node refuses.

use std::io;

pub use mooncake_transport::instance::Instance;
use mooncake_transport::instance::OtherInstance;
use tokio::net::TcpStream;

use crate::frame::{HEADER_LEN, STATUS_LEN, Status};

/// Key of this project in descriptors: the instance that the data port expects. Mooncake C++
/// ignores it.
pub const INSTANCE_KEY: &str = "tcp_instance";
/// Length of a hello in bytes: that of a request header.
pub const HELLO_LEN: usize = HEADER_LEN;
/// Length of the response to a hello in bytes.
pub const HELLO_RESPONSE_LEN: usize = STATUS_LEN + 8;
/// Code of the status frame in the response when the hello names another instance.
pub const OTHER_INSTANCE: u32 = 3;

/// Opcode of a hello. Initiators of requests use 0 and 1, with or without the high bit.
const OPCODE: u8 = 0xc8;
/// Padding of a hello. The padding of a request has no meaning.
const MARK: [u8; 7] = *b"MCHELLO";

/// First frame of a connection: the expected instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Process that serves the requests of the connection.
    pub instance: Instance,
}

impl Hello {
    /// Returns the frame: `u64` zero, `u64` instance, the opcode and the mark, little-endian.
    pub fn encode(self) -> [u8; HELLO_LEN] {
        let mut frame = [0; HELLO_LEN];
        frame[8..16].copy_from_slice(&self.instance.0.to_le_bytes());
        frame[16] = OPCODE;
        frame[17..].copy_from_slice(&MARK);
        frame
    }

    /// Parses a frame; `None` if it is a request.
    pub fn decode(frame: &[u8; HELLO_LEN]) -> Option<Self> {
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| frame[at + i]));
        let is_hello = word(0) == 0 && frame[16] == OPCODE && frame[17..] == MARK;
        is_hello.then(|| Self { instance: Instance(word(8)) })
    }
}

/// Response to a hello: a status frame and the instance of the process that responds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HelloResponse {
    /// True if the process serves the requests that follow. Otherwise it closes the connection.
    pub accepted: bool,
    /// Process that responds.
    pub instance: Instance,
}

impl HelloResponse {
    /// Returns the frame.
    pub fn encode(self) -> [u8; HELLO_RESPONSE_LEN] {
        let status = if self.accepted { Status::Ok } else { Status::Refused(OTHER_INSTANCE) };
        let mut frame = [0; HELLO_RESPONSE_LEN];
        frame[..STATUS_LEN].copy_from_slice(&status.encode());
        frame[STATUS_LEN..].copy_from_slice(&self.instance.0.to_le_bytes());
        frame
    }

    /// Parses a frame; `None` for any other frame than the response to a hello.
    pub fn decode(frame: &[u8; HELLO_RESPONSE_LEN]) -> Option<Self> {
        let (status, instance) = frame.split_first_chunk::<STATUS_LEN>()?;
        let accepted = match Status::decode(*status) {
            Ok(Status::Ok) => true,
            Ok(Status::Refused(OTHER_INSTANCE)) => false,
            _ => return None,
        };
        let instance = Instance(u64::from_le_bytes(*instance.first_chunk()?));
        Some(Self { accepted, instance })
    }
}

/// Sends the hello and waits for the response.
///
/// # Errors
/// Returns [`OtherInstance`] if anything but the expected instance responds, `UnexpectedEof` if the
/// connection is closed without a response, and errors of the socket.
pub(crate) async fn exchange_hello(stream: &TcpStream, expected: Instance) -> io::Result<()> {
    send(stream, &Hello { instance: expected }.encode()).await?;
    let (mut response, mut len) = ([0; HELLO_RESPONSE_LEN], 0);
    while len < HELLO_RESPONSE_LEN {
        stream.readable().await?;
        match stream.try_read(&mut response[len..]) {
            Ok(0) if len == 0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            // A node without hellos sends a status frame at most, then closes.
            Ok(0) => return Err(OtherInstance { expected, found: None }.into()),
            Ok(n) => len += n,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    match HelloResponse::decode(&response) {
        Some(HelloResponse { accepted: true, instance }) if instance == expected => Ok(()),
        other => Err(OtherInstance { expected, found: other.map(|response| response.instance) }.into()),
    }
}

/// Sends all bytes.
pub(crate) async fn send(stream: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        stream.writable().await?;
        match stream.try_write(bytes) {
            Ok(n) => bytes = &bytes[n..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::{Direction, Framing, Request};

    #[test]
    fn frames_have_these_bytes() {
        let hello = Hello { instance: Instance(0x0102_0304_0506_0708) };
        assert_eq!(&hello.encode(), b"\0\0\0\0\0\0\0\0\x08\x07\x06\x05\x04\x03\x02\x01\xc8MCHELLO");
        assert_eq!(Hello::decode(&hello.encode()), Some(hello));
        let response = HelloResponse { accepted: false, instance: Instance(1) };
        assert_eq!(&response.encode(), b"\x03\0\0\0VTCM\x01\0\0\0\0\0\0\0");
        for accepted in [true, false] {
            let response = HelloResponse { accepted, ..response };
            assert_eq!(HelloResponse::decode(&response.encode()), Some(response));
        }
    }

    #[test]
    fn a_node_without_hellos_sees_a_read_of_no_bytes() {
        let hello = Hello { instance: Instance(u64::MAX) };
        let request = Request::decode(&hello.encode());
        assert_eq!((request.direction, request.framing), (Direction::Read, Framing::Acknowledged));
        assert_eq!(request.len, 0);
    }

    #[test]
    fn every_bit_of_the_frame_counts() {
        let frame = Hello { instance: Instance(7) }.encode();
        for bit in 0..HELLO_LEN * 8 {
            let mut other = frame;
            other[bit / 8] ^= 1 << (bit % 8);
            let decoded = Hello::decode(&other);
            // The instance is the only part that may have any value.
            assert_eq!(decoded.is_some(), (64..128).contains(&bit), "bit {bit}");
            assert_ne!(decoded, Hello::decode(&frame), "bit {bit}");
        }
    }
}
