//! struct_pack: encoding of values as message bodies.
//!
//! A body is the hash of its type, a byte of options if any are set, and the fields in order. All
//! lengths in a body have the same width, which its largest container determines. The decoder never
//! trusts a length: it checks each length against the remaining bytes before it allocates. A
//! hostile body can therefore cause an allocation of at most a small multiple of its size.
//!
//! Byte strings (`&[u8]`, `Vec<u8>`) have the type of strings: object keys are arbitrary bytes.
//! Text (`&str`, `String`) must be UTF-8.

mod values;

use std::fmt;

use mooncake_core::error::{Error, ErrorCode};

use super::type_signature::TypeSignature;

#[doc(hidden)]
pub use self::values::written_as;
pub use self::values::{Answer, Byte, List, Numbered, Pairs};

/// Maximum number of items in a list.
pub const MAX_ITEMS: usize = 1 << 20;

/// Bit of the hash that marks an option byte.
const OPTIONS_FOLLOW: u32 = 1;
/// Option bits: the total size (not used by these messages), the type signature, and the width of
/// lengths.
const OPTION_SIZE: u8 = 0b0000_0011;
const OPTION_SIGNATURE: u8 = 0b0000_0100;
const OPTION_WIDTH_SHIFT: u8 = 3;
const OPTION_UNKNOWN: u8 = 0b1110_0000;

/// A type that has a signature.
pub trait Wire {
    /// Signature of the type.
    const SIGNATURE: TypeSignature;
    /// Minimum length of a value in bytes; at least 1 for items of a list.
    const MIN_LEN: usize;
}

/// A value that can be encoded.
pub trait Pack: Wire {
    /// Returns the length of the longest container in the value, the value itself included. It
    /// determines the width of lengths.
    fn widest(&self) -> usize;
    /// Appends the value.
    fn pack(&self, out: &mut Writer<'_>);
}

/// A value that can be decoded from a body, from which it may borrow.
pub trait Unpack<'a>: Wire + Sized {
    /// Decodes the value.
    fn unpack(body: &mut Reader<'a>) -> Result<Self, PackError>;
}

/// Error of an invalid body.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PackError {
    /// The body ends too early.
    Truncated {
        /// Minimum length of the next field in bytes.
        needed: usize,
        /// Number of remaining bytes.
        left: usize,
    },
    /// The body has another type, most likely because the sender has another version.
    WrongType {
        /// Hash of the expected type.
        expected: u32,
        /// Hash in the body.
        found: u32,
        /// Signature in the body, in hexadecimal; empty if the body has none.
        spelling: String,
    },
    /// Number of bytes after the last field.
    Trailing(usize),
    /// Option byte with unknown bits.
    Options(u8),
    /// Boolean that is neither 0 nor 1.
    Bool(u8),
    /// Index of an unknown variant.
    Variant(u8),
    /// Number that is not in an enumeration.
    Enum {
        /// Name of the enumeration.
        name: &'static str,
        /// The number.
        value: i64,
    },
    /// Text that is not UTF-8.
    Utf8,
    /// Length of a list that exceeds [`MAX_ITEMS`].
    TooMany(u64),
}

impl fmt::Display for PackError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PackError::Truncated { needed, left } => {
                write!(
                    f,
                    "the body is truncated: the next field needs at least {needed} bytes, {left} remain"
                )
            }
            PackError::WrongType { expected, found, spelling } if spelling.is_empty() => {
                write!(f, "type hash {found:#010x} where {expected:#010x} was expected")
            }
            PackError::WrongType { expected, found, spelling } => {
                write!(f, "type hash {found:#010x} (spelled {spelling}) where {expected:#010x} was expected")
            }
            PackError::Trailing(count) => write!(f, "{count} bytes after the end of the message"),
            PackError::Options(byte) => write!(f, "option byte {byte:#04x} has unknown bits"),
            PackError::Bool(byte) => write!(f, "invalid boolean {byte}: expected 0 or 1"),
            PackError::Variant(index) => write!(f, "invalid variant index {index}"),
            PackError::Enum { name, value } => write!(f, "invalid {name}: {value}"),
            PackError::Utf8 => f.write_str("invalid UTF-8 in a text"),
            PackError::TooMany(count) => write!(f, "a list has {count} items; the maximum is {MAX_ITEMS}"),
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

