//! Processes that tests start, stop and kill.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command};

/// Process that is killed when the test ends.
pub(crate) struct Process(pub(crate) Child);

impl Process {
    pub(crate) fn signal(&self, signal: &str) {
        let pid = self.0.id().to_string();
        assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
    }

    /// Stops every thread of the process, and waits until they have stopped.
    pub(crate) fn freeze(&self) {
        self.signal("-STOP");
        while !self.is_frozen() {
            std::thread::yield_now();
        }
    }

    fn is_frozen(&self) -> bool {
        let threads = std::fs::read_dir(format!("/proc/{}/task", self.0.id())).unwrap();
        threads.map_while(Result::ok).all(|thread| {
            // The format is "number (name) state ..", and the name may contain anything.
            let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
            stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
        })
    }

    pub(crate) fn thaw(&self) {
        self.signal("-CONT");
    }

    /// Kills the process as `kill -9` does.
    pub(crate) fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }

    /// Returns the lines that begin with `word`, without it, as they come. Call it once.
    pub(crate) fn lines_after(&mut self, word: &'static str) -> impl Iterator<Item = String> + use<> {
        let lines = BufReader::new(self.0.stdout.take().unwrap()).lines();
        lines.map_while(Result::ok).filter_map(move |line| line.strip_prefix(word).map(str::to_owned))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(crate) use mooncake_core::testkit::free_port;

/// Returns a metric of a process with metrics at this port.
pub(crate) fn metric(port: u16, name: &str) -> Option<u64> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n").ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    // The format is "name value", or "name{labels} value".
    text.lines().find_map(|line| {
        let rest = line.strip_prefix(name).filter(|rest| rest.starts_with([' ', '{']))?;
        rest.rsplit_once(' ')?.1.parse().ok()
    })
}
