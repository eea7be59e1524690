//! Connection of a shared client to its daemon: registration of the client and its memory, pings,
//! and reconnection.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::fork::ParentOnly;
use mooncake_core::ids::Uuid;
use mooncake_core::memory::SharedPages;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_ipc::socket::{RecordSocket, Trust};
use parking_lot::Mutex;
use std::os::fd::AsFd;
use tokio::net::UnixStream;
use tokio::sync::{Semaphore, mpsc, watch};

use super::record::Record;
use super::shared::{Command, Memories, SharedMemory};

/// Timeout for the response of a daemon to a record.
const ANSWER: Duration = Duration::from_secs(5);
/// First pause between two attempts to reach a daemon.
const RETRY: Duration = Duration::from_millis(20);
/// Longest pause between two attempts to reach a daemon.
const RETRY_AT_MOST: Duration = Duration::from_secs(1);
/// Longest pause between two pings.
const PING: Duration = Duration::from_secs(1);

/// State of the connection to the daemon.
#[derive(Clone)]
pub(super) enum Link {
    /// Daemon is connected.
    Up(Arc<Up>),
    /// Daemon is not connected, for the reason given by the error.
    Down(Arc<Error>),
}

/// Registration of this shared client at a daemon.
pub(super) struct Up {
    guest: Uuid,
    path: PathBuf,
    trust: Trust,
    /// Connections without a call in progress.
    idle: Mutex<Vec<ParentOnly<UnixStream>>>,
    /// Permits for calls in progress.
    pub(super) calls: Arc<Semaphore>,
}

impl Up {
    /// Returns a connection for a call. The flag is true if an earlier call has used the
    /// connection.
    pub(super) async fn connection(&self) -> Result<(ParentOnly<UnixStream>, bool)> {
        let idle = self.idle.lock().pop();
        match idle {
            Some(idle) => Ok((idle, true)),
            None => Ok((self.new_connection().await?, false)),
        }
    }

    /// Opens a connection for a call.
    pub(super) async fn new_connection(&self) -> Result<ParentOnly<UnixStream>> {
        let socket = open(&self.path, self.trust).await?;
        socket.send(&Record::Join { guest: self.guest }.encode(), None).await?;
        answer(&socket).await?.done()?;
        Ok(socket.into_stream())
    }

    /// Returns a connection to the idle ones after its call.
    pub(super) fn put_back(&self, stream: ParentOnly<UnixStream>) {
        self.idle.lock().push(stream);
    }

    /// Closes the idle connections, because the daemon at their other end is gone.
    pub(super) fn close_idle(&self) {
        self.idle.lock().clear();
    }
}

/// Connects to the daemon. The returned future keeps the connection alive and reconnects after a
/// failure. The future ends when the shared client is dropped.
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

/// Control connection to a daemon.
struct Control {
    socket: RecordSocket,
    /// Pause after which a ping is sent.
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

    /// Keeps the connection alive. Returns `Ok` when the shared client is dropped, and an error
    /// when the connection to the daemon fails.
    async fn attend(&mut self, control: &Control) -> Result<()> {
        loop {
            tokio::select! {
                order = self.orders.recv() => match order {
                    Some(order) => self.carry_out(control, order).await?,
                    None => return Ok(()),
                },
                // The daemon sends no record without a request, so a record or an error here ends
                // the connection.
                received = control.socket.receive() => {
                    received?;
                    return Err(Error::invalid("response without a request"));
                }
                () = tokio::time::sleep(control.pause) => ask(control, Record::Ping, None).await?.done()?,
            }
        }
    }

    async fn carry_out(&mut self, control: &Control, order: Command) -> Result<()> {
        match order {
            Command::Share(memory, told) => {
                // The caller may have stopped waiting meanwhile.
                if told.is_closed() {
                    return Ok(());
                }
                let shared = share(control, &memory).await?;
                if shared.is_ok() {
                    self.memories.list(memory);
                }
                // A caller that has stopped waiting has dropped its `Share`, whose next command
                // ends the sharing.
                let _ = told.send(shared);
                Ok(())
            }
            Command::Unshare(memory) => {
                self.memories.forget(memory);
                ask(control, Record::Unshare { memory }, None).await?.done()
            }
        }
    }

    /// Waits for a daemon. Returns `None` if the shared client is dropped meanwhile.
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
            // Commands that arrive without a daemon fail at once.
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

/// Opens a control connection and registers this shared client.
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
    // Two lost pings do not exceed the timeout of the daemon.
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

/// Shares a memory block with the daemon. The inner error is a refusal by the daemon.
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
