//! Tests of GPU memory on a machine with a GPU. `cargo xtask gpu-test` builds them as one file that
//! can be copied there.
//!
//! `gpu_test [--fake] [WORD..]` runs all parts, or those with one of the words in their names.
//! `--fake` runs them on a fake libcuda. The exit code is 3 without a driver or a device; the
//! message names what is missing.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command line tool prints to its terminal")]

mod engines;
mod machine;
mod speed;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use machine::Machine;
use mooncake_core::clock::{Clock, SystemClock};
use mooncake_nvlink::testkit::{self, OnGpu, processes};
use mooncake_transport::testkit::all_cases;

/// Exit code on a machine without a GPU.
const NO_GPU: u8 = 3;
/// Number of times that memory is registered, opened and closed.
const CYCLES: usize = 10_000;

type Part = (&'static str, fn(Machine) -> Result<String, String>);

const PARTS: &[Part] = &[
    ("conformance", conformance),
    ("processes", two_processes),
    ("order", engines::order),
    ("tcp", engines::over_tcp),
    ("store", engines::store),
    ("leaks", leaks),
    ("copies", speed::between_devices),
    ("staging", speed::staging),
];

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let (options, words): (Vec<_>, Vec<_>) = words.into_iter().partition(|word| word.starts_with("--"));
    let fake = options.iter().any(|option| option == "--fake").then(testkit::load);
    if let Some(unknown) = options.iter().find(|option| !["--fake", "--owner"].contains(&option.as_str())) {
        eprintln!("gpu_test: unknown option {unknown}; usage: gpu_test [--fake] [WORD..]");
        return ExitCode::FAILURE;
    }
    let machine = match Machine::open(fake) {
        Ok(machine) => machine,
        Err(error) => {
            eprintln!("gpu_test: cannot test GPU memory on this machine: {error}");
            return ExitCode::from(NO_GPU);
        }
    };
    if options.iter().any(|option| option == "--owner") {
        processes::owner(&|| machine.count());
        return ExitCode::SUCCESS;
    }
    run(machine, &words)
}

fn run(machine: Machine, words: &[String]) -> ExitCode {
    describe(machine);
    let (clock, mut failed) = (SystemClock::new(), Vec::new());
    for (name, part) in
        PARTS.iter().filter(|(name, _)| words.is_empty() || words.iter().any(|w| name.contains(&**w)))
    {
        println!("== {name}");
        let start = clock.now();
        let outcome = catch_unwind(AssertUnwindSafe(|| part(machine)))
            .unwrap_or_else(|_| Err("the part panicked".into()));
        let took = clock.now().since(start).as_secs_f64();
        match outcome {
            Ok(said) => println!("{said}\n   good, {took:.1} s"),
            Err(error) => {
                println!("   FAILED after {took:.1} s: {error}");
                failed.push(*name);
            }
        }
    }
    if failed.is_empty() {
        return ExitCode::SUCCESS;
    }
    eprintln!("gpu_test: failed: {}", failed.join(", "));
    ExitCode::FAILURE
}

fn describe(machine: Machine) {
    if machine.fake.is_some() {
        println!("on a fake libcuda: correctness is tested, speed is not");
    }
    for number in 0..machine.devices {
        let device = testkit::device(number);
        let fabric = if device.has_fabric() { ", in a fabric" } else { "" };
        println!(
            "{}: {}{fabric}, driver for CUDA {}",
            device.location(),
            device.name(),
            device.cuda().driver_version()
        );
    }
}

fn conformance(machine: Machine) -> Result<String, String> {
    let locals = [None, Some(0), Some(1)];
    let mut ran = 0;
    for local in locals.into_iter().filter(|local| local.is_none_or(|number| number < machine.devices)) {
        for (name, case) in all_cases::<OnGpu>() {
            let outcome = catch_unwind(AssertUnwindSafe(|| case(&mut OnGpu::new(local))));
            outcome.map_err(|_| format!("{name}, with local memory of {local:?}"))?;
            ran += 1;
        }
    }
    Ok(format!("   {ran} cases"))
}

fn two_processes(machine: Machine) -> Result<String, String> {
    let spawn = machine.spawn();
    processes::read_and_written(&spawn, machine.devices);
    processes::killed_and_followed(&spawn);
    processes::closed_under_a_reader(&spawn);
    processes::by_descriptor_alone(&spawn);
    let again = processes::two_nodes_of_one_process(&spawn);
    let met = if again { "" } else { " (the driver reused no address)" };
    Ok(format!(
        "   read and written, killed and restarted, closed under a reader, by a descriptor alone, at a reused address{met}"
    ))
}

fn leaks(machine: Machine) -> Result<String, String> {
    Ok(format!("   {CYCLES} times: {}", processes::cycles(&machine.spawn(), &|| machine.count(), CYCLES)))
}
