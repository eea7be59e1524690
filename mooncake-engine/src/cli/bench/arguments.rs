//! Command line of the benchmark, and the engine and the memory that it describes.

use std::path::PathBuf;
use std::sync::Arc;

use clap::{ArgAction, Parser, ValueEnum};
use mooncake_core::memory::HostMemory;
use mooncake_core::{Error, Result};
use mooncake_transport::engine::LocalCopies;
use mooncake_transport::topology::{Discovery, Topology};

use super::report::Unit;
use crate::TransferEngine;

/// Role of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Mode {
    Initiator,
    Target,
}

/// Direction of the transfers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Operation {
    Read,
    Write,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Format {
    Table,
    Json,
}

/// Measures transfers between two processes. Start one with --mode=target, which prints the name of
/// its segment. Start the other one with --segment_id=NAME.
#[derive(Debug, Parser)]
#[command(name = "transfer_engine_bench", version)]
pub(super) struct Arguments {
    /// Role of this process.
    #[arg(long, value_enum, default_value = "initiator")]
    pub(super) mode: Mode,
    /// Metadata service: P2PHANDSHAKE, http://host:port/metadata, etcd://host:port,
    /// redis://host:port.
    #[arg(long = "metadata_server", default_value = "P2PHANDSHAKE")]
    pub(super) metadata_server: String,
    /// Name of the local segment; with P2PHANDSHAKE its host. Empty selects the address of this
    /// host.
    #[arg(long = "local_server_name", default_value = "")]
    pub(super) local_server_name: String,
    /// Address of this host at which every port listens [environment: MC_BIND_ADDRESS]
    #[arg(long = "bind_address")]
    pub(super) bind_address: Option<String>,
    /// Name of the target's segment.
    #[arg(long = "segment_id", default_value = "")]
    pub(super) segment_id: String,
    /// Name of the only transport to use. Empty selects the best ones of the build.
    #[arg(long, default_value = "")]
    pub(super) protocol: String,
    /// RDMA devices to use, separated by commas.
    #[arg(long = "device_name", value_delimiter = ',')]
    pub(super) device_name: Vec<String>,
    /// File with the devices near each memory location.
    #[arg(long = "nic_priority_matrix")]
    pub(super) nic_priority_matrix: Option<PathBuf>,
    /// Search for devices at the start. Otherwise only those of --nic_priority_matrix are known.
    #[arg(long = "auto_discovery", action = ArgAction::Set, default_value_t = true, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(super) auto_discovery: bool,
    /// Direction of the transfers.
    #[arg(long, value_enum, default_value = "read")]
    pub(super) operation: Operation,
    /// Length of one request in bytes.
    #[arg(long = "block_size", default_value_t = 65536, value_parser = at_least_one)]
    pub(super) block_size: u64,
    /// Number of requests per submission.
    #[arg(long = "batch_size", default_value_t = 128, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub(super) batch_size: u64,
    /// Number of parallel submitters.
    #[arg(long, default_value_t = 12, value_parser = clap::value_parser!(u64).range(1..=4096))]
    pub(super) threads: u64,
    /// Duration of the measurement in seconds.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=31_536_000))]
    pub(super) duration: u64,
    /// Length of the registered memory in bytes.
    #[arg(long = "buffer_size", default_value_t = 1 << 30, value_parser = at_least_one)]
    pub(super) buffer_size: u64,
    /// Unit of throughput: GB|GiB|Gb|MB|MiB|Mb|KB|KiB|Kb, each per second.
    #[arg(long = "report_unit", default_value = "GB", value_parser = Unit::parse)]
    pub(super) report_unit: Unit,
    /// Number of digits after the decimal point.
    #[arg(long = "report_precision", default_value_t = 2)]
    pub(super) report_precision: u8,
    /// Format of the results.
    #[arg(long, value_enum, default_value = "table")]
    pub(super) format: Format,
    /// Also measure plain sockets over loopback, and memcpy, with the same sizes.
    #[arg(long)]
    pub(super) reference: bool,
    /// Write a pattern and read it back before measuring.
    #[arg(long)]
    pub(super) check: bool,
    /// Log level.
    #[arg(long = "log_level", default_value = "warn")]
    pub(super) log_level: String,
}

pub(super) async fn start(arguments: &Arguments) -> Result<TransferEngine> {
    let mut builder = TransferEngine::builder()
        .environment()
        .name(arguments.local_server_name.as_str())
        .metadata(arguments.metadata_server.as_str())
        // Otherwise a process that measures itself would copy.
        .local_copies(LocalCopies::Never);
    if let Some(address) = &arguments.bind_address {
        builder = builder.bind_address(address);
    }
    if !arguments.protocol.is_empty() {
        builder = builder.protocol(&*arguments.protocol).devices(&arguments.device_name.join(","));
        let options = builder.transport_options()?;
        builder = builder.transports(if arguments.protocol == "shm" {
            options
        } else {
            options.without_shared_memory()
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

pub(super) fn memory(bytes: u64) -> Result<Arc<HostMemory>> {
    let len = usize::try_from(bytes)
        .map_err(|_| Error::invalid(format!("invalid length: --buffer_size={bytes}")))?;
    HostMemory::new(len).map(Arc::new)
}

fn at_least_one(text: &str) -> std::result::Result<u64, String> {
    match text.parse() {
        Ok(0) => Err("it must be at least 1".into()),
        Ok(number) => Ok(number),
        Err(error) => Err(format!("{error}")),
    }
}
