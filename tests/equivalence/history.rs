//! Random DML histories: statements, COPY and transaction blocks.

use std::fmt::Write;

use crate::generate::{Table, condition, float, int, numeric, odd_float, text, timestamp};
use crate::rng::Rng;

/// Makes DML over the tables; `o` counts up through a run.
pub struct History<'a> {
    tables: &'a [Table],
    next_order: i64,
    /// Draws what is put in place of other values.
    odd: Rng,
}

impl<'a> History<'a> {
    pub fn new(tables: &'a [Table], odd: Rng) -> History<'a> {
        History { tables, next_order: 0, odd }
    }

    /// The next statement.
    pub fn statement(&mut self, rng: &mut Rng) -> Written {
        let table = &self.tables[rng.below(self.tables.len())];
        let name = &table.name;
        if table.append_only {
            return self.insert(rng, table);
        }
        let sql = match rng.below(10) {
            0..=4 => return self.insert(rng, table),
            5 => format!("UPDATE {name} SET a = {} WHERE {}", int(rng), condition(rng, "")),
            6 => format!(
                "UPDATE {name} SET s = {}, n = n + 1.25, b = {} WHERE {}",
                text(rng),
                int(rng),
                condition(rng, "")
            ),
            7 if table.keyed => {
                let far = rng.between(40, 90);
                format!("UPDATE {name} SET id = id + {far} WHERE id < {}", rng.between(0, 8))
            }
            _ => format!("DELETE FROM {name} WHERE {}", condition(rng, "")),
        };
        Written { sql, copy: None }
    }

    fn insert(&mut self, rng: &mut Rng, table: &Table) -> Written {
        let mut lines = String::new();
        let most = if rng.chance(10) { 60 } else { 6 };
        let rows = 1 + rng.below(most);
        let mut sql = format!("INSERT INTO {} VALUES ", table.name);
        for i in 0..rows {
            if i > 0 {
                sql.push_str(", ");
            }
            self.next_order += 1;
            let id = rng.between(0, 30);
            let o = self.next_order;
            let (a, b, s, n) = (int(rng), int(rng), text(rng), numeric(rng));
            let (drawn, odd) = (float(rng), odd_float(&mut self.odd));
            let values =
                [id.to_string(), o.to_string(), a, b, s, n, odd.unwrap_or(drawn), timestamp(rng)];
            let _ = write!(sql, "({})", values.join(", "));
            let fields = values.iter().map(|v| match v.as_str() {
                "NULL" => "\\N",
                v => v.trim_matches('\''),
            });
            lines.push_str(&fields.collect::<Vec<_>>().join("\t"));
            lines.push('\n');
        }
        if table.keyed {
            // The same key may stand twice in the statement: DO NOTHING takes the first.
            sql.push_str(" ON CONFLICT DO NOTHING");
            return Written { sql, copy: None };
        }
        Written { sql, copy: Some(Copied { table: table.name.clone(), lines }) }
    }
}

/// A statement, and what a COPY in its place would be given.
#[derive(Clone, Debug)]
pub struct Written {
    pub sql: String,
    pub copy: Option<Copied>,
}

#[derive(Clone, Debug)]
pub struct Copied {
    pub table: String,
    pub lines: String,
}

/// One step of a history.
#[derive(Clone, Debug)]
pub enum Action {
    Statement(Written),
    Copy(Copied),
    /// Between BEGIN and COMMIT or ROLLBACK. What follows a savepoint comes twice: the first time it is undone.
    Block {
        actions: Vec<Action>,
        savepoint: Option<usize>,
        commit: bool,
    },
}

/// The statements as a session may send them: some as COPY, some together in a transaction block, and blocks that are
/// rolled back among them. Those of the table `outside` stay by themselves.
pub fn actions(rng: &mut Rng, statements: Vec<Written>, outside: Option<&str>) -> Vec<Action> {
    let apart = |w: &Written| {
        outside.is_some_and(|table| w.sql.starts_with(&format!("INSERT INTO {table} ")))
    };
    let mut out: Vec<Action> = Vec::new();
    let mut rest = statements.into_iter().peekable();
    while let Some(first) = rest.next() {
        let single = |rng: &mut Rng, w: Written| match w.copy {
            Some(copy) if rng.chance(40) => Action::Copy(copy),
            _ => Action::Statement(w),
        };
        if apart(&first) {
            out.push(Action::Statement(first));
            continue;
        }
        if !rng.chance(30) {
            out.push(single(rng, first));
            continue;
        }
        let mut block = vec![single(rng, first)];
        while block.len() < 4 && rng.chance(60) {
            let Some(next) = rest.next_if(|w| !apart(w)) else { break };
            block.push(single(rng, next));
        }
        if rng.chance(25) {
            // The same statements come again: undone, they must leave nothing.
            let actions = block.clone();
            out.push(Action::Block { actions, savepoint: None, commit: false });
        }
        let savepoint = rng.chance(30).then(|| rng.below(block.len()));
        if let Some(at) = savepoint {
            let undone = block[at..].to_vec();
            block.splice(at..at, undone);
        }
        out.push(Action::Block { actions: block, savepoint, commit: true });
    }
    out
}
