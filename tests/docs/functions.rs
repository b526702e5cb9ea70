//! The examples in the tables of functions.
//!
//! A table whose last column is `example` has in that column `` `f(x)` → `r` ``: `SELECT f(x)` returns the row `r`,
//! several rows separated by commas, NULL as `NULL`. Without the arrow the call is run and its result is not compared.

/// A row of a table of functions.
pub struct Row {
    pub line: usize,
    /// The names in its first column.
    pub names: Vec<String>,
    pub expression: String,
    /// The rows that the call returns; `None`: they are not compared.
    pub expected: Option<Vec<String>>,
}

impl Row {
    /// The example, and the same call by each other name of the function if it calls the first one.
    pub fn expressions(&self) -> Vec<String> {
        let mut all = vec![self.expression.clone()];
        if let [first, others @ ..] = self.names.as_slice() {
            let call = format!("{first}(");
            if self.expression.contains(&call) {
                let by = |name: &String| self.expression.replace(&call, &format!("{name}("));
                all.extend(others.iter().map(by));
            }
        }
        all
    }
}

/// The cells of a line of a table; `\|` is a bar within a cell.
fn cells(line: &str) -> Option<Vec<String>> {
    let inner = line.strip_prefix('|')?.strip_suffix('|')?;
    let masked = inner.replace("\\|", "\u{1}");
    Some(masked.split('|').map(|c| c.trim().replace('\u{1}', "|")).collect())
}

/// The pieces of code in a cell.
fn codes(cell: &str) -> Vec<String> {
    cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// Every row of every table of a document whose last column is `example`.
pub fn rows(text: &str) -> Vec<Row> {
    let mut rows = Vec::new();
    let mut in_table = false;
    for (i, line) in text.lines().enumerate() {
        let Some(cells) = cells(line) else {
            in_table = false;
            continue;
        };
        let (Some(first), Some(example)) = (cells.first(), cells.last()) else { continue };
        if example == "example" {
            in_table = true;
        } else if in_table && !example.starts_with("---") {
            let (call, results) = match example.split_once(" → ") {
                Some((call, results)) => (call, Some(codes(results))),
                None => (example.as_str(), None),
            };
            let expression = codes(call).into_iter().next();
            let expression =
                expression.unwrap_or_else(|| panic!("line {}: no example in code", i + 1));
            rows.push(Row { line: i + 1, names: codes(first), expression, expected: results });
        }
    }
    rows
}
