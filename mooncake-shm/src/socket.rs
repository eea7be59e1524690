//! The socket between an owner and a peer: records with file descriptors, who is at the other end, and whether it is still there.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use mooncake_core::{Error, ErrorCode, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{SealFlags, fcntl_get_seals};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::io::Interest;
use tokio::net::UnixStream;

use crate::record::{RECORD_LEN, Record};

/// One end of a connection.
#[derive(Debug)]
pub(crate) struct Wire {
    stream: UnixStream,
    /// The process at the other end, where the kernel can tell: a socket it left to a child outlives it.
    process: Option<OwnedFd>,
    /// We have closed it.
    shut: AtomicBool,
}

impl Wire {
    /// Takes a connection, if the other end belongs to this process's user or to root.
    pub(crate) fn new(stream: UnixStream) -> Result<Arc<Self>> {
        let theirs = stream.peer_cred().map_err(Error::from)?;
        let ours = rustix::process::geteuid().as_raw();
        if theirs.uid() != ours && theirs.uid() != 0 {
            return Err(Error::new(
                ErrorCode::NotSupported,
                format!("the other end is of user {}, not of {ours}: memory is not shared", theirs.uid()),
            ));
        }
        let process = theirs.pid().and_then(Pid::from_raw);
        let process = process.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        Ok(Arc::new(Self { stream, process, shut: AtomicBool::new(false) }))
    }

    /// Whether the other end is there, this very moment. After [`shut_down`](Self::shut_down) only the end of its process counts.
    pub(crate) fn is_alive(&self) -> bool {
        let stream = PollFd::new(&self.stream, PollFlags::RDHUP);
        let process = self.process.as_ref().map(|process| PollFd::new(process, PollFlags::IN));
        let shut = self.shut.load(Ordering::Acquire);
        let mut both = [process.unwrap_or_else(|| stream.clone()), stream];
        let ends = match (&self.process, shut) {
            (_, false) => &mut both[..],
            (Some(_), true) => &mut both[..1],
            (None, true) => return true,
        };
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(ends, Some(&now)).is_ok_and(|ready| ready == 0)
    }

    /// Tells the other end that we are gone.
    pub(crate) fn shut_down(&self) {
        self.shut.store(true, Ordering::Release);
        // It fails only when there is nobody to tell.
        let _ = rustix::net::shutdown(&self.stream, rustix::net::Shutdown::Both);
    }

    /// Sends a record, with a file descriptor if it takes one.
    pub(crate) async fn send(&self, record: Record, fd: Option<BorrowedFd<'_>>) -> Result<()> {
        let bytes = record.encode();
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
                Ok(sendmsg(&self.stream, &[IoSlice::new(&bytes)], &mut control, flags)?)
            })
            .await?;
        // A record is far below what a stream socket splits.
        if sent == RECORD_LEN {
            Ok(())
        } else {
            Err(Error::invalid(format!("{sent} bytes of a record were sent")))
        }
    }

    /// The next record and the descriptor that came with it. `Invalid` for what is not one record with at most one descriptor,
    /// `Unavailable` at the end of the connection.
    pub(crate) async fn receive(&self) -> Result<(Record, Option<OwnedFd>)> {
        let mut bytes = [0; RECORD_LEN];
        let (got, fd, more) = self
            .stream
            .async_io(Interest::READABLE, || {
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
                let mut control = RecvAncillaryBuffer::new(&mut space);
                let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
                let got = recvmsg(&self.stream, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags)?;
                // Those that are not kept are closed here.
                let mut fds = control.drain().flat_map(|message| match message {
                    RecvAncillaryMessage::ScmRights(fds) => fds.collect::<Vec<_>>(),
                    _ => Vec::new(),
                });
                let fd = fds.next();
                io::Result::Ok((got.bytes, fd, fds.next().is_some()))
            })
            .await?;
        match got {
            0 => Err(Error::new(ErrorCode::TransferFail, "the other end closed the connection")),
            RECORD_LEN if !more => Ok((Record::decode(&bytes)?, fd)),
            _ => Err(Error::invalid(format!("{got} bytes that are not one record"))),
        }
    }
}

/// The file that came with a record, once its size is known to be for good: else whoever has it could take pages away from under
/// us, and touching them would be the end of this process.
pub(crate) fn sealed(fd: Option<OwnedFd>) -> Result<File> {
    let fd = fd.ok_or_else(|| Error::invalid("a record without the file that belongs to it"))?;
    let seals = fcntl_get_seals(fd.as_fd())
        .map_err(|e| Error::invalid(format!("a file that cannot be sealed: {}", io::Error::from(e))))?;
    if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
        return Err(Error::invalid("a file whose size is not sealed"));
    }
    Ok(File::from(fd))
}
