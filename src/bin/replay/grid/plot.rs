//! The grid as one picture: for each column of cells the p99 time to first token over the load, a line per policy.
//!
//! SVG by hand, since it is a few lines of text. Times are on a logarithmic scale, as one policy's may be a hundred times
//! another's.

use super::cells::{Column, Result};
use super::verdict::Kind;
use std::fmt::Write as _;

/// Of a panel, in pixels.
const WIDTH: f64 = 300.0;
const HEIGHT: f64 = 220.0;
/// Around a panel's axes, for their numbers.
const LEFT: f64 = 52.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 30.0;
const BOTTOM: f64 = 30.0;
/// Panels side by side: the caches of both fleets.
const ACROSS: usize = 6;
/// Lines of the legend, in pixels.
const LINE: f64 = 16.0;

/// Colours that stay apart for those who see fewer of them, and then, dashed, once more.
const COLOURS: [&str; 8] =
    ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#8c510a", "#999999", "#b8a800"];
/// Ours.
const OURS: &str = "#d00000";

/// The picture.
pub fn svg(results: &[Result]) -> String {
    let columns = Column::all(results);
    let policies: Vec<&'static str> = results
        .first()
        .map(|first| first.played.iter().map(|played| played.policy).collect())
        .unwrap_or_default();
    let rows = columns.len().div_ceil(ACROSS).max(1);
    let panels = rows as f64 * HEIGHT;
    let width = WIDTH * columns.len().clamp(1, ACROSS) as f64;
    let height = panels + LINE * (policies.len() as f64 + 2.0);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"{width:.0}\" height=\"{height:.0}\" fill=\"white\"/>\n"
    );
    for (number, column) in columns.iter().enumerate() {
        let (x, y) = ((number % ACROSS) as f64 * WIDTH, (number / ACROSS) as f64 * HEIGHT);
        let _ = writeln!(svg, "<g transform=\"translate({x:.0} {y:.0})\">");
        panel(&mut svg, column, &policies);
        svg.push_str("</g>\n");
    }
    for (number, policy) in policies.iter().enumerate() {
        let y = panels + LINE * (number as f64 + 1.0);
        let _ = writeln!(
            svg,
            "<path d=\"M{LEFT} {y} h40\" {}/><text x=\"{}\" y=\"{}\">{}</text>",
            stroke(results, number),
            LEFT + 50.0,
            y + 4.0,
            escaped(policy)
        );
    }
    svg.push_str("</svg>\n");
    svg
}

/// One panel: its title, its axes with the target, and its lines.
fn panel(svg: &mut String, column: &Column<'_>, policies: &[&'static str]) {
    let Some(first) = column.first() else { return };
    let scale = Scale::of(column);
    let title = escaped(&first.column_name());
    let _ = writeln!(svg, "<text x=\"{LEFT}\" y=\"18\" font-weight=\"bold\">{title}</text>");
    for tick in scale.ticks() {
        let y = scale.y(tick);
        let _ = writeln!(
            svg,
            "<path d=\"M{LEFT} {y:.1} H{:.1}\" stroke=\"#dddddd\"/><text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            WIDTH - RIGHT,
            LEFT - 4.0,
            y + 4.0,
            seconds(tick)
        );
    }
    for result in &column.cells {
        let (x, load) = (scale.x(result.cell.load), result.cell.load * 100.0);
        let y = HEIGHT - BOTTOM + 16.0;
        let _ =
            writeln!(svg, "<text x=\"{x:.1}\" y=\"{y}\" text-anchor=\"middle\">{load:.0} %</text>");
    }
    if scale.holds(first.target) {
        let (y, right) = (scale.y(first.target), WIDTH - RIGHT);
        let _ = writeln!(
            svg,
            "<path d=\"M{LEFT} {y:.1} H{right}\" stroke=\"black\" stroke-dasharray=\"1 3\"/>"
        );
    }
    for (number, policy) in policies.iter().enumerate() {
        let points = column.cells.iter().filter_map(|result| {
            let tail = result.of(policy)?.figures.first_token.p99;
            Some(format!("{:.1},{:.1}", scale.x(result.cell.load), scale.y(tail)))
        });
        let points: Vec<String> = points.collect();
        let cells: Vec<Result> = vec![(*first).clone()];
        let _ =
            writeln!(svg, "<polyline points=\"{}\" {}/>", points.join(" "), stroke(&cells, number));
    }
}

