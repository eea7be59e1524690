//! The task runner: `cargo xtask help`.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command line tool talks to its terminal")]

mod arrows;
mod aside;
mod bench;
mod debian;
mod edges;
mod features;
mod fuzz;
mod gpu;
mod header;
mod interop;
mod mixed;
mod network;
mod peer;
mod prose;
mod python;
mod rdma;
mod run;
mod source;
mod spelling;
mod suite;
mod vm;

use std::process::ExitCode;

use run::{Programs, Result, cargo, step};

const HELP: &str = "\
cargo xtask <task>

  test          unit, conformance, property, end-to-end and documentation tests, several programs at a time, and `python`;
                --quick only unit tests and programs that took less than 4 s in their last run; other words go to `cargo test`
  python        installs the Python package into target/python-venv and runs its tests; arguments go to pytest;
                --soak a million calls and ten thousand stores instead, memory and descriptors watched
  wheel         the wheel to hand out, for Linux with glibc 2.28 or newer, built with zig (installs it with pip), and tests of it
  memcheck      a few arguments for every call of the Python package, under valgrind (Debian: installs it)
  lint          rustfmt, spelling, clippy, rustdoc; warnings are errors
  arrows        cycles between the modules of a crate, and dependencies between crates that ARCHITECTURE.md does not name
                (words choose crates, --summary leaves out the uses)
  prose         the rules of CONTRIBUTING for comments, documents and texts of programs; words choose files and folders,
                --rule NAME one rule, --summary prints a table of crates and rules
  edges         tests of rare interleavings, each also with the bug it must detect (words choose subjects or tests)
  mixed         clusters of this version and the last release (xtask/last-release), which it builds
  features      each crate with each of its features alone
  examples      builds and runs every example, the trace replay with kill -9 included
  docs          writes docs/environment.md, docs/errors.md and docs/flags.md from the code (a test compares them)
  header        writes the header of the C interface from the code (CI compares them)
  miri          core and transport under Miri (needs a nightly toolchain with the miri component)
  fuzz [secs]   every fuzz target over its corpus and mutations of it, on stable (default 20 s each)
  bench [name]  the measurements; --peer measures the reference peer in the same run,
                --master the calls of a master alone, beside the peer's, --python the Python package (with --peer: and the
                peer's; words choose rows; what falls short is named, and fails),
                --engine transfer engines (with --peer: in all pairs), --master-size [n] a master with ten million objects, or n,
                --restart [n] a master that is killed with a million objects, or n: when the next one serves them,
                --snapshots [n] what snapshots of a million objects, or n, cost,
                --offload [--peer] objects on their way to a disk and back
  network       two engines with a bad network between them, and a network that goes and comes back (Linux, root; on x86-64
                also in the virtual machine of `rdma-test`)
  interop       our nodes and the reference peer's in one cluster (Linux; installs the peer with pip)
  rdma-test     the tests that need RDMA devices, in a virtual machine with two Soft-RoCE ones (Debian 12 as root; installs what
                it needs); words choose the tests that have one of them in their names, of which there must be some, and leave out
                the replay and the machine with two NUMA nodes; `--run COMMAND..` runs a command of yours there instead, `--nodes
                COMMAND..` on the one with two NUMA nodes
  gpu-test      builds one program with all that is to be shown of GPU memory, and runs it (exits with 3 where there is no GPU); words choose
                parts; --double runs it on a double of libcuda, --build builds it only, for another machine
  ci            everything above but wheel, docs, header and bench, as .ci/run does
";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let outcome = match words.as_slice() {
        ["test", rest @ ..] => suite::test(rest, false),
        ["python", rest @ ..] => python::test(rest),
        ["python-package"] => python::install().map(drop),
        ["wheel"] => python::wheel(),
        ["memcheck"] => python::memcheck(),
        ["lint"] => lint(),
        ["arrows", rest @ ..] => arrows::check(rest),
        ["prose", rest @ ..] => prose::check(rest),
        ["edges", rest @ ..] => edges::run(rest),
        ["mixed"] => mixed::test(),
        ["features"] => features::each_alone(),
        ["examples"] => examples(),
        ["docs"] => docs(),
        ["header"] => header::write(),
        ["miri"] => miri(),
        ["fuzz"] => fuzz::run(20),
        ["fuzz", seconds] => match seconds.parse() {
            Ok(seconds) => fuzz::run(seconds),
            Err(_) => Err(format!("`{seconds}` is not a number of seconds")),
        },
        ["bench", rest @ ..] => bench::run(rest),
        ["network"] => network::test(),
        ["interop"] => interop::run(),
        ["rdma-test", rest @ ..] => rdma::test(rest, false),
        ["gpu-test", rest @ ..] => return gpu::test(rest),
        ["ci"] => ci(),
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

/// Servers that tests start; what is not installed is skipped and said, in CI it fails.
const SERVERS: &[(&str, &str)] = &[("etcd", "etcd-server"), ("redis-server", "redis-server")];

fn lint() -> Result {
    step("format");
    cargo(&["fmt", "--all", "--check"]).run()?;
    spelling::check()?;
    step("clippy");
    cargo(&["clippy", "--workspace", "--all-targets", "--all-features", "--", "-D", "warnings"]).run()?;
    // Targets with `test = false` are not among all targets.
    cargo(&["clippy", "-p", "mooncake-rdma", "--all-features", "--test", "devices", "--", "-D", "warnings"])
        .run()?;
    step("documentation");
    cargo(&["doc", "--workspace", "--all-features", "--no-deps"]).env("RUSTDOCFLAGS", "-D warnings").run()
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
    ] {
        step(&format!("example {name}"));
        programs.run(&format!("examples/{name}"), &[]).run()?;
    }
    // A trace of the real shape from a seed, once plainly and once with a client killed in the middle.
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

fn miri() -> Result {
    // Isolation off: host memory asks the kernel for its page size.
    let flags = "-Zmiri-disable-isolation -Zmiri-ignore-leaks";
    for (package, tests) in
        [("mooncake-core", &["--lib"][..]), ("mooncake-transport", &["--lib", "--test", "conformance"][..])]
    {
        step(&format!("miri {package}"));
        run::command("cargo", &["+nightly", "miri", "test", "-p", package, "--features", "testkit"])
            .args(tests)
            .env("MIRIFLAGS", flags)
            .env("PROPTEST_CASES", "4")
            .run()?;
    }
    Ok(())
}

fn ci() -> Result {
    // What runs aside takes the processors that the other steps leave idle while they wait.
    let miri = aside::Aside::start(&["miri"])?;
    lint()?;
    // Turned on when the tree has no violation: `arrows::check(&[])?; prose::check(&[])?;`
    header::check()?;
    python::install_torch()?;
    step("test");
    debian::install_programs(SERVERS, "the test of metadata directories")?;
    debian::install_library("librocksdb.so", "librocksdb7.8", "the test of metadata directories in folders")?;
    suite::test(&[], true)?;
    edges::run(&[])?;
    python::memcheck()?;
    miri.finish()?;
    let features = aside::Aside::start(&["features"])?;
    examples()?;
    gpu::on_double()?;
    let fuzz = aside::Aside::start(&["fuzz", "10"])?;
    step("rdma");
    rdma::test(&[], true)?;
    network::test()?;
    step("interop");
    interop::run()?;
    mixed::test()?;
    features.finish()?;
    fuzz.finish()
}
