//! TCP port of `mooncake_client`, at which start scripts and probes see that the process is ready.
//!
//! Shared clients of this project use the Unix socket. Those of Mooncake C++ call functions at the
//! port, and receive an error that names the socket.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use mooncake_core::Result;
use mooncake_core::host_port::join;
use mooncake_protocol::frame::{Refusal, Status};
use mooncake_protocol::server::{RunningServer, Server, ServerOptions, Service};

/// Maximum number of connections. A probe closes its connection at once.
const CONNECTIONS: usize = 64;
/// Maximum length of a request that receives the error.
const MAX_REQUEST: usize = 1 << 20;
/// Time after which a connection without traffic is closed.
const IDLE: Duration = Duration::from_secs(60);

/// Service without functions.
struct NoFunctions {
    socket: PathBuf,
}

impl Service for NoFunctions {
    fn call(&self, function: u32, _body: &[u8], _out: &mut Vec<u8>) -> Result<(), Refusal> {
        let text = format!(
            "cannot call mooncake_client over TCP: mooncake_client {} serves processes of its \
             host at {}. function={function:#010x}; use setup_dummy of this project",
            env!("CARGO_PKG_VERSION"),
            self.socket.display()
        );
        Err((Status::NotRegistered, text))
    }
}

/// Listens at `host:port`, as `mooncake_client` of Mooncake C++ does once it is ready.
///
/// # Errors
/// `RPC_FAIL` with the address if the port is in use, or if the host is not of this machine.
pub(crate) async fn listen(host: &str, port: u16, socket: &Path) -> Result<RunningServer> {
    let options = ServerOptions {
        listener: "client_port",
        max_connections: CONNECTIONS,
        // The descriptors are for clients and their memory.
        descriptor_share: 32,
        max_body: MAX_REQUEST,
        idle_timeout: Some(IDLE),
        ..ServerOptions::default()
    };
    let host = if host.is_empty() { "0.0.0.0" } else { host };
    let server = Server::bind(&join(host, port), options).await?;
    Ok(server.start(Arc::new(NoFunctions { socket: socket.to_owned() })))
}

#[cfg(test)]
mod tests {
    use super::*;
    use mooncake_protocol::frame::{self, Parsed};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    #[tokio::test]
    async fn unknown_call_error_states_socket() {
        let server = listen("127.0.0.1", 0, Path::new("/tmp/there.sock")).await.unwrap();
        let mut stream = TcpStream::connect(server.local_addr()).await.unwrap();
        let mut request = Vec::new();
        frame::write_request(&mut request, 7, 0x1234, |body| body.extend([0; 100]));
        stream.write_all(&request).await.unwrap();
        let mut received = Vec::new();
        let text = loop {
            match frame::parse_reply(&received, MAX_REQUEST).unwrap() {
                Parsed::Whole(reply, _) => {
                    assert_eq!(reply.status, Status::NotRegistered);
                    break String::from_utf8_lossy(reply.body).into_owned();
                }
                Parsed::Partial(_) => assert!(stream.read_buf(&mut received).await.unwrap() > 0),
            }
        };
        assert!(text.contains("/tmp/there.sock") && text.contains("function=0x00001234"), "{text}");
        // Other protocols are not answered.
        let mut other = TcpStream::connect(server.local_addr()).await.unwrap();
        other.write_all(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n").await.unwrap();
        assert_eq!(other.read_to_end(&mut Vec::new()).await.unwrap_or(0), 0);
        let taken = listen("127.0.0.1", server.local_addr().port(), Path::new("/")).await.unwrap_err();
        assert!(taken.to_string().contains("in use"), "{taken}");
        server.stop().await;
    }
}
