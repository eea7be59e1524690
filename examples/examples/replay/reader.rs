//! Trace files: recognition of their format, and their requests in the order of time.

use std::collections::HashMap;
use std::fmt;
use std::path::Path;

use crate::args::TraceOptions;
use crate::lines::Lines;
use crate::row::{Prompt, RowFields, TimeUnit, TraceFormat, TraceRow};
use crate::sessions::{
    Arrival, LaterTurns, RowError, TextBlocks, TurnBlocks, join_turns, sessions_of, set_times,
};
use crate::trace::{PAUSE_MS, Request, TokenRun, Trace};

/// Maximum numbers of requests and of blocks that they list, so that a small compressed file does
/// not fill the memory.
const MAX_REQUESTS: usize = 1 << 24;
const MAX_BLOCKS: usize = 1 << 26;

/// Bytes of text that are taken for one token.
const TOKEN_BYTES: u64 = 4;

/// Trace of a file, and the meaning that its rows were given.
#[derive(Clone, Debug)]
pub(crate) struct TraceFile {
    pub(crate) trace: Trace,
    pub(crate) format: TraceFormat,
    is_format_given: bool,
    unit: TimeUnit,
    has_times: bool,
    pub(crate) notes: Vec<String>,
}

impl TraceFile {
    /// Reads a file with one JSON object per line.
    ///
    /// # Errors
    ///
    /// If the file cannot be read or decompressed, if a line is malformed, or if lines differ in
    /// their format. The error states the line.
    pub(crate) fn read(path: &Path, options: &TraceOptions) -> Result<Self, String> {
        read_rows(path, options).map_err(|RowError { line, reason }| {
            let (reason, cure) = reason.split_once("; ").unwrap_or((reason.as_str(), ""));
            let line = line.map_or(String::new(), |line| format!("line={line} "));
            let separator = if cure.is_empty() { "" } else { "; " };
            format!("cannot read trace: {reason}. {line}path=\"{}\"{separator}{cure}", path.display())
        })
    }
}

fn read_rows(path: &Path, options: &TraceOptions) -> Result<TraceFile, RowError> {
    let lines = Lines::open(path).map_err(|e| RowError { line: None, reason: e.to_string() })?;
    let mut reader = Reader::new(options);
    for (number, line) in lines {
        let line = line.map_err(|reason| RowError::at(number, reason))?;
        if !line.trim().is_empty() {
            reader.push(number, &line).map_err(|reason| RowError::at(number, reason))?;
        }
    }
    reader.finish()
}

impl fmt::Display for TraceFile {
    /// Writes the first lines of a report.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let by = if self.is_format_given { "as --format says" } else { "recognised by its fields" };
        writeln!(f, "{:<22} {}, {by}", "format", self.format)?;
        match self.has_times {
            true => writeln!(f, "{:<22} {}", "time unit", self.unit)?,
            false => writeln!(f, "{:<22} none: requests {PAUSE_MS} ms apart", "time unit")?,
        }
        match self.trace.block_tokens {
            Some(tokens) => writeln!(f, "{:<22} {tokens}", "tokens per block")?,
            None => writeln!(f, "{:<22} unknown; set --block-tokens", "tokens per block")?,
        }
        self.notes.iter().try_for_each(|note| writeln!(f, "{note}"))
    }
}

/// Requests of a file, so far.
struct Reader<'o> {
    options: &'o TraceOptions,
    /// Format of the first line, and its number.
    format: Option<(TraceFormat, usize)>,
    arrivals: Vec<Arrival>,
    /// Number of blocks that the requests list.
    blocks: usize,
    has_texts: bool,
    has_fractions: bool,
    without_tokens: usize,
    /// Number of requests whose tokens do not fit their blocks.
    odd_lengths: usize,
    texts: HashMap<String, (TextBlocks, f64)>,
}

impl<'o> Reader<'o> {
    fn new(options: &'o TraceOptions) -> Self {
        Self {
            options,
            format: None,
            arrivals: Vec::new(),
            blocks: 0,
            has_texts: false,
            has_fractions: false,
            without_tokens: 0,
            odd_lengths: 0,
            texts: HashMap::new(),
        }
    }

    fn unit(&self, format: TraceFormat) -> TimeUnit {
        self.options.time_unit.unwrap_or(format.time_unit())
    }

    fn block_tokens(&self, format: TraceFormat) -> Option<u64> {
        self.options.block_tokens.map(u64::from).or(format.block_tokens())
    }

