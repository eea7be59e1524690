//! Transfer engine without a store: this process and a child, each with memory of its own. This
//! process writes and reads the memory of the child, and notifies the child.
#![allow(clippy::print_stdout, reason = "an example prints to its terminal")]

use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use mooncake_core::memory::HostMemory;
use mooncake_core::{Error, Result};
use mooncake_engine::TransferEngine;
use mooncake_transport::engine::Batch;
use mooncake_transport::handshake::Notification;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;

const BLOCK: usize = 64 << 10;
const BLOCKS: usize = 16;
/// Timeout that no step reaches.
const PATIENCE: Duration = Duration::from_secs(30);

/// Runs the owner: registers memory, waits for the notification that it is filled, and responds
/// with the result of its check.
async fn owner() -> Result<()> {
    let engine = TransferEngine::builder().name("127.0.0.1").environment().start().await?;
    let region = engine.register(Arc::new(HostMemory::new(BLOCKS * BLOCK)?)).await?;
    let mut notifications = std::pin::pin!(engine.notifications());
    // The user reads the name from this line; with a metadata directory, it would need no line.
    println!("{}", engine.name());
    let told = tokio::time::timeout(PATIENCE, notifications.next()).await.ok().flatten();
    let told = told.ok_or_else(|| Error::internal("no notification arrived"))?;
    let mut bytes = vec![0; BLOCKS * BLOCK];
    region.slice(0..bytes.len())?.copy_to(0, &mut bytes)?;
    let right = bytes.chunks(BLOCK).zip(1..).all(|(block, fill)| block.iter().all(|byte| *byte == fill));
    let answer = Notification { name: told.name, message: if right { "as written" } else { "wrong" }.into() };
    engine.notify(&told.message, &answer).await?;
    // The memory stays registered until the user has read it, and notifies the owner.
    tokio::time::timeout(PATIENCE, notifications.next()).await.ok();
    drop(region);
    engine.close().await
}

async fn user() -> Result<()> {
    let program = std::env::current_exe()?;
    let mut child = Command::new(program).arg("owner").stdout(Stdio::piped()).kill_on_drop(true).spawn()?;
    let output = child.stdout.take().ok_or_else(|| Error::internal("the child has no output"))?;
    let name = BufReader::new(output).lines().next_line().await?;
    let name = name.ok_or_else(|| Error::internal("the child did not start"))?;

    let engine = TransferEngine::builder().name("127.0.0.1").environment().start().await?;
    let mut notifications = std::pin::pin!(engine.notifications());
    let target = engine.open(&name).await?;
    let at = target
        .descriptor()
        .buffers
        .first()
        .ok_or_else(|| Error::internal("the child has no registered memory"))?
        .addr;

    // Registered local memory, as a transport with devices would need it.
    let local = engine.register_local(Arc::new(HostMemory::new(BLOCKS * BLOCK)?))?;
    let mut all = local.exclusive().map_err(|_| Error::internal("a new region has another user"))?;
    let mut batch = Batch::new();
    for (block, fill) in (0..BLOCKS).zip(1u8..) {
        all.copy_from(block * BLOCK, &[fill; BLOCK])?;
    }
    let whole = all.into_shared();
    for block in 0..BLOCKS {
        let part = whole.slice(block * BLOCK..(block + 1) * BLOCK)?;
        batch.write(&target, at + (block * BLOCK) as u64, part);
    }
    batch.notify(&target, Notification { name: "filled".into(), message: engine.name().into() });
    let done = engine.submit(batch, Some(engine.clock().now().after(PATIENCE))).await;
    if let Some(error) = done.results.into_iter().chain(done.notified).find_map(Result::err) {
        return Err(error);
    }
    println!("wrote {BLOCKS} blocks of {BLOCK} bytes into the memory of {name}");
    let answer = tokio::time::timeout(PATIENCE, notifications.next()).await.ok().flatten();
    let answer = answer.ok_or_else(|| Error::internal("no response"))?;
    println!("response of the owner: {}", answer.message);
    let (result, last) = engine.read(&target, at + ((BLOCKS - 1) * BLOCK) as u64, vec![0; BLOCK], None).await;
    result?;
    if answer.message != "as written" || last != [BLOCKS as u8; BLOCK] {
        return Err(Error::internal("the bytes differ from the written ones"));
    }
    println!("read the last block back");
    for line in engine.metrics() {
        let counts = &line.counts;
        println!(
            "over {}: {} bytes written, {} read ({} by the fallback transport)",
            line.wire, counts.bytes_written, counts.bytes_read, line.fallback_bytes
        );
    }
    engine.notify(&name, &Notification { name: "filled".into(), message: "thank you".into() }).await?;
    engine.close().await?;
    if child.wait().await?.success() { Ok(()) } else { Err(Error::internal("the child failed")) }
}

#[tokio::main]
async fn main() -> Result<()> {
    match std::env::args().nth(1).as_deref() {
        Some("owner") => owner().await,
        _ => user().await,
    }
}
