//! `cargo xtask torture`: real processes that are stopped, killed and replaced at random.

use crate::run::{Result, cargo, command, step, test_program};

const TEST: &[&str] = &["test", "-p", "mooncake-store", "--all-features", "--test", "processes", "--no-run"];

/// Options, each with the variable that the test reads.
const OPTIONS: &[(&str, &str)] = &[
    ("--seconds", "TEST_SECONDS"),
    ("--seed", "TEST_SEED"),
    ("--keys", "TEST_KEYS"),
    ("--rate", "TEST_RATE"),
];
/// Option for the owners: a letter for each, `p` for memory, `f` for a file and `d` for a disk.
const OWNERS: (&str, &str) = ("--owners", "TEST_OWNERS");
/// Duration in seconds without `--seconds`.
const SECONDS: &str = "60";

/// Runs the torture once.
pub(crate) fn run(words: &[&str]) -> Result {
    let variables = parse(words)?;
    step("torture of processes");
    let program = test_program(&cargo(TEST).shown_output()?, "processes")?;
    let mut run = command(&program, &["--ignored", "--exact", "torture::torture_by_hand", "--nocapture"])
        .env("TEST_SECONDS", SECONDS);
    for (name, value) in &variables {
        run = run.env(name, value);
    }
    run.run().map_err(|_| "the torture failed; its last lines name the reason and the seed".to_owned())
}

/// Returns the variables for the options.
fn parse<'a>(words: &[&'a str]) -> Result<Vec<(&'static str, &'a str)>> {
    let (mut variables, mut words) = (Vec::new(), words.iter());
    while let Some(word) = words.next() {
        if *word == "--restarts" {
            variables.push(("TEST_RESTARTS", "true"));
            continue;
        }
        if *word == OWNERS.0 {
            let letters = words.next().filter(|value| {
                value.len() > 1
                    && value.starts_with('p')
                    && value.chars().all(|letter| "pfd".contains(letter))
            });
            let owners = letters.ok_or("cannot run torture: --owners needs letters, such as ppfd")?;
            variables.push((OWNERS.1, owners));
            continue;
        }
        let option = OPTIONS.iter().find(|(name, _)| name == word);
        let (name, variable) = option.ok_or_else(|| format!("cannot run torture: unknown option {word}"))?;
        let number = words.next().filter(|value| value.parse::<u64>().is_ok_and(|number| number > 0));
        variables
            .push((*variable, *number.ok_or_else(|| format!("cannot run torture: {name} needs a number"))?));
    }
    Ok(variables)
}

#[test]
fn options_become_variables() {
    let variables = parse(&["--seconds", "3600", "--restarts", "--seed", "7"]).unwrap();
    assert_eq!(variables, [("TEST_SECONDS", "3600"), ("TEST_RESTARTS", "true"), ("TEST_SEED", "7")]);
    assert!(parse(&["--seconds"]).is_err() && parse(&["--seconds", "many"]).is_err());
    assert!(parse(&["--hours", "1"]).is_err() && parse(&["--owners", "x"]).is_err());
    assert_eq!(parse(&["--owners", "pfd"]).unwrap(), [("TEST_OWNERS", "pfd")]);
}
