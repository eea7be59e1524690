//! Messages of data connections: a request and its response, one at a time.
//!
//! Each message is a head of 8 bytes and a body. The head holds the length of the body, the kind of
//! the message, and three zeroes. The body is in struct_pack, the encoding of the RPCs to a master.
//! Requests name a range of shared memory by the number of the memory block, an offset and a
//! length. No body contains a value.

use std::borrow::Cow;

use mooncake_core::ids::Uuid;
use mooncake_core::replica::{ReplicaList, ReplicateConfig};
use mooncake_core::{Error, ErrorCode, Result};

use mooncake_protocol::pack::{self, List, Pack, PackError, Unpack, wire_fields};
use mooncake_protocol::wire::TaskInfo;

/// Length in bytes of the head of a request or response.
pub const HEAD_LEN: usize = 8;
/// Maximum length of a body in bytes.
pub const MAX_BODY: u32 = 64 << 20;

/// Kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Verb {
    /// Request to store objects ([`Write`]). The response has an [`Item`] for each object; `a` is 1
    /// if the key existed.
    Write = 1,
    /// Request to read objects to the front of a memory range each ([`Read`]). The response has an
    /// [`Item`] for each object; `a` is the length.
    Read = 2,
    /// Request to read objects of unknown length into one memory range ([`Fetch`]). The response
    /// has an [`Item`] for each object. `a` is the length, and `b` the offset in the range or
    /// [`NO_ROOM`].
    Fetch = 3,
    /// Request to locate objects ([`Keys`]). The response has an [`Item`] for each object. `a` is
    /// the length, and `b` the number that names the object in a [`RangeItem`].
    Locate = 4,
    /// Request to read ranges of located objects ([`Ranges`]). The response has an [`Item`] for
    /// each range.
    Ranges = 5,
    /// Request to test for objects ([`Keys`]). The response has an [`Item`] for each key; `a` is 1
    /// if the object exists, else 0.
    Exist = 6,
    /// Request to remove objects ([`Keys`]). The response has an [`Item`] for each key; `a` is 1 if
    /// the object existed, else 0.
    Remove = 7,
    /// Request to remove all objects, or those that match a pattern ([`Pattern`]). The response has
    /// one [`Item`]; `a` is the number of removed objects.
    RemoveMatching = 8,
    /// Request for the replicas of objects ([`Keys`]). The response is [`Replicas`].
    Replicas = 9,
    /// Request for a copy task, or for a move task if there is a source ([`struct@Copy`]). The
    /// response has one [`Item`]; `a` and `b` are the halves of the identifier of the task.
    Copy = 10,
    /// Request for the progress of a task ([`TaskOf`]). The response is a [`TaskInfo`].
    Task = 11,
    /// Request to test whether the master responds (`()`). The response has one [`Item`]; `a` is 0
    /// or 1.
    Health = 12,
}

impl Verb {
    /// All kinds of requests.
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

/// Kind of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// Success, with the body that [`Verb`] names.
    Answer = 0,
    /// Failure of the whole call, with the error in an [`Item`].
    Failure = 1,
}

/// Value of [`Item::b`] for an object that does not fit into the memory range.
pub const NO_ROOM: u64 = u64::MAX;

/// Returns the head of a message with a body of `len` bytes. `what` is a [`Verb`] or a [`Status`].
pub fn head(len: u32, what: u8) -> [u8; HEAD_LEN] {
    let [a, b, c, d] = len.to_le_bytes();
    [a, b, c, d, what, 0, 0, 0]
}

/// Returns the verb and the length of the body of a request.
///
/// # Errors
/// Returns an error of kind `Invalid` for a malformed head and for a body above [`MAX_BODY`].
pub fn parse_call(head: [u8; HEAD_LEN]) -> Result<(Verb, u32)> {
    let (what, len) = parse(head)?;
    let verb = Verb::from_number(what).ok_or_else(|| Error::invalid(format!("a call of kind {what}")))?;
    Ok((verb, len))
}

/// Returns the status and the length of the body of a response.
///
/// # Errors
/// Returns the errors of [`parse_call`].
pub fn parse_answer(head: [u8; HEAD_LEN]) -> Result<(Status, u32)> {
    let (what, len) = parse(head)?;
    let status = [Status::Answer, Status::Failure].into_iter().find(|status| *status as u8 == what);
    Ok((status.ok_or_else(|| Error::invalid(format!("response of unknown kind {what}")))?, len))
}

