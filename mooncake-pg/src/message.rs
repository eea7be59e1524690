//! Messages between the data planes of two processes.
//!
//! A connection carries messages one way, from the process that opened it. It begins with a
//! [`Hello`]. Each message is a frame: its length as `u32`, the number of the communicator in the
//! receiving process as `u32`, the slot of the sender, the kind, and the fields. All integers are
//! little-endian. In the other direction the receiver names communicators that it does not have, by
//! their numbers, and responds to the offer of a ring by a zero and the address of its doorbell.
//! Frames for the communicator 0 concern the ring.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use mooncake_core::{Error, ErrorCode, Result};

use crate::intra_host::FileAddress;

/// First bytes of a connection, with the version of the messages.
const MAGIC: [u8; 8] = *b"MCKPGv02";
/// First bytes of a connection that begins with an exchange of proofs.
const MAGIC_WITH_PROOF: [u8; 8] = *b"MCKPGs02";

/// Longest message without its length. A longer one closes the connection.
pub(crate) const MAX_FRAME: usize = 256 << 10;

/// Length below which received bytes are copied out of the buffer of their connection.
const COPIED: usize = 8 << 10;

/// Bytes of a [`Hello`].
pub(crate) const HELLO_BYTES: usize = 24;

/// Start of a connection: the processes at both ends, by their random numbers. A process that has
/// taken over the port of an earlier one closes the connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Hello {
    pub(crate) from: u64,
    pub(crate) to: u64,
    /// True if an exchange of proofs follows.
    pub(crate) has_proof: bool,
}

impl Hello {
    pub(crate) fn encode(self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..8].copy_from_slice(if self.has_proof { &MAGIC_WITH_PROOF } else { &MAGIC });
        bytes[8..16].copy_from_slice(&self.from.to_le_bytes());
        bytes[16..].copy_from_slice(&self.to.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; HELLO_BYTES]) -> Option<Self> {
        let (mark, mut rest) = bytes.split_first_chunk::<8>()?;
        let has_proof = *mark == MAGIC_WITH_PROOF;
        (has_proof || *mark == MAGIC).then(|| Self {
            from: rest.get_u64_le(),
            to: rest.get_u64_le(),
            has_proof,
        })
    }
}

/// Address of a communicator: the content of a participant's published endpoint.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Endpoint {
    /// Random number of the process.
    pub(crate) process: u64,
    /// Number of the communicator in the process.
    pub(crate) communicator: u32,
    pub(crate) host: String,
    pub(crate) port: u16,
    /// Name of the transfer engine.
    pub(crate) engine: String,
}

impl Endpoint {
    pub(crate) fn encode(&self) -> Bytes {
        let mut out = BytesMut::new();
        out.put_slice(&MAGIC);
        out.put_u64_le(self.process);
        out.put_u32_le(self.communicator);
        out.put_u16_le(self.port);
        for text in [&self.host, &self.engine] {
            out.put_u16_le(text.len() as u16);
            out.put_slice(text.as_bytes());
        }
        out.freeze()
    }

    /// Parses a published endpoint.
    ///
    /// # Errors
    /// `INVALID_VERSION` for the endpoint of another version or kind of data plane.
    pub(crate) fn decode(mut bytes: Bytes) -> Result<Self> {
        let rest = &mut bytes;
        if take::<8>(rest)? != MAGIC {
            return Err(Error::new(
                ErrorCode::InvalidVersion,
                "cannot use endpoint: it has another version; run one version on every rank",
            ));
        }
        let process = u64::from_le_bytes(take(rest)?);
        let communicator = u32::from_le_bytes(take(rest)?);
        let port = u16::from_le_bytes(take(rest)?);
        let mut text = || {
            let len = usize::from(u16::from_le_bytes(take(rest)?));
            let bytes = take_bytes(rest, len)?;
            String::from_utf8(bytes.into()).map_err(|_| malformed("text is not UTF-8"))
        };
        Ok(Self { process, communicator, port, host: text()?, engine: text()? })
    }
}

