//! What the system tables are about: relations, indexes, schemas, types, roles, with their OIDs.

use std::sync::Arc;

use millrace_planner::{ParsedStatement, Statement};
use millrace_rpc::catalog::{Relation, RelationKind};
use sqlparser::ast::OrderByOptions;

use super::columns::{SYSTEM_TABLES, SystemTable};
use crate::cluster::CatalogSnapshot;
use crate::ddl::index::KEY_COLUMNS;
use crate::query::catalog_view::{SYSTEM_SCHEMAS, fold};

pub const PG_CATALOG: i64 = 11;
pub const OWNER: i64 = 10;

/// Roles; all of them may do everything.
pub const ROLES: [(i64, &str); 2] = [(OWNER, "postgres"), (16_383, "root")];

/// OIDs of the schemas: PostgreSQL's for its own, numbers in order of name for the others.
pub fn namespaces(catalog: &CatalogSnapshot) -> Vec<(i64, String)> {
    let mut all = vec![(PG_CATALOG, "pg_catalog".to_owned()), (2200, "public".to_owned())];
    all.push((13_000, "information_schema".to_owned()));
    all.push((13_001, "millrace_catalog".to_owned()));
    let system = |s: &String| s == "public" || SYSTEM_SCHEMAS.contains(&s.as_str());
    let mut others: Vec<&String> = catalog.schemas.iter().filter(|s| !system(s)).collect();
    others.sort();
    all.extend(others.into_iter().enumerate().map(|(i, s)| (13_100 + i as i64, s.clone())));
    all
}

pub fn namespace_oid(all: &[(i64, String)], name: &str) -> i64 {
    all.iter().find(|(_, n)| n == name).map_or(0, |(oid, _)| *oid)
}

/// `relkind`: sources look like foreign tables.
pub fn relkind(r: &Relation) -> &'static str {
    match RelationKind::try_from(r.kind) {
        Ok(RelationKind::Source | RelationKind::Sink) => "f",
        Ok(RelationKind::View) => "v",
        Ok(RelationKind::MaterializedView) => "m",
        Ok(RelationKind::Index) => "i",
        _ => "r",
    }
}

/// Columns that `*` shows, with their positions from 1.
pub fn columns(r: &Relation) -> impl Iterator<Item = (i64, &millrace_rpc::catalog::Column)> {
    r.columns.iter().enumerate().filter(|(_, c)| !c.hidden).map(|(i, c)| (i as i64 + 1, c))
}

/// An index: of a primary key, or one that was created.
pub struct Index {
    pub oid: i64,
    pub name: String,
    pub table: Arc<Relation>,
    /// Positions in the table's columns: those it is on, and those it includes.
    pub key: Vec<usize>,
    pub included: Vec<usize>,
    /// How the columns that it is on were told to be ordered; none of a primary key.
    orders: Vec<OrderByOptions>,
    pub primary: bool,
}

impl Index {
    /// Positions in the table of all its columns.
    pub fn columns(&self) -> impl Iterator<Item = usize> {
        self.key.iter().chain(&self.included).copied()
    }

    fn names(&self, positions: &[usize]) -> Vec<String> {
        let name = |k: &usize| self.table.columns.get(*k).map(|c| quote_ident(&c.name));
        positions.iter().filter_map(name).collect()
    }

    fn key_names(&self) -> Vec<String> {
        self.names(&self.key)
    }

    /// Whether each column that it is on is in descending order, and has NULLs first.
    pub fn directions(&self) -> impl Iterator<Item = (bool, bool)> {
        let options = |i| self.orders.get(i).copied();
        let one = |o: OrderByOptions| {
            let descending = o.asc == Some(false);
            (descending, o.nulls_first.unwrap_or(descending))
        };
        (0..self.key.len()).map(move |i| options(i).map_or((false, false), one))
    }

    /// `pg_index.indoption`.
    pub fn options(&self) -> Vec<i64> {
        let bits = |(descending, nulls_first)| i64::from(descending) | i64::from(nulls_first) << 1;
        self.directions().map(bits).collect()
    }

    /// The columns that it is on with their order, where it is not the usual one.
    fn ordered_names(&self) -> Vec<String> {
        let order = |direction: (bool, bool)| match direction {
            (false, false) => "",
            (false, true) => " NULLS FIRST",
            (true, true) => " DESC",
            (true, false) => " DESC NULLS LAST",
        };
        let names = self.key_names().into_iter().zip(self.directions());
        names.map(|(name, direction)| name + order(direction)).collect()
    }

