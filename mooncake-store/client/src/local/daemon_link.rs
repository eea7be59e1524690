//! Connection of a shared client to its daemon: registration of the client and its memory, pings,
//! and reconnection.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::fault_injection::is_planted;
use mooncake_core::fork::ParentOnly;
use mooncake_core::ids::Uuid;
use mooncake_core::{Error, ErrorCode, Result};
use mooncake_ipc::socket::{RecordSocket, Trust};
use mooncake_protocol::connection::Connection;
use mooncake_protocol::frame::DEFAULT_MAX_BODY;
use mooncake_protocol::message::{
    Attach, Join, KeepAlive, ReleaseObjects, Request, ShareMemory, UnshareMemory,
};
use mooncake_protocol::parts::MAX_ITEMS;
use mooncake_protocol::report::Reported;
use parking_lot::Mutex;
use tokio::net::UnixStream;
use tokio::sync::{Semaphore, mpsc, watch};

use super::hello;
use super::released::ReleasedObjects;
use super::shared::{Command, Memories, SharedMemory};

/// Name of the daemon in errors.
pub(super) const DAEMON: &str = "mooncake_client";

/// Timeout for the response of a daemon to a record.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);
/// First pause between two attempts to reach a daemon.
const FIRST_RETRY_PAUSE: Duration = Duration::from_millis(20);
/// Longest pause between two attempts to reach a daemon.
const MAX_RETRY_PAUSE: Duration = Duration::from_secs(1);
/// Longest pause between two calls of the control connection.
const MAX_PING_PAUSE: Duration = Duration::from_secs(1);
/// Longest time for which the thread itself waits for a response. Suspending and waking the task
/// costs two more context switches.
const BLOCKING_WAIT: Duration = Duration::from_micros(100);

/// Connection to the daemon.
pub(super) type IpcConnection = Connection<ParentOnly<UnixStream>>;

/// State of the connection to the daemon.
#[derive(Clone)]
pub(super) enum DaemonLink {
    /// Daemon is connected.
    Connected(Arc<DaemonRegistration>),
    /// Daemon is not connected, for the reason given by the error.
    Disconnected(Arc<Error>),
}

/// Registration of this shared client at a daemon.
pub(super) struct DaemonRegistration {
    id: Uuid,
    path: PathBuf,
    trust: Trust,
    /// Connections without a call in progress.
    idle: Mutex<Vec<IpcConnection>>,
    /// Permits for calls in progress.
    pub(super) calls: Arc<Semaphore>,
}

