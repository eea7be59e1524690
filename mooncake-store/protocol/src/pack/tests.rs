//! Tests of the codec with a second implementation of the signature language, and with every kind
//! of invalid body.

use std::borrow::Cow;

use mooncake_core::ids::Uuid;
use proptest::prelude::*;

use super::super::message::{ADDED, MountSegment, Ping, PutStart, Shape, TABLE};
use super::super::type_signature::{TypeSignature, symbol};
use super::*;

/// Writer of random values of a type that follows its signature and does not know the type itself.
struct Scribe<'r> {
    spelling: &'static [u8],
    at: usize,
    width: Width,
    /// Maximum length of a container.
    longest: usize,
    /// Length of the longest container so far.
    widest: usize,
    random: &'r mut dyn FnMut(u64) -> u64,
    out: Vec<u8>,
}

impl Scribe<'_> {
    fn one(&mut self) {
        let symbol = self.spelling[self.at];
        self.at += 1;
        match symbol {
            // Every enumeration has the number 1; most have 2.
            symbol::I32 => {
                let number = 1 + u32::from((self.random)(8) == 0);
                self.out.extend(number.to_le_bytes());
            }
            symbol::U32 => self.number(4),
            symbol::I64 | symbol::U64 => self.number(8),
            symbol::U8 => self.out.push(1),
            symbol::BOOL => self.flag(),
            symbol::STRING => {
                assert_eq!(self.spelling[self.at], symbol::CHAR);
                self.at += 1;
                let len = self.length();
                for _ in 0..len {
                    let byte = b'a' + (self.random)(26) as u8;
                    self.out.push(byte);
                }
            }
            symbol::VECTOR => self.many(1),
            symbol::MAP => self.many(2),
            symbol::OPTIONAL => {
                self.flag();
                self.keep(self.out.last() == Some(&1));
            }
            symbol::EXPECTED => {
                self.flag();
                let fine = self.out.last() == Some(&1);
                self.keep(fine);
                self.keep(!fine);
            }
            symbol::VARIANT => {
                let alternatives = self.alternatives();
                let chosen = (self.random)(alternatives);
                self.out.push(chosen as u8);
                (0..alternatives).for_each(|index| self.keep(index == chosen));
                self.at += 1;
            }
            symbol::VOID => {}
            symbol::STRUCT => {
                while self.spelling[self.at] != symbol::END {
                    match self.spelling[self.at..] {
                        // The second number stands at a multiple of its size.
                        [symbol::U8, symbol::U64, 137, 137, ..] => {
                            self.one();
                            self.out.extend([0; 7]);
                        }
                        [137, 137, ..] => self.at += 2,
                        _ => self.one(),
                    }
                }
                self.at += 1;
            }
            other => panic!("symbol {other} at {}", self.at - 1),
        }
    }

    fn number(&mut self, bytes: usize) {
        let number = (self.random)(u64::MAX);
        self.out.extend_from_slice(&number.to_le_bytes()[..bytes]);
    }

    fn flag(&mut self) {
        let flag = (self.random)(2) as u8;
        self.out.push(flag);
    }

    fn length(&mut self) -> usize {
        let len = (self.random)(self.longest as u64 + 1) as usize;
        self.widest = self.widest.max(len);
        Writer { out: &mut self.out, width: self.width, fits: true }.length(len);
        len
    }

    fn many(&mut self, parts: usize) {
        let (len, start) = (self.length(), self.at);
        for _ in 0..len {
            self.at = start;
            (0..parts).for_each(|_| self.one());
        }
        self.at = start;
        (0..parts).for_each(|_| self.skip());
    }

    /// Writes the next type, or skips it.
    fn keep(&mut self, wanted: bool) {
        if wanted { self.one() } else { self.skip() }
    }

    fn skip(&mut self) {
        let (out, widest, longest) = (std::mem::take(&mut self.out), self.widest, self.longest);
        // No nested type is entered twice, so that skipping costs as much as the signature is long.
        self.longest = 0;
        self.one();
        (self.out, self.widest, self.longest) = (out, widest, longest);
    }

    fn alternatives(&mut self) -> u64 {
        let start = self.at;
        let mut count = 0;
        while self.spelling[self.at] != symbol::END {
            self.skip();
            count += 1;
        }
        self.at = start;
        count
    }
}

