//! struct_pack: encoding of values as message bodies.
//!
//! A body is the hash of its type, a byte of options if any are set, and the fields in order. All
//! lengths in a body have the same width, which its largest container determines. The decoder never
//! trusts a length: it checks each length against the remaining bytes before it allocates. A
//! hostile body can therefore cause an allocation of at most a small multiple of its size.
//!
//! Byte strings (`&[u8]`, `Vec<u8>`) have the type of strings: object keys are arbitrary bytes.
//! Text (`&str`, `String`) must be UTF-8.

mod body;
pub mod members;
mod values;

use std::fmt;

use mooncake_core::error::{Error, ErrorCode};

use super::type_signature::TypeSignature;

pub(crate) use self::body::{
    Items, decode_nothing, encode_answers, encode_reply, encode_spelled_ordinary, has_total, hash_of,
    is_spelled,
};
pub use self::body::{decode, encode, encode_spelled, wide_len};
#[doc(hidden)]
pub use self::values::written_as;
pub use self::values::{Answer, Byte, List, Numbered, Pairs};

/// Maximum number of items in a list.
pub const MAX_ITEMS: usize = 1 << 20;

/// Maximum length of the body of a message in bytes, unless a port has another one.
pub const MAX_BODY: usize = 64 << 20;

/// Bit of the hash that marks an option byte.
const OPTIONS_FOLLOW: u32 = 1;
/// Option bits: the width of the total length, the type signature, and the width of lengths. The
/// other bits have no meaning.
const OPTION_TOTAL: u8 = 0b0000_0011;
const OPTION_SIGNATURE: u8 = 0b0000_0100;
const OPTION_WIDTH: u8 = 0b0001_1000;
const OPTION_WIDTH_SHIFT: u8 = 3;

/// A type that has a signature.
pub trait Wire {
    /// Signature of the type.
    const SIGNATURE: TypeSignature;
    /// Minimum length of a value in bytes; at least 1 for items of a list.
    const MIN_LEN: usize;
    /// Versions of the compatible fields in the type, as a set of bits.
    const VERSIONS: u64 = 0;
}

/// Returns the bit of a version of compatible fields in [`Wire::VERSIONS`].
pub const fn version_bit(version: u8) -> u64 {
    assert!(version > 0 && version < 64, "versions of compatible fields are between 1 and 63");
    1 << version
}

/// A value that can be encoded.
pub trait Pack: Wire {
    /// Returns the length of the longest container in the value, the value itself included. It
    /// determines the width of lengths.
    fn widest(&self) -> usize;
    /// Appends the value without its compatible fields.
    fn pack(&self, out: &mut Writer<'_>);

    /// Returns whether a compatible field is set.
    fn has_members(&self) -> bool {
        false
    }

    /// Appends the compatible fields of one version.
    fn pack_members(&self, _version: u8, _out: &mut Writer<'_>) {}
}

/// A value that can be decoded from a body, from which it may borrow.
pub trait Unpack<'a>: Wire + Sized {
    /// Decodes the value without its compatible fields.
    fn unpack(body: &mut Reader<'a>) -> Result<Self, PackError>;

    /// Decodes the compatible fields of one version.
    fn unpack_members(&mut self, _version: u8, _body: &mut Reader<'a>) -> Result<(), PackError> {
        Ok(())
    }
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

/// Width of the lengths in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Width {
    One = 0,
    Two = 1,
    Four = 2,
    Eight = 3,
}

impl Width {
    #[inline]
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
    #[inline]
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.out.extend_from_slice(bytes);
    }

    /// Appends one byte.
    #[inline]
    pub fn byte(&mut self, byte: u8) {
        self.out.push(byte);
    }

    /// Appends the length of a container.
    #[inline]
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

    /// Returns the number of bytes in the output, with those before the value.
    pub fn position(&self) -> usize {
        self.out.len()
    }

    /// Appends a list of at most `most` items, whose values `fill` appends. `fill` returns their
    /// number.
    pub fn list(&mut self, most: usize, fill: impl FnOnce(&mut Self) -> usize) {
        let length_at = self.out.len();
        self.length(most);
        let count = fill(self);
        self.fits &= count <= most;
        self.set_length(length_at, count);
    }

    fn set_length(&mut self, at: usize, count: usize) {
        let length = (count as u64).to_le_bytes();
        let width = 1 << self.width as usize;
        self.out[at..at + width].copy_from_slice(&length[..width]);
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
        self.set_length(length_at, count);
        count
    }
}

/// The undecoded rest of a body.
#[derive(Clone, Debug)]
pub struct Reader<'a> {
    rest: &'a [u8],
    width: Width,
    /// Length of the body in bytes.
    len: usize,
    /// Total length that the body claims; 0 for none.
    total: usize,
    has_total: bool,
}

impl<'a> Reader<'a> {
    fn new(body: &'a [u8]) -> Self {
        Self { rest: body, width: Width::One, len: body.len(), total: 0, has_total: false }
    }

