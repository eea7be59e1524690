//! `mooncake curve`.

use mooncake_core::Result;
use serde_json::json;

use super::admin::{Curve, CurvePoint};
use super::output::{human, say, say_json, table};
use super::session::Session;

/// Width of the longest bar in characters.
const BAR: usize = 50;

pub(super) fn show(session: &Session) -> Result<()> {
    let curve = session.admin()?.curve()?;
    if session.to.json {
        return say_json(&json!(curve));
    }
    say(plot(&curve).trim_end())
}

/// Draws a bar for each size of memory.
fn plot(curve: &Curve) -> String {
    let actual = curve.points.iter().find(|point| point.factor == 1.0).and_then(|point| point.hit_rate);
    let Some(actual) = actual else {
        return "no uses yet: nothing has been read or stored in the last hour".into();
    };
    let row = |point: &CurvePoint| {
        let rate = point.hit_rate.unwrap_or_default();
        let gain = match (rate - actual) * 100.0 {
            _ if point.factor == 1.0 => "now".into(),
            points => format!("{points:+.1}"),
        };
        let percentage = format!("{:.1} %", rate * 100.0);
        (vec![human(point.bytes), format!("x {}", point.factor), percentage, gain], bar(rate))
    };
    let (rows, bars): (Vec<_>, Vec<_>) = curve.points.iter().map(row).unzip();
    let header = ["memory", "", "found", "points"].map(String::from).to_vec();
    let lines = table(&[vec![header], rows].concat());
    let bars = std::iter::once(String::new()).chain(bars);
    let lines: Vec<String> = lines.lines().zip(bars).map(|(line, bar)| format!("{line}  {bar}")).collect();
    let minutes = (curve.span_seconds / 60.0).ceil();
    let sample = match curve.keys_for_each_sampled {
        1 => "all keys".into(),
        keys => format!("one key in {keys}"),
    };
    format!(
        "{}\nEstimate from {} uses in {minutes} min, of {sample}.\n",
        lines.iter().map(|line| line.trim_end()).collect::<Vec<_>>().join("\n"),
        curve.uses
    )
}

/// Draws a share as a bar, in eighths of a character.
fn bar(share: f64) -> String {
    const PARTS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    let eighths = (share.clamp(0.0, 1.0) * (BAR * 8) as f64).round() as usize;
    "█".repeat(eighths / 8) + PARTS[eighths % 8]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_for_each_size() {
        let point = |factor: f64, hit_rate| CurvePoint {
            factor,
            bytes: (factor * 1024.0) as u64,
            hit_rate: Some(hit_rate),
        };
        let points = vec![point(0.5, 0.1), point(1.0, 0.25), point(2.0, 0.3025)];
        let curve = Curve { span_seconds: 90.0, uses: 1200, keys_for_each_sampled: 4, points };
        let expected = "memory           found  points\n\
                        512 B    x 0.5  10.0 %   -15.0  █████\n\
                        1.0 KiB    x 1  25.0 %     now  ████████████▌\n\
                        2.0 KiB    x 2  30.2 %    +5.2  ███████████████▏\n\
                        Estimate from 1200 uses in 2 min, of one key in 4.\n";
        assert_eq!(plot(&curve), expected);
        let none = vec![CurvePoint { hit_rate: None, ..curve.points[1].clone() }];
        assert!(plot(&Curve { points: none, ..curve }).starts_with("no uses yet"));
    }
}
