//! HTTP connections of a listener: turns of requests, bytes of responses, and limits of requests.
#![cfg(all(feature = "http-server", not(miri)))]

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::routing::{get, post};
use axum::{Extension, Router};
use mooncake_core::clock::SystemClock;
use mooncake_core::fork::ParentOnly;
use mooncake_core::web_origin::AllowedHosts;
use mooncake_transport::admission::{ByteBudget, ListenerLimits};
use mooncake_transport::http_server::{BodyLimit, Content, MAX_ADDRESS, Turns, http_limits, serve};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;

const SOON: Duration = Duration::from_secs(20);
/// Length of the parts of a long response, and their number.
const PART: usize = 64 << 10;
const PARTS: usize = 512;
/// Maximum length of a body.
const MAX_BODY: usize = 1 << 20;

struct Served {
    at: std::net::SocketAddr,
    permits: Arc<Semaphore>,
    budget: ByteBudget,
}

/// Serves a path that waits for a permit, one that answers at once, and one with a long response.
async fn served(name: &'static str, slots: usize) -> Served {
    let socket = TcpSocket::new_v4().unwrap();
    // The kernel takes less at once than the server buffers, so the server always has a rest.
    socket.set_send_buffer_size(8 << 10).unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(64).unwrap();
    let at = listener.local_addr().unwrap();
    let permits = Arc::new(Semaphore::new(0));
    let waits = permits.clone();
    let wait = move |Extension(turns): Extension<Turns>| async move {
        turns.acquire(&waits).await.unwrap().forget();
        "turn"
    };
    let long = || async {
        let bytes = Bytes::from(vec![7; PART]);
        let part = move |_| Ok::<_, Infallible>(bytes.clone());
        Body::from_stream(futures::stream::iter((0..PARTS).map(part)))
    };
    let pages = Router::new()
        .route("/wait", get(wait))
        .route("/now", get(|| async { "now" }))
        .route("/long", get(long))
        .route("/body", post(|Content(body): Content| async move { body.len().to_string() }))
        .route("/ignored", post(|| async { "ignored" }))
        .layer(Extension(BodyLimit { bytes: MAX_BODY, remedy: "send less" }));
    let budget = ByteBudget::new(64 << 20, SystemClock::shared());
    let limits = ListenerLimits { budget: budget.clone(), ..http_limits(name, slots, 2) };
    let until = std::future::pending();
    tokio::spawn(serve(ParentOnly::new(listener), pages, limits, AllowedHosts::default(), until));
    Served { at, permits, budget }
}

async fn send_get(stream: &mut TcpStream, path: &str) {
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: h\r\n\r\n").as_bytes()).await.unwrap();
}

/// Reads until the response contains a text, or the connection ends. Returns whether it does.
async fn says(stream: &mut TcpStream, text: &str) -> bool {
    let mut received = Vec::new();
    let reading = async {
        while !String::from_utf8_lossy(&received).contains(text) {
            if !stream.read_buf(&mut received).await.is_ok_and(|count| count > 0) {
                return false;
            }
        }
        true
    };
    timeout(SOON, reading).await.expect("neither a response nor an end")
}

/// Requests that wait for their turn leave connections to others, and later requests are answered.
#[tokio::test]
async fn requests_that_wait_for_a_turn_do_not_fill_a_listener() {
    let served = served("test-http-turns", 2).await;
    let mut waiting = Vec::new();
    for _ in 0..2 {
        let mut stream = TcpStream::connect(served.at).await.unwrap();
        send_get(&mut stream, "/wait").await;
        waiting.push(stream);
    }
    for _ in 0..3 {
        let mut other = TcpStream::connect(served.at).await.unwrap();
        send_get(&mut other, "/now").await;
        assert!(says(&mut other, "now").await, "the listener is full of requests that wait");
    }
    assert!(!says(&mut waiting[0], "turn").await, "the one that waits longest is closed");
    let mut last = TcpStream::connect(served.at).await.unwrap();
    send_get(&mut last, "/wait").await;
    served.permits.add_permits(3);
    assert!(says(&mut last, "turn").await);
    // The connection goes on.
    send_get(&mut last, "/now").await;
    assert!(says(&mut last, "now").await);
}

/// Bytes that have been sent do not count, although the response never ends to wait for its reader.
#[tokio::test]
async fn sent_bytes_of_a_streamed_response_are_released() {
    let served = served("test-http-bytes", 8).await;
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4 << 10).unwrap();
    let mut slow = socket.connect(served.at).await.unwrap();
    send_get(&mut slow, "/long").await;
    let (mut part, mut read) = (vec![0; 64 << 10], 0);
    while read < PART * PARTS / 2 {
        read += timeout(SOON, slow.read(&mut part)).await.unwrap().unwrap();
        assert!(served.budget.report().held < 4 << 20, "{:?} after {read}", served.budget.report());
    }
    let counted = async {
        while served.budget.report().held == 0 {
            tokio::task::yield_now().await;
        }
    };
    timeout(SOON, counted).await.expect("the unread rest is counted");
    drop(slow);
    let released = async {
        while served.budget.report().held != 0 {
            tokio::task::yield_now().await;
        }
    };
    timeout(SOON, released).await.expect("everything is released");
}

