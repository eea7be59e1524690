//! Foreign and misbehaving processes at the socket of an owner.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use mooncake_core::{ErrorCode, ErrorKind};
use mooncake_ipc::socket::{RecordSocket, Trust};
use mooncake_store::local::message::{self, Fetch, Item, Place, Status, Verb};
use mooncake_store::local::record::{Record, VERSION};
use mooncake_store::local::{LocalClient, LocalConfig, LocalServer, LocalServerConfig};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};

use super::Host;

async fn stranger(path: &Path) -> RecordSocket {
    RecordSocket::new(UnixStream::connect(path).await.unwrap(), Trust::SameUser).unwrap()
}

async fn ask(socket: &RecordSocket, record: [u8; 64]) -> Record {
    socket.send(&record, None).await.unwrap();
    Record::decode(&socket.receive().await.unwrap().0).unwrap()
}

#[tokio::test]
async fn only_its_user_may_open_the_socket() {
    let host = Host::new().await;
    let mode = std::fs::metadata(host.server.path()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let wide = Host::with(|config| config.mode = 0o660).await;
    let mode = std::fs::metadata(wide.server.path()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o660, "as it was told, whatever the umask");
}

#[tokio::test]
async fn one_owner_to_a_path() {
    let host = Host::new().await;
    let config = LocalServerConfig { path: host.server.path().into(), ..Default::default() };
    let refused = LocalServer::start(host.client.clone(), config).unwrap_err();
    assert!(refused.message().contains("another process"), "{refused}");
    host.connect().await;
    // A socket that a killed owner left is replaced.
    let left = host.folder.path().join("left.sock");
    drop(std::os::unix::net::UnixListener::bind(&left).unwrap());
    let config = LocalServerConfig { path: left, ..Default::default() };
    LocalServer::start(host.client.clone(), config).unwrap();
    // A file that is not a socket stays.
    let file = host.folder.path().join("file");
    std::fs::write(&file, "precious").unwrap();
    let config = LocalServerConfig { path: file.clone(), ..Default::default() };
    LocalServer::start(host.client.clone(), config).unwrap_err();
    assert_eq!(std::fs::read(&file).unwrap(), b"precious");
    let config = LocalServerConfig { path: host.folder.path().join("no/folder.sock"), ..Default::default() };
    LocalServer::start(host.client.clone(), config).unwrap_err();
}

#[tokio::test]
async fn wrong_addresses_are_named() {
    let host = Host::new().await;
    let nobody = host.folder.path().join("nobody.sock");
    for (address, kind, word) in [
        (nobody.to_str().unwrap(), ErrorKind::Unavailable, "nobody.sock"),
        ("127.0.0.1:1", ErrorKind::Unavailable, "/tmp/mooncake_client_1.sock"),
        ("127.0.0.1", ErrorKind::Invalid, "host:port"),
        ("", ErrorKind::Invalid, "host:port"),
        ("127.0.0.1:66000", ErrorKind::Invalid, "host:port"),
    ] {
        let error = LocalClient::connect(LocalConfig::at(address)).await.unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.message().contains(word), "{error}");
    }
}

#[tokio::test]
async fn versions_are_named_on_both_sides() {
    let host = Host::new().await;
    // A foreign client connects to an owner of this project.
    let socket = stranger(host.server.path()).await;
    let mut hello = Record::Hello.encode();
    hello[4] = 9;
    let Record::Done { code, .. } = ask(&socket, hello).await else { panic!("no refusal") };
    assert_eq!(code, ErrorCode::InvalidVersion.number());
    // A client of this project connects to a foreign owner.
    let path = host.folder.path().join("other.sock");
    let other = UnixListener::bind(&path).unwrap();
    let served = tokio::spawn(async move {
        let (stream, _) = other.accept().await.unwrap();
        let socket = RecordSocket::new(stream, Trust::SameUser).unwrap();
        socket.receive().await.unwrap();
        let mut answer = Record::DONE.encode();
        answer[4] = 9;
        socket.send(&answer, None).await.unwrap();
    });
    let error = LocalClient::connect(LocalConfig::at(path.to_str().unwrap())).await.unwrap_err();
    served.await.unwrap();
    assert_eq!(error.code(), ErrorCode::InvalidVersion);
    assert!(
        error.message().contains("version 9") && error.message().contains(&format!("version {VERSION}")),
        "{error}"
    );
}

