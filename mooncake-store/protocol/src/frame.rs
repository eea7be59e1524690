//! coro_rpc frames: a fixed header, a body and an unused attachment. Pure functions over bytes.

use std::fmt;

/// Length of a request header in bytes.
pub const REQUEST_HEAD: usize = 20;
/// Length of a reply header in bytes.
pub const REPLY_HEAD: usize = 16;
/// Default of the maximum length of body and attachment together.
pub const DEFAULT_MAX_BODY: usize = super::pack::MAX_BODY;
/// Maximum length of the body of a reply in bytes. Clients of this project refuse longer ones.
pub const MAX_REPLY: usize = DEFAULT_MAX_BODY;
/// Minimum size of a read from a socket, in bytes.
const READ_CHUNK: usize = 16 << 10;

/// First sequence number of clients that understand [`Status::Overloaded`]. Mooncake C++ counts
/// from 0 and accepts any number in a reply.
pub const FIRST_SEQ: u32 = 1 << 31;

/// First byte of every frame.
const MAGIC: u8 = 21;
/// Version of the frame.
const VERSION: u8 = 0;
/// Serialization number of struct_pack.
const STRUCT_PACK: u8 = 0;
/// Message type of a call.
const CALL: u8 = 0;

/// A complete request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestFrame<'a> {
    /// Sequence number, repeated in the reply.
    pub seq: u32,
    /// Number of the called function.
    pub function: u32,
    /// Arguments of the call.
    pub body: &'a [u8],
    /// Bytes after the body. Only messages of data have some.
    pub attachment: &'a [u8],
}

/// A complete reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplyFrame<'a> {
    /// Sequence number of the request.
    pub seq: u32,
    /// Outcome of the call. Unless it is `Ok`, the body is an error message.
    pub status: Status,
    /// Response of the function.
    pub body: &'a [u8],
    /// Bytes after the body; unused.
    pub attachment: &'a [u8],
}

/// Result of parsing the beginning of a stream of frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parsed<T> {
    /// A frame and its length in bytes.
    Whole(T, usize),
    /// Incomplete frame, and the number of bytes needed to continue.
    Partial(usize),
}

/// Error of an invalid frame. The stream cannot be read any further.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FrameError {
    /// Wrong first byte.
    Magic(u8),
    /// Unknown version of the frame.
    Version(u8),
    /// Unknown serialization or message type.
    Kind {
        /// Number of the serialisation.
        serialization: u8,
        /// Number of the message type.
        message: u8,
    },
    /// Body and attachment exceed the maximum length.
    TooLong {
        /// Length of body and attachment.
        len: u64,
        /// Maximum length.
        max: usize,
    },
}

impl fmt::Display for FrameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FrameError::Magic(byte) => {
                write!(f, "invalid RPC frame: expected first byte {MAGIC:#04x}, received {byte:#04x}")
            }
            FrameError::Version(version) => {
                write!(f, "unsupported RPC frame version {version}; this build supports {VERSION}")
            }
            FrameError::Kind { serialization, message } => {
                write!(
                    f,
                    "unsupported RPC frame: serialization {serialization} and message type {message}; both must be 0"
                )
            }
            FrameError::TooLong { len, max } => {
                write!(f, "RPC body exceeds the maximum length. len={len} max={max}")
            }
        }
    }
}

impl std::error::Error for FrameError {}

/// Reason for a missing response: the status of the RPC layer, and a message.
pub type Refusal = (Status, String);

macro_rules! statuses {
    ($($variant:ident = $number:literal, $text:literal;)*) => {
        /// Outcome of a call in the RPC layer. Errors of the function itself are in the body.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[non_exhaustive]
        pub enum Status {
            $(#[doc = $text] $variant,)*
            /// Unknown number.
            Other(u8),
        }

        impl Status {
            /// All named statuses.
            pub const ALL: &'static [Status] = &[$(Status::$variant),*];

            /// Returns the number in the frame.
            pub const fn number(self) -> u8 {
                match self {
                    $(Status::$variant => $number,)*
                    Status::Other(number) => number,
                }
            }

            /// Returns the status with this number.
            pub const fn from_number(number: u8) -> Self {
                match number {
                    $($number => Status::$variant,)*
                    other => Status::Other(other),
                }
            }

            /// Returns the description.
            pub const fn text(self) -> &'static str {
                match self {
                    $(Status::$variant => $text,)*
                    Status::Other(_) => "an unknown RPC status",
                }
            }
        }
    };
}