/// Returns a body of this signature, the width its lengths need, and the width they have.
fn scribble(
    spelling: &'static [u8],
    width: Width,
    longest: usize,
    seed: u64,
    spelled: bool,
) -> (Vec<u8>, Width) {
    let mut state = seed | 1;
    let mut random = |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        if below == u64::MAX { state } else { state % below }
    };
    let mut scribe =
        Scribe { spelling, at: 0, width, longest, widest: 0, random: &mut random, out: Vec::new() };
    scribe.one();
    assert_eq!(scribe.at, spelling.len(), "the spelling is read whole");
    let hash = TypeSignature::new(spelling).hash();
    let mut body = Vec::new();
    if spelled || width != Width::One {
        body.extend((hash | OPTIONS_FOLLOW).to_le_bytes());
        body.push((width as u8) << OPTION_WIDTH_SHIFT | if spelled { OPTION_SIGNATURE } else { 0 });
        if spelled {
            body.extend_from_slice(spelling);
            body.push(0);
        }
    } else {
        body.extend(hash.to_le_bytes());
    }
    let needed = Width::of(scribe.widest);
    body.extend(scribe.out);
    (body, needed)
}

type Side = (&'static str, &'static [u8], fn(&Shape, &[u8], bool) -> Result<Vec<u8>, PackError>);

fn sides(shape: &'static Shape) -> impl Iterator<Item = Side> {
    let sides: [Side; 2] = [
        ("arguments", shape.arguments, Shape::rewrite_arguments),
        ("reply", shape.reply, Shape::rewrite_reply),
    ];
    sides.into_iter().filter(|(_, spelling, _)| !spelling.is_empty())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Encodes random values of every message of the tables at every width, and compares.
    #[test]
    fn every_message_comes_back(seed: u64, spelled: bool, long: bool) {
        for shape in TABLE.iter().chain(ADDED) {
            for (side, spelling, rewrite) in sides(shape) {
                for width in [Width::One, Width::Two, Width::Four, Width::Eight] {
                    let nested = spelling.iter().filter(|s| [symbol::VECTOR, symbol::MAP].contains(s)).count() > 1;
                    let longest = if long && !nested && width != Width::One { 300 } else { 5 };
                    let (body, needed) = scribble(spelling, width, longest, seed, spelled);
                    let again = match rewrite(shape, &body, spelled) {
                        Err(PackError::Enum { value: 2, .. }) => continue,
                        outcome => outcome.unwrap_or_else(|error| panic!("{} of {}: {error}", side, shape.name)),
                    };
                    let (expected, _) = scribble(spelling, needed, longest, seed, spelled);
                    prop_assert_eq!(again, expected, "{} of {}", side, shape.name);
                }
            }
        }
    }

    /// Decodes a valid body with one byte changed, removed or duplicated. It succeeds or fails, but
    /// never panics.
    #[test]
    fn a_damaged_message_is_refused_or_read(seed: u64, at: prop::sample::Index, byte: u8, cut: prop::sample::Index) {
        for shape in TABLE.iter().chain(ADDED) {
            for (_, spelling, rewrite) in sides(shape) {
                let (body, _) = scribble(spelling, Width::One, 5, seed, false);
                let cut = cut.index(body.len());
                prop_assert!(rewrite(shape, &body[..cut], false).is_err());
                // Bytes behind a value are refused, or ignored in a type with compatible fields.
                let mut longer = body.clone();
                longer.push(byte);
                if let Ok(again) = rewrite(shape, &longer, false) {
                    prop_assert_eq!(&again, &body);
                }
                let mut damaged = body;
                let at = at.index(damaged.len());
                damaged[at] = byte;
                if let Ok(again) = rewrite(shape, &damaged, false) {
                    prop_assert_eq!(rewrite(shape, &again, false), Ok(again));
                }
            }
        }
    }

    #[test]
    fn any_bytes_are_refused_or_read(mut bytes in prop::collection::vec(any::<u8>(), 0..200), options: u8) {
        for shape in TABLE.iter().chain(ADDED) {
            for (_, spelling, rewrite) in sides(shape) {
                let _ = rewrite(shape, &bytes, false);
                if bytes.len() > 5 {
                    bytes[..4].copy_from_slice(&(TypeSignature::new(spelling).hash() | 1).to_le_bytes());
                    bytes[4] = options;
                    let _ = rewrite(shape, &bytes, true);
                }
            }
        }
    }
}

#[test]
fn lengths_are_as_wide_as_the_longest_container_needs() {
    for (len, options) in
        [(0, None), (255, None), (256, Some(0x08)), (65535, Some(0x08)), (65536, Some(0x10))]
    {
        let text = vec![b'x'; len];
        let mut body = Vec::new();
        encode(&text, &mut body);
        let head = u32::from_le_bytes(body[..4].try_into().unwrap());
        assert_eq!(head & 1, u32::from(options.is_some()), "{len}");
        if let Some(options) = options {
            assert_eq!(body[4], options, "{len}");
        }
        assert_eq!(decode::<Vec<u8>>(&body), Ok(text));
    }
}

