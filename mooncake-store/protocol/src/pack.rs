//! struct_pack: how one value becomes a message body and back.
//!
//! A body is the hash of its type, a byte of options if any are set, and the fields in order. All lengths in a body
//! share one width, chosen by its largest container. Reading never trusts a length: it is held against the bytes that
//! are left before anything is allocated, so what a hostile body can make us allocate is a small multiple of its size.
//!
//! Byte strings (`&[u8]`, `Vec<u8>`) are spelled as strings: object keys are any bytes. Text (`&str`, `String`) must
//! be UTF-8.

mod values;

use std::fmt;

use mooncake_core::error::{Error, ErrorCode};

use super::literal::Literal;

#[doc(hidden)]
pub use self::values::written_as;
pub use self::values::{Answer, Byte, List, Numbered, Pairs};

/// Most items one list of a message may have.
pub const MAX_ITEMS: usize = 1 << 20;

/// Set in the hash when an option byte follows.
const OPTIONS_FOLLOW: u32 = 1;
/// Option bits: a field with the total size (no message of ours has one), the literal, and the width of lengths.
const OPTION_SIZE: u8 = 0b0000_0011;
const OPTION_LITERAL: u8 = 0b0000_0100;
const OPTION_WIDTH_SHIFT: u8 = 3;
const OPTION_UNKNOWN: u8 = 0b1110_0000;

/// A type with a place in the type language.
pub trait Wire {
    /// How the type is spelled.
    const LITERAL: Literal;
    /// Fewest bytes a value takes; at least 1 for whatever may stand in a list.
    const MIN_LEN: usize;
}

/// A value that can be written.
pub trait Pack: Wire {
    /// Length of the longest container in it, itself included; decides how wide lengths are written.
    fn widest(&self) -> usize;
    /// Appends the value.
    fn pack(&self, out: &mut Writer<'_>);
}

/// A value that can be read from a body it may borrow from.
pub trait Unpack<'a>: Wire + Sized {
    /// Reads the value.
    fn unpack(body: &mut Reader<'a>) -> Result<Self, PackError>;
}

/// Why a body is not the message it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PackError {
    /// It ends too early.
    Truncated {
        /// Bytes the next field takes at least.
        needed: usize,
        /// Bytes there were.
        left: usize,
    },
    /// It holds another type: most likely a peer of another version.
    WrongType {
        /// Hash of the type that was expected.
        expected: u32,
        /// Hash it carries.
        found: u32,
        /// The spelling it carries, in hex; empty if it carries none.
        spelling: String,
    },
    /// Bytes follow the last field; their number.
    Trailing(usize),
    /// An option byte with bits no message of ours uses.
    Options(u8),
    /// A truth value that is neither 0 nor 1.
    Bool(u8),
    /// A variant's index beyond its alternatives.
    Variant(u8),
    /// A number that is none of an enumeration's.
    Enum {
        /// The enumeration.
        name: &'static str,
        /// The number.
        value: i64,
    },
    /// A text that is not UTF-8.
    Utf8,
    /// A list longer than [`MAX_ITEMS`]; the length it claims.
    TooMany(u64),
}

impl fmt::Display for PackError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PackError::Truncated { needed, left } => {
                write!(f, "the body ends early: the next field takes {needed} bytes or more, {left} are left")
            }
            PackError::WrongType { expected, found, spelling } if spelling.is_empty() => {
                write!(f, "type hash {found:#010x} where {expected:#010x} was expected")
            }
            PackError::WrongType { expected, found, spelling } => {
                write!(f, "type hash {found:#010x} (spelled {spelling}) where {expected:#010x} was expected")
            }
            PackError::Trailing(count) => write!(f, "{count} bytes after the end of the message"),
            PackError::Options(byte) => write!(f, "option byte {byte:#04x} has bits no message uses"),
            PackError::Bool(byte) => write!(f, "{byte} where a truth value (0 or 1) was expected"),
            PackError::Variant(index) => write!(f, "variant index {index} is beyond the alternatives"),
            PackError::Enum { name, value } => write!(f, "{value} is no {name}"),
            PackError::Utf8 => f.write_str("a text is not UTF-8"),
            PackError::TooMany(count) => write!(f, "a list of {count} items; the most is {MAX_ITEMS}"),
        }
    }
}

impl std::error::Error for PackError {}

impl From<PackError> for Error {
    fn from(error: PackError) -> Self {
        let code = match error {
            PackError::WrongType { .. } => ErrorCode::InvalidVersion,
            _ => ErrorCode::DeserializeFail,
        };
        Error::new(code, error.to_string())
    }
}