/// Sends a whole request, and then reads until the connection ends.
async fn exchange(at: std::net::SocketAddr, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(at).await.unwrap();
    let whole = async {
        stream.write_all(request).await.unwrap();
        let mut response = Vec::new();
        stream.read_to_end(&mut response).await.unwrap();
        String::from_utf8(response).unwrap()
    };
    timeout(SOON, whole).await.expect("neither a response nor an end")
}

/// Request that ends its connection.
fn request(line: &str, fields: &str, body: &str) -> String {
    format!("{line} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n{fields}\r\n{body}")
}

/// Every refusal reaches its peer, although the peer sends the whole request first, and names the
/// limit.
#[tokio::test]
async fn a_refusal_names_its_limit() {
    let served = served("test-http-limits", 8).await;
    let get = |path: &str, fields: &str| request(&format!("GET /{path}"), fields, "");
    let body = |len: usize| request("POST /body", &format!("Content-Length: {len}\r\n"), &"x".repeat(len));
    let half = format!("{:x}\r\n{}\r\n", MAX_BODY / 2, "x".repeat(MAX_BODY / 2));
    let chunks =
        |end: &str| request("POST /body", "Transfer-Encoding: chunked\r\n", &format!("{half}{half}{end}"));
    let query = |len: usize| format!("now?{}", "q".repeat(len - "/now?".len()));
    for (name, request, says) in [
        ("address", get(&query(MAX_ADDRESS), ""), "now"),
        ("fields", get("now", &"A: b\r\n".repeat(98)), "now"),
        ("long field", get("now", &format!("A: {}\r\n", "b".repeat(400_000))), "now"),
        ("body", body(MAX_BODY), "1048576"),
        ("chunks", chunks("0\r\n\r\n"), "1048576"),
        ("body that no route reads", body(8 << 20).replace("/body", "/ignored"), "ignored"),
    ] {
        let response = exchange(served.at, request.as_bytes()).await;
        assert!(response.starts_with("HTTP/1.1 200 ") && response.ends_with(says), "{name}: {response}");
    }
    let address = (414, "max_address_bytes", 65_534);
    let header = (431, "max_header_bytes", 417_792);
    let fields = (431, "max_header_fields", 100);
    let long = (413, "max_body_bytes", 1 << 20);
    for (name, request, (status, limit, value)) in [
        ("address", get(&query(MAX_ADDRESS + 1), ""), address),
        ("long address", get(&query(2 << 20), ""), address),
        ("long field", get("now", &format!("A: {}\r\n", "b".repeat(2 << 20))), header),
        ("long fields", get("now", &format!("A: {}\r\n", "b".repeat(5000)).repeat(98)), header),
        ("fields", get("now", &"A: b\r\n".repeat(99)), fields),
        ("body", body(MAX_BODY + 1), long),
        ("long body", body(32 << 20), long),
        ("chunks", chunks("1\r\nx\r\n0\r\n\r\n"), long),
    ] {
        let response = exchange(served.at, request.as_bytes()).await;
        let (head, body) = response.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{name}: {head}");
        assert!(head.to_lowercase().contains("content-type: application/json"), "{name}: {head}");
        let body: serde_json::Value = serde_json::from_str(body).unwrap();
        assert_eq!((&body["limit"], &body["limit_value"]), (&limit.into(), &value.into()), "{name}");
        let text = body["error_message"].as_str().unwrap();
        assert!(text.contains(&format!("limit={limit} value={value}; ")), "{name}: {text}");
    }
}

#[tokio::test]
async fn a_malformed_request_gets_a_reason() {
    let served = served("test-http-malformed", 8).await;
    let chunked = "Transfer-Encoding: chunked\r\n";
    for (request, reason) in [
        (request("G@T /now", "", ""), "the request line or a header field is malformed"),
        (request("GET /now", "Content-Length: x\r\n", ""), "the request line or a header field is malformed"),
        (request("GET /now", "a b: c\r\n", ""), "the request line or a header field is malformed"),
        ("GET /now HTTP/7.0\r\n\r\n".into(), "the request line or a header field is malformed"),
        (request("POST /body", chunked, "z\r\n"), "the body is malformed or incomplete"),
    ] {
        let response = exchange(served.at, request.as_bytes()).await;
        assert!(response.starts_with("HTTP/1.1 400 Bad Request\r\n"), "{request:?}: {response}");
        assert!(response.contains(&format!("cannot read request: {reason}; ")), "{request:?}: {response}");
        assert!(!response.contains("limit"), "{request:?}: {response}");
    }
}

/// A response before the end of a short body leaves the connection to the next request.
#[tokio::test]
async fn an_unread_body_does_not_end_a_connection() {
    let served = served("test-http-unread", 8).await;
    let mut stream = TcpStream::connect(served.at).await.unwrap();
    for _ in 0..2 {
        stream.write_all(b"POST /ignored HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc").await.unwrap();
        assert!(says(&mut stream, "ignored").await);
        send_get(&mut stream, "/now").await;
        assert!(says(&mut stream, "now").await);
    }
}
