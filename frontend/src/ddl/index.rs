//! CREATE INDEX: a relation's rows once more, in the order of other columns, kept by a job of its own.
//!
//! Without INCLUDE an index holds all columns, so a read it serves needs nothing else. With INCLUDE it
//! holds the named ones and the key, and serves reads that ask for no more. Direction and place of
//! NULLs are accepted and have no effect: an index narrows scans, it does not order results.

use std::sync::Arc;

use millrace_common::{SqlError, SqlState};
use millrace_graph::codec::encode_graph;
use millrace_planner::ast::CreateIndex;
use millrace_planner::stream::plan_index;
use millrace_rpc::catalog::{Column, OptionEntry, Relation, RelationKind, RowStorage};
use sqlparser::ast::{Expr, Ident};

use super::{Existing, check_name, create_and_wait};
use crate::cluster::CatalogSnapshot;
use crate::query::catalog_view::fold;
use crate::session::Session;

/// The option of an index in the catalog that says how many of its columns it was declared on.
pub const KEY_COLUMNS: &str = "key_columns";
/// As in PostgreSQL.
const MAX_COLUMNS: usize = 32;
const TAG: &str = "CREATE INDEX";

pub async fn create_index(
    session: &mut Session,
    def: &CreateIndex,
    text: &str,
) -> Result<String, SqlError> {
    if def.unique {
        return Err(SqlError::unsupported("CREATE UNIQUE INDEX").with_hint(
            "Declare a PRIMARY KEY with the table, or create the index without UNIQUE.",
        ));
    }
    let view = session.catalog_view();
    let relation = view.resolve(&def.table)?;
    check_indexable(&relation)?;
    let keys = def
        .columns
        .iter()
        .map(|(e, ..)| key_column(&relation, e))
        .collect::<Result<Vec<_>, _>>()?;
    let keys = without_repeats(keys);
    if keys.len() > MAX_COLUMNS {
        let message = format!("cannot use more than {MAX_COLUMNS} columns in an index");
        return Err(SqlError::new(SqlState("54011"), message));
    }
    let include =
        def.include.iter().map(|c| column(&relation, c)).collect::<Result<Vec<_>, _>>()?;
    let name = match &def.name {
        Some(name) => fold(name),
        None => free_name(&view.snapshot, &relation, &keys),
    };
    let (schema, kind) = (relation.schema.clone(), RelationKind::Index);
    let found = check_name(
        session,
        &view,
        &schema,
        &name,
        kind,
        def.if_not_exists && def.name.is_some(),
        false,
    )?;
    if matches!(found, Existing::Skip) {
        return Ok(TAG.to_owned());
    }
    let (index, tables) = plan(&relation, &keys, &include)?;
    let owner = session.user.clone();
    let index = Relation { schema, name, definition: text.to_owned(), owner, ..index };
    create_and_wait(session, index, tables, false).await?;
    Ok(TAG.to_owned())
}

fn check_indexable(relation: &Relation) -> Result<(), SqlError> {
    let what = match RelationKind::try_from(relation.kind) {
        Ok(RelationKind::Table | RelationKind::MaterializedView | RelationKind::Source) => {
            return Ok(());
        }
        Ok(RelationKind::View) => "views",
        Ok(RelationKind::Index) => "indexes",
        _ => "such relations",
    };
    let message = format!("cannot create index on relation \"{}\"", relation.name);
    Err(SqlError::new(SqlState::WRONG_OBJECT_TYPE, message)
        .with_detail(format!("This operation is not supported for {what}.")))
}

fn key_column(relation: &Relation, expr: &Expr) -> Result<usize, SqlError> {
    match expr {
        Expr::Identifier(ident) => column(relation, ident),
        Expr::Nested(inner) => key_column(relation, inner),
        _ => Err(SqlError::unsupported("an index on an expression")
            .with_hint("Create a materialized view that computes it, and an index on that.")),
    }
}

fn column(relation: &Relation, ident: &Ident) -> Result<usize, SqlError> {
    let name = fold(ident);
    relation.columns.iter().position(|c| !c.hidden && c.name == name).ok_or_else(|| {
        SqlError::new(SqlState::UNDEFINED_COLUMN, format!("column \"{name}\" does not exist"))
    })
}

fn without_repeats(list: Vec<usize>) -> Vec<usize> {
    let mut kept: Vec<usize> = Vec::with_capacity(list.len());
    for c in list {
        if !kept.contains(&c) {
            kept.push(c);
        }
    }
    kept
}

/// The index as the catalog keeps it, and how many state tables it has.
fn plan(
    relation: &Arc<Relation>,
    keys: &[usize],
    include: &[usize],
) -> Result<(Relation, u32), SqlError> {
    let keyed = relation.storage == RowStorage::Keyed as i32 && !relation.key.is_empty();
    let key: Vec<usize> =
        if keyed { relation.key.iter().map(|c| *c as usize).collect() } else { vec![] };
    let rest: Vec<usize> = match include {
        [] => (0..relation.columns.len()).collect(),
        some => some.iter().chain(&key).copied().collect(),
    };
    let columns = without_repeats(keys.iter().copied().chain(rest).collect());
    // All key columns are among them.
    let unique: Vec<usize> =
        key.iter().filter_map(|k| columns.iter().position(|c| c == k)).collect();
    let graph = plan_index(relation, &columns, keys.len(), &unique)?;
    let positions = |list: &[usize]| list.iter().map(|c| *c as u32).collect();
    let described = |c: &usize| Column { default_sql: None, ..relation.columns[*c].clone() };
    let index = Relation {
        kind: RelationKind::Index as i32,
        columns: columns.iter().map(described).collect(),
        key: positions(&graph.output.key),
        distribution: positions(&graph.output.distribution),
        storage: graph.output.storage as i32,
        append_only: graph.output.append_only,
        depends_on: vec![relation.id],
        options: vec![OptionEntry { name: KEY_COLUMNS.to_owned(), value: keys.len().to_string() }],
        graph: encode_graph(&graph)?,
        ..Relation::default()
    };
    Ok((index, graph.tables.len().max(1) as u32))
}

/// PostgreSQL's choice: table, columns, `idx`, and a number where that is taken.
fn free_name(catalog: &CatalogSnapshot, relation: &Relation, keys: &[usize]) -> String {
    let columns: Vec<&str> = keys.iter().map(|c| relation.columns[*c].name.as_str()).collect();
    let base = format!("{}_{}_idx", relation.name, columns.join("_"));
    let taken = |name: &str| catalog.get(&relation.schema, name).is_some();
    if !taken(&base) {
        return base;
    }
    (1u32..).map(|n| format!("{base}{n}")).find(|name| !taken(name)).unwrap_or(base)
}
