//! Execution of the calls of a shared client with the client of the daemon.

use std::sync::Arc;

use mooncake_core::fork::ParentOnly;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::admission::Place;
use mooncake_transport::{Slice, SliceMut, Transport};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::watch;

use super::guest::{Guest, Seat};
use super::host::{Owner, set};
use super::message::{
    self, Copy, Fetch, HEAD_LEN, Item, Items, Keys, NO_ROOM, Pattern, Place as MemoryPlace, Ranges, Read,
    Replicas, Status, TaskOf, Verb, Write,
};
use crate::errors::is_lost;
use crate::payload::PutOutcome;
use crate::put_options::PutOptions;
use crate::ranges::RangeRead;
use crate::state::Client;

/// Alignment in bytes of the values that are read into one memory range.
const ALIGN: u64 = 64;
/// Maximum size in bytes of a buffer that is kept for the next call.
const KEPT: usize = 1 << 16;

/// Serves one connection until it closes, the shared client is gone, or the daemon stops. A call
/// that has begun is always finished. Otherwise its transfer could still use memory that is already
/// reused.
pub(super) async fn run<T: Transport>(
    owner: &Arc<Owner<T>>,
    seat: Seat<T>,
    mut stream: ParentOnly<UnixStream>,
    place: &Place,
    mut stopped: watch::Receiver<bool>,
) -> Result<()> {
    let mut left = seat.left();
    let (mut body, mut answer) = (Vec::new(), Vec::new());
    loop {
        place.wait_for_request();
        let called = tokio::select! {
            biased;
            called = receive(&mut stream, &mut body, place) => called?,
            () = set(&mut left) => return Ok(()),
            () = set(&mut stopped) => return Ok(()),
        };
        let Some(verb) = called.filter(|_| place.work()) else { return Ok(()) };
        answer.clear();
        {
            let _counted = seat.call();
            if let Err(error) = make(&owner.client, &seat.guest, verb, &body, &mut answer).await {
                answer.clear();
                message::append(&mut answer, Status::Failure as u8, &Item::of(Err(error)))?;
            }
        }
        tokio::select! {
            biased;
            sent = stream.write_all(&answer) => sent?,
            () = set(&mut left) => return Ok(()),
        }
        body.clear();
        body.shrink_to(KEPT);
        answer.shrink_to(KEPT);
    }
}

/// Receives the next call. Returns `None` at the end of the connection.
async fn receive(stream: &mut UnixStream, body: &mut Vec<u8>, place: &Place) -> Result<Option<Verb>> {
    let mut head = [0; HEAD_LEN];
    match stream.read_exact(&mut head).await {
        Ok(_) => {}
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error.into()),
    }
    place.begin_request();
    let (verb, len) = message::parse_call(head)?;
    body.clear();
    // The buffer grows with the received bytes, not with the announced length.
    let got = stream.take(u64::from(len)).read_to_end(body).await?;
    Ok((got == len as usize).then_some(verb))
}

async fn make<T: Transport>(
    client: &Client<T>,
    guest: &Guest<T>,
    verb: Verb,
    body: &[u8],
    out: &mut Vec<u8>,
) -> Result<()> {
    let items = match verb {
        Verb::Write => write(client, guest, message::body(body)?).await?,
        Verb::Read => read(client, guest, message::body(body)?).await?,
        Verb::Fetch => fetch(client, guest, message::body(body)?).await?,
        Verb::Locate => locate(client, guest, message::body(body)?).await?,
        Verb::Ranges => ranges(client, guest, message::body(body)?).await?,
        Verb::Exist => {
            let Keys { keys, .. } = message::body(body)?;
            items(client.batch_exist(&keys).await?, |found| (u64::from(found), 0))
        }
        Verb::Remove => {
            let Keys { keys, force } = message::body(body)?;
            items(client.batch_remove(&keys, force).await?, |gone| (u64::from(gone), 0))
        }
        Verb::RemoveMatching => {
            let Pattern { pattern, force } = message::body(body)?;
            let count = match pattern {
                Some(pattern) => client.remove_matching(pattern, force).await?,
                None => client.remove_all(force).await?,
            };
            vec![Item::of(Ok((count, 0)))]
        }
        Verb::Copy => {
            let Copy { key, source, targets } = message::body(body)?;
            let task = match (source, &targets[..]) {
                (None, targets) => client.replicas().copy(key, targets).await?,
                (Some(source), [target]) => client.replicas().move_to(key, source, target).await?,
                (Some(_), targets) => {
                    return Err(Error::invalid(format!("a move to {} segments", targets.len())));
                }
            };
            vec![Item::of(Ok((task.first, task.second)))]
        }
        Verb::Replicas => {
            let Keys { keys, .. } = message::body(body)?;
            let lists = client.replicas().batch_list(&keys).await?;
            return message::append(out, Status::Answer as u8, &Replicas { lists });
        }
        Verb::Task => {
            let TaskOf { task } = message::body(body)?;
            return message::append(out, Status::Answer as u8, &client.replicas().task(task).await?);
        }
        Verb::Health => {
            message::body::<()>(body)?;
            vec![Item::of(Ok((u64::from(client.status().is_healthy().await), 0)))]
        }
    };
    message::append(out, Status::Answer as u8, &Items { items })
}