#[tokio::test]
async fn nonsense_on_the_control_connection_ends_it_alone() {
    let host = Host::new().await;
    let shared = host.connect().await;
    for first in [[0; 64], [0xff; 64], Record::Ping.encode(), Record::DONE.encode()] {
        let socket = stranger(host.server.path()).await;
        assert!(matches!(ask(&socket, first).await, Record::Done { code, .. } if code != 0));
        assert!(socket.receive().await.is_err(), "closed");
    }
    // The memory is invalid: not a file, a file that is not sealed, ranges outside of it.
    let plain = tempfile::tempfile().unwrap();
    plain.set_len(1 << 20).unwrap();
    let socket = stranger(host.server.path()).await;
    assert!(matches!(ask(&socket, Record::Hello.encode()).await, Record::Welcome { .. }));
    let share = Record::Share { memory: 0, offset: 0, len: 4096 };
    assert!(matches!(ask(&socket, share.encode()).await, Record::Done { code, .. } if code != 0));
    socket.send(&share.encode(), Some(std::os::fd::AsFd::as_fd(&plain))).await.unwrap();
    let answer = Record::decode(&socket.receive().await.unwrap().0).unwrap();
    assert!(
        matches!(answer, Record::Done { code, .. } if code != 0),
        "it could be cut short under the owner"
    );
    for (offset, len) in [(0, 0), (1, 4096), (0, u64::MAX), (u64::MAX, 1), (4096, 1 << 20)] {
        let share = Record::Share { memory: 0, offset, len };
        assert!(
            matches!(ask(&socket, share.encode()).await, Record::Done { code, .. } if code != 0),
            "{share:?}"
        );
    }
    assert!(matches!(
        ask(&socket, Record::Unshare { memory: 77 }.encode()).await,
        Record::Done { code: 0, .. }
    ));
    assert_eq!(host.server.stats().memories, 1, "that of the other one");
    assert!(shared.get("k").await.unwrap().is_none());
}

#[tokio::test]
async fn nonsense_in_calls_is_answered() {
    let host = Host::new().await;
    let control = stranger(host.server.path()).await;
    let Record::Welcome { guest: shared, .. } = ask(&control, Record::Hello.encode()).await else {
        panic!("not welcome")
    };
    let unknown = Record::Join { guest: mooncake_core::ids::Uuid::new(1, 1) };
    assert!(
        matches!(ask(&stranger(host.server.path()).await, unknown.encode()).await, Record::Done { code, .. } if code != 0)
    );
    let join = || async {
        let socket = stranger(host.server.path()).await;
        ask(&socket, Record::Join { guest: shared }.encode()).await.done().unwrap();
        socket.into_stream()
    };
    let mut stream = join().await;
    // Invalid bodies, and memory that was not shared, get an error each, and the connection
    // continues.
    let mut calls: Vec<Vec<u8>> = Vec::new();
    for verb in 1..=12 {
        let mut call = message::head(3, verb).to_vec();
        call.extend_from_slice(&[1, 2, 3]);
        calls.push(call);
    }
    for memory in [0, u32::MAX] {
        let into = Place { memory, offset: u64::MAX, len: u64::MAX };
        let mut call = Vec::new();
        message::append(&mut call, Verb::Fetch as u8, &Fetch { keys: vec![&b"k"[..]].into(), into }).unwrap();
        calls.push(call);
    }
    host.client.put("k", b"value").await.unwrap();
    for call in calls {
        stream.write_all(&call).await.unwrap();
        let mut head = [0; 8];
        stream.read_exact(&mut head).await.unwrap();
        let (status, len) = message::parse_answer(head).unwrap();
        let mut body = vec![0; len as usize];
        stream.read_exact(&mut body).await.unwrap();
        if status == Status::Failure {
            message::body::<Item>(&body).unwrap().result().unwrap_err();
        } else {
            let items = message::body::<message::Items>(&body).unwrap().items;
            assert!(items.into_iter().all(|item| item.result().is_err()), "no value for {call:?}");
        }
    }
    // An invalid header ends the connection, and no other.
    for head in [[0xff; 8], message::head(u32::MAX, 1), message::head(0, 0)] {
        let mut stream = join().await;
        stream.write_all(&head).await.unwrap();
        assert_eq!(stream.read(&mut [0; 8]).await.unwrap_or(0), 0);
    }
    assert_eq!(host.server.stats().clients, 1);
}
