//! Sockets, and the two system calls that move bytes between them and memory outside Rust objects.
//!
//! Peers and local callers may touch registered memory at any time, so no `&[u8]` of it is ever
//! formed: the kernel gets addresses. All other code of the crate that handles such addresses calls
//! this file.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsRawFd;
use std::time::Duration;

use mooncake_transport::net;
use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tokio::io::Interest;
use tokio::net::TcpStream;

/// Scatter/gather list of at most `N` parts.
pub(crate) struct IoList<const N: usize> {
    parts: [libc::iovec; N],
    len: usize,
    bytes: usize,
}

impl<const N: usize> IoList<N> {
    pub(crate) fn new() -> Self {
        Self { parts: [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; N], len: 0, bytes: 0 }
    }

    /// Appends a part. An empty one is skipped. Returns false if the list is full.
    pub(crate) fn push(&mut self, start: *mut u8, len: usize) -> bool {
        if len == 0 {
            return true;
        }
        let Some(part) = self.parts.get_mut(self.len) else { return false };
        *part = libc::iovec { iov_base: start.cast(), iov_len: len };
        self.len += 1;
        self.bytes += len;
        true
    }

    /// Returns the sum of the lengths.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    fn message(&mut self) -> libc::msghdr {
        // SAFETY: all zeroes is a valid `msghdr`: null pointers with lengths of zero.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = self.parts.as_mut_ptr();
        message.msg_iovlen = self.len as _;
        message
    }
}

/// Turns the close of a connection into a reset: the kernel discards bytes that it has not
/// delivered.
pub(crate) fn reset_on_close(stream: &TcpStream) {
    // A socket that refuses the option has nothing left to deliver.
    let _ = SockRef::from(stream).set_linger(Some(Duration::ZERO));
}

/// Returns whether the kernel retransmits unacknowledged bytes: the network loses them, or the host
/// is gone.
pub(crate) fn is_retransmitting(stream: &TcpStream) -> bool {
    let mut info = std::mem::MaybeUninit::<libc::tcp_info>::zeroed();
    let mut len = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes, which are zero before.
    let rc = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    // SAFETY: plain numbers, zero where the kernel wrote nothing.
    let info = unsafe { info.assume_init() };
    rc == 0 && info.tcpi_unacked > 0 && info.tcpi_retransmits > 0
}

/// Sends as many bytes as the socket accepts now, or returns `WouldBlock`.
///
/// A send cut short has filled the socket. Tokio gets this information, so that the next wait for
/// writability really waits.
///
/// # Safety
/// Every part of the list is readable memory during the call.
pub(crate) unsafe fn send<const N: usize>(stream: &TcpStream, list: &mut IoList<N>) -> io::Result<usize> {
    let requested = list.bytes;
    let message = list.message();
    call_when_ready(stream, Interest::WRITABLE, requested, || {
        // SAFETY: the list is well-formed, and the caller promises its parts.
        let n =
            unsafe { libc::sendmsg(stream.as_raw_fd(), &message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) };
        usize::try_from(n).map_err(|_| io::Error::last_os_error())
    })
}

/// Receives the available bytes. Returns `WouldBlock` if there are none, and `UnexpectedEof` at the
/// end of the stream.
///
/// A receive that does not fill its list has emptied the socket, and tokio gets this information.
/// So pass one byte more than expected.
///
/// # Safety
/// Every part of the list is writable memory during the call, and nothing that Rust assumes
/// unchanged.
pub(crate) unsafe fn receive<const N: usize>(stream: &TcpStream, list: &mut IoList<N>) -> io::Result<usize> {
    let requested = list.bytes;
    let mut message = list.message();
    call_when_ready(stream, Interest::READABLE, requested, || {
        // SAFETY: the list is well-formed, and the caller promises its parts.
        let n = unsafe { libc::recvmsg(stream.as_raw_fd(), &mut message, libc::MSG_DONTWAIT) };
        match usize::try_from(n) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => Ok(n),
            Err(_) => Err(io::Error::last_os_error()),
        }
    })
}

/// Runs one call under the readiness of tokio, which is edge-triggered: only a `WouldBlock` clears
/// it. So a call that moved less than requested reports `WouldBlock` afterwards, and saves the
/// extra call that would find it out.
fn call_when_ready(
    stream: &TcpStream,
    interest: Interest,
    requested: usize,
    mut call: impl FnMut() -> io::Result<usize>,
) -> io::Result<usize> {
    let mut short = None;
    let result = stream.try_io(interest, || {
        loop {
            match call() {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(n) if n < requested => {
                    short = Some(n);
                    return Err(io::ErrorKind::WouldBlock.into());
                }
                other => return other,
            }
        }
    });
    short.map_or(result, Ok)
}

/// Copies bytes that came along with a header to their destination.
///
/// # Safety
/// `to` is the start of `from.len()` writable bytes.
pub(crate) unsafe fn copy_to(from: &[u8], to: *mut u8) {
    // SAFETY: promised by the caller; `from` is the buffer of this connection and cannot overlap
    // registered memory.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) }
}

/// Copies like [`copy_to`] to memory that may be unmapped. Returns whether it was mapped.
///
/// # Safety
/// `to` is the start of `from.len()` bytes that only their owner uses.
pub(crate) unsafe fn copy_if_mapped(from: &[u8], to: *mut u8) -> bool {
    if from.is_empty() {
        return true;
    }
    let local = libc::iovec { iov_base: from.as_ptr().cast_mut().cast(), iov_len: from.len() };
    let remote = libc::iovec { iov_base: to.cast(), iov_len: from.len() };
    // SAFETY: the kernel reads `from`, and checks each page of the destination.
    let copied =
        unsafe { libc::process_vm_writev(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0) };
    if copied < 0 && io::Error::last_os_error().raw_os_error() != Some(libc::EFAULT) {
        // Where the call is forbidden, the owner is trusted.
        // SAFETY: promised by the caller and by the owner of the memory.
        unsafe { copy_to(from, to) };
        return true;
    }
    usize::try_from(copied) == Ok(from.len())
}

/// Sizes of the kernel buffers, in bytes. With zero, the kernel adapts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct Buffers {
    pub(crate) send: usize,
    pub(crate) receive: usize,
}

/// Sets the options of a data connection, on both sides.
pub(crate) fn set_options(stream: &TcpStream, buffers: Buffers) -> io::Result<()> {
    let socket = SockRef::from(stream);
    if buffers.send != 0 {
        socket.set_send_buffer_size(buffers.send)?;
    }
    if buffers.receive != 0 {
        socket.set_recv_buffer_size(buffers.receive)?;
    }
    net::keep_connection(stream)
}

/// Opens a listening socket on `addr`, or on every address of both families.
pub(crate) fn listen(addr: Option<IpAddr>, port: u16) -> io::Result<std::net::TcpListener> {
    match addr {
        Some(addr) => listen_on(SocketAddr::new(addr, port)),
        None => match listen_on(SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), port)) {
            Err(error) if error.kind() != io::ErrorKind::AddrInUse => {
                listen_on(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), port))
            }
            other => other,
        },
    }
}

fn listen_on(addr: SocketAddr) -> io::Result<std::net::TcpListener> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))?;
    if addr.is_ipv6() {
        socket.set_only_v6(!addr.ip().is_unspecified())?;
    }
    // Connections of a former process on this port may still be closing.
    socket.set_reuse_address(true)?;
    socket.bind(&addr.into())?;
    socket.listen(1024)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}
