//! Rows with named columns, printed for people or for programs.

use serde_json::{Map, Value};

/// Between two columns.
const GAP: &str = "  ";

pub struct Listing {
    columns: Vec<&'static str>,
    rows: Vec<Vec<Value>>,
}

impl Listing {
    pub fn new(columns: &[&'static str]) -> Listing {
        Listing { columns: columns.to_vec(), rows: Vec::new() }
    }

    /// One value for each column.
    pub fn add<const N: usize>(&mut self, row: [Value; N]) {
        debug_assert_eq!(N, self.columns.len());
        self.rows.push(row.into());
    }

    /// An array of objects.
    pub fn json(&self) -> String {
        self.objects().to_string()
    }

    pub fn objects(&self) -> Value {
        let object = |row: &Vec<Value>| {
            let named = self.columns.iter().zip(row);
            let fields: Map<String, Value> =
                named.map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
            Value::Object(fields)
        };
        Value::Array(self.rows.iter().map(object).collect())
    }

    /// Columns below each other, numbers on the right. What is not there is `-`.
    pub fn table(&self) -> String {
        let cells: Vec<Vec<String>> =
            self.rows.iter().map(|row| row.iter().map(cell).collect()).collect();
        let width = |at: usize| {
            let longest = cells.iter().map(|row| row[at].chars().count()).max().unwrap_or(0);
            longest.max(self.columns[at].len())
        };
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        let is_number = |at: usize| self.rows.iter().any(|row| row[at].is_number());
        let numbers: Vec<bool> = (0..self.columns.len()).map(is_number).collect();
        let line = |row: Vec<&str>| {
            let padded =
                row.into_iter().zip(&widths).zip(&numbers).map(|((text, &width), &right)| {
                    match right {
                        true => format!("{text:>width$}"),
                        false => format!("{text:<width$}"),
                    }
                });
            padded.collect::<Vec<_>>().join(GAP).trim_end().to_owned()
        };
        let mut lines = vec![line(self.columns.clone())];
        lines.extend(cells.iter().map(|row| line(row.iter().map(String::as_str).collect())));
        lines.join("\n")
    }
}

/// Names that users chose say nothing to the terminal.
pub fn plain(text: &str) -> String {
    text.replace(char::is_control, " ")
}

fn cell(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) if text.is_empty() => "-".to_owned(),
        // A line is a row.
        Value::String(text) => plain(text),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn columns_are_aligned_and_objects_have_their_names() {
        let mut listing = Listing::new(&["id", "name", "reason"]);
        listing.add([json!(7), json!("public.t"), Value::Null]);
        listing.add([json!(16385), json!("übung.v"), json!("two\nlines")]);
        let table = "   id  name      reason\n    7  public.t  -\n16385  übung.v   two lines";
        assert_eq!(listing.table(), table);
        let read: Value = serde_json::from_str(&listing.json()).unwrap();
        assert_eq!(read[0], json!({"id": 7, "name": "public.t", "reason": null}));
        assert_eq!(read[1]["reason"], "two\nlines");
        let empty = Listing::new(&["id"]);
        assert_eq!((empty.table().as_str(), empty.json().as_str()), ("id", "[]"));
    }
}
