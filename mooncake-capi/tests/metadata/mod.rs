//! HTTP metadata server for tests: keys and values in memory.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

type Entries = Arc<Mutex<BTreeMap<String, Vec<u8>>>>;

/// Server that runs until the test program ends.
pub(crate) struct MetadataServer {
    port: u16,
    entries: Entries,
}

impl MetadataServer {
    pub(crate) fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let entries = Entries::default();
        let served = entries.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let entries = served.clone();
                std::thread::spawn(move || serve(&stream, &entries));
            }
        });
        Self { port, entries }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}/metadata", self.port)
    }

    /// Returns the names of the published segments.
    pub(crate) fn segments(&self) -> Vec<String> {
        let entries = self.entries.lock().unwrap();
        entries.keys().filter_map(|key| key.strip_prefix("mooncake/ram/").map(str::to_owned)).collect()
    }
}

/// Answers one request.
fn serve(mut stream: &TcpStream, entries: &Entries) -> Option<()> {
    let mut reader = BufReader::new(stream);
    let mut first = String::new();
    reader.read_line(&mut first).ok()?;
    let mut length = 0;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let (name, value) = line.trim().split_once(':').unwrap_or_default();
        match name.to_ascii_lowercase().as_str() {
            "" => break,
            "content-length" => length = value.trim().parse().ok()?,
            _ => {}
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    let mut words = first.split_whitespace();
    let (method, target) = (words.next()?, words.next()?);
    let key = target.split_once("key=")?.1.replace("%2F", "/");
    let mut entries = entries.lock().unwrap();
    let found = match method {
        "PUT" => entries.insert(key, body).map_or(Some(vec![]), |_| Some(vec![])),
        "DELETE" => entries.remove(&key).map(|_| vec![]),
        _ => entries.get(&key).cloned(),
    };
    let status = if found.is_some() { "200 OK" } else { "404 Not Found" };
    let body = found.unwrap_or_default();
    let head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
    stream.write_all(head.as_bytes()).ok()?;
    stream.write_all(&body).ok()
}