statuses! {
    Ok = 0, "the call was made";
    Io = 1, "input or output failed";
    NotConnected = 2, "not connected";
    Timeout = 3, "timed out";
    InvalidArguments = 4, "the arguments are not what the function takes";
    AddressInUse = 5, "the address is in use";
    BadAddress = 6, "a bad address";
    OpenFailed = 7, "could not open";
    ListenFailed = 8, "could not listen";
    Canceled = 9, "canceled";
    HandlerFailed = 10, "the handler failed";
    NotRegistered = 11, "the function is not registered";
    Protocol = 12, "a protocol error";
    UnknownVersion = 13, "an unknown protocol version";
    TooLarge = 14, "the message is too large";
    AlreadyRunning = 15, "the server has run already";
    BadResult = 16, "the result cannot be serialized";
    SerialConflict = 17, "a request number is in use";
    Overloaded = 100, "the server has more requests than it can answer";
    Custom = 255, "an error of the application";
}

/// Parses the request at the beginning of `bytes`.
pub fn parse_request(bytes: &[u8], max_body: usize) -> Result<Parsed<RequestFrame<'_>>, FrameError> {
    check_start(bytes)?;
    let Some(head) = bytes.first_chunk::<REQUEST_HEAD>() else {
        return Ok(Parsed::Partial(REQUEST_HEAD - bytes.len()));
    };
    let [_, _, serialization, message, ..] = *head;
    if (serialization, message) != (STRUCT_PACK, CALL) {
        return Err(FrameError::Kind { serialization, message });
    }
    let lengths = (word(head, 12), word(head, 16));
    Ok(payload(bytes, REQUEST_HEAD, lengths, max_body)?.map(|body, attachment| RequestFrame {
        seq: word(head, 4),
        function: word(head, 8),
        body,
        attachment,
    }))
}

/// Parses the reply at the beginning of `bytes`.
pub fn parse_reply(bytes: &[u8], max_body: usize) -> Result<Parsed<ReplyFrame<'_>>, FrameError> {
    check_start(bytes)?;
    let Some(head) = bytes.first_chunk::<REPLY_HEAD>() else {
        return Ok(Parsed::Partial(REPLY_HEAD - bytes.len()));
    };
    let lengths = (word(head, 8), word(head, 12));
    Ok(payload(bytes, REPLY_HEAD, lengths, max_body)?.map(|body, attachment| ReplyFrame {
        seq: word(head, 4),
        status: Status::from_number(head[2]),
        body,
        attachment,
    }))
}

/// Appends a request; `body` appends its body.
pub fn write_request(out: &mut Vec<u8>, seq: u32, function: u32, body: impl FnOnce(&mut Vec<u8>)) {
    begin_attached(out, seq, function, body, 0);
}

/// Appends a request like [`write_request`], behind which the caller sends an attachment of this
/// length.
pub fn begin_attached(
    out: &mut Vec<u8>,
    seq: u32,
    function: u32,
    body: impl FnOnce(&mut Vec<u8>),
    attachment: u32,
) {
    let start = out.len();
    out.extend_from_slice(&[MAGIC, VERSION, STRUCT_PACK, CALL]);
    out.extend_from_slice(&seq.to_le_bytes());
    out.extend_from_slice(&function.to_le_bytes());
    out.extend_from_slice(&[0; 4]);
    out.extend_from_slice(&attachment.to_le_bytes());
    body(out);
    let len = body_len(out, start + REQUEST_HEAD);
    out[start + 12..start + 16].copy_from_slice(&len);
}

/// Appends a reply; `body` appends its body and returns the status, with a message in [`Err`].
/// Returns the status of the reply.
pub fn write_reply(
    out: &mut Vec<u8>,
    seq: u32,
    body: impl FnOnce(&mut Vec<u8>) -> Result<(), Refusal>,
) -> Status {
    let start = begin_reply(out, seq);
    let outcome = body(out);
    end_reply(out, start, outcome)
}

