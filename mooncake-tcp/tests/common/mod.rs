//! Shared parts of the tests: a node, and helpers to exchange bytes with it.
#![allow(dead_code, reason = "each test file uses a part of the module")]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::memory::HostMemory;
use mooncake_tcp::{TcpConfig, TcpTransport};
use mooncake_transport::{Access, Region};
use tokio::runtime::Runtime;

pub(crate) const OK: [u8; 8] = *b"\0\0\0\0VTCM";
pub(crate) const REFUSED: [u8; 8] = *b"\x01\0\0\0VTCM";
pub(crate) const PLAIN_READ: u8 = 0;
pub(crate) const PLAIN_WRITE: u8 = 1;
pub(crate) const READ: u8 = 0x80;
pub(crate) const WRITE: u8 = 0x81;

/// Timeout that no healthy exchange of these tests reaches.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

pub(crate) struct Node {
    pub(crate) transport: TcpTransport,
    pub(crate) runtime: Runtime,
}

impl Node {
    pub(crate) fn start(config: TcpConfig) -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let config = TcpConfig { bind: Some([127, 0, 0, 1].into()), ..config };
        let transport = TcpTransport::start(config, runtime.handle()).unwrap();
        Self { transport, runtime }
    }

    /// Registers memory for peers, byte `i` of which is `i % 251`.
    pub(crate) fn open(&self, len: usize) -> Region<TcpTransport> {
        let region =
            Region::register(&self.transport, Arc::new(HostMemory::new(len).unwrap()), Access::Remote)
                .unwrap();
        let mut all = region.exclusive().unwrap();
        all.copy_from(0, &pattern(len)).unwrap();
        all.into_region().unwrap()
    }

    pub(crate) fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.transport.local_addr()).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        stream.set_write_timeout(Some(TIMEOUT)).unwrap();
        stream
    }
}

pub(crate) fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i % 251) as u8).collect()
}

pub(crate) fn contents(region: &Region<TcpTransport>) -> Vec<u8> {
    let mut bytes = vec![0; region.len()];
    region.slice(0..region.len()).unwrap().copy_to(0, &mut bytes).unwrap();
    bytes
}

/// Returns a header whose padding is arbitrary.
pub(crate) fn header(opcode: u8, addr: u64, len: u64) -> Vec<u8> {
    let mut bytes = len.to_le_bytes().to_vec();
    bytes.extend(addr.to_le_bytes());
    bytes.push(opcode);
    bytes.extend([0xde, 0xad, 0xbe, 0xef, 1, 2, 3]);
    bytes
}

pub(crate) fn read_exactly(stream: &mut TcpStream, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    stream.read_exact(&mut bytes).unwrap_or_else(|e| panic!("{len} bytes: {e}"));
    bytes
}

/// Returns the bytes that arrive until the peer closes. A reset counts as closing.
pub(crate) fn read_until_close(stream: &mut TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut piece = [0; 65536];
    loop {
        match stream.read(&mut piece) {
            Ok(0) => return bytes,
            Ok(n) => bytes.extend_from_slice(&piece[..n]),
            Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => return bytes,
            Err(e) => panic!("the peer did not close: {e}"),
        }
    }
}

pub(crate) fn write_parts(stream: &mut TcpStream, parts: &[&[u8]]) {
    stream.write_all(&parts.concat()).unwrap();
}
