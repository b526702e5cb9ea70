//! Random schemas and queries, as SQL text.
//!
//! Values come from small domains, so that keys collide, groups change and joins match; NULLs are
//! everywhere. Every LIMIT and row_number orders by a total order, so that batch has one answer.

use crate::rng::Rng;

// With paths, so that other tests may include this file.
#[path = "generate/common.rs"]
mod common;
#[path = "generate/documents.rs"]
mod documents;
#[path = "generate/keys.rs"]
mod keys;
#[path = "generate/operands.rs"]
mod operands;
#[path = "generate/windows.rs"]
mod windows;

use windows::{two_windows, window_numbers, window_peers, window_rows, window_values};

/// A generated table. All have the same value columns: `a`, `b` int, `s` text, `n` numeric(8,2),
/// `f` double precision, `t` timestamp; keyed ones also `id int PRIMARY KEY`; `o` is a row number
/// that makes every row of a run distinguishable in orders.
#[derive(Clone, Debug)]
pub struct Table {
    pub name: String,
    pub keyed: bool,
    /// `o` is a part of the key.
    pub composite: bool,
    pub append_only: bool,
}

/// Which operators and state paths a query exercises, for the coverage table.
pub type Tags = Vec<&'static str>;

#[derive(Clone, Debug)]
pub struct Query {
    pub sql: String,
    pub tags: Tags,
    /// What PostgreSQL is asked, where it has no such syntax.
    pub judged: Option<String>,
}

impl Table {
    pub fn ddl(&self) -> String {
        let key = if self.keyed && !self.composite { "id int PRIMARY KEY" } else { "id int" };
        let composite = if self.composite { ", PRIMARY KEY (o, id)" } else { "" };
        let append = if self.append_only { " APPEND ONLY" } else { "" };
        format!(
            "CREATE TABLE {} ({key}, o int NOT NULL, a int, b int, s text, n numeric(8,2), \
             f double precision, t timestamp{composite}){append}",
            self.name
        )
    }
}

/// The same, the first of them a source: rows only come.
pub fn tables_with_source(rng: &mut Rng) -> Vec<Table> {
    let mut tables = tables(rng);
    tables[0].keyed = false;
    tables[0].append_only = true;
    tables
}

pub fn tables(rng: &mut Rng) -> Vec<Table> {
    (0..3)
        .map(|i| {
            let append_only = rng.chance(20);
            let keyed = rng.chance(65);
            Table { name: format!("t{i}"), keyed, composite: false, append_only }
        })
        .collect()
}

/// Two of the tables have keys, one of them of two columns; a source stays as it is.
pub fn give_keys(tables: &mut [Table]) {
    for (i, table) in tables.iter_mut().enumerate().rev().take(2) {
        *table = Table { keyed: true, composite: i == 1, append_only: false, ..table.clone() };
    }
}

pub fn int(rng: &mut Rng) -> String {
    if rng.chance(12) { "NULL".into() } else { rng.between(-1, 5).to_string() }
}

pub fn text(rng: &mut Rng) -> String {
    rng.pick(&["NULL", "''", "'x'", "'y'", "'yy'", "'zebra'"]).to_string()
}

pub fn numeric(rng: &mut Rng) -> String {
    rng.pick(&["NULL", "0", "1.25", "-3.5", "100.01", "7"]).to_string()
}

pub fn float(rng: &mut Rng) -> String {
    rng.pick(&["NULL", "0", "0.1", "0.2", "-0.3", "1e10", "-1e10", "3"]).to_string()
}

/// A float that is not drawn by [`float`]: `None` mostly.
pub fn odd_float(rng: &mut Rng) -> Option<String> {
    let odd = ["'NaN'", "'-NaN'", "'-0'", "'-0'"];
    rng.chance(20).then(|| rng.pick(&odd).to_string())
}

pub fn timestamp(rng: &mut Rng) -> String {
    if rng.chance(10) {
        return "NULL".into();
    }
    let seconds = rng.between(0, 59);
    format!("'2024-01-01 00:0{}:{seconds:02}'", rng.below(3))
}