impl DaemonRegistration {
    /// Returns a connection for a call: an idle one, or a new one. The flag is true if an earlier
    /// call has used the connection.
    ///
    /// Waits while the daemon has as many as it serves, which includes those of cancelled calls
    /// that it has not closed yet. The deadline of the call ends the wait.
    pub(super) async fn connection(&self) -> Result<(IpcConnection, bool)> {
        let idle = self.idle.lock().pop();
        if let Some(idle) = idle {
            return Ok((idle, true));
        }
        let mut pause = FIRST_RETRY_PAUSE;
        loop {
            let error = match self.new_connection().await {
                Err(error) if error.code() == ErrorCode::NoAvailableHandle => error,
                outcome => return Ok((outcome?, false)),
            };
            if is_planted("full-daemons-refuse-at-once") {
                return Err(error);
            }
            // A connection that became idle meanwhile is one of those that the daemon serves.
            let idle = self.idle.lock().pop().filter(|_| !is_planted("permits-end-before-calls"));
            if let Some(idle) = idle {
                return Ok((idle, true));
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(MAX_RETRY_PAUSE);
        }
    }

    /// Opens a connection for a call.
    ///
    /// # Errors
    /// Returns `NO_AVAILABLE_HANDLE` if the daemon has as many as it serves.
    async fn new_connection(&self) -> Result<IpcConnection> {
        let mut connection = open(&self.path, self.trust, None).await?;
        call_in_time(&mut connection, &Join { guest: self.id }).await??;
        Ok(connection)
    }

    /// Returns a connection to the idle ones after its call.
    pub(super) fn put_back(&self, connection: IpcConnection) {
        self.idle.lock().push(connection);
    }

    /// Shares a memory block with the daemon.
    async fn share(&self, memory: &SharedMemory) -> Result<()> {
        let (pages, range) = (&memory.pages, memory.pages.range());
        let mut connection = open(&self.path, self.trust, Some(pages.file().as_fd())).await?;
        let call = ShareMemory {
            guest: self.id,
            memory: memory.number,
            offset: pages.offset_of(range.start),
            len: range.end - range.start,
        };
        call_in_time(&mut connection, &call).await?
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
    released: Arc<ReleasedObjects>,
    commands: mpsc::UnboundedReceiver<Command>,
) -> Result<(impl Future<Output = ()> + Send + 'static, watch::Receiver<DaemonLink>)> {
    let control = attach(path, trust).await?;
    let (publish, link) = watch::channel(DaemonLink::Connected(control.registration.clone()));
    let task = ControlTask { path: path.to_owned(), trust, memories, released, commands, publish };
    Ok((task.run(control), link))
}

/// Registration at a daemon.
struct ControlConnection {
    connection: IpcConnection,
    registration: Arc<DaemonRegistration>,
    /// Pause after which the daemon is called, so that it does not drop this shared client.
    pause: Duration,
}

struct ControlTask {
    path: PathBuf,
    trust: Trust,
    memories: Arc<Memories>,
    released: Arc<ReleasedObjects>,
    commands: mpsc::UnboundedReceiver<Command>,
    publish: watch::Sender<DaemonLink>,
}

impl ControlTask {
    async fn run(mut self, mut control: ControlConnection) {
        loop {
            let Err(error) = self.keep_alive(&mut control).await else { return };
            tracing::warn!(path = %self.path.display(), %error, "mooncake_client is gone");
            drop(control);
            let Some(found) = self.find(error).await else { return };
            control = found;
            tracing::info!(path = %self.path.display(), "mooncake_client is back");
        }
    }

    /// Keeps the connection alive. Returns `Ok` when the shared client is dropped, and an error
    /// when the connection to the daemon fails.
    async fn keep_alive(&mut self, control: &mut ControlConnection) -> Result<()> {
        loop {
            tokio::select! {
                command = self.commands.recv() => match command {
                    Some(command) => self.execute(control, command).await?,
                    None => return Ok(()),
                },
                () = self.released.added() => {
                    for objects in self.released.take().chunks(MAX_ITEMS) {
                        let call = ReleaseObjects { objects: objects.into() };
                        call_in_time(&mut control.connection, &call).await??;
                    }
                }
                broken = control.connection.ended() => return Err(broken.into_error(&DAEMON)),
                () = tokio::time::sleep(control.pause) => call_in_time(&mut control.connection, &KeepAlive {}).await??,
            }
        }
    }

    async fn execute(&mut self, control: &mut ControlConnection, command: Command) -> Result<()> {
        match command {
            Command::Share(memory, reply) => {
                // The caller may have stopped waiting meanwhile.
                if reply.is_closed() {
                    return Ok(());
                }
                let shared = control.registration.share(&memory).await;
                if shared.is_ok() {
                    self.memories.add(memory);
                }
                // A daemon without a response may still share the memory, after the command that
                // ends the sharing has arrived on this connection. The end of the registration ends
                // every sharing.
                let late = shared.as_ref().err().filter(|error| error.code() == ErrorCode::RpcTimeout);
                let outcome = late.cloned().map_or(Ok(()), Err);
                // A caller that has stopped waiting has dropped its `Share`, whose next command
                // ends the sharing.
                let _ = reply.send(shared);
                outcome
            }
            Command::Unshare(memory) => {
                self.memories.remove(memory);
                call_in_time(&mut control.connection, &UnshareMemory { memory }).await?
            }
        }
    }

    /// Waits for a daemon. Returns `None` if the shared client is dropped meanwhile.
    async fn find(&mut self, error: Error) -> Option<ControlConnection> {
        let lost = |error: Error| {
            Error::new(ErrorCode::RpcFail, format!("no mooncake_client at {}: {error}", self.path.display()))
        };
        let down = DaemonLink::Disconnected(Arc::new(lost(error)));
        if let DaemonLink::Connected(previous) = self.publish.send_replace(down) {
            previous.close_idle();
        }
        let mut pause = FIRST_RETRY_PAUSE;
        loop {
            // Commands that arrive without a daemon fail at once.
            let waiting = tokio::time::sleep(pause);
            tokio::pin!(waiting);
            loop {
                tokio::select! {
                    () = &mut waiting => break,
                    command = self.commands.recv() => match command? {
                        Command::Share(_, reply) => {
                            let reason = Error::new(ErrorCode::RpcFail, format!("no mooncake_client at {}", self.path.display()));
                            let _ = reply.send(Err(reason));
                        }
                        Command::Unshare(memory) => self.memories.remove(memory),
                    },
                }
            }
            pause = (pause * 2).min(MAX_RETRY_PAUSE);
            match self.reattach().await {
                Ok(control) => {
                    self.publish.send_replace(DaemonLink::Connected(control.registration.clone()));
                    // This daemon may share more memory.
                    self.memories.record_release();
                    return Some(control);
                }
                Err(error) => {
                    tracing::debug!(%error, "no mooncake_client yet");
                    self.publish.send_replace(DaemonLink::Disconnected(Arc::new(lost(error))));
                }
            }
        }
    }

    async fn reattach(&self) -> Result<ControlConnection> {
        let control = attach(&self.path, self.trust).await?;
        // The daemon that knew these objects is gone.
        drop(self.released.take());
        for memory in self.memories.all() {
            control.registration.share(&memory).await?;
        }
        Ok(control)
    }
}

/// Opens a control connection and registers this shared client.
async fn attach(path: &Path, trust: Trust) -> Result<ControlConnection> {
    let mut connection = open(path, trust, None).await?;
    let attached = call_in_time(&mut connection, &Attach {}).await??;
    let calls = Arc::new(Semaphore::new((attached.calls as usize).clamp(1, Semaphore::MAX_PERMITS)));
    let registration = DaemonRegistration {
        id: attached.guest,
        path: path.to_owned(),
        trust,
        idle: Mutex::default(),
        calls,
    };
    // Two lost calls do not exceed the timeout of the daemon.
    let silence = Duration::from_millis(u64::from(attached.silence_ms));
    let pause = (silence / 3).clamp(Duration::from_millis(1), MAX_PING_PAUSE);
    Ok(ControlConnection { connection, registration: Arc::new(registration), pause })
}

/// Opens a connection. `file` belongs to its first call.
async fn open(path: &Path, trust: Trust, file: Option<BorrowedFd<'_>>) -> Result<IpcConnection> {
    within_response_timeout(async {
        let stream = UnixStream::connect(path).await.map_err(|error| {
            let text = format!("no mooncake_client serves {}: {error}", path.display());
            Error::new(ErrorCode::RpcFail, text).with_source(error)
        })?;
        let socket = RecordSocket::new(stream, trust)?;
        socket.send(&hello::encode(), file).await?;
        hello::check(&socket.receive().await?.0)?;
        Ok(Connection::new(socket.into_stream(), DEFAULT_MAX_BODY).sleeping(BLOCKING_WAIT))
    })
    .await
}

/// Makes a call with a short timeout. The inner error is a refusal by the daemon.
async fn call_in_time<R, T>(connection: &mut IpcConnection, request: &R) -> Result<Result<T>>
where
    R: Request<Reply = Reported<T>> + Sync,
{
    within_response_timeout(connection.call(request, &DAEMON)).await.map(Reported::outcome)
}

/// Waits for a response of the daemon for a short time.
async fn within_response_timeout<T>(response: impl Future<Output = Result<T>>) -> Result<T> {
    let silent = |_| Error::new(ErrorCode::RpcTimeout, "mooncake_client does not answer on its socket");
    tokio::time::timeout(RESPONSE_TIMEOUT, response).await.map_err(silent)?
}
