//! Wire format of the control plane: hello, frames, and the encoding of messages.
//!
//! Integers are little-endian. A list, a text or a byte string follows its length as `u16`. An enum
//! begins with its number as `u8`. A frame is a message after its length as `u32`.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;

use crate::protocol::{
    AttachMode, Change, GroupId, GroupSpec, LinkEvidence, MAX_ENDPOINT, MAX_NAME, ProposalOutcome, RankInfo,
    Request, RequestId, Response, SessionId, ToAgent, ToCoordinator, WorldId,
};
use crate::view::{GlobalRank, MAX_RANKS, Member, MemberState, RankState, Slot, View};

/// Version of the protocol. Processes of other versions are refused.
pub(crate) const VERSION: u16 = 1;
/// Largest length of a message in bytes: a view with the longest endpoints.
pub(crate) const MAX_MESSAGE: usize = 512 << 10;
/// Length of a hello in bytes.
pub(crate) const HELLO_LENGTH: usize = 24;
/// Length of the response to a hello in bytes.
pub(crate) const ANSWER_LENGTH: usize = 16;

const MAGIC: [u8; 8] = *b"MC-GROUP";
/// Largest number of elements of a list.
const MAX_LIST: usize = 1024;
/// Largest length of a reason in bytes. Longer ones are cut.
const MAX_TEXT: usize = 1024;

/// Purpose of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Purpose {
    /// Messages between an agent and the coordinator.
    Control,
    /// Link between two processes, or a probe.
    Link,
}

/// First bytes of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Hello {
    /// Version of the sender.
    pub(crate) version: u16,
    /// Purpose of the connection.
    pub(crate) purpose: Purpose,
    /// True if an exchange of proofs follows.
    pub(crate) has_proof: bool,
    /// Process that the sender expects, for links.
    pub(crate) session: SessionId,
}

/// Verdict on a hello.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    /// The connection is accepted.
    Accepted,
    /// The versions differ.
    OtherVersion,
    /// The address belongs to another process than the expected one, or to another purpose.
    OtherProcess,
}

/// Response to a hello.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Answer {
    /// Version of the responder.
    pub(crate) version: u16,
    /// Verdict on the hello.
    pub(crate) verdict: Verdict,
}

impl Hello {
    /// Returns the bytes: mark, version, purpose, proof, padding, session.
    pub(crate) fn encode(self) -> [u8; HELLO_LENGTH] {
        let mut bytes = [0; HELLO_LENGTH];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&self.version.to_le_bytes());
        bytes[10] = match self.purpose {
            Purpose::Control => 1,
            Purpose::Link => 2,
        };
        bytes[11] = u8::from(self.has_proof);
        bytes[16..].copy_from_slice(&self.session.0.to_le_bytes());
        bytes
    }

    /// Parses a hello. `None` if the bytes are none. Fields after the version are those of this
    /// version, and meaningless if the version differs.
    pub(crate) fn decode(bytes: &[u8; HELLO_LENGTH]) -> Option<Self> {
        let version = version_of(bytes)?;
        let purpose = match bytes[10] {
            1 => Purpose::Control,
            2 => Purpose::Link,
            _ if version != VERSION => Purpose::Control,
            _ => return None,
        };
        let session = SessionId(u64::from_le_bytes(*bytes[16..].first_chunk()?));
        Some(Self { version, purpose, has_proof: bytes[11] == 1, session })
    }
}

impl Answer {
    /// Returns the bytes: mark, version, verdict, padding.
    pub(crate) fn encode(self) -> [u8; ANSWER_LENGTH] {
        let mut bytes = [0; ANSWER_LENGTH];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&self.version.to_le_bytes());
        bytes[10] = match self.verdict {
            Verdict::Accepted => 0,
            Verdict::OtherVersion => 1,
            Verdict::OtherProcess => 2,
        };
        bytes
    }

    /// Parses a response. `None` if the bytes are none.
    pub(crate) fn decode(bytes: &[u8; ANSWER_LENGTH]) -> Option<Self> {
        let version = version_of(bytes)?;
        let verdict = match bytes[10] {
            0 => Verdict::Accepted,
            1 => Verdict::OtherVersion,
            2 => Verdict::OtherProcess,
            _ => return None,
        };
        Some(Self { version, verdict })
    }
}

fn version_of(bytes: &[u8]) -> Option<u16> {
    let (mark, rest) = bytes.split_first_chunk::<8>()?;
    (*mark == MAGIC).then_some(u16::from_le_bytes(*rest.first_chunk()?))
}

/// Error of bytes that do not form a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Malformed(&'static str);

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "malformed message: {}", self.0)
    }
}

impl std::error::Error for Malformed {}

/// Appends the frame of a message.
pub(crate) fn encode<M: Message>(message: &M, out: &mut Vec<u8>) {
    let start = out.len();
    out.extend([0; 4]);
    message.put(out);
    let length = u32::try_from(out.len() - start - 4).unwrap_or(u32::MAX);
    out[start..start + 4].copy_from_slice(&length.to_le_bytes());
}

