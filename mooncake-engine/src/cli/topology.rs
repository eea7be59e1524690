//! `transfer_engine_topology_dump`: which devices are near which memory.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Parser;
use mooncake_transport::topology::Topology;

use crate::TransferEngine;

/// Shows which RDMA devices are near which memory of this host, as the environment (MC_CUSTOM_TOPO_JSON, MC_TE_FILTERS, ...) lets an engine see it.
#[derive(Debug, Parser)]
#[command(name = "transfer_engine_topology_dump", version)]
struct Arguments {
    /// Devices to look at, with commas between them; all when empty.
    #[arg(long = "device_name", value_delimiter = ',')]
    device_name: Vec<String>,
    /// A file with the matrix, in place of what is found; before MC_CUSTOM_TOPO_JSON.
    #[arg(long = "custom_topo_json")]
    custom: Option<PathBuf>,
    /// Only the matrix, as JSON on one line.
    #[arg(long)]
    json: bool,
    /// Folder that stands for the host's /.
    #[arg(long, default_value = "/", hide = true)]
    root: PathBuf,
}

/// Bytes that this process may lock; `None` for any number.
fn locked_memory() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel fills the struct in.
    #[allow(unsafe_code)]
    let code = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
    (code == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// Prints the topology. The exit status: 0, 1 for a file that cannot be used, 2 for arguments that make no sense.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let arguments = match super::parse::<Arguments>(arguments, &[]) {
        Ok(arguments) => arguments,
        Err(status) => return status,
    };
    // As an engine finds it that is started here.
    let said = TransferEngine::builder().environment();
    let discovery = said.discovery.moved_to(arguments.root).only(arguments.device_name);
    let found = discovery.hardware();
    let topology = match arguments.custom.as_ref().or(said.topology_file.as_ref()) {
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
            (cfg!(feature = "transport-rdma"), crate::transport_set::rdma_devices(), found.nics.is_empty())
        {
            println!("no device can be opened: {error}");
        }
    });
    super::status("transfer_engine_topology_dump", shown)
}
