//! Secret that the ranks of a job share, and the proof that both ends of a connection know it.
//!
//! The process that opens a connection sends its hello with a mark, a nonce and what it claims to
//! be. The other process responds with a nonce of its own. Each side then proves the
//! secret by an HMAC-SHA256 over the direction, the hello, the claim and both nonces, the opening
//! side first. So a stranger learns nothing, and no proof holds on another connection, for another
//! process, or in the other direction.

use std::fmt;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use hmac::{Hmac, KeyInit, Mac};
use mooncake_core::fault_injection::is_planted;
use mooncake_core::{Error, Result};
use rustix::rand::{GetRandomFlags, getrandom};
use sha2::Sha256;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

/// Environment variable of the secret.
pub const VARIABLE: &str = "MOONCAKE_PG_SECRET";
/// Length of a verdict in bytes, which is that of the response to a hello.
pub(crate) const VERDICT_LENGTH: usize = 16;
/// First bytes of a verdict.
pub(crate) const MAGIC: [u8; 8] = *b"MC-PROOF";

/// Longest wait for the other side to close a refused connection, and most bytes read meanwhile.
const LINGER: Duration = Duration::from_secs(1);
const DISCARDED: u64 = 64 << 10;
const NONCE: usize = 32;
const PROOF: usize = 32;
/// Length of an opening in bytes.
const OPENING: usize = NONCE + CLAIM;
const CLAIM: usize = 16;
/// Context of the proofs, which other uses of the same secret do not have.
const CONTEXT: &[u8] = b"mooncake-pg proof 1\0";

/// Secret that the ranks of a job share.
#[derive(Clone)]
pub struct Secret(Hmac<Sha256>);

impl Secret {
    /// Creates a secret.
    ///
    /// # Errors
    /// `INVALID_PARAMS` for an empty secret.
    pub fn new(secret: impl AsRef<[u8]>) -> Result<Self> {
        let secret = secret.as_ref();
        if secret.is_empty() {
            return Err(Error::invalid(format!(
                "cannot use secret: it is empty. variable={VARIABLE}; unset the variable, or give every rank the same secret"
            )));
        }
        let key = Hmac::new_from_slice(secret);
        key.map(Self).map_err(|_| Error::internal("cannot use secret: the key has an invalid length"))
    }

    /// Returns the secret of `MOONCAKE_PG_SECRET`, if the variable is set.
    ///
    /// # Errors
    /// `INVALID_PARAMS` if the variable is empty.
    pub fn from_environment() -> Result<Option<Self>> {
        // The table of settings leaves out what is empty or no text. A secret must not vanish.
        #[allow(clippy::disallowed_methods, reason = "read once, at the start of a process group")]
        let secret = std::env::var_os(VARIABLE);
        secret.map(|secret| Self::new(secret.as_bytes())).transpose()
    }

    fn digest(&self, direction: Direction, exchange: &Exchange<'_>) -> Hmac<Sha256> {
        let mut digest = self.0.clone();
        let nonces = [&exchange.opening[..NONCE], &exchange.nonce[..]];
        digest.update(CONTEXT);
        digest.update(&[direction as u8, exchange.hello.len() as u8]);
        digest.update(exchange.hello);
        digest.update(&exchange.opening[NONCE..]);
        for nonce in nonces {
            digest.update(nonce);
        }
        digest
    }

    fn prove(&self, direction: Direction, exchange: &Exchange<'_>) -> [u8; PROOF] {
        self.digest(direction, exchange).finalize().into_bytes().into()
    }

