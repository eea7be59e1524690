//! Initiator, the process that reads or writes.

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::clock::Moment;
use mooncake_core::{Error, Result};
use mooncake_transport::engine::{Request, Target};
use mooncake_transport::{Region, SliceMut};
use serde_json::json;

use super::arguments::{self, Arguments, Format, Operation};
use super::reference;
use super::report::Row;
use crate::{TransferEngine, TransportSet};

type Block = Request<TransportSet, SliceMut<TransportSet>>;

pub(super) async fn run(arguments: &Arguments) -> Result<()> {
    if arguments.segment_id.is_empty() {
        return Err(Error::invalid("missing argument --segment_id; pass the name that the target prints"));
    }
    let Arguments { block_size, batch_size, threads, buffer_size, .. } = *arguments;
    let need = block_size.checked_mul(batch_size).and_then(|bytes| bytes.checked_mul(threads));
    let Some(need) = need.filter(|need| *need <= buffer_size) else {
        return Err(Error::invalid(format!(
            "--threads={threads} times --batch_size={batch_size} times --block_size={block_size} is more than --buffer_size={buffer_size}"
        )));
    };
    let engine = arguments::start(arguments).await?;
    let target = engine.open(&arguments.segment_id).await?;
    let remote = remote_memory(&target, need)?;
    let region = engine.register(arguments::memory(need)?).await?;
    let mut work = share_out(arguments, &target, remote, region)?;
    if arguments.check {
        work = check(&engine, work).await?;
    }
    let mut rows = vec![measure(&engine, arguments, work).await?];
    if arguments.reference {
        let (span, operation) = (Duration::from_secs(arguments.duration), arguments.operation);
        let shape = reference::Shape { block: block_size, batch: batch_size, threads, span };
        let both = tokio::task::spawn_blocking(move || reference::rows(shape, operation)).await;
        rows.extend(both.map_err(|error| Error::internal(error.to_string()))??);
    }
    show(arguments, &rows);
    engine.close().await
}

/// Returns the first address of the target's memory.
fn remote_memory(target: &Target<TransportSet>, need: u64) -> Result<u64> {
    let buffers = target.descriptor().buffers;
    let (most, name) = (buffers.iter().map(|buffer| buffer.length).max(), target.name());
    match buffers.iter().find(|buffer| buffer.length >= need) {
        Some(buffer) => Ok(buffer.addr),
        None => Err(Error::invalid(format!(
            "segment {name:?} is too short. needed={need} longest={}; start the target with a larger --buffer_size",
            most.unwrap_or(0)
        ))),
    }
}

/// Returns the blocks of each submitter, on both sides.
fn share_out(
    arguments: &Arguments,
    target: &Target<TransportSet>,
    mut remote: u64,
    region: Region<TransportSet>,
) -> Result<Vec<Vec<Block>>> {
    let lost = |_| Error::internal("the bench's memory is in use");
    let mut rest = Some(region.exclusive().map_err(|_| Error::internal("the bench's memory is in use"))?);
    let mut work = Vec::new();
    for _ in 0..arguments.threads {
        let mut blocks = Vec::new();
        for _ in 0..arguments.batch_size {
            let whole = rest.take().ok_or_else(|| Error::internal("the bench's memory is used up"))?;
            let len = usize::try_from(arguments.block_size).unwrap_or(usize::MAX);
            let block = if whole.len() == len {
                whole
            } else {
                let (block, after) = whole.split_at(len).map_err(lost)?;
                rest = Some(after);
                block
            };
            blocks.push(Request::new(target, remote, block));
            remote += arguments.block_size;
        }
        work.push(blocks);
    }
    Ok(work)
}

/// Writes a pattern, reads it back over zeros, and compares.
async fn check(engine: &TransferEngine, work: Vec<Vec<Block>>) -> Result<Vec<Vec<Block>>> {
    let mut checked = Vec::new();
    for (submitter, mut blocks) in work.into_iter().enumerate() {
        let pattern = |at: usize, len: usize| -> Vec<u8> {
            (0..len).map(|byte| (byte ^ (byte >> 8) ^ (at * 31) ^ (submitter * 7)) as u8 | 1).collect()
        };
        for (at, block) in blocks.iter_mut().enumerate() {
            let len = block.transfer.buffer.len();
            block.transfer.buffer.copy_from(0, &pattern(at, len))?;
        }
        let (results, mut blocks) = engine.write_batch(blocks, deadline(engine, 1 << 30)).await;
        results.into_iter().collect::<Result<()>>()?;
        for block in &mut blocks {
            let zeros = vec![0; block.transfer.buffer.len()];
            block.transfer.buffer.copy_from(0, &zeros)?;
        }
        let (results, blocks) = engine.read_batch(blocks, deadline(engine, 1 << 30)).await;
        results.into_iter().collect::<Result<()>>()?;
        for (at, block) in blocks.iter().enumerate() {
            let mut bytes = vec![0; block.transfer.buffer.len()];
            block.transfer.buffer.copy_to(0, &mut bytes)?;
            if bytes != pattern(at, bytes.len()) {
                return Err(Error::internal(format!("wrong bytes in block {at} of submitter {submitter}")));
            }
        }
        checked.push(blocks);
    }
    Ok(checked)
}

async fn measure(engine: &TransferEngine, arguments: &Arguments, work: Vec<Vec<Block>>) -> Result<Row> {
    let start = engine.clock().now();
    let until = start.after(Duration::from_secs(arguments.duration));
    let operation = arguments.operation;
    let submitters: Vec<_> = work
        .into_iter()
        .map(|blocks| tokio::spawn(submit(engine.clone(), operation, blocks, until)))
        .collect();
    let mut batches = Vec::new();
    for submitter in submitters {
        batches.extend(submitter.await.map_err(|error| Error::internal(error.to_string()))??);
    }
    let bytes = arguments.block_size * arguments.batch_size * batches.len() as u64;
    let what = match operation {
        Operation::Read => "read",
        Operation::Write => "write",
    };
    Ok(Row { what, bytes, time: engine.clock().now().since(start), batches })
}

/// Submits batch after batch until the time is over.
async fn submit(
    engine: TransferEngine,
    operation: Operation,
    mut blocks: Vec<Block>,
    until: Moment,
) -> Result<Vec<Duration>> {
    let clock = Arc::clone(engine.clock());
    let bytes = blocks.iter().map(|block| block.transfer.buffer.len() as u64).sum();
    let mut times = Vec::new();
    let mut before = clock.now();
    while before < until {
        let deadline = deadline(&engine, bytes);
        let (results, same) = match operation {
            Operation::Read => engine.read_batch(blocks, deadline).await,
            Operation::Write => engine.write_batch(blocks, deadline).await,
        };
        results.into_iter().collect::<Result<()>>()?;
        blocks = same;
        let now = clock.now();
        times.push(now.since(before));
        before = now;
    }
    Ok(times)
}

fn deadline(engine: &TransferEngine, bytes: u64) -> Option<Moment> {
    Some(engine.clock().now().after(engine.timeout_for(bytes)))
}

fn show(arguments: &Arguments, rows: &[Row]) {
    let Arguments { block_size, batch_size, threads, .. } = *arguments;
    match arguments.format {
        Format::Json => {
            let rows: Vec<_> = rows.iter().map(Row::json).collect();
            println!(
                "{}",
                json!({"block_size": block_size, "batch_size": batch_size, "threads": threads, "rows": rows})
            );
        }
        Format::Table => {
            println!("block {block_size}, batch {batch_size}, threads {threads}");
            for row in rows {
                println!("{}", row.line(arguments.report_unit, arguments.report_precision));
            }
        }
    }
}
