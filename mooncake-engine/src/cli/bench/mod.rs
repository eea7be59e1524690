//! `transfer_engine_bench`: one process offers memory, another reads or writes it for a while and says how fast that went.

mod initiator;
mod reference;
mod report;

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

use clap::{ArgAction, Parser, ValueEnum};
use mooncake_core::memory::HostMemory;
use mooncake_core::{Error, Result};
use mooncake_transport::engine::LocalCopies;
use mooncake_transport::topology::{Discovery, Topology};

use crate::TransferEngine;
use report::Unit;

/// Which side this process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Mode {
    Initiator,
    Target,
}

/// Which way the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Operation {
    Read,
    Write,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    Table,
    Json,
}

/// Measures transfers between two processes. Start one with --mode=target; it prints the segment's name. Start the other with
/// --segment_id=NAME.
#[derive(Debug, Parser)]
#[command(name = "transfer_engine_bench", version)]
struct Arguments {
    /// Which side this process is.
    #[arg(long, value_enum, default_value = "initiator")]
    mode: Mode,
    /// Where engines find each other: P2PHANDSHAKE, http://host:port/metadata, etcd://host:port, redis://host:port.
    #[arg(long = "metadata_server", default_value = "P2PHANDSHAKE")]
    metadata_server: String,
    /// Name of this engine's segment; with P2PHANDSHAKE its host. The address of this host when empty.
    #[arg(long = "local_server_name", default_value = "")]
    local_server_name: String,
    /// Name of the target's segment.
    #[arg(long = "segment_id", default_value = "")]
    segment_id: String,
    /// That wire and no other; the best ones built in when empty.
    #[arg(long, default_value = "")]
    protocol: String,
    /// RDMA devices to use, with commas between them.
    #[arg(long = "device_name", value_delimiter = ',')]
    device_name: Vec<String>,
    /// A file that says which devices are near which memory.
    #[arg(long = "nic_priority_matrix")]
    nic_priority_matrix: Option<PathBuf>,
    /// Look for devices at the start; without it there are those of --nic_priority_matrix.
    #[arg(long = "auto_discovery", action = ArgAction::Set, default_value_t = true, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    auto_discovery: bool,
    /// Which way the bytes go.
    #[arg(long, value_enum, default_value = "read")]
    operation: Operation,
    /// Bytes of one request.
    #[arg(long = "block_size", default_value_t = 65536, value_parser = at_least_one)]
    block_size: u64,
    /// Requests that are submitted at once.
    #[arg(long = "batch_size", default_value_t = 128, value_parser = at_least_one)]
    batch_size: u64,
    /// Submitters at once.
    #[arg(long, default_value_t = 12, value_parser = at_least_one)]
    threads: u64,
    /// Seconds.
    #[arg(long, default_value_t = 10, value_parser = at_least_one)]
    duration: u64,
    /// Bytes that are registered.
    #[arg(long = "buffer_size", default_value_t = 1 << 30, value_parser = at_least_one)]
    buffer_size: u64,
    /// Unit of throughput: GB|GiB|Gb|MB|MiB|Mb|KB|KiB|Kb, each per second.
    #[arg(long = "report_unit", default_value = "GB", value_parser = Unit::parse)]
    report_unit: Unit,
    /// Digits after the point.
    #[arg(long = "report_precision", default_value_t = 2)]
    report_precision: u8,
    /// How results are shown.
    #[arg(long, value_enum, default_value = "table")]
    format: Format,
    /// Measure plain sockets over loopback and memcpy beside it, with the same sizes.
    #[arg(long)]
    reference: bool,
    /// Write a pattern and read it back before measuring.
    #[arg(long)]
    check: bool,
    /// What is logged.
    #[arg(long = "log_level", default_value = "warn")]
    log_level: String,
}

/// Runs one side. The exit status: 0, 1 when it cannot go on, 2 for arguments that make no sense.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let arguments: Arguments = match super::parse(arguments, &["auto_discovery"]) {
        Ok(arguments) => arguments,
        Err(status) => return status,
    };
    super::status("transfer_engine_bench", run_side(&arguments))
}

fn run_side(arguments: &Arguments) -> Result<()> {
    super::log(&arguments.log_level)?;
    // More of them than processors only move tasks about.
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
    super::told_to_stop().await?;
    engine.unregister(region).await?;
    engine.close().await
}

async fn start(arguments: &Arguments) -> Result<TransferEngine> {
    let mut builder = TransferEngine::builder()
        .environment()
        .name(arguments.local_server_name.as_str())
        .metadata(arguments.metadata_server.as_str())
        // Else a process that measures itself would copy.
        .local_copies(LocalCopies::Never);
    if !arguments.protocol.is_empty() {
        builder = builder.protocol(&*arguments.protocol).devices(&arguments.device_name.join(","));
        let named = builder.transport_options()?;
        builder = builder.transports(if arguments.protocol == "shm" {
            named
        } else {
            named.without_shared_memory()
        });
    }
    builder = builder.topology(match &arguments.nic_priority_matrix {
        Some(path) => Topology::read(path)?,
        None if arguments.auto_discovery => {
            Discovery::default().only(arguments.device_name.iter().map(String::as_str)).topology()
        }
        None => Topology::default(),
    });
    builder.start().await
}

fn memory(bytes: u64) -> Result<Arc<HostMemory>> {
    let len =
        usize::try_from(bytes).map_err(|_| Error::invalid(format!("--buffer_size={bytes} is no memory")))?;
    HostMemory::new(len).map(Arc::new)
}

fn at_least_one(text: &str) -> std::result::Result<u64, String> {
    match text.parse() {
        Ok(0) => Err("it must be at least 1".into()),
        Ok(number) => Ok(number),
        Err(error) => Err(format!("{error}")),
    }
}