/// A condition over the value columns; `q` qualifies them (`x.`).
pub fn condition(rng: &mut Rng, q: &str) -> String {
    match rng.below(12) {
        0 => format!("{q}a = {}", rng.between(0, 5)),
        1 => format!("{q}a > {q}b"),
        2 => format!("{q}b <= {}", rng.between(0, 5)),
        3 => format!("{q}s = 'x'"),
        4 => format!("{q}s IS NULL"),
        5 => format!("{q}n > 1"),
        6 => format!("{q}a IN (1, 3) OR {q}b = 2"),
        7 => format!("NOT ({q}a = 2 AND {q}b > 1)"),
        8 => format!("{q}id % 3 = {}", rng.below(3)),
        9 => format!("{q}f < 1 AND {q}a IS NOT NULL"),
        10 => format!("{q}s LIKE '%y%'"),
        _ => format!("{q}id < {}", rng.between(2, 25)),
    }
}

fn scalar(rng: &mut Rng, q: &str) -> String {
    let operand = operands::operand(rng, q);
    let plain = plain_scalar(rng, q);
    operand.unwrap_or(plain)
}

fn plain_scalar(rng: &mut Rng, q: &str) -> String {
    match rng.below(9) {
        0 => format!("{q}a + {q}b"),
        1 => format!("{q}a * 2 - 1"),
        2 => format!("coalesce({q}s, 'none')"),
        3 => format!("CASE WHEN {q}a > 2 THEN {q}s ELSE 'low' END"),
        4 => format!("{q}n * 2"),
        5 => format!("{q}s || {q}s"),
        6 => format!("{q}a IS NULL"),
        7 => format!("abs({q}b)"),
        _ => format!("{q}f"),
    }
}

fn table_name<'t>(rng: &mut Rng, tables: &'t [Table]) -> &'t str {
    &tables[rng.below(tables.len())].name
}

/// The shapes a view can have.
type Shape = fn(&mut Rng, &[Table]) -> Query;
const SHAPES: &[Shape] = &[
    filter,
    filter,
    aggregate,
    aggregate,
    aggregate,
    global_aggregate,
    join,
    join,
    join,
    outer_join,
    outer_join,
    outer_residual,
    semi,
    anti,
    not_in,
    mark,
    distinct,
    union_all,
    union,
    set_operation,
    set_operation,
    nested_set_operation,
    grouping_sets,
    grouping_sets,
    distinct_on,
    with_ties,
    window_rows,
    window_rows,
    window_peers,
    window_values,
    window_values,
    window_numbers,
    two_windows,
    top_n,
    row_number,
    row_number,
    scalar_subquery,
    join_of_aggregates,
    aggregate_of_join,
    tumble,
    hop,
    session,
    session,
    asof,
    asof,
    three_way,
    theta,
    unnested,
    unnested,
    having,
    distinct_aggregate,
    self_join,
];

pub fn query(rng: &mut Rng, tables: &[Table]) -> Query {
    SHAPES[rng.below(SHAPES.len())](rng, tables)
}

/// Shapes of further views: what a seed draws of the others stays the same.
fn further() -> impl Iterator<Item = Shape> {
    keys::SHAPES.iter().chain(documents::SHAPES).chain(common::SHAPES).copied()
}

pub fn further_query(rng: &mut Rng, tables: &[Table]) -> Query {
    let shapes: Vec<Shape> = further().collect();
    shapes[rng.below(shapes.len())](rng, tables)
}

/// A view of the shape whose turn it is; [`turns`] in a row are all shapes.
pub fn nth(rng: &mut Rng, tables: &[Table], turn: usize) -> Query {
    let shapes: Vec<Shape> = SHAPES.iter().copied().chain(further()).collect();
    shapes[turn % shapes.len()](rng, tables)
}

pub fn turns() -> usize {
    SHAPES.len() + further().count()
}

