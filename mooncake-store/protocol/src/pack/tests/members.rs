//! Tests of compatible fields with a second encoder, which knows values and not types.

use proptest::prelude::*;

use super::super::*;
use crate::type_signature::TypeSignature;

/// A value as the rules of the encoding see it.
#[derive(Clone, Debug, PartialEq)]
enum Plain {
    Number(Vec<u8>),
    Text(Vec<u8>),
    List(Vec<Plain>),
    /// The value of an optional or of a response, if there is one.
    Choice(u8, Box<Plain>),
    Fields(Vec<Plain>),
    Member(u8, Option<Box<Plain>>),
}

impl Plain {
    fn longest(&self) -> usize {
        match self {
            Plain::Number(_) | Plain::Member(_, None) => 0,
            Plain::Text(text) => text.len(),
            Plain::List(items) => items.iter().fold(items.len(), |most, item| most.max(item.longest())),
            Plain::Fields(fields) => fields.iter().map(Plain::longest).max().unwrap_or(0),
            Plain::Choice(_, value) | Plain::Member(_, Some(value)) => value.longest(),
        }
    }

    fn append(&self, width: usize, out: &mut Vec<u8>) {
        match self {
            Plain::Number(bytes) => out.extend(bytes),
            Plain::Text(text) => {
                out.extend(&text.len().to_le_bytes()[..width]);
                out.extend(text);
            }
            Plain::List(items) => {
                out.extend(&items.len().to_le_bytes()[..width]);
                items.iter().for_each(|item| item.append(width, out));
            }
            Plain::Choice(which, value) => {
                out.push(*which);
                value.append(width, out);
            }
            Plain::Fields(fields) => fields.iter().for_each(|field| field.append(width, out)),
            Plain::Member(..) => {}
        }
    }

    /// Visits the compatible fields in the order of the encoding.
    fn members(&mut self, visit: &mut dyn FnMut(&mut Option<Box<Plain>>)) {
        for version in 1..64 {
            self.members_of(version, visit);
        }
    }

    fn members_of(&mut self, version: u8, visit: &mut dyn FnMut(&mut Option<Box<Plain>>)) {
        match self {
            Plain::Number(_) | Plain::Text(_) => {}
            Plain::List(items) | Plain::Fields(items) => {
                items.iter_mut().for_each(|item| item.members_of(version, visit));
            }
            Plain::Choice(_, value) => value.members_of(version, visit),
            Plain::Member(of, value) if *of == version => visit(value),
            Plain::Member(..) => {}
        }
    }

    /// Returns the body in the form with a total length, and the end of each compatible field.
    fn body(&self, signature: TypeSignature, spelled: bool) -> (Vec<u8>, Vec<usize>) {
        let (code, width) = match self.longest() {
            0..256 => (0, 1),
            256..65536 => (1, 2),
            _ => (2, 4),
        };
        let mut behind = Vec::new();
        if spelled {
            behind.extend(signature.as_bytes());
            behind.push(0);
        }
        self.append(width, &mut behind);
        let mut ends = vec![behind.len()];
        self.clone().members(&mut |member| {
            behind.push(u8::from(member.is_some()));
            member.iter().for_each(|value| value.append(width, &mut behind));
            ends.push(behind.len());
        });
        let small = behind.len() + 7 < 65536;
        let head = if small { 7 } else { 9 };
        let mut body = (signature.hash() | 1).to_le_bytes().to_vec();
        body.push(code << 3 | u8::from(spelled) << 2 | if small { 1 } else { 2 });
        body.extend(&(behind.len() + head).to_le_bytes()[..head - 5]);
        body.extend(behind);
        (body, ends.into_iter().map(|end| end + head).collect())
    }
}

/// A source of random values.
struct Draw(u64);

impl Draw {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % limit
    }

    fn number(&mut self) -> u64 {
        self.below(1 << 53)
    }

    fn text(&mut self) -> Vec<u8> {
        let len = match self.below(40) {
            0 => 300,
            1 => 70_000,
            _ => self.below(6),
        };
        (0..len).map(|at| at as u8).collect()
    }

    fn many<T>(&mut self, mut one: impl FnMut(&mut Self) -> T) -> Vec<T> {
        (0..self.below(4)).map(|_| one(self)).collect()
    }

    fn maybe<T>(&mut self, one: impl FnOnce(&mut Self) -> T) -> Option<T> {
        (self.below(3) > 0).then(|| one(self))
    }
}

fn number(number: u64) -> Plain {
    Plain::Number(number.to_le_bytes().to_vec())
}

fn texts(texts: &[Vec<u8>]) -> Plain {
    Plain::List(texts.iter().cloned().map(Plain::Text).collect())
}

