//! Tests that one load in the shapes of all formats is read as the same trace.

use std::collections::{BTreeMap, HashMap};
use std::io::Write;

use clap::Parser;
use mooncake_core::clock::Rng;
use mooncake_core::evict::Lru;
use mooncake_core::testkit::simulate::{Calls, PolicyCache};
use serde_json::{Value, json};

use crate::args::Args;
use crate::reader::TraceFile;
use crate::trace::{HitRatios, Trace};

const REQUESTS: usize = 2000;
const SIZES: [usize; 4] = [50, 300, 1000, 4000];

/// Turn of a conversation.
struct Turn {
    time_ms: u64,
    conversation: usize,
    /// All blocks, and the number of those that the turn adds.
    ids: Vec<u64>,
    added: usize,
    /// Tokens in the last block.
    last_tokens: u64,
}

/// Generates turns in the order of time. Conversations share one of four first blocks.
fn turns(seed: u64) -> Vec<Turn> {
    let mut rng = Rng::seeded(seed);
    let (mut time_ms, mut fresh) = (0, 4);
    let mut conversations: Vec<Vec<u64>> = Vec::new();
    let mut turns = Vec::new();
    for _ in 0..REQUESTS {
        time_ms += 1 + rng.below(3000);
        let recent = conversations.len().min(200) as u64;
        let conversation = if recent > 0 && rng.below(100) < 60 {
            conversations.len() - 1 - rng.below(recent) as usize
        } else {
            conversations.push(Vec::new());
            conversations.len() - 1
        };
        let chain = &mut conversations[conversation];
        let before = chain.len();
        if before == 0 {
            chain.push(rng.below(4));
        }
        let growth = 1 + rng.below(9);
        chain.extend(fresh..fresh + growth);
        fresh += growth;
        let (ids, added) = (chain.clone(), chain.len() - before);
        turns.push(Turn { time_ms, conversation, ids, added, last_tokens: 1 + rng.below(16) });
    }
    turns
}

/// Reads rows as a file with the arguments of a replay.
fn read(rows: &[Value], words: &str, encode: fn(&[u8]) -> Vec<u8>) -> TraceFile {
    let text: String = rows.iter().map(|row| format!("{row}\n")).collect();
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&encode(text.as_bytes())).unwrap();
    let words = ["replay", "--trace", "FILE"].into_iter().chain(words.split_whitespace());
    let options = Args::try_parse_from(words).unwrap().trace_options;
    TraceFile::read(file.path(), &options).unwrap()
}

fn plain(bytes: &[u8]) -> Vec<u8> {
    bytes.to_vec()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zstandard(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 1).unwrap()
}

/// Puts rows into a random order.
fn shuffle(rows: &mut [Value], seed: u64) {
    let mut rng = Rng::seeded(seed);
    for last in (1..rows.len()).rev() {
        rows.swap(last, rng.below(last as u64 + 1) as usize);
    }
}

/// Exact LRU, which shares no code with the policies. Returns the number of blocks that each
/// request finds.
fn exact_lru(turns: &[Turn], capacity: usize) -> Vec<usize> {
    let mut last_use: HashMap<u64, u64> = HashMap::new();
    let mut by_use: BTreeMap<u64, u64> = BTreeMap::new();
    let mut now = 0;
    let mut request = |ids: &[u64]| {
        let found = ids.iter().take_while(|id| last_use.contains_key(id)).count();
        for id in ids {
            now += 1;
            if let Some(before) = last_use.insert(*id, now) {
                by_use.remove(&before);
            }
            by_use.insert(now, *id);
            if by_use.len() > capacity {
                let (_, oldest) = by_use.pop_first().unwrap();
                last_use.remove(&oldest);
            }
        }
        found
    };
    turns.iter().map(|turn| request(&turn.ids)).collect()
}

/// Returns the ratios of exact LRU, with the tokens of a turn and those in so many blocks of it.
fn expected(turns: &[Turn], capacity: usize, tokens: impl Fn(usize, usize) -> u64) -> HitRatios {
    let found = exact_lru(turns, capacity);
    let blocks: usize = turns.iter().map(|turn| turn.ids.len()).sum();
    let found_tokens: u64 = found.iter().enumerate().map(|(turn, found)| tokens(turn, *found)).sum();
    let all_tokens: u64 = turns.iter().enumerate().map(|(index, turn)| tokens(index, turn.ids.len())).sum();
    HitRatios {
        blocks: found.iter().sum::<usize>() as f64 / blocks as f64,
        tokens: Some(found_tokens as f64 / all_tokens as f64),
    }
}

