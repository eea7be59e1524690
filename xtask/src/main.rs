//! The task runner: `cargo xtask help`.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command line tool talks to its terminal")]

mod arrows;
mod bench;
mod debian;
mod edges;
mod features;
mod fuzz;
mod gate;
mod gpu;
mod header;
mod interop;
mod mixed;
mod network;
mod nightly;
mod peer;
mod prose;
mod python;
mod rdma;
mod release;
mod run;
mod source;
mod spelling;
mod suite;
mod torch;
mod torture;
mod tree;
mod vm;

use std::process::ExitCode;

use run::{Programs, Result, cargo, step};

const HELP: &str = "\
cargo xtask <task>

`.ci/run` runs `lint` and `test`.

Tests
  test          unit, conformance, property, end-to-end and documentation tests, several programs
                at a time, and `python`; --quick: only unit tests and programs that took less than
                4 s in their last run; other words go to `cargo test`
  python        installs the Python package into target/python-venv and runs its tests; words go to
                pytest; --soak: a million calls and ten thousand stores instead, while memory and
                descriptors are watched
  torch         tests of process groups, expert parallelism and tensors with several versions of
                torch, each in an environment of 6 GB that is removed afterwards: the oldest, 2.11,
                2.14 and the newest, or those that words name; prints a table (--wheel FILE tests
                that wheel instead of a new one)
  edges         tests of rare interleavings, each also with the bug that it must detect (words
                choose subjects or tests)
  security      tests of what other users of a host can see and do (root checks more)
  interleavings [secs]  calls of a master at once, in random orders of its locks and atomics, from
                new seeds for that time (default 60 s)
  old-memory [n]  n random writes and reads (default a million) in memory that is full of bytes of
                other tenants; no read returns one
  memcheck      the Python package under valgrind, a few arguments for each call (Debian: installs
                valgrind)
  miri          core and transport under Miri (needs a nightly toolchain with the miri component)
  fuzz [secs]   each fuzz target over its corpus and mutations of it, on stable (default 20 s each)
  features      each crate with each of its features alone; --sets: with sets of features such that
                for any two, one set has the first without the second
  examples      builds and runs each example, the trace replay with kill -9 included
  interop       nodes of this project and of Mooncake C++ in one cluster (Linux; installs Mooncake
                C++ with pip); words choose parts: clusters, calls, engines, and the names of the
                scripts in mooncake-python/tests/peer, such as `versions`; --check compares
                the table of versions in docs/compatibility.md, which the task writes otherwise
  mixed         clusters of this version and the last release (xtask/last-release), which is built
  torture       clients that check every read while owners, clients and masters are stopped, killed
                and replaced at random, for a minute (--seconds N, --seed N, --restarts kills
                masters, too; --keys N and --rate N for each client; --owners ppfd: two owners of
                memory, one with a file, one with a disk)
  soak          200 threads and 3,000 coroutines that check every read for an hour, while servers
                restart, and stores and engines come and go (--seconds N, --seed N); needs 2 GB of
                memory and as much disk
  network       two engines with a bad network between them, and a network that fails and returns
                (Linux, root; on x86-64 also in the virtual machine of `rdma-test`)
  rdma-test     the tests that need RDMA devices, in a virtual machine with two Soft-RoCE devices
                (Debian 12 as root; installs packages); words choose tests by name and leave out
                the replay and the machine with two NUMA nodes; `--run COMMAND..` runs a command
                there instead, `--nodes COMMAND..` on the machine with two NUMA nodes
  gpu-test      builds and runs the program that tests GPU memory (exits with 3 without a GPU);
                words choose parts; --fake: on a fake of libcuda; --build: for another machine
  load          clients that join, leave and die for a minute
  hostile       hundreds of connections of every hostile kind at a master
  gate          `test` after ten runs that were killed, with few descriptors and little locked
                memory
  nightly       all of the above that are random, slow, privileged or need other projects, one after
                the other, with a new seed and a table at the end (words choose parts)

Checks
  lint          rustfmt, spelling, `arrows`, `prose`, clippy, rustdoc; warnings are errors
  arrows        cycles between the modules of a crate, and dependencies between crates that
                ARCHITECTURE.md does not name (words choose crates, --summary leaves out the uses)
  prose         the rules of CONTRIBUTING.md for comments, documents and texts of programs (words
                choose files and folders, --rule NAME one rule, --summary prints a table)
  release       before a release: `features`, licences and advisories of dependencies, packages that
                build by themselves, public interfaces beside the last release (installs cargo-deny
                and cargo-semver-checks)