    /// Compares a proof in constant time.
    fn accepts(&self, direction: Direction, exchange: &Exchange<'_>, proof: &[u8; PROOF]) -> bool {
        self.digest(direction, exchange).verify_slice(proof).is_ok() || is_planted("pg-any-proof")
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// Side of a connection that proves the secret.
#[derive(Clone, Copy)]
enum Direction {
    Opening = 1,
    Accepting = 2,
}

/// Bytes of a connection that both proofs cover.
struct Exchange<'a> {
    hello: &'a [u8],
    opening: &'a [u8; OPENING],
    nonce: &'a [u8; NONCE],
}

/// Rank and session that the opening side of a control connection claims. Zero for data.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Claim {
    pub(crate) rank: u8,
    pub(crate) session: u64,
}

impl Claim {
    fn encode(self) -> [u8; CLAIM] {
        let mut bytes = [0; CLAIM];
        bytes[0] = self.rank;
        bytes[8..].copy_from_slice(&self.session.to_le_bytes());
        bytes
    }

    fn decode(opening: &[u8; OPENING]) -> Self {
        let mut session = [0; 8];
        session.copy_from_slice(&opening[NONCE + 8..]);
        Self { rank: opening[NONCE], session: u64::from_le_bytes(session) }
    }
}

/// Response of the accepting side.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    /// The proof is right. The proof of the accepting side follows.
    Accepted,
    /// The nonce of the accepting side follows.
    Challenge,
    /// The accepting side has no secret.
    NotExpected,
    /// The proof is wrong.
    Wrong,
    /// The accepting side has a secret, and the hello announces no proof.
    Required,
    /// The address belongs to another process than the expected one.
    OtherProcess,
}

impl Verdict {
    const ALL: [Self; 6] =
        [Self::Accepted, Self::Challenge, Self::NotExpected, Self::Wrong, Self::Required, Self::OtherProcess];

    pub(crate) fn encode(self) -> [u8; VERDICT_LENGTH] {
        let mut bytes = [0; VERDICT_LENGTH];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8] = self as u8;
        bytes
    }

    /// Parses a verdict. `None` if the bytes are none.
    pub(crate) fn decode(bytes: &[u8; VERDICT_LENGTH]) -> Option<Self> {
        let number = bytes.strip_prefix(&MAGIC)?.first()?;
        Self::ALL.get(usize::from(*number)).copied()
    }

    /// Returns the error of the opening side. An end without a verdict is that of a process
    /// without a secret that is older.
    pub(crate) fn refusal(verdict: Option<Self>) -> io::Error {
        let reason = match verdict {
            Some(Self::Required) => "the other process has a secret, and this process has none",
            Some(Self::Wrong) => "the other process has another secret",
            Some(Self::NotExpected) | None => "this process has a secret, and the other process has none",
            Some(Self::OtherProcess) => {
                return io::Error::new(io::ErrorKind::InvalidData, "another process listens at the address");
            }
            Some(Self::Accepted | Self::Challenge) => "the other process has not proved the secret",
        };
        refused(reason)
    }
}

/// Returns an error about the secret, which repeated attempts do not mend.
pub(crate) fn refused(reason: &str) -> io::Error {
    let text = format!("{reason}. variable={VARIABLE}; give every rank the same secret, or none");
    io::Error::new(io::ErrorKind::PermissionDenied, text)
}

/// Returns whether an error is one about the secret.
pub(crate) fn is_refusal(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::PermissionDenied && error.to_string().contains(VARIABLE)
}

fn nonce() -> io::Result<[u8; NONCE]> {
    let mut bytes = [0; NONCE];
    let mut filled = 0;
    while filled < NONCE {
        filled += getrandom(&mut bytes[filled..], GetRandomFlags::empty())?;
    }
    Ok(bytes)
}

/// Opens an exchange of proofs: sends the hello, which announces it, and the opening. Returns the
/// opening. The caller sets the time limit.
pub(crate) async fn begin(
    stream: &mut (impl AsyncWrite + Unpin),
    hello: &[u8],
    claim: Claim,
) -> io::Result<Opening> {
    let mut opening = [0; OPENING];
    opening[..NONCE].copy_from_slice(&nonce()?);
    opening[NONCE..].copy_from_slice(&claim.encode());
    stream.write_all(&[hello, &opening].concat()).await?;
    Ok(Opening(opening))
}

