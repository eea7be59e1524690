//! Connection of a shared client at the daemon, and the handlers of its calls.

use std::future::pending;
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use mooncake_core::clock::Moment;
use mooncake_core::fork::ParentOnly;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_protocol::call::Response;
use mooncake_protocol::frame::{self, DEFAULT_MAX_BODY, Parsed, Status};
use mooncake_protocol::message::*;
use mooncake_protocol::report::Reported;
use mooncake_protocol::wire::{Attached, LocatedObject, MemoryRange};
use mooncake_transport::admission::{ConnectionSlot, TransferRate};
use mooncake_transport::{Slice, SliceMut, Transport};
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::watch;

use super::daemon::{ControlRegistration, Daemon};
use super::shared_client::{CallConnection, SharedClient, wait_until_set};
use crate::errors::is_lost;
use crate::payload::PutOutcome;
use crate::put_options::PutOptions;
use crate::ranges::RangeRead;
use crate::state::Client;

/// Timeout for the first call of a new connection.
pub(super) const FIRST_CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum size in bytes of a buffer that is kept for the next call.
const MAX_RETAINED_BUFFER: usize = 1 << 16;

/// State of a connection that its calls use.
pub(super) struct Session<T: Transport> {
    pub(super) daemon: Arc<Daemon<T>>,
    /// Process and user at the other end, if the kernel reports them.
    pub(super) process: Option<i32>,
    pub(super) user: Option<u32>,
    /// File that was attached to the hello.
    pub(super) file: Mutex<Option<OwnedFd>>,
    pub(super) role: OnceLock<Role<T>>,
}

/// Use of a connection.
pub(super) enum Role<T: Transport> {
    /// Control connection of a shared client. It keeps the client registered.
    Control(ControlRegistration<T>),
    /// Connection for calls about objects.
    Calls(CallConnection<T>),
}

impl<T: Transport> Session<T> {
    /// Serves the connection until it closes, the shared client is gone, or the daemon stops. A
    /// call that has begun is always finished. Otherwise its transfer could still use memory that
    /// is already reused.
    pub(super) async fn serve(
        &self,
        mut stream: ParentOnly<UnixStream>,
        slot: &ConnectionSlot,
    ) -> Result<()> {
        let mut stopped = self.daemon.stopped.subscribe();
        let mut departed = None;
        let (mut inbox, mut outbox) = (Vec::new(), Vec::new());
        loop {
            let limit = match self.role.get() {
                None => Some(FIRST_CALL_TIMEOUT),
                Some(Role::Control(_)) => Some(self.daemon.config.silence),
                Some(Role::Calls(_)) => None,
            };
            // Control connections are never replaced by others. Their number is limited, and a
            // timeout closes the silent ones.
            if !matches!(self.role.get(), Some(Role::Control(_))) {
                slot.wait_for_request();
            }
            let used = tokio::select! {
                biased;
                received = receive(&mut stream, &mut inbox, slot) => received?,
                () = departed_or_timed_out(&mut departed, limit) => {
                    if let Some(Role::Control(registration)) = self.role.get() {
                        tracing::warn!(process = registration.shared_client.process(), "a local process is silent, and forgotten");
                    }
                    return Ok(());
                }
                () = wait_until_set(&mut stopped) => return Ok(()),
            };
            let Some(used) = used.filter(|_| slot.work()) else { return Ok(()) };
            self.handle_request(&inbox[..used], &mut outbox).await?;
            inbox.drain(..used);
            if departed.is_none()
                && let Some(Role::Calls(connection)) = self.role.get()
            {
                departed = Some(connection.departed());
            }
            slot.end_transfer();
            slot.hold(inbox.capacity() + outbox.capacity());
            let time = TransferRate::DEFAULT.time_for(outbox.len() as u64);
            tokio::select! {
                biased;
                sent = tokio::time::timeout(time, stream.write_all(&outbox)) => sent.map_err(|_| unread())??,
                () = departed_or_timed_out(&mut departed, limit) => return Ok(()),
            }
            if self.role.get().is_none() {
                return Ok(());
            }
            outbox.clear();
            outbox.shrink_to(MAX_RETAINED_BUFFER);
            inbox.shrink_to(MAX_RETAINED_BUFFER);
            slot.hold(inbox.capacity() + outbox.capacity());
        }
    }

