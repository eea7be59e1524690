//! Processes of Mooncake C++, driven line by line: its master, and Python nodes that execute
//! commands.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

/// Installation of Mooncake C++, by the Python of its virtual environment.
#[derive(Clone, Debug)]
pub struct Installation {
    python: PathBuf,
}

/// Result with the failure of a process as text.
pub type Result<T> = std::result::Result<T, String>;

impl Installation {
    /// Creates the installation of this interpreter.
    pub fn new(python: impl Into<PathBuf>) -> Self {
        Self { python: python.into() }
    }

    /// Starts the master on this RPC port, with its HTTP metadata server if a port is given, and
    /// waits until it listens.
    pub fn master(&self, rpc_port: u16, metadata_port: Option<u16>) -> Result<Process> {
        self.master_with(rpc_port, metadata_port, &[])
    }

    /// Starts the master with additional flags.
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
        let process = Process::start(command, "the master of Mooncake C++")?;
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

    /// Starts one of the scripts in `peer/`, which wait for commands, with arguments and
    /// environment variables.
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
        let mut child =
            command.spawn().map_err(|e| format!("cannot start the Python of Mooncake C++: {e}"))?;
        let input = child.stdin.take().ok_or("no standard input")?;
        let output = BufReader::new(child.stdout.take().ok_or("no standard output")?);
        Ok(Node { child, input, output })
    }

    /// Starts a Python module as a program.
    pub fn module(&self, name: &str, arguments: &[&str]) -> Result<Process> {
        let mut command = Command::new(&self.python);
        // From 0.3.14 on, a metadata server without a token listens on no outside address.
        command.env("MC_METADATA_HTTP_ALLOW_INSECURE", "1");
        command.args(["-m", name]).args(arguments);
        Process::start(command, name)
    }

    /// Returns the path of a program.
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
        if text.is_empty() {
            Err("Mooncake C++ is not installed there".into())
        } else {
            Ok(PathBuf::from(text))
        }
    }
}

/// Process that is killed on drop.
#[derive(Debug)]
pub struct Process {
    child: Child,
}

impl Process {
    /// Starts the process, and discards its output.
    pub fn start(mut command: Command, what: &str) -> Result<Self> {
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|e| format!("cannot start {what}: {e}"))?;
        Ok(Self { child })
    }

    /// Returns the process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // A process that has ended already counts as killed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Python process of Mooncake C++ with one client.
#[derive(Debug)]
pub struct Node {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Node {
    /// Starts the client with `setup` of its API.
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
            code => Err(format!("setup of Mooncake C++ failed: {code:?}")),
        }
    }

    /// Sends one command and waits for its response.
    pub fn call(&mut self, command: Value) -> Result<Value> {
        let gone = |e: std::io::Error| format!("the node of Mooncake C++ has ended: {e}");
        writeln!(self.input, "{command}").and_then(|()| self.input.flush()).map_err(gone)?;
        let mut line = String::new();
        loop {
            line.clear();
            if self.output.read_line(&mut line).map_err(gone)? == 0 {
                return Err(format!("the node of Mooncake C++ ended during {command}"));
            }
            // Log lines of the library share the stream; a response carries a mark.
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

/// Waits until a process listens on this port of every local address.
pub fn wait_for_port(port: u16) -> Result<()> {
    let address = std::net::SocketAddr::from(([127, 0, 0, 1], port));
    // No event reports that another process listens, so this polls.
    for _ in 0..200 {
        if std::net::TcpStream::connect_timeout(&address, Duration::from_millis(200)).is_ok() {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Err(format!("nothing listens on port {port} after 10 s"))
}

/// Encodes bytes as the commands of a node carry them.
pub fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Decodes the output of [`hex`].
pub fn unhex(text: &str) -> Result<Vec<u8>> {
    (0..text.len())
        .step_by(2)
        .map(|i| text.get(i..i + 2).and_then(|pair| u8::from_str_radix(pair, 16).ok()))
        .collect::<Option<Vec<u8>>>()
        .ok_or_else(|| format!("not hex: {text}"))
}
