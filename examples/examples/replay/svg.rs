//! Chart of hit ratios over the memory, as SVG.

use std::fmt::Write;

use crate::table::{Row, Table, grouped, short};

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 440.0;
/// Edges of the plot.
const LEFT: f64 = 70.0;
const RIGHT: f64 = 670.0;
const TOP: f64 = 20.0;
const BOTTOM: f64 = 380.0;
/// Distance of two lines of the legend.
const LINE: f64 = 22.0;
/// Smallest distance of two labels below the plot.
const APART: f64 = 50.0;

/// Colors of the curves on white and on black, in the order of the table.
const COLORS: [(&str, &str); 13] = [
    ("#0969da", "#58a6ff"),
    ("#6e7781", "#9da7b3"),
    ("#1b7c83", "#56d4dd"),
    ("#8250df", "#bc8cff"),
    ("#7d4e00", "#d29922"),
    ("#4d7c0f", "#a3e635"),
    ("#116329", "#3fb950"),
    ("#d4730b", "#ffa657"),
    ("#6639ba", "#d2a8ff"),
    ("#cf222e", "#ff7b72"),
    ("#e56ba5", "#f9a8d4"),
    ("#1f2328", "#e6edf3"),
    ("#8c959f", "#6e7681"),
];

/// Draws one curve for each row of a table, over the logarithm of the memory. The best row is the
/// first one of the legend.
pub(crate) fn chart(table: &Table) -> String {
    let axes = Axes::of(table);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" \
         aria-labelledby=\"t\" font-family=\"system-ui, sans-serif\" font-size=\"13\">\n\
         <title id=\"t\">Hit ratio of eviction policies over the memory</title>\n{}\
         <rect class=\"bg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" rx=\"10\"/>\n",
        styles()
    );
    axes.draw(table, &mut svg);
    let sum = |row: &Row| row.ratios.iter().sum::<f64>();
    let mut order: Vec<(usize, &Row)> = table.rows.iter().enumerate().collect();
    order.sort_by(|one, other| sum(other.1).total_cmp(&sum(one.1)));
    for (line, (index, row)) in order.iter().enumerate() {
        let (x, y) = (RIGHT + 24.0, TOP + 10.0 + LINE * line as f64);
        // Writing to a text cannot fail.
        let _ = writeln!(
            svg,
            "<path d=\"M{x:.1} {y:.1}h26\" {}/><text x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            line_style(*index, row),
            x + 34.0,
            y + 4.0,
            plain(&row.name)
        );
    }
    // A thin curve is visible upon a bold one.
    order.sort_by_key(|(_, row)| !is_bold(row));
    for (index, row) in order {
        let points: Vec<String> =
            table.sizes.iter().zip(&row.ratios).map(|(size, ratio)| axes.point(*size, *ratio)).collect();
        let _ = writeln!(svg, "<polyline points=\"{}\" {}/>", points.join(" "), line_style(index, row));
    }
    svg.push_str("</svg>\n");
    svg
}

fn is_bold(row: &Row) -> bool {
    row.name == "`gittins`" || row.name == "`lru`"
}

/// Returns the colors for light and dark displays.
fn styles() -> String {
    let strokes = |color: fn(&(&'static str, &'static str)) -> &'static str| {
        let stroke = |(index, colors)| format!(".c{index} {{ stroke: {} }}", color(colors));
        COLORS.iter().enumerate().map(stroke).collect::<Vec<_>>().join(" ")
    };
    format!(
        "<style>\npolyline, path {{ fill: none }}\n\
         .bg {{ fill: #ffffff }} text {{ fill: #1f2328 }} .grid {{ stroke: #d8dee4 }}\n{}\n\
         @media (prefers-color-scheme: dark) {{\n\
         .bg {{ fill: #0d1117 }} text {{ fill: #e6edf3 }} .grid {{ stroke: #30363d }}\n{}\n}}\n\
         </style>\n",
        strokes(|colors| colors.0),
        strokes(|colors| colors.1)
    )
}