Files
  docs          writes docs/environment.md, docs/errors.md and docs/flags.md from the code (a test
                compares them)
  header        writes the headers of the C interface from the code; --check compares them
  wheel         builds the wheel for Linux with glibc 2.28 or newer, with zig (installs it with
                pip), and tests the wheel

Measurements
  bench [name]  all benchmarks, or one
                --peer               objects, beside Mooncake C++ in the same run
                --master             calls of a master, beside Mooncake C++
                --python [--peer]    the Python package (words choose rows; a shortfall fails)
                --engine [--peer]    transfer engines, with --peer in all pairs
                --offload [--peer]   objects on their way to a disk and back
                --structured [--peer]  structured objects of the Python package (the same)
                --pg                 process groups beside gloo (words choose operations)
                --ep                 expert parallelism beside gloo (words choose shapes)
                --master-size [n]    a master with ten million objects, or n
                --snapshots [n]      cost of snapshots of a million objects, or n
                --restart [n]        time until a killed master with a million objects serves
";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let outcome = match words.as_slice() {
        ["test", rest @ ..] => suite::test(rest),
        ["python", rest @ ..] => python::test(rest),
        ["soak", rest @ ..] => python::soak(rest),
        ["python-package"] => python::install().map(drop),
        ["wheel"] => python::wheel(),
        ["torch", rest @ ..] => torch::test(rest),
        ["memcheck"] => python::memcheck(),
        ["lint"] => lint(),
        ["arrows", rest @ ..] => arrows::check(rest),
        ["prose", rest @ ..] => prose::check(rest),
        ["edges", rest @ ..] => edges::run(rest),
        ["security"] => security(),
        ["interleavings"] => interleavings(60),
        ["interleavings", seconds] => match seconds.parse() {
            Ok(seconds) => interleavings(seconds),
            Err(_) => Err(format!("`{seconds}` is not a number of seconds")),
        },
        ["old-memory"] => old_memory("1000000"),
        ["old-memory", operations] => old_memory(operations),
        ["mixed"] => mixed::test(),
        ["features"] => features::check_each(false),
        ["features", "--sets"] => features::check_each(true),
        ["release"] => release::check(),
        ["examples"] => examples(),
        ["docs"] => docs(),
        ["header"] => header::write(),
        ["header", "--check"] => header::check(),
        ["gate"] => gate::test(),
        ["hostile"] => one_test("hostile::hostile_connections_take_bounded_memory"),
        ["load"] => one_test("load::clients_come_and_go_under_load"),
        ["nightly", parts @ ..] => nightly::run(parts),
        ["miri"] => miri(),
        ["fuzz"] => fuzz::run(20),
        ["fuzz", seconds] => match seconds.parse() {
            Ok(seconds) => fuzz::run(seconds),
            Err(_) => Err(format!("`{seconds}` is not a number of seconds")),
        },
        ["bench", rest @ ..] => bench::run(rest),
        ["torture", rest @ ..] => torture::run(rest),
        ["network"] => network::test(),
        ["interop", "--check", parts @ ..] => interop::run(parts, false),
        ["interop", parts @ ..] => interop::run(parts, true),
        ["rdma-test", rest @ ..] => rdma::test(rest),
        ["gpu-test", rest @ ..] => return gpu::test(rest),
        [] | ["help" | "--help" | "-h"] => {
            print!("{HELP}");
            Ok(())
        }
        other => Err(format!("no such task: {}\n\n{HELP}", other.join(" "))),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error}");
            ExitCode::FAILURE
        }
    }
}

fn lint() -> Result {
    step("format");
    cargo(&["fmt", "--all", "--check"]).run()?;
    spelling::check()?;
    step("arrows and prose");
    arrows::check(&[])?;
    prose::check(&[])?;
    step("clippy");
    clippy(&["--workspace", "--all-targets"])?;
    // Targets with `test = false` are not among all targets.
    clippy(&["-p", "mooncake-rdma", "--test", "devices"])?;
    step("documentation");
    cargo(&["doc", "--workspace", "--all-features", "--no-deps"]).env("RUSTDOCFLAGS", "-D warnings").run()
}

fn clippy(targets: &[&str]) -> Result {
    cargo(&["clippy", "--all-features"]).args(targets).args(&["--", "-D", "warnings"]).run()
}

