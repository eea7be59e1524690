//! `mooncake top`: shows the activity of a cluster, refreshed periodically.

use std::collections::BTreeMap;
use std::io::Write;
use std::time::Duration;

use crossterm::event::{self, Event, KeyCode, KeyEvent, KeyModifiers};
use crossterm::{cursor, execute, queue, style, terminal};
use mooncake_core::clock::{Clock, Moment, SystemClock};
use mooncake_core::fault_injection::is_planted;
use mooncake_core::{Error, Result};
use serde_json::json;

use super::admin::{Admin, Segment};
use super::args::Top;
use super::output::{human, percent, say, say_json, table};
use super::session::Session;

/// Width of a bar in characters.
const BAR: usize = 30;

/// A snapshot of the cluster's state.
struct Look {
    at: Moment,
    metrics: BTreeMap<String, f64>,
    segments: Vec<Segment>,
}

pub(super) fn show(session: &Session, args: &Top) -> Result<()> {
    let (admin, clock) = (session.admin()?, SystemClock::new());
    let first = look(&admin, &clock)?;
    let master = session.leader()?;
    if session.to.json {
        if !args.once && !is_planted("plain-top") {
            return Err(Error::invalid("--json needs --once"));
        }
        if !is_planted("plain-top") {
            return say_json(&document(master, &first));
        }
    }
    if args.once {
        return say(render(master, &first, None).trim_end());
    }
    let screen = Screen::open()?;
    let mut view = View { now: first, before: None, lost: None };
    loop {
        screen.draw(&view.draw(master, clock.now()))?;
        if quits(args.interval)? {
            return Ok(());
        }
        view.take(look(&admin, &clock));
    }
}

/// Content of the screen.
struct View {
    now: Look,
    before: Option<Look>,
    /// Reason why the content is outdated.
    lost: Option<Error>,
}

impl View {
    fn take(&mut self, look: Result<Look>) {
        match look {
            Ok(look) => {
                self.before = Some(std::mem::replace(&mut self.now, look));
                self.lost = None;
            }
            // The master may respond next time.
            Err(error) => self.lost = Some(error),
        }
    }

    fn draw(&self, master: &str, at: Moment) -> String {
        let values = render(master, &self.now, self.before.as_ref());
        match &self.lost {
            None => values,
            Some(error) => {
                let age = at.since(self.now.at).as_secs();
                format!("NO RESPONSE: {error}\nthe values below are {age} s old\n\n{values}")
            }
        }
    }
}

fn look(admin: &Admin, clock: &SystemClock) -> Result<Look> {
    Ok(Look { at: clock.now(), metrics: admin.metrics()?, segments: admin.segments()? })
}

/// Displayed requests, with the metrics that count them.
const SHOWN: [(&str, &str); 11] = [
    ("exist", "master_exist_key_requests_total"),
    ("exist, batches", "master_batch_exist_key_requests_total"),
    ("prefix", "master_locate_prefix_requests_total"),
    ("get", "master_get_replica_list_requests_total"),
    ("get, batches", "master_batch_get_replica_list_requests_total"),
    ("put", "master_put_start_requests_total"),
    ("put, batches", "master_batch_put_start_requests_total"),
    ("remove", "master_remove_requests_total"),
    ("ping", "master_ping_requests_total"),
    ("objects evicted", "master_evicted_key_count"),
    ("puts without space", "master_put_start_alloc_failures_total"),
];

fn document(master: &str, now: &Look) -> serde_json::Value {
    let value = |name: &str| now.metrics.get(name).copied().unwrap_or(0.0);
    let count = |name: &str| value(name) as u64;
    let segments = now.segments.iter().map(|at| {
        json!({
            "name": at.segment_name, "status": at.status, "used_bytes": at.allocator_used_bytes, "size_bytes": at.size_bytes,
        })
    });
    let totals = SHOWN.iter().map(|(_, name)| ((*name).to_owned(), json!(count(name))));
    json!({
        "master": master, "clients": count("master_active_clients"), "keys": count("master_key_count"),
        "puts_in_progress": count("master_puts_in_progress"), "used_bytes": count("master_allocated_bytes"),
        "capacity_bytes": count("master_total_capacity_bytes"), "hits": count("valid_get_nums_"),
        "reads": count("total_get_nums_"), "totals": totals.collect::<serde_json::Map<_, _>>(),
        "segments": segments.collect::<Vec<_>>(),
    })
}

