//! Rows of a trace file, and the formats that their fields show.

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};

use clap::ValueEnum;
use serde_json::{Map, Value};

/// Format of a trace file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum TraceFormat {
    /// Traces of the FAST'25 paper on Mooncake.
    Fast25,
    /// Alibaba's `qwen-bailian` traces.
    QwenBailian,
    /// Turns of sessions: `mooncake_trace` rows of aiperf and of Dynamo's generator.
    Sessions,
    /// Other rows that list blocks.
    Blocks,
}

impl TraceFormat {
    /// Recognises the format of a row by its fields.
    fn of(row: &Map<String, Value>) -> Self {
        let has = |name| row.get(name).is_some_and(|value| !value.is_null());
        if has("chat_id") && (has("parent_chat_id") || has("turn")) {
            Self::QwenBailian
        } else if ["session_id", "delay", "text_input"].into_iter().any(has) {
            Self::Sessions
        } else if has("timestamp") && (has("input_length") || has("output_length")) {
            Self::Fast25
        } else {
            Self::Blocks
        }
    }

    pub(crate) fn time_unit(self) -> TimeUnit {
        match self {
            Self::QwenBailian => TimeUnit::Seconds,
            Self::Fast25 | Self::Sessions | Self::Blocks => TimeUnit::Milliseconds,
        }
    }

    /// Returns the tokens of a block, if the format says so.
    pub(crate) fn block_tokens(self) -> Option<u64> {
        match self {
            Self::Fast25 | Self::Sessions => Some(512),
            Self::QwenBailian => Some(16),
            Self::Blocks => None,
        }
    }
}

impl fmt::Display for TraceFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fast25 => "fast25",
            Self::QwenBailian => "qwen-bailian",
            Self::Sessions => "sessions",
            Self::Blocks => "blocks",
        })
    }
}

/// Unit of the times in a trace file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum TimeUnit {
    #[value(name = "ms")]
    Milliseconds,
    #[value(name = "s")]
    Seconds,
}

impl TimeUnit {
    fn in_ms(self) -> f64 {
        match self {
            Self::Milliseconds => 1.0,
            Self::Seconds => 1000.0,
        }
    }
}

impl fmt::Display for TimeUnit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Milliseconds => "ms",
            Self::Seconds => "s",
        })
    }
}

/// Maximum time in milliseconds: 3,170 years, so that times since 1970 fit in both units.
pub(crate) const MAX_TIME_MS: f64 = 1e14;

/// Maximum number of tokens of a request. The sum over all requests of a file fits 64 bits.
const MAX_TOKENS: u64 = 1 << 36;

/// Prompt of a request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Prompt {
    /// Id of each block.
    Blocks(Vec<u64>),
    Text(String),
}

/// Request as a line of a file has it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TraceRow {
    /// Milliseconds since any origin.
    pub(crate) time_ms: Option<f64>,
    /// Milliseconds since the turn before.
    pub(crate) delay_ms: Option<f64>,
    pub(crate) session: Option<String>,
    pub(crate) prompt: Prompt,
    /// Number of tokens of the prompt.
    pub(crate) input_tokens: Option<u64>,
}

/// Fields of one line.
pub(crate) struct RowFields(Map<String, Value>);

impl RowFields {
    /// Parses a line. The error is a reason without the line.
    pub(crate) fn parse(line: &str) -> Result<Self, String> {
        let value: Value = serde_json::from_str(line).map_err(|e| {
            let text = e.to_string();
            let reason = text.split(" at line ").next().unwrap_or_default();
            format!("invalid JSON at column {}: {reason}", e.column())
        })?;
        match value {
            Value::Object(fields) => Ok(Self(fields)),
            _ => Err("the line is not a JSON object".into()),
        }
    }

    pub(crate) fn format(&self) -> TraceFormat {
        TraceFormat::of(&self.0)
    }

    /// Reads the fields that a format has. `field` lists the blocks.
    pub(crate) fn read(
        &mut self,
        format: TraceFormat,
        unit: TimeUnit,
        field: &str,
    ) -> Result<TraceRow, String> {
        let is_session = format == TraceFormat::Sessions;
        let has_text = is_session && self.value(field).is_none();
        let prompt = match self.0.get_mut("text_input") {
            Some(Value::String(text)) if has_text => Prompt::Text(std::mem::take(text)),
            _ => Prompt::Blocks(self.blocks(field)?),
        };
        Ok(TraceRow {
            time_ms: self.time("timestamp", unit)?,
            delay_ms: if is_session { self.time("delay", unit)? } else { None },
            session: if is_session { self.session()? } else { None },
            prompt,
            input_tokens: self.tokens()?,
        })
    }

