//! In which form EXPLAIN answers: its options, and a plan as text or as JSON.

use millrace_common::json::Json;
use millrace_common::{SqlError, SqlState};
use millrace_planner::ast::Explain;

use crate::session::RowSet;
use crate::session::outcome::text_field;
use crate::wire::Field;

/// OID of `json`.
const JSON: u32 = 114;

#[derive(Clone, Copy)]
pub struct Form {
    pub json: bool,
    /// With the columns that each operator gives.
    pub verbose: bool,
    /// The plan of a job after each of the planner's passes.
    pub passes: bool,
}

impl Form {
    /// What the options in parentheses and words say.
    pub fn of(explain: &Explain) -> Result<Form, SqlError> {
        let mut form = Form { json: false, verbose: explain.verbose, passes: false };
        for (name, value) in &explain.options {
            match name.as_str() {
                "format" => form.json = is_json(value)?,
                "passes" => form.passes = boolean(name, value)?,
                "timing" | "wal" if boolean(name, value)? && !explain.analyze => {
                    let name = name.to_uppercase();
                    let message = format!("EXPLAIN option {name} requires ANALYZE");
                    return Err(SqlError::new(SqlState::INVALID_PARAMETER_VALUE, message));
                }
                "analyze" | "verbose" | "costs" | "settings" | "buffers" | "wal" | "timing"
                | "summary" => {
                    boolean(name, value)?;
                }
                _ => {
                    let message = format!("unrecognized EXPLAIN option \"{name}\"");
                    return Err(SqlError::new(SqlState::SYNTAX_ERROR, message));
                }
            }
        }
        if form.passes && form.json {
            return Err(SqlError::unsupported("EXPLAIN (PASSES, FORMAT JSON)"));
        }
        Ok(form)
    }

    /// The one column of the answer.
    pub fn field(self) -> Field {
        let field = text_field("QUERY PLAN");
        if self.json { Field { type_oid: JSON, ..field } } else { field }
    }
}

fn is_json(value: &str) -> Result<bool, SqlError> {
    match value {
        "text" => Ok(false),
        "json" => Ok(true),
        "xml" | "yaml" => {
            let what = format!("EXPLAIN (FORMAT {})", value.to_uppercase());
            Err(SqlError::unsupported(what).with_hint("FORMAT TEXT and FORMAT JSON are supported."))
        }
        _ => {
            let message = format!("unrecognized value for EXPLAIN option \"format\": \"{value}\"");
            Err(SqlError::new(SqlState::INVALID_PARAMETER_VALUE, message))
        }
    }
}

fn boolean(name: &str, value: &str) -> Result<bool, SqlError> {
    match value {
        "true" | "on" | "1" => Ok(true),
        "false" | "off" | "0" => Ok(false),
        _ => {
            let message = format!("{name} requires a Boolean value");
            Err(SqlError::new(SqlState::SYNTAX_ERROR, message))
        }
    }
}

/// A plan: an operator a line.
#[derive(Default)]
pub struct Shown {
    pub lines: Vec<Line>,
    /// What is said of the whole: name and value, or a line of its own.
    pub footer: Vec<(String, String)>,
    /// How a running job does.
    pub job: Vec<String>,
}

pub struct Line {
    pub depth: usize,
    pub text: String,
    pub output: Option<Vec<String>>,
}

impl Shown {
    /// Lines that are indented by two blanks a level.
    pub fn of(lines: impl IntoIterator<Item = String>) -> Shown {
        let line = |line: String| {
            let text = line.trim_start();
            let depth = (line.len() - text.len()) / 2;
            Line { depth, text: text.to_owned(), output: None }
        };
        Shown { lines: lines.into_iter().map(line).collect(), ..Shown::default() }
    }

    /// The answer.
    pub fn rows(self, form: Form) -> Result<RowSet, SqlError> {
        let rows = match form.json {
            true => vec![self.document()],
            false => self.text(),
        };
        let rows = rows.into_iter().map(|line| vec![Some(line)]).collect();
        let rows = RowSet::text(&["QUERY PLAN"], rows, "EXPLAIN")?;
        Ok(RowSet { fields: vec![form.field()], ..rows })
    }