fn lru(trace: &Trace, capacity: usize) -> HitRatios {
    let calls = Calls { deepest_oldest: false, ..Calls::default() };
    trace.hit_ratios(&mut PolicyCache::<Lru>::new(&Default::default(), capacity, 1, calls))
}

fn check(turns: &[Turn], file: &TraceFile, tokens: impl Fn(usize, usize) -> u64) {
    let first = turns[0].time_ms;
    for (turn, request) in turns.iter().zip(&file.trace.requests) {
        assert_eq!((turn.time_ms - first, &turn.ids), (request.timestamp, &request.ids), "{}", file.format);
    }
    assert_eq!(file.trace.requests.len(), REQUESTS);
    for capacity in SIZES {
        assert_eq!(
            lru(&file.trace, capacity),
            expected(turns, capacity, &tokens),
            "{} {capacity}",
            file.format
        );
    }
}

/// Returns the tokens in the first blocks of a turn whose blocks but the last one are full.
fn full_but_last(turns: &[Turn], block_tokens: u64) -> impl Fn(usize, usize) -> u64 {
    move |turn, found| {
        let turn = &turns[turn];
        let full = found.min(turn.ids.len() - 1) as u64 * block_tokens;
        full + if found == turn.ids.len() { turn.last_tokens } else { 0 }
    }
}

#[test]
fn all_shapes_give_the_ratios_of_exact_lru() {
    let seed = 1;
    let turns = turns(seed);
    let input = |blocks: usize, turn: &Turn, block: u64| (blocks as u64 - 1) * block + turn.last_tokens;
    let fast25 = |turn: &Turn| {
        json!({"timestamp": turn.time_ms, "input_length": input(turn.ids.len(), turn, 512),
               "output_length": 9, "hash_ids": turn.ids})
    };
    let mut rows: Vec<Value> = turns.iter().map(fast25).collect();
    let file = read(&rows, "", plain);
    check(&turns, &file, full_but_last(&turns, 512));
    assert_eq!(file.notes, [""; 0]);
    shuffle(&mut rows, seed);
    check(&turns, &read(&rows, "", zstandard), full_but_last(&turns, 512));

    let qwen = |(index, turn): (usize, &Turn)| {
        json!({"chat_id": index, "parent_chat_id": -1, "timestamp": turn.time_ms as f64 / 1000.0,
               "input_length": input(turn.ids.len(), turn, 16), "output_length": 9, "type": "text",
               "turn": 1, "hash_ids": turn.ids})
    };
    let mut rows: Vec<Value> = turns.iter().enumerate().map(qwen).collect();
    shuffle(&mut rows, seed);
    check(&turns, &read(&rows, "", gzip), full_but_last(&turns, 16));

    check_sessions(&turns);
}

/// Checks files of sessions with new blocks and with all blocks, one session after the other.
fn check_sessions(turns: &[Turn]) {
    let mut sessions: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for (index, turn) in turns.iter().enumerate() {
        sessions.entry(turn.conversation).or_default().push(index);
    }
    let (mut new, mut all) = (Vec::new(), Vec::new());
    // Tokens of each block in the joined prompt: the last one of every turn is not full.
    let mut block_tokens: Vec<Vec<u64>> = vec![Vec::new(); turns.len()];
    for (session, indices) in &sessions {
        let mut before: Option<usize> = None;
        for index in indices {
            let turn = &turns[*index];
            let added = &turn.ids[turn.ids.len() - turn.added..];
            let row = |ids: &[u64]| {
                let tokens = (ids.len() as u64 - 1) * 512 + turn.last_tokens;
                let mut row = json!({"session_id": format!("s{session}"), "hash_ids": ids,
                                     "input_length": tokens, "output_length": 9});
                match before {
                    None => row["timestamp"] = turn.time_ms.into(),
                    Some(before) => row["delay"] = (turn.time_ms - turns[before].time_ms).into(),
                }
                row
            };
            new.push(row(added));
            all.push(row(&turn.ids));
            let mut tokens = before.map_or_else(Vec::new, |before| block_tokens[before].clone());
            tokens.extend(vec![512; turn.added - 1]);
            tokens.push(turn.last_tokens);
            block_tokens[*index] = tokens;
            before = Some(*index);
        }
    }
    let joined = |turn: usize, found: usize| block_tokens[turn][..found].iter().sum::<u64>();
    for words in ["", "--turns new", "--turns new --format sessions"] {
        check(turns, &read(&new, words, plain), joined);
    }
    for words in ["", "--turns all"] {
        check(turns, &read(&all, words, plain), full_but_last(turns, 512));
    }
    // Row by row, the turns of new blocks share little.
    let apart = read(&new, "--turns all", plain);
    assert!(2.0 * lru(&apart.trace, 4000).blocks < lru(&read(&new, "", plain).trace, 4000).blocks);
}
