//! Greetings and frames of the ZeroMQ protocol (ZMTP 3.0, mechanism NULL).

use std::io;

use bytes::{BufMut, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Flags of frames.
pub(crate) const MORE: u8 = 1;
const LONG: u8 = 2;
pub(crate) const COMMAND: u8 = 4;

/// Maximum length of the first command of a peer, in bytes.
const MAX_COMMAND: u64 = 4096;

/// Greets a peer as a socket of this type, such as `PUB`.
pub(crate) async fn handshake(
    input: &mut (impl AsyncRead + Unpin),
    output: &mut (impl AsyncWrite + Unpin),
    socket_type: &[u8; 3],
) -> io::Result<()> {
    let mut greeting = [0; 64];
    greeting[0] = 0xff;
    greeting[9] = 0x7f;
    greeting[10] = 3;
    greeting[12..16].copy_from_slice(b"NULL");
    output.write_all(&greeting).await?;
    let mut theirs = [0; 64];
    input.read_exact(&mut theirs).await?;
    if theirs[0] != 0xff || theirs[9] != 0x7f || theirs[10] < 3 || &theirs[12..17] != b"NULL\0" {
        return Err(invalid("invalid greeting: expected ZMTP 3 with mechanism NULL"));
    }
    output.write_all(b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03").await?;
    output.write_all(socket_type).await?;
    let (flags, body) = read_frame(input, MAX_COMMAND).await?;
    if flags & COMMAND == 0 || !body.starts_with(b"\x05READY") {
        return Err(invalid("invalid handshake: expected READY"));
    }
    Ok(())
}

/// Reads flags and body of the next frame.
///
/// # Errors
/// `InvalidData`: the frame has more than `max_len` bytes.
pub(crate) async fn read_frame(
    input: &mut (impl AsyncRead + Unpin),
    max_len: u64,
) -> io::Result<(u8, Vec<u8>)> {
    let flags = input.read_u8().await?;
    let len = if flags & LONG == 0 { u64::from(input.read_u8().await?) } else { input.read_u64().await? };
    if len > max_len {
        return Err(invalid("a frame exceeds the maximum length"));
    }
    // The length is a claim: memory is taken as bytes arrive.
    let mut body = Vec::new();
    if input.take(len).read_to_end(&mut body).await? as u64 != len {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok((flags, body))
}

/// Appends a frame of a message.
pub(crate) fn put_frame(wire: &mut BytesMut, body: &[u8], more: bool) {
    let flags = if more { MORE } else { 0 };
    match u8::try_from(body.len()) {
        Ok(short) => wire.put_slice(&[flags, short]),
        Err(_) => {
            wire.put_u8(LONG | flags);
            wire.put_u64(body.len() as u64);
        }
    }
    wire.put_slice(body);
}

pub(crate) fn invalid(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn frames_of_every_length_are_read_back() {
        for len in [0, 1, 255, 256, 70_000] {
            let (mut wire, body) = (BytesMut::new(), vec![7; len]);
            put_frame(&mut wire, &body, len == 1);
            assert_eq!(wire[0] & LONG != 0, len > 255, "{len}");
            let mut input = &wire[..];
            let (flags, read) = read_frame(&mut input, len as u64).await.unwrap();
            assert_eq!((flags & MORE != 0, read), (len == 1, body), "{len}");
            assert!(input.is_empty());
            if len > 0 {
                let error = read_frame(&mut &wire[..], len as u64 - 1).await.unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::InvalidData);
                let error = read_frame(&mut &wire[..wire.len() - 1], u64::MAX).await.unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
            }
        }
    }

    #[test]
    fn long_frames_have_long_lengths() {
        let mut wire = BytesMut::new();
        put_frame(&mut wire, &[7; 255], true);
        assert_eq!(wire[..3], [1, 255, 7]);
        wire.clear();
        put_frame(&mut wire, &[7; 256], false);
        assert_eq!(wire[..10], [2, 0, 0, 0, 0, 0, 0, 1, 0, 7]);
    }
}
