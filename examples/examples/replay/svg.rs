//! Chart of hit ratios over the memory, as SVG.

use std::fmt::Write;

use crate::table::{Row, Table, grouped, short};

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 440.0;
/// Edges of the plot.
const LEFT: f64 = 60.0;
const RIGHT: f64 = 660.0;
const TOP: f64 = 20.0;
const BOTTOM: f64 = 380.0;
/// Distance of two lines of the legend.
const LINE: f64 = 22.0;

/// Colors of the curves, in the order of the table. They differ in brightness, too.
const COLORS: [&str; 12] = [
    "#1f4e9c", "#8a8a8a", "#2a9d8f", "#b07aa1", "#7f6000", "#59a14f", "#e08a1e", "#4aa3df", "#c1121f",
    "#ef798a", "#000000", "#bbbbbb",
];

/// Draws one curve for each row of a table, over the logarithm of the memory.
pub(crate) fn chart(table: &Table) -> String {
    let axes = Axes::of(table);
    let mut svg = String::new();
    // Writing to a text cannot fail.
    let _ = write!(
        svg,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n\
         <title>Hit ratio over blocks of memory</title>\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#ffffff\"/>\n"
    );
    axes.draw(table, &mut svg);
    let mut order: Vec<usize> = (0..table.rows.len()).collect();
    let sum = |row: &usize| table.rows[*row].ratios.iter().sum::<f64>();
    order.sort_by(|one, other| sum(other).total_cmp(&sum(one)));
    for (line, row) in order.into_iter().enumerate() {
        let style = style(row, &table.rows[row]);
        let points: Vec<String> =
            table.sizes.iter().zip(&table.rows[row].ratios).map(|at| axes.point(*at.0, *at.1)).collect();
        let _ = writeln!(svg, "<polyline points=\"{}\" fill=\"none\" {style}/>", points.join(" "));
        let (x, y) = (RIGHT + 20.0, TOP + 10.0 + LINE * line as f64);
        let name = plain(&table.rows[row].name);
        let _ = writeln!(
            svg,
            "<path d=\"M{x:.1} {y:.1}h26\" fill=\"none\" {style}/>\
             <text x=\"{:.1}\" y=\"{:.1}\">{name}</text>",
            x + 34.0,
            y + 4.0
        );
    }
    svg.push_str("</svg>\n");
    svg
}

fn style(index: usize, row: &Row) -> String {
    let color = COLORS[index % COLORS.len()];
    let width = if row.name == "`gittins`" || row.name == "`lru`" { 3.0 } else { 1.5 };
    let dashes = if row.is_bound { " stroke-dasharray=\"6 4\"" } else { "" };
    format!("stroke=\"{color}\" stroke-width=\"{width}\"{dashes}")
}

/// Returns a name without Markdown, and with escapes for XML.
fn plain(name: &str) -> String {
    name.replace('`', "").replace('&', "&amp;").replace('<', "&lt;")
}

/// Scales of the plot.
struct Axes {
    /// Logarithms of the smallest and the largest memory.
    from: f64,
    to: f64,
    /// Highest ratio of the scale, and the distance of its marks.
    most: f64,
    step: f64,
}

impl Axes {
    fn of(table: &Table) -> Self {
        let logs = || table.sizes.iter().map(|size| (*size as f64).max(1.0).ln());
        let highest = table.rows.iter().flat_map(|row| &row.ratios).copied().fold(0.0, f64::max);
        let step = [0.01, 0.02, 0.05, 0.1, 0.2].into_iter().find(|step| highest / step <= 8.0).unwrap_or(0.2);
        let most = ((highest / step).ceil() * step).max(step);
        Self { from: logs().fold(f64::MAX, f64::min), to: logs().fold(0.0, f64::max), most, step }
    }

    fn x(&self, size: u64) -> f64 {
        let width = (self.to - self.from).max(f64::EPSILON);
        LEFT + (RIGHT - LEFT) * ((size as f64).max(1.0).ln() - self.from) / width
    }

    fn y(&self, ratio: f64) -> f64 {
        BOTTOM - (BOTTOM - TOP) * ratio / self.most
    }

    fn point(&self, size: u64, ratio: f64) -> String {
        format!("{:.1},{:.1}", self.x(size), self.y(ratio))
    }

    fn draw(&self, table: &Table, svg: &mut String) {
        let marks = (self.most / self.step).round() as u32;
        for mark in 0..=marks {
            let ratio = f64::from(mark) * self.step;
            let (y, label) = (self.y(ratio), short(ratio));
            let _ = writeln!(
                svg,
                "<path d=\"M{LEFT} {y:.1}H{RIGHT}\" stroke=\"#dddddd\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                LEFT - 8.0,
                y + 4.0,
                &label[..label.len() - 2]
            );
        }
        for size in &table.sizes {
            let x = self.x(*size);
            let _ = writeln!(
                svg,
                "<path d=\"M{x:.1} {TOP}V{BOTTOM}\" stroke=\"#eeeeee\"/>\
                 <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                BOTTOM + 20.0,
                grouped(*size)
            );
        }
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">blocks of memory</text>",
            f64::midpoint(LEFT, RIGHT),
            BOTTOM + 44.0
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_curves_are_within_the_plot() {
        let row =
            |name: &str, ratios: [f64; 3]| Row { name: name.into(), ratios: ratios.into(), is_bound: false };
        let rows = vec![row("`lru`", [0.0, 0.1, 0.34]), row("a < b & c", [0.02, 0.36, 0.36])];
        let svg = chart(&Table { sizes: vec![100, 1000, 10_000], rows });
        // The marks reach .40, and a hundredth of the memory is two of four equal steps.
        assert!(svg.contains("points=\"60.0,380.0 360.0,290.0 660.0,74.0\""), "{svg}");
        assert!(svg.contains("<text x=\"714.0\" y=\"34.0\">a &lt; b &amp; c</text>"), "highest first: {svg}");
        assert!(svg.contains(">.40</text>") && svg.contains(">10,000</text>") && svg.ends_with("</svg>\n"));
        let one = chart(&Table { sizes: vec![7], rows: vec![row("x", [0.0; 3])] });
        assert!(!one.contains("NaN") && !one.contains("inf"), "{one}");
    }
}
