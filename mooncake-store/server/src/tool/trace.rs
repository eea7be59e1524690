//! `mooncake trace record`: writes what clients look up as a trace that `replay` reads.

use std::collections::{HashMap, VecDeque};
use std::fs::OpenOptions;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt as _;

use mooncake_core::host_port;
use mooncake_core::{Error, ErrorCode, Result};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Value, json};

use super::args::{Trace, TraceRecord};
use super::interrupt::Interrupt;
use super::session::Session;
use super::subscriber::Subscriber;

/// Port of events without `--events`.
const PORT: u16 = 5557;

pub(super) fn run(session: &Session, task: &Trace) -> Result<()> {
    let Trace::Record(args) = task;
    session.runtime.block_on(record(session, args))
}

async fn record(session: &Session, args: &TraceRecord) -> Result<()> {
    let mut interrupt = Interrupt::new()?;
    let address = match &args.events {
        Some(address) => address.strip_prefix("tcp://").unwrap_or(address).to_owned(),
        None => {
            let leader = session.leader()?;
            host_port::join(host_port::split(leader).0, PORT)
        }
    };
    let mut subscriber = Subscriber::connect(&address, session.to.timeout).await?;
    let mut output: Box<dyn Write> = match &args.output {
        Some(path) => {
            let file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path);
            let file = file.map_err(|error| {
                Error::invalid(format!("cannot write trace: {error}. file={}", path.display()))
                    .with_source(error)
            })?;
            Box::new(std::io::BufWriter::new(file))
        }
        None => Box::new(std::io::stdout()),
    };
    let mut recorder = Recorder::new(args);
    eprintln!("recording look-ups from {address}; end with Ctrl-C");
    let outcome = loop {
        let next = tokio::select! {
            next = subscriber.next() => next,
            () = interrupt.wait() => break Ok(()),
        };
        let (number, payload) = match next {
            Ok(message) => message,
            Err(error) => break Err(error),
        };
        for row in recorder.rows_of(number, &payload)? {
            writeln!(output, "{row}").map_err(Error::from)?;
        }
        output.flush().map_err(Error::from)?;
        if args.requests.is_some_and(|most| recorder.requests >= most) {
            break Ok(());
        }
    };
    eprintln!("{}", recorder.summary());
    outcome
}

/// Message of events: its time, the events, and a number that is not used.
#[derive(Deserialize)]
struct Message(IgnoredAny, Vec<Event>, IgnoredAny);

/// Fields that a trace needs. Events about objects have other ones, too.
#[derive(Deserialize)]
struct Event {
    event_type: String,
    /// Wall clock of the master in milliseconds.
    timestamp: u64,
    #[serde(default)]
    block_ids: Vec<u64>,
}

/// Makes the rows of a trace from events.
struct Recorder {
    block_tokens: u64,
    /// Maximum number of rows.
    most: u64,
    /// Time in which equal look-ups count as one request, in milliseconds.
    window_ms: u64,
    /// Time of the first row, in milliseconds.
    begun: Option<u64>,
    /// Time and digest of the last look-ups.
    recent: VecDeque<(u64, u64)>,
    /// Time of the last look-up with each digest in `recent`.
    last: HashMap<u64, u64>,
    next_number: Option<u64>,
    requests: u64,
    blocks: u64,
    repeated: u64,
    lost: u64,
}

impl Recorder {
    fn new(args: &TraceRecord) -> Self {
        Self {
            block_tokens: args.block_tokens,
            most: args.requests.unwrap_or(u64::MAX),
            window_ms: u64::try_from(args.repeat_window.as_millis()).unwrap_or(u64::MAX),
            begun: None,
            recent: VecDeque::new(),
            last: HashMap::new(),
            next_number: None,
            requests: 0,
            blocks: 0,
            repeated: 0,
            lost: 0,
        }
    }

    /// Returns the rows for the look-ups of a message.
    fn rows_of(&mut self, number: u64, payload: &[u8]) -> Result<Vec<Value>> {
        self.lost += self.next_number.map_or(0, |wanted| number.saturating_sub(wanted));
        self.next_number = Some(number.saturating_add(1));
        let message: Message = rmp_serde::from_slice(payload).map_err(|error| {
            Error::new(ErrorCode::RpcFail, format!("cannot read events: {error}")).with_source(error)
        })?;
        Ok(message.1.iter().filter_map(|event| self.row_of(event)).collect())
    }