    fn text(self) -> Vec<String> {
        let mut all = Vec::with_capacity(self.lines.len());
        for line in self.lines {
            all.push(format!("{}{}", "  ".repeat(line.depth), line.text));
            if let Some(output) = line.output {
                all.push(format!("{}Output: {}", "  ".repeat(line.depth + 2), output.join(", ")));
            }
        }
        all.extend(self.footer.into_iter().map(|(name, value)| format!("{name}: {value}")));
        all.extend(self.job);
        all
    }

    /// As PostgreSQL has it: an array of objects with a `Plan` of nested `Plans`.
    fn document(self) -> String {
        let mut entries: Vec<Vec<(String, Json)>> =
            nodes(&self.lines).into_iter().map(|plan| vec![("Plan".to_owned(), plan)]).collect();
        if entries.is_empty() {
            entries.push(Vec::new());
        }
        if let Some(last) = entries.last_mut() {
            for (name, value) in self.footer {
                let number = value.trim_end_matches(" ms");
                let value = match number.parse::<f64>() {
                    Ok(_) => Json::Number(number.to_owned()),
                    Err(_) => Json::String(value),
                };
                last.push((name, value));
            }
            if !self.job.is_empty() {
                let lines = self.job.into_iter().map(Json::String).collect();
                last.push(("Job".to_owned(), Json::Array(lines)));
            }
        }
        let mut document = String::new();
        Json::Array(entries.into_iter().map(Json::Object).collect()).pretty(&mut document, 0);
        document
    }
}

/// The operators at the top of these lines, with those below them.
fn nodes(lines: &[Line]) -> Vec<Json> {
    let (mut all, mut at) = (Vec::new(), 0);
    while let Some(line) = lines.get(at) {
        let rest = &lines[at + 1..];
        let below = rest.iter().take_while(|l| l.depth > line.depth).count();
        all.push(node(line, &rest[..below]));
        at += 1 + below;
    }
    all
}

fn node(line: &Line, below: &[Line]) -> Json {
    let text = |text: &str| Json::String(text.to_owned());
    let (kind, details) = line.text.split_once(':').unwrap_or((&line.text, ""));
    let mut entries = vec![("Node Type".to_owned(), text(kind.trim()))];
    let details = details.trim();
    if kind == "TableScan"
        && let Some(relation) = details.split([' ', ',']).next().filter(|name| !name.is_empty())
    {
        entries.push(("Relation Name".to_owned(), text(relation)));
    }
    if !details.is_empty() {
        entries.push(("Details".to_owned(), text(details)));
    }
    if let Some(output) = &line.output {
        let columns = output.iter().map(|column| text(column)).collect();
        entries.push(("Output".to_owned(), Json::Array(columns)));
    }
    if !below.is_empty() {
        entries.push(("Plans".to_owned(), Json::Array(nodes(below))));
    }
    Json::Object(entries)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_become_nested_objects() {
        let lines = ["Filter: a = 1", "  TableScan: t, point", "  Other", "Second"];
        let mut shown = Shown::of(lines.map(str::to_owned));
        shown.lines[1].output = Some(vec!["a".to_owned()]);
        shown.footer.push(("Execution Time".to_owned(), "1.5 ms".to_owned()));
        let document: String = shown.document().split_whitespace().collect();
        assert_eq!(
            document,
            "[{\"Plan\":{\"NodeType\":\"Filter\",\"Details\":\"a=1\",\"Plans\":[{\"NodeType\":\"TableScan\",\
             \"RelationName\":\"t\",\"Details\":\"t,point\",\"Output\":[\"a\"]},{\"NodeType\":\"Other\"}]}},\
             {\"Plan\":{\"NodeType\":\"Second\"},\"ExecutionTime\":1.5}]"
        );
    }
}
