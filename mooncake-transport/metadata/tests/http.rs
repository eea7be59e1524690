//! HTTP metadata client against a small server that behaves like those of Mooncake C++, and against
//! a real one on request.
#![cfg(all(feature = "metadata-http", not(miri)))]

use std::collections::HashMap;
use std::sync::Arc;

use mooncake_core::ErrorKind;
use mooncake_core::meta::{Expect, MetadataBackend};
use mooncake_metadata::http::HttpMetadata;
use mooncake_metadata::{DirectoryOptions, connect};
use mooncake_transport::engine::HandshakePort;
use mooncake_transport::{Engine, LoopbackNet};
use parking_lot::Mutex;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

type Store = Arc<Mutex<HashMap<String, Vec<u8>>>>;

/// Serves until the runtime ends. Like the server inside a master, it does not decode keys.
async fn server() -> (String, Store) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/metadata", listener.local_addr().unwrap());
    let store = Store::default();
    let served = store.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(serve(stream, served.clone()));
        }
    });
    (url, store)
}

async fn serve(stream: TcpStream, store: Store) -> std::io::Result<()> {
    let mut stream = BufReader::new(stream);
    loop {
        let mut request = String::new();
        if stream.read_line(&mut request).await? == 0 {
            return Ok(());
        }
        let mut len = 0;
        loop {
            let mut header = String::new();
            stream.read_line(&mut header).await?;
            if header == "\r\n" {
                break;
            }
            if let Some(value) = header.to_ascii_lowercase().strip_prefix("content-length:") {
                len = value.trim().parse().expect("a length");
            }
        }
        let mut body = vec![0; len];
        stream.read_exact(&mut body).await?;
        let (status, body) = answer(&request, body, &store);
        let head = format!("HTTP/1.1 {status} X\r\nContent-Length: {}\r\n\r\n", body.len());
        stream.write_all(&[head.as_bytes(), &body].concat()).await?;
    }
}

fn answer(request: &str, body: Vec<u8>, store: &Store) -> (u16, Vec<u8>) {
    let (verb, rest) = request.split_once(' ').expect("a verb");
    let path = rest.split(' ').next().expect("a path");
    let Some(key) = path.strip_prefix("/metadata?key=") else {
        return (400, b"Missing key parameter".into());
    };
    assert!(!key.contains('/') && !key.contains(':'), "keys are escaped whole: {key}");
    let mut store = store.lock();
    match verb {
        "GET" => store.get(key).map_or((404, b"metadata not found".into()), |v| (200, v.clone())),
        "PUT" if key.contains("rpc_meta") && store.contains_key(key) => {
            (400, b"Duplicate rpc_meta key not allowed".into())
        }
        "PUT" => {
            store.insert(key.into(), body);
            (200, b"metadata updated".into())
        }
        "DELETE" if store.remove(key).is_some() => (200, b"metadata deleted".into()),
        "DELETE" => (404, b"metadata not found".into()),
        _ => (405, Vec::new()),
    }
}

#[tokio::test]
async fn the_client_conforms() {
    let (url, _) = server().await;
    mooncake_core::testkit::meta::check(Arc::new(HttpMetadata::new(&url).unwrap())).await;
}

#[tokio::test]
async fn handshake_addresses_are_never_overwritten() {
    let (url, store) = server().await;
    let backend = HttpMetadata::new(&url).unwrap();
    backend.put("mooncake/rpc_meta/n", "{}".into(), Expect::Any).await.unwrap();
    let refused = backend.put("mooncake/rpc_meta/n", "{ }".into(), Expect::Any).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::AlreadyExists);
    assert_eq!(store.lock()["mooncake%2Frpc_meta%2Fn"], b"{}");
    assert_eq!(backend.list("mooncake/").await.unwrap_err().kind(), ErrorKind::Unsupported);
}

