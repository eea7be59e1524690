//! Reading of configuration files into memory.

use std::io::Read;
use std::path::Path;

/// Maximum size of a file in bytes.
const MAX_FILE: u64 = 1 << 20;

/// Reads a file of bounded size, without the byte order mark that some editors write.
pub(super) fn read(path: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    let size = std::fs::File::open(path)?.take(MAX_FILE + 1).read_to_string(&mut text)?;
    if size as u64 > MAX_FILE {
        return Err(std::io::Error::other(format!("a configuration file has at most {MAX_FILE} bytes")));
    }
    if text.starts_with('\u{feff}') {
        text.remove(0);
    }
    Ok(text)
}
