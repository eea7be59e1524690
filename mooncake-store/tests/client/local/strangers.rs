//! Foreign and misbehaving processes at the socket of an owner.

use std::os::unix::fs::PermissionsExt;

use mooncake_core::error::Result;
use mooncake_core::fork::ParentOnly;
use mooncake_core::ids::Uuid;
use mooncake_core::memory::{HostMemory, HostMemoryOptions, shared_pages};
use mooncake_core::{ErrorCode, ErrorKind};
use mooncake_ipc::socket::{RecordSocket, Trust};
use mooncake_store::local::hello::{self, VERSION};
use mooncake_store::local::{LocalClient, LocalConfig, LocalServer, LocalServerConfig};
use mooncake_store::protocol::connection::Connection;
use mooncake_store::protocol::frame::{self, DEFAULT_MAX_BODY, Parsed, write_request};
use mooncake_store::protocol::message::{
    Attach, FetchObject, IPC_TABLE, Join, KeepAlive, RemoveEvery, Request, ShareMemory, UnshareMemory,
};
use mooncake_store::protocol::pack;
use mooncake_store::protocol::report::Reported;
use mooncake_store::protocol::wire::{Attached, MemoryRange};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};

use super::{Host, stranger};

/// Makes a call, for which there must be a response.
async fn ask<R, T>(connection: &mut Connection<ParentOnly<UnixStream>>, request: R) -> Result<T>
where
    R: Request<Reply = Reported<T>> + Sync,
{
    connection.call(&request, &"the owner").await.unwrap().outcome()
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
    // A client of another version connects to an owner of this one, and learns the version.
    let stream = UnixStream::connect(host.server.path()).await.unwrap();
    let socket = RecordSocket::new(stream, Trust::SameUser).unwrap();
    let mut other = hello::encode();
    other[4..8].copy_from_slice(&[1, 0, 1, 0]);
    socket.send(&other, None).await.unwrap();
    assert_eq!(socket.receive().await.unwrap().0, hello::encode());
    assert!(socket.receive().await.is_err(), "closed");
    // A client of this version connects to an owner of another one.
    let path = host.folder.path().join("other.sock");
    let other = UnixListener::bind(&path).unwrap();
    let served = tokio::spawn(async move {
        let (stream, _) = other.accept().await.unwrap();
        let socket = RecordSocket::new(stream, Trust::SameUser).unwrap();
        socket.receive().await.unwrap();
        let mut answer = hello::encode();
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

/// A share and its end travel on different connections. A share that the daemon makes too late
/// would outlive its end.
#[tokio::test]
async fn a_share_without_a_response_ends_the_registration() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("slow.sock");
    let daemon = UnixListener::bind(&path).unwrap();
    let accept = async || {
        let socket = RecordSocket::new(daemon.accept().await.unwrap().0, Trust::SameUser).unwrap();
        socket.receive().await.unwrap();
        socket.send(&hello::encode(), None).await.unwrap();
        socket.into_stream()
    };
    let serving = async {
        let mut control = accept().await;
        let (mut request, mut response) = (Vec::new(), Vec::new());
        control.read_buf(&mut request).await.unwrap();
        let Ok(Parsed::Whole(attach, _)) = frame::parse_request(&request, DEFAULT_MAX_BODY) else {
            panic!("{request:?}")
        };
        assert_eq!(attach.function, Attach::FUNCTION);
        let start = frame::begin_reply(&mut response, attach.seq);
        let attached = Attached { guest: Uuid::new(1, 2), calls: 1, silence_ms: 60_000 };
        pack::encode(&Reported::of(Ok(attached)), &mut response);
        frame::end_reply(&mut response, start, Ok(()));
        control.write_all(&response).await.unwrap();
        let _share = accept().await;
        // A request here would be the end of the sharing.
        let mut next = Vec::new();
        while control.read_buf(&mut next).await.unwrap() > 0 {
            let function = frame::parse_request(&next, DEFAULT_MAX_BODY).map(|parsed| match parsed {
                Parsed::Whole(request, _) => request.function,
                Parsed::Partial(_) => 0,
            });
            assert!(function.is_ok_and(|function| function == KeepAlive::FUNCTION), "the share is given up");
            next.clear();
        }
    };
    let sharing = async {
        let config = LocalConfig { buffer: 0, ..LocalConfig::at(path.to_str().unwrap()) };
        let client = LocalClient::connect(config).await.unwrap();
        let error = client.alloc(4096).await.map(drop).unwrap_err();
        assert_eq!(error.code(), ErrorCode::RpcTimeout, "{error}");
        client
    };
    let (_client, ()) = tokio::join!(sharing, serving);
}

#[tokio::test]
async fn malformed_beginnings_end_the_connection_alone() {
    let host = Host::new().await;
    let shared = host.connect().await;
    for first in [[0; 64], [0xff; 64]] {
        let stream = UnixStream::connect(host.server.path()).await.unwrap();
        let socket = RecordSocket::new(stream, Trust::SameUser).unwrap();
        socket.send(&first, None).await.unwrap();
        assert_eq!(socket.receive().await.unwrap().0, hello::encode());
        assert!(socket.receive().await.is_err(), "closed");
    }
    let path = host.server.path();
    let mut early = stranger(path, None).await;
    ask(&mut early, RemoveEvery { force: true }).await.unwrap_err();
    early.ended().await;
    let mut idle = stranger(path, None).await;
    ask(&mut idle, KeepAlive {}).await.unwrap();
    idle.ended().await;
    let mut unknown = stranger(path, None).await;
    ask(&mut unknown, Join { guest: Uuid::new(1, 1) }).await.unwrap_err();
    unknown.ended().await;
    assert!(shared.get("k").await.unwrap().is_none());
}

#[tokio::test]
async fn unsuitable_memory_is_refused() {
    let host = Host::new().await;
    let shared = host.connect().await;
    let path = host.server.path();
    let mut control = stranger(path, None).await;
    let guest = ask(&mut control, Attach {}).await.unwrap().guest;
    ask(&mut control, Attach {}).await.unwrap_err();
    let share = async |guest, offset, len, file| {
        let mut connection = stranger(path, file).await;
        ask(&mut connection, ShareMemory { guest, memory: 0, offset, len }).await
    };
    // Not a file, a file that is not sealed, ranges outside of it, an unknown client.
    share(guest, 0, 4096, None).await.unwrap_err();
    let plain = tempfile::tempfile().unwrap();
    plain.set_len(1 << 20).unwrap();
    let refused = share(guest, 0, 4096, Some(&plain)).await.unwrap_err();
    assert!(refused.message().contains("seal"), "it could be cut short under the owner: {refused}");
    let options = HostMemoryOptions { shared: Some("test".into()), ..Default::default() };
    let memory = HostMemory::with(1 << 20, &options).unwrap();
    let pages = shared_pages(mooncake_core::memory::MemorySource::span(&memory)).unwrap();
    for (offset, len) in [(0, 0), (1, 4096), (0, u64::MAX), (u64::MAX, 1), (4096, 1 << 20)] {
        let refused = share(guest, offset, len, Some(pages.file())).await;
        assert!(refused.is_err(), "{len} bytes from {offset}");
    }
    share(Uuid::new(1, 1), 0, 4096, Some(pages.file())).await.unwrap_err();
    assert_eq!(host.server.stats().memories, 1, "that of the other one");
    share(guest, 0, 4096, Some(pages.file())).await.unwrap();
    share(guest, 0, 4096, Some(pages.file())).await.unwrap_err();
    assert_eq!(host.server.stats().memories, 2);
    ask(&mut control, UnshareMemory { memory: 77 }).await.unwrap();
    ask(&mut control, UnshareMemory { memory: 0 }).await.unwrap();
    assert_eq!(host.server.stats().memories, 1);
    assert!(shared.get("k").await.unwrap().is_none());
}

#[tokio::test]
async fn malformed_calls_are_answered() {
    let host = Host::new().await;
    let path = host.server.path();
    let mut control = stranger(path, None).await;
    let guest = ask(&mut control, Attach {}).await.unwrap().guest;
    host.client.put("k", b"value").await.unwrap();
    // A control connection makes no calls about objects.
    ask(&mut control, RemoveEvery { force: true }).await.unwrap_err();
    let mut calls = stranger(path, None).await;
    ask(&mut calls, Join { guest }).await.unwrap();
    // Invalid bodies, and memory that was not shared, get an error each, and the connection
    // continues.
    for shape in IPC_TABLE {
        calls.send(shape.function, &|out| out.extend([1, 2, 3])).await.unwrap();
        calls.receive().await.unwrap();
        let refused = calls.reply::<RemoveEvery>(&"the owner").unwrap_err();
        assert!(refused.message().contains("the arguments"), "{}: {refused}", shape.name);
    }
    for memory in [0, u32::MAX] {
        let into = MemoryRange { memory, offset: u64::MAX, len: u64::MAX };
        ask(&mut calls, FetchObject { key: b"k", into }).await.unwrap_err();
    }
    ask(&mut calls, UnshareMemory { memory: 0 }).await.unwrap_err();
    ask(&mut calls, Join { guest }).await.unwrap_err();
    // An invalid frame ends the connection, and no other.
    let mut oversized = Vec::new();
    write_request(&mut oversized, 1, RemoveEvery::FUNCTION, |_| {});
    oversized[12..16].fill(0xff);
    for frame in [vec![0xff; 20], oversized] {
        let stream = UnixStream::connect(path).await.unwrap();
        let socket = RecordSocket::new(stream, Trust::SameUser).unwrap();
        socket.send(&hello::encode(), None).await.unwrap();
        socket.receive().await.unwrap();
        let mut stream = socket.into_stream();
        let mut join = Vec::new();
        write_request(&mut join, 1, Join::FUNCTION, |out| {
            mooncake_store::protocol::pack::encode(&Join { guest }, out);
        });
        stream.write_all(&join).await.unwrap();
        assert!(stream.read(&mut [0; 64]).await.unwrap() > 0);
        stream.write_all(&frame).await.unwrap();
        assert_eq!(stream.read(&mut [0; 8]).await.unwrap_or(0), 0);
    }
    assert_eq!(host.server.stats().clients, 1);
    assert_eq!(host.client.get("k").await.unwrap().unwrap(), "value");
}
