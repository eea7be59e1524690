//! Frames: `u64 length` little-endian | type byte | JSON. The oldest versions of Mooncake C++ send
//! no type byte.

use mooncake_core::error::Reason;
use mooncake_core::{Error, ErrorCode, Result};

/// Kind of a request. The number is its type byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Connection setup of a transport.
    Connection = 0,
    /// Request for the descriptor.
    Metadata = 1,
    /// Notification.
    Notify = 2,
    /// Probe for a live engine.
    Probe = 3,
}

/// Parsed frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    /// Kind of the request.
    pub kind: Kind,
    /// True if the frame had no type byte, and its response has none either.
    pub legacy: bool,
    /// JSON text, not parsed yet.
    pub body: &'a [u8],
}

/// Length of the length field in bytes.
pub(super) const HEADER: usize = 8;

/// Returns the length of the payload after the header. Returns an error for zero, and for more than
/// `max`.
pub fn payload_len(header: [u8; HEADER], max: usize) -> Result<usize> {
    let len = u64::from_le_bytes(header);
    match usize::try_from(len) {
        Ok(0) => Err(bad("a handshake frame of no bytes".into())),
        Ok(len) if len <= max => Ok(len),
        _ => {
            let text =
                format!("a handshake frame of {len} bytes, at most {max} are read (MC_HANDSHAKE_MAX_LENGTH)");
            Err(bad(text).with_reason(Reason::TooLong))
        }
    }
}

/// Splits the bytes after the header into type and body.
pub fn parse_payload(payload: &[u8]) -> Result<Frame<'_>> {
    let (&first, rest) = payload.split_first().ok_or_else(|| bad("a handshake frame of no bytes".into()))?;
    let kind = match first {
        0 => Kind::Connection,
        1 => Kind::Metadata,
        2 => Kind::Notify,
        3 => Kind::Probe,
        // Without a type byte, the first byte is a character above the known types.
        4..=127 => return Ok(Frame { kind: Kind::Connection, legacy: true, body: payload }),
        other => return Err(bad(format!("a handshake frame of type {other}, which there is not"))),
    };
    Ok(Frame { kind, legacy: false, body: rest })
}

/// Parses a frame at the start of `bytes`. Returns the frame and its length, or `None` if it is
/// incomplete.
pub fn parse(bytes: &[u8], max: usize) -> Result<Option<(Frame<'_>, usize)>> {
    let Some((header, rest)) = bytes.split_first_chunk::<HEADER>() else { return Ok(None) };
    let len = payload_len(*header, max)?;
    match rest.get(..len) {
        None => Ok(None),
        Some(payload) => Ok(Some((parse_payload(payload)?, HEADER + len))),
    }
}

/// Encodes a frame for sending.
pub fn encode(kind: Kind, legacy: bool, body: &[u8]) -> Vec<u8> {
    let len = body.len() + usize::from(!legacy);
    let mut frame = Vec::with_capacity(HEADER + len);
    frame.extend_from_slice(&(len as u64).to_le_bytes());
    if !legacy {
        frame.push(kind as u8);
    }
    frame.extend_from_slice(body);
    frame
}

fn bad(what: String) -> Error {
    Error::new(ErrorCode::InvalidParams, what)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MAX: usize = 1 << 20;

    #[test]
    fn known_bytes() {
        assert_eq!(encode(Kind::Metadata, false, b"{}"), b"\x03\0\0\0\0\0\0\0\x01{}");
        let legacy = encode(Kind::Connection, true, b"{}");
        assert_eq!(legacy, b"\x02\0\0\0\0\0\0\0{}");
        let (frame, used) = parse(&legacy, MAX).unwrap().unwrap();
        assert_eq!((frame.kind, frame.legacy, frame.body, used), (Kind::Connection, true, &b"{}"[..], 10));
        let (frame, _) = parse(b"\x03\0\0\0\0\0\0\0\x03{}rest", MAX).unwrap().unwrap();
        assert_eq!((frame.kind, frame.legacy, frame.body), (Kind::Probe, false, &b"{}"[..]));
    }

    #[test]
    fn bad_frames_are_refused_by_name() {
        for (bytes, word) in [
            (&b"\0\0\0\0\0\0\0\0"[..], "no bytes"),
            (b"\x01\0\0\0\0\0\0\x80", "at most"),
            (b"\x01\0\x10\0\0\0\0\0", "at most"),
            (b"\x02\0\0\0\0\0\0\0\x80{", "type 128"),
        ] {
            assert!(parse(bytes, MAX).unwrap_err().message().contains(word), "{bytes:?}");
        }
        assert_eq!(parse(b"\x03\0\0\0\0\0\0\0\x01{", MAX).unwrap(), None);
        assert_eq!(parse(b"\x03\0\0", MAX).unwrap(), None);
        assert_eq!(parse(b"", MAX).unwrap(), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 256 }, failure_persistence: None, ..Default::default() })]

        #[test]
        fn frames_round_trip(kind in 0usize..4, body in prop::collection::vec(any::<u8>(), 0..50), tail in prop::collection::vec(any::<u8>(), 0..9)) {
            let kind = [Kind::Connection, Kind::Metadata, Kind::Notify, Kind::Probe][kind];
            let mut bytes = encode(kind, false, &body);
            let len = bytes.len();
            for cut in 0..len {
                prop_assert_eq!(parse(&bytes[..cut], MAX).unwrap(), None);
            }
            bytes.extend(tail);
            prop_assert_eq!(parse(&bytes, MAX).unwrap(), Some((Frame { kind, legacy: false, body: &body }, len)));
        }

        #[test]
        fn noise_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            let _ = parse(&bytes, 32);
        }
    }
}
