//! Interoperability with a live engine of Mooncake C++, in both directions. Ignored by default.
//! `PEER_PYTHON` names a Python with Mooncake C++ installed, and the test needs an interface
//! besides `lo`: `PEER_PYTHON=.venv/bin/python cargo test -p mooncake-tcp --test peer --
//! --ignored`.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;

use mooncake_core::ErrorKind;
use mooncake_core::memory::HostMemory;
use mooncake_tcp::{Framing, TcpConfig, TcpTransport};
use mooncake_transport::engine::HandshakePort;
use mooncake_transport::transfer::{self, Transfer};
use mooncake_transport::{Directory, Engine, Transport};

const SCRIPT: &str = r#"
import sys
from mooncake.engine import TransferEngine
engine = TransferEngine()
status = engine.initialize("127.0.0.1:1", "P2PHANDSHAKE", "tcp", "")
buffer = engine.allocate_managed_buffer(32 << 20)
print(status, engine.get_rpc_port(), buffer, flush=True)
for line in sys.stdin:
    command, *rest = line.split()
    if command == "fill":
        byte, length = int(rest[0]), int(rest[1])
        print(engine.write_bytes_to_buffer(buffer, bytes([byte]) * length, length), flush=True)
    if command == "same":
        byte, length = int(rest[0]), int(rest[1])
        print(engine.read_bytes_from_buffer(buffer, length) == bytes([byte]) * length, flush=True)
    if command == "write":
        print(engine.transfer_sync_write(rest[0], buffer, int(rest[1]), int(rest[2])), flush=True)
    if command == "read":
        print(engine.transfer_sync_read(rest[0], buffer, int(rest[1]), int(rest[2])), flush=True)
"#;

struct MooncakeCpp {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    name: String,
    buffer: u64,
}

impl MooncakeCpp {
    /// Starts the engine. `plain` makes it use the old framing as initiator.
    fn start(plain: bool) -> Self {
        #[allow(clippy::disallowed_methods, reason = "the test's own argument")]
        let python = std::env::var("PEER_PYTHON").expect("set PEER_PYTHON to a Python with Mooncake C++");
        let mut command = Command::new(python);
        command.args(["-c", SCRIPT]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        if plain {
            command.env("MC_TCP_PROTO", "1");
        }
        let mut child = command.spawn().unwrap();
        let input = child.stdin.take().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        let numbers: Vec<u64> = line.split_whitespace().map(|n| n.parse().unwrap()).collect();
        let [0, port, buffer] = numbers[..] else { panic!("unexpected output of the peer: {line:?}") };
        Self { child, input, output, name: format!("127.0.0.1:{port}"), buffer }
    }

    fn run_command(&mut self, command: &str) -> String {
        writeln!(self.input, "{command}").unwrap();
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }
}

impl Drop for MooncakeCpp {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const SIZES: [usize; 6] = [1, 8, 4096, 65_537, 1 << 20, (16 << 20) + 13];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs Mooncake C++, see above"]
async fn bytes_go_both_ways_in_both_framings() {
    for framing in [Framing::Acknowledged, Framing::Plain] {
        let mut mooncake_cpp = MooncakeCpp::start(framing == Framing::Plain);
        let config = TcpConfig { framing, data_host: "127.0.0.1".into(), ..TcpConfig::default() };
        let wire = Arc::new(TcpTransport::start(config, &tokio::runtime::Handle::current()).unwrap());
        let engine = Engine::builder(wire.clone())
            .name("127.0.0.1:1")
            .directory(Directory::P2p)
            .handshake(HandshakePort::default())
            .start()
            .await
            .unwrap();
        let open = engine.register(Arc::new(HostMemory::new(32 << 20).unwrap())).await.unwrap();
        let desc = engine.open(&mooncake_cpp.name).await.unwrap().descriptor();
        let connection = wire.connect(&desc).await.unwrap();
        for (i, len) in SIZES.into_iter().enumerate() {
            let (written_byte, filled_byte) = (2 * i as u8 + 1, 2 * i as u8 + 2);
            // This node writes and the peer checks; then the peer fills and this node reads.
            let write = [Transfer::new(mooncake_cpp.buffer, vec![written_byte; len])];
            transfer::write(&*wire, &connection, write, None).await.0.unwrap();
            assert_eq!(
                mooncake_cpp.run_command(&format!("same {written_byte} {len}")),
                "True",
                "{framing:?} {len}"
            );
            assert_eq!(mooncake_cpp.run_command(&format!("fill {filled_byte} {len}")), "0");
            let read = [Transfer::new(mooncake_cpp.buffer, vec![0; len])];
            let (result, [read]) = transfer::read(&*wire, &connection, read, None).await;
            result.unwrap();
            assert!(read.buffer == vec![filled_byte; len], "{framing:?} {len}");
            // The peer writes its bytes and this node checks; then the peer reads them back.
            assert_eq!(
                mooncake_cpp.run_command(&format!("write {} {} {len}", engine.name(), open.addr())),
                "0"
            );
            if framing == Framing::Plain {
                // A plain write of Mooncake C++ is complete before it has arrived; its read on the
                // same connection comes after it.
                assert_eq!(
                    mooncake_cpp.run_command(&format!("read {} {} {len}", engine.name(), open.addr())),
                    "0"
                );
            }
            let mut bytes = vec![0; len];
            open.slice(0..len).unwrap().copy_to(0, &mut bytes).unwrap();
            assert!(bytes == vec![filled_byte; len], "{framing:?} {len}");
            assert_eq!(mooncake_cpp.run_command(&format!("fill 0 {len}")), "0");
            assert_eq!(
                mooncake_cpp.run_command(&format!("read {} {} {len}", engine.name(), open.addr())),
                "0"
            );
            assert_eq!(
                mooncake_cpp.run_command(&format!("same {filled_byte} {len}")),
                "True",
                "{framing:?} {len}"
            );
        }
        let unregistered = [Transfer::new(4096, vec![0; 8])];
        let refused = transfer::read(&*wire, &connection, unregistered, None).await.0.unwrap_err();
        let expected = if framing == Framing::Plain { ErrorKind::Unavailable } else { ErrorKind::Invalid };
        assert_eq!(refused.kind(), expected, "{refused}");
        if framing == Framing::Acknowledged {
            assert_eq!(
                mooncake_cpp.run_command(&format!("read {} {} 8", engine.name(), open.addr() - 8)),
                "-1"
            );
        }
        engine.close().await.unwrap();
    }
}
