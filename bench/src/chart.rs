//! Line charts as SVG text: panels one below the other, each with its own axes and lines.
//!
//! Only what the benchmarks draw: points with linear or logarithmic x, linear y or a y that spreads the last
//! percentiles ([`YScale::Nines`]). Text is in the viewer's sans-serif font; no font is measured.

use std::fmt::Write;
use std::path::Path;

const WIDTH: f64 = 900.0;
const PANEL_HEIGHT: f64 = 300.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 190.0;
const TOP: f64 = 34.0;
const BOTTOM: f64 = 44.0;
const TICKS: usize = 5;
/// Of [`YScale::Nines`]: where 1 would be, which is infinitely far.
const LAST_NINE: f64 = 0.9999;

/// Told apart by people who see no red or no green, too (Okabe and Ito); then the same dashed.
const COLOURS: [&str; 8] =
    ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8a8a00"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum XScale {
    Linear,
    /// Points with x ≤ 0 are drawn at the left edge.
    Logarithmic,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum YScale {
    Linear,
    /// Shares from 0 to 1, so that 0.9, 0.99 and 0.999 are equally far from each other.
    Nines,
}

#[derive(Clone, Debug)]
pub struct Line {
    pub name: String,
    pub points: Vec<(f64, f64)>,
}

#[derive(Clone, Debug)]
pub struct Panel {
    pub title: String,
    pub x_label: String,
    pub x: XScale,
    pub y: YScale,
    pub lines: Vec<Line>,
    /// Vertical lines with a text: moments at which something was changed.
    pub marks: Vec<(f64, String)>,
}

/// The text of an SVG file.
pub fn svg(title: &str, panels: &[Panel]) -> String {
    let height = 40.0 + PANEL_HEIGHT * panels.len() as f64;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
         viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    text(
        &mut out,
        (LEFT, 24.0),
        "start",
        &format!("<tspan font-size=\"16\">{}</tspan>", escaped(title)),
    );
    for (i, panel) in panels.iter().enumerate() {
        Frame::of(panel, 40.0 + PANEL_HEIGHT * i as f64).draw(&mut out);
    }
    out.push_str("</svg>\n");
    out
}

/// Writes a file into a directory, which is made if it is not there.
pub fn write(directory: &Path, name: &str, text: &str) -> Result<(), String> {
    let path = directory.join(name);
    let written = std::fs::create_dir_all(directory).and_then(|()| std::fs::write(&path, text));
    written.map_err(|e| format!("cannot write {}: {e}", path.display()))?;
    eprintln!("wrote {}", path.display());
    Ok(())
}

/// Points of a distribution, of sorted values: each value and the share of those up to it. Few points, but all of the
/// last thousandth.
pub fn distribution(sorted: &[f64]) -> Vec<(f64, f64)> {
    let count = sorted.len();
    let at = |i: usize| (sorted[i], (i + 1) as f64 / count as f64);
    let tail = count - count / 1_000 - count.min(1);
    let step = (tail / 500).max(1);
    (0..tail).step_by(step).chain(tail..count).map(at).collect()
}

/// A panel and where it lies.
struct Frame<'a> {
    panel: &'a Panel,
    top: f64,
    x: (f64, f64),
    y: (f64, f64),
}