/// Appends `value` as a body of minimum length.
pub fn encode<T: Pack + ?Sized>(value: &T, out: &mut Vec<u8>) {
    const { assert!(T::SIGNATURE.hash() & OPTIONS_FOLLOW == 0) };
    let width = Width::of(value.widest());
    if width == Width::One {
        out.extend_from_slice(&const { T::SIGNATURE.hash() }.to_le_bytes());
    } else {
        out.extend_from_slice(&const { T::SIGNATURE.hash() | OPTIONS_FOLLOW }.to_le_bytes());
        out.push((width as u8) << OPTION_WIDTH_SHIFT);
    }
    value.pack(&mut Writer { out, width, fits: true });
}

/// Appends a response or a list of responses item by item, without an intermediate copy.
///
/// `each` appends the value of one item; if it fails, its bytes are removed. A length in a value
/// may be at least 255, or as large as `items` announces. Returns `false` if one exceeded the width
/// of this body, which is then invalid.
#[must_use]
pub(super) fn encode_answers<T: Wire>(
    items: Items,
    out: &mut Vec<u8>,
    mut each: impl FnMut(usize, &mut Writer<'_>) -> Result<(), Error>,
) -> bool {
    let (hash, count, longest) = match items {
        Items::One { longest } => (const { Answer::<T>::SIGNATURE.hash() }, 1, longest),
        Items::Many(count) => (const { Vec::<Answer<T>>::SIGNATURE.hash() }, count, count),
    };
    let width = Width::of(longest);
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

/// Number of responses in a body.
#[derive(Clone, Copy, Debug)]
pub(super) enum Items {
    /// A single response, not in a list, with lists of at most this length.
    One {
        /// Maximum length of a list in the response.
        longest: usize,
    },
    /// A list of this many responses.
    Many(usize),
}

/// Appends `value` as a body with its type signature, as in every message of Mooncake C++.
pub fn encode_spelled<T: Pack + ?Sized>(value: &T, out: &mut Vec<u8>) {
    let width = Width::of(value.widest());
    out.extend_from_slice(&const { T::SIGNATURE.hash() | OPTIONS_FOLLOW }.to_le_bytes());
    out.push((width as u8) << OPTION_WIDTH_SHIFT | OPTION_SIGNATURE);
    out.extend_from_slice(const { T::SIGNATURE }.as_bytes());
    out.push(0);
    value.pack(&mut Writer { out, width, fits: true });
}

/// Decodes a body that consists of one `T`, with or without its signature.
pub fn decode<'a, T: Unpack<'a>>(body: &'a [u8]) -> Result<T, PackError> {
    let mut reader = Reader::open(body, const { T::SIGNATURE.hash() })?;
    let value = T::unpack(&mut reader)?;
    reader.finish()?;
    Ok(value)
}

/// Decodes the empty body of a call without arguments.
pub(super) fn decode_nothing<'a, T: Unpack<'a>>(body: &'a [u8]) -> Result<T, PackError> {
    let mut reader = Reader { rest: &[], width: Width::One };
    if body.is_empty() { T::unpack(&mut reader) } else { Err(PackError::Trailing(body.len())) }
}

/// Width of the lengths in bytes.
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

/// Output of the encoder.
#[derive(Debug)]
pub struct Writer<'o> {
    out: &'o mut Vec<u8>,
    width: Width,
    /// True while every length so far fits the width.
    fits: bool,
}

impl Writer<'_> {
    /// Appends bytes unchanged.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.out.extend_from_slice(bytes);
    }

    /// Appends one byte.
    pub fn byte(&mut self, byte: u8) {
        self.out.push(byte);
    }

    /// Appends the length of a container.
    pub fn length(&mut self, len: usize) {
        // `widest` makes every length of a value fit; values that are appended item by item are
        // checked at the end.
        self.fits &= Width::of(len) as u8 <= self.width as u8;
        match self.width {
            Width::One => self.out.push(len as u8),
            Width::Two => self.out.extend_from_slice(&(len as u16).to_le_bytes()),
            Width::Four => self.out.extend_from_slice(&(len as u32).to_le_bytes()),
            Width::Eight => self.out.extend_from_slice(&(len as u64).to_le_bytes()),
        }
    }

    /// Appends a list of at most `most` items, whose values `each` appends, until `each` fails for
    /// the first time. Removes the bytes of the failed item. Returns the length of the list.
    pub fn list_until_failure(
        &mut self,
        most: usize,
        mut each: impl FnMut(usize, &mut Self) -> Result<(), Error>,
    ) -> usize {
        let length_at = self.out.len();
        self.length(most);
        let mut count = 0;
        while count < most {
            let begun = self.out.len();
            if each(count, self).is_err() {
                self.out.truncate(begun);
                break;
            }
            count += 1;
        }
        let length = (count as u64).to_le_bytes();
        let width = 1 << self.width as usize;
        self.out[length_at..length_at + width].copy_from_slice(&length[..width]);
        count
    }
}

