//! Tests of connections that a test opens.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc;

use super::connection::{Identity, carry, open};
use super::*;
use crate::protocol::{SessionId, ToAgent, ToCoordinator};
use crate::secret::{Claim, Secret};
use crate::view::GlobalRank;
use crate::wire::{ANSWER_LENGTH, HELLO_LENGTH, Hello, Purpose, VERSION, Verdict};

const HOST: &str = "127.0.0.1";

fn secret() -> Secret {
    Secret::new("a secret").unwrap()
}

/// A process that has proved to be one rank does not register as another one.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_rank_registers_as_what_it_has_proved_to_be() {
    let settings = ControlSettings { secret: Some(secret()), ..ControlSettings::default() };
    let server = CoordinatorServer::start(HOST, settings).await.unwrap();
    for (claim, is_taken) in [
        (Claim { rank: 1, session: 7 }, true),
        (Claim { rank: 2, session: 7 }, false),
        (Claim { rank: 1, session: 8 }, false),
    ] {
        let identity = Identity { secret: secret(), claim };
        let stream = open(server.address(), Purpose::Control, SessionId(0), Some(&identity)).await.unwrap();
        let (sender, outgoing) = mpsc::channel(1);
        let message = ToCoordinator::Register {
            rank: GlobalRank(1),
            session: SessionId(7),
            world: None,
            address: "127.0.0.1:1".to_owned(),
        };
        sender.send(message).await.unwrap();
        let mut is_registered = false;
        let ended = carry(stream, outgoing, std::time::Duration::from_secs(10), |message: ToAgent| {
            is_registered |= matches!(message, ToAgent::Registered { .. });
            // Enough was seen.
            Err(std::io::ErrorKind::Interrupted.into())
        })
        .await;
        assert!(ended.is_err());
        assert_eq!(is_registered, is_taken, "{claim:?}");
    }
}

/// A version without secrets accepts the hello and ignores its mark. Its acceptance proves nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn an_older_process_is_refused_by_a_process_with_a_secret() {
    let listener = tokio::net::TcpListener::bind((HOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let older = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut hello = [0; HELLO_LENGTH];
        stream.read_exact(&mut hello).await.unwrap();
        assert!(Hello::decode(&hello).unwrap().has_proof);
        let answer = crate::wire::Answer { version: VERSION, verdict: Verdict::Accepted };
        stream.write_all(&answer.encode()).await.unwrap();
        stream
    };
    let identity = Identity { secret: secret(), claim: Claim::default() };
    let opened = open(&address, Purpose::Link, SessionId(1), Some(&identity));
    let (_stream, opened) = tokio::join!(older, opened);
    let error = opened.unwrap_err().to_string();
    assert!(error.contains("this process has a secret, and the other process has none"), "{error}");
}

/// A process without a secret reads the reason of its refusal, which is as long as a response to a
/// hello.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn verdicts_on_secrets_have_the_length_of_answers() {
    assert_eq!(crate::secret::VERDICT_LENGTH, ANSWER_LENGTH);
    let settings = ControlSettings { secret: Some(secret()), ..ControlSettings::default() };
    let server = CoordinatorServer::start(HOST, settings.clone()).await.unwrap();
    let opened = open(server.address(), Purpose::Control, SessionId(0), None).await;
    assert!(opened.unwrap_err().to_string().contains("the other process has a secret"));
    let refused = Agent::connect(server.address(), GlobalRank(1), HOST, ControlSettings::default());
    let error = refused.await.unwrap_err();
    assert!(error.message().contains("the other process has a secret"), "{error}");
}
