//! Whole bodies: encoding and decoding of a value with the header of its body.

use mooncake_core::error::Error;

use super::members;
use super::{
    Answer, MAX_BODY, OPTION_SIGNATURE, OPTION_TOTAL, OPTION_WIDTH_SHIFT, OPTIONS_FOLLOW, Pack, PackError,
    Reader, Unpack, Width, Wire, Writer,
};

/// Appends `value` as a body of minimum length. A body without compatible fields can be read by
/// peers that do not know them.
pub fn encode<T: Pack + ?Sized>(value: &T, out: &mut Vec<u8>) {
    if T::VERSIONS != 0 && value.has_members() {
        return members::encode(value, false, out);
    }
    encode_ordinary(value, out);
}

/// Appends a response as a body, without its compatible fields if the caller does not know them.
pub(crate) fn encode_reply<T: Pack>(value: &T, with_members: bool, out: &mut Vec<u8>) {
    if with_members { encode(value, out) } else { encode_ordinary(value, out) }
}

/// Appends `value` as a body without its compatible fields.
fn encode_ordinary<T: Pack + ?Sized>(value: &T, out: &mut Vec<u8>) {
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
pub(crate) fn encode_answers<T: Wire>(
    items: Items,
    out: &mut Vec<u8>,
    mut each: impl FnMut(usize, &mut Writer<'_>) -> Result<(), Error>,
) -> bool {
    let (hash, count, longest) = match items {
        Items::One { longest } => (const { Answer::<T>::SIGNATURE.hash() }, 1, longest),
        Items::Many(count) => (const { Vec::<Answer<T>>::SIGNATURE.hash() }, count, count),
    };
    let start = out.len();
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
        if begun - start > MAX_BODY {
            // The reply is refused for its length.
            return true;
        }
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
pub(crate) enum Items {
    /// A single response, not in a list, with lists of at most this length.
    One {
        /// Maximum length of a list in the response.
        longest: usize,
    },
    /// A list of this many responses.
    Many(usize),
}

/// Returns the length of a value with its compatible fields in bytes if lengths in the body have
/// four bytes.
pub fn wide_len<T: Pack + ?Sized>(value: &T, scratch: &mut Vec<u8>) -> usize {
    scratch.clear();
    let mut writer = Writer { out: scratch, width: Width::Four, fits: true };
    value.pack(&mut writer);
    members::pack(value, &mut writer);
    scratch.len()
}

/// Appends `value` as a body with its type signature, and with a total length if the type has
/// compatible fields, as in every message of Mooncake C++.
pub fn encode_spelled<T: Pack + ?Sized>(value: &T, out: &mut Vec<u8>) {
    if T::VERSIONS != 0 {
        return members::encode(value, true, out);
    }
    encode_spelled_ordinary(value, out);
}

/// Appends `value` as a body with its type signature and without its compatible fields.
pub(crate) fn encode_spelled_ordinary<T: Pack + ?Sized>(value: &T, out: &mut Vec<u8>) {
    let width = Width::of(value.widest());
    out.extend_from_slice(&const { T::SIGNATURE.hash() | OPTIONS_FOLLOW }.to_le_bytes());
    out.push((width as u8) << OPTION_WIDTH_SHIFT | OPTION_SIGNATURE);
    out.extend_from_slice(const { T::SIGNATURE }.as_bytes());
    out.push(0);
    value.pack(&mut Writer { out, width, fits: true });
}

/// Decodes a body that consists of one `T`, with or without its signature.
///
/// Bytes behind the value are compatible fields of a later version. A body of a type without
/// compatible fields, and without a total length, has none.
pub fn decode<'a, T: Unpack<'a>>(body: &'a [u8]) -> Result<T, PackError> {
    let mut reader = Reader::open(body, const { T::SIGNATURE.hash() })?;
    let mut value = T::unpack(&mut reader)?;
    if T::VERSIONS != 0 && reader.total > 0 {
        members::decode(&mut value, &mut reader)?;
    }
    if T::VERSIONS == 0 && !reader.has_total && !reader.rest.is_empty() {
        return Err(PackError::Trailing(reader.rest.len()));
    }
    Ok(value)
}

/// Returns whether a body has its type signature, as in every message of Mooncake C++.
pub(crate) fn is_spelled(body: &[u8]) -> bool {
    options_of(body) & OPTION_SIGNATURE != 0
}

/// Returns whether a body has a total length.
pub(crate) fn has_total(body: &[u8]) -> bool {
    options_of(body) & OPTION_TOTAL != 0
}

/// Returns the options of a body, 0 for none.
fn options_of(body: &[u8]) -> u8 {
    match body {
        [head, _, _, _, options, ..] if u32::from(*head) & OPTIONS_FOLLOW != 0 => *options,
        _ => 0,
    }
}

/// Returns the hash of the type of a body.
pub(crate) fn hash_of(body: &[u8]) -> Option<u32> {
    body.first_chunk().map(|head| u32::from_le_bytes(*head) & !OPTIONS_FOLLOW)
}

/// Decodes the empty body of a call without arguments.
pub(crate) fn decode_nothing<'a, T: Unpack<'a>>(body: &'a [u8]) -> Result<T, PackError> {
    let mut reader = Reader::new(&[]);
    if body.is_empty() { T::unpack(&mut reader) } else { Err(PackError::Trailing(body.len())) }
}