/// Runs the tests of what other users of a host can see and do. Root checks more than other users.
fn security() -> Result {
    step("security");
    let run =
        |package: &str, words: &[&str]| cargo(&["test", "-p", package, "--all-features"]).args(words).run();
    run("mooncake-transport", &["--test", "private_files", "--test", "umask"])?;
    run("mooncake-disk", &["--test", "directories"])?;
    run("mooncake-server", &["--lib", "--", "snapshots"])?;
    run("mooncake-store", &["--test", "client", "--", "files::"])?;
    run("mooncake-store", &["--test", "processes", "--", "security::"])
}

fn examples() -> Result {
    step("build");
    let programs = Programs::checked()?;
    for name in [
        "quickstart",
        "embedded_master",
        "custom_allocator",
        "custom_eviction",
        "custom_metadata",
        "custom_transport",
        "engine_pair",
        "engine_custom_backend",
        "p2p_checkpoint",
    ] {
        step(&format!("example {name}"));
        programs.run(&format!("examples/{name}"), &[]).run()?;
    }
    // A trace of the real shape from a seed, once plainly and once with a client killed half-way.
    let replay = || {
        programs.run("examples/replay", &["--requests", "1500", "--block-bytes", "65536", "--processes", "3"])
    };
    step("example replay, eviction policies against exact LRU");
    programs
        .run("examples/replay", &["--policies", "--requests", "2000", "--blocks", "500,2000,8000"])
        .run()?;
    step("example replay");
    replay().args(&["--capacity", "128MiB"]).run()?;
    step("example replay, one client killed");
    replay().args(&["--capacity", "256MiB", "--replicas", "2", "--kill-one-after", "20%"]).run()
}

fn docs() -> Result {
    cargo(&["test", "--quiet", "-p", "mooncake-store", "--all-features", "--test", "operations"])
        .args(&["--", "--ignored", "--exact", "documents::write"])
        .run()
}

/// Runs one test of the processes for a minute, also if `test` leaves it out.
fn one_test(name: &str) -> Result {
    step(name);
    let words = ["test", "-p", "mooncake-store", "--all-features", "--test", "processes", "--"];
    cargo(&words).args(&["--include-ignored", "--nocapture", "--exact", name]).env("TEST_SECONDS", "60").run()
}

/// Runs new seeds of the interleavings for this time. The build is that of the tests.
fn interleavings(seconds: u32) -> Result {
    step("interleavings");
    let built = cargo(&["test", "--workspace", "--all-features", "--no-run"]).shown_output()?;
    let program = run::test_program(&built, "linearizability")?;
    run::command(&program, &["--nocapture", "calls_at_once"])
        .env("MOONCAKE_INTERLEAVINGS_SECONDS", &seconds.to_string())
        .run()
}

/// Runs this number of operations of the test of old memory, in an optimized build.
fn old_memory(operations: &str) -> Result {
    step("old memory");
    let name = "old_memory::no_read_returns_bytes_that_its_object_was_not_given";
    let words = ["test", "--release", "-p", "mooncake-store", "--all-features", "--test", "client", "--"];
    let words = [&words[..], &["--nocapture", "--exact", name]].concat();
    cargo(&words).env("MOONCAKE_OLD_MEMORY_OPERATIONS", operations).run()
}

fn miri() -> Result {
    // Isolation off: host memory asks the kernel for its page size.
    let flags = "-Zmiri-disable-isolation -Zmiri-ignore-leaks";
    let suites = [
        // Eviction policies have no unsafe code, and their tests would take a minute there.
        ("mooncake-core", &["--features", "testkit", "--lib", "--", "--skip", "evict::"][..]),
        ("mooncake-transport", &["--features", "testkit", "--lib", "--test", "conformance"]),
        ("mooncake-ipc", &["--lib"]),
        ("mooncake-metadata", &["--lib"]),
    ];
    // Miri keeps the folder of the clone that it ran in, and cargo takes its results for fresh in
    // another clone.
    let triple = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    run::command("cargo", &["+nightly", "clean", "--quiet", "--target", &triple, "--target-dir"])
        .args(&[&run::target_dir().join("miri").to_string_lossy()])
        .args(&suites.map(|(package, _)| ["-p", package]).concat())
        .run()?;
    for (package, tests) in suites {
        step(&format!("miri {package}"));
        run::command("cargo", &["+nightly", "miri", "test", "-p", package])
            .args(tests)
            .env("MIRIFLAGS", flags)
            .env("PROPTEST_CASES", "4")
            .run()?;
    }
    Ok(())
}
