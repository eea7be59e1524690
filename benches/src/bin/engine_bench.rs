//! Pairs of transfer engines of this project and of Mooncake C++, each as initiator and as target:
//! the same program on both sides, reading and writing, beside plain sockets over loopback in the
//! same run. Run by `cargo xtask bench --engine`.
//!
//! A pair is measured several times, in turn with the others, and the median counts. With Mooncake
//! C++, each row shows whether it meets its goals: a pair of this project has at least [`OF_RAW`]
//! of plain sockets and [`OF_THEIRS`] times a pair of Mooncake C++, and mixed pairs are at least
//! as fast as the latter. A row that misses its goals fails the whole measurement.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command line tool prints to its terminal")]

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use mooncake_benches::peer::{Installation, Process, Result, wait_for_port};
use serde_json::Value;

const METADATA_PORT: u16 = 51600;
/// Duration of each measurement, in seconds.
const SPAN: &str = "1";
const ROUNDS: usize = 5;
const BATCH: &str = "16";
const BUFFER: &str = "268435456";
const BLOCKS: [&str; 2] = ["65536", "1048576"];
const THREADS: [&str; 2] = ["1", "4"];
const OPERATIONS: [&str; 2] = ["read", "write"];

const OF_RAW: f64 = 0.75;
const OF_THEIRS: f64 = 1.5;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Ours,
    Theirs,
}

impl Side {
    fn name(self) -> &'static str {
        match self {
            Side::Ours => "ours",
            Side::Theirs => "theirs",
        }
    }
}

