//! Custom transport in safe Rust, used by the store's client and checked by the public conformance
//! suite.
//!
//! Unix sockets, with one connection per operation. A request is a direction, an address and a
//! length; the response is one byte, then the data. `Staged` turns the two copying methods into a
//! `Transport`.
#![allow(clippy::print_stdout, reason = "an example prints to its terminal")]

use std::path::PathBuf;
use std::sync::Arc;

use mooncake_core::{Error, ErrorCode, Result};
use mooncake_store::client::Client;
use mooncake_store::master::{Master, MasterOptions};
use mooncake_transport::staged::{CopyTransport, Executor, Staged};
use mooncake_transport::{ExposedMemory, Protocol, SegmentDesc};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

const READ: u8 = 0;
const WRITE: u8 = 1;
const YES: u8 = 1;
/// Number of bytes copied between socket and memory at a time.
const PIECE: usize = 256 << 10;

/// Transport that serves its own memory at a socket, and reaches the memory of peers at their
/// sockets.
#[derive(Debug)]
pub struct UnixTransport {
    path: PathBuf,
    runtime: Handle,
    server: std::sync::OnceLock<JoinHandle<()>>,
}

impl UnixTransport {
    /// Creates a transport whose socket will be at this path.
    pub fn new(path: impl Into<PathBuf>, runtime: Handle) -> Self {
        Self { path: path.into(), runtime, server: std::sync::OnceLock::new() }
    }

    /// Stops serving, as if the process had died.
    pub fn kill(&self) {
        if let Some(server) = self.server.get() {
            server.abort();
        }
        // Later connections find no socket.
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Drop for UnixTransport {
    fn drop(&mut self) {
        self.kill();
    }
}

impl CopyTransport for UnixTransport {
    type Peer = PathBuf;

    fn protocol(&self) -> Protocol {
        Protocol::new("unix")
    }

    fn serve(&self, memory: Arc<ExposedMemory>) {
        let path = self.path.clone();
        let _ = self.server.set(self.runtime.spawn(async move {
            match UnixListener::bind(&path) {
                Ok(listener) => serve_all(listener, memory).await,
                Err(error) => tracing::error!(path = %path.display(), %error, "cannot listen"),
            }
        }));
    }

    fn describe(&self, desc: &mut SegmentDesc) {
        desc.protocols.push(self.protocol());
        desc.extra.insert("unix_path".into(), self.path.to_string_lossy().into());
    }

    async fn connect(&self, desc: &SegmentDesc) -> Result<PathBuf> {
        match desc.extra.get("unix_path").and_then(|path| path.as_str()) {
            Some(path) => Ok(path.into()),
            None => Err(Error::invalid("the descriptor has no unix_path")),
        }
    }

    async fn read_into(&self, peer: &PathBuf, addr: u64, into: &mut [u8]) -> Result<()> {
        let mut stream = ask(peer, READ, addr, into.len()).await?;
        accepted(&mut stream, addr).await?;
        stream.read_exact(into).await.map_err(|e| failed(peer, e)).map(drop)
    }

    async fn write_from(&self, peer: &PathBuf, addr: u64, from: &[u8]) -> Result<()> {
        let mut stream = ask(peer, WRITE, addr, from.len()).await?;
        accepted(&mut stream, addr).await?;
        stream.write_all(from).await.map_err(|e| failed(peer, e))?;
        // The second acceptance byte arrives when the last byte is in memory.
        accepted(&mut stream, addr).await
    }
}

async fn ask(peer: &PathBuf, direction: u8, addr: u64, len: usize) -> Result<UnixStream> {
    let mut stream = UnixStream::connect(peer).await.map_err(|e| failed(peer, e))?;
    let mut request = vec![direction];
    request.extend(addr.to_le_bytes());
    request.extend((len as u64).to_le_bytes());
    stream.write_all(&request).await.map_err(|e| failed(peer, e))?;
    Ok(stream)
}

async fn accepted(stream: &mut UnixStream, addr: u64) -> Result<()> {
    match stream.read_u8().await {
        Ok(YES) => Ok(()),
        Ok(_) => Err(Error::invalid(format!("the peer has no registered memory at address {addr:#x}"))),
        Err(error) => {
            Err(Error::new(ErrorCode::TransferFail, "connection closed by the peer").with_source(error))
        }
    }
}

fn failed(peer: &std::path::Path, error: std::io::Error) -> Error {
    Error::new(ErrorCode::TransferFail, format!("{}: {error}", peer.display())).with_source(error)
}

/// Serves every connection in a task of one set, so that the connections end with the listener.
async fn serve_all(listener: UnixListener, memory: Arc<ExposedMemory>) {
    let mut connections = tokio::task::JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        let memory = memory.clone();
        connections.spawn(async move {
            // A broken connection concerns only its caller, who sees the error too.
            let _ = serve_request(stream, &memory).await;
        });
        while connections.try_join_next().is_some() {}
    }
}

async fn serve_request(mut stream: UnixStream, memory: &ExposedMemory) -> std::io::Result<()> {
    let (direction, addr, len) =
        (stream.read_u8().await?, stream.read_u64_le().await?, stream.read_u64_le().await?);
    // The whole range is checked before the first byte is transferred.
    let checked = match direction {
        READ => memory.check(addr, len),
        WRITE => memory.check_write(addr, len),
        _ => Err(Error::invalid("invalid direction: neither a read nor a write")),
    };
    let allowed = checked.is_ok();
    stream.write_u8(u8::from(allowed)).await?;
    if !allowed {
        return Ok(());
    }
    let mut piece = vec![0; PIECE.min(len as usize)];
    let mut done = 0;
    while done < len {
        let now = piece.len().min((len - done) as usize);
        if direction == READ {
            memory.read(addr + done, &mut piece[..now]).map_err(std::io::Error::other)?;
            stream.write_all(&piece[..now]).await?;
        } else {
            stream.read_exact(&mut piece[..now]).await?;
            memory.write(addr + done, &piece[..now]).map_err(std::io::Error::other)?;
        }
        done += now as u64;
    }
    if direction == WRITE { stream.write_u8(YES).await } else { Ok(()) }
}

#[tokio::main]
async fn main() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let master = Arc::new(Master::new(MasterOptions::default())?);
    let join = |name: &str| {
        let wire = UnixTransport::new(folder.path().join(name), Handle::current());
        let transport =
            Arc::new(Staged::new(wire, Executor::Tokio(Handle::current()), master.clock().clone()));
        Client::builder()
            .master(master.clone())
            .local_hostname(name)
            .protocol("unix")
            .transport(transport)
            .connect()
    };
    let (alice, bob) = (join("alice").await?, join("bob").await?);
    alice.put("greeting", "over a custom transport").await?;
    let value = bob.get("greeting").await?.ok_or_else(|| Error::internal("the value is missing"))?;
    println!("bob read: {}", String::from_utf8_lossy(&value));
    alice.close().await?;
    bob.close().await
}