    /// Adds the request of a line.
    fn push(&mut self, line: usize, text: &str) -> Result<(), String> {
        let mut fields = RowFields::parse(text)?;
        let of_line = self.options.format.unwrap_or_else(|| fields.format());
        let (format, first_line) = *self.format.get_or_insert((of_line, line));
        if of_line != format {
            return Err(format!(
                "the line is of format {of_line}, but line {first_line} is of format {format}; \
                 split the file, or set --format"
            ));
        }
        let row = fields.read(format, self.unit(format), &self.options.field)?;
        let has_text = matches!(row.prompt, Prompt::Text(_));
        if self.arrivals.is_empty() {
            self.has_texts = has_text;
        } else if has_text != self.has_texts {
            return Err(format!("some lines list blocks and others have texts, as line {first_line} shows"));
        }
        let has_time = |arrival: &Arrival| arrival.time_ms.is_some();
        if format != TraceFormat::Sessions
            && self.arrivals.first().is_some_and(|first| has_time(first) != row.time_ms.is_some())
        {
            return Err(format!(
                "some lines have a `timestamp` and others do not, as line {first_line} shows"
            ));
        }
        self.has_fractions |= row.time_ms.is_some_and(|ms| ms.fract() != 0.0);
        self.add(format, line, row)
    }

    fn add(&mut self, format: TraceFormat, line: usize, row: TraceRow) -> Result<(), String> {
        let block_tokens = self.block_tokens(format);
        let mut inputs = Vec::new();
        let ids = match row.prompt {
            Prompt::Text(text) => {
                let bytes = block_tokens.unwrap_or(1).saturating_mul(TOKEN_BYTES) as usize;
                match row.session.clone().filter(|_| self.options.turns != Some(TurnBlocks::All)) {
                    None => TextBlocks::default().extend(&text, bytes),
                    Some(session) => {
                        let (blocks, last_ms) = self.texts.entry(session).or_default();
                        let time_ms = row.time_ms.unwrap_or(*last_ms);
                        if time_ms < *last_ms {
                            return Err(
                                "a turn with a text is earlier than the one before in its session".into()
                            );
                        }
                        *last_ms = time_ms;
                        blocks.extend(&text, bytes)
                    }
                }
            }
            Prompt::Blocks(ids) => {
                match (row.input_tokens, block_tokens) {
                    (Some(tokens), Some(block_tokens)) => {
                        self.odd_lengths += usize::from(tokens.div_ceil(block_tokens) != ids.len() as u64);
                        inputs.push(TokenRun { blocks: ids.len(), tokens });
                    }
                    _ => self.without_tokens += 1,
                }
                ids
            }
        };
        self.blocks += ids.len();
        if self.arrivals.len() == MAX_REQUESTS || self.blocks > MAX_BLOCKS {
            return Err(format!("the file has more than {MAX_REQUESTS} requests or {MAX_BLOCKS} blocks"));
        }
        let (time_ms, delay_ms, session) = (row.time_ms, row.delay_ms, row.session);
        self.arrivals.push(Arrival { line, time_ms, delay_ms, session, ids, inputs });
        Ok(())
    }

    fn finish(mut self) -> Result<TraceFile, RowError> {
        let Some((format, _)) = self.format else {
            return Err(RowError { line: None, reason: "it has no requests".into() });
        };
        let mut notes = Vec::new();
        let mut has_times = self.arrivals.iter().any(|arrival| arrival.time_ms.is_some());
        if format == TraceFormat::Sessions {
            has_times |= self.arrivals.iter().any(|arrival| arrival.delay_ms.is_some());
            self.resolve_sessions(&mut notes)?;
        }
        let unit = self.unit(format);
        let is_known = self.options.time_unit.is_some() || format == TraceFormat::QwenBailian;
        if !is_known && self.has_fractions && format != TraceFormat::Sessions {
            notes.push("note: times have fractions of a ms; set --time-unit s if they are seconds".into());
        }
        if self.has_texts {
            let tokens = self.block_tokens(format).unwrap_or(1);
            notes.push(format!(
                "note: texts are cut every {} bytes instead of {tokens} tokens; with a tokenizer, ratios differ",
                tokens.saturating_mul(TOKEN_BYTES)
            ));
        }
        let has_tokens = self.without_tokens == 0 && !self.has_texts;
        if !has_tokens && self.without_tokens < self.arrivals.len() && !self.has_texts {
            notes.push(format!(
                "note: {} requests have no `input_length`, so there are no ratios by tokens",
                self.without_tokens
            ));
        }
        if self.odd_lengths > 0 {
            notes.push(format!(
                "note: {} of {} requests list another number of blocks than `input_length` \
                 needs; check --block-tokens",
                self.odd_lengths,
                self.arrivals.len()
            ));
        }
        let block_tokens = self.block_tokens(format);
        let requests = in_order(self.arrivals, has_tokens, &mut notes);
        let trace = Trace { requests, block_tokens };
        let (ambiguous, distinct) = trace.count_predecessors();
        if ambiguous > 0 {
            notes.push(format!(
                "note: {ambiguous} of {distinct} ids follow different ids. An id must stand \
                 for its block and all before: a hash of the block alone overstates hit ratios"
            ));
        }
        let is_format_given = self.options.format.is_some();
        Ok(TraceFile { trace, format, is_format_given, unit, has_times, notes })
    }

