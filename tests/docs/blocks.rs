//! Examples in a Markdown document.

/// A fenced block of SQL.
pub struct Block {
    /// Its statements must fail.
    pub fails: bool,
    /// It is a transcript of psql.
    pub transcript: bool,
    /// Its statements are repeated until they answer what is said: something has to arrive first.
    pub eventually: bool,
    pub examples: Vec<Example>,
    /// A file of the reader's: its path and content.
    pub file: Option<(String, String)>,
}

/// A statement and what it answers.
pub struct Example {
    pub line: usize,
    pub sql: String,
    pub expected: Vec<String>,
    /// The document says what the rows are.
    pub checked: bool,
}

const PROMPT: &str = "dev=> ";

/// The kind of an open block.
#[derive(Clone)]
enum Kind {
    Sql { fails: bool, eventually: bool },
    File(String),
}

fn kind_of(line: &str) -> Option<Kind> {
    match line {
        "```sql" => Some(Kind::Sql { fails: false, eventually: false }),
        "```sql error" => Some(Kind::Sql { fails: true, eventually: false }),
        "```sql eventually" => Some(Kind::Sql { fails: false, eventually: true }),
        _ => {
            let (language, path) = line.strip_prefix("```")?.split_once(' ')?;
            let file = matches!(language, "csv" | "json") && path.starts_with("/tmp/");
            file.then(|| Kind::File(path.to_owned()))
        }
    }
}

/// Every block fenced as `sql`, `sql error` or `sql eventually`, and every file of the reader's.
pub fn sql_blocks(text: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut open: Option<(Kind, usize, Vec<&str>)> = None;
    for (i, line) in text.lines().enumerate() {
        match (&mut open, line.trim_end()) {
            (None, line) => open = kind_of(line).map(|kind| (kind, i + 2, Vec::new())),
            (Some(_), "```") => {
                if let Some((Kind::File(path), _, lines)) = &open {
                    let content = lines.iter().map(|l| format!("{l}\n")).collect();
                    blocks.push(Block {
                        fails: false,
                        transcript: false,
                        eventually: false,
                        examples: Vec::new(),
                        file: Some((path.clone(), content)),
                    });
                    open = None;
                } else if let Some((Kind::Sql { fails, eventually }, first, lines)) = open.take() {
                    let transcript = lines.first().is_some_and(|l| l.starts_with(PROMPT));
                    let examples = if transcript {
                        transcript_of(&lines, first)
                    } else {
                        script(&lines, first)
                    };
                    blocks.push(Block { fails, transcript, eventually, examples, file: None });
                }
            }
            (Some((_, _, lines)), _) => lines.push(line),
        }
    }
    blocks
}

/// Whether a statement ends with this line: a semicolon outside quotes, then nothing or a comment.
fn ends(sql: &str) -> bool {
    let mut quote = None;
    let mut last = ' ';
    let mut chars = sql.chars().peekable();
    while let Some(c) = chars.next() {
        match quote {
            Some(q) => quote = (c != q).then_some(q),
            None if c == '\'' || c == '"' => quote = Some(c),
            None if c == '-' && chars.peek() == Some(&'-') => {
                while chars.next_if(|c| *c != '\n').is_some() {}
            }
            None if c.is_whitespace() => {}
            None => last = c,
        }
    }
    quote.is_none() && last == ';'
}

fn script(lines: &[&str], first: usize) -> Vec<Example> {
    let mut examples: Vec<Example> = Vec::new();
    let mut sql = String::new();
    let mut began = first;
    for (i, line) in lines.iter().enumerate() {
        if let Some(row) = line.trim().strip_prefix("-- =") {
            if let Some(example) = examples.last_mut() {
                example.checked = true;
                example.expected.push(row.trim().to_owned());
            }
            continue;
        }
        if sql.is_empty() {
            if line.trim().is_empty() || line.trim().starts_with("--") {
                continue;
            }
            began = first + i;
        }
        sql.push_str(line);
        sql.push('\n');
        if ends(&sql) {
            let sql = std::mem::take(&mut sql).trim().to_owned();
            examples.push(Example { line: began, sql, expected: Vec::new(), checked: false });
        }
    }
    assert!(sql.is_empty(), "line {began}: a statement without its semicolon: {sql}");
    examples
}

fn transcript_of(lines: &[&str], first: usize) -> Vec<Example> {
    let mut examples: Vec<Example> = Vec::new();
    let mut sql = String::new();
    let mut answers: Vec<&str> = Vec::new();
    for (i, line) in lines.iter().enumerate() {
        if let Some(statement) = line.strip_prefix(PROMPT) {
            finish(&mut examples, &mut answers);
            sql = statement.to_owned();
        } else if sql.is_empty() {
            answers.push(line);
            continue;
        } else {
            sql.push('\n');
            sql.push_str(line);
        }
        if ends(&sql) {
            let sql = std::mem::take(&mut sql);
            examples.push(Example { line: first + i, sql, expected: Vec::new(), checked: true });
        }
    }
    finish(&mut examples, &mut answers);
    examples
}

/// The rows of a printed table: what stands between its rule and `(n rows)`.
fn finish(examples: &mut [Example], answers: &mut Vec<&str>) {
    let printed = std::mem::take(answers);
    let Some(example) = examples.last_mut() else { return };
    let rows = printed.iter().skip_while(|l| !l.starts_with("--")).skip(1);
    example.expected = rows
        .take_while(|l| !l.starts_with('('))
        .map(|l| l.split('|').map(str::trim).collect::<Vec<_>>().join(" | "))
        .collect();
}