    fn row_of(&mut self, event: &Event) -> Option<Value> {
        let (now, ids) = (event.timestamp, &event.block_ids);
        if event.event_type != "looked_up" || ids.is_empty() || self.requests >= self.most {
            return None;
        }
        if self.is_repeated(now, ids) {
            self.repeated += 1;
            return None;
        }
        let begun = *self.begun.get_or_insert(now);
        self.requests += 1;
        self.blocks += ids.len() as u64;
        Some(json!({
            "timestamp": now.saturating_sub(begun),
            "input_length": (ids.len() as u64).saturating_mul(self.block_tokens),
            "output_length": 0,
            "hash_ids": ids,
        }))
    }

    /// Records a look-up. Returns whether an equal one is in the window before it.
    fn is_repeated(&mut self, now: u64, ids: &[u64]) -> bool {
        let mut hasher = DefaultHasher::new();
        ids.hash(&mut hasher);
        let digest = hasher.finish();
        while let Some(&(at, old)) = self.recent.front()
            && at.saturating_add(self.window_ms) < now
        {
            self.recent.pop_front();
            // A later look-up with this digest stays.
            if self.last.get(&old) == Some(&at) {
                self.last.remove(&old);
            }
        }
        self.recent.push_back((now, digest));
        self.last.insert(digest, now).is_some()
    }

    fn summary(&self) -> String {
        let mut text = format!("requests: {}, blocks: {}", self.requests, self.blocks);
        if self.repeated > 0 {
            text += &format!(", repeated look-ups left out: {}", self.repeated);
        }
        if self.lost > 0 {
            text += &format!(", lost messages: {}", self.lost);
        }
        if self.requests == 0 {
            text += "; look-ups need a master with --kv_events_emit_look_ups=true";
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn recorder() -> Recorder {
        let window = Duration::from_secs(1);
        Recorder::new(&TraceRecord {
            events: None,
            output: None,
            block_tokens: 16,
            requests: None,
            repeat_window: window,
        })
    }

    fn message(events: &[Value]) -> Vec<u8> {
        rmp_serde::to_vec(&json!([0, events, 0])).unwrap()
    }

    fn look_up(at: u64, blocks: &[u64]) -> Value {
        json!({"event_type": "looked_up", "timestamp": at, "tenant_id": "t", "block_ids": blocks})
    }

    #[test]
    fn look_ups_become_rows() {
        let mut recorder = recorder();
        let stored = json!({"event_type": "stored", "timestamp": 5001, "seq_hashes": [7], "group_id": null});
        let events = [look_up(5000, &[7, 8]), stored, look_up(5500, &[7, u64::MAX]), look_up(5501, &[])];
        let rows = recorder.rows_of(1, &message(&events)).unwrap();
        let wanted = [
            json!({"timestamp": 0, "input_length": 32, "output_length": 0, "hash_ids": [7, 8]}),
            json!({"timestamp": 500, "input_length": 32, "output_length": 0, "hash_ids": [7, u64::MAX]}),
        ];
        assert_eq!(rows, wanted);
        assert_eq!((recorder.requests, recorder.blocks), (2, 4));
    }

    #[test]
    fn equal_look_ups_within_the_window_are_one_request() {
        let mut recorder = recorder();
        let events = [0, 500, 1400, 2500].map(|at| look_up(at, &[1]));
        let rows = recorder.rows_of(1, &message(&events)).unwrap();
        let times: Vec<_> = rows.iter().map(|row| row["timestamp"].as_u64().unwrap()).collect();
        assert_eq!((times, recorder.repeated), (vec![0, 2500], 2));
    }

    #[test]
    fn lost_messages_are_counted_and_invalid_ones_refused() {
        let mut recorder = recorder();
        for number in [1, 2, 5] {
            recorder.rows_of(number, &message(&[])).unwrap();
        }
        assert_eq!(recorder.lost, 2);
        assert!(recorder.summary().contains("lost messages: 2"));
        assert!(recorder.summary().contains("--kv_events_emit_look_ups"));
        for payload in [&b""[..], &[0xc1], &[0x90], &[0x93, 0, 0xdd, 0xff, 0xff, 0xff, 0xff]] {
            recorder.rows_of(6, payload).unwrap_err();
        }
    }
}