#[cfg(test)]
mod conformance {
    use mooncake_core::clock::{SharedClock, SystemClock};
    use mooncake_transport::testkit::Fixture;

    use super::*;

    struct OnUnixSockets {
        folder: tempfile::TempDir,
        runtime: tokio::runtime::Runtime,
        clock: SharedClock,
        nodes: usize,
    }

    impl OnUnixSockets {
        fn new() -> Self {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
            Self {
                folder: tempfile::tempdir().expect("cannot create a folder"),
                runtime: runtime.expect("cannot start a runtime"),
                clock: SystemClock::shared(),
                nodes: 0,
            }
        }
    }

    impl Fixture for OnUnixSockets {
        type T = Staged<UnixTransport>;

        fn node(&mut self) -> Arc<Self::T> {
            self.nodes += 1;
            let path = self.folder.path().join(self.nodes.to_string());
            let wire = UnixTransport::new(&path, self.runtime.handle().clone());
            let node = Staged::new(wire, Executor::Tokio(self.runtime.handle().clone()), self.clock.clone());
            // The node listens from the moment its socket exists.
            while !path.exists() {
                std::thread::yield_now();
            }
            Arc::new(node)
        }

        fn kill(&mut self, node: &Arc<Self::T>) {
            node.wire().kill();
        }

        fn block_on<F: Future>(&self, future: F) -> F::Output {
            self.runtime.block_on(future)
        }

        fn clock(&self) -> SharedClock {
            self.clock.clone()
        }
    }

    mooncake_transport::transport_conformance!(OnUnixSockets::new());
}
