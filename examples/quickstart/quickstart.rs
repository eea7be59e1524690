//! Master and two clients in one process: put, get, replicate, upsert, remove, and the result of
//! each step.
//!
//! ```sh
//! cargo run --release --example quickstart
//! ```
#![allow(clippy::print_stdout, reason = "an example prints to its terminal")]

use std::sync::Arc;

use mooncake_core::clock::{Rng, SystemClock};
use mooncake_core::{Clock, Error, Result};
use mooncake_store::client::{Client, PutOptions};
use mooncake_store::master::{Master, MasterOptions};

const MIB: usize = 1 << 20;

#[tokio::main]
async fn main() -> Result<()> {
    let master = Arc::new(Master::new(MasterOptions::default())?);
    // Each client provides 64 MiB, so the cluster has 128 MiB.
    let alice =
        Client::builder().master(master.clone()).segment(64 << 20).local_hostname("alice").connect().await?;
    let bob =
        Client::builder().master(master.clone()).segment(64 << 20).local_hostname("bob").connect().await?;

    let mut value = vec![0; MIB];
    Rng::seeded(1).fill(&mut value);
    let mut table = Table::default();

    table.row("alice puts 1 MiB", "stored", alice.put("layer/0", &value)).await?;
    let read = table.row("bob gets it", "every byte equal", bob.get("layer/0")).await?;
    check(read.as_deref() == Some(&value[..]), "bob read other bytes")?;

    // Zero copy: from registered memory directly to the segments, two copies in two segments.
    let region = alice.memory().alloc(16 * MIB)?;
    let items: Vec<_> = (0..16)
        .map(|i| Ok((format!("block/{i}"), region.slice(i * MIB..(i + 1) * MIB)?)))
        .collect::<Result<_>>()?;
    let copies = PutOptions::new().replicas(2);
    let puts = table.row("16 MiB, two copies", "one batch", alice.batch_put(&items, &copies)).await?;
    puts.into_iter().collect::<Result<Vec<_>>>()?;
    let list = bob.replicas().list("block/7").await?.ok_or_else(|| Error::internal("block/7 is missing"))?;
    check(list.replicas.len() == 2, "block/7 should have two replicas")?;

    let upsert = PutOptions::new().upsert();
    table.row("bob replaces a value", "upserted", bob.put_with("layer/0", b"short", &upsert)).await?;
    let read = table.row("alice gets the new one", "5 bytes", alice.get("layer/0")).await?;
    check(read.as_deref() == Some(b"short"), "alice read the old value")?;

    let missing = table.row("a key that was never put", "a miss, no error", bob.get("nowhere")).await?;
    check(missing.is_none(), "a missing key has a value")?;
    table.row("remove everything", "forced", bob.remove_all(true)).await?;

    alice.close().await?;
    bob.close().await?;
    table.print();
    Ok(())
}

fn check(holds: bool, otherwise: &'static str) -> Result<()> {
    if holds { Ok(()) } else { Err(Error::internal(otherwise)) }
}

/// Table of the steps, with the outcome and the duration of each.
struct Table {
    clock: SystemClock,
    rows: Vec<(String, String, f64)>,
}

impl Default for Table {
    fn default() -> Self {
        Self { clock: SystemClock::new(), rows: Vec::new() }
    }
}

impl Table {
    async fn row<T>(&mut self, what: &str, how: &str, step: impl Future<Output = Result<T>>) -> Result<T> {
        let before = self.clock.now();
        let outcome = step.await?;
        let us = self.clock.now().since(before).as_secs_f64() * 1e6;
        self.rows.push((what.into(), how.into(), us));
        Ok(outcome)
    }

    fn print(&self) {
        println!("{:<26} {:<18} {:>10}", "step", "outcome", "time");
        for (what, how, us) in &self.rows {
            println!("{what:<26} {how:<18} {us:>7.0} µs");
        }
    }
}