    /// `CREATE [UNIQUE] INDEX …`, or the name of column `column` when it is not 0.
    pub fn definition(&self, column: i64) -> String {
        if column > 0 {
            let all: Vec<usize> = self.columns().collect();
            return self.names(&all).get(column as usize - 1).cloned().unwrap_or_default();
        }
        let include = match self.names(&self.included) {
            none if none.is_empty() => String::new(),
            names => format!(" INCLUDE ({})", names.join(", ")),
        };
        format!(
            "CREATE {unique}INDEX {name} ON {schema}.{table} USING btree ({key}){include}",
            unique = if self.primary { "UNIQUE " } else { "" },
            name = quote_ident(&self.name),
            schema = quote_ident(&self.table.schema),
            table = quote_ident(&self.table.name),
            key = self.ordered_names().join(", ")
        )
    }

    pub fn constraint(&self) -> String {
        format!("PRIMARY KEY ({})", self.key_names().join(", "))
    }
}

pub fn indexes(catalog: &CatalogSnapshot) -> Vec<Index> {
    let mut all = Vec::new();
    for r in catalog.relations() {
        if r.primary_key {
            all.push(Index {
                oid: i64::from(r.id) + 1_000_000_000,
                name: r.primary_key_name(),
                table: r.clone(),
                key: r.key.iter().map(|k| *k as usize).collect(),
                included: Vec::new(),
                orders: Vec::new(),
                primary: true,
            });
        } else if r.kind == RelationKind::Index as i32
            && let Some(table) = r.depends_on.first().and_then(|id| catalog.by_id(*id))
        {
            let position = |name: &str| table.columns.iter().position(|c| c.name == name);
            // It holds more columns, so that reads need nothing else; those are nobody's business.
            let count = r.option(KEY_COLUMNS).and_then(|n| n.parse().ok()).unwrap_or(usize::MAX);
            let key = columns(r).take(count).filter_map(|(_, c)| position(&c.name)).collect();
            let (included, orders) = written(r);
            let included = included.iter().filter_map(|name| position(name)).collect();
            let (oid, name, table) = (i64::from(r.id), r.name.clone(), table.clone());
            all.push(Index { oid, name, table, key, included, orders, primary: false });
        }
    }
    all
}

/// The columns that an index was told to INCLUDE and the order of the others: the catalog keeps them in its text only.
fn written(index: &Relation) -> (Vec<String>, Vec<OrderByOptions>) {
    let text = index.definition.to_ascii_lowercase();
    if !["include", "desc", "nulls"].iter().any(|word| text.contains(word)) {
        return (Vec::new(), Vec::new());
    }
    match millrace_planner::parse(&index.definition).ok().and_then(|mut all| all.pop()) {
        Some(ParsedStatement { statement: Statement::CreateIndex(def), .. }) => {
            let order = |asc: bool, nulls_first| OrderByOptions { asc: Some(asc), nulls_first };
            let orders = def.columns.iter().map(|(_, asc, nulls)| order(*asc, *nulls)).collect();
            (def.include.iter().map(fold).collect(), orders)
        }
        _ => (Vec::new(), Vec::new()),
    }
}

/// A system table's entry.
pub fn system_table(schema: &str, name: &str) -> Option<&'static SystemTable> {
    SYSTEM_TABLES.iter().find(|t| t.0 == schema && t.1 == name)
}

/// oid, name, length, category, array type.
pub type TypeRow = (i64, &'static str, i64, &'static str, i64);

pub fn type_named(name: &str) -> Option<&'static TypeRow> {
    const SPELLED: [(&str, &str); 14] = [
        ("boolean", "bool"),
        ("smallint", "int2"),
        ("integer", "int4"),
        ("int", "int4"),
        ("bigint", "int8"),
        ("real", "float4"),
        ("double precision", "float8"),
        ("character varying", "varchar"),
        ("decimal", "numeric"),
        ("character", "bpchar"),
        ("timestamp without time zone", "timestamp"),
        ("timestamp with time zone", "timestamptz"),
        ("time without time zone", "time"),
        ("\"char\"", "char"),
    ];
    let short = SPELLED.iter().find(|(long, _)| *long == name).map_or(name, |(_, s)| s);
    TYPES.iter().find(|t| t.1 == short)
}

