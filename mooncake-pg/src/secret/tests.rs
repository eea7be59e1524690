use tokio::io::DuplexStream;

use super::*;

const HELLO: &[u8] = b"hello of a connection";

fn secret(text: &str) -> Secret {
    Secret::new(text).unwrap()
}

fn claim() -> Claim {
    Claim { rank: 3, session: 0x0102_0304_0506_0708 }
}

/// Opens a connection as a process with this secret does.
async fn open(stream: &mut DuplexStream, secret: Option<&Secret>) -> io::Result<()> {
    let Some(secret) = secret else {
        stream.write_all(HELLO).await?;
        let mut verdict = [0; VERDICT_LENGTH];
        stream.read_exact(&mut verdict).await?;
        return Err(Verdict::refusal(Verdict::decode(&verdict)));
    };
    let opening = begin(stream, HELLO, claim()).await?;
    let mut verdict = [0; VERDICT_LENGTH];
    stream.read_exact(&mut verdict).await?;
    match Verdict::decode(&verdict) {
        Some(Verdict::Challenge) => finish(stream, secret, HELLO, &opening).await,
        verdict => Err(Verdict::refusal(verdict)),
    }
}

/// Lets two processes meet. Returns what each of them learns.
async fn meet(
    opening: Option<&str>,
    accepting: Option<&str>,
    is_expected: bool,
) -> (io::Result<()>, io::Result<Option<Claim>>) {
    let (mut one, mut other) = tokio::io::duplex(4096);
    let (opening, accepting) = (opening.map(secret), accepting.map(secret));
    let has_proof = opening.is_some();
    let accepted = async {
        let mut hello = [0; HELLO.len()];
        other.read_exact(&mut hello).await?;
        let accepted = accept(&mut other, accepting.as_ref(), &hello, has_proof, is_expected).await;
        drop(other);
        accepted
    };
    let opened = async {
        let opened = open(&mut one, opening.as_ref()).await;
        drop(one);
        opened
    };
    tokio::join!(opened, accepted)
}

#[tokio::test]
async fn processes_with_one_secret_meet() {
    let (opened, accepted) = meet(Some("a secret"), Some("a secret"), true).await;
    opened.unwrap();
    assert_eq!(accepted.unwrap(), Some(claim()));
}

#[tokio::test]
async fn other_secrets_are_refused_by_name_on_both_sides() {
    for (opening, accepting, says, other_says) in [
        (
            Some("a"),
            Some("b"),
            "the other process has another secret",
            "the other process has another secret",
        ),
        (Some("a"), None, "this process has a secret", "the other process has a secret"),
        (None, Some("b"), "the other process has a secret", "this process has a secret"),
    ] {
        let (opened, accepted) = meet(opening, accepting, true).await;
        let (opened, accepted) = (opened.unwrap_err(), accepted.unwrap_err());
        for (error, says) in [(&opened, says), (&accepted, other_says)] {
            let text = error.to_string();
            assert!(is_refusal(error) && text.starts_with(says) && text.contains(VARIABLE), "{text}");
        }
    }
}

#[tokio::test]
async fn another_process_is_refused_after_the_proof_only() {
    let (opened, accepted) = meet(Some("a"), Some("a"), false).await;
    assert!(opened.unwrap_err().to_string().contains("another process listens"));
    assert!(!is_refusal(&accepted.unwrap_err()));
    // A stranger does not learn which process is there.
    let (opened, _) = meet(Some("a"), Some("b"), false).await;
    assert!(is_refusal(&opened.unwrap_err()));
}

#[tokio::test]
async fn without_secrets_nothing_is_exchanged() {
    let (mut one, mut other) = tokio::io::duplex(64);
    let accepted = accept(&mut other, None, HELLO, false, true).await.unwrap();
    drop(other);
    assert_eq!((accepted, one.read(&mut [0; 1]).await.unwrap()), (None, 0));
}

/// Bytes of an exchange between two processes with one secret.
struct Recorded {
    opening: [u8; OPENING],
    nonce: [u8; NONCE],
    opening_proof: [u8; PROOF],
    accepting_proof: [u8; PROOF],
}

async fn record(secret: &Secret) -> Recorded {
    let (mut one, mut other) = tokio::io::duplex(4096);
    let opening = begin(&mut one, HELLO, claim()).await.unwrap().0;
    let mut hello = [0; HELLO.len()];
    other.read_exact(&mut hello).await.unwrap();
    let nonce = nonce().unwrap();
    let exchange = Exchange { hello: HELLO, opening: &opening, nonce: &nonce };
    let opening_proof = secret.prove(Direction::Opening, &exchange);
    let accepting_proof = secret.prove(Direction::Accepting, &exchange);
    Recorded { opening, nonce, opening_proof, accepting_proof }
}

