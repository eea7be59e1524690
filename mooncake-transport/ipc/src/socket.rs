//! Unix socket between an owner of memory and its peers: records of one length, some with a file
//! descriptor, and the identity and liveness of the other end.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use mooncake_core::fork::ParentOnly;
use mooncake_core::{Error, ErrorCode, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{
    CWD, FileType, FlockOperation, Mode, OFlags, SealFlags, chmod, fchmod, fcntl_get_seals, flock, fstat,
    openat,
};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, bind, listen, recvmsg, sendmsg,
    socket_with,
};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::{UnixListener, UnixStream};

/// Length of a record in bytes.
pub const RECORD_LEN: usize = 64;

/// Processes that are trusted at the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trust {
    /// Processes of this user, and of root.
    SameUser,
    /// All processes that the socket's permissions admit.
    AnyUser,
}

/// End of a connection.
#[derive(Debug)]
pub struct RecordSocket {
    /// A child that inherited the descriptor would hide the end of this process from the peer.
    stream: ParentOnly<UnixStream>,
    /// Process at the other end, if the kernel reports it. A socket inherited by a child may
    /// outlive the process.
    process: Option<OwnedFd>,
    /// True if this end is closed.
    is_closed: AtomicBool,
}

impl RecordSocket {
    /// Wraps a connection. Returns `NOT_SUPPORTED` if the other end is not trusted.
    pub fn new(stream: UnixStream, trust: Trust) -> Result<Self> {
        let peer_credentials = stream.peer_cred().map_err(Error::from)?;
        let own_user = rustix::process::geteuid().as_raw();
        if trust == Trust::SameUser && peer_credentials.uid() != own_user && peer_credentials.uid() != 0 {
            return Err(Error::new(
                ErrorCode::NotSupported,
                format!(
                    "the other end is of user {}, not of {own_user}: memory is not shared",
                    peer_credentials.uid()
                ),
            ));
        }
        let process = peer_credentials.pid().and_then(Pid::from_raw);
        let process = process.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        Ok(Self { stream: ParentOnly::new(stream), process, is_closed: AtomicBool::new(false) })
    }

    /// Returns the stream, for another protocol from here on.
    pub fn into_stream(self) -> ParentOnly<UnixStream> {
        self.stream
    }

    /// Returns the process id of the other end, if the kernel reports it.
    pub fn peer_pid(&self) -> Option<i32> {
        self.stream.peer_cred().ok().and_then(|peer_credentials| peer_credentials.pid())
    }

    /// Returns the user of the process at the other end, if the kernel reports it.
    pub fn peer_user(&self) -> Option<u32> {
        self.stream.peer_cred().ok().map(|peer_credentials| peer_credentials.uid())
    }

    /// Returns whether the other end is alive at this moment. After [`shut_down`](Self::shut_down)
    /// only the end of its process counts.
    pub fn is_alive(&self) -> bool {
        let stream = PollFd::new(&*self.stream, PollFlags::RDHUP);
        let process = self.process.as_ref().map(|process| PollFd::new(process, PollFlags::IN));
        let is_closed = self.is_closed.load(Ordering::Acquire);
        let mut both = [process.unwrap_or_else(|| stream.clone()), stream];
        let ends = match (&self.process, is_closed) {
            (_, false) => &mut both[..],
            (Some(_), true) => &mut both[..1],
            (None, true) => return true,
        };
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(ends, Some(&now)).is_ok_and(|ready| ready == 0)
    }