fn line_style(index: usize, row: &Row) -> String {
    let width = if is_bold(row) { 3.5 } else { 1.5 };
    let dashes = if row.is_bound {
        "2 4"
    } else if index % 3 == 1 && !is_bold(row) {
        "9 3"
    } else {
        "none"
    };
    format!("class=\"c{}\" stroke-width=\"{width}\" stroke-dasharray=\"{dashes}\"", index % COLORS.len())
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
                "<path class=\"grid\" d=\"M{LEFT} {y:.1}H{RIGHT}\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                LEFT - 8.0,
                y + 4.0,
                &label[..label.len() - 2]
            );
        }
        let mut labelled = f64::MIN;
        for size in &table.sizes {
            let x = self.x(*size);
            let _ = writeln!(svg, "<path class=\"grid\" d=\"M{x:.1} {TOP}V{BOTTOM}\"/>");
            if x - labelled >= APART {
                labelled = x;
                let (y, label) = (BOTTOM + 20.0, grouped(*size));
                let _ =
                    writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"middle\">{label}</text>");
            }
        }
        let (x, y) = (f64::midpoint(LEFT, RIGHT), f64::midpoint(TOP, BOTTOM));
        let _ = writeln!(
            svg,
            "<g text-anchor=\"middle\"><text x=\"{x:.1}\" y=\"{:.1}\">blocks of memory</text>\n\
             <text transform=\"translate(22 {y:.1}) rotate(-90)\">hit ratio</text></g>",
            BOTTOM + 44.0
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(sizes: &[u64], rows: &[(&str, &[f64])]) -> Table {
        let row = |(name, ratios): &(&str, &[f64])| Row {
            name: (*name).into(),
            ratios: ratios.to_vec(),
            is_bound: false,
        };
        Table { sizes: sizes.to_vec(), rows: rows.iter().map(row).collect() }
    }

    /// Returns the values of an attribute, of elements with a name.
    fn values(svg: &str, element: &str, attribute: &str) -> Vec<String> {
        let document = roxmltree::Document::parse(svg).expect("the chart is well-formed");
        let elements = document.descendants().filter(|node| node.has_tag_name((SVG, element)));
        elements.filter_map(|node| node.attribute(attribute)).map(Into::into).collect()
    }

    /// Returns all texts.
    fn texts(svg: &str) -> Vec<String> {
        let document = roxmltree::Document::parse(svg).expect("the chart is well-formed");
        let texts = document.descendants().filter(|node| node.has_tag_name((SVG, "text")));
        texts.filter_map(|node| node.text()).map(Into::into).collect()
    }

    const SVG: &str = "http://www.w3.org/2000/svg";

    #[test]
    fn the_curves_are_within_the_plot() {
        let svg = chart(&table(
            &[100, 1000, 10_000],
            &[("`lru`", &[0.0, 0.1, 0.34]), ("a < b & c", &[0.02, 0.36, 0.36])],
        ));
        // The marks reach .40, and a hundredth of the memory is two of four equal steps.
        let curves = ["70.0,380.0 370.0,290.0 670.0,74.0", "70.0,362.0 370.0,56.0 670.0,56.0"];
        assert_eq!(values(&svg, "polyline", "points"), curves, "a bold curve is the first");
        let expected = [
            ".00",
            ".05",
            ".10",
            ".15",
            ".20",
            ".25",
            ".30",
            ".35",
            ".40",
            "100",
            "1,000",
            "10,000",
            "blocks of memory",
            "hit ratio",
            "a < b & c",
            "lru",
        ];
        assert_eq!(texts(&svg), expected);
    }

    #[test]
    fn labels_do_not_overlap() {
        let svg = chart(&table(&[1000, 1001, 2000, 100_000], &[("x", &[0.5; 4])]));
        let labels: Vec<String> = texts(&svg).into_iter().filter(|text| text.contains(',')).collect();
        assert_eq!(labels, ["1,000", "2,000", "100,000"]);
    }

    #[test]
    fn a_chart_of_one_size_has_only_numbers() {
        let svg = chart(&table(&[7], &[("x", &[0.0])]));
        assert_eq!(values(&svg, "polyline", "points"), ["70.0,380.0"]);
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }

    #[test]
    fn each_class_has_a_color_for_light_and_for_dark() {
        let rows: Vec<(String, [f64; 1])> = (0..15).map(|row| (format!("row {row}"), [0.1])).collect();
        let rows: Vec<(&str, &[f64])> = rows.iter().map(|(name, ratios)| (&name[..], &ratios[..])).collect();
        let svg = chart(&table(&[7], &rows));
        for class in values(&svg, "polyline", "class").into_iter().chain(["bg".into(), "grid".into()]) {
            assert_eq!(svg.matches(&format!(".{class} {{")).count(), 2, "{class}");
        }
    }
}
