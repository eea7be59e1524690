//! Fake JSON gateway of etcd, which names one leader.

use std::io::{Read, Write};
use std::net::TcpListener;

/// Starts the fake. Returns its address.
pub(crate) fn start(leader: &str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap().to_string();
    let value = base64(leader.as_bytes());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (Ok(mut stream), value) = (stream, value.clone()) else { return };
            std::thread::spawn(move || {
                let mut asked = Vec::new();
                let mut some = [0; 4096];
                while let Ok(n @ 1..) = stream.read(&mut some) {
                    asked.extend_from_slice(&some[..n]);
                    let text = String::from_utf8_lossy(&asked).into_owned();
                    let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
                    let length = head.to_ascii_lowercase();
                    let length = length
                        .lines()
                        .find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok());
                    if body.len() < length.unwrap_or(0) {
                        continue;
                    }
                    let status = if head.contains("/v3/kv/range") { "200 OK" } else { "501 Not Implemented" };
                    let page = format!(
                        "{{\"header\":{{\"revision\":\"1\"}},\"kvs\":[{{\"key\":\"\",\"value\":\"{value}\",\"mod_revision\":\"1\",\
                         \"create_revision\":\"1\",\"version\":\"1\"}}],\"count\":\"1\"}}"
                    );
                    let answer = format!(
                        "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{page}",
                        page.len()
                    );
                    let _ = stream.write_all(answer.as_bytes());
                    asked.clear();
                }
            });
        }
    });
    at
}

fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for three in bytes.chunks(3) {
        let bits =
            three.iter().fold(0u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - three.len()));
        for at in 0..4 {
            let letter = LETTERS[(bits >> (18 - 6 * at)) as usize & 63] as char;
            text.push(if at <= three.len() { letter } else { '=' });
        }
    }
    text
}
