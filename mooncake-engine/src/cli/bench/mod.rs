//! `transfer_engine_bench`: one process offers memory, and another one measures reads or writes of
//! it.

mod arguments;
mod initiator;
mod reference;
mod report;

use std::ffi::OsString;

use mooncake_core::Result;

use arguments::{Arguments, Format, Mode, memory, start};

/// Runs one side. Returns the exit status: 0, 1 for a failure, or 2 for invalid arguments.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let arguments: Arguments = match super::parse(arguments) {
        Ok(arguments) => arguments,
        Err(status) => return status,
    };
    super::status("transfer_engine_bench", run_side(&arguments))
}

fn run_side(arguments: &Arguments) -> Result<()> {
    super::log(&arguments.log_level)?;
    // More workers than processors add only task switches.
    let processors = std::thread::available_parallelism().map_or(2, usize::from);
    let workers = usize::try_from(arguments.threads).unwrap_or(1).min(processors).clamp(2, 64);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(workers).enable_all().build()?;
    match arguments.mode {
        Mode::Target => runtime.block_on(target(arguments)),
        Mode::Initiator => runtime.block_on(initiator::run(arguments)),
    }
}

async fn target(arguments: &Arguments) -> Result<()> {
    let engine = start(arguments).await?;
    let memory = memory(arguments.buffer_size)?;
    let region = engine.register(memory).await?;
    match arguments.format {
        Format::Table => println!("segment {}", engine.name()),
        Format::Json => println!("{}", serde_json::json!({"segment": engine.name(), "bytes": region.len()})),
    }
    super::wait_for_stop_signal().await?;
    engine.unregister(region).await?;
    engine.close().await
}