/// Appends the header of a reply, whose body follows. Returns the start of the reply for
/// [`end_reply`].
pub fn begin_reply(out: &mut Vec<u8>, seq: u32) -> usize {
    let start = out.len();
    out.extend_from_slice(&[MAGIC, VERSION, 0, 0]);
    out.extend_from_slice(&seq.to_le_bytes());
    out.extend_from_slice(&[0; 8]);
    start
}

/// Completes the reply that begins at `start`, with the status and a message in [`Err`]. Returns
/// the status.
pub fn end_reply(out: &mut Vec<u8>, start: usize, mut outcome: Result<(), Refusal>) -> Status {
    let len = out.len() - start - REPLY_HEAD;
    if len > MAX_REPLY && outcome.is_ok() {
        outcome = Err(too_large("a call", format_args!("len={len}"), "ask for less at a time"));
    }
    let mut sent = Status::Ok;
    if let Err((status, text)) = outcome {
        sent = status;
        out.truncate(start + REPLY_HEAD);
        out[start + 2] = status.number();
        super::pack::encode_spelled(&text, out);
    }
    let len = body_len(out, start + REPLY_HEAD);
    out[start + 8..start + 12].copy_from_slice(&len);
    sent
}

/// Header of a request whose body and attachment are longer than a server accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OversizedRequest {
    /// Sequence number, repeated in the reply.
    pub seq: u32,
    /// Number of the called function.
    pub function: u32,
    /// Length of the whole request with its header, in bytes.
    pub len: u64,
}

impl OversizedRequest {
    /// Reads the header of the request at the beginning of `bytes`.
    pub fn read(bytes: &[u8]) -> Option<Self> {
        let head = bytes.first_chunk::<REQUEST_HEAD>()?;
        let len = REQUEST_HEAD as u64 + u64::from(word(head, 12)) + u64::from(word(head, 16));
        Some(Self { seq: word(head, 4), function: word(head, 8), len })
    }
}

/// Returns the refusal of a call whose response would exceed [`MAX_REPLY`], with its fields and
/// what the caller can do.
pub fn too_large(call: &str, fields: fmt::Arguments<'_>, advice: &str) -> Refusal {
    let text = format!(
        "cannot answer {call}: the response exceeds the maximum length. {fields} max={MAX_REPLY}; {advice}"
    );
    (Status::TooLarge, text)
}

/// Reserves buffer space for missing bytes, at most as much as has arrived already, because the
/// announced length is not trusted.
pub fn reserve(buffer: &mut Vec<u8>, missing: usize) {
    buffer.reserve(missing.min(buffer.len()).max(READ_CHUNK));
}

fn body_len(out: &[u8], body_start: usize) -> [u8; 4] {
    u32::try_from(out.len() - body_start).unwrap_or(u32::MAX).to_le_bytes()
}

/// Checks the first bytes of a frame, so that garbage is refused before more of it is read.
fn check_start(bytes: &[u8]) -> Result<(), FrameError> {
    match *bytes {
        [magic, ..] if magic != MAGIC => Err(FrameError::Magic(magic)),
        [_, version, ..] if version != VERSION => Err(FrameError::Version(version)),
        _ => Ok(()),
    }
}

fn word(head: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]])
}

/// Body and attachment.
type Payload<'a> = (&'a [u8], &'a [u8]);

/// Returns the payload after a header once it is complete.
fn payload(
    bytes: &[u8],
    head: usize,
    (body, attachment): (u32, u32),
    max: usize,
) -> Result<Parsed<Payload<'_>>, FrameError> {
    let len = u64::from(body) + u64::from(attachment);
    if len > max as u64 {
        return Err(FrameError::TooLong { len, max });
    }
    let total = head + len as usize;
    let Some(frame) = bytes.get(..total) else {
        return Ok(Parsed::Partial(total - bytes.len()));
    };
    Ok(Parsed::Whole(frame[head..].split_at(body as usize), total))
}

