//! P2P Store: a seeder and eight nodes that want its checkpoint at the same time. Prints how many
//! bytes each node read from the seeder, and how many from other readers.
#![allow(clippy::print_stdout, reason = "an example prints to its terminal")]

use std::sync::Arc;

use futures::future::try_join_all;
use mooncake_core::memory::{HostMemory, MemorySource};
use mooncake_core::meta::MemoryMetadata;
use mooncake_core::{Error, Result};
use mooncake_engine::{TransferEngine, TransportSet};
use mooncake_p2p::{GetOptions, P2pOptions, P2pStore, RegisterOptions};
use mooncake_transport::Region;

const NAME: &str = "checkpoint/7";
const LEN: usize = 32 << 20;
const SHARD: u64 = 1 << 20;
const READERS: usize = 8;

#[tokio::main]
async fn main() -> Result<()> {
    // Nodes of several processes share etcd: `mooncake_p2p::engine_builder` and `P2pStore::open`.
    let catalogue = Arc::new(MemoryMetadata::new());
    let node = async || {
        let engine = TransferEngine::builder().name("127.0.0.1").environment().start().await?;
        P2pStore::open_with(engine, catalogue.clone(), P2pOptions::default()).await
    };
    let seeder = node().await?;
    let checkpoint = pattern();
    let weights = Arc::new(HostMemory::new(LEN)?);
    let region = Region::<TransportSet>::unregistered(weights.clone())?;
    let mut bytes = region.exclusive().map_err(|_| Error::internal("the memory is new"))?;
    bytes.copy_from(0, &checkpoint)?;
    drop(bytes);
    let options = RegisterOptions { max_shard_size: SHARD, ..RegisterOptions::default() };
    seeder.register(NAME, vec![weights], options).await?;

    let mut readers = Vec::new();
    for _ in 0..READERS {
        readers.push((node().await?, Arc::new(HostMemory::new(LEN)?)));
    }
    let reads = readers.iter().map(|(reader, memory)| {
        reader.get_replica(NAME, vec![memory.clone() as Arc<dyn MemorySource>], GetOptions::default())
    });
    try_join_all(reads).await?;

    for (number, (reader, memory)) in readers.iter().enumerate() {
        let mut bytes = vec![0; LEN];
        Region::<TransportSet>::unregistered(memory.clone())?.slice(0..LEN)?.copy_to(0, &mut bytes)?;
        if bytes != checkpoint {
            return Err(Error::internal(format!("reader {number} has other bytes")));
        }
        let (mut of_seeder, mut of_readers) = (0, 0);
        for peer in reader.engine().metrics() {
            let is_seeder = peer.peer == seeder.segment_name();
            *(if is_seeder { &mut of_seeder } else { &mut of_readers }) += peer.counts.bytes_read;
        }
        println!(
            "reader {number}: {} MiB from the seeder, {} MiB from readers",
            of_seeder >> 20,
            of_readers >> 20
        );
    }
    for (reader, _) in &readers {
        reader.close().await?;
    }
    seeder.close().await
}

/// Returns the bytes of the checkpoint.
fn pattern() -> Vec<u8> {
    (0..LEN).map(|at| ((at * 31) >> 9) as u8).collect()
}
