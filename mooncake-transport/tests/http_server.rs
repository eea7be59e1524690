//! HTTP connections of a listener: turns of requests, and bytes of responses.
#![cfg(all(feature = "http-server", not(miri)))]

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::routing::get;
use axum::{Extension, Router};
use mooncake_core::clock::SystemClock;
use mooncake_core::fork::ParentOnly;
use mooncake_core::web_origin::AllowedHosts;
use mooncake_transport::admission::{ByteBudget, ListenerLimits};
use mooncake_transport::http_server::{Turns, http_limits, serve};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;

const SOON: Duration = Duration::from_secs(20);
/// Length of the parts of a long response, and their number.
const PART: usize = 64 << 10;
const PARTS: usize = 512;

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
        .route("/long", get(long));
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