fn parse([a, b, c, d, what, rest @ ..]: [u8; HEAD_LEN]) -> Result<(u8, u32)> {
    let len = u32::from_le_bytes([a, b, c, d]);
    if rest != [0; 3] || len > MAX_BODY {
        return Err(Error::invalid(format!("a head with {len} bytes to come and {rest:?} at its end")));
    }
    Ok((what, len))
}

/// Appends the head and the body of a message.
///
/// # Errors
/// Returns an error of kind `Invalid` for a body above [`MAX_BODY`].
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

/// Decodes a body.
pub fn body<'a, B: Unpack<'a>>(bytes: &'a [u8]) -> Result<B> {
    pack::decode(bytes).map_err(Error::from)
}

/// A range of shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Number of the memory block.
    pub memory: u32,
    /// Offset of the first byte in the memory block.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

/// An object to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WriteItem<'a> {
    /// Key of the object.
    pub key: &'a [u8],
    /// Consecutive pieces of the value.
    pub pieces: Vec<Place>,
}

/// Objects to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write<'a> {
    /// Permission to replace existing objects.
    pub upsert: bool,
    /// Replication settings of the objects.
    pub config: Cow<'a, ReplicateConfig>,
    /// The objects.
    pub items: Vec<WriteItem<'a>>,
}

/// An object to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadItem<'a> {
    /// Key of the object.
    pub key: &'a [u8],
    /// Memory range that receives the value, from its first byte on.
    pub into: Place,
}

/// Objects to read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Read<'a> {
    /// The objects.
    pub items: List<'a, ReadItem<'a>>,
}

/// Objects of unknown length to read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fetch<'a> {
    /// Keys of the objects.
    pub keys: List<'a, &'a [u8]>,
    /// Memory range for all values.
    pub into: Place,
}

/// Keys of objects, for several kinds of requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keys<'a> {
    /// Keys of the objects.
    pub keys: List<'a, &'a [u8]>,
    /// Removal in spite of leases; ignored by other requests.
    pub force: bool,
}

/// A range of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RangeItem {
    /// Number of the object, from [`Verb::Locate`].
    pub object: u64,
    /// Offset of the first byte in the object.
    pub offset: u64,
    /// Memory range that receives the bytes; its length is the length of the read.
    pub into: Place,
}

/// Ranges to read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ranges {
    /// The ranges.
    pub items: Vec<RangeItem>,
}

/// Objects to remove.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern<'a> {
    /// Regular expression that is searched for in the keys; `None` stands for every object.
    pub pattern: Option<&'a str>,
    /// Removal in spite of leases.
    pub force: bool,
}

/// Copy or move of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Copy<'a> {
    /// Key of the object.
    pub key: &'a [u8],
    /// Segment that the object leaves, for a move; `None` for a copy.
    pub source: Option<&'a str>,
    /// Segments that receive the object; exactly one for a move.
    pub targets: List<'a, &'a str>,
}

/// Identifier of a task, as a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskOf {
    /// Identifier of the task.
    pub task: Uuid,
}

/// Result for one item of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// Zero, or the number of an error code.
    pub code: i32,
    /// Text of the error; empty without one.
    pub text: String,
    /// First number of the result; see [`Verb`].
    pub a: u64,
    /// Second number of the result; see [`Verb`].
    pub b: u64,
}

/// Results for the items of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Items {
    /// Results in the order of the request.
    pub items: Vec<Item>,
}

/// Replicas of several objects; `None` for an object that does not exist.
#[derive(Debug)]
pub struct Replicas {
    /// Lists in the order of the request.
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
    /// Converts an outcome.
    pub fn of(outcome: Result<(u64, u64)>) -> Self {
        match outcome {
            Ok((a, b)) => Self { code: 0, text: String::new(), a, b },
            Err(error) => Self { code: error.code().number(), text: said(&error), a: 0, b: 0 },
        }
    }

    /// Returns the two numbers.
    ///
    /// # Errors
    /// Returns the error that the item holds.
    pub fn result(self) -> Result<(u64, u64)> {
        if self.code == 0 {
            Ok((self.a, self.b))
        } else {
            Err(Error::new(ErrorCode::from_number(self.code), self.text))
        }
    }
}

/// Returns the text of an error with its context, without the number of the code. [`Item::code`]
/// holds the number.
fn said(error: &Error) -> String {
    let all = error.to_string();
    let code = error.code();
    let number = format!(" ({} {})", code.name(), code.number());
    all.strip_suffix(&number).unwrap_or(&all).to_owned()
}

/// Decodes a body as a request of that verb, or as a response to one, and encodes the result again.
/// Tests use this to check messages from untrusted processes.
///
/// # Errors
/// Returns an error if the bytes are no such body.
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
