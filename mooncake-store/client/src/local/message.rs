//! Data connections: a call and its answer, one at a time.
//!
//! Each is a head of 8 bytes (length of the body, what it is, three zeroes) and a body in
//! struct_pack, the encoding of the calls to a master. Memory is named by the number it was shared
//! under, offset and length; no value is ever in a body.

use std::borrow::Cow;

use mooncake_core::ids::Uuid;
use mooncake_core::replica::{ReplicaList, ReplicateConfig};
use mooncake_core::{Error, ErrorCode, Result};

use mooncake_protocol::pack::{self, List, Pack, PackError, Unpack, wire_fields};
use mooncake_protocol::wire::TaskInfo;

/// Length of the head of a call or answer.
pub const HEAD_LEN: usize = 8;
/// Longest body.
pub const MAX_BODY: u32 = 64 << 20;

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Verb {
    /// [`Write`]: store objects. An [`Item`] each; `a` is 1 when the key was there already.
    Write = 1,
    /// [`Read`]: read objects to the front of memory. An [`Item`] each; `a` is the length.
    Read = 2,
    /// [`Fetch`]: read objects of unknown length into one piece of memory. An [`Item`] each; `a` is
    /// the length, `b` where it is in that memory, or [`NO_ROOM`].
    Fetch = 3,
    /// [`Keys`]: where objects lie. An [`Item`] each; `a` is the length, `b` the number to read it
    /// by.
    Locate = 4,
    /// [`Ranges`]: read ranges of located objects. An [`Item`] each.
    Ranges = 5,
    /// [`Keys`]: whether objects are there. An [`Item`] each; `a` is 0 or 1.
    Exist = 6,
    /// [`Keys`]: remove objects. An [`Item`] each; `a` is whether it was there.
    Remove = 7,
    /// [`Pattern`]: remove what matches, or everything for none. One [`Item`]; `a` is how many.
    RemoveMatching = 8,
    /// [`Keys`]: the replicas of objects. [`Replicas`].
    Replicas = 9,
    /// [`struct@Copy`]: ask for a copy, or for a move if there is a source. One [`Item`]; `a` and
    /// `b` are the task.
    Copy = 10,
    /// [`TaskOf`]: where a task stands. [`TaskInfo`].
    Task = 11,
    /// `()`: whether the master answers. One [`Item`]; `a` is 0 or 1.
    Health = 12,
}

impl Verb {
    /// All of them.
    pub const ALL: [Self; 12] = [
        Self::Write,
        Self::Read,
        Self::Fetch,
        Self::Locate,
        Self::Ranges,
        Self::Exist,
        Self::Remove,
        Self::RemoveMatching,
        Self::Replicas,
        Self::Copy,
        Self::Task,
        Self::Health,
    ];

    fn from_number(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|verb| *verb as u8 == number)
    }
}

/// What an answer begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// What the verb promises.
    Answer = 0,
    /// An [`Item`] with the error of the whole call.
    Failure = 1,
}

/// [`Item::b`] of a value for which the memory had no room left.
pub const NO_ROOM: u64 = u64::MAX;

/// The head of a body of that length; `what` is a [`Verb`] or [`Status`].
pub fn head(len: u32, what: u8) -> [u8; HEAD_LEN] {
    let [a, b, c, d] = len.to_le_bytes();
    [a, b, c, d, what, 0, 0, 0]
}

/// Verb and length of a call. `Invalid` for one that is none, or too long.
pub fn parse_call(head: [u8; HEAD_LEN]) -> Result<(Verb, u32)> {
    let (what, len) = parse(head)?;
    let verb = Verb::from_number(what).ok_or_else(|| Error::invalid(format!("a call of kind {what}")))?;
    Ok((verb, len))
}

/// Status and length of an answer, as [`parse_call`].
pub fn parse_answer(head: [u8; HEAD_LEN]) -> Result<(Status, u32)> {
    let (what, len) = parse(head)?;
    let status = [Status::Answer, Status::Failure].into_iter().find(|status| *status as u8 == what);
    Ok((status.ok_or_else(|| Error::invalid(format!("an answer of kind {what}")))?, len))
}

fn parse([a, b, c, d, what, rest @ ..]: [u8; HEAD_LEN]) -> Result<(u8, u32)> {
    let len = u32::from_le_bytes([a, b, c, d]);
    if rest != [0; 3] || len > MAX_BODY {
        return Err(Error::invalid(format!("a head with {len} bytes to come and {rest:?} at its end")));
    }
    Ok((what, len))
}