/// Sends an opening and a proof that were made before, and returns the verdict.
async fn replay(secret: &Secret, hello: &[u8], opening: &[u8; OPENING], proof: &[u8; PROOF]) -> Verdict {
    let (mut one, mut other) = tokio::io::duplex(4096);
    let accepted = accept(&mut other, Some(secret), hello, true, true);
    let sent = async {
        one.write_all(opening).await.unwrap();
        let mut challenge = [0; VERDICT_LENGTH + NONCE];
        one.read_exact(&mut challenge).await.unwrap();
        one.write_all(proof).await.unwrap();
        let mut verdict = [0; VERDICT_LENGTH];
        one.read_exact(&mut verdict).await.unwrap();
        Verdict::decode(&verdict).unwrap()
    };
    let (accepted, verdict) = tokio::join!(accepted, sent);
    assert!(accepted.is_err());
    verdict
}

#[tokio::test]
async fn recorded_proofs_do_not_hold_again() {
    let secret = secret("a secret");
    let recorded = record(&secret).await;
    for proof in [recorded.opening_proof, recorded.accepting_proof, [0; PROOF]] {
        assert_eq!(replay(&secret, HELLO, &recorded.opening, &proof).await, Verdict::Wrong);
    }
}

fn exchange<'a>(hello: &'a [u8], opening: &'a [u8; OPENING], nonce: &'a [u8; NONCE]) -> Exchange<'a> {
    Exchange { hello, opening, nonce }
}

#[tokio::test]
async fn a_proof_holds_for_one_hello_claim_nonce_and_direction() {
    let secret = secret("a secret");
    let Recorded { opening, nonce, opening_proof, accepting_proof } = record(&secret).await;
    let holds = |exchange: &Exchange<'_>| secret.accepts(Direction::Opening, exchange, &opening_proof);
    assert!(holds(&exchange(HELLO, &opening, &nonce)));
    assert!(!holds(&exchange(b"hello of b connection", &opening, &nonce)));
    for at in 0..OPENING {
        let mut other = opening;
        other[at] ^= 1;
        assert!(!holds(&exchange(HELLO, &other, &nonce)), "{at}");
    }
    for at in 0..NONCE {
        let mut other = nonce;
        other[at] ^= 1;
        assert!(!holds(&exchange(HELLO, &opening, &other)), "{at}");
    }
    let same = exchange(HELLO, &opening, &nonce);
    assert!(!secret.accepts(Direction::Accepting, &same, &opening_proof));
    assert!(!secret.accepts(Direction::Opening, &same, &accepting_proof));
    assert!(secret.accepts(Direction::Accepting, &same, &accepting_proof));
}

/// A process that does not know the secret sends the challenge of another connection, and the proof
/// that it receives: the opening side refuses a response without a proof of its own direction.
#[tokio::test]
async fn reflected_proofs_are_refused() {
    let secret = secret("a secret");
    let (mut one, mut other) = tokio::io::duplex(4096);
    let opened = open(&mut one, Some(&secret));
    let reflecting = async {
        let mut first = [0; HELLO.len() + OPENING];
        other.read_exact(&mut first).await.unwrap();
        let nonce = &first[HELLO.len()..][..NONCE];
        other.write_all(&[&Verdict::Challenge.encode()[..], nonce].concat()).await.unwrap();
        let mut proof = [0; PROOF];
        other.read_exact(&mut proof).await.unwrap();
        other.write_all(&[&Verdict::Accepted.encode()[..], &proof].concat()).await.unwrap();
    };
    let (opened, ()) = tokio::join!(opened, reflecting);
    assert!(is_refusal(&opened.unwrap_err()));
}

#[tokio::test]
async fn nonces_are_fresh() {
    assert_ne!(nonce().unwrap(), nonce().unwrap());
    assert!(nonce().unwrap().iter().any(|byte| *byte != 0));
}

#[test]
fn an_empty_secret_is_refused_and_none_is_printed() {
    let error = Secret::new("").unwrap_err().to_string();
    assert!(error.contains(VARIABLE) && error.contains("empty"), "{error}");
    assert_eq!(format!("{:?}", secret("hidden")), "Secret");
}

#[test]
fn verdicts_are_encoded() {
    for verdict in Verdict::ALL {
        assert_eq!(Verdict::decode(&verdict.encode()), Some(verdict));
    }
    assert_eq!(Verdict::decode(&[0; VERDICT_LENGTH]), None);
    let mut unknown = Verdict::Accepted.encode();
    unknown[8] = Verdict::ALL.len() as u8;
    assert_eq!(Verdict::decode(&unknown), None);
}
