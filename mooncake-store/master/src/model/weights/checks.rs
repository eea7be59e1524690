//! Checks of arguments, and the names and digests that follow from an identity.

use std::fmt::Write;
use std::time::Duration;

use mooncake_protocol::wire::{WeightError, WeightId, WeightManifest};
use sha2::{Digest, Sha256};

use super::values::Result;

/// Maximum length of a name in bytes.
const MAX_NAME: usize = 1024;
/// Maximum number of payloads: with the manifest, a group is full.
const MAX_PAYLOADS: u64 = crate::model::group::MAX_OBJECTS as u64 - 1;
/// Maximum duration of a lease.
const MAX_LEASE: Duration = Duration::from_secs(24 * 60 * 60);
/// Separator of the parts of a token. No name has it.
const SEPARATOR: char = '\x1f';

fn require(is_valid: bool) -> Result<()> {
    if is_valid { Ok(()) } else { Err(WeightError::InvalidArgument) }
}

/// Checks a name: not empty, not too long, and without control characters.
fn check_name(name: &str) -> Result<()> {
    let is_control = |byte: u8| byte < 0x20 || byte == 0x7f;
    require(!name.is_empty() && name.len() <= MAX_NAME && !name.bytes().any(is_control))
}

/// Checks an identity.
pub(crate) fn check_id(id: &WeightId) -> Result<()> {
    [&id.tenant, &id.namespace, &id.resource, &id.revision]
        .into_iter()
        .try_for_each(|name| check_name(name))?;
    require(id.generation > 0)
}

/// Checks the arguments of a change.
pub(crate) fn check_change(id: &WeightId, generation: u64) -> Result<()> {
    check_id(id)?;
    require(generation > 0)
}

/// Checks the arguments of the start of an import. Returns the name of the group.
pub(crate) fn check_import(id: &WeightId, group: &str, payloads: u64, bytes: u64) -> Result<String> {
    check_id(id)?;
    let expected = group_of(id);
    require(group.is_empty() || group == expected)?;
    require(bytes > 0 && (1..=MAX_PAYLOADS).contains(&payloads))?;
    Ok(expected)
}

/// Checks the arguments of a commit.
pub(crate) fn check_commit(id: &WeightId, generation: u64, manifest: &WeightManifest) -> Result<()> {
    check_change(id, generation)?;
    require(manifest.manifest_key == manifest_key_of(id) && manifest.group == group_of(id))?;
    require(is_digest(&manifest.sha256) && is_digest(&manifest.keys_sha256))?;
    require(manifest.payloads > 0 && manifest.bytes > 0)
}

/// Checks the arguments of a list.
pub(crate) fn check_list(namespace: &str, resource: &str) -> Result<()> {
    check_name(namespace)?;
    check_name(resource)
}

/// Checks the number of a lease or a move.
pub(crate) fn check_number(number: u64) -> Result<()> {
    require(number > 0)
}

/// Checks the holder of a lease. Returns the duration.
pub(crate) fn check_lease(holder: &str, ttl_ms: u64) -> Result<Duration> {
    check_name(holder)?;
    check_ttl(ttl_ms)
}

/// Returns the duration of a lease.
pub(crate) fn check_ttl(ttl_ms: u64) -> Result<Duration> {
    let ttl = Duration::from_millis(ttl_ms);
    require(!ttl.is_zero() && ttl <= MAX_LEASE)?;
    Ok(ttl)
}

/// Returns whether a text is a SHA-256 in lower-case hexadecimal.
fn is_digest(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Returns the digest of a list of texts: SHA-256 over the length and the bytes of each.
fn digest<'a>(texts: impl Iterator<Item = &'a [u8]>) -> String {
    let mut sha = Sha256::new();
    for text in texts {
        sha.update(format!("{}:", text.len()));
        sha.update(text);
        sha.update(b"\n");
    }
    sha.finalize().iter().fold(String::with_capacity(64), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

/// Returns the digest of the sorted keys of payloads.
pub(super) fn keys_digest<'a>(keys: impl Iterator<Item = &'a [u8]>) -> String {
    digest(keys)
}

/// Returns the name of the group of a revision.
pub(crate) fn group_of(id: &WeightId) -> String {
    let generation = id.generation.to_string();
    let parts = [&id.tenant, &id.namespace, &id.resource, &id.revision, &generation];
    format!("weight:{}", digest(parts.into_iter().map(|part| part.as_bytes())))
}

/// Returns the key of the manifest of a revision.
pub(super) fn manifest_key_of(id: &WeightId) -> String {
    let mut key = String::from("weights");
    for part in [&id.namespace, &id.resource, &id.revision] {
        key.push('/');
        for byte in part.bytes() {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => key.push(byte.into()),
                byte => {
                    let _ = write!(key, "%{byte:02X}");
                }
            }
        }
    }
    let _ = write!(key, "/{}/manifest", id.generation);
    key
}

/// Returns the token of the page behind a revision.
pub(super) fn token_of(id: &WeightId) -> String {
    format!("{}{SEPARATOR}{}", id.revision, id.generation)
}

/// Returns the revision and the generation of a token.
pub(super) fn parse_token(token: &str) -> Option<(String, u64)> {
    let (revision, generation) = token.split_once(SEPARATOR)?;
    check_name(revision).ok()?;
    let generation = generation.parse().ok().filter(|generation| *generation > 0)?;
    Some((revision.to_owned(), generation))
}
