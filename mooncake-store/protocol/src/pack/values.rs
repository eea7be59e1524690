//! Values in messages: numbers, booleans, texts, lists, maps, optional values, and responses.

use std::borrow::Cow;

use mooncake_core::error::{Error, ErrorCode};
use mooncake_core::ids::{ClientId, ReplicaId, SegmentId, Uuid};

use super::super::type_signature::{TypeSignature, symbol};
use super::{Pack, PackError, Reader, Unpack, Wire, Writer, version_bit};

macro_rules! numbers {
    ($($number:ty = $symbol:ident;)*) => {$(
        impl Wire for $number {
            const SIGNATURE: TypeSignature = TypeSignature::new(&[symbol::$symbol]);
            const MIN_LEN: usize = size_of::<$number>();
        }

        impl Pack for $number {
            #[inline]
            fn widest(&self) -> usize {
                0
            }

            #[inline]
            fn pack(&self, out: &mut Writer<'_>) {
                out.bytes(&self.to_le_bytes());
            }
        }

        impl<'a> Unpack<'a> for $number {
            #[inline]
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

/// A byte as a number. A separate type, so that `Vec<u8>` is a byte string and not a list of
/// numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Byte(pub u8);

impl Wire for Byte {
    const SIGNATURE: TypeSignature = TypeSignature::new(&[symbol::U8]);
    const MIN_LEN: usize = 1;
}

impl Pack for Byte {
    #[inline]
    fn widest(&self) -> usize {
        0
    }

    #[inline]
    fn pack(&self, out: &mut Writer<'_>) {
        out.byte(self.0);
    }
}

impl<'a> Unpack<'a> for Byte {
    #[inline]
    fn unpack(body: &mut Reader<'a>) -> Result<Self, PackError> {
        body.array().map(|[byte]| Byte(byte))
    }
}

/// Encodes one type as another: `Outer as Inner`, with an expression for each direction.
#[doc(hidden)]
#[macro_export]
macro_rules! written_as {
    ($($outer:ty as $inner:ty: $value:pat => $to:expr, $from:expr;)*) => {$(
        impl $crate::pack::Wire for $outer {
            const SIGNATURE: $crate::type_signature::TypeSignature =
                <$inner as $crate::pack::Wire>::SIGNATURE;
            const MIN_LEN: usize = <$inner as $crate::pack::Wire>::MIN_LEN;
        }

        impl $crate::pack::Pack for $outer {
            #[inline]
            fn widest(&self) -> usize {
                0
            }

            #[inline]
            fn pack(&self, out: &mut $crate::pack::Writer<'_>) {
                let $value = self;
                <$inner as $crate::pack::Pack>::pack(&$to, out);
            }
        }

        impl<'a> $crate::pack::Unpack<'a> for $outer {
            #[inline]
            fn unpack(
                body: &mut $crate::pack::Reader<'a>,
            ) -> Result<Self, $crate::pack::PackError> {
                let from: fn($inner) -> Result<$outer, $crate::pack::PackError> = $from;
                from(<$inner as $crate::pack::Unpack<'a>>::unpack(body)?)
            }
        }
    )*};
}
pub use written_as;

written_as! {
    ErrorCode as i32: code => code.number(), |number| Ok(ErrorCode::from_number(number));
    ReplicaId as u64: id => id.0, |number| Ok(ReplicaId(number));
    ClientId as Uuid: id => id.0, |id| Ok(ClientId(id));
    SegmentId as Uuid: id => id.0, |id| Ok(SegmentId(id));
}

impl Wire for bool {
    const SIGNATURE: TypeSignature = TypeSignature::new(&[symbol::BOOL]);
    const MIN_LEN: usize = 1;
}

impl Pack for bool {
    #[inline]
    fn widest(&self) -> usize {
        0
    }

    #[inline]
    fn pack(&self, out: &mut Writer<'_>) {
        out.byte(u8::from(*self));
    }
}

impl<'a> Unpack<'a> for bool {
    #[inline]
    fn unpack(body: &mut Reader<'a>) -> Result<Self, PackError> {
        match body.array()? {
            [0] => Ok(false),
            [1] => Ok(true),
            [other] => Err(PackError::Bool(other)),
        }
    }
}

impl Wire for () {
    const SIGNATURE: TypeSignature = TypeSignature::new(&[symbol::VOID]);
    const MIN_LEN: usize = 0;
}

impl Pack for () {
    #[inline]
    fn widest(&self) -> usize {
        0
    }

    #[inline]
    fn pack(&self, _: &mut Writer<'_>) {}
}

impl<'a> Unpack<'a> for () {
    #[inline]
    fn unpack(_: &mut Reader<'a>) -> Result<Self, PackError> {
        Ok(())
    }
}

/// Encoding of a pair of numbers as in memory, so that its packing and alignment are part of its
/// signature.
impl Wire for Uuid {
    const SIGNATURE: TypeSignature = TypeSignature::aligned(&[u64::SIGNATURE, u64::SIGNATURE], 8);
    const MIN_LEN: usize = 16;
}

impl Pack for Uuid {
    #[inline]
    fn widest(&self) -> usize {
        0
    }

    #[inline]
    fn pack(&self, out: &mut Writer<'_>) {
        out.bytes(&self.first.to_le_bytes());
        out.bytes(&self.second.to_le_bytes());
    }
}

impl<'a> Unpack<'a> for Uuid {
    #[inline]
    fn unpack(body: &mut Reader<'a>) -> Result<Self, PackError> {
        Ok(Uuid::new(u64::unpack(body)?, u64::unpack(body)?))
    }
}

macro_rules! strings {
    ($($string:ty: $value:ident => $bytes:expr, $from:expr;)*) => {$(
        #[allow(unused_lifetimes)]
        impl<'a> Wire for $string {
            const SIGNATURE: TypeSignature = TypeSignature::new(&[symbol::STRING, symbol::CHAR]);
            const MIN_LEN: usize = 1;
        }

        #[allow(unused_lifetimes)]
        impl<'a> Pack for $string {
            #[inline]
            fn widest(&self) -> usize {
                self.len()
            }

            #[inline]
            fn pack(&self, out: &mut Writer<'_>) {
                let $value = self;
                out.length($value.len());
                out.bytes($bytes);
            }
        }

        impl<'a> Unpack<'a> for $string {
            #[inline]
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
    const SIGNATURE: TypeSignature = TypeSignature::new(&[symbol::VECTOR]).then(T::SIGNATURE);
    const MIN_LEN: usize = 1;
    const VERSIONS: u64 = T::VERSIONS;
}

impl<T: Pack> Pack for Vec<T> {
    #[inline]
    fn widest(&self) -> usize {
        widest_of(self)
    }

    #[inline]
    fn pack(&self, out: &mut Writer<'_>) {
        pack_items(self, out);
    }

    fn has_members(&self) -> bool {
        T::VERSIONS != 0 && self.iter().any(T::has_members)
    }

    fn pack_members(&self, version: u8, out: &mut Writer<'_>) {
        if T::VERSIONS & version_bit(version) != 0 {
            self.iter().for_each(|item| item.pack_members(version, out));
        }
    }
}

impl<'a, T: Unpack<'a>> Unpack<'a> for Vec<T> {
    #[inline]
    fn unpack(body: &mut Reader<'a>) -> Result<Self, PackError> {
        let count = body.count(T::MIN_LEN)?;
        let mut items = Vec::with_capacity(count);
        for _ in 0..count {
            items.push(T::unpack(body)?);
        }
        Ok(items)
    }

    fn unpack_members(&mut self, version: u8, body: &mut Reader<'a>) -> Result<(), PackError> {
        if T::VERSIONS & version_bit(version) == 0 {
            return Ok(());
        }
        self.iter_mut().try_for_each(|item| item.unpack_members(version, body))
    }
}

/// A list that is borrowed by the sender and owned by the receiver.
pub type List<'a, T> = Cow<'a, [T]>;

impl<T: Wire + Clone> Wire for List<'_, T> {
    const SIGNATURE: TypeSignature = Vec::<T>::SIGNATURE;
    const MIN_LEN: usize = Vec::<T>::MIN_LEN;
    const VERSIONS: u64 = T::VERSIONS;
}

impl<T: Pack + Clone> Pack for List<'_, T> {
    #[inline]
    fn widest(&self) -> usize {
        widest_of(self)
    }

    #[inline]
    fn pack(&self, out: &mut Writer<'_>) {
        pack_items(self, out);
    }

    fn has_members(&self) -> bool {
        T::VERSIONS != 0 && self.iter().any(T::has_members)
    }

    fn pack_members(&self, version: u8, out: &mut Writer<'_>) {
        if T::VERSIONS & version_bit(version) != 0 {
            self.iter().for_each(|item| item.pack_members(version, out));
        }
    }
}

impl<'a, T: Unpack<'a> + Clone> Unpack<'a> for List<'a, T> {
    #[inline]
    fn unpack(body: &mut Reader<'a>) -> Result<Self, PackError> {
        Vec::unpack(body).map(Cow::Owned)
    }

    fn unpack_members(&mut self, version: u8, body: &mut Reader<'a>) -> Result<(), PackError> {
        match self {
            Cow::Owned(value) => value.unpack_members(version, body),
            Cow::Borrowed(_) => Ok(()),
        }
    }
}

/// Encoding of a value that is borrowed by the sender and owned by the receiver.
impl<T: Wire + Clone> Wire for Cow<'_, T> {
    const SIGNATURE: TypeSignature = T::SIGNATURE;
    const MIN_LEN: usize = T::MIN_LEN;
    const VERSIONS: u64 = T::VERSIONS;
}

impl<T: Pack + Clone> Pack for Cow<'_, T> {
    #[inline]
    fn widest(&self) -> usize {
        T::widest(self)
    }

    #[inline]
    fn pack(&self, out: &mut Writer<'_>) {
        T::pack(self, out);
    }

    fn has_members(&self) -> bool {
        T::has_members(self)
    }

    fn pack_members(&self, version: u8, out: &mut Writer<'_>) {
        T::pack_members(self, version, out);
    }
}

impl<'a, T: Unpack<'a> + Clone> Unpack<'a> for Cow<'a, T> {
    #[inline]
    fn unpack(body: &mut Reader<'a>) -> Result<Self, PackError> {
        T::unpack(body).map(Cow::Owned)
    }

    fn unpack_members(&mut self, version: u8, body: &mut Reader<'a>) -> Result<(), PackError> {
        match self {
            Cow::Owned(value) => value.unpack_members(version, body),
            Cow::Borrowed(_) => Ok(()),
        }
    }
}

impl<T: Wire> Wire for Box<T> {
    const SIGNATURE: TypeSignature = T::SIGNATURE;
    const MIN_LEN: usize = T::MIN_LEN;
    const VERSIONS: u64 = T::VERSIONS;
}

impl<T: Pack> Pack for Box<T> {
    #[inline]
    fn widest(&self) -> usize {
        T::widest(self)
    }

    #[inline]
    fn pack(&self, out: &mut Writer<'_>) {
        T::pack(self, out);
    }

    fn has_members(&self) -> bool {
        T::has_members(self)
    }

    fn pack_members(&self, version: u8, out: &mut Writer<'_>) {
        T::pack_members(self, version, out);
    }
}

impl<'a, T: Unpack<'a>> Unpack<'a> for Box<T> {
    #[inline]
    fn unpack(body: &mut Reader<'a>) -> Result<Self, PackError> {
        T::unpack(body).map(Box::new)
    }

    fn unpack_members(&mut self, version: u8, body: &mut Reader<'a>) -> Result<(), PackError> {
        T::unpack_members(self, version, body)
    }
}

fn widest_of<T: Pack>(items: &[T]) -> usize {
    items.iter().fold(items.len(), |widest, item| widest.max(item.widest()))
}

fn pack_items<T: Pack>(items: &[T], out: &mut Writer<'_>) {
    out.length(items.len());
    items.iter().for_each(|item| item.pack(out));
}

/// A map, stored as the list of its pairs in the order of the body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pairs<K, V>(pub Vec<(K, V)>);

impl<K: Wire, V: Wire> Wire for Pairs<K, V> {
    const SIGNATURE: TypeSignature = TypeSignature::new(&[symbol::MAP]).then(K::SIGNATURE).then(V::SIGNATURE);
    const MIN_LEN: usize = 1;
    const VERSIONS: u64 = K::VERSIONS | V::VERSIONS;
}

impl<K: Pack, V: Pack> Pack for Pairs<K, V> {
    #[inline]
    fn widest(&self) -> usize {
        let pairs = self.0.iter();
        pairs.fold(self.0.len(), |widest, (key, value)| widest.max(key.widest()).max(value.widest()))
    }

    #[inline]
    fn pack(&self, out: &mut Writer<'_>) {
        out.length(self.0.len());
        for (key, value) in &self.0 {
            key.pack(out);
            value.pack(out);
        }
    }

    fn has_members(&self) -> bool {
        Self::VERSIONS != 0 && self.0.iter().any(|(key, value)| key.has_members() || value.has_members())
    }

    fn pack_members(&self, version: u8, out: &mut Writer<'_>) {
        for (key, value) in &self.0 {
            key.pack_members(version, out);
            value.pack_members(version, out);
        }
    }
}

impl<'a, K: Unpack<'a>, V: Unpack<'a>> Unpack<'a> for Pairs<K, V> {
    #[inline]
    fn unpack(body: &mut Reader<'a>) -> Result<Self, PackError> {
        let count = body.count(K::MIN_LEN + V::MIN_LEN)?;
        let mut pairs = Vec::with_capacity(count);
        for _ in 0..count {
            pairs.push((K::unpack(body)?, V::unpack(body)?));
        }
        Ok(Pairs(pairs))
    }

    fn unpack_members(&mut self, version: u8, body: &mut Reader<'a>) -> Result<(), PackError> {
        self.0.iter_mut().try_for_each(|(key, value)| {
            key.unpack_members(version, body)?;
            value.unpack_members(version, body)
        })
    }
}

impl<T: Wire> Wire for Option<T> {
    const SIGNATURE: TypeSignature = TypeSignature::new(&[symbol::OPTIONAL]).then(T::SIGNATURE);
    const MIN_LEN: usize = 1;
    const VERSIONS: u64 = T::VERSIONS;
}

impl<T: Pack> Pack for Option<T> {
    #[inline]
    fn widest(&self) -> usize {
        self.as_ref().map_or(0, T::widest)
    }

    #[inline]
    fn pack(&self, out: &mut Writer<'_>) {
        self.is_some().pack(out);
        if let Some(value) = self {
            value.pack(out);
        }
    }

    fn has_members(&self) -> bool {
        self.as_ref().is_some_and(T::has_members)
    }

    fn pack_members(&self, version: u8, out: &mut Writer<'_>) {
        if let Some(value) = self {
            value.pack_members(version, out);
        }
    }
}

impl<'a, T: Unpack<'a>> Unpack<'a> for Option<T> {
    #[inline]
    fn unpack(body: &mut Reader<'a>) -> Result<Self, PackError> {
        if bool::unpack(body)? { T::unpack(body).map(Some) } else { Ok(None) }
    }

    fn unpack_members(&mut self, version: u8, body: &mut Reader<'a>) -> Result<(), PackError> {
        self.as_mut().map_or(Ok(()), |value| value.unpack_members(version, body))
    }
}

