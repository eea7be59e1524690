//! Child processes that print their address.

use std::io::{BufRead, BufReader};
use std::process::Child;

use mooncake_benches::peer::Result;

/// Returns the first line that a child prints: its address.
pub(crate) fn first_line(child: &mut Child) -> Result<String> {
    let output = child.stdout.take().ok_or("no standard output")?;
    let mut line = String::new();
    BufReader::new(output).read_line(&mut line).map_err(|e| e.to_string())?;
    match line.trim() {
        "" => Err("a child process did not start; its messages are above".into()),
        address => Ok(address.to_owned()),
    }
}