/// Attempt of the participants to work together. Attempts are ordered, and a later one replaces all
/// earlier ones.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub(crate) struct Round {
    /// Mask of the view ([`View::mask`](crate::view::View::mask)).
    pub(crate) mask: u64,
    /// Number of the attempt since the mask.
    pub(crate) number: u32,
    /// Active slots of the view that have failed in this attempt, as bits.
    pub(crate) absent: u64,
}

impl Round {
    fn encode(self, out: &mut BytesMut) {
        out.put_u64_le(self.mask);
        out.put_u32_le(self.number);
        out.put_u64_le(self.absent);
    }

    fn decode(rest: &mut Bytes) -> Result<Self> {
        Ok(Self {
            mask: u64::from_le_bytes(take(rest)?),
            number: u32::from_le_bytes(take(rest)?),
            absent: u64::from_le_bytes(take(rest)?),
        })
    }
}

/// Collective operation in a round.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Tag {
    /// Number of the operation in its group.
    pub(crate) operation: u64,
    pub(crate) round: Round,
    /// Digest of the call. Participants that call different operations find out by it.
    pub(crate) call: u64,
}

impl Tag {
    fn encode(self, out: &mut BytesMut) {
        out.put_u64_le(self.operation);
        self.round.encode(out);
        out.put_u64_le(self.call);
    }

    fn decode(rest: &mut Bytes) -> Result<Self> {
        Ok(Self {
            operation: u64::from_le_bytes(take(rest)?),
            round: Round::decode(rest)?,
            call: u64::from_le_bytes(take(rest)?),
        })
    }
}

/// Progress of a participant: the promise to finish no operation in a round before this one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Progress {
    pub(crate) round: Round,
    /// Number of the next operation. `None` before the participant has learnt it from the others.
    pub(crate) next: Option<u64>,
    /// Round in which the last operation was finished. `None` if the participant was left out of
    /// it, or has taken part in none.
    pub(crate) finished: Option<Round>,
}

/// Bytes of a message: in the message itself, or in the sender's staging memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Payload {
    Inline(Bytes),
    Staged(StagedDescriptor),
}

/// Range of a process's staging memory, for another process to read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct StagedDescriptor {
    pub(crate) address: u64,
    pub(crate) len: u64,
    /// Address of the stamp. The owner erases the stamp before the memory gets other bytes.
    pub(crate) stamp_at: u64,
    pub(crate) stamp: u64,
}

impl Payload {
    pub(crate) fn len(&self) -> u64 {
        match self {
            Payload::Inline(bytes) => bytes.len() as u64,
            Payload::Staged(descriptor) => descriptor.len,
        }
    }

    fn encode(&self, out: &mut BytesMut) {
        match self {
            Payload::Inline(bytes) => {
                out.put_u8(0);
                out.put_slice(bytes);
            }
            Payload::Staged(StagedDescriptor { address, len, stamp_at, stamp }) => {
                out.put_u8(1);
                for number in [address, len, stamp_at, stamp] {
                    out.put_u64_le(*number);
                }
            }
        }
    }

    fn decode(rest: &mut Bytes) -> Result<Self> {
        match take::<1>(rest)? {
            // A short payload is copied, so that it does not keep the whole buffer of the
            // connection.
            [0] if rest.len() < COPIED => Ok(Payload::Inline(Bytes::copy_from_slice(rest))),
            [0] => Ok(Payload::Inline(rest.split_off(0))),
            [1] => {
                let [address, len, stamp_at, stamp] = [take(rest)?, take(rest)?, take(rest)?, take(rest)?];
                let descriptor = StagedDescriptor {
                    address: u64::from_le_bytes(address),
                    len: u64::from_le_bytes(len),
                    stamp_at: u64::from_le_bytes(stamp_at),
                    stamp: u64::from_le_bytes(stamp),
                };
                let fits = descriptor.address.checked_add(descriptor.len).is_some();
                fits.then_some(Payload::Staged(descriptor))
                    .ok_or_else(|| malformed("the staged range is too long"))
            }
            [kind] => Err(malformed(format!("unknown kind of payload. kind={kind}"))),
        }
    }
}

/// Exchange of a buffer of expert parallelism.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ExchangeTag {
    /// Number of the buffer, the same on every rank.
    pub buffer: u64,
    /// Number of the round on the buffer. It never decreases.
    pub round: u64,
    /// Phase of the round.
    pub phase: u8,
}

