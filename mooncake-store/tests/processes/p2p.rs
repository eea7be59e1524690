//! `mooncake p2p` as processes, with the catalogue in a real etcd (Debian: `etcd-server`); without
//! etcd the test prints so and passes, except in CI.
#![cfg(feature = "metadata-etcd")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use mooncake_core::clock::Rng;
use mooncake_core::testkit::test_seed;
use mooncake_metadata::etcd::EtcdMetadata;
use serde_json::Value;

use crate::process::Process;
use crate::servers::{Server, etcd, ready, start};

struct Cluster {
    etcd: Server,
    folder: tempfile::TempDir,
}

impl Cluster {
    /// Returns the command `mooncake p2p` of the node at this address.
    fn command(&self, host: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_mooncake"));
        command.env_clear().args(["--metadata", &format!("etcd://{}", self.etcd.at())]);
        command.args(["--hostname", host, "p2p"]).args(arguments);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Starts a node, and waits until it serves an object.
    fn serve(&self, host: &str, arguments: &[&str]) -> Process {
        let mut command = self.command(host, arguments);
        let mut process = Process(command.stderr(Stdio::inherit()).spawn().unwrap());
        process.lines_after("serving ").next().expect("the node serves");
        process
    }

    fn list(&self) -> Value {
        let output = self.command("127.0.0.1", &["ls", "--json"]).output().unwrap();
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[tokio::test]
async fn files_travel_from_node_to_node() {
    let Some(etcd) = start(etcd) else { return };
    ready(&EtcdMetadata::new(&etcd.at()).unwrap()).await;
    let cluster = Cluster { etcd, folder: tempfile::tempdir().unwrap() };
    let mut bytes = vec![0; (5 << 20) + 77];
    Rng::seeded(test_seed()).fill(&mut bytes);
    let source = cluster.path("checkpoint");
    std::fs::write(&source, &bytes).unwrap();
    let seeder = cluster.serve("127.0.0.1", &["seed", text(&source), "--shard-size", "1M"]);
    let listed = cluster.list();
    assert_eq!((&listed[0]["name"], &listed[0]["bytes"]), (&"checkpoint".into(), &bytes.len().into()));

    let copies = ["a", "b", "c"].map(|name| cluster.path(name));
    // A reader before this one was killed after half of the bytes.
    let half = [&bytes[..3 << 20], &vec![0; bytes.len() - (3 << 20)]].concat();
    std::fs::write(cluster.path("b.part"), half).unwrap();
    let hosts = ["127.0.0.2", "127.0.0.3", "127.0.0.4"];
    let begin = |(host, copy): (&&str, &PathBuf)| {
        cluster.command(host, &["get", "checkpoint", text(copy)]).spawn().unwrap()
    };
    let readers: Vec<_> = hosts.iter().zip(&copies).map(begin).collect();
    for (reader, copy) in readers.into_iter().zip(&copies) {
        let Output { status, stderr, .. } = reader.wait_with_output().unwrap();
        assert!(status.success(), "{}", String::from_utf8_lossy(&stderr));
        assert!(std::fs::read(copy).unwrap() == bytes, "{}", copy.display());
    }
    assert!(!cluster.path("b.part").exists());

    // A reader serves the object after the seeder was killed.
    let copy = cluster.path("d");
    let mut server = cluster.serve("127.0.0.5", &["get", "checkpoint", text(&copy), "--serve"]);
    seeder.kill();
    let late = cluster.path("e");
    let output = cluster.command("127.0.0.6", &["get", "checkpoint", text(&late)]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(std::fs::read(&late).unwrap() == bytes);

    // Another user of the folder has chosen where the name of the part leads.
    let (other, linked) = (cluster.path("other"), cluster.path("g"));
    std::fs::write(&other, "other").unwrap();
    std::os::unix::fs::symlink(&other, cluster.path("g.part")).unwrap();
    let refused = cluster.command("127.0.0.8", &["get", "checkpoint", text(&linked)]).output().unwrap();
    let text_of = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && text_of.contains("symbolic link"), "{text_of}");
    assert!(std::fs::read(&other).unwrap() == b"other" && !linked.exists());
    server.signal("-TERM");
    assert!(server.ended().success());

    let missing = cluster.command("127.0.0.7", &["get", "other", text(&cluster.path("f"))]).output().unwrap();
    assert_eq!(missing.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&missing.stderr).contains("the catalogue does not have it"));
}