    /// Returns whether the process at the other end has ended, with all work of its devices. If the
    /// kernel does not report that, the state of the socket counts.
    pub fn has_ended(&self) -> bool {
        let Some(process) = &self.process else { return !self.is_alive() };
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready != 0)
    }

    /// Waits until the process at the other end has ended. Returns at once if the kernel does not
    /// report that.
    ///
    /// # Errors
    /// Returns the errors of the wait.
    #[allow(unsafe_code)]
    pub async fn ended(&self) -> Result<()> {
        let Some(process) = &self.process else { return Ok(()) };
        // SAFETY: an owned descriptor stays open, and the same, during the wait.
        let process = unsafe { AsyncFd::register_with_interest(process.try_clone()?, Interest::READABLE) };
        let process = process.map_err(std::io::Error::from)?;
        process.readable().await?.retain_ready();
        Ok(())
    }

    /// Notifies the other end that this end is closed.
    pub fn shut_down(&self) {
        self.is_closed.store(true, Ordering::Release);
        // The call fails only if there is no other end any more.
        let _ = rustix::net::shutdown(&*self.stream, rustix::net::Shutdown::Both);
    }

    /// Sends a record, with a file descriptor if it takes one.
    pub async fn send(&self, bytes: &[u8; RECORD_LEN], fd: Option<BorrowedFd<'_>>) -> Result<()> {
        let sent = self
            .stream
            .async_io(Interest::WRITABLE, || {
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
                let mut control = SendAncillaryBuffer::new(&mut space);
                let fds = fd.map(|fd| [fd]);
                if let Some(fds) = &fds {
                    control.push(SendAncillaryMessage::ScmRights(fds));
                }
                let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
                Ok(sendmsg(&*self.stream, &[IoSlice::new(bytes)], &mut control, flags)?)
            })
            .await?;
        // A stream socket does not split a message as short as a record.
        if sent == RECORD_LEN {
            Ok(())
        } else {
            Err(Error::invalid(format!("{sent} bytes of a record were sent")))
        }
    }

    /// Receives the next record and its descriptor. Returns `Invalid` for anything but one record
    /// with at most one descriptor, and `Unavailable` at the end of the connection.
    pub async fn receive(&self) -> Result<([u8; RECORD_LEN], Option<OwnedFd>)> {
        let mut bytes = [0; RECORD_LEN];
        let (received, fd, more) = self
            .stream
            .async_io(Interest::READABLE, || {
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
                let mut control = RecvAncillaryBuffer::new(&mut space);
                let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
                let received =
                    recvmsg(&*self.stream, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags)?;
                // All other descriptors are closed here.
                let mut fds = control.drain().flat_map(|message| match message {
                    RecvAncillaryMessage::ScmRights(fds) => fds.collect::<Vec<_>>(),
                    _ => Vec::new(),
                });
                let fd = fds.next();
                io::Result::Ok((received.bytes, fd, fds.next().is_some()))
            })
            .await?;
        match received {
            0 => Err(Error::new(ErrorCode::TransferFail, "the other end closed the connection")),
            RECORD_LEN if !more => Ok((bytes, fd)),
            _ => Err(Error::invalid(format!("{received} bytes that are not one record"))),
        }
    }
}

/// Returns the file of a record, once its size is known to be sealed. Otherwise its other holders
/// could truncate it, and an access to a lost page would end this process.
pub fn sealed(fd: Option<OwnedFd>) -> Result<File> {
    let fd = fd.ok_or_else(|| Error::invalid("a record without the file that belongs to it"))?;
    let seals = fcntl_get_seals(fd.as_fd())
        .map_err(|e| Error::invalid(format!("a file that cannot be sealed: {}", io::Error::from(e))))?;
    if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
        return Err(Error::invalid("a file whose size is not sealed"));
    }
    Ok(File::from(fd))
}

/// Listens at a path with these permissions, whatever the umask. Replaces the socket of a dead
/// process. Returns `INVALID_PARAMS` if another process serves the socket.
pub fn listen_at(path: &Path, mode: u32) -> Result<ParentOnly<UnixListener>> {
    let cannot = |what: &str, error: io::Error| {
        Error::new(ErrorCode::InvalidParams, format!("{what} {}: {error}", path.display())).with_source(error)
    };
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let folder = File::open(folder).map_err(|error| cannot("the folder of", error))?;
    // The lock is held until it is closed, so that two processes that start at once do not take
    // each other's socket for a dead one.
    flock(&folder, FlockOperation::LockExclusive).map_err(|error| cannot("the folder of", error.into()))?;
    match std::os::unix::net::UnixStream::connect(path) {
        Ok(_) => return Err(Error::invalid(format!("{} is served by another process", path.display()))),
        // A file that is not a socket refuses connections, too.
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            let metadata = std::fs::symlink_metadata(path).map_err(|error| cannot("what lies at", error))?;
            if !metadata.file_type().is_socket() {
                return Err(Error::invalid(format!(
                    "cannot listen at {}: the file exists and is not a socket",
                    path.display()
                )));
            }
            std::fs::remove_file(path).map_err(|error| cannot("the old socket", error))?;
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(cannot("what lies at", error)),
    }
    let socket = socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )
    .map_err(|error| cannot("a socket for", error.into()))?;
    // The file gets its permissions at creation, so that there is no moment with other ones.
    let bind = || {
        fchmod(&socket, Mode::from_raw_mode(mode))?;
        bind(&socket, &SocketAddrUnix::new(path)?)?;
        set_mode(path, mode)?;
        listen(&socket, BACKLOG)
    };
    bind().map_err(|error| cannot("cannot listen at", error.into()))?;
    ParentOnly::new(std::os::unix::net::UnixListener::from(socket))
        .try_map(UnixListener::from_std)
        .map_err(Error::from)
}

/// Sets the permissions of a socket that this process has just bound, whatever the umask. A link
/// that another user has put there is not followed.
fn set_mode(path: &Path, mode: u32) -> rustix::io::Result<()> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let socket_file = openat(CWD, path, flags, Mode::empty())?;
    if FileType::from_raw_mode(fstat(&socket_file)?.st_mode) != FileType::Socket {
        return Err(rustix::io::Errno::EXIST);
    }
    chmod(format!("/proc/self/fd/{}", socket_file.as_raw_fd()), Mode::from_raw_mode(mode))
}

/// Maximum number of connections that wait to be accepted.
const BACKLOG: i32 = 1024;