#[tokio::test]
async fn an_absent_or_broken_server_is_an_error_with_its_address() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap();
    drop(listener);
    let backend = HttpMetadata::new(&format!("http://{at}/metadata")).unwrap();
    let error = backend.get("k").await.unwrap_err();
    assert!(error.kind() == ErrorKind::Unavailable && error.to_string().contains(&at.to_string()), "{error}");
    let (url, _) = server().await;
    let wrong = HttpMetadata::new(&url.replace("metadata", "elsewhere")).unwrap();
    let error = wrong.get("k").await.unwrap_err().to_string();
    assert!(error.contains("400") && error.contains("Missing key"), "{error}");
}

#[tokio::test]
async fn engines_publish_in_the_layout_of_mooncake_cpp_and_leave_nothing() {
    let (url, store) = server().await;
    let net = LoopbackNet::new();
    let handshake = || HandshakePort {
        host: Some("127.0.0.1".into()),
        bind: Some([127, 0, 0, 1].into()),
        ..HandshakePort::default()
    };
    let start = |name: &'static str| {
        let directory = connect(&url, &DirectoryOptions::default()).unwrap();
        Engine::builder(Arc::new(net.node())).name(name).directory(directory).handshake(handshake()).start()
    };
    let (a, b) = (start("a:1").await.unwrap(), start("b").await.unwrap());
    let memory = Arc::new(mooncake_core::memory::HostMemory::new(4096).unwrap());
    let region = a.register(memory).await.unwrap();
    let target = b.open("a:1").await.unwrap();
    b.write(&target, region.addr(), vec![1, 2, 3], None).await.0.unwrap();
    let keys: Vec<String> = {
        let mut keys: Vec<_> = store.lock().keys().cloned().collect();
        keys.sort();
        keys
    };
    assert_eq!(
        keys,
        [
            "mooncake%2Fram%2Fa%3A1",
            "mooncake%2Fram%2Fb",
            "mooncake%2Frpc_meta%2Fa%3A1",
            "mooncake%2Frpc_meta%2Fb"
        ]
    );
    a.unregister(region).await.unwrap();
    a.close().await.unwrap();
    b.close().await.unwrap();
    assert!(store.lock().is_empty());
}

/// Runs against a server of Mooncake C++: `METADATA_URL=http://host:8080/metadata cargo test --
/// --ignored`.
#[tokio::test]
#[ignore = "needs a metadata server of Mooncake C++"]
async fn the_client_conforms_on_a_real_server() {
    #[allow(clippy::disallowed_methods, reason = "a test's own argument")]
    let url = std::env::var("METADATA_URL").expect("METADATA_URL names the server");
    mooncake_core::testkit::meta::check(Arc::new(HttpMetadata::new(&url).unwrap())).await;
}

/// Our own server, as a master and the stand-alone program serve it.
#[cfg(feature = "http-server")]
mod own_server {
    use super::*;
    use mooncake_core::meta::{MemoryLimits, MemoryMetadata};
    use mooncake_core::settings::apply;
    use mooncake_metadata::http_routes::{self, Owners, PageOptions, ServerSettings, VARIABLES};
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Counts the entries that were refused.
    #[derive(Debug, Default)]
    struct Refused(AtomicUsize);

    impl Owners for Refused {
        fn is_dead(&self, _name: &str) -> bool {
            false
        }

        fn taken(&self, _name: &str) {}

        fn note_refused(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    async fn own() -> (String, Arc<MemoryMetadata>) {
        let (url, metadata, _) = own_that_counts().await;
        (url, metadata)
    }

    async fn own_that_counts() -> (String, Arc<MemoryMetadata>, Arc<Refused>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/metadata", listener.local_addr().unwrap());
        let metadata =
            Arc::new(MemoryMetadata::with_limits(MemoryLimits { entries: 64, ..MemoryLimits::SERVER }));
        let refused = Arc::new(Refused::default());
        let pages = http_routes::pages(metadata.clone(), refused.clone());
        tokio::spawn(async move { axum::serve(listener, pages).await });
        (url, metadata, refused)
    }

    async fn with(options: PageOptions) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/metadata", listener.local_addr().unwrap());
        let pages = http_routes::pages_with(Arc::new(MemoryMetadata::new()), Arc::new(()), &options);
        tokio::spawn(async move { axum::serve(listener, pages).await });
        url
    }