fn render(master: &str, now: &Look, before: Option<&Look>) -> String {
    let value = |name: &str| now.metrics.get(name).copied().unwrap_or(0.0);
    let rate = |name: &str| {
        let before = before?;
        let seconds = now.at.since(before.at).as_secs_f64().max(1e-3);
        Some((value(name) - before.metrics.get(name).copied().unwrap_or(0.0)).max(0.0) / seconds)
    };
    let (used, capacity) =
        (value("master_allocated_bytes") as u64, value("master_total_capacity_bytes") as u64);
    let (hits, reads) = (value("valid_get_nums_"), value("total_get_nums_"));
    let mut text = format!(
        "{}   clients {}   keys {}   writes in progress {}\nmemory {} {} of {}   hits {}\n\n",
        master,
        value("master_active_clients"),
        value("master_key_count"),
        value("master_puts_in_progress"),
        bar(used, capacity),
        human(used),
        human(capacity),
        percent(hits as u64, reads as u64),
    );
    let mut rows = vec![["", "total", "per second"].map(String::from).to_vec()];
    for (shown, name) in SHOWN {
        let rate = rate(name).map_or("-".into(), |rate| format!("{rate:.1}"));
        rows.push(vec![shown.into(), value(name).to_string(), rate]);
    }
    text += &table(&rows);
    let mut rows = vec![["segment", "state", "used", "size", ""].map(String::from).to_vec()];
    for at in &now.segments {
        rows.push(vec![
            at.segment_name.clone(),
            at.status.clone(),
            human(at.allocator_used_bytes),
            human(at.size_bytes),
            bar(at.allocator_used_bytes, at.size_bytes),
        ]);
    }
    text + "\n" + &table(&rows)
}

fn bar(part: u64, whole: u64) -> String {
    let full = if whole == 0 { 0 } else { (u128::from(part) * BAR as u128 / u128::from(whole)) as usize };
    format!("[{}{}]", "#".repeat(full.min(BAR)), ".".repeat(BAR - full.min(BAR)))
}

/// Waits for a key or the interval. Returns whether the user wants to quit.
fn quits(interval: Duration) -> Result<bool> {
    let clock = SystemClock::new();
    let end = clock.now().after(interval);
    loop {
        let left = end.since(clock.now());
        if !event::poll(left).map_err(Error::from)? {
            return Ok(false);
        }
        let Event::Key(KeyEvent { code, modifiers, .. }) = event::read().map_err(Error::from)? else {
            // Redraw at once, for example after a change of the window size.
            return Ok(false);
        };
        let control_c = code == KeyCode::Char('c') && modifiers.contains(KeyModifiers::CONTROL);
        if control_c || matches!(code, KeyCode::Char('q') | KeyCode::Esc) {
            return Ok(true);
        }
    }
}

/// The terminal while the tool owns it.
struct Screen;

impl Screen {
    fn open() -> Result<Self> {
        let opened = terminal::enable_raw_mode();
        opened.map_err(|error| {
            Error::invalid(format!("standard output is not a terminal ({error}): use --once for plain text"))
        })?;
        let screen = Self;
        execute!(std::io::stdout(), terminal::EnterAlternateScreen, cursor::Hide)?;
        Ok(screen)
    }

    fn draw(&self, text: &str) -> Result<()> {
        let (columns, rows) = terminal::size()?;
        let mut out = std::io::stdout().lock();
        queue!(out, cursor::MoveTo(0, 0), terminal::Clear(terminal::ClearType::All))?;
        for (row, line) in (0..rows.saturating_sub(1)).zip(text.lines()) {
            let line: String = line.chars().take(columns.into()).collect();
            queue!(out, cursor::MoveTo(0, row), style::Print(line))?;
        }
        queue!(out, cursor::MoveTo(0, rows.saturating_sub(1)), style::Print("q: quit"))?;
        out.flush().map_err(Error::from)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // A failure means that the terminal is gone.
        let _ = execute!(std::io::stdout(), cursor::Show, terminal::LeaveAlternateScreen);
        let _ = terminal::disable_raw_mode();
    }
}

#[cfg(test)]
mod tests {
    use mooncake_core::ErrorCode;

    use super::*;

    fn look(seconds: u64, keys: f64, pings: f64) -> Look {
        let metrics = [("master_key_count", keys), ("master_ping_requests_total", pings)];
        let metrics = metrics.map(|(name, value)| (name.to_owned(), value)).into();
        Look { at: Moment(seconds * 1_000_000_000), metrics, segments: Vec::new() }
    }

    #[test]
    fn a_master_that_is_away_is_said_to_be() {
        let drawn = |view: &View, seconds: u64| view.draw("node1:50051", Moment(seconds * 1_000_000_000));
        let mut view = View { now: look(10, 7.0, 5.0), before: None, lost: None };
        view.take(Ok(look(12, 8.0, 11.0)));
        let shown = drawn(&view, 12);
        assert!(shown.starts_with("node1:50051 ") && shown.contains("keys 8"), "{shown}");
        let ping = shown.lines().find(|line| line.starts_with("ping")).unwrap();
        assert!(ping.ends_with("3.0"), "{ping}");
        for seconds in [14, 16] {
            view.take(Err(Error::new(ErrorCode::RpcFail, "connection refused")));
            let age = format!("the values below are {} s old", seconds - 12);
            let text = drawn(&view, seconds);
            let lines: Vec<_> = text.lines().take(2).collect();
            assert!(
                lines[0].starts_with("NO RESPONSE") && lines[0].contains("connection refused"),
                "{lines:?}"
            );
            assert_eq!(lines[1], age);
            assert!(text.ends_with(&shown), "the old values stay");
        }
        view.take(Ok(look(18, 0.0, 1.0)));
        let text = drawn(&view, 18);
        assert!(text.starts_with("node1:50051 ") && text.contains("keys 0"), "{text}");
        assert!(
            text.lines().any(|line| line.starts_with("ping") && line.ends_with("0.0")),
            "a new master starts at 0"
        );
    }
}
