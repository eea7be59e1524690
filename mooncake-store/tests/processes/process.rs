//! Processes that tests start, stop and kill.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Longest time to wait for a process: a line of its output, its end, a response.
const PATIENCE: Duration = Duration::from_secs(120);

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
        let folder = PathBuf::from(format!("/proc/{}", self.0.id()));
        let late = deadline();
        loop {
            assert!(!matches!(state(&folder), None | Some('Z' | 'X')), "a process that has ended");
            let mut threads = std::fs::read_dir(folder.join("task")).unwrap().map_while(Result::ok);
            if threads.all(|thread| state(&thread.path()) == Some('T')) {
                return;
            }
            late("the process stops");
            std::thread::yield_now();
        }
    }

    pub(crate) fn thaw(&self) {
        self.signal("-CONT");
    }

    /// Kills the process as `kill -9` does.
    pub(crate) fn kill(mut self) {
        self.0.kill().unwrap();
        self.ended();
    }

    /// Waits until the process has ended.
    pub(crate) fn ended(&mut self) -> ExitStatus {
        let late = deadline();
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status;
            }
            late("the process ends");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// # Panics
    /// Panics if the process has ended.
    pub(crate) fn assert_alive(&mut self) {
        if let Some(status) = self.0.try_wait().unwrap() {
            panic!("process {} has ended: {status}", self.0.id());
        }
    }

    /// Returns the lines that begin with `word`, without it, as they come. Call it once.
    pub(crate) fn lines_after(&mut self, word: &'static str) -> Lines {
        let lines = BufReader::new(self.0.stdout.take().unwrap()).lines();
        // A thread reads the output at once, so that the process never waits for its parent.
        let (sender, receiver) = mpsc::channel();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                if let Some(line) = line.strip_prefix(word)
                    && sender.send(line.to_owned()).is_err()
                {
                    break;
                }
            }
        });
        Lines { receiver, word }
    }
}

/// Returns the state of a process or thread with this folder in `/proc`.
fn state(folder: &Path) -> Option<char> {
    // The format is "number (name) state ..", and the name may contain anything.
    std::fs::read_to_string(folder.join("stat")).ok()?.rsplit_once(") ")?.1.chars().next()
}

/// Lines of the output of a process. They end when the process closes its output. `next` panics if
/// no line comes for too long.
pub(crate) struct Lines {
    receiver: mpsc::Receiver<String>,
    word: &'static str,
}

impl Lines {
    /// Returns the lines that have come.
    pub(crate) fn arrived(&self) -> impl Iterator<Item = String> {
        self.receiver.try_iter()
    }
}

impl Iterator for Lines {
    type Item = String;

    fn next(&mut self) -> Option<String> {
        match self.receiver.recv_timeout(PATIENCE) {
            Ok(line) => Some(line),
            Err(mpsc::RecvTimeoutError::Disconnected) => None,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                panic!("not within {PATIENCE:?}: a line that begins with {:?}", self.word)
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns a function that panics, with the awaited event, when the longest time has passed.
#[allow(clippy::disallowed_methods, reason = "the bound is one of real time")]
pub(crate) fn deadline() -> impl Fn(&str) {
    let began = Instant::now();
    move |event| assert!(began.elapsed() < PATIENCE, "not within {PATIENCE:?}: {event}")
}

pub(crate) use mooncake_core::testkit::free_port;

/// Returns the body of a page of a process that serves HTTP at this port.
pub(crate) fn page(port: u16, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(PATIENCE)).ok()?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n").ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    Some(text.split_once("\r\n\r\n")?.1.to_owned())
}

/// Returns a metric of a process with metrics at this port.
pub(crate) fn metric(port: u16, name: &str) -> Option<u64> {
    // The format is "name value", or "name{labels} value".
    page(port, "/metrics")?.lines().find_map(|line| {
        let rest = line.strip_prefix(name).filter(|rest| rest.starts_with([' ', '{']))?;
        rest.rsplit_once(' ')?.1.parse().ok()
    })
}
