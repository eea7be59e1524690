//! Permissions of files.

use std::fmt;
use std::str::FromStr;

/// Permissions of files, and of the folders that are made for them. The owner may read and write.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileMode(u32);

impl FileMode {
    /// Permissions for the owner alone: 0600, folders 0700.
    pub const PRIVATE: Self = Self(0o600);
    /// Permissions for the owner and readers of its group: 0640, folders 0750.
    pub const GROUP_READ: Self = Self(0o640);

    /// Returns the permissions with these bits. Returns `None` unless the owner may read and write,
    /// no user may execute, and other users may not write.
    pub fn new(bits: u32) -> Option<Self> {
        let is_valid = bits & !0o664 == 0 && bits & 0o600 == 0o600;
        is_valid.then_some(Self(bits))
    }

    /// Returns the bits of a file.
    pub fn bits(self) -> u32 {
        self.0
    }

    /// Returns the bits of a folder: those of a file, and search for everyone who may read.
    pub fn folder_bits(self) -> u32 {
        self.0 | (self.0 & 0o444) >> 2
    }
}

impl FromStr for FileMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bits = text.strip_prefix("0o").unwrap_or(text);
        let is_octal = !bits.is_empty() && bits.bytes().all(|digit| (b'0'..=b'7').contains(&digit));
        let bits = is_octal.then(|| u32::from_str_radix(bits, 8).ok()).flatten();
        bits.and_then(Self::new).ok_or_else(|| {
            "must be octal permissions with which the owner reads and writes and other users \
             do not write, such as 600, 640 or 660"
                .into()
        })
    }
}

impl fmt::Display for FileMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04o}", self.0)
    }
}

impl fmt::Debug for FileMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FileMode({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sensible_permissions_are_accepted() {
        for (text, file, folder) in [
            ("600", 0o600, 0o700),
            ("0640", 0o640, 0o750),
            ("0o660", 0o660, 0o770),
            ("644", 0o644, 0o755),
            ("0664", 0o664, 0o775),
        ] {
            let mode: FileMode = text.parse().unwrap();
            assert_eq!((mode.bits(), mode.folder_bits()), (file, folder), "{text}");
        }
        for text in ["", "0", "400", "646", "666", "700", "1600", "4640", "+600", "abc", "99", "-1", "6 0"] {
            text.parse::<FileMode>().unwrap_err();
        }
        assert_eq!(FileMode::GROUP_READ.to_string(), "0640");
    }
}