/// Declares types with compatible fields of these versions.
macro_rules! types {
    ($module:ident: $first:literal, $second:literal, $third:literal) => {
        mod $module {
            use super::*;

            #[derive(Clone, Debug, PartialEq)]
            pub(super) struct Inner {
                number: u64,
                note: Option<Vec<Vec<u8>>>,
                text: Vec<u8>,
            }

            wire_fields!(structure Inner { number: u64, note: Vec<Vec<u8>> [since $first], text: Vec<u8> });

            #[derive(Clone, Debug, PartialEq)]
            pub(super) struct Outer {
                one: Inner,
                mark: Option<u64>,
                list: Vec<Inner>,
                maybe: Option<Inner>,
                outcomes: Vec<Answer<Inner>>,
                pairs: Pairs<u64, Inner>,
                tail: Option<Vec<u8>>,
            }

            wire_fields!(structure Outer {
                one: Inner,
                mark: u64 [since $second],
                list: Vec<Inner>,
                maybe: Option<Inner>,
                outcomes: Vec<Answer<Inner>>,
                pairs: Pairs<u64, Inner>,
                tail: Vec<u8> [since $third],
            });

            impl Inner {
                fn draw(draw: &mut Draw) -> Self {
                    let note = draw.maybe(|draw| draw.many(Draw::text));
                    Self { number: draw.number(), note, text: draw.text() }
                }

                fn plain(&self) -> Plain {
                    let note = self.note.as_ref().map(|note| Box::new(texts(note)));
                    let text = Plain::Text(self.text.clone());
                    Plain::Fields(vec![number(self.number), Plain::Member($first, note), text])
                }
            }

            impl Outer {
                pub(super) fn draw(draw: &mut Draw) -> Self {
                    let outcome = |draw: &mut Draw| match draw.below(3) {
                        0 => Err(ErrorCode::ObjectNotFound),
                        _ => Ok(Inner::draw(draw)),
                    };
                    Self {
                        one: Inner::draw(draw),
                        mark: draw.maybe(Draw::number),
                        list: draw.many(Inner::draw),
                        maybe: draw.maybe(Inner::draw),
                        outcomes: draw.many(outcome),
                        pairs: Pairs(draw.many(|draw| (draw.number(), Inner::draw(draw)))),
                        tail: draw.maybe(Draw::text),
                    }
                }

                pub(super) fn plain(&self) -> Plain {
                    let nothing = || Plain::Fields(Vec::new());
                    let maybe = self.maybe.as_ref().map_or(Plain::Choice(0, Box::new(nothing())), |inner| {
                        Plain::Choice(1, Box::new(inner.plain()))
                    });
                    let outcome = |outcome: &Answer<Inner>| match outcome {
                        Ok(inner) => Plain::Choice(1, Box::new(inner.plain())),
                        Err(code) => {
                            Plain::Choice(0, Box::new(Plain::Number(code.number().to_le_bytes().to_vec())))
                        }
                    };
                    let pairs = self.pairs.0.iter();
                    Plain::Fields(vec![
                        self.one.plain(),
                        Plain::Member($second, self.mark.map(|mark| Box::new(number(mark)))),
                        Plain::List(self.list.iter().map(Inner::plain).collect()),
                        maybe,
                        Plain::List(self.outcomes.iter().map(outcome).collect()),
                        Plain::List(
                            pairs.map(|(key, inner)| Plain::Fields(vec![number(*key), inner.plain()])).collect(),
                        ),
                        Plain::Member($third, self.tail.clone().map(|tail| Box::new(Plain::Text(tail)))),
                    ])
                }
            }

            pub(super) fn check(draw: &mut Draw) -> Result<(), TestCaseError> {
                let value = Outer::draw(draw);
                check_value(draw, &value, value.plain(), Outer::plain)
            }
        }
    };
}

types!(ascending: 1, 2, 3);
types!(descending: 3, 2, 1);
types!(equal: 5, 5, 5);
types!(far: 63, 7, 20);

/// Compares one value in every form with the second encoder.
fn check_value<T: Pack + for<'a> Unpack<'a> + PartialEq + std::fmt::Debug>(
    draw: &mut Draw,
    value: &T,
    plain: Plain,
    to_plain: impl Fn(&T) -> Plain,
) -> Result<(), TestCaseError> {
    let (spelled, _) = plain.body(T::SIGNATURE, true);
    let mut written = Vec::new();
    encode_spelled(value, &mut written);
    prop_assert!(written == spelled, "with its signature: {value:?}");
    prop_assert!(decode::<T>(&spelled).as_ref() == Ok(value));

    let (body, ends) = plain.body(T::SIGNATURE, false);
    let mut written = Vec::new();
    encode(value, &mut written);
    if value.has_members() {
        prop_assert!(written == body, "without its signature: {value:?}");
    } else {
        prop_assert!(written.len() < body.len(), "a body without members has the earlier form");
    }
    prop_assert!(decode::<T>(&written).as_ref() == Ok(value));
    prop_assert!(decode::<T>(&body).as_ref() == Ok(value));

    // Fields of a later version follow.
    let mut longer = body.clone();
    longer.extend((0..draw.below(50)).map(|_| draw.0 as u8));
    for total in [body.len(), longer.len(), 60_000.max(longer.len()) + 1, usize::MAX] {
        prop_assert!(decode::<T>(&claiming(&longer, total)).as_ref() == Ok(value), "total {total}");
    }
    // Without a total length, the compatible fields do not count.
    let mut none = plain.clone();
    none.members(&mut |member| *member = None);
    let read = decode::<T>(&claiming(&body, 0)).map(|read| to_plain(&read));
    prop_assert!(read == Ok(none.clone()));
    let read = decode::<T>(&without_total(&body)).map(|read| to_plain(&read));
    prop_assert!(read == Ok(none));

    check_cuts::<T>(draw, &plain, &body, &ends, to_plain)
}