fn items<R>(outcomes: Vec<Result<R>>, numbers: impl Fn(R) -> (u64, u64)) -> Vec<Item> {
    outcomes.into_iter().map(|outcome| Item::of(outcome.map(&numbers))).collect()
}

fn missing() -> Error {
    Error::from(ErrorCode::ObjectNotFound)
}

fn slice<T: Transport>(guest: &Guest<T>, place: MemoryPlace) -> Result<Slice<T>> {
    let (region, range) = guest.range(place)?;
    region.slice(range)
}

fn slice_mut<T: Transport>(guest: &Guest<T>, place: MemoryPlace) -> Result<SliceMut<T>> {
    let (region, range) = guest.range(place)?;
    // SAFETY: the shared client allocates from its own memory and lends no byte of it to two calls.
    // A client that breaks this rule gets a mixture of both values, in its own memory. Code of this
    // module only copies these bytes and never interprets them.
    unsafe { region.slice_mut_unchecked(range) }
}

async fn write<T: Transport>(client: &Client<T>, guest: &Guest<T>, call: Write<'_>) -> Result<Vec<Item>> {
    let pieces =
        |pieces: &[MemoryPlace]| pieces.iter().map(|place| slice(guest, *place)).collect::<Result<_>>();
    let objects: Vec<(&[u8], Vec<Slice<T>>)> =
        call.items.iter().map(|item| Ok((item.key, pieces(&item.pieces)?))).collect::<Result<_>>()?;
    let existed = |outcome| (u64::from(outcome == PutOutcome::Existed), 0);
    let mut options = PutOptions::from(call.config.into_owned());
    if call.upsert {
        options = options.upsert();
    }
    Ok(items(client.batch_put(&objects, &options).await?, existed))
}

async fn read<T: Transport>(client: &Client<T>, guest: &Guest<T>, call: Read<'_>) -> Result<Vec<Item>> {
    let into = call.items.iter().map(|item| Ok((item.key, slice_mut(guest, item.into)?)));
    let read = client.batch_get_into(into.collect::<Result<_>>()?).await;
    read.located?;
    let length = |found: Option<usize>| found.map(|len| (len as u64, 0)).ok_or_else(missing);
    Ok(read.reads.into_iter().map(|read| Item::of(read.result.and_then(length))).collect())
}

async fn fetch<T: Transport>(client: &Client<T>, guest: &Guest<T>, call: Fetch<'_>) -> Result<Vec<Item>> {
    let located = client.ranges().locate(&call.keys).await?;
    let mut end = 0u64;
    // For each object to read: the range to read, and the index of the object in `answers`.
    let (mut reads, mut of) = (Vec::new(), Vec::new());
    let mut answers = Vec::with_capacity(located.len());
    for (i, found) in located.into_iter().enumerate() {
        let planned = found.and_then(|object| {
            let object = object.ok_or_else(missing)?;
            let len = object.size();
            let room = end.checked_add(len).is_some_and(|end| end <= call.into.len);
            if !room {
                return Ok((len, NO_ROOM));
            }
            let start = end;
            end = (start + len).next_multiple_of(ALIGN);
            let place = MemoryPlace { offset: call.into.offset.saturating_add(start), len, ..call.into };
            reads.push(RangeRead { object, offset: 0, into: slice_mut(guest, place)? });
            of.push(i);
            Ok((len, start))
        });
        answers.push(Item::of(planned));
    }
    for (i, read) in of.into_iter().zip(client.ranges().read(reads).await) {
        if let Err(error) = read.result {
            answers[i] = Item::of(Err(if is_lost(&error) { missing() } else { error }));
        }
    }
    Ok(answers)
}

async fn locate<T: Transport>(client: &Client<T>, guest: &Guest<T>, call: Keys<'_>) -> Result<Vec<Item>> {
    let located = client.ranges().locate(&call.keys).await?;
    let kept = |object: Option<_>| {
        let object: crate::Located = object.ok_or_else(missing)?;
        Ok((object.size(), guest.keep(object)))
    };
    Ok(located.into_iter().map(|found| Item::of(found.and_then(kept))).collect())
}

async fn ranges<T: Transport>(client: &Client<T>, guest: &Guest<T>, call: Ranges) -> Result<Vec<Item>> {
    let mut answers: Vec<Option<Item>> = Vec::with_capacity(call.items.len());
    let mut reads = Vec::with_capacity(call.items.len());
    for item in call.items {
        let read = guest.located(item.object).and_then(|object| {
            Ok(RangeRead { object, offset: item.offset, into: slice_mut(guest, item.into)? })
        });
        match read {
            Ok(read) => {
                reads.push(read);
                answers.push(None);
            }
            Err(error) => answers.push(Some(Item::of(Err(error)))),
        }
    }
    let read = client.ranges().read(reads).await.into_iter();
    let mut outcomes = read.map(|read| Item::of(read.result.map(|()| (0, 0))));
    let lost = || Item::of(Err(Error::internal("response without an item")));
    Ok(answers.into_iter().map(|known| known.or_else(|| outcomes.next()).unwrap_or_else(lost)).collect())
}