/// `format_type(oid, typmod)`.
pub fn format_type(oid: i64, typmod: Option<i64>) -> String {
    let sql = millrace_rpc::catalog::ColumnType {
        oid: u32::try_from(oid).unwrap_or(0),
        typmod: typmod.and_then(|m| i32::try_from(m).ok()).unwrap_or(-1),
    };
    if let Ok(plain) = sql.to_sql() {
        let name = plain.to_string();
        return match (sql.second_digits(), name.split_once(' ')) {
            (None, _) => name,
            (Some(digits), None) => format!("{name}({digits})"),
            (Some(digits), Some((first, zone))) => format!("{first}({digits}) {zone}"),
        };
    }
    match TYPES.iter().find(|t| t.0 == oid || (t.4 == oid && oid != 0)) {
        Some((18, ..)) if oid == 18 => "\"char\"".to_owned(),
        Some((1042, ..)) if oid == 1042 => "character".to_owned(),
        Some(t) if t.0 == oid => t.1.to_owned(),
        Some(t) => format!("{}[]", format_type(t.0, typmod)),
        None if oid == 0 => "-".to_owned(),
        None => "???".to_owned(),
    }
}

/// Keywords of PostgreSQL that cannot be any name without quotes.
pub const RESERVED: &str = "\
    all analyse analyze and any array as asc asymmetric authorization between bigint binary bit \
    boolean both case cast char character check coalesce collate collation column concurrently \
    constraint create cross current_catalog current_date current_role current_schema current_time \
    current_timestamp current_user dec decimal default deferrable desc distinct do else end except \
    exists extract false fetch float for foreign freeze from full grant greatest group grouping \
    having ilike in initially inner inout int integer intersect interval into is isnull join \
    lateral leading least left like limit localtime localtimestamp national natural nchar none \
    normalize not notnull null nullif numeric offset on only or order out outer overlaps overlay \
    placing position precision primary real references returning right row select session_user \
    setof similar smallint some substring symmetric table tablesample then time timestamp to \
    trailing treat trim true union unique user using values varchar variadic verbose when where \
    window with xmlattributes xmlconcat xmlelement xmlexists xmlforest xmlnamespaces xmlparse xmlpi \
    xmlroot xmlserialize xmltable";

/// An identifier as it has to be written.
pub fn quote_ident(name: &str) -> String {
    let plain = name.starts_with(|c: char| c.is_ascii_lowercase() || c == '_')
        && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
    let reserved = || RESERVED.split_whitespace().any(|word| word == name);
    if plain && !reserved() {
        name.to_owned()
    } else {
        format!("\"{}\"", name.replace('"', "\"\""))
    }
}

/// Types that clients may meet.
pub static TYPES: [TypeRow; 28] = [
    (16, "bool", 1, "B", 1000),
    (17, "bytea", -1, "U", 1001),
    (18, "char", 1, "Z", 1002),
    (19, "name", 64, "S", 1003),
    (20, "int8", 8, "N", 1016),
    (21, "int2", 2, "N", 1005),
    (23, "int4", 4, "N", 1007),
    (24, "regproc", 4, "N", 1008),
    (25, "text", -1, "S", 1009),
    (26, "oid", 4, "N", 1028),
    (114, "json", -1, "U", 199),
    (700, "float4", 4, "N", 1021),
    (701, "float8", 8, "N", 1022),
    (705, "unknown", -2, "X", 0),
    (1042, "bpchar", -1, "S", 1014),
    (1043, "varchar", -1, "S", 1015),
    (1082, "date", 4, "D", 1182),
    (1083, "time", 8, "D", 1183),
    (1114, "timestamp", 8, "D", 1115),
    (1184, "timestamptz", 8, "D", 1185),
    (1186, "interval", 16, "T", 1187),
    (1700, "numeric", -1, "N", 1231),
    (2205, "regclass", 4, "N", 2210),
    (2950, "uuid", 16, "U", 2951),
    (22, "int2vector", -1, "A", 1006),
    (30, "oidvector", -1, "A", 1013),
    (2206, "regtype", 4, "N", 2211),
    (3802, "jsonb", -1, "U", 3807),
];
