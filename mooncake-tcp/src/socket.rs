//! Sockets, and the two system calls that move bytes between them and memory which is no Rust object.
//!
//! Peers and local callers may touch registered memory at any time, so no `&[u8]` of it is ever formed: the kernel
//! gets addresses. Everything else in the crate that handles such addresses is a caller of this file.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsRawFd;
use std::time::Duration;

use mooncake_transport::net;
use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tokio::io::Interest;
use tokio::net::TcpStream;

/// Scatter/gather list of at most `N` places.
pub(crate) struct IoList<const N: usize> {
    places: [libc::iovec; N],
    len: usize,
    bytes: usize,
}

impl<const N: usize> IoList<N> {
    pub(crate) fn new() -> Self {
        Self { places: [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; N], len: 0, bytes: 0 }
    }

    /// Appends a place; an empty one is skipped. False when there is no room for it.
    pub(crate) fn push(&mut self, start: *mut u8, len: usize) -> bool {
        if len == 0 {
            return true;
        }
        let Some(place) = self.places.get_mut(self.len) else { return false };
        *place = libc::iovec { iov_base: start.cast(), iov_len: len };
        self.len += 1;
        self.bytes += len;
        true
    }

    /// Sum of the lengths.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    fn message(&mut self) -> libc::msghdr {
        // SAFETY: all zeroes is a valid `msghdr`: null pointers with lengths of zero.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = self.places.as_mut_ptr();
        message.msg_iovlen = self.len as _;
        message
    }
}

/// Makes the close of a connection a reset: what the kernel has not delivered yet is thrown away.
pub(crate) fn abandon(stream: &TcpStream) {
    // A socket that cannot be told so any more has nothing left to deliver.
    let _ = SockRef::from(stream).set_linger(Some(Duration::ZERO));
}

/// Whether the kernel sends again what the other side's has not acknowledged: the network loses it, or the host is gone.
pub(crate) fn is_retransmitting(stream: &TcpStream) -> bool {
    let mut info = std::mem::MaybeUninit::<libc::tcp_info>::zeroed();
    let mut len = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes, all zeroes before.
    let rc = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    // SAFETY: plain numbers, zero where the kernel wrote none.
    let info = unsafe { info.assume_init() };
    rc == 0 && info.tcpi_unacked > 0 && info.tcpi_retransmits > 0
}

/// Sends what the socket takes now. `WouldBlock` when that is nothing.
///
/// A send cut short has filled the socket, and tokio is told so: the next wait for writability really waits.
///
/// # Safety
/// Every place of the list is readable memory for the length of the call.
pub(crate) unsafe fn send<const N: usize>(stream: &TcpStream, list: &mut IoList<N>) -> io::Result<usize> {
    let wanted = list.bytes;
    let message = list.message();
    through(stream, Interest::WRITABLE, wanted, || {
        // SAFETY: the list is well-formed, its places are the caller's promise.
        let n =
            unsafe { libc::sendmsg(stream.as_raw_fd(), &message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) };
        usize::try_from(n).map_err(|_| io::Error::last_os_error())
    })
}

/// Receives what is there now. `WouldBlock` when that is nothing, `UnexpectedEof` when nothing will come any more.
///
/// A list that is not filled has emptied the socket, and tokio is told so. So ask for one byte more than you expect.
///
/// # Safety
/// Every place of the list is writable memory, and nothing that Rust assumes unchanged, for the length of the call.
pub(crate) unsafe fn receive<const N: usize>(stream: &TcpStream, list: &mut IoList<N>) -> io::Result<usize> {
    let wanted = list.bytes;
    let mut message = list.message();
    through(stream, Interest::READABLE, wanted, || {
        // SAFETY: the list is well-formed, its places are the caller's promise.
        let n = unsafe { libc::recvmsg(stream.as_raw_fd(), &mut message, libc::MSG_DONTWAIT) };
        match usize::try_from(n) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => Ok(n),
            Err(_) => Err(io::Error::last_os_error()),
        }
    })
}

/// Runs one call under tokio's readiness, which is edge-triggered: it is cleared only by a `WouldBlock`, so a call
/// that did less than asked reports one after the fact and saves the extra call that would find it out.
fn through(
    stream: &TcpStream,
    interest: Interest,
    wanted: usize,
    mut call: impl FnMut() -> io::Result<usize>,
) -> io::Result<usize> {
    let mut short = None;
    let result = stream.try_io(interest, || {
        loop {
            match call() {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(n) if n < wanted => {
                    short = Some(n);
                    return Err(io::ErrorKind::WouldBlock.into());
                }
                other => return other,
            }
        }
    });
    short.map_or(result, Ok)
}

/// Copies bytes that came along with a header to where they belong.
///
/// # Safety
/// `to` is the start of `from.len()` writable bytes.
pub(crate) unsafe fn place(from: &[u8], to: *mut u8) {
    // SAFETY: the caller's promise; `from` is this connection's own buffer and cannot overlap registered memory.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) }
}

/// The same to memory that may not be there any more: whether it was.
///
/// # Safety
/// `to` is the start of `from.len()` bytes that nobody but their owner cares about.
pub(crate) unsafe fn place_if_there(from: &[u8], to: *mut u8) -> bool {
    if from.is_empty() {
        return true;
    }
    let local = libc::iovec { iov_base: from.as_ptr().cast_mut().cast(), iov_len: from.len() };
    let remote = libc::iovec { iov_base: to.cast(), iov_len: from.len() };
    // SAFETY: the kernel reads `from`, and checks each page of the rest as it comes to it.
    let copied =
        unsafe { libc::process_vm_writev(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0) };
    if copied < 0 && io::Error::last_os_error().raw_os_error() != Some(libc::EFAULT) {
        // Where the call is forbidden the memory is taken at its owner's word.
        // SAFETY: the caller's promise, and its owner's.
        unsafe { place(from, to) };
        return true;
    }
    usize::try_from(copied) == Ok(from.len())
}

/// Sizes of the kernel's buffers, in bytes; zero leaves them to the kernel, which adapts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct Buffers {
    pub(crate) send: usize,
    pub(crate) receive: usize,
}

/// What every data connection wants, on both sides.
pub(crate) fn tune(stream: &TcpStream, buffers: Buffers) -> io::Result<()> {
    let socket = SockRef::from(stream);
    if buffers.send != 0 {
        socket.set_send_buffer_size(buffers.send)?;
    }
    if buffers.receive != 0 {
        socket.set_recv_buffer_size(buffers.receive)?;
    }
    net::keep_connection(stream)
}

/// A listening socket on `addr`, or on every address of both families when there is none.
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
    // Connections of a former process on this port may still be winding down.
    socket.set_reuse_address(true)?;
    socket.bind(&addr.into())?;
    socket.listen(1024)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}
