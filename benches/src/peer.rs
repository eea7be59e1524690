//! Processes of the reference system, driven line by line: its master, and Python nodes that do what they are told.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

/// Where the reference system is installed: the python of its virtual environment.
#[derive(Clone, Debug)]
pub struct Installation {
    python: PathBuf,
}

/// What a peer's process may fail with.
pub type Result<T> = std::result::Result<T, String>;

impl Installation {
    /// The installation whose interpreter this is.
    pub fn new(python: impl Into<PathBuf>) -> Self {
        Self { python: python.into() }
    }

    /// Starts its master on this RPC port, with its HTTP metadata server when a port is given, and waits until it listens.
    pub fn master(&self, rpc_port: u16, metadata_port: Option<u16>) -> Result<Process> {
        self.master_with(rpc_port, metadata_port, &[])
    }

    /// The same with further flags.
    pub fn master_with(&self, rpc_port: u16, metadata_port: Option<u16>, flags: &[&str]) -> Result<Process> {
        let binary = self.package()?.join("mooncake_master");
        let mut command = Command::new(binary);
        command
            .args(flags)
            .arg(format!("--rpc_port={rpc_port}"))
            .arg(format!("--metrics_port={}", rpc_port + 1));
        if let Some(port) = metadata_port {
            command
                .arg("--enable_http_metadata_server=true")
                .arg(format!("--http_metadata_server_port={port}"));
        }
        let process = Process::start(command, "the peer's master")?;
        wait_for_port(rpc_port)?;
        if let Some(port) = metadata_port {
            wait_for_port(port)?;
        }
        Ok(process)
    }

    /// Starts a Python process with a client that waits for commands.
    pub fn node(&self) -> Result<Node> {
        self.script("node.py", &[], &[])
    }

    /// Starts one of the scripts in `peer/`, which wait for commands, with arguments and variables of the environment.
    pub fn script(&self, name: &str, arguments: &[&str], variables: &[(&str, &str)]) -> Result<Node> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("peer").join(name);
        let mut command = Command::new(&self.python);
        command.envs(variables.iter().copied());
        command
            .arg("-u")
            .arg(script)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut child = command.spawn().map_err(|e| format!("cannot start the peer's python: {e}"))?;
        let input = child.stdin.take().ok_or("no standard input")?;
        let output = BufReader::new(child.stdout.take().ok_or("no standard output")?);
        Ok(Node { child, input, output })
    }

    /// Starts one of its modules as a program.
    pub fn module(&self, name: &str, arguments: &[&str]) -> Result<Process> {
        let mut command = Command::new(&self.python);
        command.args(["-m", name]).args(arguments);
        Process::start(command, name)
    }

    /// Path of one of its programs.
    pub fn program(&self, name: &str) -> Result<PathBuf> {
        Ok(self.package()?.join(name))
    }

    fn package(&self) -> Result<PathBuf> {
        let find = "import mooncake, os; print(os.path.dirname(mooncake.__file__))";
        let output = Command::new(&self.python)
            .args(["-c", find])
            .output()
            .map_err(|e| format!("cannot start {}: {e}", self.python.display()))?;
        let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        if text.is_empty() { Err("the peer is not installed there".into()) } else { Ok(PathBuf::from(text)) }
    }
}

/// A process that dies with this value.
#[derive(Debug)]
pub struct Process {
    child: Child,
}

impl Process {
    /// Starts it with its output thrown away.
    pub fn start(mut command: Command, what: &str) -> Result<Self> {
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|e| format!("cannot start {what}: {e}"))?;
        Ok(Self { child })
    }

    /// Its process number.
    pub fn id(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Already gone is as good as killed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A Python process of the reference system with one client in it.
#[derive(Debug)]
pub struct Node {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Node {
    /// Starts the client: `setup` of its API.
    pub fn setup(
        &mut self,
        host: &str,
        metadata: &str,
        segment: u64,
        local: u64,
        master: &str,
    ) -> Result<()> {
        match self.call(json!(["setup", host, metadata, segment, local, master]))?.as_i64() {
            Some(0) => Ok(()),
            code => Err(format!("the peer's setup answered {code:?}")),
        }
    }

    /// Sends one command and waits for its answer.
    pub fn call(&mut self, command: Value) -> Result<Value> {
        let gone = |e: std::io::Error| format!("the peer's node is gone: {e}");
        writeln!(self.input, "{command}").and_then(|()| self.input.flush()).map_err(gone)?;
        let mut line = String::new();
        loop {
            line.clear();
            if self.output.read_line(&mut line).map_err(gone)? == 0 {
                return Err(format!("the peer's node ended during {command}"));
            }
            // Log lines of the library end up on the same stream; an answer carries a mark.
            let Some(at) = line.find('\u{1}') else { continue };
            let answer: Value = serde_json::from_str(line[at + 1..].trim()).map_err(|e| e.to_string())?;
            if let Some(error) = answer.get("error") {
                return Err(format!("{command}: {error}"));
            }
            return answer.get("ok").cloned().ok_or_else(|| format!("{command}: {answer}"));
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until something listens on this port of every local address.
pub fn wait_for_port(port: u16) -> Result<()> {
    let address = std::net::SocketAddr::from(([127, 0, 0, 1], port));
    // Nothing tells us when a foreign process listens, so ask until it answers.
    for _ in 0..200 {
        if std::net::TcpStream::connect_timeout(&address, Duration::from_millis(200)).is_ok() {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Err(format!("nothing listens on port {port} after 10 s"))
}

/// Bytes as the node's commands carry them.
pub fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// The way back from [`hex`].
pub fn unhex(text: &str) -> Result<Vec<u8>> {
    (0..text.len())
        .step_by(2)
        .map(|i| text.get(i..i + 2).and_then(|pair| u8::from_str_radix(pair, 16).ok()))
        .collect::<Option<Vec<u8>>>()
        .ok_or_else(|| format!("not hex: {text}"))
}