/// Returns the length of the message of a frame.
///
/// # Errors
/// Returns an error if the message is longer than [`MAX_MESSAGE`].
pub(crate) fn message_length(header: [u8; 4]) -> Result<usize, Malformed> {
    let length = u32::from_le_bytes(header) as usize;
    if length <= MAX_MESSAGE { Ok(length) } else { Err(Malformed("the message is too long")) }
}

/// Parses a message without its length.
///
/// # Errors
/// Returns an error if the bytes do not form a message, or are longer than one.
pub(crate) fn decode<M: Message>(bytes: &[u8]) -> Result<M, Malformed> {
    let mut input = Input(bytes);
    let message = M::take(&mut input)?;
    if input.0.is_empty() { Ok(message) } else { Err(Malformed("bytes follow the message")) }
}

/// Message of one direction.
pub(crate) trait Message: Field {}

impl Message for ToCoordinator {}
impl Message for ToAgent {}

/// Bytes that are not parsed yet.
pub(crate) struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn bytes(&mut self, length: usize) -> Result<&'a [u8], Malformed> {
        let (head, rest) = self.0.split_at_checked(length).ok_or(Malformed("it is too short"))?;
        self.0 = rest;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (head, rest) = self.0.split_first_chunk().ok_or(Malformed("it is too short"))?;
        self.0 = rest;
        Ok(*head)
    }

    /// Reads the length of a list, a text or a byte string.
    fn length(&mut self, most: usize) -> Result<usize, Malformed> {
        let length = usize::from(u16::from_le_bytes(self.array()?));
        if length <= most { Ok(length) } else { Err(Malformed("a length is out of range")) }
    }
}

/// Appends a byte string after its length, cut to a largest length.
fn put_bytes(bytes: &[u8], most: usize, out: &mut Vec<u8>) {
    let length = bytes.len().min(most);
    out.extend((length as u16).to_le_bytes());
    out.extend(&bytes[..length]);
}

/// Part of a message.
pub(crate) trait Field: Sized {
    fn put(&self, out: &mut Vec<u8>);
    fn take(input: &mut Input<'_>) -> Result<Self, Malformed>;
}

/// Fields of one byte or word.
macro_rules! numbers {
    ($($type:ty),*) => {
        $(impl Field for $type {
            fn put(&self, out: &mut Vec<u8>) {
                out.extend(self.to_le_bytes());
            }

            fn take(input: &mut Input<'_>) -> Result<Self, Malformed> {
                Ok(Self::from_le_bytes(input.array()?))
            }
        })*
    };
}

/// Structures with the fields in this order.
macro_rules! structures {
    ($($type:ident { $($field:ident),* })*) => {
        $(impl Field for $type {
            fn put(&self, out: &mut Vec<u8>) {
                $(self.$field.put(out);)*
            }

            fn take(input: &mut Input<'_>) -> Result<Self, Malformed> {
                Ok(Self { $($field: Field::take(input)?),* })
            }
        })*
    };
}

/// Structures around one number.
macro_rules! wrappers {
    ($($type:ident),*) => {
        $(impl Field for $type {
            fn put(&self, out: &mut Vec<u8>) {
                self.0.put(out);
            }

            fn take(input: &mut Input<'_>) -> Result<Self, Malformed> {
                Field::take(input).map(Self)
            }
        })*
    };
}

/// Enums: number of each variant, and its fields in this order.
macro_rules! enums {
    ($($type:ident { $($number:literal $variant:ident
        $(( $($element:ident),* ))? $({ $($field:ident),* })? ),* $(,)? })*) => {
        $(impl Field for $type {
            fn put(&self, out: &mut Vec<u8>) {
                match self {
                    $($type::$variant $(( $($element),* ))? $({ $($field),* })? => {
                        out.push($number);
                        $($($element.put(out);)*)?
                        $($($field.put(out);)*)?
                    })*
                }
            }

            fn take(input: &mut Input<'_>) -> Result<Self, Malformed> {
                Ok(match u8::take(input)? {
                    $($number => {
                        $($(let $element = Field::take(input)?;)*)?
                        $($(let $field = Field::take(input)?;)*)?
                        $type::$variant $(( $($element),* ))? $({ $($field),* })?
                    })*
                    _ => return Err(Malformed(concat!("no such ", stringify!($type)))),
                })
            }
        })*
    };
}

numbers!(u8, u64);
wrappers!(SessionId, WorldId, GroupId, RequestId, Slot);

structures! {
    LinkEvidence { rank, incarnation, is_up }
    RankInfo { rank, incarnation, session, address }
    GroupSpec { name, order, capacity, mode, auto_deactivate }
    Member { rank, incarnation, state, rank_state, endpoint }
    View { epoch, mask, generation, capacity, members }
}

enums! {
    AttachMode { 0 CreateOrAttach, 1 AttachOrExtend }
    Change { 0 Activate, 1 Deactivate }
    RankState { 0 Offline, 1 Synced, 2 Healthy }
    MemberState { 0 None, 1 Inactive, 2 AwaitingActivation, 3 Active, 4 Left }
    ToCoordinator {
        0 Register { rank, session, world, address },
        1 Heartbeat { unanswered },
        2 Evidence { report, links },
        3 Applied { group, epoch },
        4 Request { id, request },
        5 Leave,
    }
    Request {
        0 RegisterGroup(spec),
        1 Reattach(group),
        2 UnregisterGroup(group),
        3 PublishEndpoint { group, endpoint },
        4 ConfirmReady(group),
        5 Propose { group, change, slots },
        6 Sync(group),
    }
    ToAgent {
        0 Registered { world, incarnation },
        1 Refused { reason, may_retry },
        2 Replaced,
        3 HeartbeatTaken,
        4 EvidenceTaken { report },
        5 Ranks(ranks),
        6 Suspects(suspects),
        7 View { group, view },
        8 Ready(group),
        9 Response { id, response },
    }
    Response {
        0 Attached { group, slot },
        1 Done,
        2 Proposed(outcome),
        3 Synced { is_reconciled, epoch },
        4 Refused(reason),
    }
    ProposalOutcome {
        0 Rejected(reason),
        1 Applied { epoch, dropped },
    }
}

impl Field for bool {
    fn put(&self, out: &mut Vec<u8>) {
        out.push(u8::from(*self));
    }