/// The undecoded rest of a body.
#[derive(Clone, Debug)]
pub struct Reader<'a> {
    rest: &'a [u8],
    width: Width,
}

impl<'a> Reader<'a> {
    /// Checks the header of a body against the expected hash.
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
            if options & OPTION_SIGNATURE != 0 {
                let end = reader.rest.iter().position(|byte| *byte == 0);
                let end = end.ok_or(PackError::Truncated { needed: 1, left: 0 })?;
                spelling = reader.take(end)?;
                reader.take(1)?;
            }
        }
        if found == expected {
            return Ok(reader);
        }
        let shown = &spelling[..spelling.len().min(TypeSignature::CAPACITY)];
        let spelling = shown.iter().map(|byte| format!("{byte:02x}")).collect();
        Err(PackError::WrongType { expected, found, spelling })
    }

    fn finish(self) -> Result<(), PackError> {
        if self.rest.is_empty() { Ok(()) } else { Err(PackError::Trailing(self.rest.len())) }
    }

    /// Takes the next `count` bytes.
    pub fn take(&mut self, count: usize) -> Result<&'a [u8], PackError> {
        let (head, rest) = self.rest.split_at_checked(count).ok_or_else(|| self.too_short(count))?;
        self.rest = rest;
        Ok(head)
    }

    /// Takes the next `N` bytes.
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], PackError> {
        let (head, rest) = self.rest.split_first_chunk::<N>().ok_or_else(|| self.too_short(N))?;
        self.rest = rest;
        Ok(*head)
    }

    /// Decodes a length without checking it.
    fn length(&mut self) -> Result<u64, PackError> {
        Ok(match self.width {
            Width::One => u64::from(u8::from_le_bytes(self.array()?)),
            Width::Two => u64::from(u16::from_le_bytes(self.array()?)),
            Width::Four => u64::from(u32::from_le_bytes(self.array()?)),
            Width::Eight => u64::from_le_bytes(self.array()?),
        })
    }

    /// Decodes the length of a list whose items take at least `min_len` bytes each, and checks it
    /// against the remaining bytes.
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

/// Implements the three traits for a struct whose fields are encoded in the given order. The
/// lifetime of borrowed fields is always named `'a`. The keyword before the name distinguishes a
/// struct from an argument list.
#[doc(hidden)]
#[macro_export]
macro_rules! wire_fields {
    (
        $spelled:ident $name:ty { $($field:ident: $type:ty),* $(,)? }
        $(without { $($absent:ident: $value:expr),* })?
    ) => {
        #[allow(unused_lifetimes)]
        impl<'a> $crate::pack::Wire for $name {
            const SIGNATURE: $crate::type_signature::TypeSignature = $crate::type_signature::TypeSignature::$spelled(&[
                $(<$type as $crate::pack::Wire>::SIGNATURE),*
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
                Ok(Self {
                    $($field: $crate::pack::Unpack::unpack(_body)?,)*
                    $($($absent: $value,)*)?
                })
            }
        }
    };
}
#[doc(hidden)]
pub use wire_fields;

#[cfg(test)]
mod tests;