/// Message to a communicator.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Message {
    Progress(Progress),
    /// Part of an operation's data for the receiver.
    Offer {
        tag: Tag,
        part: u8,
        payload: Payload,
    },
    /// The sender has all data of the operation, or (`false`) cannot continue it.
    Ready {
        tag: Tag,
        success: bool,
    },
    /// The sender has closed its communicator.
    Bye,
    /// Point-to-point message.
    Send {
        id: u64,
        payload: Payload,
    },
    /// The receiver has the bytes of a point-to-point message or an exchange, or refuses them.
    Taken {
        id: u64,
        success: bool,
    },
    Exchange {
        id: u64,
        tag: ExchangeTag,
        payload: Payload,
    },
}

impl Message {
    /// Returns the number of bytes of a tensor in the message.
    pub(crate) fn inline_len(&self) -> usize {
        match self {
            Self::Offer { payload: Payload::Inline(bytes), .. }
            | Self::Send { payload: Payload::Inline(bytes), .. }
            | Self::Exchange { payload: Payload::Inline(bytes), .. } => bytes.len(),
            _ => 0,
        }
    }

    /// Returns whether a process without operations in progress has to take the message at once.
    pub(crate) fn is_urgent(&self) -> bool {
        !matches!(
            self,
            Message::Offer { .. } | Message::Ready { .. } | Message::Send { .. } | Message::Taken { .. }
        )
    }
}

/// Frame of a connection.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Frame {
    Message(Envelope),
    /// Ring in shared memory, into which the sender writes further messages.
    Ring(FileAddress),
    /// Messages are in rings.
    Notice,
}

/// Message with its addresses.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Envelope {
    /// Number of the communicator in the receiving process.
    pub(crate) communicator: u32,
    /// Slot of the sender.
    pub(crate) slot: u8,
    pub(crate) message: Message,
}

impl Envelope {
    /// Encodes the frame, its length included.
    pub(crate) fn encode(&self) -> Bytes {
        let inline = self.message.inline_len();
        let mut out = BytesMut::with_capacity(96 + inline);
        out.put_u32_le(0);
        out.put_u32_le(self.communicator);
        out.put_u8(self.slot);
        match &self.message {
            Message::Progress(Progress { round, next, finished }) => {
                out.put_u8(1);
                round.encode(&mut out);
                out.put_u64_le(next.unwrap_or(u64::MAX));
                out.put_u8(finished.is_some().into());
                finished.unwrap_or_default().encode(&mut out);
            }
            Message::Offer { tag, part, payload } => {
                out.put_u8(2);
                tag.encode(&mut out);
                out.put_u8(*part);
                payload.encode(&mut out);
            }
            Message::Ready { tag, success } => {
                out.put_u8(3);
                tag.encode(&mut out);
                out.put_u8((*success).into());
            }
            Message::Bye => out.put_u8(4),
            Message::Send { id, payload } => {
                out.put_u8(5);
                out.put_u64_le(*id);
                payload.encode(&mut out);
            }
            Message::Taken { id, success } => {
                out.put_u8(6);
                out.put_u64_le(*id);
                out.put_u8((*success).into());
            }
            Message::Exchange { id, tag, payload } => {
                out.put_u8(7);
                out.put_u64_le(*id);
                out.put_u64_le(tag.buffer);
                out.put_u64_le(tag.round);
                out.put_u8(tag.phase);
                payload.encode(&mut out);
            }
        }
        let len = (out.len() - 4) as u32;
        out[..4].copy_from_slice(&len.to_le_bytes());
        out.freeze()
    }

    /// Decodes an encoded frame.
    ///
    /// # Errors
    /// A malformed frame.
    pub(crate) fn decode_frame(frame: Bytes) -> Result<Self> {
        let mut frame = frame;
        take::<4>(&mut frame)?;
        Self::decode(frame)
    }
}

/// Number of no communicator.
const CONNECTION: u32 = 0;

