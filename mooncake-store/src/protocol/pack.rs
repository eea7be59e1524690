//! struct_pack: how one value becomes a message body and back.
//!
//! A body is the hash of its type, a byte of options if any are set, and the fields in order. All lengths in a body
//! share one width, chosen by its largest container. Reading never trusts a length: it is held against the bytes that
//! are left before anything is allocated, so what a hostile body can make us allocate is a small multiple of its size.
//!
//! Byte strings (`&[u8]`, `Vec<u8>`) are spelled as strings: object keys are any bytes. Text (`&str`, `String`) must
//! be UTF-8.

use std::borrow::Cow;
use std::fmt;

use mooncake_core::error::{Error, ErrorCode};
use mooncake_core::ids::{ClientId, ReplicaId, SegmentId, Uuid};

use super::literal::{Literal, symbol};

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

macro_rules! numbers {
    ($($number:ty = $symbol:ident;)*) => {$(
        impl Wire for $number {
            const LITERAL: Literal = Literal::new(&[symbol::$symbol]);
            const MIN_LEN: usize = size_of::<$number>();
        }

        impl Pack for $number {
            fn widest(&self) -> usize {
                0
            }

            fn pack(&self, out: &mut Writer<'_>) {
                out.bytes(&self.to_le_bytes());
            }
        }

        impl<'a> Unpack<'a> for $number {
            fn unpack(body: &mut Reader<'a>) -> Result<Self, PackError> {
                Ok(<$number>::from_le_bytes(body.array()?))
            }
        }
    )*};
}

numbers! {
    i32 = I32;
    u32 = U32;
    i64 = I64;
    u64 = U64;
}

/// One byte as a number. A type of its own, so that `Vec<u8>` can be a string of bytes and not a list of numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Byte(pub u8);

impl Wire for Byte {
    const LITERAL: Literal = Literal::new(&[symbol::U8]);
    const MIN_LEN: usize = 1;
}

impl Pack for Byte {
    fn widest(&self) -> usize {
        0
    }

    fn pack(&self, out: &mut Writer<'_>) {
        out.byte(self.0);
    }
}

impl<'a> Unpack<'a> for Byte {
    fn unpack(body: &mut Reader<'a>) -> Result<Self, PackError> {
        body.array().map(|[byte]| Byte(byte))
    }
}

