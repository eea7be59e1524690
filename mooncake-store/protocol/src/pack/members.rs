//! Compatible fields: fields that a later version added to a struct.
//!
//! Compatible fields are not part of the type and its hash, so that peers without them still read
//! the message. A body with such fields has a *total length* behind its options. Behind the other
//! fields stand the compatible fields of each version, in ascending order of the versions. Each
//! begins with a byte that tells whether the compatible field is set. A reader ignores what follows
//! the last version that it knows.
//!
//! A field becomes a compatible field with `[since <version>]` behind its type in
//! [`wire_fields`](super::wire_fields) or in the table of messages. The field then is an `Option`.

use super::{
    OPTION_SIGNATURE, OPTION_WIDTH_SHIFT, OPTIONS_FOLLOW, Pack, PackError, Reader, Unpack, Width, Writer,
    version_bit,
};

/// Returns the versions of a set in ascending order.
fn each(versions: u64) -> impl Iterator<Item = u8> {
    (1..64).filter(move |version| versions & version_bit(*version) != 0)
}

/// Width of the total length in the options.
const TOTAL_TWO: u8 = 1;
const TOTAL_FOUR: u8 = 2;
const TOTAL_EIGHT: u8 = 3;

/// Position of the total length in a body: behind the hash and the options.
const TOTAL_AT: usize = 5;

/// Appends `value` as a body with its total length and its compatible fields.
#[cold]
pub(super) fn encode<T: Pack + ?Sized>(value: &T, spelled: bool, out: &mut Vec<u8>) {
    let start = out.len();
    let width = Width::of(value.widest());
    out.extend_from_slice(&(T::SIGNATURE.hash() | OPTIONS_FOLLOW).to_le_bytes());
    let options = (width as u8) << OPTION_WIDTH_SHIFT | if spelled { OPTION_SIGNATURE } else { 0 };
    out.push(options | TOTAL_TWO);
    out.extend_from_slice(&[0; 2]);
    if spelled {
        out.extend_from_slice(T::SIGNATURE.as_bytes());
        out.push(0);
    }
    let mut writer = Writer { out, width, fits: true };
    value.pack(&mut writer);
    pack(value, &mut writer);
    set_total(out, start);
}

/// Appends the compatible fields of a value.
pub(super) fn pack<T: Pack + ?Sized>(value: &T, out: &mut Writer<'_>) {
    each(T::VERSIONS).for_each(|version| value.pack_members(version, out));
}

/// Sets the total length of the body that begins at `start` and has two bytes for it.
fn set_total(out: &mut Vec<u8>, start: usize) {
    let len = (out.len() - start) as u64;
    let (at, options) = (start + TOTAL_AT, start + TOTAL_AT - 1);
    if let Ok(total) = u16::try_from(len) {
        out[at..at + 2].copy_from_slice(&total.to_le_bytes());
    } else if let Ok(total) = u32::try_from(len + 2) {
        out[options] ^= TOTAL_TWO ^ TOTAL_FOUR;
        out.splice(at..at + 2, total.to_le_bytes());
    } else {
        out[options] ^= TOTAL_TWO ^ TOTAL_EIGHT;
        out.splice(at..at + 2, (len + 6).to_le_bytes());
    }
}

/// Decodes the compatible fields of a value whose other fields are decoded.
#[cold]
pub(super) fn decode<'a, T: Unpack<'a>>(value: &mut T, body: &mut Reader<'a>) -> Result<(), PackError> {
    each(T::VERSIONS).try_for_each(|version| value.unpack_members(version, body))
}

impl<'a> Reader<'a> {
    /// Decodes the next compatible field into `field`.
    ///
    /// The compatible field is absent if the message ends before it, or inside it. The total length
    /// tells the end of the message. It may be wrong: no more bytes are read than there are.
    pub fn member<T: Unpack<'a>>(&mut self, field: &mut Option<T>) -> Result<(), PackError> {
        if self.position() >= self.total {
            return Ok(());
        }
        match Option::unpack(self) {
            Ok(value) => *field = value,
            Err(PackError::Truncated { .. }) if self.total <= self.len => self.total = 0,
            Err(error) => return Err(error),
        }
        Ok(())
    }
}
