//! Hello: the first record of every connection between an IPC client and its daemon, in both
//! directions. A hello has 64 bytes: a magic number, the version of the protocol, and zeros.
//!
//! Every version begins its connections with such a record. Thus two versions that do not
//! understand each other name the mismatch. Calls follow, in the frames of
//! [`frame`](mooncake_protocol::frame).

use mooncake_core::{Error, ErrorCode, Result};
use mooncake_ipc::socket::RECORD_LEN;

const MAGIC: [u8; 4] = *b"MKLC";
/// Version of the protocol; both sides must have the same one.
pub const VERSION: u16 = 4;

/// Returns the hello of this version.
pub fn encode() -> [u8; RECORD_LEN] {
    let mut out = [0; RECORD_LEN];
    out[..4].copy_from_slice(&MAGIC);
    out[4..6].copy_from_slice(&VERSION.to_le_bytes());
    out
}

/// Checks the hello of the other side.
///
/// # Errors
/// Returns `INVALID_VERSION`, with both versions in the text, for a hello of another version.
/// Returns `INVALID_PARAMS` for a malformed hello.
pub fn check(hello: &[u8; RECORD_LEN]) -> Result<()> {
    let version = u16::from_le_bytes([hello[4], hello[5]]);
    if hello[..4] != MAGIC {
        return Err(Error::invalid(format!("invalid hello: it begins with {:02x?}", &hello[..4])));
    }
    if version != VERSION {
        let text = format!(
            "the other end speaks version {version} of the local protocol, this one version \
             {VERSION}; run mooncake_client and the programs that use it from one release"
        );
        return Err(Error::new(ErrorCode::InvalidVersion, text));
    }
    match *hello == encode() {
        true => Ok(()),
        false => Err(Error::invalid("invalid hello: unused bytes are not zero")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn malformed_hellos_are_named() {
        check(&encode()).unwrap();
        for (at, word) in [(0, "begins"), (4, "version"), (6, "unused"), (63, "unused")] {
            let mut bad = encode();
            bad[at] ^= 0x40;
            assert!(check(&bad).unwrap_err().message().contains(word), "{at}");
        }
        let mut other = encode();
        other[4] = 9;
        let error = check(&other).unwrap_err();
        assert_eq!(error.code(), ErrorCode::InvalidVersion);
        let both = ["version 9".to_owned(), format!("version {VERSION}")];
        assert!(both.iter().all(|version| error.message().contains(version)), "{error}");
    }
}
