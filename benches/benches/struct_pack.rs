//! Time to encode and decode the RPC messages that carry most of the traffic.

#![allow(clippy::print_stdout)]

use std::borrow::Cow;
use std::hint::black_box;
use std::time::Duration;

use mooncake_core::clock::{Clock, SystemClock};
use mooncake_core::ids::{ClientId, ReplicaId, Uuid};
use mooncake_core::replica::{
    MemoryLocation, Replica, ReplicaList, ReplicaLocation, ReplicaStatus, ReplicateConfig,
};
use mooncake_store::protocol::message::{BatchExistKey, ExistKey, PutStart};
use mooncake_store::protocol::pack::{self, Answer, Pack};

fn main() {
    let quick = std::env::args().any(|arg| arg == "--quick");
    let bench = Bench {
        clock: SystemClock::new(),
        turns: if quick { 3 } else { 15 },
        span_us: if quick { 500 } else { 10_000 },
    };
    println!("{:<24} {:>8} {:>12} {:>12} {:>12}", "message", "bytes", "write ns", "read ns", "memcpy ns");

    let key = b"vllm@model:llama@block:0123456789abcdef".as_slice();
    let exist = ExistKey { key, tenant: "default" };
    bench.row("ExistKey", &exist, |body| _ = black_box(pack::decode::<ExistKey<'_>>(body)));
    bench.row("  its response", &Answer::Ok(true), |body| _ = black_box(pack::decode::<Answer<bool>>(body)));

    let names: Vec<String> = (0..500).map(|i| format!("vllm@model:llama@block:{i:016x}")).collect();
    let keys: Vec<&[u8]> = names.iter().map(String::as_bytes).collect();
    let batch = BatchExistKey { keys: Cow::Borrowed(&keys), tenant: "default" };
    bench.row("BatchExistKey, 500", &batch, |body| _ = black_box(pack::decode::<BatchExistKey<'_>>(body)));
    let answers: Vec<Answer<bool>> = vec![Ok(true); 500];
    bench.row("  its response", &answers, |body| _ = black_box(pack::decode::<Vec<Answer<bool>>>(body)));

    let list: Answer<ReplicaList> = Ok(ReplicaList {
        replicas: vec![replica()],
        lease: Duration::from_secs(10),
        checksum: None,
        resolved_tenant: None,
    });
    bench.row("GetReplicaList, answer", &list, |body| {
        _ = black_box(pack::decode::<Answer<ReplicaList>>(body));
    });
    let lists = vec![list; 500];
    bench.row("  of 500", &lists, |body| _ = black_box(pack::decode::<Vec<Answer<ReplicaList>>>(body)));

    let config = ReplicateConfig { host_id: "10.0.0.17".into(), ..ReplicateConfig::default() };
    let client = ClientId(Uuid::new(1, 2));
    let put = PutStart { client, key, size: 1 << 20, config: Cow::Borrowed(&config), tenant: "default" };
    bench.row("PutStart", &put, |body| _ = black_box(pack::decode::<PutStart<'_>>(body)));
    let granted: Answer<Vec<Replica>> = Ok(vec![replica()]);
    bench.row("  its response", &granted, |body| _ = black_box(pack::decode::<Answer<Vec<Replica>>>(body)));
}

fn replica() -> Replica {
    Replica {
        id: ReplicaId(7),
        location: ReplicaLocation::Memory(MemoryLocation {
            size: 1 << 20,
            address: 0x7f00_0000_0000,
            protocol: "tcp".into(),
            endpoint: "10.0.0.17:15123".into(),
            locality: None,
        }),
        status: ReplicaStatus::Complete,
    }
}

struct Bench {
    clock: SystemClock,
    turns: usize,
    /// Duration of a turn in microseconds.
    span_us: u64,
}

impl Bench {
    /// Prints one line of the table: the message encoded into a reused buffer, decoded, and its
    /// bytes copied.
    fn row<T: Pack>(&self, name: &str, message: &T, read: impl Fn(&[u8])) {
        let mut body = Vec::new();
        pack::encode(message, &mut body);
        let mut out = Vec::with_capacity(body.len());
        let write = self.median_ns(|| {
            out.clear();
            pack::encode(black_box(message), &mut out);
            black_box(&out);
        });
        let read = self.median_ns(|| read(black_box(&body)));
        let copy = self.median_ns(|| {
            out.clear();
            out.extend_from_slice(black_box(&body));
            black_box(&out);
        });
        println!("{name:<24} {:>8} {write:>12.1} {read:>12.1} {copy:>12.1}", body.len());
    }

    /// Returns the nanoseconds of one call, the median of the turns.
    fn median_ns(&self, mut work: impl FnMut()) -> f64 {
        let span = Duration::from_micros(self.span_us);
        let mut times: Vec<f64> = (0..self.turns)
            .map(|_| {
                let start = self.clock.now();
                let mut calls = 0u32;
                loop {
                    for _ in 0..64 {
                        work();
                    }
                    calls += 64;
                    let taken = self.clock.now().since(start);
                    if taken >= span {
                        return taken.as_nanos() as f64 / f64::from(calls);
                    }
                }
            })
            .collect();
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    }
}