    /// Checks the header of a body against the expected hash.
    fn open(body: &'a [u8], expected: u32) -> Result<Self, PackError> {
        let mut reader = Self::new(body);
        let head = u32::from_le_bytes(reader.array()?);
        let found = head & !OPTIONS_FOLLOW;
        let mut spelling: &[u8] = &[];
        if head & OPTIONS_FOLLOW != 0 {
            let [options] = reader.array()?;
            if options & OPTION_TOTAL != 0 {
                reader.read_total(options & OPTION_TOTAL)?;
            }
            reader.width = match (options & OPTION_WIDTH) >> OPTION_WIDTH_SHIFT {
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

    /// Reads the total length, whose width the options tell.
    #[cold]
    fn read_total(&mut self, width: u8) -> Result<(), PackError> {
        self.width = [Width::Two, Width::Four, Width::Eight][usize::from(width - 1)];
        self.total = usize::try_from(self.length()?).unwrap_or(usize::MAX);
        self.has_total = true;
        Ok(())
    }

    /// Returns the number of bytes of the body that were read.
    fn position(&self) -> usize {
        self.len - self.rest.len()
    }

    /// Takes the next `count` bytes.
    #[inline]
    pub fn take(&mut self, count: usize) -> Result<&'a [u8], PackError> {
        let (head, rest) = self.rest.split_at_checked(count).ok_or_else(|| self.too_short(count))?;
        self.rest = rest;
        Ok(head)
    }

    /// Takes the next `N` bytes.
    #[inline]
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], PackError> {
        let (head, rest) = self.rest.split_first_chunk::<N>().ok_or_else(|| self.too_short(N))?;
        self.rest = rest;
        Ok(*head)
    }

    /// Decodes a length without checking it.
    #[inline]
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
    #[inline]
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
/// struct from an argument list. A field with `[since <version>]` is a compatible field of this
/// type, and an `Option` in the struct.
#[doc(hidden)]
#[macro_export]
macro_rules! wire_fields {
    (
        $spelled:ident $name:ty { $($field:ident: $type:ty $([since $version:literal])?),* $(,)? }
        $(without { $($absent:ident: $value:expr),* })?
    ) => {
        #[allow(unused_lifetimes)]
        impl<'a> $crate::pack::Wire for $name {
            const SIGNATURE: $crate::type_signature::TypeSignature = $crate::type_signature::TypeSignature::$spelled(&[
                $($crate::pack::wire_field!(signature $type $(, $version)?)),*
            ]);
            const MIN_LEN: usize = 0 $(+ $crate::pack::wire_field!(min_len $type $(, $version)?))*;
            const VERSIONS: u64 = 0 $(| $crate::pack::wire_field!(versions $type $(, $version)?))*;
        }

        #[allow(unused_lifetimes)]
        impl<'a> $crate::pack::Pack for $name {
            fn widest(&self) -> usize {
                0usize $(.max($crate::pack::Pack::widest(&self.$field)))*
            }

            fn pack(&self, _out: &mut $crate::pack::Writer<'_>) {
                $($crate::pack::wire_field!(pack (self.$field, _out) $($version)?);)*
            }

            fn has_members(&self) -> bool {
                false $(|| $crate::pack::wire_field!(has_members (self.$field) $($version)?))*
            }

            fn pack_members(&self, _version: u8, _out: &mut $crate::pack::Writer<'_>) {
                $($crate::pack::wire_field!(pack_members (self.$field, _version, _out) $($version)?);)*
            }
        }

        impl<'a> $crate::pack::Unpack<'a> for $name {
            fn unpack(
                _body: &mut $crate::pack::Reader<'a>,
            ) -> Result<Self, $crate::pack::PackError> {
                Ok(Self {
                    $($field: $crate::pack::wire_field!(unpack (_body) $($version)?),)*
                    $($($absent: $value,)*)?
                })
            }

            fn unpack_members(
                &mut self,
                _version: u8,
                _body: &mut $crate::pack::Reader<'a>,
            ) -> Result<(), $crate::pack::PackError> {
                $($crate::pack::wire_field!(unpack_members (self.$field, _version, _body) $($version)?);)*
                Ok(())
            }
        }
    };
}
#[doc(hidden)]
pub use wire_fields;

/// Part of [`wire_fields`](crate::pack::wire_fields) about one field: a compatible field if a
/// version follows.
#[doc(hidden)]
#[macro_export]
macro_rules! wire_field {
    (type $type:ty) => { $type };
    (type $type:ty, $version:literal) => { Option<$type> };
    (signature $type:ty) => { <$type as $crate::pack::Wire>::SIGNATURE };
    (signature $type:ty, $version:literal) => { $crate::type_signature::TypeSignature::EMPTY };
    (min_len $type:ty) => { <$type as $crate::pack::Wire>::MIN_LEN };
    (min_len $type:ty, $version:literal) => { 0 };
    (versions $type:ty) => { <$type as $crate::pack::Wire>::VERSIONS };
    (versions $type:ty, $version:literal) => { $crate::pack::version_bit($version) };
    (pack ($field:expr, $out:ident)) => { $crate::pack::Pack::pack(&$field, $out) };
    (pack ($field:expr, $out:ident) $version:literal) => { () };
    (has_members ($field:expr)) => { $crate::pack::Pack::has_members(&$field) };
    (has_members ($field:expr) $version:literal) => { $field.is_some() };
    (pack_members ($field:expr, $of:ident, $out:ident)) => {
        $crate::pack::Pack::pack_members(&$field, $of, $out)
    };
    (pack_members ($field:expr, $of:ident, $out:ident) $version:literal) => {
        if $of == $version {
            $crate::pack::Pack::pack(&$field, $out);
        }
    };
    (unpack ($body:ident)) => { $crate::pack::Unpack::unpack($body)? };
    (unpack ($body:ident) $version:literal) => { None };
    (unpack_members ($field:expr, $of:ident, $body:ident)) => {
        $crate::pack::Unpack::unpack_members(&mut $field, $of, $body)?
    };
    (unpack_members ($field:expr, $of:ident, $body:ident) $version:literal) => {
        if $of == $version {
            $body.member(&mut $field)?;
        }
    };
}
#[doc(hidden)]
pub use wire_field;

#[cfg(test)]
mod tests;
