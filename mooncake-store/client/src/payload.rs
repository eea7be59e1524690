//! Values to store, in memory of any kind, and the outcome of a put.

use bytes::Bytes;
use mooncake_core::{Error, Result};
use mooncake_transport::{Slice, Transport};

use crate::buffers::Outgoing;
use crate::checksum::Sum;

/// Outcome of a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutOutcome {
    /// The object is stored and readable.
    Stored,
    /// The key exists already, or another client is writing it. Nothing was written.
    Existed,
}

/// Bytes to store, borrowed from the caller.
#[derive(Debug)]
pub enum Payload<'a, T: Transport> {
    /// Memory that is not registered. The bytes are copied once, into the local buffer.
    Bytes(&'a [u8]),
    /// Immutable memory that is not registered. The bytes are sent without a copy if the transport
    /// can.
    Shared(&'a Bytes),
    /// Registered memory. The bytes are sent without a copy.
    Slice(&'a Slice<T>),
    /// Registered memory in several consecutive pieces.
    Pieces(&'a [Slice<T>]),
}

impl<T: Transport> Clone for Payload<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T: Transport> Copy for Payload<'_, T> {}

/// Values that a put accepts: bytes, strings, [`Bytes`], registered memory, and pieces of
/// registered memory. [`Payload`] describes how the bytes of each are sent.
pub trait AsPayload<T: Transport> {
    /// Returns the bytes to store.
    fn as_payload(&self) -> Payload<'_, T>;
}

impl<T: Transport> AsPayload<T> for Payload<'_, T> {
    fn as_payload(&self) -> Payload<'_, T> {
        *self
    }
}

impl<T: Transport, V: AsPayload<T> + ?Sized> AsPayload<T> for &V {
    fn as_payload(&self) -> Payload<'_, T> {
        (**self).as_payload()
    }
}

/// Implements [`AsPayload`] for types that borrow the content of the variant.
macro_rules! payloads {
    ($([$($generics:tt)*] $type:ty => $variant:ident;)*) => {$(
        impl<T: Transport, $($generics)*> AsPayload<T> for $type {
            fn as_payload(&self) -> Payload<'_, T> {
                Payload::$variant(self.as_ref())
            }
        }
    )*};
}

payloads! {
    [] [u8] => Bytes;
    [] str => Bytes;
    [] Vec<u8> => Bytes;
    [] String => Bytes;
    [] Box<[u8]> => Bytes;
    [const N: usize] [u8; N] => Bytes;
    [] [Slice<T>] => Pieces;
    [] Vec<Slice<T>> => Pieces;
    [const N: usize] [Slice<T>; N] => Pieces;
}

impl<T: Transport> AsPayload<T> for Bytes {
    fn as_payload(&self) -> Payload<'_, T> {
        Payload::Shared(self)
    }
}

impl<T: Transport> AsPayload<T> for Slice<T> {
    fn as_payload(&self) -> Payload<'_, T> {
        Payload::Slice(self)
    }
}

impl<T: Transport> Payload<'_, T> {
    pub(crate) fn len(&self) -> usize {
        match self {
            Payload::Bytes(bytes) => bytes.len(),
            Payload::Shared(bytes) => bytes.len(),
            Payload::Slice(slice) => slice.len(),
            Payload::Pieces(slices) => slices.iter().map(Slice::len).sum(),
        }
    }

    /// Returns the bytes if they have to be copied to the local buffer.
    pub(crate) fn staged(&self, needs_registration: bool) -> Option<&[u8]> {
        match *self {
            Payload::Bytes(bytes) => Some(bytes),
            Payload::Shared(bytes) if needs_registration => Some(bytes),
            Payload::Shared(_) | Payload::Slice(_) | Payload::Pieces(_) => None,
        }
    }

    /// Copies bytes of the value to `into`, beginning at offset `from`.
    pub(crate) fn copy_to(&self, mut from: usize, mut into: &mut [u8]) -> Result<()> {
        let whole = match *self {
            Payload::Bytes(bytes) => Some(bytes),
            Payload::Shared(bytes) => Some(&bytes[..]),
            Payload::Slice(slice) => return slice.copy_to(from, into),
            Payload::Pieces(_) => None,
        };
        if let Some(bytes) = whole {
            let some = bytes.get(from..from + into.len());
            into.copy_from_slice(some.ok_or_else(|| Error::internal("a part beyond a value"))?);
            return Ok(());
        }
        let Payload::Pieces(slices) = *self else { return Ok(()) };
        for slice in slices {
            let some = slice.len().saturating_sub(from).min(into.len());
            let (front, rest) = into.split_at_mut(some);
            if some > 0 {
                slice.copy_to(from, front)?;
            }
            (from, into) = (from.saturating_sub(slice.len()), rest);
        }
        Ok(())
    }

    /// Computes the checksum of the value.
    pub(crate) fn checksum(&self) -> Result<u64> {
        let mut sum = Sum::new();
        match *self {
            Payload::Bytes(bytes) => sum.bytes(bytes),
            Payload::Shared(bytes) => sum.bytes(bytes),
            Payload::Slice(slice) => sum.slice(slice)?,
            Payload::Pieces(slices) => slices.iter().try_for_each(|slice| sum.slice(slice))?,
        }
        Ok(sum.value())
    }

    /// Returns the number of pieces that are sent without a copy.
    pub(crate) fn pieces(&self) -> usize {
        match *self {
            Payload::Pieces(slices) => slices.len(),
            _ => 1,
        }
    }

    /// Returns the length of one piece.
    pub(crate) fn piece_len(&self, piece: usize) -> usize {
        match *self {
            Payload::Pieces(slices) => slices.get(piece).map_or(0, Slice::len),
            _ => self.len(),
        }
    }

    /// Returns one piece if it is sent without a copy.
    pub(crate) fn direct(&self, piece: usize, needs_registration: bool) -> Option<Outgoing<T>> {
        match *self {
            Payload::Slice(slice) => Some(Outgoing::Slice(slice.clone())),
            Payload::Pieces(slices) => slices.get(piece).cloned().map(Outgoing::Slice),
            Payload::Shared(bytes) if !needs_registration => Some(Outgoing::Plain(bytes.clone())),
            Payload::Shared(_) | Payload::Bytes(_) => None,
        }
    }
}

/// Object to store, with its key.
#[derive(Debug)]
pub(crate) struct Item<'a, T: Transport> {
    pub(crate) key: &'a [u8],
    pub(crate) value: Payload<'a, T>,
}
