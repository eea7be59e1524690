//! Master inside your own program, on sockets: other processes join it, and so can the program.
//!
//! Starts a master with admin endpoints on free ports, joins it over TCP as any client would, and
//! reads its metrics.
#![allow(clippy::print_stdout, reason = "an example prints to its terminal")]

use mooncake_core::{Error, Result};
use mooncake_store::client::Client;
use mooncake_store::config::MasterConfig;
use mooncake_store::server::MasterServer;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

#[tokio::main]
async fn main() -> Result<()> {
    let config = MasterConfig {
        rpc_address: "127.0.0.1".into(),
        rpc_port: 0,
        metrics_host: "127.0.0.1".into(),
        metrics_port: 0,
        ..MasterConfig::default()
    };
    let server = MasterServer::start(config).await?;
    let address = server.addresses().rpc.to_string();
    println!("master listening at {address}");

    let client = Client::builder()
        .master(address)
        .local_hostname("127.0.0.1")
        .advertise(std::net::Ipv4Addr::LOCALHOST.into())
        .segment(16 << 20)
        .connect()
        .await?;
    client.put("hello", "over sockets").await?;
    let value = client.get("hello").await?.ok_or_else(|| Error::internal("the value is missing"))?;
    println!("hello = {}", String::from_utf8_lossy(&value));

    // The embedding program can read the statistics of the master, and so can a scraper of its
    // metrics.
    println!("{} object, {} bytes", server.master().stats().objects, server.master().stats().value_bytes);
    if let Some(admin) = server.addresses().admin {
        let mut http = tokio::net::TcpStream::connect(admin).await?;
        http.write_all(b"GET /metrics HTTP/1.1\r\nHost: master\r\nConnection: close\r\n\r\n").await?;
        let mut page = String::new();
        http.read_to_string(&mut page).await?;
        for line in page
            .lines()
            .filter(|line| line.starts_with("master_key_count") || line.starts_with("master_allocated"))
        {
            println!("{line}");
        }
    }
    client.close().await?;
    server.stop().await;
    Ok(())
}