    /// Handles a request and appends its reply.
    async fn handle_request(&self, request: &[u8], out: &mut Vec<u8>) -> Result<()> {
        let Parsed::Whole(request, _) = frame::parse_request(request, DEFAULT_MAX_BODY).map_err(malformed)?
        else {
            return Err(Error::internal("a request that was whole is not any more"));
        };
        let counted = match self.role.get() {
            Some(Role::Calls(connection)) => Some(connection.call()),
            _ => None,
        };
        let start = frame::begin_reply(out, request.seq);
        let outcome = self.dispatch(request.function, request.body, &mut Response::new(out)).await;
        drop(counted);
        let unknown =
            || Err((Status::NotRegistered, format!("unknown function. number={:#010x}", request.function)));
        frame::end_reply(out, start, outcome.unwrap_or_else(unknown));
        Ok(())
    }

    fn begin(&self, role: Role<T>) -> Result<()> {
        self.role.set(role).map_err(|_| Error::invalid("the connection has another use already"))
    }

    fn now(&self) -> Moment {
        self.daemon.client.inner.config.clock.now()
    }

    /// Returns the client of the cluster, on a connection for calls about objects.
    fn client(&self) -> Result<&Client<T>> {
        self.shared_client().map(|_| &self.daemon.client)
    }

    /// Returns the shared client, on a connection for calls about objects.
    fn shared_client(&self) -> Result<&SharedClient<T>> {
        match self.role.get() {
            Some(Role::Calls(connection)) => Ok(&connection.shared_client),
            _ => Err(Error::invalid("not a connection for calls about objects")),
        }
    }

    fn slice(&self, range: MemoryRange) -> Result<Slice<T>> {
        let (region, range) = self.shared_client()?.range(range)?;
        region.slice(range)
    }

    fn slice_mut(&self, range: MemoryRange) -> Result<SliceMut<T>> {
        let (region, range) = self.shared_client()?.range(range)?;
        // SAFETY: the shared client allocates from its own memory and lends no byte of it to two
        // calls. A client that breaks this rule gets a mixture of both values, in its own memory.
        // Code of this module only copies these bytes and never interprets them.
        unsafe { region.slice_mut_unchecked(range) }
    }
}

/// Waits until the shared client is gone, or until a time limit.
async fn departed_or_timed_out(departed: &mut Option<watch::Receiver<bool>>, limit: Option<Duration>) {
    match (departed, limit) {
        (Some(departed), _) => wait_until_set(departed).await,
        (None, Some(limit)) => tokio::time::sleep(limit).await,
        (None, None) => pending().await,
    }
}

fn unread() -> Error {
    Error::new(ErrorCode::RpcTimeout, "cannot send response: the local process does not read it")
}

fn malformed(error: frame::FrameError) -> Error {
    Error::invalid(error.to_string())
}

/// Receives the rest of a request, and returns its length. Returns `None` at the end of the
/// connection.
async fn receive(
    stream: &mut UnixStream,
    inbox: &mut Vec<u8>,
    slot: &ConnectionSlot,
) -> Result<Option<usize>> {
    loop {
        if !inbox.is_empty() {
            slot.begin_request();
        }
        match frame::parse_request(inbox, DEFAULT_MAX_BODY).map_err(malformed)? {
            Parsed::Whole(_, used) => return Ok(Some(used)),
            Parsed::Partial(missing) => {
                frame::reserve(inbox, missing);
                slot.hold(inbox.capacity());
            }
        }
        if stream.read_buf(inbox).await? == 0 {
            return Ok(None);
        }
    }
}

