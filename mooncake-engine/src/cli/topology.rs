//! `transfer_engine_topology_dump`: the devices near each memory location.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Parser;
use mooncake_transport::topology::Topology;

use crate::TransferEngine;

/// Shows the RDMA devices near each memory location of this host, as an engine sees them with this
/// environment (MC_CUSTOM_TOPO_JSON, MC_TE_FILTERS, ...).
#[derive(Debug, Parser)]
#[command(name = "transfer_engine_topology_dump", version)]
struct Arguments {
    /// Devices to show, separated by commas. Empty selects all.
    #[arg(long = "device_name", value_delimiter = ',')]
    device_name: Vec<String>,
    /// File with the matrix to show, in place of the hardware and of MC_CUSTOM_TOPO_JSON.
    #[arg(long = "custom_topo_json")]
    custom: Option<PathBuf>,
    /// Print only the matrix, as JSON on one line.
    #[arg(long)]
    json: bool,
    /// Folder in place of the root of the file system.
    #[arg(long, default_value = "/", hide = true)]
    root: PathBuf,
}

/// Returns the number of bytes that this process may lock, or `None` if it is unlimited.
fn locked_memory() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel initialises the struct.
    #[allow(unsafe_code)]
    let code = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
    (code == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// Prints the topology. Returns the exit status: 0, 1 for a file that cannot be used, or 2 for
/// invalid arguments.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let arguments = match super::parse::<Arguments>(arguments) {
        Ok(arguments) => arguments,
        Err(status) => return status,
    };
    // An engine that is started here would find the same.
    let (discovery, file) = TransferEngine::builder().environment().topology_source();
    let discovery = discovery.moved_to(arguments.root).only(arguments.device_name);
    let found = discovery.hardware();
    let topology = match arguments.custom.as_ref().or(file.as_ref()) {
        None => Ok(found.topology()),
        Some(path) => Topology::read(path),
    };
    let shown = topology.map(|topology| {
        if arguments.json {
            println!("{}", topology.to_json());
            return;
        }
        println!("Local topology [te/discover]: {}", topology.styled());
        for device in discovery.devices() {
            println!("device: {device}");
        }
        for (name, why) in &found.unusable {
            println!("not used: {name}: {why}");
        }
        match locked_memory() {
            _ if found.nics.is_empty() => {}
            None => println!("locked memory: unlimited"),
            Some(bytes) => println!("locked memory: {bytes} bytes at most, which is what can be registered"),
        }
        if let (true, Err(error), false) =
            (crate::built_in::has("rdma"), crate::transport_set::rdma_devices(), found.nics.is_empty())
        {
            println!("no device can be opened: {error}");
        }
    });
    super::status("transfer_engine_topology_dump", shown)
}