    /// Returns a field, unless it is absent or null.
    fn value(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    fn blocks(&self, field: &str) -> Result<Vec<u64>, String> {
        let blocks = self.value(field).and_then(Value::as_array);
        let blocks = blocks.ok_or_else(|| format!("no list of blocks in `{field}`"))?;
        let ids: Option<Vec<u64>> = blocks.iter().map(block_id).collect();
        ids.ok_or_else(|| format!("a block in `{field}` is neither a whole number nor a text"))
    }

    fn time(&self, name: &str, unit: TimeUnit) -> Result<Option<f64>, String> {
        let Some(value) = self.value(name) else { return Ok(None) };
        let time = value.as_f64().map(|time| time * unit.in_ms());
        match time.filter(|ms| (0.0..=MAX_TIME_MS).contains(ms)) {
            Some(ms) => Ok(Some(ms)),
            None => Err(format!("`{name}` is not a time from 0 to {:e} {unit}", MAX_TIME_MS / unit.in_ms())),
        }
    }

    fn session(&self) -> Result<Option<String>, String> {
        match self.value("session_id") {
            None => Ok(None),
            Some(Value::String(name)) => Ok(Some(name.clone())),
            Some(Value::Number(number)) => Ok(Some(number.to_string())),
            Some(_) => Err("`session_id` is neither a text nor a number".into()),
        }
    }

    fn tokens(&self) -> Result<Option<u64>, String> {
        let Some(value) = self.value("input_length") else { return Ok(None) };
        match value.as_u64().filter(|tokens| *tokens <= MAX_TOKENS) {
            Some(tokens) => Ok(Some(tokens)),
            None => Err("`input_length` is not a whole number of tokens".into()),
        }
    }
}

fn block_id(block: &Value) -> Option<u64> {
    match block {
        Value::String(text) => {
            let mut hasher = DefaultHasher::new();
            text.hash(&mut hasher);
            Some(hasher.finish())
        }
        number => number.as_u64().or_else(|| number.as_i64().map(i64::cast_unsigned)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> Result<(TraceFormat, TraceRow), String> {
        let mut fields = RowFields::parse(line)?;
        let format = fields.format();
        fields.read(format, format.time_unit(), "hash_ids").map(|row| (format, row))
    }

    #[test]
    fn formats_are_recognised_by_their_fields() {
        let row =
            |time_ms, prompt| TraceRow { time_ms, delay_ms: None, session: None, prompt, input_tokens: None };
        let of = |format, row| Ok((format, row));
        let fast25 = r#"{"timestamp": 27, "input_length": 600, "output_length": 5, "hash_ids": [0, 3]}"#;
        let expected = TraceRow { input_tokens: Some(600), ..row(Some(27.0), Prompt::Blocks(vec![0, 3])) };
        assert_eq!(read(fast25), of(TraceFormat::Fast25, expected));
        let qwen = r#"{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 19,
                       "output_length": 5, "type": "text", "turn": 1, "hash_ids": [7, 8]}"#;
        let expected = TraceRow { input_tokens: Some(19), ..row(Some(61_114.0), Prompt::Blocks(vec![7, 8])) };
        assert_eq!(read(qwen), of(TraceFormat::QwenBailian, expected));
        let turn =
            r#"{"session_id": "a", "delay": 250.5, "hash_ids": [9], "output_length": 5, "timestamp": null}"#;
        let expected = TraceRow {
            delay_ms: Some(250.5),
            session: Some("a".into()),
            ..row(None, Prompt::Blocks(vec![9]))
        };
        assert_eq!(read(turn), of(TraceFormat::Sessions, expected));
        let text = r#"{"session_id": 5, "text_input": "Hello", "hash_ids": null}"#;
        let expected = TraceRow { session: Some("5".into()), ..row(None, Prompt::Text("Hello".into())) };
        assert_eq!(read(text), of(TraceFormat::Sessions, expected));
        let blocks = read(r#"{"hash_ids": ["x", "y", "x", -1]}"#).unwrap();
        assert_eq!(blocks.0, TraceFormat::Blocks);
        let Prompt::Blocks(ids) = blocks.1.prompt else { panic!("no blocks") };
        assert!(ids[0] == ids[2] && ids[0] != ids[1] && ids[3] == u64::MAX);
    }

    #[test]
    fn a_faulty_field_is_an_error_with_its_name() {
        let time = "`timestamp` is not a time from 0 to 1e14 ms";
        for (line, reason) in [
            ("{", "invalid JSON at column 1: EOF while parsing an object"),
            ("[1, 2]", "the line is not a JSON object"),
            (r#"{"hash_ids": 5}"#, "no list of blocks in `hash_ids`"),
            (r#"{"text_input": 5}"#, "no list of blocks in `hash_ids`"),
            (r#"{"hash_ids": [1.5]}"#, "a block in `hash_ids` is neither a whole number nor a text"),
            (r#"{"hash_ids": [], "timestamp": -1}"#, time),
            (r#"{"hash_ids": [], "timestamp": 1e30}"#, time),
            (r#"{"hash_ids": [], "timestamp": "7"}"#, time),
            (r#"{"hash_ids": [], "timestamp": NaN}"#, "invalid JSON at column 31: expected value"),
            (r#"{"hash_ids": [], "timestamp": 1e999}"#, "invalid JSON at column 35: number out of range"),
            (
                r#"{"chat_id": 1, "turn": 1, "hash_ids": [], "timestamp": 1e12}"#,
                "`timestamp` is not a time from 0 to 1e11 s",
            ),
            (r#"{"hash_ids": [], "delay": -5}"#, "`delay` is not a time from 0 to 1e14 ms"),
            (r#"{"hash_ids": [], "session_id": []}"#, "`session_id` is neither a text nor a number"),
            (r#"{"hash_ids": [], "input_length": -1}"#, "`input_length` is not a whole number of tokens"),
        ] {
            assert_eq!(read(line).unwrap_err(), reason, "{line}");
        }
        let deep = format!("{{\"hash_ids\": {}", "[".repeat(100_000));
        assert!(read(&deep).unwrap_err().ends_with("recursion limit exceeded"));
    }
}