/// A type written as another one: `Outer as Inner`, by two expressions.
macro_rules! written_as {
    ($($outer:ty as $inner:ty: $value:pat => $to:expr, $from:expr;)*) => {$(
        impl $crate::protocol::pack::Wire for $outer {
            const LITERAL: $crate::protocol::literal::Literal =
                <$inner as $crate::protocol::pack::Wire>::LITERAL;
            const MIN_LEN: usize = <$inner as $crate::protocol::pack::Wire>::MIN_LEN;
        }

        impl $crate::protocol::pack::Pack for $outer {
            fn widest(&self) -> usize {
                0
            }

            fn pack(&self, out: &mut $crate::protocol::pack::Writer<'_>) {
                let $value = self;
                <$inner as $crate::protocol::pack::Pack>::pack(&$to, out);
            }
        }

        impl<'a> $crate::protocol::pack::Unpack<'a> for $outer {
            fn unpack(
                body: &mut $crate::protocol::pack::Reader<'a>,
            ) -> Result<Self, $crate::protocol::pack::PackError> {
                let from: fn($inner) -> Result<$outer, $crate::protocol::pack::PackError> = $from;
                from(<$inner as $crate::protocol::pack::Unpack<'a>>::unpack(body)?)
            }
        }
    )*};
}
pub(super) use written_as;

written_as! {
    ErrorCode as i32: code => code.number(), |number| Ok(ErrorCode::from_number(number));
    ReplicaId as u64: id => id.0, |number| Ok(ReplicaId(number));
    ClientId as Uuid: id => id.0, |id| Ok(ClientId(id));
    SegmentId as Uuid: id => id.0, |id| Ok(SegmentId(id));
}

impl Wire for bool {
    const LITERAL: Literal = Literal::new(&[symbol::BOOL]);
    const MIN_LEN: usize = 1;
}

impl Pack for bool {
    fn widest(&self) -> usize {
        0
    }

    fn pack(&self, out: &mut Writer<'_>) {
        out.byte(u8::from(*self));
    }
}

impl<'a> Unpack<'a> for bool {
    fn unpack(body: &mut Reader<'a>) -> Result<Self, PackError> {
        match body.array()? {
            [0] => Ok(false),
            [1] => Ok(true),
            [other] => Err(PackError::Bool(other)),
        }
    }
}

impl Wire for () {
    const LITERAL: Literal = Literal::new(&[symbol::VOID]);
    const MIN_LEN: usize = 0;
}

impl Pack for () {
    fn widest(&self) -> usize {
        0
    }

    fn pack(&self, _: &mut Writer<'_>) {}
}

impl<'a> Unpack<'a> for () {
    fn unpack(_: &mut Reader<'a>) -> Result<Self, PackError> {
        Ok(())
    }
}

/// A pair of numbers is copied as it lies in memory, so its packing and alignment are part of its spelling.
impl Wire for Uuid {
    const LITERAL: Literal = Literal::new(&[
        symbol::STRUCT,
        symbol::U64,
        symbol::U64,
        symbol::SIZE_BASE + 8,
        symbol::SIZE_BASE + 8,
        symbol::END,
    ]);
    const MIN_LEN: usize = 16;
}

impl Pack for Uuid {
    fn widest(&self) -> usize {
        0
    }

    fn pack(&self, out: &mut Writer<'_>) {
        out.bytes(&self.first.to_le_bytes());
        out.bytes(&self.second.to_le_bytes());
    }
}

impl<'a> Unpack<'a> for Uuid {
    fn unpack(body: &mut Reader<'a>) -> Result<Self, PackError> {
        Ok(Uuid::new(u64::unpack(body)?, u64::unpack(body)?))
    }
}

macro_rules! strings {
    ($($string:ty: $value:ident => $bytes:expr, $from:expr;)*) => {$(
        #[allow(unused_lifetimes)]
        impl<'a> Wire for $string {
            const LITERAL: Literal = Literal::new(&[symbol::STRING, symbol::CHAR]);
            const MIN_LEN: usize = 1;
        }

        #[allow(unused_lifetimes)]
        impl<'a> Pack for $string {
            fn widest(&self) -> usize {
                self.len()
            }

            fn pack(&self, out: &mut Writer<'_>) {
                let $value = self;
                out.length($value.len());
                out.bytes($bytes);
            }
        }

        impl<'a> Unpack<'a> for $string {
            fn unpack(body: &mut Reader<'a>) -> Result<Self, PackError> {
                let len = body.length()?;
                let from: fn(&'a [u8]) -> Result<$string, PackError> = $from;
                from(body.take(usize::try_from(len).unwrap_or(usize::MAX))?)
            }
        }
    )*};
}

fn text(bytes: &[u8]) -> Result<&str, PackError> {
    std::str::from_utf8(bytes).map_err(|_| PackError::Utf8)
}

strings! {
    &'a [u8]: value => value, Ok;
    &'a str: value => value.as_bytes(), text;
    Vec<u8>: value => value, |bytes| Ok(bytes.to_vec());
    String: value => value.as_bytes(), |bytes| Ok(text(bytes)?.to_owned());
}

impl<T: Wire> Wire for Vec<T> {
    const LITERAL: Literal = Literal::new(&[symbol::VECTOR]).then(T::LITERAL);
    const MIN_LEN: usize = 1;
}

impl<T: Pack> Pack for Vec<T> {
    fn widest(&self) -> usize {
        widest_of(self)
    }

    fn pack(&self, out: &mut Writer<'_>) {
        pack_items(self, out);
    }
}

impl<'a, T: Unpack<'a>> Unpack<'a> for Vec<T> {
    fn unpack(body: &mut Reader<'a>) -> Result<Self, PackError> {
        let count = body.count(T::MIN_LEN)?;
        let mut items = Vec::with_capacity(count);
        for _ in 0..count {
            items.push(T::unpack(body)?);
        }
        Ok(items)
    }
}

/// A list that is borrowed when sent and owned when received.
pub type List<'a, T> = Cow<'a, [T]>;

impl<T: Wire + Clone> Wire for List<'_, T> {
    const LITERAL: Literal = Vec::<T>::LITERAL;
    const MIN_LEN: usize = Vec::<T>::MIN_LEN;
}

impl<T: Pack + Clone> Pack for List<'_, T> {
    fn widest(&self) -> usize {
        widest_of(self)
    }

    fn pack(&self, out: &mut Writer<'_>) {
        pack_items(self, out);
    }
}

impl<'a, T: Unpack<'a> + Clone> Unpack<'a> for List<'a, T> {
    fn unpack(body: &mut Reader<'a>) -> Result<Self, PackError> {
        Vec::unpack(body).map(Cow::Owned)
    }
}

/// A value that is borrowed when sent and owned when received.
impl<T: Wire + Clone> Wire for Cow<'_, T> {
    const LITERAL: Literal = T::LITERAL;
    const MIN_LEN: usize = T::MIN_LEN;
}

impl<T: Pack + Clone> Pack for Cow<'_, T> {
    fn widest(&self) -> usize {
        T::widest(self)
    }

    fn pack(&self, out: &mut Writer<'_>) {
        T::pack(self, out);
    }
}

impl<'a, T: Unpack<'a> + Clone> Unpack<'a> for Cow<'a, T> {
    fn unpack(body: &mut Reader<'a>) -> Result<Self, PackError> {
        T::unpack(body).map(Cow::Owned)
    }
}

fn widest_of<T: Pack>(items: &[T]) -> usize {
    items.iter().fold(items.len(), |widest, item| widest.max(item.widest()))
}

fn pack_items<T: Pack>(items: &[T], out: &mut Writer<'_>) {
    out.length(items.len());
    items.iter().for_each(|item| item.pack(out));
}

/// A map, kept as the list of its pairs in the order they came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pairs<K, V>(pub Vec<(K, V)>);