impl Frame {
    /// Encodes a frame that concerns the ring.
    pub(crate) fn encode(&self) -> Bytes {
        let mut out = BytesMut::new();
        match self {
            Frame::Message(envelope) => return envelope.encode(),
            Frame::Ring(address) => {
                out.put_u32_le(5 + FileAddress::BYTES as u32);
                out.put_u32_le(CONNECTION);
                out.put_u8(1);
                address.encode(&mut out);
            }
            Frame::Notice => {
                out.put_u32_le(5);
                out.put_u32_le(CONNECTION);
                out.put_u8(2);
            }
        }
        out.freeze()
    }

    /// Removes the next frame from the received bytes. Returns `None` if more bytes are needed.
    ///
    /// # Errors
    /// A malformed frame. The connection cannot be used any more.
    pub(crate) fn decode_next(received: &mut BytesMut) -> Result<Option<Self>> {
        let Some(head) = received.first_chunk::<4>() else { return Ok(None) };
        let len = u32::from_le_bytes(*head) as usize;
        if len > MAX_FRAME {
            return Err(malformed(format!("too long. len={len} max={MAX_FRAME}")));
        }
        if received.len() < 4 + len {
            received.reserve(4 + len - received.len());
            return Ok(None);
        }
        received.advance(4);
        let mut frame = received.split_to(len).freeze();
        if frame.first_chunk::<4>() != Some(&CONNECTION.to_le_bytes()) {
            return Envelope::decode(frame).map(|envelope| Some(Frame::Message(envelope)));
        }
        frame.advance(4);
        match take::<1>(&mut frame)? {
            [1] => Ok(Some(Frame::Ring(FileAddress::decode(&take(&mut frame)?)))),
            [2] => Ok(Some(Frame::Notice)),
            [kind] => Err(malformed(format!("unknown kind. kind={kind}"))),
        }
    }
}

impl Envelope {
    fn decode(mut frame: Bytes) -> Result<Self> {
        let rest = &mut frame;
        let communicator = u32::from_le_bytes(take(rest)?);
        let [slot] = take(rest)?;
        let [kind] = take(rest)?;
        if usize::from(slot) >= crate::view::MAX_RANKS {
            return Err(malformed(format!("no such slot. slot={slot}")));
        }
        let flag = |rest: &mut Bytes| Ok::<_, Error>(take::<1>(rest)? != [0]);
        let message = match kind {
            1 => Message::Progress(Progress {
                round: Round::decode(rest)?,
                next: Some(u64::from_le_bytes(take(rest)?)).filter(|next| *next != u64::MAX),
                finished: match flag(rest)? {
                    true => Some(Round::decode(rest)?),
                    false => Round::decode(rest).map(|_| None)?,
                },
            }),
            2 => {
                let tag = Tag::decode(rest)?;
                let [part] = take(rest)?;
                Message::Offer { tag, part, payload: Payload::decode(rest)? }
            }
            3 => Message::Ready { tag: Tag::decode(rest)?, success: flag(rest)? },
            4 => Message::Bye,
            5 => Message::Send { id: u64::from_le_bytes(take(rest)?), payload: Payload::decode(rest)? },
            6 => Message::Taken { id: u64::from_le_bytes(take(rest)?), success: flag(rest)? },
            7 => {
                let id = u64::from_le_bytes(take(rest)?);
                let tag = ExchangeTag {
                    buffer: u64::from_le_bytes(take(rest)?),
                    round: u64::from_le_bytes(take(rest)?),
                    phase: take::<1>(rest)?[0],
                };
                Message::Exchange { id, tag, payload: Payload::decode(rest)? }
            }
            _ => return Err(malformed(format!("unknown kind. kind={kind}"))),
        };
        Ok(Self { communicator, slot, message })
    }
}

fn take<const N: usize>(rest: &mut Bytes) -> Result<[u8; N]> {
    let bytes = *rest.first_chunk::<N>().ok_or_else(|| malformed("too short"))?;
    rest.advance(N);
    Ok(bytes)
}

fn take_bytes(rest: &mut Bytes, len: usize) -> Result<Bytes> {
    if rest.len() < len { Err(malformed("too short")) } else { Ok(rest.split_to(len)) }
}