fn tagged(sql: String, tags: &[&'static str]) -> Query {
    Query { sql, tags: tags.to_vec(), judged: None }
}

/// A query that PostgreSQL spells in another way.
fn spelled(sql: String, judged: String, tags: &[&'static str]) -> Query {
    Query { judged: Some(judged), ..tagged(sql, tags) }
}

fn filter(rng: &mut Rng, t: &[Table]) -> Query {
    let (e1, e2) = (scalar(rng, ""), scalar(rng, ""));
    tagged(
        format!(
            "SELECT id, {e1} AS e1, {e2} AS e2 FROM {} WHERE {}",
            table_name(rng, t),
            condition(rng, "")
        ),
        &["filter", "project"],
    )
}

fn group_columns(rng: &mut Rng) -> &'static str {
    rng.pick(&["a", "s", "a, s", "b", "n", "f", "a, b"])
}

fn aggregates(rng: &mut Rng, q: &str) -> String {
    let all = [
        "count(*) AS c0".to_string(),
        format!("count({q}a) AS c1"),
        format!("sum({q}a) AS c2"),
        format!("sum({q}n) AS c3"),
        format!("sum({q}f) AS c4"),
        format!("min({q}b) AS c5"),
        format!("max({q}s) AS c6"),
        format!("avg({q}f) AS c7"),
        format!("min({q}t) AS c8"),
        format!("max({q}n) AS c9"),
        format!("count(*) FILTER (WHERE {q}a > 1) AS c10"),
        format!("sum({q}b) FILTER (WHERE {q}s = 'x') AS c11"),
        format!("avg({q}a) AS c12"),
        format!("string_agg({q}s, ',' ORDER BY {q}s) AS c13"),
        format!("array_agg({q}b ORDER BY {q}b DESC) AS c14"),
        format!("string_agg(DISTINCT {q}s, '-' ORDER BY {q}s) FILTER (WHERE {q}b > 0) AS c15"),
        format!("var_pop({q}a) AS c16"),
        format!("stddev({q}n) AS c17"),
        format!("variance(DISTINCT {q}b) FILTER (WHERE {q}a > 0) AS c18"),
        // PostgreSQL's floats are rounded at every step: what is shown does not tell.
        format!("round(corr({q}a, {q}b)::numeric, 9) AS c19"),
        format!("round(regr_slope({q}b, {q}a)::numeric, 9) AS c20"),
        format!("round(covar_samp({q}a, {q}n)::numeric, 6) AS c21"),
        format!("bit_and({q}a) AS c22"),
        format!("bit_xor({q}b) AS c23"),
        format!("percentile_cont(0.4) WITHIN GROUP (ORDER BY {q}a) AS c24"),
        format!("percentile_disc(array[0.2, 0.9]) WITHIN GROUP (ORDER BY {q}s DESC) AS c25"),
        format!("mode() WITHIN GROUP (ORDER BY {q}b) AS c26"),
        format!("jsonb_object_agg(coalesce({q}id, 0), {q}b ORDER BY {q}o) AS c27"),
        format!("jsonb_agg({q}n ORDER BY {q}n DESC) AS c28"),
        format!("bool_or({q}a > {q}b) AS c29"),
        format!("first_value({q}s ORDER BY {q}t DESC, {q}o) AS c30"),
        format!("last_value({q}n ORDER BY {q}f, {q}o) AS c31"),
    ];
    let start = rng.below(all.len());
    let n = 1 + rng.below(4);
    (0..n).map(|i| all[(start + i * 3) % all.len()].clone()).collect::<Vec<_>>().join(", ")
}

fn aggregate(rng: &mut Rng, t: &[Table]) -> Query {
    let group = group_columns(rng);
    tagged(
        format!(
            "SELECT {group}, {} FROM {} GROUP BY {group}",
            aggregates(rng, ""),
            table_name(rng, t)
        ),
        &["aggregate"],
    )
}

fn having(rng: &mut Rng, t: &[Table]) -> Query {
    let group = group_columns(rng);
    tagged(
        format!(
            "SELECT {group}, count(*) AS c FROM {} WHERE {} GROUP BY {group} HAVING count(*) > {}",
            table_name(rng, t),
            condition(rng, ""),
            rng.between(1, 3)
        ),
        &["aggregate", "having"],
    )
}

fn distinct_aggregate(rng: &mut Rng, t: &[Table]) -> Query {
    tagged(
        format!(
            "SELECT a, count(DISTINCT b) AS d, sum(DISTINCT b) AS sd, count(DISTINCT s) FILTER (WHERE b > 1) AS ds, count(*) AS c FROM {} GROUP BY a",
            table_name(rng, t)
        ),
        &["aggregate distinct"],
    )
}

fn global_aggregate(rng: &mut Rng, t: &[Table]) -> Query {
    tagged(
        format!("SELECT {} FROM {}", aggregates(rng, ""), table_name(rng, t)),
        &["aggregate global"],
    )
}

fn join_key(rng: &mut Rng) -> (&'static str, &'static str) {
    let (l, r) = *rng.pick(&[
        &("a", "b"),
        &("a", "a"),
        &("id", "a"),
        &("s", "s"),
        &("id", "id"),
        &("b", "a"),
    ]);
    (l, r)
}

fn join(rng: &mut Rng, t: &[Table]) -> Query {
    let (l, r) = join_key(rng);
    let residual = if rng.chance(30) { " AND x.b < y.a" } else { "" };
    let filter =
        if rng.chance(40) { format!(" WHERE {}", condition(rng, "x.")) } else { String::new() };
    tagged(
        format!(
            "SELECT x.id AS xid, y.id AS yid, x.s AS xs, y.n AS yn FROM {} x JOIN {} y ON x.{l} = y.{r}{residual}{filter}",
            table_name(rng, t),
            table_name(rng, t)
        ),
        &["join inner"],
    )
}

fn self_join(rng: &mut Rng, t: &[Table]) -> Query {
    let name = table_name(rng, t);
    tagged(
        format!(
            "SELECT x.o AS xo, y.o AS yo FROM {name} x JOIN {name} y ON x.a = y.a AND x.o < y.o"
        ),
        &["join inner", "self join"],
    )
}

fn outer_join(rng: &mut Rng, t: &[Table]) -> Query {
    let (l, r) = join_key(rng);
    let (kind, tag) =
        *rng.pick(&[&("LEFT", "join left"), &("RIGHT", "join right"), &("FULL", "join full")]);
    tagged(
        format!(
            "SELECT x.id AS xid, x.a AS xa, y.id AS yid, y.s AS ys FROM {} x {kind} JOIN {} y ON x.{l} = y.{r}",
            table_name(rng, t),
            table_name(rng, t)
        ),
        &[tag],
    )
}

fn outer_residual(rng: &mut Rng, t: &[Table]) -> Query {
    let (l, r) = join_key(rng);
    let kind = rng.pick(&["LEFT", "RIGHT", "FULL"]);
    tagged(
        format!(
            "SELECT x.id AS xid, y.id AS yid FROM {} x {kind} JOIN {} y ON x.{l} = y.{r} AND x.b > y.b",
            table_name(rng, t),
            table_name(rng, t)
        ),
        &["join outer residual"],
    )
}

fn three_way(rng: &mut Rng, t: &[Table]) -> Query {
    tagged(
        format!(
            "SELECT x.id AS xid, y.o AS yo, z.s AS zs FROM {} x JOIN {} y ON x.a = y.b LEFT JOIN {} z ON y.id = z.id WHERE {}",
            table_name(rng, t),
            table_name(rng, t),
            table_name(rng, t),
            condition(rng, "x.")
        ),
        &["join inner", "join left", "three way"],
    )
}

fn theta(rng: &mut Rng, t: &[Table]) -> Query {
    tagged(
        format!(
            "SELECT x.id AS xid, y.id AS yid FROM {} x JOIN {} y ON x.n < y.n AND x.a = 1",
            table_name(rng, t),
            table_name(rng, t)
        ),
        &["join theta"],
    )
}

fn unnested(rng: &mut Rng, t: &[Table]) -> Query {
    let elements = rng.pick(&[
        "unnest(ARRAY[x.a, x.b, NULL]) AS u(e)",
        "generate_series(1, x.a) AS u(e)",
        "unnest(string_to_array(x.s, 'e')) AS u(e)",
        "jsonb_array_elements_text(jsonb_build_array(x.a, x.s)) AS u(e)",
    ]);
    let name = table_name(rng, t);
    let filter = condition(rng, "x.");
    let sql = match rng.below(4) {
        0 => format!("SELECT x.id, x.o, u.e FROM {name} x, {elements} WHERE {filter}"),
        1 => format!("SELECT x.id, x.o, u.e FROM {name} x LEFT JOIN LATERAL {elements} ON true"),
        2 => format!("SELECT u.e, count(*) AS c FROM {name} x, {elements} GROUP BY u.e"),
        _ => format!("SELECT x.id, unnest(ARRAY[x.b, x.id]) AS e FROM {name} x WHERE {filter}"),
    };
    tagged(sql, &["unnest"])
}

fn semi(rng: &mut Rng, t: &[Table]) -> Query {
    let (l, r) = join_key(rng);
    tagged(
        format!(
            "SELECT id, a, s FROM {} x WHERE EXISTS (SELECT 1 FROM {} y WHERE y.{r} = x.{l} AND y.b >= {})",
            table_name(rng, t),
            table_name(rng, t),
            rng.between(0, 3)
        ),
        &["join semi"],
    )
}

fn anti(rng: &mut Rng, t: &[Table]) -> Query {
    let (l, r) = join_key(rng);
    tagged(
        format!(
            "SELECT id, b, s FROM {} x WHERE NOT EXISTS (SELECT 1 FROM {} y WHERE y.{r} = x.{l} AND y.n > 0)",
            table_name(rng, t),
            table_name(rng, t)
        ),
        &["join anti"],
    )
}

fn not_in(rng: &mut Rng, t: &[Table]) -> Query {
    tagged(
        format!(
            "SELECT id, a FROM {} WHERE a NOT IN (SELECT b FROM {} WHERE {})",
            table_name(rng, t),
            table_name(rng, t),
            condition(rng, "")
        ),
        &["join not in"],
    )
}

fn mark(rng: &mut Rng, t: &[Table]) -> Query {
    tagged(
        format!(
            "SELECT id, a, s FROM {} x WHERE a IN (SELECT b FROM {} WHERE n > 0) OR s = 'x'",
            table_name(rng, t),
            table_name(rng, t)
        ),
        &["join mark"],
    )
}

fn distinct(rng: &mut Rng, t: &[Table]) -> Query {
    tagged(
        format!(
            "SELECT DISTINCT {} FROM {}",
            rng.pick(&["a", "a, s", "s, n", "f", "b, a"]),
            table_name(rng, t)
        ),
        &["distinct"],
    )
}

fn union_all(rng: &mut Rng, t: &[Table]) -> Query {
    tagged(
        format!(
            "SELECT a, s FROM {} WHERE {} UNION ALL SELECT b, s FROM {}",
            table_name(rng, t),
            condition(rng, ""),
            table_name(rng, t)
        ),
        &["union all", "multiset rows"],
    )
}

fn union(rng: &mut Rng, t: &[Table]) -> Query {
    tagged(
        format!(
            "SELECT a, s FROM {} UNION SELECT b, s FROM {}",
            table_name(rng, t),
            table_name(rng, t)
        ),
        &["union all", "distinct"],
    )
}

fn set_operation(rng: &mut Rng, t: &[Table]) -> Query {
    let operation = rng.pick(&["EXCEPT", "EXCEPT ALL", "INTERSECT", "INTERSECT ALL"]);
    let (l, r) = *rng.pick(&[&("a, s", "b, s"), &("a", "b"), &("s, n", "s, n"), &("f", "f")]);
    combined(rng, t, operation, (l, r), "set operation")
}

/// A set operation of columns of two tables.
fn combined(
    rng: &mut Rng,
    t: &[Table],
    operation: &str,
    (l, r): (&str, &str),
    tag: &'static str,
) -> Query {
    tagged(
        format!(
            "SELECT {l} FROM {} {operation} SELECT {r} FROM {} WHERE {}",
            table_name(rng, t),
            table_name(rng, t),
            condition(rng, "")
        ),
        &[tag],
    )
}

fn nested_set_operation(rng: &mut Rng, t: &[Table]) -> Query {
    let inner = rng.pick(&["UNION ALL", "INTERSECT ALL", "EXCEPT"]);
    let outer = rng.pick(&["EXCEPT ALL", "INTERSECT", "UNION"]);
    tagged(
        format!(
            "(SELECT a, s FROM {} {inner} SELECT b, s FROM {}) {outer} SELECT a, s FROM {}",
            table_name(rng, t),
            table_name(rng, t),
            table_name(rng, t)
        ),
        &["set operation"],
    )
}

fn grouping_sets(rng: &mut Rng, t: &[Table]) -> Query {
    let sets = rng.pick(&[
        "ROLLUP (a, s)",
        "CUBE (a, s)",
        "GROUPING SETS ((a, s), (s))",
        "GROUPING SETS ((a), (), (s))",
        "a, ROLLUP (s)",
    ]);
    tagged(
        format!(
            "SELECT a, s, grouping(a, s) AS g, {} FROM {} GROUP BY {sets}",
            aggregates(rng, ""),
            table_name(rng, t)
        ),
        &["grouping sets", "aggregate"],
    )
}

fn distinct_on(rng: &mut Rng, t: &[Table]) -> Query {
    let on = rng.pick(&["a", "s", "a, b"]);
    let order = rng.pick(&["n", "t DESC", "f NULLS FIRST", "id"]);
    tagged(
        format!(
            "SELECT DISTINCT ON ({on}) {on}, id, n, o FROM {} ORDER BY {on}, {order}, o",
            table_name(rng, t)
        ),
        &["top-n grouped"],
    )
}

fn with_ties(rng: &mut Rng, t: &[Table]) -> Query {
    // The rows that an offset skips are told by `o`, and then nothing is level; without one, peers
    // come and go together.
    let (order, offset) = if rng.chance(30) {
        ("b, o", format!("OFFSET {} ROWS ", rng.between(1, 3)))
    } else {
        (*rng.pick(&[&"a", &"b DESC", &"s NULLS FIRST", &"n"]), String::new())
    };
    tagged(
        format!(
            "SELECT id, a, b, o FROM {} ORDER BY {order} {offset}FETCH FIRST {} ROWS WITH TIES",
            table_name(rng, t),
            rng.between(1, 4)
        ),
        &["top-n global"],
    )
}

fn top_n(rng: &mut Rng, t: &[Table]) -> Query {
    let offset =
        if rng.chance(30) { format!(" OFFSET {}", rng.between(1, 3)) } else { String::new() };
    let nulls = rng.pick(&["", " NULLS FIRST", " NULLS LAST"]);
    let direction = rng.pick(&["", " DESC"]);
    tagged(
        format!(
            "SELECT id, a, s, o FROM {} ORDER BY {}{direction}{nulls}, o LIMIT {}{offset}",
            table_name(rng, t),
            rng.pick(&["a", "s", "n", "t", "f"]),
            rng.between(1, 6)
        ),
        &["top-n global"],
    )
}

fn row_number(rng: &mut Rng, t: &[Table]) -> Query {
    let rank = rng.chance(50);
    let direction = rng.pick(&["", " DESC"]);
    tagged(
        format!(
            "SELECT id, a, s, o{} FROM (SELECT *, row_number() OVER (PARTITION BY {} ORDER BY {}{direction}, o) AS rn FROM {}) q WHERE rn <= {}",
            if rank { ", rn" } else { "" },
            rng.pick(&["a", "s", "a, b"]),
            rng.pick(&["b", "n", "t", "s"]),
            table_name(rng, t),
            rng.between(1, 3)
        ),
        &[if rank { "top-n ranked" } else { "top-n grouped" }],
    )
}

fn scalar_subquery(rng: &mut Rng, t: &[Table]) -> Query {
    tagged(
        format!(
            "SELECT id, (SELECT max(b) FROM {} y WHERE y.a = x.a) AS top, (SELECT count(*) FROM {}) AS n FROM {} x",
            table_name(rng, t),
            table_name(rng, t),
            table_name(rng, t)
        ),
        &["scalar subquery"],
    )
}

fn join_of_aggregates(rng: &mut Rng, t: &[Table]) -> Query {
    tagged(
        format!(
            "SELECT x.a, x.c, y.m FROM (SELECT a, count(*) AS c FROM {} GROUP BY a) x {} JOIN (SELECT b, max(n) AS m FROM {} GROUP BY b) y ON x.a = y.b",
            table_name(rng, t),
            rng.pick(&["", "LEFT", "FULL"]),
            table_name(rng, t)
        ),
        &["aggregate", "join over aggregate"],
    )
}

fn aggregate_of_join(rng: &mut Rng, t: &[Table]) -> Query {
    tagged(
        format!(
            "SELECT x.s, {} FROM {} x {} JOIN {} y ON x.a = y.a GROUP BY x.s",
            aggregates(rng, "y."),
            table_name(rng, t),
            rng.pick(&["", "LEFT"]),
            table_name(rng, t)
        ),
        &["aggregate over join"],
    )
}

fn tumble(rng: &mut Rng, t: &[Table]) -> Query {
    let table = table_name(rng, t);
    spelled(
        format!(
            "SELECT window_start, window_end, count(*) AS c, sum(a) AS sa FROM TUMBLE({table}, t, INTERVAL '20 seconds') GROUP BY window_start, window_end"
        ),
        format!(
            "SELECT s, s + INTERVAL '20 seconds', count(*), sum(a) FROM (SELECT {} AS s, a FROM {table}) x WHERE s IS NOT NULL GROUP BY s",
            bin("20 seconds")
        ),
        &["tumble", "aggregate"],
    )
}

/// The start of the window of `t`, as PostgreSQL says it.
fn bin(size: &str) -> String {
    format!("date_bin(INTERVAL '{size}', t, TIMESTAMP '1970-01-01')")
}

fn session(rng: &mut Rng, t: &[Table]) -> Query {
    let (key, columns) = *rng.pick(&[&(", a", "a, "), &(", s, b", "s, b, "), &("", "")]);
    let gap = rng.pick(&["3 seconds", "10 seconds", "1 minute"]);
    let table = table_name(rng, t);
    let from = format!("SESSION({table}, t, INTERVAL '{gap}'{key})");
    let grouped = rng.chance(50);
    // A session begins where the row before, in order of time, is the gap away.
    let partition = format!("PARTITION BY {columns}true");
    let begun = format!(
        "SELECT *, coalesce(t - lag(t) OVER ({partition} ORDER BY t) >= INTERVAL '{gap}', true)::int AS begins \
         FROM {table} WHERE t IS NOT NULL"
    );
    let numbered = format!(
        "SELECT *, sum(begins) OVER ({partition} ORDER BY t RANGE UNBOUNDED PRECEDING) AS nth FROM ({begun}) p"
    );
    let windows = format!(
        "SELECT *, min(t) OVER w AS window_start, max(t) OVER w + INTERVAL '{gap}' AS window_end \
         FROM ({numbered}) q WINDOW w AS ({partition}, nth)"
    );
    let of = |from: &str| match grouped {
        true => format!(
            "SELECT {columns}window_start, window_end, count(*) AS c, sum(n) AS sn FROM {from} GROUP BY {columns}window_start, window_end"
        ),
        false => format!("SELECT id, o, t, window_start, window_end FROM {from}"),
    };
    spelled(of(&from), of(&format!("({windows}) w")), &["session"])
}

fn asof(rng: &mut Rng, t: &[Table]) -> Query {
    let (l, r) = join_key(rng);
    let kind = rng.pick(&["", "LEFT "]);
    let op = rng.pick(&[">=", ">", "<=", "<"]);
    let (lt, rt) = *rng.pick(&[&("t", "t"), &("b", "a"), &("n", "n")]);
    let filter = if rng.chance(30) { " AND y.b > 1" } else { "" };
    let columns = "x.id AS xid, x.o AS xo, y.id AS yid, y.o AS yo, y.s AS ys";
    let (left, right) = (table_name(rng, t), table_name(rng, t));
    let nearest = if op.starts_with('>') { "DESC" } else { "ASC" };
    // Of rows of one time the last by its columns.
    let last = ["id", "o", "a", "b", "s", "n", "f", "t"].map(|c| format!("{c} DESC NULLS LAST"));
    spelled(
        format!(
            "SELECT {columns} FROM {left} x ASOF {kind}JOIN {right} y MATCH_CONDITION (x.{lt} {op} y.{rt}) ON x.{l} = y.{r}{filter}"
        ),
        format!(
            "SELECT {columns} FROM {left} x {}JOIN LATERAL (SELECT * FROM {right} y WHERE x.{lt} {op} y.{rt} AND x.{l} = y.{r}{filter} \
             ORDER BY {rt} {nearest}, {} LIMIT 1) y ON true",
            if kind.is_empty() { "INNER " } else { kind },
            last.join(", ")
        ),
        &["asof join"],
    )
}

fn hop(rng: &mut Rng, t: &[Table]) -> Query {
    let table = table_name(rng, t);
    spelled(
        format!(
            "SELECT window_start, a, count(*) AS c FROM HOP({table}, t, INTERVAL '10 seconds', INTERVAL '30 seconds') GROUP BY window_start, a"
        ),
        format!(
            "SELECT s, a, count(*) FROM (SELECT {} - g * INTERVAL '10 seconds' AS s, a FROM {table}, generate_series(0, 2) g) x \
             WHERE s IS NOT NULL GROUP BY s, a",
            bin("10 seconds")
        ),
        &["hop", "aggregate"],
    )
}
