//! Plain HTTP requests, and the configuration of a master that receives them.

pub(crate) mod described;
pub(crate) mod used;

use std::net::SocketAddr;
use std::time::Duration;

use mooncake_store::config::{CleanUpConfig, MasterConfig, MetadataServerConfig};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Configuration with every HTTP feature on, and free ports on loopback.
pub(crate) fn config() -> MasterConfig {
    MasterConfig {
        rpc_address: "127.0.0.1".into(),
        rpc_port: 0,
        metrics_host: "127.0.0.1".into(),
        metrics_port: 0,
        metadata: Some(MetadataServerConfig {
            host: "127.0.0.1".into(),
            port: 0,
            ..MetadataServerConfig::default()
        }),
        clean_up: Some(CleanUpConfig::default()),
        ..MasterConfig::default()
    }
}

/// Sends bytes as they are, closes the sending side, and reads until the connection ends.
pub(crate) async fn raw(at: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(at).await.unwrap();
    // The server may close before it has read everything.
    let _ = stream.write_all(bytes).await;
    let _ = stream.shutdown().await;
    end_of(stream).await
}

async fn end_of(mut stream: TcpStream) -> Vec<u8> {
    let mut answer = Vec::new();
    let _ =
        tokio::time::timeout(Duration::from_secs(10), stream.read_to_end(&mut answer)).await.expect("an end");
    answer
}

/// HTTP response.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) content_type: String,
    pub(crate) body: String,
}

pub(crate) async fn ask(at: SocketAddr, method: &str, path: &str, body: &str) -> Answer {
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut stream = TcpStream::connect(at).await.unwrap();
    let _ = stream.write_all(request.as_bytes()).await;
    let answer = String::from_utf8(end_of(stream).await).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{method} {path}: {answer:?}"));
    let content_type = head.lines().find_map(|line| {
        let (name, value) = line.split_once(": ")?;
        name.eq_ignore_ascii_case("content-type").then(|| value.to_owned())
    });
    Answer {
        status: head.split(' ').nth(1).unwrap().parse().unwrap(),
        content_type: content_type.unwrap_or_default(),
        body: body.to_owned(),
    }
}

pub(crate) async fn http(at: SocketAddr, method: &str, path: &str, body: &str) -> (u16, String) {
    let answer = ask(at, method, path, body).await;
    (answer.status, answer.body)
}