/// Implements [`HandleAsync`] for [`Session`], one row for each call.
macro_rules! handlers {
    ($($call:ident $(<$life:lifetime>)?: |$session:ident, $request:pat_param| $handled:expr;)*) => {$(
        impl<$($life,)? T: Transport> HandleAsync<$call $(<$life>)?> for Session<T> {
            async fn handle(&self, $request: $call $(<$life>)?) -> Outcome<$call $(<$life>)?> {
                let $session = self;
                $handled
            }
        }
    )*};
}

/// Converts the results of the items of a call.
fn each<R, S>(results: Vec<Result<R>>, convert: impl Fn(R) -> S) -> Vec<Reported<S>> {
    results.into_iter().map(|result| Reported::of(result.map(&convert))).collect()
}

// Calls about the shared client and its memory.
handlers! {
    Attach: |session, _| {
        let registration = session.daemon.register(session.process, session.user)?;
        let config = &session.daemon.config;
        let silence_ms = u32::try_from(config.silence.as_millis()).unwrap_or(u32::MAX);
        let attached = Attached { guest: registration.id, calls: config.max_calls, silence_ms };
        session.begin(Role::Control(registration))?;
        Ok(attached)
    };
    KeepAlive: |session, _| {
        if let Some(Role::Control(registration)) = session.role.get() {
            registration.shared_client.remove_expired(session.now());
        }
        Ok(())
    };
    Join: |session, r| {
        let shared_client = session.daemon.shared_client(r.guest)?;
        let mut stopped = session.daemon.stopped.subscribe();
        let connection = tokio::select! {
            biased;
            connection = shared_client.admit_connection(session.daemon.config.max_calls) => connection?,
            () = wait_until_set(&mut stopped) => {
                return Err(Error::new(ErrorCode::RpcFail, "cannot join: mooncake_client stops"));
            }
        };
        session.begin(Role::Calls(connection))
    };
    ShareMemory: |session, r| {
        let (daemon, file) = (&session.daemon, session.file.lock().take());
        daemon.shared_client(r.guest)?.share(&daemon.client, daemon.config.max_memory, &r, file)
    };
    UnshareMemory: |session, r| match session.role.get() {
        Some(Role::Control(registration)) => {
            registration.shared_client.unshare(r.memory);
            Ok(())
        }
        _ => Err(Error::invalid("not a control connection")),
    };
}

