//! Calls of the store in Rust, row by row as `mooncake-python/benches/store.py` requests them, to
//! show the cost that the Python package adds. Run by `cargo xtask bench --python`.
//!
//! `binding_bench MASTER HOST` reads rows as lines of JSON, and responds to each with its
//! measurement.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command line tool prints to its terminal")]

use std::io::BufRead;
use std::process::ExitCode;

use mooncake_benches::peer::Result;
use mooncake_core::Clock;
use mooncake_core::clock::{Moment, SystemClock};
use mooncake_store::client::{Client, PutOptions, RangeRead, ReadInto};
use mooncake_store::transport_set::TransportSet;
use mooncake_transport::{Slice, SliceMut, wait_inline};
use serde_json::{Value, json};
use tokio::runtime::Builder;

/// Maximum bytes of the owner's memory for one row of puts, as in `store.py`.
const MOST: usize = 1 << 30;
/// Number of buffers of a value with many, and bytes of each.
const LAYERS: usize = 61;
const PAGE: usize = 128 << 10;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    let outcome = match arguments.as_slice() {
        [_, master, host] => serve(master, host),
        _ => Err("usage: binding_bench MASTER HOST (see `cargo xtask bench --python`)".into()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("binding_bench: {error}");
            ExitCode::FAILURE
        }
    }
}

fn serve(master: &str, host: &str) -> Result<()> {
    // As many threads as the Python package has.
    let cores = std::thread::available_parallelism().map_or(2, usize::from);
    let runtime = Builder::new_multi_thread()
        .worker_threads(cores.clamp(2, 8))
        .enable_all()
        .build()
        .map_err(|e| e.to_string())?;
    let client = Client::builder().master(master).local_hostname(host).segment(0).local_buffer(512 << 20);
    let client = runtime.block_on(client.connect()).map_err(|e| e.to_string())?;
    println!("=>{}", json!("ready"));
    for line in std::io::stdin().lock().lines() {
        let line = line.map_err(|e| e.to_string())?;
        let row: Row = Row::parse(&serde_json::from_str(&line).map_err(|e| format!("{line}: {e}"))?)?;
        let bench = Bench { client: &client, clock: SystemClock::new(), row: &row };
        let measured = runtime.block_on(wait_inline(bench.measure()))?;
        println!("=>{measured}");
    }
    runtime.block_on(client.close()).map_err(|e| e.to_string())
}

/// Row to measure: a kind of call, bytes of one value, values of one call, and the duration.
struct Row {
    kind: String,
    size: usize,
    count: usize,
    seconds: f64,
    tag: String,
}

impl Row {
    fn parse(value: &Value) -> Result<Self> {
        let number = |name: &str| value[name].as_u64().map(|n| n as usize).ok_or(format!("no {name}"));
        let text = |name: &str| value[name].as_str().map(str::to_owned).ok_or(format!("no {name}"));
        Ok(Self {
            kind: text("kind")?,
            size: number("size")?,
            count: number("count")?,
            seconds: value["seconds"].as_f64().ok_or("no seconds")?,
            tag: text("tag")?,
        })
    }
}

struct Bench<'a> {
    client: &'a Client,
    clock: SystemClock,
    row: &'a Row,
}

/// Times of calls in seconds, until the time of the row has passed or its bytes are written.
struct Times {
    began: Moment,
    each: Vec<f64>,
}