    /// Gives the turns of sessions their times, and joins them if they list only new blocks.
    fn resolve_sessions(&mut self, notes: &mut Vec<String>) -> Result<(), RowError> {
        let sessions = sessions_of(&self.arrivals);
        let has_delays = self.arrivals.iter().any(|turn| turn.time_ms.is_none() && turn.delay_ms.is_some());
        if !set_times(&mut self.arrivals, &sessions)? {
            notes.push(format!(
                "note: the sessions have no start times; {} sessions start {PAUSE_MS} ms apart",
                sessions.len()
            ));
        }
        if has_delays {
            notes
                .push("note: a `delay` counts from the turn before, without the time of its response".into());
        }
        if self.has_texts {
            if self.options.turns.is_none() && sessions.iter().any(|turns| turns.len() > 1) {
                notes.push(
                    "warning: the text of a turn is taken for what it adds to the turn before; set \
                     --turns new or --turns all"
                        .into(),
                );
            }
            return Ok(());
        }
        let later = LaterTurns::of(&self.arrivals, &sessions);
        let turns = self.options.turns.unwrap_or(later.likely());
        if self.options.turns.is_none() && later.all > 0 {
            let meaning = match turns {
                TurnBlocks::New => "only new blocks, and are joined (--turns new)",
                TurnBlocks::All => "all blocks of the prompt (--turns all)",
            };
            notes.push(format!(
                "warning: {} of {} later turns begin with the first block of the turn before, so \
                 turns are taken to list {meaning}; set --turns",
                later.repeating, later.all
            ));
        }
        match turns {
            TurnBlocks::New => join_turns(&mut self.arrivals, &sessions, MAX_BLOCKS),
            TurnBlocks::All => Ok(()),
        }
    }
}