/// A policy's colour and dashes.
fn stroke(results: &[Result], number: usize) -> String {
    let played = results.first().and_then(|first| first.played.get(number));
    let kind = played.map_or(Kind::Baseline, |played| played.kind);
    let colour = COLOURS.get(number % COLOURS.len()).copied().unwrap_or("black");
    let (colour, width, dashes) = match kind {
        Kind::Ours => (OURS, 2.5, "none"),
        Kind::Bound => ("black", 1.0, "2 2"),
        Kind::Baseline if number < COLOURS.len() => (colour, 1.2, "none"),
        Kind::Baseline => (colour, 1.2, "6 3"),
    };
    format!(
        "fill=\"none\" stroke=\"{colour}\" stroke-width=\"{width}\" stroke-dasharray=\"{dashes}\""
    )
}

/// Where loads and times lie in a panel.
struct Scale {
    loads: (f64, f64),
    /// Logarithms of milliseconds.
    times: (f64, f64),
}

impl Scale {
    fn of(column: &Column<'_>) -> Self {
        let range = |values: Vec<f64>| {
            let least = values.iter().copied().fold(f64::INFINITY, f64::min);
            (least, values.iter().copied().fold(f64::NEG_INFINITY, f64::max))
        };
        let played = column.cells.iter().flat_map(|result| &result.played);
        let times = played.map(|played| played.figures.first_token.p99.max(0.1).log10());
        let (least, most) = range(times.collect());
        Self {
            loads: range(column.cells.iter().map(|result| result.cell.load).collect()),
            times: (least.floor(), most.ceil().max(least.floor() + 1.0)),
        }
    }

    fn x(&self, load: f64) -> f64 {
        let (least, most) = self.loads;
        let part = if most > least { (load - least) / (most - least) } else { 0.5 };
        LEFT + 14.0 + part * (WIDTH - LEFT - RIGHT - 28.0)
    }

    fn y(&self, milliseconds: f64) -> f64 {
        let (least, most) = self.times;
        let part = (milliseconds.max(0.1).log10() - least) / (most - least);
        HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM)
    }

    fn holds(&self, milliseconds: f64) -> bool {
        milliseconds > 0.0 && (self.times.0..=self.times.1).contains(&milliseconds.log10())
    }

    fn ticks(&self) -> impl Iterator<Item = f64> + use<> {
        (self.times.0 as i32..=self.times.1 as i32).map(|power| 10f64.powi(power))
    }
}

fn seconds(milliseconds: f64) -> String {
    if milliseconds < 1000.0 {
        format!("{milliseconds} ms")
    } else {
        format!("{} s", milliseconds / 1e3)
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grid::cells::{self, tests::result};

    #[test]
    fn every_column_is_a_panel_and_every_policy_a_line() {
        let cells = cells::all(2, &[8, 64], &[0.1, 0.3], &[0.3, 0.5, 0.95]);
        let results: Vec<Result> =
            cells.into_iter().map(|cell| result(cell, [90.0, 2000.0, 80.0])).collect();
        let text = svg(&results);
        assert_eq!(text.matches("<polyline").count(), 8 * 3);
        assert_eq!(text.matches("<g ").count(), 8);
        assert_eq!(text.matches("</g>").count(), 8);
        assert_eq!(text.matches(OURS).count(), 8 + 1);
        assert!(!text.contains("NaN") && !text.contains("inf"));
    }

    #[test]
    fn nothing_played_is_an_empty_picture() {
        assert!(!svg(&[]).contains("<polyline"));
    }

    #[test]
    fn a_higher_time_lies_higher_and_inside() {
        let cells = cells::all(1, &[8], &[0.1], &[0.3]);
        let results: Vec<Result> =
            cells.into_iter().map(|cell| result(cell, [7.0, 2000.0, 80.0])).collect();
        let scale = Scale::of(&Column::all(&results)[0]);
        let [low, middle, high] = [7.0, 80.0, 2000.0].map(|time| scale.y(time));
        assert!(TOP <= high && high < middle && middle < low && low <= HEIGHT - BOTTOM);
        assert_eq!(scale.ticks().collect::<Vec<_>>(), [1.0, 10.0, 100.0, 1000.0, 10_000.0]);
        assert_eq!((seconds(100.0).as_str(), seconds(10_000.0).as_str()), ("100 ms", "10 s"));
    }
}