impl Bench<'_> {
    async fn measure(&self) -> Result<Value> {
        let Row { kind, size, count, .. } = self.row;
        let (times, bytes) = match kind.as_str() {
            "put" => (self.puts().await?, *size),
            "get" => (self.gets().await?, *size),
            "put_from" => (self.puts_from().await?, *size),
            "get_into" => (self.gets_into().await?, *size),
            "batch_put_from" => (self.batches_from(*size, 1).await?, size * count),
            "batch_get_into" => (self.batches_into().await?, size * count),
            "multi_put" => (self.batches_from(PAGE, LAYERS).await?, PAGE * LAYERS * count),
            "multi_get" => (self.layers().await?, PAGE * LAYERS * count),
            "ranges" => (self.ranges().await?, size * count),
            other => return Err(format!("unknown kind of row: {other}")),
        };
        let written = kind.contains("put");
        if written {
            self.client.remove_all(true).await.map_err(|e| e.to_string())?;
        }
        let mut each = times.each;
        each.sort_by(f64::total_cmp);
        let total: f64 = each.iter().sum();
        let median = each.get(each.len() / 2).copied().unwrap_or_default();
        Ok(json!({"MB/s": (bytes * each.len()) as f64 / total / 1e6, "us": median * 1e6}))
    }

    fn begin(&self) -> Times {
        Times { began: self.clock.now(), each: Vec::new() }
    }

    /// Returns whether one more call follows, which moves so many bytes.
    fn goes_on(&self, times: &Times, bytes: usize) -> bool {
        let writes = self.row.kind.contains("put");
        let over = self.clock.now().since(times.began).as_secs_f64() > self.row.seconds;
        times.each.is_empty() || !(over || (writes && (times.each.len() + 1) * bytes > MOST))
    }

    fn done(&self, times: &mut Times, before: Moment) {
        times.each.push(self.clock.now().since(before).as_secs_f64());
    }

    fn memory(&self, len: usize) -> Result<SliceMut<TransportSet>> {
        let region = self.client.memory().alloc(len).map_err(|e| e.to_string())?;
        region.exclusive().map_err(|_| "a new region has another handle".into())
    }

    /// Allocates memory in so many pieces.
    fn pieces(&self, count: usize, len: usize) -> Result<Vec<SliceMut<TransportSet>>> {
        let mut rest = self.memory(count * len)?;
        let mut pieces = Vec::with_capacity(count);
        for _ in 1..count {
            let (piece, others) = rest.split_at(len).map_err(|_| "cannot split memory")?;
            pieces.push(piece);
            rest = others;
        }
        pieces.push(rest);
        Ok(pieces)
    }

    async fn puts(&self) -> Result<Times> {
        let (value, mut times) = (vec![7u8; self.row.size], self.begin());
        while self.goes_on(&times, self.row.size) {
            let (key, before) = (format!("{}p{}", self.row.tag, times.each.len()), self.clock.now());
            self.client.put(&key, &value).await.map_err(|e| e.to_string())?;
            self.done(&mut times, before);
        }
        Ok(times)
    }

    async fn gets(&self) -> Result<Times> {
        self.client.put("g", &vec![7u8; self.row.size]).await.map_err(|e| e.to_string())?;
        let mut times = self.begin();
        while self.goes_on(&times, self.row.size) {
            let before = self.clock.now();
            let value = self.client.get("g").await.map_err(|e| e.to_string())?;
            self.done(&mut times, before);
            expect(value.map(|value| value.len()), self.row.size)?;
        }
        self.client.remove("g", true).await.map_err(|e| e.to_string())?;
        Ok(times)
    }

    async fn puts_from(&self) -> Result<Times> {
        let value: Slice<TransportSet> = self.memory(self.row.size)?.into_shared();
        let (config, mut times) = (PutOptions::default(), self.begin());
        while self.goes_on(&times, self.row.size) {
            let (key, before) = (format!("{}q{}", self.row.tag, times.each.len()), self.clock.now());
            self.client.put_with(&key, &value, &config).await.map_err(|e| e.to_string())?;
            self.done(&mut times, before);
        }
        Ok(times)
    }

    async fn gets_into(&self) -> Result<Times> {
        self.client.put("g", &vec![7u8; self.row.size]).await.map_err(|e| e.to_string())?;
        let (mut memory, mut times) = (self.memory(self.row.size)?, self.begin());
        while self.goes_on(&times, self.row.size) {
            let before = self.clock.now();
            let ReadInto { result: read, into: back, .. } = self.client.get_into("g", memory).await;
            self.done(&mut times, before);
            memory = back;
            expect(read.map_err(|e| e.to_string())?, self.row.size)?;
        }
        self.client.remove("g", true).await.map_err(|e| e.to_string())?;
        Ok(times)
    }

    /// Measures puts of values of `pieces` buffers each, all in one call.
    async fn batches_from(&self, size: usize, pieces: usize) -> Result<Times> {
        let count = self.row.count;
        let memory = self.pieces(count * pieces, size)?;
        let memory: Vec<_> = memory.into_iter().map(SliceMut::into_shared).collect();
        let (config, mut times) = (PutOptions::default(), self.begin());
        while self.goes_on(&times, size * pieces * count) {
            let (tag, number) = (&self.row.tag, times.each.len());
            let before = self.clock.now();
            let items: Vec<(String, Vec<_>)> = memory
                .chunks(pieces)
                .enumerate()
                .map(|(k, pieces)| (format!("{tag}b{number}-{k}"), pieces.to_vec()))
                .collect();
            let outcomes = self.client.batch_put(&items, &config).await.map_err(|e| e.to_string())?;
            self.done(&mut times, before);
            outcomes.into_iter().collect::<mooncake_core::Result<Vec<_>>>().map_err(|e| e.to_string())?;
        }
        Ok(times)
    }

    /// Stores the values to read, and returns their keys.
    async fn stored(&self, count: usize, size: usize) -> Result<Vec<String>> {
        let (value, keys) = (vec![7u8; size], (0..count).map(|k| format!("r{k}")).collect::<Vec<_>>());
        for key in &keys {
            self.client.put(key, &value).await.map_err(|e| e.to_string())?;
        }
        Ok(keys)
    }

    async fn forget(&self, keys: &[String]) -> Result<()> {
        self.client.batch_remove(keys, true).await.map(drop).map_err(|e| e.to_string())
    }

    async fn batches_into(&self) -> Result<Times> {
        let (size, count) = (self.row.size, self.row.count);
        let keys = self.stored(count, size).await?;
        let (mut memory, mut times) = (self.pieces(count, size)?, self.begin());
        while self.goes_on(&times, size * count) {
            let before = self.clock.now();
            let batch = self.client.batch_get_into(keys.iter().zip(memory).collect()).await;
            self.done(&mut times, before);
            batch.located.map_err(|e| e.to_string())?;
            memory = Vec::with_capacity(count);
            for read in batch.reads {
                expect(read.result.map_err(|e| e.to_string())?, size)?;
                memory.push(read.into);
            }
        }
        self.forget(&keys).await?;
        Ok(times)
    }

    async fn layers(&self) -> Result<Times> {
        let keys = self.stored(self.row.count, LAYERS * PAGE).await?;
        let plan: Vec<(usize, u64)> = (0..self.row.count)
            .flat_map(|key| (0..LAYERS).map(move |layer| (key, (layer * PAGE) as u64)))
            .collect();
        let times = self.read(&keys, &plan, PAGE).await?;
        self.forget(&keys).await?;
        Ok(times)
    }

    async fn ranges(&self) -> Result<Times> {
        let (size, count) = (self.row.size, self.row.count);
        let keys = self.stored(1, 4 * size * count).await?;
        let plan: Vec<(usize, u64)> = (0..count).map(|n| (0, (4 * n * size) as u64)).collect();
        let times = self.read(&keys, &plan, size).await?;
        self.forget(&keys).await?;
        Ok(times)
    }

    /// Measures reads of ranges of that many bytes, each of one key from one byte on.
    async fn read(&self, keys: &[String], plan: &[(usize, u64)], len: usize) -> Result<Times> {
        let (mut memory, mut times) = (self.pieces(plan.len(), len)?, self.begin());
        while self.goes_on(&times, len * plan.len()) {
            let before = self.clock.now();
            let located = self.client.ranges().locate(keys).await.map_err(|e| e.to_string())?;
            let located: Vec<_> = located
                .into_iter()
                .map(|one| one.map_err(|e| e.to_string())?.ok_or_else(|| "key not found".to_owned()))
                .collect::<Result<_>>()?;
            let reads = memory.into_iter().zip(plan).map(|(into, (key, offset))| RangeRead {
                object: located[*key].clone(),
                offset: *offset,
                into,
            });
            let read = self.client.ranges().read(reads.collect()).await;
            self.done(&mut times, before);
            memory = Vec::with_capacity(plan.len());
            for range in read {
                range.result.map_err(|e| e.to_string())?;
                memory.push(range.into);
            }
        }
        Ok(times)
    }
}

fn expect(len: Option<usize>, size: usize) -> Result<()> {
    if len == Some(size) { Ok(()) } else { Err(format!("wrong length: {len:?} instead of {size} bytes")) }
}