/// Cuts a body at every position in its compatible fields, or at some of them.
fn check_cuts<T: for<'a> Unpack<'a>>(
    draw: &mut Draw,
    plain: &Plain,
    body: &[u8],
    ends: &[usize],
    to_plain: impl Fn(&T) -> Plain,
) -> Result<(), TestCaseError> {
    let first = ends[0];
    let cuts: Vec<usize> = if body.len() - first < 200 {
        (first..body.len()).collect()
    } else {
        (0..100).map(|_| first + draw.below((body.len() - first) as u64) as usize).collect()
    };
    for cut in cuts {
        let whole = ends.iter().filter(|end| **end <= cut).count() - 1;
        let mut expected = plain.clone();
        let mut at = 0;
        expected.members(&mut |member| {
            if at >= whole {
                *member = None;
            }
            at += 1;
        });
        let read = decode::<T>(&claiming(&body[..cut], cut)).map(|read| to_plain(&read));
        prop_assert!(read == Ok(expected), "cut at {cut} of {}, the total length tells it", body.len());
        let read = decode::<T>(&claiming(&body[..cut], cut + 1)).map(drop);
        prop_assert!(matches!(read, Err(PackError::Truncated { .. })), "cut at {cut}: {read:?}");
    }
    let cut = draw.below(first as u64) as usize;
    prop_assert!(decode::<T>(&body[..cut]).is_err(), "cut at {cut} of {first}");
    Ok(())
}

/// Returns a body whose total length has eight bytes and this value.
fn claiming(body: &[u8], total: usize) -> Vec<u8> {
    let mut changed = body[..4].to_vec();
    changed.push(body[4] | 3);
    // The total length counts its own bytes.
    let grown = (total as u64).saturating_add(8 - total_len(body) as u64);
    changed.extend(if total > 0 { grown } else { 0 }.to_le_bytes());
    changed.extend(&body[5 + total_len(body)..]);
    changed
}

fn total_len(body: &[u8]) -> usize {
    [0, 2, 4, 8][usize::from(body[4] & 3)]
}

fn without_total(body: &[u8]) -> Vec<u8> {
    [&body[..4], &[body[4] & !3], &body[5 + total_len(body)..]].concat()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn members_of_every_version_come_back(seed in 1..u64::MAX) {
        let mut draw = Draw(seed);
        ascending::check(&mut draw)?;
        descending::check(&mut draw)?;
        equal::check(&mut draw)?;
        far::check(&mut draw)?;
    }
}

wire_fields!(structure Old { number: u64, text: Vec<u8> });

/// A struct before it had a compatible field.
#[derive(Debug, PartialEq)]
struct Old {
    number: u64,
    text: Vec<u8>,
}

/// The same struct of a later version.
struct New {
    number: u64,
    text: Vec<u8>,
    label: Option<Vec<u8>>,
}

wire_fields!(structure New { number: u64, text: Vec<u8>, label: Vec<u8> [since 1] });

#[test]
fn a_reader_without_the_member_skips_it() {
    assert_eq!(Old::SIGNATURE.hash(), New::SIGNATURE.hash());
    for label in [None, Some(b"label".to_vec())] {
        let mut body = Vec::new();
        encode_spelled(&vec![New { number: 7, text: b"t".to_vec(), label }], &mut body);
        assert_eq!(decode::<Vec<Old>>(&body), Ok(vec![Old { number: 7, text: b"t".to_vec() }]));
    }
    let mut body = Vec::new();
    encode(&Old { number: 7, text: b"t".to_vec() }, &mut body);
    let read = decode::<New>(&body).unwrap();
    assert_eq!((read.number, read.text, read.label), (7, b"t".to_vec(), None));
}

#[test]
fn a_wrong_member_is_refused() {
    let mut body = Vec::new();
    encode_spelled(&New { number: 7, text: b"t".to_vec(), label: Some(b"label".to_vec()) }, &mut body);
    let at = body.len() - 7;
    body[at] = 2;
    assert_eq!(decode::<New>(&body).err(), Some(PackError::Bool(2)));
}

#[test]
fn the_total_length_becomes_wider_with_the_body() {
    for (len, width) in [(10, 1), (65_000, 1), (65_520, 2), (70_000, 2)] {
        let mut body = vec![9; 3];
        encode(&New { number: 7, text: vec![1; len], label: Some(Vec::new()) }, &mut body);
        let body = &body[3..];
        assert_eq!(body[4] & 3, width, "{len}");
        let mut total = [0; 8];
        total[..total_len(body)].copy_from_slice(&body[5..5 + total_len(body)]);
        assert_eq!(u64::from_le_bytes(total), body.len() as u64, "{len}");
        assert_eq!(decode::<New>(body).unwrap().text.len(), len);
    }
}