/// Appends head and body. `Invalid` for a body that is too long.
pub fn append(out: &mut Vec<u8>, what: u8, body: &impl Pack) -> Result<()> {
    let start = out.len();
    out.extend_from_slice(&[0; HEAD_LEN]);
    pack::encode(body, out);
    let len = out.len() - start - HEAD_LEN;
    let fits = u32::try_from(len).ok().filter(|len| *len <= MAX_BODY);
    let Some(len) = fits else {
        out.truncate(start);
        return Err(Error::invalid(format!(
            "a call of {len} bytes, {MAX_BODY} at most; ask for less at a time"
        )));
    };
    out[start..start + HEAD_LEN].copy_from_slice(&head(len, what));
    Ok(())
}

/// Reads a body.
pub fn body<'a, B: Unpack<'a>>(bytes: &'a [u8]) -> Result<B> {
    pack::decode(bytes).map_err(Error::from)
}

/// A range of shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Number of the memory.
    pub memory: u32,
    /// First byte in it.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

/// An object to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WriteItem<'a> {
    /// Its key.
    pub key: &'a [u8],
    /// Its value, in pieces that follow each other.
    pub pieces: Vec<Place>,
}

/// Objects to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write<'a> {
    /// Whether they may replace others.
    pub upsert: bool,
    /// How they are to be kept.
    pub config: Cow<'a, ReplicateConfig>,
    /// The objects.
    pub items: Vec<WriteItem<'a>>,
}

/// An object to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadItem<'a> {
    /// Its key.
    pub key: &'a [u8],
    /// To the front of which memory.
    pub into: Place,
}

/// Objects to read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Read<'a> {
    /// The objects.
    pub items: List<'a, ReadItem<'a>>,
}

/// Objects to read, of whatever length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fetch<'a> {
    /// Their keys.
    pub keys: List<'a, &'a [u8]>,
    /// Memory for all of them.
    pub into: Place,
}

/// Objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keys<'a> {
    /// Their keys.
    pub keys: List<'a, &'a [u8]>,
    /// Whether leases do not count, for a removal.
    pub force: bool,
}

/// A range of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RangeItem {
    /// Number the object was located under.
    pub object: u64,
    /// First byte in the object.
    pub offset: u64,
    /// To where, and with that how much.
    pub into: Place,
}

/// Ranges to read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ranges {
    /// The ranges.
    pub items: Vec<RangeItem>,
}

/// What to remove.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern<'a> {
    /// A regular expression; everything for none.
    pub pattern: Option<&'a str>,
    /// Whether leases do not count.
    pub force: bool,
}

/// A copy or a move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Copy<'a> {
    /// Of which object.
    pub key: &'a [u8],
    /// For a move: the segment it leaves.
    pub source: Option<&'a str>,
    /// The segments it goes to; one for a move.
    pub targets: List<'a, &'a str>,
}

/// A task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskOf {
    /// Its number.
    pub task: Uuid,
}

/// What became of one item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// Zero, or the number of an error.
    pub code: i32,
    /// What there is to say about an error.
    pub text: String,
    /// See [`Verb`].
    pub a: u64,
    /// See [`Verb`].
    pub b: u64,
}

/// What became of several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Items {
    /// Each, in order.
    pub items: Vec<Item>,
}

/// Replicas of several objects; an absent list is an object that is not there.
#[derive(Debug)]
pub struct Replicas {
    /// Each, in order.
    pub lists: Vec<Result<Option<ReplicaList>>>,
}

