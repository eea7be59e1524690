//! Parsers of bytes from other processes, for fuzz targets.

use std::fmt::Debug;

use bytes::{Bytes, BytesMut};

use crate::message::{self, Endpoint, Envelope, Frame, HELLO_BYTES};
use crate::protocol::{ToAgent, ToCoordinator};
use crate::wire::{self, ANSWER_LENGTH, Answer, HELLO_LENGTH, Message};

/// Parses the first bytes of a connection of the control plane, and the response to them.
///
/// # Panics
/// If a second encoding has another meaning.
pub fn control_hello(bytes: &[u8]) {
    if let Some(hello) = bytes.first_chunk::<HELLO_LENGTH>().and_then(wire::Hello::decode) {
        assert_eq!(wire::Hello::decode(&hello.encode()), Some(hello));
    }
    if let Some(answer) = bytes.first_chunk::<ANSWER_LENGTH>().and_then(Answer::decode) {
        assert_eq!(Answer::decode(&answer.encode()), Some(answer));
    }
}

/// Returns the messages to the coordinator at the start of a stream.
///
/// # Panics
/// If a second encoding has another meaning.
pub fn to_coordinator(stream: &[u8]) -> Vec<ToCoordinator> {
    control(stream)
}

/// Returns the messages to an agent at the start of a stream.
///
/// # Panics
/// If a second encoding has another meaning.
pub fn to_agent(stream: &[u8]) -> Vec<ToAgent> {
    control(stream)
}

fn control<M: Message + PartialEq + Debug>(mut stream: &[u8]) -> Vec<M> {
    let mut messages = Vec::new();
    while let Some((header, rest)) = stream.split_first_chunk::<4>()
        && let Ok(length) = wire::message_length(*header)
        && let Some((body, rest)) = rest.split_at_checked(length)
        && let Ok(message) = wire::decode::<M>(body)
    {
        let mut again = Vec::new();
        wire::encode(&message, &mut again);
        assert_eq!(wire::decode::<M>(&again[4..]).as_ref(), Ok(&message));
        messages.push(message);
        stream = rest;
    }
    messages
}

/// Parses a connection of the data plane, in pieces of `piece` bytes, its messages as those of a
/// ring, and the bytes as a published endpoint.
///
/// # Panics
/// If a second encoding has another meaning.
pub fn data_plane(stream: &[u8], piece: usize) {
    if let Some(hello) = stream.first_chunk::<HELLO_BYTES>().and_then(message::Hello::decode) {
        assert_eq!(message::Hello::decode(&hello.encode()), Some(hello));
    }
    if let Ok(endpoint) = Endpoint::decode(Bytes::copy_from_slice(stream)) {
        assert_eq!(Endpoint::decode(endpoint.encode()).ok(), Some(endpoint));
    }
    let mut received = BytesMut::new();
    for piece in stream.chunks(piece.max(1)) {
        received.extend_from_slice(piece);
        loop {
            match Frame::decode_next(&mut received) {
                Ok(Some(frame)) => {
                    let again = frame.encode();
                    if let Frame::Message(envelope) = &frame {
                        assert_eq!(Envelope::decode_frame(again.clone()).ok().as_ref(), Some(envelope));
                    }
                    assert_eq!(Frame::decode_next(&mut BytesMut::from(&again[..])).ok(), Some(Some(frame)));
                }
                Ok(None) => break,
                Err(_) => return,
            }
        }
    }
}