struct Programs {
    ours: PathBuf,
    theirs: Option<PathBuf>,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    let value = |name: &str| {
        let at = arguments.iter().position(|a| a == name)?;
        arguments.get(at + 1).map(PathBuf::from)
    };
    let (Some(ours), Some(server)) = (value("--bench"), value("--metadata-server")) else {
        eprintln!("engine_bench: missing --bench or --metadata-server; run `cargo xtask bench --engine`");
        return ExitCode::FAILURE;
    };
    let short = arguments.iter().any(|argument| argument == "--short");
    let theirs =
        value("--peer").map(|python| Installation::new(python).program("transfer_engine_bench")).transpose();
    match theirs.and_then(|theirs| run(&Programs { ours, theirs }, &server, short)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("engine_bench: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(programs: &Programs, server: &Path, short: bool) -> Result<()> {
    let mut command = Command::new(server);
    command.arg("--host=127.0.0.1").arg(format!("--port={METADATA_PORT}"));
    let _server = Process::start(command, "the metadata server")?;
    wait_for_port(METADATA_PORT)?;
    let sides = match &programs.theirs {
        Some(_) => &[Side::Ours, Side::Theirs][..],
        None => &[Side::Ours],
    };
    let targets =
        sides.iter().map(|side| Ok((*side, programs.target(*side)?))).collect::<Result<Vec<_>>>()?;
    let pairs: Vec<(Side, Side)> =
        sides.iter().flat_map(|from| sides.iter().map(|to| (*from, *to))).collect();
    print!("{:<10} {:>8} {:>8}", "operation", "block", "threads");
    for (from, to) in &pairs {
        print!(" {:>14}", format!("{}-{}", from.name(), to.name()));
    }
    println!(" {:>14}   GB/s, batch {BATCH}, median of {}", "raw sockets", rounds(short));
    let mut missed = 0;
    for operation in OPERATIONS {
        for block in BLOCKS {
            for threads in THREADS {
                missed += usize::from(!row(programs, &pairs, [operation, block, threads], short)?);
            }
        }
    }
    drop(targets);
    // One round of such a noisy measurement proves little.
    if missed == 0 || short { Ok(()) } else { Err(format!("{missed} rows miss their goals")) }
}

fn rounds(short: bool) -> usize {
    if short { 1 } else { ROUNDS }
}

/// Prints one line. Returns whether it meets its goals.
fn row(programs: &Programs, pairs: &[(Side, Side)], shape: [&str; 3], short: bool) -> Result<bool> {
    let mut speeds = vec![Vec::new(); pairs.len()];
    let mut raw = Vec::new();
    for _ in 0..rounds(short) {
        for ((from, to), speeds) in pairs.iter().zip(&mut speeds) {
            speeds.push(match from {
                Side::Ours => {
                    let results = programs.ours(*to, shape)?;
                    raw.push(speed_of(&results, "raw sockets")?);
                    speed_of(&results, shape[0])?
                }
                Side::Theirs => programs.theirs(*to, shape)?,
            });
        }
    }
    print!("{:<10} {:>8} {:>8}", shape[0], shape[1], shape[2]);
    let medians: Vec<f64> = speeds.into_iter().chain([raw]).map(median).collect();
    for speed in &medians {
        print!(" {speed:>14.2}");
    }
    let good = match medians[..] {
        [ours, ours_theirs, theirs_ours, theirs, raw] => {
            let good =
                ours >= OF_RAW * raw && ours >= OF_THEIRS * theirs && ours_theirs.min(theirs_ours) >= theirs;
            print!(
                "   {:.0} % of raw, {:.1} times Mooncake C++, mixed {:.2} times: {}",
                100.0 * ours / raw,
                ours / theirs,
                ours_theirs.min(theirs_ours) / theirs,
                if good { "yes" } else { "NO" }
            );
            good
        }
        _ => true,
    };
    println!();
    Ok(good)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// Returns the GB/s of a line of this project's results.
fn speed_of(results: &Value, what: &str) -> Result<f64> {
    let rows = results["rows"].as_array().ok_or("the results have no rows")?;
    let row = rows
        .iter()
        .find(|row| row["what"] == what)
        .ok_or_else(|| format!("the results have no line {what:?}"))?;
    row["bytes_per_second"]
        .as_f64()
        .map(|speed| speed / 1e9)
        .ok_or_else(|| "the results have no speed".into())
}

impl Programs {
    fn command(&self, side: Side) -> Result<Command> {
        let program = match side {
            Side::Ours => &self.ours,
            Side::Theirs => self.theirs.as_ref().ok_or("Mooncake C++ is not installed")?,
        };
        let mut command = Command::new(program);
        command.arg(format!("--metadata_server=http://127.0.0.1:{METADATA_PORT}/metadata"));
        command.args(["--protocol=tcp", &format!("--buffer_size={BUFFER}")]);
        Ok(command)
    }

    /// Starts a target. The metadata server has its entry when this returns.
    fn target(&self, side: Side) -> Result<Process> {
        let mut command = self.command(side)?;
        command.args(["--mode=target", &format!("--local_server_name={}", side.name())]);
        let process = Process::start(command, "the target")?;
        let key = format!("/metadata?key=mooncake%2Fram%2F{}", side.name());
        // No event reports that another process has published its memory, so this polls.
        for _ in 0..200 {
            if published(&key) {
                return Ok(process);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Err(format!("the target of {} did not publish its memory", side.name()))
    }

    fn initiator(&self, from: Side, to: Side, [operation, block, threads]: [&str; 3]) -> Result<Command> {
        let mut command = self.command(from)?;
        command.arg(format!("--local_server_name=from-{}", std::process::id()));
        command.args([&format!("--segment_id={}", to.name()), &format!("--operation={operation}")]);
        command.args([&format!("--block_size={block}"), &format!("--threads={threads}")]);
        command.args([&format!("--batch_size={BATCH}"), &format!("--duration={SPAN}")]);
        Ok(command)
    }

    fn ours(&self, to: Side, shape: [&str; 3]) -> Result<Value> {
        let mut command = self.initiator(Side::Ours, to, shape)?;
        let output = command.args(["--format=json", "--reference"]).output().map_err(|e| e.to_string())?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned());
        }
        serde_json::from_slice(&output.stdout).map_err(|e| e.to_string())
    }

    /// Returns the GB/s that the program of Mooncake C++ prints.
    fn theirs(&self, to: Side, shape: [&str; 3]) -> Result<f64> {
        let mut command = self.initiator(Side::Theirs, to, shape)?;
        let output =
            command.args(["--report_unit=GB", "--report_precision=4"]).output().map_err(|e| e.to_string())?;
        let said = [&output.stdout[..], &output.stderr[..]].concat();
        let said = String::from_utf8_lossy(&said);
        let number =
            said.split("throughput").nth(1).and_then(|rest| rest.split_whitespace().next()?.parse().ok());
        number.ok_or_else(|| format!("the program of Mooncake C++ printed no throughput:\n{said}"))
    }
}

/// Returns whether the metadata server has an entry with memory in it.
fn published(path: &str) -> bool {
    use std::io::{Read, Write};
    let ask = || {
        let mut stream = std::net::TcpStream::connect(("127.0.0.1", METADATA_PORT))?;
        write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        std::io::Result::Ok(answer)
    };
    ask().is_ok_and(|answer| answer.contains("\"length\""))
}
