//! Limits of the machine: the same chunk over a plain blocking socket to another process, and
//! memcpy.
//!
//! A put is header and chunk out, eight bytes back; a get is a header out, eight bytes and the
//! chunk back. Both sides use as much memory as the store does, so that caches help neither more.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};

use mooncake_benches::peer::Result;
use mooncake_core::Clock;
use mooncake_core::clock::SystemClock;

use crate::child::first_line;
use crate::table::Cell;

const HEADER: usize = 24;
const ACK: usize = 8;
const PUT: u64 = 1;
/// Bytes of memory that the server's chunks rotate through.
const POOL: usize = 128 << 20;
/// Bytes that the client side holds.
pub(crate) const FOOTPRINT: u64 = (POOL + (16 << 20)) as u64;

/// Runs the server process, which serves one connection until it closes.
pub(crate) fn serve() -> Result<()> {
    let text = |e: std::io::Error| e.to_string();
    let listener = TcpListener::bind(("127.0.0.1", 0)).map_err(text)?;
    println!("{}", listener.local_addr().map_err(text)?);
    let (mut stream, _) = listener.accept().map_err(text)?;
    stream.set_nodelay(true).map_err(text)?;
    let mut pool = vec![1u8; POOL];
    let (mut header, mut at) = ([0u8; HEADER], 0);
    // The end of the connection ends the process.
    while stream.read_exact(&mut header).is_ok() {
        let word = |i: usize| u64::from_le_bytes(header[i..i + 8].try_into().unwrap_or_default());
        let (direction, size) = (word(0), word(8) as usize);
        if at + size > POOL {
            at = 0;
        }
        let chunk = &mut pool[at..at + size];
        at += size;
        if direction == PUT {
            stream.read_exact(chunk).map_err(text)?;
            stream.write_all(&[0; ACK]).map_err(text)?;
        } else {
            stream.write_all(&[0; ACK]).map_err(text)?;
            stream.write_all(chunk).map_err(text)?;
        }
    }
    Ok(())
}

/// Client side.
pub(crate) struct Raw {
    stream: TcpStream,
    buffer: Vec<u8>,
    other: Vec<u8>,
    clock: SystemClock,
    server: Child,
}

impl Raw {
    /// Starts the server process and connects to it, for values of at most `largest` bytes.
    pub(crate) fn start(largest: usize) -> Result<Self> {
        let text = |e: std::io::Error| e.to_string();
        let mut command = Command::new(std::env::current_exe().map_err(text)?);
        let mut server = command.args(["--role", "raw"]).stdout(Stdio::piped()).spawn().map_err(text)?;
        let address = first_line(&mut server)?;
        let stream = TcpStream::connect(address).map_err(text)?;
        stream.set_nodelay(true).map_err(text)?;
        Ok(Self {
            stream,
            buffer: vec![2; largest + HEADER],
            other: vec![3; POOL],
            clock: SystemClock::new(),
            server,
        })
    }

    /// Returns the times of `count` exchanges in microseconds.
    pub(crate) fn times(&mut self, cell: Cell, count: usize) -> Result<Vec<f64>> {
        let (put, size) = match cell {
            Cell::Put(size) => (true, size),
            Cell::Get(size) => (false, size),
            // A request and a response of the same length as those of the store.
            Cell::Exist => (false, 1),
            Cell::BatchExist(keys) => (true, keys * 16),
        };
        (0..count).map(|_| self.exchange(put, size)).collect()
    }

    fn exchange(&mut self, put: bool, size: usize) -> Result<f64> {
        let text = |e: std::io::Error| e.to_string();
        let before = self.clock.now();
        self.buffer[..8].copy_from_slice(&u64::from(put).to_le_bytes());
        self.buffer[8..16].copy_from_slice(&(size as u64).to_le_bytes());
        let mut ack = [0; ACK];
        if put {
            self.stream.write_all(&self.buffer[..HEADER + size]).map_err(text)?;
            self.stream.read_exact(&mut ack).map_err(text)?;
        } else {
            self.stream.write_all(&self.buffer[..HEADER]).map_err(text)?;
            self.stream.read_exact(&mut ack).map_err(text)?;
            self.stream.read_exact(&mut self.buffer[HEADER..HEADER + size]).map_err(text)?;
        }
        Ok(self.clock.now().since(before).as_secs_f64() * 1e6)
    }

    /// Returns the times of `count` copies in microseconds.
    pub(crate) fn memcpy(&mut self, size: usize, count: usize) -> Vec<f64> {
        let mut at = 0;
        let mut one = || {
            if at + size > POOL {
                at = 0;
            }
            let before = self.clock.now();
            self.other[at..at + size].copy_from_slice(std::hint::black_box(&self.buffer[..size]));
            std::hint::black_box(&self.other);
            at += size;
            self.clock.now().since(before).as_secs_f64() * 1e6
        };
        (0..count).map(|_| one()).collect()
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}
