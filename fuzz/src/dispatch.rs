//! RPC dispatch with a live master behind it: a sequence of calls that the input encodes.

use std::sync::Arc;
use std::time::Duration;

use mooncake_core::clock::ManualClock;
use mooncake_store::master::{DiskOptions, HotOptions, Master, MasterOptions, PromotionOptions, TenantQuota};
use mooncake_store::protocol::message::{ADDED, EARLIER, Shape, TABLE};
use mooncake_store::protocol::server::Service;
use mooncake_store::protocol::service::MasterService;
use mooncake_store::protocol::type_signature::TypeSignature;

/// Maximum number of calls of one input.
const CALLS: usize = 64;

/// Makes calls of any number with any body, with well-formed arguments, and with slightly malformed
/// ones. Each call must be refused, or get a response of the type in the table, and the statistics
/// of the master must stay consistent.
pub fn rpc_dispatch(data: &[u8]) {
    let mut input = Input(data);
    let switches = input.byte();
    let (tenants, disks, hot) = (switches % 4 == 0, switches & 4 != 0, switches & 8 != 0);
    let quota = |name: &str| TenantQuota { name: name.into(), bytes: 1 << 22 };
    let options = MasterOptions {
        shards: 2,
        tenants: tenants.then(|| vec![quota("default"), quota("a")]),
        disks: disks.then(|| DiskOptions {
            on_evict: switches & 16 != 0,
            promotion: (switches & 32 != 0).then(PromotionOptions::default),
            ..DiskOptions::default()
        }),
        hot: hot.then(|| HotOptions { enforce: true, ..HotOptions::default() }),
        ..MasterOptions::default()
    };
    let clock = Arc::new(ManualClock::new());
    let master: mooncake_core::Result<Master> =
        Master::with_parts(options, &Default::default(), &Default::default(), clock.clone(), 1);
    let Ok(master) = master.map(Arc::new) else { panic!("these options are consistent") };
    let service = MasterService(master.clone());
    let shapes: Vec<&Shape> = TABLE.iter().chain(EARLIER).chain(ADDED).collect();
    for _ in 0..CALLS {
        if input.0.is_empty() {
            break;
        }
        let (how, which) = (input.byte(), input.byte());
        let shape = shapes[usize::from(which) % shapes.len()];
        let mut function = shape.function;
        let mut body = Vec::new();
        match how % 8 {
            0 => body = input.some().to_vec(),
            1 => {
                function = u32::from_le_bytes(std::array::from_fn(|_| input.byte()));
                body = input.some().to_vec();
            }
            2 => {
                arguments(shape, &mut input, &mut body);
                spoil(&mut body, &mut input);
            }
            3 => {
                clock.advance(Duration::from_millis(10 << (input.byte() % 17)));
                master.tick();
                continue;
            }
            4 => {
                arguments(shape, &mut input, &mut body);
                add_members(shape, &mut body, &mut input);
            }
            _ => arguments(shape, &mut input, &mut body),
        }
        let mut out = Vec::new();
        if service.call(function, &body, &mut out).is_ok() {
            let answer = shapes.iter().find(|shape| shape.function == function);
            let again = answer.map(|shape| shape.rewrite_reply(&out, false));
            assert_eq!(
                again,
                Some(Ok(out)),
                "the response of {} differs from its type in the table",
                shape.name
            );
        }
    }
    let stats = master.stats();
    assert!(stats.objects <= stats.keys && stats.resting() <= stats.used());
    assert!(stats.segments.iter().all(|segment| segment.used <= segment.segment.size));
    master.remove_all(true);
    clock.advance(Duration::from_secs(3600));
    master.tick();
    master.remove_all(true);
    assert_eq!(master.stats().used(), 0, "all allocated space is free again");
}

/// Words shared by calls, so that they refer to the objects and segments of each other.
const WORDS: [&str; 12] =
    ["k", "k1", "key/2", "default", "a", "node1:1", "node2:1", "tcp", "10.0.0.1:1", "^k", "(", ""];
const NUMBERS: [u64; 12] = [0, 1, 2, 3, 4, 64, 100, 4096, 1 << 20, 1 << 40, 1 << 63, u64::MAX];

