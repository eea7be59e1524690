//! A light client's connection to its owner: who it is there, which memory it has there, signs of
//! life, and the way back.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::fork::ParentOnly;
use mooncake_core::ids::Uuid;
use mooncake_core::memory::SharedPages;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_transport::same_host::socket::{RecordSocket, Trust};
use parking_lot::Mutex;
use std::os::fd::AsFd;
use tokio::net::UnixStream;
use tokio::sync::{Semaphore, mpsc, watch};

use super::record::Record;
use super::shared::{Command, Memories, SharedMemory};

/// Time in which an owner answers a record.
const ANSWER: Duration = Duration::from_secs(5);
/// Pause between two tries to find an owner: the first, and the longest.
const RETRY: Duration = Duration::from_millis(20);
const RETRY_AT_MOST: Duration = Duration::from_secs(1);
/// Longest pause between two signs of life.
const PING: Duration = Duration::from_secs(1);

/// Whether there is an owner.
#[derive(Clone)]
pub(super) enum Link {
    /// There is.
    Up(Arc<Up>),
    /// There is not, and why.
    Down(Arc<Error>),
}

/// What an owner knows us by.
pub(super) struct Up {
    guest: Uuid,
    path: PathBuf,
    trust: Trust,
    /// Connections that carry no call now.
    idle: Mutex<Vec<ParentOnly<UnixStream>>>,
    /// How many calls may be under way.
    pub(super) calls: Arc<Semaphore>,
}

impl Up {
    /// A connection for a call, and whether it has served one before.
    pub(super) async fn connection(&self) -> Result<(ParentOnly<UnixStream>, bool)> {
        let idle = self.idle.lock().pop();
        match idle {
            Some(idle) => Ok((idle, true)),
            None => Ok((self.new_connection().await?, false)),
        }
    }

    /// A new connection for a call.
    pub(super) async fn new_connection(&self) -> Result<ParentOnly<UnixStream>> {
        let socket = open(&self.path, self.trust).await?;
        socket.send(&Record::Join { guest: self.guest }.encode(), None).await?;
        answer(&socket).await?.done()?;
        Ok(socket.into_stream())
    }

    /// The call is over.
    pub(super) fn put_back(&self, stream: ParentOnly<UnixStream>) {
        self.idle.lock().push(stream);
    }

    /// Forgets connections that nobody serves any more.
    pub(super) fn close_idle(&self) {
        self.idle.lock().clear();
    }
}

/// Finds the owner. The future keeps the connection, and finds the owner again, until the light
/// client is gone.
pub(super) async fn start(
    path: &Path,
    trust: Trust,
    memories: Arc<Memories>,
    orders: mpsc::UnboundedReceiver<Command>,
) -> Result<(impl Future<Output = ()> + Send + 'static, watch::Receiver<Link>)> {
    let (control, up) = introduce(path, trust).await?;
    let (publish, link) = watch::channel(Link::Up(up));
    let keeper = Keeper { path: path.to_owned(), trust, memories, orders, publish };
    Ok((keeper.run(control), link))
}

/// The control connection.
struct Control {
    socket: RecordSocket,
    /// Longest pause between two records.
    pause: Duration,
}

struct Keeper {
    path: PathBuf,
    trust: Trust,
    memories: Arc<Memories>,
    orders: mpsc::UnboundedReceiver<Command>,
    publish: watch::Sender<Link>,
}

impl Keeper {
    async fn run(mut self, mut control: Control) {
        loop {
            let Err(error) = self.attend(&control).await else { return };
            tracing::warn!(path = %self.path.display(), %error, "mooncake_client is gone");
            drop(control);
            let Some(found) = self.find(error).await else { return };
            control = found;
            tracing::info!(path = %self.path.display(), "mooncake_client is back");
        }
    }

    /// Keeps the connection alive; ends well when the light client is gone, and with an error when
    /// the owner is.
    async fn attend(&mut self, control: &Control) -> Result<()> {
        loop {
            tokio::select! {
                order = self.orders.recv() => match order {
                    Some(order) => self.carry_out(control, order).await?,
                    None => return Ok(()),
                },
                // It says nothing unasked, so this is its end.
                received = control.socket.receive() => {
                    received?;
                    return Err(Error::invalid("an answer to nothing"));
                }
                () = tokio::time::sleep(control.pause) => ask(control, Record::Ping, None).await?.done()?,
            }
        }
    }