wire_fields!(structure Place { memory: u32, offset: u64, len: u64 });
wire_fields!(structure WriteItem<'a> { key: &'a [u8], pieces: Vec<Place> });
wire_fields!(structure Write<'a> { upsert: bool, config: Cow<'a, ReplicateConfig>, items: Vec<WriteItem<'a>> });
wire_fields!(structure ReadItem<'a> { key: &'a [u8], into: Place });
wire_fields!(structure Read<'a> { items: List<'a, ReadItem<'a>> });
wire_fields!(structure Fetch<'a> { keys: List<'a, &'a [u8]>, into: Place });
wire_fields!(structure Keys<'a> { keys: List<'a, &'a [u8]>, force: bool });
wire_fields!(structure RangeItem { object: u64, offset: u64, into: Place });
wire_fields!(structure Ranges { items: Vec<RangeItem> });
wire_fields!(structure Pattern<'a> { pattern: Option<&'a str>, force: bool });
wire_fields!(structure Copy<'a> { key: &'a [u8], source: Option<&'a str>, targets: List<'a, &'a str> });
wire_fields!(structure TaskOf { task: Uuid });
wire_fields!(structure Item { code: i32, text: String, a: u64, b: u64 });
wire_fields!(structure Items { items: Vec<Item> });
wire_fields!(structure Replicas { lists: Vec<Result<Option<ReplicaList>>> });

impl Item {
    /// What a good or bad end comes to.
    pub fn of(outcome: Result<(u64, u64)>) -> Self {
        match outcome {
            Ok((a, b)) => Self { code: 0, text: String::new(), a, b },
            Err(error) => Self { code: error.code().number(), text: said(&error), a: 0, b: 0 },
        }
    }

    /// The numbers, or the error.
    pub fn result(self) -> Result<(u64, u64)> {
        if self.code == 0 {
            Ok((self.a, self.b))
        } else {
            Err(Error::new(ErrorCode::from_number(self.code), self.text))
        }
    }
}

/// What an error says, with the path it took but without its number, which travels beside it.
fn said(error: &Error) -> String {
    let all = error.to_string();
    let code = error.code();
    let number = format!(" ({} {})", code.name(), code.number());
    all.strip_suffix(&number).unwrap_or(&all).to_owned()
}

/// Reads a body as what the verb takes, or as an answer to it, and writes it again: for tests of
/// what a stranger may send.
///
/// # Errors
/// It is none.
pub fn rewrite(verb: Verb, answer: bool, bytes: &[u8]) -> Result<Vec<u8>, PackError> {
    fn again<'a, B: Unpack<'a> + Pack>(bytes: &'a [u8]) -> Result<Vec<u8>, PackError> {
        let mut out = Vec::new();
        pack::encode(&pack::decode::<B>(bytes)?, &mut out);
        Ok(out)
    }
    match (verb, answer) {
        (Verb::Write, false) => again::<Write<'_>>(bytes),
        (Verb::Read, false) => again::<Read<'_>>(bytes),
        (Verb::Fetch, false) => again::<Fetch<'_>>(bytes),
        (Verb::Locate | Verb::Exist | Verb::Remove | Verb::Replicas, false) => again::<Keys<'_>>(bytes),
        (Verb::Ranges, false) => again::<Ranges>(bytes),
        (Verb::RemoveMatching, false) => again::<Pattern<'_>>(bytes),
        (Verb::Copy, false) => again::<Copy<'_>>(bytes),
        (Verb::Task, false) => again::<TaskOf>(bytes),
        (Verb::Health, false) => again::<()>(bytes),
        (Verb::Replicas, true) => again::<Replicas>(bytes),
        (Verb::Task, true) => again::<TaskInfo>(bytes),
        (_, true) => again::<Items>(bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_come_back_and_nonsense_is_refused() {
        assert_eq!(parse_call(head(7, Verb::Fetch as u8)).unwrap(), (Verb::Fetch, 7));
        assert_eq!(parse_answer(head(0, Status::Failure as u8)).unwrap(), (Status::Failure, 0));
        for bad in [head(MAX_BODY + 1, 1), head(1, 0), head(1, 13), head(1, 255)] {
            assert!(parse_call(bad).is_err(), "{bad:?}");
        }
        assert!(parse_answer(head(1, 2)).is_err());
        let mut bad = head(1, 1);
        bad[7] = 1;
        assert!(parse_call(bad).is_err());
    }

    #[test]
    fn calls_come_back() {
        let place = Place { memory: 1, offset: 2, len: 3 };
        let write = Write {
            upsert: true,
            config: Cow::Owned(ReplicateConfig::replicas(3)),
            items: vec![WriteItem { key: b"\0k", pieces: vec![place, place] }],
        };
        let mut bytes = Vec::new();
        append(&mut bytes, Verb::Write as u8, &write).unwrap();
        let (verb, len) = parse_call(*bytes.first_chunk().unwrap()).unwrap();
        assert_eq!((verb, len as usize), (Verb::Write, bytes.len() - HEAD_LEN));
        assert_eq!(body::<Write<'_>>(&bytes[HEAD_LEN..]).unwrap(), write);
        assert_eq!(rewrite(Verb::Write, false, &bytes[HEAD_LEN..]).unwrap(), bytes[HEAD_LEN..]);
        assert!(rewrite(Verb::Task, false, &bytes[HEAD_LEN..]).is_err());
    }

    #[test]
    fn errors_keep_number_and_text() {
        let error = Error::new(ErrorCode::LeaseExpired, "too late").context("\"k\"");
        let item = Item::of(Err(error));
        assert_eq!((item.code, item.text.as_str()), (-707, "\"k\": too late"));
        assert_eq!(item.result().unwrap_err().to_string(), "\"k\": too late (LEASE_EXPIRED -707)");
        assert_eq!(Item::of(Ok((1, 2))).result().unwrap(), (1, 2));
    }

    #[test]
    fn what_is_too_long_is_not_sent() {
        let long = vec![0; MAX_BODY as usize];
        let mut out = vec![1];
        let keys = Keys { keys: vec![&long[..]].into(), force: false };
        assert!(append(&mut out, 1, &keys).is_err());
        assert_eq!(out, [1]);
    }
}