/// Response of a call: a value or an error number.
pub type Answer<T> = Result<T, ErrorCode>;

/// An error that is encoded as its number.
pub trait Numbered: Sized {
    /// Number of the error.
    type Number: Pack + for<'a> Unpack<'a>;

    /// Returns the number of the error.
    fn to_number(&self) -> Self::Number;
    /// Returns the error with a number.
    fn from_number(number: Self::Number) -> Self;
}

impl Numbered for ErrorCode {
    type Number = Self;

    fn to_number(&self) -> Self {
        *self
    }

    fn from_number(number: Self) -> Self {
        number
    }
}

impl Numbered for Error {
    type Number = ErrorCode;

    fn to_number(&self) -> ErrorCode {
        self.code()
    }

    fn from_number(number: ErrorCode) -> Self {
        number.into()
    }
}

impl<T: Wire, E: Numbered> Wire for Result<T, E> {
    const SIGNATURE: TypeSignature =
        TypeSignature::new(&[symbol::EXPECTED]).then(T::SIGNATURE).then(E::Number::SIGNATURE);
    const MIN_LEN: usize = 1 + if T::MIN_LEN < E::Number::MIN_LEN { T::MIN_LEN } else { E::Number::MIN_LEN };
    const VERSIONS: u64 = T::VERSIONS;
}

impl<T: Pack, E: Numbered> Pack for Result<T, E> {
    #[inline]
    fn widest(&self) -> usize {
        self.as_ref().map_or(0, T::widest)
    }

    #[inline]
    fn pack(&self, out: &mut Writer<'_>) {
        self.is_ok().pack(out);
        match self {
            Ok(value) => value.pack(out),
            Err(error) => error.to_number().pack(out),
        }
    }

    fn has_members(&self) -> bool {
        self.as_ref().is_ok_and(T::has_members)
    }

    fn pack_members(&self, version: u8, out: &mut Writer<'_>) {
        if let Ok(value) = self {
            value.pack_members(version, out);
        }
    }
}

impl<'a, T: Unpack<'a>, E: Numbered> Unpack<'a> for Result<T, E> {
    #[inline]
    fn unpack(body: &mut Reader<'a>) -> Result<Self, PackError> {
        Ok(if bool::unpack(body)? {
            Ok(T::unpack(body)?)
        } else {
            Err(E::from_number(E::Number::unpack(body)?))
        })
    }

    fn unpack_members(&mut self, version: u8, body: &mut Reader<'a>) -> Result<(), PackError> {
        self.as_mut().map_or(Ok(()), |value| value.unpack_members(version, body))
    }
}