fn malformed(reason: impl std::fmt::Display) -> Error {
    Error::new(ErrorCode::RpcFail, format!("cannot read message: {reason}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn round() -> impl Strategy<Value = Round> {
        any::<(u64, u32, u64)>().prop_map(|(mask, number, absent)| Round { mask, number, absent })
    }

    fn tag() -> impl Strategy<Value = Tag> {
        (any::<u64>(), round(), any::<u64>()).prop_map(|(operation, round, call)| Tag {
            operation,
            round,
            call,
        })
    }

    fn payload() -> impl Strategy<Value = Payload> {
        prop_oneof![
            prop::collection::vec(any::<u8>(), 0..300).prop_map(|bytes| Payload::Inline(bytes.into())),
            any::<(u64, u32, u64, u64)>().prop_map(|(address, len, stamp_at, stamp)| {
                Payload::Staged(StagedDescriptor { address: address >> 1, len: len.into(), stamp_at, stamp })
            }),
        ]
    }

    fn message() -> impl Strategy<Value = Message> {
        let exchange =
            any::<(u64, u64, u8)>().prop_map(|(buffer, round, phase)| ExchangeTag { buffer, round, phase });
        prop_oneof![
            (round(), prop::option::of(0..u64::MAX), prop::option::of(round()))
                .prop_map(|(round, next, finished)| Message::Progress(Progress { round, next, finished })),
            (tag(), any::<u8>(), payload()).prop_map(|(tag, part, payload)| Message::Offer {
                tag,
                part,
                payload
            }),
            (tag(), any::<bool>()).prop_map(|(tag, success)| Message::Ready { tag, success }),
            Just(Message::Bye),
            (any::<u64>(), payload()).prop_map(|(id, payload)| Message::Send { id, payload }),
            any::<(u64, bool)>().prop_map(|(id, success)| Message::Taken { id, success }),
            (any::<u64>(), exchange, payload()).prop_map(|(id, tag, payload)| Message::Exchange {
                id,
                tag,
                payload
            }),
        ]
    }

    fn frame() -> impl Strategy<Value = Frame> {
        let address = any::<(u32, u32, u64)>().prop_map(|(process, descriptor, secret)| FileAddress {
            process,
            descriptor,
            secret,
        });
        let envelope = (1u32.., 0u8..64, message()).prop_map(|(communicator, slot, message)| Envelope {
            communicator,
            slot,
            message,
        });
        prop_oneof![envelope.prop_map(Frame::Message), address.prop_map(Frame::Ring), Just(Frame::Notice)]
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

        #[test]
        fn messages_come_back_from_a_stream(
            messages in prop::collection::vec(frame(), 1..6),
            cut in 1usize..50,
        ) {
            let sent: Vec<Frame> = messages;
            for frame in &sent {
                if let Frame::Message(envelope) = frame {
                    prop_assert_eq!(&Envelope::decode_frame(envelope.encode()).unwrap(), envelope);
                }
            }
            let stream: Vec<u8> = sent.iter().flat_map(|frame| frame.encode()).collect();
            let (mut received, mut got) = (BytesMut::new(), Vec::new());
            for piece in stream.chunks(cut) {
                received.extend_from_slice(piece);
                while let Some(frame) = Frame::decode_next(&mut received).unwrap() {
                    got.push(frame);
                }
            }
            prop_assert_eq!(got, sent);
            prop_assert!(received.is_empty());
        }

        #[test]
        fn noise_is_refused_without_a_panic(noise in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut received = BytesMut::from(&noise[..]);
            while let Ok(Some(_)) = Frame::decode_next(&mut received) {}
            let _ = Envelope::decode_frame(Bytes::copy_from_slice(&noise));
            let _ = Endpoint::decode(noise.into());
        }

        #[test]
        fn endpoints_come_back(process: u64, communicator: u32, port: u16, host in "[a-z.]{0,20}", engine in "\\PC{0,30}") {
            let endpoint = Endpoint { process, communicator, host, port, engine };
            prop_assert_eq!(Endpoint::decode(endpoint.encode()).unwrap(), endpoint);
        }
    }

    #[test]
    fn a_hello_of_another_version_is_refused() {
        let hello = Hello { from: 1, to: 2, has_proof: true };
        let mut bytes = hello.encode();
        assert_eq!(Hello::decode(&bytes), Some(hello));
        bytes[7] += 1;
        assert_eq!(Hello::decode(&bytes), None);
    }
}
