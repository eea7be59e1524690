//! Reference rates of the machine: the same blocks over blocking sockets through loopback, and
//! memcpy.
//!
//! Both ends use as much memory as the engine does. A batch of writes is a header and a block per
//! request, and eight bytes back at the end. A batch of reads is a header per request, and a block
//! back for each.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use mooncake_core::clock::SystemClock;
use mooncake_core::{Error, Result};

use super::arguments::Operation;
use super::report::Row;

const HEADER: usize = 24;
const ACK: usize = 8;
/// Length of a block, blocks per batch, number of threads, and duration of each measurement.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) block: u64,
    pub(super) batch: u64,
    pub(super) threads: u64,
    pub(super) span: Duration,
}

pub(super) fn rows(shape: Shape, operation: Operation) -> Result<Vec<Row>> {
    Ok(vec![sockets(shape, operation)?, copies(shape)?])
}

fn sockets(shape: Shape, operation: Operation) -> Result<Row> {
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let at = listener.local_addr()?;
    measure("raw sockets", shape, move |_| {
        let stream = TcpStream::connect(at)?;
        let (served, _) = listener.accept()?;
        stream.set_nodelay(true)?;
        served.set_nodelay(true)?;
        let frame = HEADER + usize::try_from(shape.block).unwrap_or(0);
        let frames = usize::try_from(shape.batch).unwrap_or(0);
        // The thread ends when the other end closes.
        std::thread::spawn(move || serve(served, vec![2u8; frame * frames], frame, operation));
        let (mut stream, mut memory) = (stream, vec![1u8; frame * frames]);
        Ok(move || exchange(&mut stream, &mut memory, frame, operation))
    })
}

fn exchange(
    stream: &mut TcpStream,
    memory: &mut [u8],
    frame: usize,
    operation: Operation,
) -> std::io::Result<()> {
    match operation {
        Operation::Write => {
            memory.chunks_exact(frame).try_for_each(|frame| stream.write_all(frame))?;
            stream.read_exact(&mut memory[..ACK])
        }
        Operation::Read => {
            stream.write_all(&memory[..HEADER])?;
            memory.chunks_exact_mut(frame).try_for_each(|frame| stream.read_exact(&mut frame[HEADER..]))
        }
    }
}

fn serve(
    mut stream: TcpStream,
    mut memory: Vec<u8>,
    frame: usize,
    operation: Operation,
) -> std::io::Result<()> {
    loop {
        match operation {
            Operation::Write => {
                memory.chunks_exact_mut(frame).try_for_each(|frame| stream.read_exact(frame))?;
                stream.write_all(&[0; ACK])?;
            }
            Operation::Read => {
                stream.read_exact(&mut memory[..HEADER])?;
                memory.chunks_exact(frame).try_for_each(|frame| stream.write_all(&frame[HEADER..]))?;
            }
        }
    }
}

fn copies(shape: Shape) -> Result<Row> {
    measure("memcpy", shape, |_| {
        let len = usize::try_from(shape.block * shape.batch).unwrap_or(usize::MAX);
        let (from, mut to) = (vec![1u8; len], vec![0u8; len]);
        let block = usize::try_from(shape.block).unwrap_or(usize::MAX);
        Ok(move || {
            for (to, from) in to.chunks_mut(block).zip(from.chunks(block)) {
                to.copy_from_slice(std::hint::black_box(from));
            }
            std::hint::black_box(&to);
            Ok(())
        })
    })
}

/// Runs the result of `make` in each thread, batch after batch.
fn measure<W>(
    what: &'static str,
    Shape { block, batch, threads, span }: Shape,
    make: impl Fn(u64) -> std::io::Result<W>,
) -> Result<Row>
where
    W: FnMut() -> std::io::Result<()> + Send + 'static,
{
    let clock = SystemClock::shared();
    let work = (0..threads).map(make).collect::<std::io::Result<Vec<W>>>()?;
    let start = clock.now();
    let until = start.after(span);
    let running: Vec<_> = work
        .into_iter()
        .map(|mut one| {
            let clock = clock.clone();
            std::thread::spawn(move || -> std::io::Result<Vec<Duration>> {
                let (mut times, mut before) = (Vec::new(), clock.now());
                while before < until {
                    one()?;
                    let now = clock.now();
                    times.push(now.since(before));
                    before = now;
                }
                Ok(times)
            })
        })
        .collect();
    let mut batches = Vec::new();
    for thread in running {
        batches.extend(thread.join().map_err(|_| Error::internal("a reference measurement panicked"))??);
    }
    let bytes = block * batch * batches.len() as u64;
    Ok(Row { what, bytes, time: clock.now().since(start), batches })
}