    fn take(input: &mut Input<'_>) -> Result<Self, Malformed> {
        match u8::take(input)? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Malformed("a truth value is neither 0 nor 1")),
        }
    }
}

impl Field for GlobalRank {
    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
    }

    fn take(input: &mut Input<'_>) -> Result<Self, Malformed> {
        let rank = u8::take(input)?;
        if usize::from(rank) < MAX_RANKS { Ok(Self(rank)) } else { Err(Malformed("no such rank")) }
    }
}

/// A number of slots, as one byte.
impl Field for usize {
    fn put(&self, out: &mut Vec<u8>) {
        out.push(u8::try_from(*self).unwrap_or(u8::MAX));
    }

    fn take(input: &mut Input<'_>) -> Result<Self, Malformed> {
        u8::take(input).map(Self::from)
    }
}

impl Field for String {
    fn put(&self, out: &mut Vec<u8>) {
        let mut length = self.len().min(MAX_TEXT);
        while !self.is_char_boundary(length) {
            length -= 1;
        }
        put_bytes(&self.as_bytes()[..length], MAX_TEXT, out);
    }

    fn take(input: &mut Input<'_>) -> Result<Self, Malformed> {
        let length = input.length(MAX_TEXT.max(MAX_NAME))?;
        let text = std::str::from_utf8(input.bytes(length)?);
        text.map(str::to_owned).map_err(|_| Malformed("a text is not UTF-8"))
    }
}

impl Field for Bytes {
    fn put(&self, out: &mut Vec<u8>) {
        put_bytes(self, MAX_ENDPOINT, out);
    }

    fn take(input: &mut Input<'_>) -> Result<Self, Malformed> {
        let length = input.length(MAX_ENDPOINT)?;
        Ok(Self::copy_from_slice(input.bytes(length)?))
    }
}

impl<T: Field> Field for Vec<T> {
    fn put(&self, out: &mut Vec<u8>) {
        let length = self.len().min(MAX_LIST);
        out.extend((length as u16).to_le_bytes());
        for element in self.iter().take(length) {
            element.put(out);
        }
    }

    fn take(input: &mut Input<'_>) -> Result<Self, Malformed> {
        // Every element has at least one byte, so that a list takes no more memory than its frame.
        let length = input.length(MAX_LIST.min(input.0.len()))?;
        (0..length).map(|_| T::take(input)).collect()
    }
}

impl<T: Field> Field for Option<T> {
    fn put(&self, out: &mut Vec<u8>) {
        self.is_some().put(out);
        if let Some(value) = self {
            value.put(out);
        }
    }

    fn take(input: &mut Input<'_>) -> Result<Self, Malformed> {
        bool::take(input)?.then(|| T::take(input)).transpose()
    }
}

impl<T: Field> Field for Arc<T> {
    fn put(&self, out: &mut Vec<u8>) {
        (**self).put(out);
    }

    fn take(input: &mut Input<'_>) -> Result<Self, Malformed> {
        T::take(input).map(Self::new)
    }
}

impl<A: Field, B: Field> Field for (A, B) {
    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
        self.1.put(out);
    }

    fn take(input: &mut Input<'_>) -> Result<Self, Malformed> {
        Ok((A::take(input)?, B::take(input)?))
    }
}

#[cfg(test)]
#[path = "wire/tests.rs"]
mod tests;