/// Returns the requests by time, which begins with the earliest one.
fn in_order(mut arrivals: Vec<Arrival>, has_tokens: bool, notes: &mut Vec<String>) -> Vec<Request> {
    for (index, arrival) in arrivals.iter_mut().enumerate() {
        arrival.time_ms.get_or_insert((index as u64 * PAUSE_MS) as f64);
    }
    let time = |arrival: &Arrival| arrival.time_ms.unwrap_or_default();
    let late = arrivals.windows(2).filter(|pair| time(&pair[1]) < time(&pair[0])).count();
    if late > 0 {
        notes.push(format!(
            "note: {late} lines are earlier than the line before; requests are sorted by time"
        ));
    }
    arrivals.sort_by(|a, b| time(a).total_cmp(&time(b)));
    let first = arrivals.first().map_or(0.0, time);
    let request = |arrival: Arrival| Request {
        timestamp: (time(&arrival) - first).round() as u64,
        ids: arrival.ids,
        inputs: if has_tokens { arrival.inputs } else { Vec::new() },
    };
    arrivals.into_iter().map(request).collect()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use clap::Parser;

    use super::*;
    use crate::args::Args;

    fn options(words: &str) -> TraceOptions {
        let words = ["replay", "--trace", "FILE"].into_iter().chain(words.split_whitespace());
        Args::try_parse_from(words).unwrap().trace_options
    }

    fn read_bytes(bytes: &[u8], words: &str) -> Result<TraceFile, String> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        let name = file.path().display().to_string();
        TraceFile::read(file.path(), &options(words)).map_err(|error| error.replace(&name, "PATH"))
    }

    fn read(lines: &[&str], words: &str) -> TraceFile {
        read_bytes(lines.join("\n").as_bytes(), words).unwrap()
    }

    fn times_and_ids(file: &TraceFile) -> Vec<(u64, Vec<u64>)> {
        file.trace.requests.iter().map(|request| (request.timestamp, request.ids.clone())).collect()
    }

    #[test]
    fn lines_are_requests() {
        let fast25 = [
            r#"{"timestamp": 1700000000000, "input_length": 1100, "output_length": 3, "hash_ids": [0, 7, 9]}"#,
            "",
            "{\"timestamp\": 1700000000027, \"input_length\": 0, \"hash_ids\": []}\r",
        ];
        let file = read(&fast25, "");
        assert_eq!(times_and_ids(&file), [(0, vec![0, 7, 9]), (27, vec![])]);
        assert_eq!((file.trace.input_tokens(), file.trace.found_tokens(0, 2)), (1100, 1024));
        let head = "format                 fast25, recognised by its fields\ntime unit              ms\n\
                    tokens per block       512\n";
        assert_eq!(file.to_string(), head);

        let texts = read(&[r#"{"blocks": ["a", "b"]}"#, r#"{"blocks": ["a"]}"#], "--field blocks");
        let requests = times_and_ids(&texts);
        assert_eq!((requests[1].0, requests[1].1[0] == requests[0].1[0]), (PAUSE_MS, true));
        let head = "format                 blocks, recognised by its fields\n\
                    time unit              none: requests 294 ms apart\n\
                    tokens per block       unknown; set --block-tokens\n";
        assert_eq!(texts.to_string(), head);
    }

    #[test]
    fn seconds_and_blocks_of_16_tokens_are_recognised() {
        let rows = [
            r#"{"chat_id": 7, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 20, "output_length": 1,
                "type": "text", "turn": 1, "hash_ids": [5, 6]}"#,
            r#"{"chat_id": 9, "parent_chat_id": 7, "timestamp": 7261.115, "input_length": 33, "output_length": 1,
                "type": "text", "turn": 2, "hash_ids": [5, 6, 8]}"#,
        ]
        .map(|row| row.replace('\n', " "));
        let rows = [&rows[0][..], &rows[1][..]];
        let file = read(&rows, "");
        assert_eq!(times_and_ids(&file), [(0, vec![5, 6]), (7_200_001, vec![5, 6, 8])], "two hours");
        assert!(
            file.to_string().contains("qwen-bailian, recognised by its fields\ntime unit              s\n")
        );
        assert_eq!((file.trace.block_tokens, &file.notes[..]), (Some(16), &[][..]));
        // Options go before the fields.
        let forced = read(&rows, "--format fast25 --time-unit s --block-tokens 32");
        assert_eq!((times_and_ids(&forced), forced.trace.block_tokens), (times_and_ids(&file), Some(32)));
        assert!(forced.to_string().starts_with("format                 fast25, as --format says\n"));
        let note = "note: 2 of 2 requests list another number of blocks than `input_length` needs; check --block-tokens";
        assert_eq!(forced.notes, [note]);
        let ms = read(&rows, "--format fast25 --block-tokens 16");
        assert_eq!(times_and_ids(&ms)[1].0, 7200);
        let note = "note: times have fractions of a ms; set --time-unit s if they are seconds";
        assert_eq!(ms.notes, [note]);
    }

    #[test]
    fn requests_are_sorted_by_time() {
        let rows = [
            r#"{"timestamp": 30, "hash_ids": [3]}"#,
            r#"{"timestamp": 10, "hash_ids": [1]}"#,
            r#"{"timestamp": 30, "hash_ids": [4]}"#,
            r#"{"timestamp": 20, "hash_ids": [2, 3]}"#,
        ];
        let file = read(&rows, "");
        assert_eq!(times_and_ids(&file), [(0, vec![1]), (10, vec![2, 3]), (20, vec![3]), (20, vec![4])]);
        let notes = [
            "note: 2 lines are earlier than the line before; requests are sorted by time",
            "note: 1 of 4 ids follow different ids. An id must stand for its block and all before: a hash of \
             the block alone overstates hit ratios",
        ];
        assert_eq!(file.notes, notes);
    }

    #[test]
    fn turns_of_sessions_are_joined_or_not() {
        let new = [
            r#"{"session_id": "a", "timestamp": 100, "input_length": 600, "hash_ids": [1, 2]}"#,
            r#"{"session_id": "b", "timestamp": 150, "input_length": 512, "hash_ids": [1]}"#,
            r#"{"session_id": "a", "delay": 70.4, "input_length": 90, "hash_ids": [3]}"#,
            r#"{"session_id": "b", "delay": 5, "input_length": 512, "hash_ids": [4]}"#,
        ];
        let file = read(&new, "");
        let joined = [(0, vec![1, 2]), (50, vec![1]), (55, vec![1, 4]), (70, vec![1, 2, 3])];
        assert_eq!(times_and_ids(&file), joined);
        assert_eq!(file.trace.found_tokens(3, 3), 690);
        let delay = "note: a `delay` counts from the turn before, without the time of its response";
        let warning = "warning: 0 of 2 later turns begin with the first block of the turn before, so turns are taken \
                       to list only new blocks, and are joined (--turns new); set --turns";
        let sorted = "note: 1 lines are earlier than the line before; requests are sorted by time";
        assert_eq!(file.notes, [delay, warning, sorted]);
        assert_eq!(read(&new, "--turns new").notes, [delay, sorted]);
        let apart = [(0, vec![1, 2]), (50, vec![1]), (55, vec![4]), (70, vec![3])];
        assert_eq!(times_and_ids(&read(&new, "--turns all")), apart);

        let all = [
            r#"{"session_id": 1, "hash_ids": [1, 2], "delay": null}"#,
            r#"{"session_id": 2, "hash_ids": [1], "delay": 0}"#,
            r#"{"session_id": 1, "hash_ids": [1, 2, 3], "delay": 70}"#,
        ];
        let file = read(&all, "");
        assert_eq!(times_and_ids(&file), [(0, vec![1, 2]), (70, vec![1, 2, 3]), (PAUSE_MS, vec![1])]);
        let warning = "warning: 1 of 1 later turns begin with the first block of the turn before, so turns are taken \
                       to list all blocks of the prompt (--turns all); set --turns";
        let starts = "note: the sessions have no start times; 2 sessions start 294 ms apart";
        assert_eq!(file.notes, [starts, delay, warning, sorted]);
        let text = file.to_string();
        assert!(text.starts_with(
            "format                 sessions, recognised by its fields\ntime unit              ms\n"
        ));
        assert_eq!(text.lines().count(), 3 + file.notes.len());
    }

    #[test]
    fn texts_are_cut_into_blocks() {
        let rows = [
            r#"{"session_id": "a", "timestamp": 0, "text_input": "abcdefghij"}"#,
            r#"{"session_id": "b", "timestamp": 1, "text_input": "abcdefghXY"}"#,
            r#"{"session_id": "a", "delay": 50, "text_input": "klmn"}"#,
        ];
        let chains = |words: &str| {
            let file = read(&rows, words);
            let chains: Vec<Vec<u64>> = file.trace.chains().map(<[u64]>::to_vec).collect();
            (chains, file.notes)
        };
        // A token is four bytes.
        let (joined, notes) = chains("--block-tokens 1");
        assert_eq!(joined.iter().map(Vec::len).collect::<Vec<_>>(), [3, 3, 4]);
        assert_eq!((&joined[0][..2], &joined[1][..2]), (&joined[2][..2], &joined[2][..2]));
        assert!(joined[0][2] != joined[1][2] && joined[0][2] != joined[2][2]);
        assert!(notes[1].starts_with("warning: the text of a turn is taken for what it adds"), "{notes:?}");
        assert!(notes[2].starts_with("note: texts are cut every 4 bytes instead of 1 tokens"), "{notes:?}");
        let (apart, notes) = chains("--block-tokens 1 --turns all");
        assert_eq!((apart[2].len(), notes.len()), (1, 2));
    }

    #[test]
    fn an_error_states_the_file_and_the_line() {
        let fast25 = r#"{"timestamp": 1, "input_length": 5, "hash_ids": [1]}"#;
        let qwen = r#"{"chat_id": 1, "turn": 1, "timestamp": 1.5, "hash_ids": [1]}"#;
        let turn = r#"{"session_id": "a", "hash_ids": [1]}"#;
        for (lines, words, reason) in [
            (vec!["", " "], "", "it has no requests. path=\"PATH\""),
            (
                vec![fast25, "", "{"],
                "",
                "invalid JSON at column 1: EOF while parsing an object. line=3 path=\"PATH\"",
            ),
            (vec![r#"{"id": [1]}"#], "", "no list of blocks in `hash_ids`. line=1 path=\"PATH\""),
            (
                vec![fast25, r#"{"timestamp": 1e30, "input_length": 5, "hash_ids": [1]}"#],
                "",
                "`timestamp` is not a time from 0 to 1e14 ms. line=2 path=\"PATH\"",
            ),
            (
                vec![fast25, qwen],
                "",
                "the line is of format qwen-bailian, but line 1 is of format fast25. line=2 path=\"PATH\"; split the \
                 file, or set --format",
            ),
            (
                vec![turn, fast25],
                "",
                "the line is of format fast25, but line 1 is of format sessions. line=2 path=\"PATH\"; split the \
                 file, or set --format",
            ),
            (
                vec![r#"{"hash_ids": [1]}"#, r#"{"hash_ids": [1], "timestamp": 5}"#],
                "",
                "some lines have a `timestamp` and others do not, as line 1 shows. line=2 path=\"PATH\"",
            ),
            (
                vec![turn, r#"{"session_id": "b", "text_input": "x"}"#],
                "",
                "some lines list blocks and others have texts, as line 1 shows. line=2 path=\"PATH\"",
            ),
            (
                vec![turn, fast25],
                "--format sessions",
                "some sessions have a `timestamp` in their first turn and others do not. line=2 path=\"PATH\"",
            ),
            (
                vec![
                    r#"{"session_id": "a", "timestamp": 5, "text_input": "x"}"#,
                    r#"{"session_id": "a", "timestamp": 4, "text_input": "x"}"#,
                ],
                "",
                "a turn with a text is earlier than the one before in its session. line=2 path=\"PATH\"",
            ),
        ] {
            let error = read_bytes(lines.join("\n").as_bytes(), words).unwrap_err();
            assert_eq!(error, format!("cannot read trace: {reason}"));
        }
        let error = read_bytes(b"", "").unwrap_err();
        assert_eq!(error, "cannot read trace: it has no requests. path=\"PATH\"");
        let error = read_bytes(b"{\"hash_ids\": []}\n\xff\n", "").unwrap_err();
        assert_eq!(error, "cannot read trace: a line is not valid UTF-8. line=2 path=\"PATH\"");
        let gzip = [0x1f, 0x8b, 8, 0];
        let error = read_bytes(&gzip, "").unwrap_err();
        assert!(
            error.starts_with("cannot read trace: ") && error.ends_with(". line=1 path=\"PATH\""),
            "{error}"
        );
        let missing = TraceFile::read(Path::new("/does/not/exist"), &options("")).unwrap_err();
        let expected = "cannot read trace: No such file or directory (os error 2). path=\"/does/not/exist\"";
        assert_eq!(missing, expected);
    }

    #[test]
    fn incomplete_lengths_give_no_token_ratios() {
        let rows = [
            r#"{"timestamp": 1, "input_length": 5, "hash_ids": [1]}"#,
            r#"{"timestamp": 2, "output_length": 5, "hash_ids": [1]}"#,
        ];
        let file = read(&rows, "");
        assert_eq!(file.trace.shares_of(1, 5).tokens, None);
        let note = "note: 1 requests have no `input_length`, so there are no ratios by tokens";
        assert_eq!(file.notes, [note]);
    }

    #[test]
    fn rows_of_any_bytes_end_without_a_panic() {
        let seeds = [
            &br#"{"timestamp": 1, "input_length": 5, "hash_ids": [1, 2]}"#[..],
            br#"{"chat_id": 1, "turn": 1, "timestamp": 1.5, "hash_ids": [1]}"#,
            br#"{"session_id": "a", "delay": 5e3, "text_input": "x y"}"#,
        ];
        let mut rng = mooncake_core::clock::Rng::seeded(11);
        for round in 0..3000 {
            let mut line = seeds[round % seeds.len()].to_vec();
            for _ in 0..1 + rng.below(3) {
                let at = rng.below(line.len() as u64) as usize;
                match rng.below(3) {
                    0 => line[at] = rng.below(256) as u8,
                    1 => line.truncate(at.max(1)),
                    _ => line.insert(at, b"0123456789eE-+.\"[]{}"[rng.below(20) as usize]),
                }
            }
            let text = String::from_utf8_lossy(&line);
            let options = options("");
            let mut reader = Reader::new(&options);
            if reader.push(1, &text).is_ok() && reader.push(2, &text).is_ok() {
                let requests = reader.finish().map_or(2, |file| file.trace.requests.len());
                assert_eq!(requests, 2);
            }
        }
    }
}
