//! `transfer_engine_topology_dump`: which devices are near which memory.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Parser;
use mooncake_transport::topology::{Discovery, Topology};

/// Shows which RDMA devices are near which memory of this host.
#[derive(Debug, Parser)]
#[command(name = "transfer_engine_topology_dump", version)]
struct Arguments {
    /// Devices to look at, with commas between them; all when empty.
    #[arg(long = "device_name", value_delimiter = ',')]
    device_name: Vec<String>,
    /// A file with the matrix, in place of what is found.
    #[arg(long = "custom_topo_json")]
    custom: Option<PathBuf>,
    /// Only the matrix, as JSON on one line.
    #[arg(long)]
    json: bool,
    /// Folder that stands for the host's /.
    #[arg(long, default_value = "/", hide = true)]
    root: PathBuf,
}

/// Prints the topology. The exit status: 0, 1 for a file that cannot be used, 2 for arguments that make no sense.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> u8 {
    let arguments = match super::parse::<Arguments>(arguments, &[]) {
        Ok(arguments) => arguments,
        Err(status) => return status,
    };
    let found = Discovery::under(arguments.root).only(arguments.device_name).hardware();
    let topology = match &arguments.custom {
        None => Ok(found.topology()),
        Some(path) => Topology::read(path),
    };
    let shown = topology.map(|topology| {
        if arguments.json {
            println!("{}", topology.to_json());
            return;
        }
        println!("Local topology [te/discover]: {}", topology.styled());
        for (name, why) in &found.unusable {
            println!("not used: {name}: {why}");
        }
    });
    super::status("transfer_engine_topology_dump", shown)
}