/// Nonce and claim of the opening side.
pub(crate) struct Opening([u8; OPENING]);

/// Continues an exchange of proofs after the first verdict, [`Verdict::Challenge`].
///
/// # Errors
/// An error that names the secret, if one side does not accept the proof of the other one.
pub(crate) async fn finish(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    secret: &Secret,
    hello: &[u8],
    opening: &Opening,
) -> io::Result<()> {
    let mut nonce = [0; NONCE];
    stream.read_exact(&mut nonce).await?;
    let exchange = Exchange { hello, opening: &opening.0, nonce: &nonce };
    stream.write_all(&secret.prove(Direction::Opening, &exchange)).await?;
    let mut verdict = [0; VERDICT_LENGTH];
    stream.read_exact(&mut verdict).await?;
    match Verdict::decode(&verdict) {
        Some(Verdict::Accepted) => {}
        verdict => return Err(Verdict::refusal(verdict.or(Some(Verdict::Challenge)))),
    }
    let mut proof = [0; PROOF];
    stream.read_exact(&mut proof).await?;
    match secret.accepts(Direction::Accepting, &exchange, &proof) {
        true => Ok(()),
        false => Err(Verdict::refusal(Some(Verdict::Accepted))),
    }
}

/// Accepts an exchange of proofs, or refuses a connection without one. `has_opening` states whether
/// the hello announces an opening. Returns the claim of the opening side, if there is a secret. The
/// caller sets the time limit, and sends a verdict of its own on connections without a secret.
///
/// # Errors
/// An error that names the secret, if one side has another one or none. The other side knows then.
pub(crate) async fn accept(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    secret: Option<&Secret>,
    hello: &[u8],
    has_opening: bool,
    is_expected: bool,
) -> io::Result<Option<Claim>> {
    let mut opening = [0; OPENING];
    if has_opening {
        // Unread bytes would discard the verdict.
        stream.read_exact(&mut opening).await?;
    }
    let secret = match (secret, has_opening) {
        (None, false) => return Ok(None),
        (Some(secret), true) => secret,
        (None, true) => {
            stream.write_all(&Verdict::NotExpected.encode()).await?;
            return Err(refused("the other process has a secret, and this process has none"));
        }
        (Some(_), false) if is_planted("pg-proof-is-optional") => return Ok(None),
        (Some(_), false) => {
            stream.write_all(&Verdict::Required.encode()).await?;
            discard(stream).await?;
            return Err(refused("this process has a secret, and the other process has none"));
        }
    };
    let nonce = nonce()?;
    stream.write_all(&[&Verdict::Challenge.encode()[..], &nonce].concat()).await?;
    let mut proof = [0; PROOF];
    stream.read_exact(&mut proof).await?;
    let exchange = Exchange { hello, opening: &opening, nonce: &nonce };
    if !secret.accepts(Direction::Opening, &exchange, &proof) {
        stream.write_all(&Verdict::Wrong.encode()).await?;
        return Err(refused("the other process has another secret"));
    }
    if !is_expected {
        stream.write_all(&Verdict::OtherProcess.encode()).await?;
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the connection is for another process"));
    }
    let own = secret.prove(Direction::Accepting, &exchange);
    stream.write_all(&[&Verdict::Accepted.encode()[..], &own].concat()).await?;
    Ok(Some(Claim::decode(&opening)))
}

/// Ends a connection so that the other side receives the last verdict: reads what it has sent
/// before, at most a little.
async fn discard(stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) -> io::Result<()> {
    stream.shutdown().await?;
    let rest = async { tokio::io::copy(&mut stream.take(DISCARDED), &mut tokio::io::sink()).await };
    // The verdict is on its way, however the connection ends.
    let _ = timeout(LINGER, rest).await;
    Ok(())
}

#[cfg(test)]
mod tests;