impl<'a> Parsed<Payload<'a>> {
    fn map<T>(self, frame: impl FnOnce(&'a [u8], &'a [u8]) -> T) -> Parsed<T> {
        match self {
            Parsed::Whole((body, attachment), used) => Parsed::Whole(frame(body, attachment), used),
            Parsed::Partial(missing) => Parsed::Partial(missing),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// `ExistKey("nokey", "default")` and its response, as sent by Mooncake C++.
    const REQUEST: &[u8] =
        b"\x15\0\0\0\x02\0\0\0\x09\x5f\x38\x89\x12\0\0\0\0\0\0\0\xd8\x1e\xf9\x7c\x05nokey\x07default";
    const REPLY: &[u8] = b"\x15\0\0\0\x02\0\0\0\x0b\0\0\0\0\0\0\0\xd3\0\xe8\x90\x04\x87\x0b\x01\0\x01\0";

    #[test]
    fn recorded_frames() {
        let Parsed::Whole(request, used) = parse_request(REQUEST, 100).unwrap() else { panic!("partial") };
        assert_eq!((request.seq, request.function, used), (2, 0x8938_5f09, REQUEST.len()));
        let mut written = Vec::new();
        write_request(&mut written, 2, 0x8938_5f09, |out| out.extend_from_slice(request.body));
        assert_eq!(written, REQUEST);

        let Parsed::Whole(reply, used) = parse_reply(REPLY, 100).unwrap() else { panic!("partial") };
        assert_eq!((reply.seq, reply.status, used), (2, Status::Ok, REPLY.len()));
        written.clear();
        write_reply(&mut written, 2, |out| {
            out.extend_from_slice(reply.body);
            Ok(())
        });
        assert_eq!(written, REPLY);
    }

    #[test]
    fn a_refusal_drops_what_the_body_had() {
        let mut out = b"before".to_vec();
        write_reply(&mut out, 7, |out| {
            out.extend_from_slice(b"half an answer");
            Err((Status::NotRegistered, "no such function".into()))
        });
        let Parsed::Whole(reply, used) = parse_reply(&out[6..], 100).unwrap() else { panic!("partial") };
        assert_eq!((reply.seq, reply.status, used), (7, Status::NotRegistered, out.len() - 6));
        assert_eq!(crate::pack::decode::<&str>(reply.body), Ok("no such function"));
    }

    #[test]
    fn prefix_reports_missing_bytes_within_frame() {
        for cut in 0..REQUEST.len() {
            let Parsed::Partial(missing) = parse_request(&REQUEST[..cut], 100).unwrap() else {
                panic!("{cut} bytes are no frame")
            };
            assert!(missing > 0 && cut + missing <= REQUEST.len());
        }
        for cut in 0..REPLY.len() {
            assert!(matches!(parse_reply(&REPLY[..cut], 100), Ok(Parsed::Partial(1..=16))));
        }
    }

    #[test]
    fn garbage_and_lengths_are_refused_by_name() {
        assert_eq!(parse_request(b"GET / HTTP", 100), Err(FrameError::Magic(b'G')));
        assert_eq!(parse_request(&[21, 9], 100), Err(FrameError::Version(9)));
        let mut frame = REQUEST.to_vec();
        frame[2] = 3;
        assert_eq!(parse_request(&frame, 100), Err(FrameError::Kind { serialization: 3, message: 0 }));
        let mut frame = REQUEST.to_vec();
        frame[12..20].fill(0xff);
        let len = u64::from(u32::MAX) * 2;
        assert_eq!(parse_request(&frame, 100), Err(FrameError::TooLong { len, max: 100 }));
        assert_eq!(parse_request(&frame, usize::MAX), Ok(Parsed::Partial(len as usize + 20 - frame.len())));
    }

    #[test]
    fn statuses_come_back() {
        for &status in Status::ALL {
            assert_eq!(Status::from_number(status.number()), status);
        }
        assert_eq!(Status::from_number(77), Status::Other(77));
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..64), magic: bool) {
            let mut bytes = bytes;
            if magic && bytes.len() > 1 {
                bytes[..2].copy_from_slice(&[MAGIC, VERSION]);
            }
            if let Ok(Parsed::Whole(frame, used)) = parse_request(&bytes, 1 << 20) {
                prop_assert_eq!(used, REQUEST_HEAD + frame.body.len() + frame.attachment.len());
            }
            if let Ok(Parsed::Whole(frame, used)) = parse_reply(&bytes, 1 << 20) {
                prop_assert_eq!(used, REPLY_HEAD + frame.body.len() + frame.attachment.len());
            }
        }
    }
}
