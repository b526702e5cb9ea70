//! Random correlated subqueries over tables that call their columns the same and are joined to themselves.

use crate::rng::Rng;

/// Tables and their columns.
pub const TABLES: [(&str, [&str; 3]); 4] = [
    ("u", ["id", "k", "v"]),
    ("a", ["id", "k", "v"]),
    ("b", ["id", "k", "w"]),
    ("c", ["k", "v", "w"]),
];

/// Subqueries within each other.
const MAX_DEPTH: usize = 2;

const COMPARISONS: [&str; 7] = ["=", "=", "=", "<", ">", "<>", "<="];

/// A relation of FROM, by the name that it has there.
#[derive(Clone)]
struct Relation {
    name: String,
    columns: Vec<String>,
}

/// What each query around has in FROM, the innermost last.
type Scopes = Vec<Vec<Relation>>;

pub struct Generator<'a> {
    rng: &'a mut Rng,
    names: usize,
}

impl<'a> Generator<'a> {
    pub fn new(rng: &'a mut Rng) -> Generator<'a> {
        Generator { rng, names: 0 }
    }

    /// A query with correlated subqueries: in its condition, its SELECT list, and as a lateral join.
    pub fn query(&mut self) -> String {
        let (mut from, mut relations) = self.from(1, &vec![]);
        if self.rng.chance(30) {
            let (lateral, joined) = self.lateral(&vec![relations.clone()]);
            from += &lateral;
            relations.push(joined);
        }
        let scopes = vec![relations.clone()];
        let mut items: Vec<String> = relations
            .iter()
            .flat_map(|r| r.columns.iter().map(|c| format!("{}.{c}", r.name)))
            .collect();
        if self.rng.chance(35) {
            items.push(self.value(&scopes));
        }
        let condition = match self.rng.chance(85) {
            true => format!(" WHERE {}", self.predicate(0, &scopes)),
            false => String::new(),
        };
        let items = items.iter().enumerate().map(|(i, item)| format!("{item} AS o{i}"));
        format!("SELECT {} FROM {from}{condition}", items.collect::<Vec<_>>().join(", "))
    }

    fn fresh(&mut self) -> String {
        self.names += 1;
        format!("x{}", self.names)
    }

    /// One or two relations.
    fn from(&mut self, depth: usize, scopes: &Scopes) -> (String, Vec<Relation>) {
        let (mut text, first) = self.relation(depth, scopes, None);
        let mut relations = vec![first];
        if self.rng.chance(30) {
            let first = relations[0].name.clone();
            let (second, relation) = self.relation(depth, scopes, Some(&first));
            relations.push(relation);
            text += &match self.rng.below(3) {
                0 => format!(", {second}"),
                way => {
                    let kind = if way == 1 { "JOIN" } else { "LEFT JOIN" };
                    let [l, r] = [0, 1].map(|i| {
                        let columns = relations[i].columns.len();
                        let at = self.rng.below(columns);
                        format!("{}.{}", relations[i].name, relations[i].columns[at])
                    });
                    format!(" {kind} {second} ON {l} = {r}")
                }
            };
        }
        (text, relations)
    }

    /// A table, often under its own name, so that it hides one of a query around; or a query.
    fn relation(
        &mut self,
        depth: usize,
        scopes: &Scopes,
        other: Option<&str>,
    ) -> (String, Relation) {
        if depth < MAX_DEPTH && self.rng.chance(25) {
            return self.derived(scopes);
        }
        let (table, columns) = TABLES[self.rng.below(TABLES.len())];
        let columns = columns.map(str::to_owned).to_vec();
        let own = self.rng.chance(50) && other != Some(table);
        let name = if own { table.to_owned() } else { self.fresh() };
        let text = if own { name.clone() } else { format!("{table} {name}") };
        (text, Relation { name, columns })
    }

    fn derived(&mut self, scopes: &Scopes) -> (String, Relation) {
        let name = self.fresh();
        let (inner, relation) = self.relation(MAX_DEPTH, scopes, None);
        let mut within = scopes.clone();
        within.push(vec![relation.clone()]);
        let condition = match self.rng.chance(50) {
            true => format!(" WHERE {}", self.comparison(&within)),
            false => String::new(),
        };
        let at = self.rng.below(relation.columns.len());
        let [one, two] =
            [at, (at + 1) % relation.columns.len()].map(|i| relation.columns[i].clone());
        let from = format!("FROM {inner}{condition}");
        let of = &relation.name;
        let (query, columns) = match self.rng.below(4) {
            0 => (format!("SELECT DISTINCT {of}.{one} {from}"), vec![one]),
            1 => {
                let call = self.rng.pick(&["sum", "max", "count"]);
                let items = format!("{of}.{one}, {call}({of}.{two}) AS {two}");
                (format!("SELECT {items} {from} GROUP BY {of}.{one}"), vec![one, two])
            }
            2 if !scopes.is_empty() => {
                let outer = self.column(&within, false);
                (format!("SELECT {of}.{one}, {outer} AS y {from}"), vec![one, "y".into()])
            }
            // By the name that another column of the table has.
            _ => (format!("SELECT {of}.{one} AS {two} {from}"), vec![two]),
        };
        (format!("({query}) {name}"), Relation { name, columns })
    }

    fn lateral(&mut self, scopes: &Scopes) -> (String, Relation) {
        let aggregate = self.rng.chance(50);
        let column = self.rng.pick(&["k", "v", "z"]).to_owned();
        let (from, within) = self.subquery(0, scopes);
        let item = if aggregate { self.aggregate(&within) } else { self.column(&within, true) };
        let limit = match !aggregate && self.rng.chance(40) {
            true => " ORDER BY 1 LIMIT 2",
            false => "",
        };
        let name = self.fresh();
        let query = format!("(SELECT {item} AS {column} {from}{limit}) {name}");
        let text = match self.rng.chance(50) {
            true => format!(" CROSS JOIN LATERAL {query}"),
            false => format!(" LEFT JOIN LATERAL {query} ON true"),
        };
        (text, Relation { name, columns: vec![column] })
    }

    /// A column of the innermost query or of one around it, of a relation that is not hidden.
    fn column(&mut self, scopes: &Scopes, own: bool) -> String {
        let innermost = scopes.len() - 1;
        for _ in 0..20 {
            let level = match own || innermost == 0 {
                true => innermost,
                false => self.rng.below(innermost),
            };
            let at = self.rng.below(scopes[level].len());
            let relation = &scopes[level][at];
            let hides = |r: &Relation| r.name == relation.name;
            if scopes[level + 1..].iter().flatten().any(hides) {
                continue;
            }
            let column = &relation.columns[self.rng.below(relation.columns.len())];
            if level == innermost && scopes[level].len() == 1 && self.rng.chance(25) {
                return column.clone();
            }
            return format!("{}.{column}", relation.name);
        }
        let relation = &scopes[innermost][0];
        format!("{}.{}", relation.name, relation.columns[0])
    }

    fn comparison(&mut self, scopes: &Scopes) -> String {
        let op = self.rng.pick(&COMPARISONS);
        let left = self.column(scopes, true);
        match self.rng.below(10) {
            0 => format!("{left} IS NOT NULL"),
            1 => format!("{left} {op} {}", self.rng.below(4)),
            2 => format!("{left} {op} {}", self.column(scopes, true)),
            _ => format!("{left} {op} {}", self.column(scopes, false)),
        }
    }

    fn predicate(&mut self, depth: usize, scopes: &Scopes) -> String {
        if depth >= MAX_DEPTH {
            return self.comparison(scopes);
        }
        match self.rng.below(10) {
            0 | 1 => self.comparison(scopes),
            2 => format!(
                "{} AND {}",
                self.predicate(depth, scopes),
                self.predicate(depth + 1, scopes)
            ),
            3 => format!(
                "({} OR {})",
                self.predicate(depth, scopes),
                self.predicate(depth + 1, scopes)
            ),
            4 => format!("NOT ({})", self.predicate(depth + 1, scopes)),
            _ => self.of_subquery(depth, scopes),
        }
    }

    /// FROM and WHERE of a subquery, and what can be named in it.
    fn subquery(&mut self, depth: usize, scopes: &Scopes) -> (String, Scopes) {
        let (from, relations) = self.from(depth + 1, scopes);
        let mut within = scopes.clone();
        within.push(relations);
        let compared = self.comparison(&within);
        let condition = match self.rng.chance(45) {
            true => format!("{compared} AND {}", self.predicate(depth + 1, &within)),
            false => compared,
        };
        (format!("FROM {from} WHERE {condition}"), within)
    }

    fn of_subquery(&mut self, depth: usize, scopes: &Scopes) -> String {
        let (from, within) = self.subquery(depth, scopes);
        let not = if self.rng.chance(50) { "NOT " } else { "" };
        let way = self.rng.below(4);
        if way == 0 {
            return format!("{not}EXISTS (SELECT 1 {from})");
        }
        let value = self.column(scopes, true);
        if way == 1 {
            let op = self.rng.pick(&["=", "<", ">"]);
            return format!("{value} {op} (SELECT {} {from})", self.aggregate(&within));
        }
        let own = self.column(&within, true);
        let rows = match self.rng.below(8) {
            0 => format!("SELECT DISTINCT {own} {from}"),
            1 => format!("SELECT {own} {from} GROUP BY {own} HAVING count(*) = 1"),
            2 => format!("SELECT count(*) {from} GROUP BY {own}"),
            _ => format!("SELECT {own} {from}"),
        };
        if way == 2 {
            return format!("{value} {not}IN ({rows})");
        }
        let op = self.rng.pick(&COMPARISONS);
        let quantifier = self.rng.pick(&["ANY", "ALL"]);
        format!("{value} {op} {quantifier} ({rows})")
    }

    fn aggregate(&mut self, scopes: &Scopes) -> String {
        let own = self.column(scopes, true);
        match self.rng.below(6) {
            0 => "count(*)".into(),
            1 => format!("count({own})"),
            2 => format!("sum({own})"),
            3 => format!("max({own}) + 1"),
            4 => format!("count(DISTINCT {own})"),
            _ => format!("coalesce(sum({own}), 0)"),
        }
    }

    /// An item of the SELECT list.
    fn value(&mut self, scopes: &Scopes) -> String {
        match self.rng.below(4) {
            0 => self.of_subquery(0, scopes),
            1 => {
                let condition = self.comparison(scopes);
                let (from, within) = self.subquery(0, scopes);
                let aggregate = self.aggregate(&within);
                format!("CASE WHEN {condition} THEN 1 ELSE (SELECT {aggregate} {from}) END")
            }
            2 => {
                let (from, within) = self.subquery(0, scopes);
                let own = self.column(&within, true);
                format!("(SELECT {own} {from} ORDER BY {own} LIMIT 1)")
            }
            _ => {
                let (from, within) = self.subquery(0, scopes);
                format!("(SELECT {} {from})", self.aggregate(&within))
            }
        }
    }
}