/// Appends `value` as a body, as short as possible.
pub fn encode<T: Pack + ?Sized>(value: &T, out: &mut Vec<u8>) {
    const { assert!(T::LITERAL.hash() & OPTIONS_FOLLOW == 0) };
    let width = Width::of(value.widest());
    if width == Width::One {
        out.extend_from_slice(&const { T::LITERAL.hash() }.to_le_bytes());
    } else {
        out.extend_from_slice(&const { T::LITERAL.hash() | OPTIONS_FOLLOW }.to_le_bytes());
        out.push((width as u8) << OPTION_WIDTH_SHIFT);
    }
    value.pack(&mut Writer { out, width, fits: true });
}

/// Appends an answer, or a list of them, that is written as it comes and never kept. `each` appends the value of one item; what it
/// appended before it failed is taken back. A length in a value may be 255 at least; `false` when one was longer than this body
/// can say, which nobody can read then.
#[must_use]
pub(super) fn encode_answers<T: Wire>(
    items: Items,
    out: &mut Vec<u8>,
    mut each: impl FnMut(usize, &mut Writer<'_>) -> Result<(), Error>,
) -> bool {
    let (hash, count) = match items {
        Items::One => (const { Answer::<T>::LITERAL.hash() }, 1),
        Items::Many(count) => (const { Vec::<Answer<T>>::LITERAL.hash() }, count),
    };
    let width = Width::of(count);
    if width == Width::One {
        out.extend_from_slice(&hash.to_le_bytes());
    } else {
        out.extend_from_slice(&(hash | OPTIONS_FOLLOW).to_le_bytes());
        out.push((width as u8) << OPTION_WIDTH_SHIFT);
    }
    let mut writer = Writer { out, width, fits: true };
    if let Items::Many(count) = items {
        writer.length(count);
    }
    for index in 0..count {
        let begun = writer.out.len();
        true.pack(&mut writer);
        if let Err(error) = each(index, &mut writer) {
            writer.out.truncate(begun);
            false.pack(&mut writer);
            error.code().pack(&mut writer);
        }
    }
    writer.fits
}

/// How many answers a body holds.
#[derive(Clone, Copy, Debug)]
pub(super) enum Items {
    /// One that is no list.
    One,
    /// A list of so many.
    Many(usize),
}

/// Appends `value` as a body that spells its type out, as the existing system does in every message.
pub fn encode_spelled<T: Pack + ?Sized>(value: &T, out: &mut Vec<u8>) {
    let width = Width::of(value.widest());
    out.extend_from_slice(&const { T::LITERAL.hash() | OPTIONS_FOLLOW }.to_le_bytes());
    out.push((width as u8) << OPTION_WIDTH_SHIFT | OPTION_LITERAL);
    out.extend_from_slice(const { T::LITERAL }.as_bytes());
    out.push(0);
    value.pack(&mut Writer { out, width, fits: true });
}

/// Reads a body that must be a `T` and nothing else, spelled out or not.
pub fn decode<'a, T: Unpack<'a>>(body: &'a [u8]) -> Result<T, PackError> {
    let mut reader = Reader::open(body, const { T::LITERAL.hash() })?;
    let value = T::unpack(&mut reader)?;
    reader.finish()?;
    Ok(value)
}

/// Reads the body of a call without arguments, which has none.
pub(super) fn decode_nothing<'a, T: Unpack<'a>>(body: &'a [u8]) -> Result<T, PackError> {
    let mut reader = Reader { rest: &[], width: Width::One };
    if body.is_empty() { T::unpack(&mut reader) } else { Err(PackError::Trailing(body.len())) }
}

/// How many bytes a length takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Width {
    One = 0,
    Two = 1,
    Four = 2,
    Eight = 3,
}

impl Width {
    fn of(longest: usize) -> Self {
        match longest as u64 {
            0..=0xff => Width::One,
            0x100..=0xffff => Width::Two,
            0x1_0000..=0xffff_ffff => Width::Four,
            _ => Width::Eight,
        }
    }
}

/// Where values are appended.
#[derive(Debug)]
pub struct Writer<'o> {
    out: &'o mut Vec<u8>,
    width: Width,
    /// Every length so far could be written.
    fits: bool,
}

impl Writer<'_> {
    /// Appends bytes as they are.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.out.extend_from_slice(bytes);
    }

    /// Appends one byte.
    pub fn byte(&mut self, byte: u8) {
        self.out.push(byte);
    }

    /// Appends the length of a container.
    pub fn length(&mut self, len: usize) {
        // `widest` makes the width fit every length of a value; what is written as it comes is looked at in the end.
        self.fits &= Width::of(len) as u8 <= self.width as u8;
        match self.width {
            Width::One => self.out.push(len as u8),
            Width::Two => self.out.extend_from_slice(&(len as u16).to_le_bytes()),
            Width::Four => self.out.extend_from_slice(&(len as u32).to_le_bytes()),
            Width::Eight => self.out.extend_from_slice(&(len as u64).to_le_bytes()),
        }
    }
}