fn body_of<T: Wire>(options: Option<u8>, payload: &[u8]) -> Vec<u8> {
    let mut body = (T::SIGNATURE.hash() | u32::from(options.is_some())).to_le_bytes().to_vec();
    body.extend(options);
    body.extend_from_slice(payload);
    body
}

#[test]
fn bad_bodies_are_refused_by_name() {
    let refused = |body: &[u8]| decode::<Vec<String>>(body).unwrap_err();
    assert_eq!(refused(b""), PackError::Truncated { needed: 4, left: 0 });
    let body = body_of::<Vec<String>>(None, &[3, 0]);
    assert_eq!(refused(&body), PackError::Truncated { needed: 3, left: 1 });
    let body = body_of::<Vec<String>>(None, &[1, 2, b'a', b'b', b'c']);
    assert_eq!(refused(&body), PackError::Trailing(1));
    let body = body_of::<Vec<String>>(None, &[1, 1, 0xff]);
    assert_eq!(refused(&body), PackError::Utf8);
    // The total length is truncated.
    let body = body_of::<Vec<String>>(Some(2), &[0; 3]);
    assert_eq!(refused(&body), PackError::Truncated { needed: 4, left: 3 });
    // The signature has no end.
    let body = body_of::<Vec<String>>(Some(4), &[1; 20]);
    assert_eq!(refused(&body), PackError::Truncated { needed: 1, left: 0 });
    let body = body_of::<Vec<String>>(Some(0x18), &[0xff; 8]);
    assert_eq!(refused(&body), PackError::TooMany(u64::MAX));
    let body = body_of::<Vec<u8>>(Some(0x18), &(1u64 << 63).to_le_bytes());
    let needed = usize::try_from(1u64 << 63).unwrap_or(usize::MAX);
    assert_eq!(decode::<Vec<u8>>(&body), Err(PackError::Truncated { needed, left: 0 }));
    assert_eq!(decode::<bool>(&body_of::<bool>(None, &[2])), Err(PackError::Bool(2)));
    assert_eq!(decode::<Option<u64>>(&body_of::<Option<u64>>(None, &[7])), Err(PackError::Bool(7)));
    assert!(decode_nothing::<()>(b"x").is_err() && decode_nothing::<()>(b"").is_ok());
}

#[test]
fn unused_options_are_ignored() {
    for options in [0x20, 0x40, 0x80, 0xe0] {
        let body = body_of::<Vec<String>>(Some(options), &[1, 1, b'a']);
        assert_eq!(decode::<Vec<String>>(&body), Ok(vec!["a".to_owned()]), "{options:#x}");
    }
}

#[test]
fn a_body_of_another_type_shows_what_it_is() {
    let mut body = Vec::new();
    encode_spelled(&Ok::<bool, ErrorCode>(true), &mut body);
    let error = decode::<Answer<i64>>(&body).unwrap_err();
    assert_eq!(error.to_string(), "type hash 0x90e800d2 (spelled 870b01) where 0xb83381fe was expected");
    assert_eq!(Error::from(error).code(), ErrorCode::InvalidVersion);
}

#[test]
fn enumerations_and_variants_refuse_unknown_numbers() {
    let reply = TABLE.iter().find(|shape| shape.name == "Ping").unwrap();
    let mut body = body_of::<Answer<crate::api::PingReply>>(None, &[1]);
    body.extend([0; 8]);
    body.extend(3i32.to_le_bytes());
    let error = reply.rewrite_reply(&body, false).unwrap_err();
    assert_eq!(error, PackError::Enum { name: "client status", value: 3 });
    let body = body_of::<mooncake_core::replica::ReplicaLocation>(None, &[5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(decode::<mooncake_core::replica::ReplicaLocation>(&body), Err(PackError::Variant(5)));
}

#[test]
fn keys_are_borrowed_from_the_body() {
    use mooncake_core::ids::ClientId;
    let request = PutStart {
        client: ClientId(Uuid::new(1, 2)),
        key: b"\0\xff\n",
        size: 9,
        config: Cow::Owned(Default::default()),
        tenant: "default",
    };
    let mut body = Vec::new();
    encode(&request, &mut body);
    let read: PutStart<'_> = decode(&body).unwrap();
    assert_eq!(read, request);
    assert!(body.as_ptr_range().contains(&read.key.as_ptr()));
    assert_eq!(Ping::MIN_LEN, 16);
    assert_eq!(<MountSegment<'_>>::MIN_LEN, 16 + 1 + 16 + 3 + 16);
}
