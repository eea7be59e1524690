//! Kill of a master with many objects in the memory of four processes: the time until the next
//! master serves all of them, and whether their bytes are right. Run by `cargo xtask bench
//! --restart`.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command line tool prints to its terminal")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::time::Duration;

use mooncake_benches::peer::{Process, Result, wait_for_port};
use mooncake_core::Clock;
use mooncake_core::clock::{Rng, SystemClock};
use mooncake_store::client::{Client, PutOptions, PutOutcome};
use tokio::runtime::Runtime;

const PORT: u16 = 51_181;
const MEMBERS: u64 = 4;
/// Lengths of values, in turn.
const LENGTHS: [usize; 3] = [64, 100, 128];
const BATCH: usize = 500;
/// Longest permitted time until every object is served again.
const LIMIT: Duration = Duration::from_secs(5);
/// Timeout of a measurement without progress.
const PATIENCE: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match words.as_slice() {
        ["--master", master, "--objects", count] => match count.parse() {
            Ok(count) => run(Path::new(master), count),
            Err(_) => Err(format!("invalid number of objects: {count}")),
        },
        ["--member", number, "--objects", each] => match (number.parse(), each.parse()) {
            (Ok(number), Ok(each)) => member(number, each),
            _ => Err("usage: a client process takes two numbers".into()),
        },
        other => Err(format!("unknown arguments {other:?}; run `cargo xtask bench --restart`")),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("master_restart: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(binary: &Path, objects: u64) -> Result<()> {
    let each = objects.div_ceil(MEMBERS);
    let objects = each * MEMBERS;
    let clock = SystemClock::new();
    let master = start_master(binary)?;
    wait_for_port(PORT)?;
    let begun = clock.now();
    let members: Result<Vec<_>> = (0..MEMBERS).map(|number| ClientProcess::start(number, each)).collect();
    let mut members = members?;
    for member in &mut members {
        member.expect_line("stored")?;
    }
    println!(
        "{objects} objects of {LENGTHS:?} bytes, put by {MEMBERS} processes in {:.1?}",
        clock.now().since(begun)
    );
    for member in &mut members {
        member.expect_line("lasting")?;
    }
    println!("all of them would outlive the master {:.1?} after the first was put", clock.now().since(begun));
    // Dropping the process kills it with SIGKILL.
    drop(master);
    let killed = clock.now();
    let master = start_master(binary)?;
    let (first, all) = served_again(objects, &clock, killed)?;
    println!(
        "the master was killed and restarted: the first object is served after {first:.2?}, the last after {all:.2?}"
    );
    let begun = clock.now();
    for (number, member) in members.iter_mut().enumerate() {
        // Each client reads the objects of another one.
        member.send_command(&format!("read {}", (number as u64 + 1) % MEMBERS))?;
    }
    let mut sums = [0u64; 3];
    for member in &mut members {
        let said = member.expect_line("read")?;
        let figures: Vec<u64> = said.split(' ').filter_map(|word| word.parse().ok()).collect();
        let figures: [u64; 3] =
            figures.try_into().map_err(|_| format!("unexpected output of a client process: {said:?}"))?;
        sums.iter_mut().zip(figures).for_each(|(sum, figure)| *sum += figure);
    }
    let [right, missing, wrong] = sums;
    println!(
        "read by other processes in {:.1?}: {right} right, {missing} missing, {wrong} wrong",
        clock.now().since(begun)
    );
    drop(master);
    if right != objects {
        return Err("some objects are missing or wrong".into());
    }
    if all > LIMIT { Err(format!("recovery took {all:.2?}; the limit is {LIMIT:?}")) } else { Ok(()) }
}

fn start_master(binary: &Path) -> Result<Process> {
    let mut command = Command::new(binary);
    command.args(["--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1"]);
    command.args([format!("--rpc_port={PORT}"), format!("--metrics_port={}", PORT + 1)]);
    // Disables eviction.
    command.arg("--eviction_high_watermark_ratio=1");
    Process::start(command, "mooncake_master")
}

/// Returns when the master had the first object, and when all.
fn served_again(
    objects: u64,
    clock: &SystemClock,
    since: mooncake_core::clock::Moment,
) -> Result<(Duration, Duration)> {
    let mut first = None;
    loop {
        let (there, took) = (keys().unwrap_or(0), clock.now().since(since));
        if there > 0 {
            first.get_or_insert(took);
        }
        if there == objects {
            return Ok((first.unwrap_or(took), took));
        }
        if took > PATIENCE {
            return Err(format!("{there} of {objects} objects are served after {took:.1?}"));
        }
        // No event reports a change of metrics.
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Returns the number of objects in the metrics of the master, or `None` while it does not respond.
fn keys() -> Option<u64> {
    let mut stream = TcpStream::connect(("127.0.0.1", PORT + 1)).ok()?;
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").ok()?;
    let mut page = String::new();
    stream.read_to_string(&mut page).ok()?;
    page.lines().find_map(|line| line.strip_prefix("master_key_count "))?.trim().parse().ok()
}

/// Process with a client in it.
struct ClientProcess {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl ClientProcess {
    fn start(number: u64, each: u64) -> Result<Self> {
        let program = std::env::current_exe().map_err(|e| e.to_string())?;
        let mut child = Command::new(program)
            .args(["--member", &number.to_string(), "--objects", &each.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| format!("cannot start a client process: {e}"))?;
        let input = child.stdin.take().ok_or("no standard input")?;
        let output = BufReader::new(child.stdout.take().ok_or("no standard output")?);
        Ok(Self { child, input, output })
    }

    fn send_command(&mut self, order: &str) -> Result<()> {
        writeln!(self.input, "{order}").map_err(|e| format!("a client process has ended: {e}"))
    }

    /// Returns the rest of the next line, which begins with that word.
    fn expect_line(&mut self, word: &str) -> Result<String> {
        let mut line = String::new();
        self.output.read_line(&mut line).map_err(|e| e.to_string())?;
        let rest = line
            .trim()
            .strip_prefix(word)
            .ok_or_else(|| format!("unexpected output of a client process: {line:?}, expected {word}"))?;
        Ok(rest.trim().to_owned())
    }
}

impl Drop for ClientProcess {
    fn drop(&mut self) {
        // A process that has ended already counts as killed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn key(member: u64, i: u64) -> String {
    format!("object/{member}/{i:09}")
}

fn value(member: u64, i: u64) -> Vec<u8> {
    let mut bytes = vec![0; LENGTHS[i as usize % LENGTHS.len()]];
    Rng::seeded(member << 40 | i).fill(&mut bytes);
    bytes
}

/// Runs a client process: stores its objects in its own memory, waits until they would outlive the
/// master, and reads those of others.
fn member(number: u64, each: u64) -> Result<()> {
    let runtime = Runtime::new().map_err(|e| e.to_string())?;
    runtime.block_on(async {
        let client = Client::builder()
            .master(format!("127.0.0.1:{PORT}"))
            .local_hostname("127.0.0.1")
            .advertise(Ipv4Addr::LOCALHOST.into())
            .segment((each * 192).max(1 << 20))
            .connect()
            .await
            .map_err(|e| e.to_string())?;
        store(&client, number, each).await?;
        println!("stored");
        while (client.status().lasting_objects().await as u64) < each {
            // The client hears from the master once per ping interval, and no event reports it.
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        println!("lasting");
        for order in std::io::stdin().lines() {
            let order = order.map_err(|e| e.to_string())?;
            let whose = order.strip_prefix("read ").and_then(|text| text.parse().ok());
            let whose: u64 = whose.ok_or_else(|| format!("unknown command {order:?}"))?;
            let [right, missing, wrong] = read(&client, whose, each).await?;
            println!("read {right} {missing} {wrong}");
        }
        Ok(())
    })
}

async fn store(client: &Client, number: u64, each: u64) -> Result<()> {
    let here = PutOptions::new().prefer_segment(client.hostname());
    let all: Vec<u64> = (0..each).collect();
    for batch in all.chunks(BATCH) {
        let items: Vec<_> = batch.iter().map(|&i| (key(number, i), value(number, i))).collect();
        for outcome in client.batch_put(&items, &here).await.map_err(|e| e.to_string())? {
            match outcome {
                Ok(PutOutcome::Stored) => {}
                other => return Err(format!("unexpected result of a put: {other:?}")),
            }
        }
    }
    Ok(())
}

/// Returns how many objects are right, missing and wrong.
async fn read(client: &Client, whose: u64, each: u64) -> Result<[u64; 3]> {
    let mut sums = [0; 3];
    let all: Vec<u64> = (0..each).collect();
    for batch in all.chunks(BATCH) {
        let keys: Vec<_> = batch.iter().map(|&i| key(whose, i)).collect();
        let found = client.batch_get(&keys).await.map_err(|e| e.to_string())?;
        for (&i, found) in batch.iter().zip(found) {
            let what = match found {
                Ok(Some(bytes)) => {
                    if bytes == value(whose, i) {
                        0
                    } else {
                        2
                    }
                }
                Ok(None) => 1,
                Err(error) => {
                    eprintln!("{}: {error}", key(whose, i));
                    1
                }
            };
            sums[what] += 1;
        }
    }
    Ok(sums)
}