    async fn carry_out(&mut self, control: &Control, order: Command) -> Result<()> {
        match order {
            Command::Share(memory, told) => {
                // Who asked may have given up by now.
                if told.is_closed() {
                    return Ok(());
                }
                let shared = share(control, &memory).await?;
                if shared.is_ok() {
                    self.memories.list(memory);
                }
                // Who has given up since takes the memory back by the next order.
                let _ = told.send(shared);
                Ok(())
            }
            Command::Unshare(memory) => {
                self.memories.forget(memory);
                ask(control, Record::Unshare { memory }, None).await?.done()
            }
        }
    }

    /// Waits for an owner; `None` when the light client is gone meanwhile.
    async fn find(&mut self, error: Error) -> Option<Control> {
        let lost = |error: Error| {
            Error::new(ErrorCode::RpcFail, format!("no mooncake_client at {}: {error}", self.path.display()))
        };
        let down = Link::Down(Arc::new(lost(error)));
        if let Link::Up(before) = self.publish.send_replace(down) {
            before.close_idle();
        }
        let mut pause = RETRY;
        loop {
            // What is ordered meanwhile fails at once.
            let waiting = tokio::time::sleep(pause);
            tokio::pin!(waiting);
            loop {
                tokio::select! {
                    () = &mut waiting => break,
                    order = self.orders.recv() => match order? {
                        Command::Share(_, told) => {
                            let reason = Error::new(ErrorCode::RpcFail, format!("no mooncake_client at {}", self.path.display()));
                            let _ = told.send(Err(reason));
                        }
                        Command::Unshare(memory) => self.memories.forget(memory),
                    },
                }
            }
            pause = (pause * 2).min(RETRY_AT_MOST);
            match self.join_again().await {
                Ok((control, up)) => {
                    self.publish.send_replace(Link::Up(up));
                    return Some(control);
                }
                Err(error) => {
                    tracing::debug!(%error, "no mooncake_client yet");
                    self.publish.send_replace(Link::Down(Arc::new(lost(error))));
                }
            }
        }
    }

    async fn join_again(&self) -> Result<(Control, Arc<Up>)> {
        let (control, up) = introduce(&self.path, self.trust).await?;
        for memory in self.memories.all() {
            share(&control, &memory).await??;
        }
        Ok((control, up))
    }
}

/// Says who we are.
async fn introduce(path: &Path, trust: Trust) -> Result<(Control, Arc<Up>)> {
    let socket = open(path, trust).await?;
    socket.send(&Record::Hello.encode(), None).await?;
    let (guest, calls, silence) = match answer(&socket).await? {
        Record::Welcome { guest, calls, silence_ms } => (guest, calls, silence_ms),
        other => {
            other.done()?;
            return Err(Error::invalid(format!("{other:?} where a welcome was expected")));
        }
    };
    let calls = Arc::new(Semaphore::new((calls as usize).clamp(1, Semaphore::MAX_PERMITS)));
    let up = Up { guest, path: path.to_owned(), trust, idle: Mutex::default(), calls };
    // Two may get lost before the owner minds.
    let pause = (Duration::from_millis(u64::from(silence)) / 3).clamp(Duration::from_millis(1), PING);
    Ok((Control { socket, pause }, Arc::new(up)))
}

async fn open(path: &Path, trust: Trust) -> Result<RecordSocket> {
    let connected = tokio::time::timeout(ANSWER, UnixStream::connect(path)).await;
    let stream = connected.map_err(|_| silent())?.map_err(|error| {
        Error::new(ErrorCode::RpcFail, format!("no mooncake_client serves {}: {error}", path.display()))
            .with_source(error)
    })?;
    RecordSocket::new(stream, trust)
}

/// Tells the owner of some memory. The inner error is its refusal.
async fn share(control: &Control, memory: &SharedMemory) -> Result<Result<()>> {
    let range = memory.pages.range();
    let record = Record::Share {
        memory: memory.number,
        offset: memory.pages.offset_of(range.start),
        len: range.end - range.start,
    };
    Ok(ask(control, record, Some(&memory.pages)).await?.done())
}

async fn ask(control: &Control, record: Record, pages: Option<&SharedPages>) -> Result<Record> {
    control.socket.send(&record.encode(), pages.map(|pages| pages.file().as_fd())).await?;
    answer(&control.socket).await
}

async fn answer(socket: &RecordSocket) -> Result<Record> {
    let received = tokio::time::timeout(ANSWER, socket.receive()).await;
    let (bytes, _) = received.map_err(|_| silent())??;
    Record::decode(&bytes)
}

fn silent() -> Error {
    Error::new(ErrorCode::RpcTimeout, "mooncake_client does not answer on its socket")
}