/// What is left of a body.
#[derive(Clone, Debug)]
pub struct Reader<'a> {
    rest: &'a [u8],
    width: Width,
}

impl<'a> Reader<'a> {
    /// Checks the head of a body against the hash it should have.
    fn open(body: &'a [u8], expected: u32) -> Result<Self, PackError> {
        let mut reader = Self { rest: body, width: Width::One };
        let head = u32::from_le_bytes(reader.array()?);
        let found = head & !OPTIONS_FOLLOW;
        let mut spelling: &[u8] = &[];
        if head & OPTIONS_FOLLOW != 0 {
            let [options] = reader.array()?;
            if options & (OPTION_SIZE | OPTION_UNKNOWN) != 0 {
                return Err(PackError::Options(options));
            }
            reader.width = match options >> OPTION_WIDTH_SHIFT {
                0 => Width::One,
                1 => Width::Two,
                2 => Width::Four,
                _ => Width::Eight,
            };
            if options & OPTION_LITERAL != 0 {
                let end = reader.rest.iter().position(|byte| *byte == 0);
                let end = end.ok_or(PackError::Truncated { needed: 1, left: 0 })?;
                spelling = reader.take(end)?;
                reader.take(1)?;
            }
        }
        if found == expected {
            return Ok(reader);
        }
        let shown = &spelling[..spelling.len().min(Literal::CAPACITY)];
        let spelling = shown.iter().map(|byte| format!("{byte:02x}")).collect();
        Err(PackError::WrongType { expected, found, spelling })
    }

    fn finish(self) -> Result<(), PackError> {
        if self.rest.is_empty() { Ok(()) } else { Err(PackError::Trailing(self.rest.len())) }
    }

    /// The next `count` bytes.
    pub fn take(&mut self, count: usize) -> Result<&'a [u8], PackError> {
        let (head, rest) = self.rest.split_at_checked(count).ok_or_else(|| self.too_short(count))?;
        self.rest = rest;
        Ok(head)
    }

    /// The next `N` bytes.
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], PackError> {
        let (head, rest) = self.rest.split_first_chunk::<N>().ok_or_else(|| self.too_short(N))?;
        self.rest = rest;
        Ok(*head)
    }

    /// A length, as it stands.
    fn length(&mut self) -> Result<u64, PackError> {
        Ok(match self.width {
            Width::One => u64::from(u8::from_le_bytes(self.array()?)),
            Width::Two => u64::from(u16::from_le_bytes(self.array()?)),
            Width::Four => u64::from(u32::from_le_bytes(self.array()?)),
            Width::Eight => u64::from_le_bytes(self.array()?),
        })
    }

    /// The length of a list whose items take at least `min_len` bytes each, held against what is left.
    fn count(&mut self, min_len: usize) -> Result<usize, PackError> {
        let claimed = self.length()?;
        if claimed > MAX_ITEMS as u64 {
            return Err(PackError::TooMany(claimed));
        }
        let count = claimed as usize;
        let needed = count.saturating_mul(min_len.max(1));
        if needed > self.rest.len() { Err(self.too_short(needed)) } else { Ok(count) }
    }

    #[cold]
    fn too_short(&self, needed: usize) -> PackError {
        PackError::Truncated { needed, left: self.rest.len() }
    }
}

/// Implements the three traits for a struct whose members go on the wire in the order given. The lifetime of what
/// is borrowed from the body is named `'a` everywhere; `spelled` says whether it is a struct or an argument list.
#[doc(hidden)]
#[macro_export]
macro_rules! wire_fields {
    ($spelled:ident $name:ty { $($field:ident: $type:ty),* $(,)? }) => {
        #[allow(unused_lifetimes)]
        impl<'a> $crate::pack::Wire for $name {
            const LITERAL: $crate::literal::Literal = $crate::literal::Literal::$spelled(&[
                $(<$type as $crate::pack::Wire>::LITERAL),*
            ]);
            const MIN_LEN: usize = 0 $(+ <$type as $crate::pack::Wire>::MIN_LEN)*;
        }

        #[allow(unused_lifetimes)]
        impl<'a> $crate::pack::Pack for $name {
            fn widest(&self) -> usize {
                0usize $(.max($crate::pack::Pack::widest(&self.$field)))*
            }

            fn pack(&self, _out: &mut $crate::pack::Writer<'_>) {
                $($crate::pack::Pack::pack(&self.$field, _out);)*
            }
        }

        impl<'a> $crate::pack::Unpack<'a> for $name {
            fn unpack(
                _body: &mut $crate::pack::Reader<'a>,
            ) -> Result<Self, $crate::pack::PackError> {
                Ok(Self { $($field: $crate::pack::Unpack::unpack(_body)?,)* })
            }
        }
    };
}
#[doc(hidden)]
pub use wire_fields;

#[cfg(test)]
mod tests;