impl<'a> Frame<'a> {
    fn of(panel: &'a Panel, top: f64) -> Frame<'a> {
        let points = || panel.lines.iter().flat_map(|l| &l.points);
        let is_log = panel.x == XScale::Logarithmic;
        let xs = points().map(|p| p.0).filter(|x| x.is_finite() && (!is_log || *x > 0.0));
        let ys = points().map(|p| p.1).filter(|y| y.is_finite());
        let x = range(xs).unwrap_or(if is_log { (1.0, 10.0) } else { (0.0, 1.0) });
        let y = match panel.y {
            YScale::Nines => (0.0, LAST_NINE),
            YScale::Linear => (0.0, range(ys).map_or(1.0, |(_, most)| rounded_up(most))),
        };
        let x = match is_log {
            true => (10f64.powf(x.0.log10().floor()), 10f64.powf(x.1.log10().ceil())),
            false => x,
        };
        // Nothing may be divided by zero.
        let apart =
            |(low, high): (f64, f64)| if high > low { (low, high) } else { (low, low + 1.0) };
        Frame { panel, top, x: apart(x), y: apart(y) }
    }

    fn draw(&self, out: &mut String) {
        let (left, right) = (LEFT, WIDTH - RIGHT);
        let (top, bottom) = (self.top + TOP, self.top + PANEL_HEIGHT - BOTTOM);
        text(out, (left, self.top + TOP - 10.0), "start", &escaped(&self.panel.title));
        for (x, label) in self.x_ticks() {
            rule(out, (x, top), (x, bottom), "#dddddd", "");
            text(out, (x, bottom + 16.0), "middle", &label);
        }
        for (y, label) in self.y_ticks() {
            rule(out, (left, y), (right, y), "#dddddd", "");
            text(out, (left - 6.0, y + 4.0), "end", &label);
        }
        rule(out, (left, bottom), (right, bottom), "black", "");
        rule(out, (left, top), (left, bottom), "black", "");
        text(out, ((left + right) / 2.0, bottom + 34.0), "middle", &escaped(&self.panel.x_label));
        for (x, label) in &self.panel.marks {
            let x = self.place((*x, 0.0)).0;
            rule(out, (x, top), (x, bottom), "#555555", " stroke-dasharray=\"2 3\"");
            text(out, (x + 4.0, top + 12.0), "start", &escaped(label));
        }
        for (i, line) in self.panel.lines.iter().enumerate() {
            self.draw_line(out, i, line);
        }
    }

    fn draw_line(&self, out: &mut String, i: usize, line: &Line) {
        let colour = COLOURS[i % COLOURS.len()];
        let dashes = if i < COLOURS.len() { "" } else { " stroke-dasharray=\"5 3\"" };
        let finite = line.points.iter().filter(|(x, y)| x.is_finite() && y.is_finite());
        let mut places = String::new();
        for &point in finite {
            let (x, y) = self.place(point);
            let _ = write!(places, "{x:.1},{y:.1} ");
        }
        let _ = writeln!(
            out,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.6\"{dashes}/>",
            places.trim_end()
        );
        let (x, y) = (WIDTH - RIGHT + 14.0, self.top + TOP + 8.0 + 17.0 * i as f64);
        rule(out, (x, y), (x + 22.0, y), colour, dashes);
        text(out, (x + 28.0, y + 4.0), "start", &escaped(&line.name));
    }

    fn place(&self, (x, y): (f64, f64)) -> (f64, f64) {
        let share =
            |value: f64, (low, high): (f64, f64)| ((value - low) / (high - low)).clamp(0.0, 1.0);
        let across = match self.panel.x {
            XScale::Linear => share(x, self.x),
            XScale::Logarithmic => {
                share(x.max(self.x.0).log10(), (self.x.0.log10(), self.x.1.log10()))
            }
        };
        let up = match self.panel.y {
            YScale::Linear => share(y, self.y),
            YScale::Nines => share(nines(y), (0.0, nines(LAST_NINE))),
        };
        let height = PANEL_HEIGHT - TOP - BOTTOM;
        (LEFT + across * (WIDTH - LEFT - RIGHT), self.top + TOP + (1.0 - up) * height)
    }

    fn x_ticks(&self) -> Vec<(f64, String)> {
        let values: Vec<f64> = match self.panel.x {
            XScale::Linear => ticks(self.x),
            XScale::Logarithmic => {
                let (low, high) =
                    (self.x.0.log10().round() as i32, self.x.1.log10().round() as i32);
                (low..=high).map(|power| 10f64.powi(power)).collect()
            }
        };
        values.into_iter().map(|x| (self.place((x, 0.0)).0, number(x))).collect()
    }

    fn y_ticks(&self) -> Vec<(f64, String)> {
        let values = match self.panel.y {
            YScale::Linear => ticks(self.y),
            YScale::Nines => vec![0.0, 0.5, 0.9, 0.99, 0.999],
        };
        values.into_iter().map(|y| (self.place((self.x.0, y)).1, number(y))).collect()
    }
}

fn nines(share: f64) -> f64 {
    -(1.0 - share.clamp(0.0, LAST_NINE)).log10()
}

fn range(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    values.fold(None, |known, value| match known {
        None => Some((value, value)),
        Some((low, high)) => Some((value.min(low), value.max(high))),
    })
}

/// The next of 1, 2 and 5 times a power of ten.
fn rounded_up(value: f64) -> f64 {
    if value <= 0.0 {
        return 1.0;
    }
    let power = 10f64.powf(value.log10().floor());
    [1.0, 2.0, 5.0, 10.0].map(|m| m * power).into_iter().find(|r| *r >= value).unwrap_or(value)
}

fn ticks((low, high): (f64, f64)) -> Vec<f64> {
    let step = rounded_up((high - low) / TICKS as f64);
    let first = (low / step).ceil() as i64;
    (first..).map(|n| n as f64 * step).take_while(|v| *v <= high * (1.0 + 1e-9)).collect()
}

fn number(value: f64) -> String {
    // Without the noise of binary fractions.
    let text = format!("{value:.6}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn rule(out: &mut String, from: (f64, f64), to: (f64, f64), colour: &str, more: &str) {
    let _ = writeln!(
        out,
        "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"{colour}\"{more}/>",
        from.0, from.1, to.0, to.1
    );
}

/// `content` is markup.
fn text(out: &mut String, (x, y): (f64, f64), anchor: &str, content: &str) {
    let _ =
        writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{content}</text>");
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panel(x: XScale, y: YScale, points: Vec<(f64, f64)>) -> Panel {
        Panel {
            title: "a < b".to_owned(),
            x_label: "ms".to_owned(),
            x,
            y,
            lines: vec![Line { name: "one".to_owned(), points }],
            marks: vec![(5.0, "here".to_owned())],
        }
    }

    #[test]
    fn every_point_lies_inside_its_panel_and_text_is_escaped() {
        let points = vec![(0.0, 0.0), (0.5, 0.5), (1e6, 1.0), (f64::NAN, 2.0)];
        for x in [XScale::Linear, XScale::Logarithmic] {
            for y in [YScale::Linear, YScale::Nines] {
                let one = panel(x, y, points.clone());
                let frame = Frame::of(&one, 40.0);
                for point in &points[..3] {
                    let (x, y) = frame.place(*point);
                    assert!((LEFT..=WIDTH - RIGHT).contains(&x), "{x}");
                    assert!((40.0 + TOP..=40.0 + PANEL_HEIGHT - BOTTOM).contains(&y), "{y}");
                }
                let text = svg("t", &[one]);
                assert!(
                    text.contains("a &lt; b")
                        && !text.contains("NaN")
                        && text.ends_with("</svg>\n")
                );
            }
        }
    }

    #[test]
    fn a_chart_without_points_is_a_chart() {
        for x in [XScale::Linear, XScale::Logarithmic] {
            let text = svg("empty", &[panel(x, YScale::Linear, Vec::new())]);
            assert!(!text.contains("NaN") && !text.contains("inf"));
        }
        assert!(distribution(&[]).is_empty());
    }

    #[test]
    fn the_last_thousandth_of_a_distribution_is_whole() {
        let sorted: Vec<f64> = (0..100_000).map(f64::from).collect();
        let points = distribution(&sorted);
        assert!(points.len() < 800, "{}", points.len());
        assert_eq!(points.last(), Some(&(99_999.0, 1.0)));
        let tail = points.iter().filter(|(x, _)| *x >= 99_900.0).count();
        assert_eq!(tail, 100);
    }
}