    /// Sends a request, and returns the status and the body of the response.
    async fn raw(url: &str, method: &str, query: &str, headers: &str, body: &[u8]) -> (u16, String) {
        let at = url.strip_prefix("http://").unwrap().strip_suffix("/metadata").unwrap();
        let mut stream = TcpStream::connect(at).await.unwrap();
        let head = format!(
            "{method} /metadata{query} HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: {}\r\n{headers}\r\n",
            body.len()
        );
        stream.write_all(&[head.as_bytes(), body].concat()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
        (status, answer.rsplit_once("\r\n\r\n").unwrap().1.to_owned())
    }

    #[tokio::test]
    async fn a_token_opens_every_method() {
        let url = with(PageOptions { token: "secret".into(), ..PageOptions::default() }).await;
        let right = HttpMetadata::with_token(&url, &"secret".into()).unwrap();
        mooncake_core::testkit::meta::check(Arc::new(right)).await;
        for wrong in ["", "wrong"] {
            let client = HttpMetadata::with_token(&url, &wrong.into()).unwrap();
            for error in [
                client.get("k").await.unwrap_err(),
                client.put("k", "v".into(), Expect::Any).await.unwrap_err(),
                client.delete("k").await.unwrap_err(),
            ] {
                let error = error.to_string();
                assert!(error.contains("401") && error.contains("MC_METADATA_HTTP_TOKEN"), "{error}");
            }
        }
        let unauthorized = (401, "unauthorized".to_owned());
        for method in ["GET", "PUT", "DELETE", "POST"] {
            assert_eq!(raw(&url, method, "", "", b"").await, unauthorized, "{method}: before its key");
        }
        let authorized = raw(&url, "GET", "?key=k", "authorization: bEARER secret\r\n", b"").await;
        assert_eq!(authorized, (404, "metadata not found".into()));
    }

    #[tokio::test]
    async fn long_values_are_refused() {
        let url = with(PageOptions { max_value: 100, ..PageOptions::default() }).await;
        assert_eq!(raw(&url, "PUT", "?key=k", "", &[b'x'; 100]).await, (200, "metadata updated".into()));
        let (status, refused) = raw(&url, "PUT", "?key=k", "", &[b'x'; 101]).await;
        assert_eq!(status, 413);
        assert!(refused.contains("limit=max_body_bytes value=100; publish fewer"), "{refused}");
    }

    /// A value that is received slowly delays those behind the limit, and no read.
    #[tokio::test]
    async fn few_values_are_received_at_once() {
        let url = with(PageOptions { concurrent_puts: Some(1), ..PageOptions::default() }).await;
        let at = url.strip_prefix("http://").unwrap().strip_suffix("/metadata").unwrap();
        let mut slow = TcpStream::connect(at).await.unwrap();
        let head = "PUT /metadata?key=slow HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nConnection: close\r\nContent-Length: 2\r\n\r\n";
        slow.write_all(head.as_bytes()).await.unwrap();
        // The handler asks for the body, so it has the permit.
        let mut interim = [0; 25];
        slow.read_exact(&mut interim).await.unwrap();
        assert!(interim.starts_with(b"HTTP/1.1 100"), "{}", interim.escape_ascii());
        let mut second = tokio::spawn({
            let url = url.clone();
            async move { raw(&url, "PUT", "?key=second", "", b"v").await }
        });
        assert_eq!(raw(&url, "GET", "?key=second", "", b"").await.0, 404);
        let waits = tokio::time::timeout(std::time::Duration::from_millis(50), &mut second).await;
        assert!(waits.is_err(), "{waits:?}");
        slow.write_all(b"xx").await.unwrap();
        assert_eq!(second.await.unwrap().0, 200);
    }

    #[test]
    fn an_open_server_needs_a_token() {
        let settings = |variables: &[(&str, &str)]| {
            let mut settings = ServerSettings::default();
            let ignored = apply(VARIABLES, &mut settings, &variables.iter().copied().collect());
            assert!(ignored.is_empty(), "{ignored:?}");
            settings
        };
        for host in ["127.0.0.1", "localhost", "::1", "127.1"] {
            settings(&[]).check(host).unwrap();
        }
        let insecure = "MC_METADATA_HTTP_ALLOW_INSECURE";
        for host in ["0.0.0.0", "::", "10.0.0.1", "node1"] {
            for off in [&[][..], &[(insecure, "0")]] {
                let error = settings(off).check(host).unwrap_err().to_string();
                assert!(
                    error.contains("refuses to bind") && error.contains("MC_METADATA_HTTP_TOKEN"),
                    "{error}"
                );
            }
            settings(&[("MC_METADATA_HTTP_TOKEN", "secret")]).check(host).unwrap();
            for on in ["1", "true", "Yes", "on"] {
                settings(&[(insecure, on)]).check(host).unwrap();
            }
        }
        settings(&[("MC_METADATA_HTTP_TOKEN", "a b")]).check("127.0.0.1").unwrap_err();
        let limits = settings(&[
            ("MC_METADATA_MAX_KEYS", "2"),
            ("MC_METADATA_MAX_TOTAL_BYTES", "3"),
            ("MC_METADATA_MAX_BODY_BYTES", "4"),
            ("MC_METADATA_MAX_CONCURRENT_PUTS", "5"),
        ]);
        assert_eq!(limits.limits, MemoryLimits { entries: 2, bytes: 3 });
        assert_eq!((limits.pages.max_value, limits.pages.concurrent_puts), (4, Some(5)));
    }

    #[tokio::test]
    async fn it_conforms() {
        let (url, _) = own().await;
        mooncake_core::testkit::meta::check(Arc::new(HttpMetadata::new(&url).unwrap())).await;
    }

    #[tokio::test]
    async fn a_full_server_refuses_by_name() {
        let (url, metadata, counted) = own_that_counts().await;
        let client = HttpMetadata::new(&url).unwrap();
        for number in 0..64 {
            client.put(&format!("k{number}"), "value".into(), Expect::Any).await.unwrap();
        }
        let refused = client.put("more", "value".into(), Expect::Any).await.unwrap_err();
        assert!(
            refused.kind() == ErrorKind::NoSpace && refused.message().contains("the server is full"),
            "{refused}"
        );
        assert_eq!(counted.0.load(Ordering::Relaxed), 1);
        client.put("k1", "other".into(), Expect::Any).await.expect("a key that is there");
        assert!(metadata.delete("k0").await.unwrap());
        client.put("more", "value".into(), Expect::Any).await.expect("room again");
    }

    #[tokio::test]
    async fn an_address_is_replaced_when_no_process_listens_there() {
        let (url, metadata) = own().await;
        let client = HttpMetadata::new(&url).unwrap();
        let alive = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let entry = |port: u16| format!("{{\"ip_or_host_name\":\"127.0.0.1\",\"rpc_port\":{port}}}");
        let key = "mooncake/rpc_meta/n";
        let port = alive.local_addr().unwrap().port();
        client.put(key, entry(port).into(), Expect::Any).await.unwrap();
        client.put(key, entry(port).into(), Expect::Any).await.expect("the same again");
        let refused = client.put(key, entry(1).into(), Expect::Any).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::AlreadyExists);
        drop(alive);
        client.put(key, entry(1).into(), Expect::Any).await.expect("its owner is gone");
        assert_eq!(metadata.get(key).await.unwrap().unwrap().value, entry(1));
    }
}