// Calls about objects.
handlers! {
    WriteObjects<'a>: |session, r| {
        let pieces = |pieces: &[MemoryRange]| pieces.iter().map(|piece| session.slice(*piece)).collect::<Result<Vec<_>>>();
        let objects: Vec<(&[u8], Vec<Slice<T>>)> =
            r.objects.iter().map(|object| Ok((object.key, pieces(&object.pieces)?))).collect::<Result<_>>()?;
        let mut options = PutOptions::from(r.config.into_owned()).hints(r.hints.into_owned());
        if r.replace {
            options = options.upsert();
        }
        let stored = session.client()?.batch_put(&objects, &options).await?;
        Ok(each(stored, |outcome| outcome == PutOutcome::Existed))
    };
    ReadObjects<'a>: |session, r| {
        let into = r.objects.iter().map(|object| Ok((object.key, session.slice_mut(object.into)?)));
        let read = session.client()?.batch_get_into(into.collect::<Result<_>>()?).await;
        read.located?;
        let results = read.reads.into_iter().map(|read| read.result);
        Ok(each(results.collect(), |found| found.map(|len| len as u64)))
    };
    FetchObject<'a>: |session, r| {
        let ranges = session.client()?.ranges();
        let Some(object) = one(ranges.locate(&[r.key]).await?)? else { return Ok(None) };
        let len = object.size();
        if len <= r.into.len {
            let into = session.slice_mut(MemoryRange { len, ..r.into })?;
            let read = ranges.read(vec![RangeRead { object: object.clone(), offset: 0, into }]).await;
            match one(read.into_iter().map(|read| read.result).collect()) {
                Err(error) if is_lost(&error) => return Ok(None),
                outcome => outcome?,
            }
        }
        let number = if len <= r.into.len { 0 } else { session.shared_client()?.store_located(object, session.now()) };
        Ok(Some(LocatedObject { size: len, number }))
    };
    LocateObjects<'a>: |session, r| {
        let located = session.client()?.ranges().locate(&r.keys).await?;
        let (shared_client, now) = (session.shared_client()?, session.now());
        let to_located = |object: crate::Located| LocatedObject { size: object.size(), number: shared_client.store_located(object, now) };
        Ok(each(located, |object| object.map(to_located)))
    };
    ReadRanges<'a>: |session, r| {
        let shared_client = session.shared_client()?;
        let (mut reads, mut refusals) = (Vec::with_capacity(r.ranges.len()), Vec::with_capacity(r.ranges.len()));
        for range in r.ranges.iter() {
            let read = shared_client.located(range.object).and_then(|object| {
                Ok(RangeRead { object, offset: range.offset, into: session.slice_mut(range.into)? })
            });
            refusals.push(read.map(|read| reads.push(read)).err());
        }
        let ranges = session.client()?.ranges();
        let read = if r.relocates { ranges.read_current(reads).await } else { ranges.read(reads).await };
        let mut read = read.into_iter().map(|read| read.result);
        let lost = || Err(Error::internal("response without an item"));
        let result = |refusal: Option<Error>| refusal.map_or_else(|| read.next().unwrap_or_else(lost), Err);
        Ok(each(refusals.into_iter().map(result).collect(), |()| ()))
    };
    ObjectsExist<'a>: |session, r| {
        Ok(each(session.client()?.batch_exist(&r.keys).await?, |found| found))
    };
    RequestPrefetch<'a>: |session, r| {
        let client = &session.client()?.inner;
        Ok(client.config.prefetch.on_exist && client.prefetch_later(r.keys.iter().copied()))
    };
    ProbeObjects<'a>: |session, r| {
        Ok(each(session.client()?.batch_probe(&r.keys, r.policy).await?, |found| found))
    };
    CountPrefixObjects<'a>: |session, r| {
        Ok(session.client()?.replicas().prefix_hits(&r.keys).await? as u64)
    };
    LocatePrefixObjects<'a>: |session, r| {
        let located = session.client()?.ranges().locate_prefix(&r.keys).await?;
        let (shared_client, now) = (session.shared_client()?, session.now());
        let to_located = |object: crate::Located| LocatedObject { size: object.size(), number: shared_client.store_located(object, now) };
        Ok(located.into_iter().map(to_located).collect())
    };
    ListPrefixReplicas<'a>: |session, r| {
        session.client()?.replicas().list_prefix(&r.keys).await
    };
    ListReplicas<'a>: |session, r| {
        Ok(each(session.client()?.replicas().batch_list(&r.keys).await?, |found| found))
    };
    RemoveObjects<'a>: |session, r| {
        Ok(each(session.client()?.batch_remove(&r.keys, r.force).await?, |existed| existed))
    };
    RemoveMatching<'a>: |session, r| {
        session.client()?.remove_matching(r.pattern, r.force).await
    };
    RemoveEvery: |session, r| {
        session.client()?.remove_all(r.force).await
    };
    CopyObject<'a>: |session, r| {
        session.client()?.replicas().copy(r.key, &r.targets).await
    };
    MoveObject<'a>: |session, r| {
        session.client()?.replicas().move_to(r.key, r.source, r.target).await
    };
    FindTask: |session, r| {
        session.client()?.replicas().task(r.task).await
    };
    ReleaseObjects<'a>: |session, r| match session.role.get() {
        Some(Role::Control(registration)) => {
            registration.shared_client.release(&r.objects);
            Ok(())
        }
        _ => Err(Error::invalid("not a control connection")),
    };
    CheckHealth: |session, _| match session.client() {
        Ok(client) => client.status().is_healthy().await,
        Err(_) => false,
    };
}

/// Returns the result of a batch with one item.
fn one<R>(mut results: Vec<Result<R>>) -> Result<R> {
    results.pop().unwrap_or_else(|| Err(Error::internal("response without an item")))
}