impl<K: Wire, V: Wire> Wire for Pairs<K, V> {
    const LITERAL: Literal = Literal::new(&[symbol::MAP]).then(K::LITERAL).then(V::LITERAL);
    const MIN_LEN: usize = 1;
}

impl<K: Pack, V: Pack> Pack for Pairs<K, V> {
    fn widest(&self) -> usize {
        let pairs = self.0.iter();
        pairs.fold(self.0.len(), |widest, (key, value)| widest.max(key.widest()).max(value.widest()))
    }

    fn pack(&self, out: &mut Writer<'_>) {
        out.length(self.0.len());
        for (key, value) in &self.0 {
            key.pack(out);
            value.pack(out);
        }
    }
}

impl<'a, K: Unpack<'a>, V: Unpack<'a>> Unpack<'a> for Pairs<K, V> {
    fn unpack(body: &mut Reader<'a>) -> Result<Self, PackError> {
        let count = body.count(K::MIN_LEN + V::MIN_LEN)?;
        let mut pairs = Vec::with_capacity(count);
        for _ in 0..count {
            pairs.push((K::unpack(body)?, V::unpack(body)?));
        }
        Ok(Pairs(pairs))
    }
}

impl<T: Wire> Wire for Option<T> {
    const LITERAL: Literal = Literal::new(&[symbol::OPTIONAL]).then(T::LITERAL);
    const MIN_LEN: usize = 1;
}

impl<T: Pack> Pack for Option<T> {
    fn widest(&self) -> usize {
        self.as_ref().map_or(0, T::widest)
    }

    fn pack(&self, out: &mut Writer<'_>) {
        self.is_some().pack(out);
        if let Some(value) = self {
            value.pack(out);
        }
    }
}

impl<'a, T: Unpack<'a>> Unpack<'a> for Option<T> {
    fn unpack(body: &mut Reader<'a>) -> Result<Self, PackError> {
        if bool::unpack(body)? { T::unpack(body).map(Some) } else { Ok(None) }
    }
}

/// What a call answers: a value, or the number of an error.
pub type Answer<T> = Result<T, ErrorCode>;

/// An error that travels as its number.
pub trait Numbered: From<ErrorCode> {
    /// The number.
    fn code(&self) -> ErrorCode;
}

impl Numbered for ErrorCode {
    fn code(&self) -> ErrorCode {
        *self
    }
}

impl Numbered for Error {
    fn code(&self) -> ErrorCode {
        Error::code(self)
    }
}

impl<T: Wire, E: Numbered> Wire for Result<T, E> {
    const LITERAL: Literal = Literal::new(&[symbol::EXPECTED]).then(T::LITERAL).then(ErrorCode::LITERAL);
    const MIN_LEN: usize = 1 + if T::MIN_LEN < ErrorCode::MIN_LEN { T::MIN_LEN } else { ErrorCode::MIN_LEN };
}

impl<T: Pack, E: Numbered> Pack for Result<T, E> {
    fn widest(&self) -> usize {
        self.as_ref().map_or(0, T::widest)
    }

    fn pack(&self, out: &mut Writer<'_>) {
        self.is_ok().pack(out);
        match self {
            Ok(value) => value.pack(out),
            Err(error) => error.code().pack(out),
        }
    }
}

impl<'a, T: Unpack<'a>, E: Numbered> Unpack<'a> for Result<T, E> {
    fn unpack(body: &mut Reader<'a>) -> Result<Self, PackError> {
        Ok(if bool::unpack(body)? { Ok(T::unpack(body)?) } else { Err(ErrorCode::unpack(body)?.into()) })
    }
}

/// Implements the three traits for a struct whose members go on the wire in the order given. The lifetime of what
/// is borrowed from the body is named `'a` everywhere; `spelled` says whether it is a struct or an argument list.
macro_rules! wire_fields {
    ($spelled:ident $name:ty { $($field:ident: $type:ty),* $(,)? }) => {
        #[allow(unused_lifetimes)]
        impl<'a> $crate::protocol::pack::Wire for $name {
            const LITERAL: $crate::protocol::literal::Literal = $crate::protocol::literal::Literal::$spelled(&[
                $(<$type as $crate::protocol::pack::Wire>::LITERAL),*
            ]);
            const MIN_LEN: usize = 0 $(+ <$type as $crate::protocol::pack::Wire>::MIN_LEN)*;
        }

        #[allow(unused_lifetimes)]
        impl<'a> $crate::protocol::pack::Pack for $name {
            fn widest(&self) -> usize {
                0usize $(.max($crate::protocol::pack::Pack::widest(&self.$field)))*
            }

            fn pack(&self, _out: &mut $crate::protocol::pack::Writer<'_>) {
                $($crate::protocol::pack::Pack::pack(&self.$field, _out);)*
            }
        }

        impl<'a> $crate::protocol::pack::Unpack<'a> for $name {
            fn unpack(
                _body: &mut $crate::protocol::pack::Reader<'a>,
            ) -> Result<Self, $crate::protocol::pack::PackError> {
                Ok(Self { $($field: $crate::protocol::pack::Unpack::unpack(_body)?,)* })
            }
        }
    };
}
pub(crate) use wire_fields;

#[cfg(test)]
mod tests;