/// Encodes well-formed arguments of a call, chosen by the input.
fn arguments(shape: &Shape, input: &mut Input<'_>, body: &mut Vec<u8>) {
    if shape.arguments.is_empty() {
        return;
    }
    body.extend_from_slice(&TypeSignature::new(shape.arguments).hash().to_le_bytes());
    let mut spelling = shape.arguments;
    value(&mut spelling, input, &mut Some(body));
}

/// Appends a value of the first type of the spelling, and removes that type. Without a body, it
/// only removes the type.
fn value(spelling: &mut &[u8], input: &mut Input<'_>, body: &mut Option<&mut Vec<u8>>) {
    let [symbol, rest @ ..] = *spelling else { return };
    *spelling = rest;
    let width = match symbol {
        1 | 2 | 17 => 4,
        3 | 4 | 18 => 8,
        5 | 6 | 11 | 12 => 1,
        7 | 8 => 2,
        128 => {
            *spelling = &spelling[1..];
            if let Some(body) = body {
                let word = WORDS[usize::from(input.byte()) % WORDS.len()];
                body.push(word.len() as u8);
                body.extend_from_slice(word.as_bytes());
            }
            return;
        }
        132 | 133 => return several(*symbol == 132, spelling, input, body),
        253 => {
            while let [next, ..] = *spelling {
                match next {
                    255 => {
                        *spelling = &spelling[1..];
                        return;
                    }
                    // The number behind this byte is aligned.
                    6 if spelling.get(2) == Some(&137) => {
                        value(spelling, input, body);
                        body.iter_mut().for_each(|body| body.extend_from_slice(&[0; 7]));
                    }
                    // Skips the alignment.
                    137..250 => *spelling = &spelling[1..],
                    _ => value(spelling, input, body),
                }
            }
            return;
        }
        other => panic!("unknown type symbol {other}"),
    };
    if let Some(body) = body {
        let number = NUMBERS[usize::from(input.byte()) % NUMBERS.len()];
        // Kinds and flags have few values.
        let number = if width == 4 {
            number % 8
        } else if width == 1 {
            number % 3
        } else {
            number
        };
        body.extend_from_slice(&number.to_le_bytes()[..width]);
    }
}

fn several(list: bool, spelling: &mut &[u8], input: &mut Input<'_>, body: &mut Option<&mut Vec<u8>>) {
    let inner = *spelling;
    let count = match body {
        Some(body) => {
            let count = input.byte() % if list { 4 } else { 2 };
            body.push(count);
            count
        }
        None => 0,
    };
    for _ in 0..count {
        value(&mut &*inner, input, body);
    }
    value(spelling, input, &mut None);
}

/// Appends bytes as compatible fields, as Mooncake C++ does: with the type signature and a total
/// length, which may be wrong.
fn add_members(shape: &Shape, body: &mut Vec<u8>, input: &mut Input<'_>) {
    if body.is_empty() {
        return;
    }
    let wrong = usize::from(input.byte()) % 4;
    body.extend_from_slice(input.some());
    body[0] |= 1;
    let total = body.len() + shape.arguments.len() + 4 - wrong;
    let mut head = vec![5];
    head.extend_from_slice(&(total as u16).to_le_bytes());
    head.extend_from_slice(shape.arguments);
    head.push(0);
    body.splice(4..4, head);
}

/// Cuts a body, flips one of its bits, or appends to it.
fn spoil(body: &mut Vec<u8>, input: &mut Input<'_>) {
    let at = usize::from(input.byte()).min(body.len().saturating_sub(1));
    match input.byte() % 3 {
        0 => body.truncate(at),
        1 if !body.is_empty() => body[at] ^= 1 << (input.byte() % 8),
        _ => body.extend_from_slice(input.some()),
    }
}

/// Rest of an input; zeros after its end.
struct Input<'d>(&'d [u8]);

impl<'d> Input<'d> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    /// Returns up to 255 bytes; the next byte is their number.
    fn some(&mut self) -> &'d [u8] {
        let count = usize::from(self.byte()).min(self.0.len());
        let (some, rest) = self.0.split_at(count);
        self.0 = rest;
        some
    }
}
