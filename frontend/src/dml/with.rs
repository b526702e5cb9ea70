//! INSERT, UPDATE and DELETE in WITH: a statement of parts.
//!
//! The parts run one after the other as staged statements of one transaction, which is committed as a whole. All of
//! them read the epoch and the block's writes of the statement's beginning ([`crate::session::scope`]); of one
//! another they see the rows of RETURNING only, which are kept in memory as relations. As in PostgreSQL a part runs
//! whether or not it is read: what the main statement reads before it, the others after it, the last one first. A
//! row that one part has changed is left alone by later ones. A query in WITH that is read more than once is
//! computed once.

use std::collections::BTreeSet;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, RecordBatch};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Schema, SchemaRef};
use datafusion::datasource::MemTable;
use datafusion::execution::memory_pool::MemoryReservation;
use futures::StreamExt;
use millrace_common::{SqlError, SqlState};
use millrace_functions::error::sql_error_from_datafusion;
use millrace_planner::parser::{changes_rows, take_in, with_changes_rows};
use millrace_rpc::catalog::{Column, ColumnType, Relation, RelationKind};
use sqlparser::ast::{Cte, Ident, Query, SetExpr, Statement as Sql, With};

use super::attempts::Attempts;
use super::describe::{Described, describe as describe_change};
use super::with_order::named;
use super::{Done, rewrite, rows};
use crate::cluster::BatchStream;
use crate::query::catalog_view::fold;
use crate::session::planned::REPLANS;
use crate::session::scope::{InScope, Kept};
use crate::session::{Block, Outcome, RowSet, Session, params};
use crate::wire::Field;

/// Runs a statement whose WITH changes rows.
pub async fn execute(session: &mut Session, query: &Query) -> Result<Outcome, SqlError> {
    let parts = Parts::of(query)?;
    let alone = matches!(session.block, Block::None);
    if !alone {
        return parts.run(session).await;
    }
    let mut attempts = Attempts::of(session, None);
    loop {
        attempts.next(session).await?;
        session.begin_implicit();
        let ended = match parts.run(session).await {
            Ok(outcome) => session.commit_implicit().await.map(|()| outcome),
            Err(e) => Err(e),
        };
        if ended.is_err() {
            session.fail_block();
        }
        match ended {
            // Rows have changed since the parts read them.
            Err(e) if e.state == SqlState::SERIALIZATION_FAILURE => {}
            ended => return ended,
        }
    }
}

/// Binds such a statement without running it: the columns that it gives, and the types of its parameters.
pub fn describe(
    session: &Session,
    query: &Query,
    types: &mut Vec<Option<DataType>>,
) -> Result<Option<Vec<Field>>, SqlError> {
    let parts = Parts::of(query)?;
    let _scope = session.enter_scope();
    Ok(parts.bind(session, types)?.fields)
}

/// What changes rows within a statement.
pub fn not_at_top() -> SqlError {
    refused("WITH clause containing a data-modifying statement must be at the top level")
}

/// 0A000 for a definition or a cursor whose query changes rows.
pub fn refuse(query: &Query, message: &str) -> Result<(), SqlError> {
    if with_changes_rows(query) { Err(refused(message)) } else { Ok(()) }
}

fn refused(message: impl Into<String>) -> SqlError {
    SqlError::new(SqlState::FEATURE_NOT_SUPPORTED, message)
}

/// A query in WITH.
struct Item {
    cte: Cte,
    changes: bool,
    /// Its rows are kept: others read what it has changed, or several read it.
    kept: bool,
    /// Items before it that it reads, also by way of others.
    needs: BTreeSet<usize>,
}

struct Parts {
    with: With,
    items: Vec<Item>,
    main: Query,
    main_needs: BTreeSet<usize>,
}

/// What binding has told.
struct Bound {
    /// The items as others name them; `None`: without RETURNING.
    ctes: Vec<Option<Cte>>,
    /// The columns of those that are kept.
    schemas: Vec<Option<SchemaRef>>,
    /// What the main statement gives.
    fields: Option<Vec<Field>>,
}

enum Step {
    Item(usize),
    Main,
}

impl Parts {
    fn of(query: &Query) -> Result<Parts, SqlError> {
        let mut main = query.clone();
        let Some(with) = main.with.take() else {
            return Err(SqlError::internal("a statement of parts without WITH"));
        };
        let names: Vec<String> = with.cte_tables.iter().map(|c| fold(&c.alias.name)).collect();
        if let Some((_, name)) = names.iter().enumerate().find(|(i, n)| names[..*i].contains(n)) {
            let message = format!("WITH query name \"{name}\" specified more than once");
            return Err(SqlError::new(SqlState("42712"), message));
        }
        let by: Vec<_> = with.cte_tables.iter().map(|c| named(&c.query, &names)).collect();
        let by_main = named(&main, &names);
        let mut items: Vec<Item> = Vec::with_capacity(names.len());
        for (i, cte) in with.cte_tables.iter().enumerate() {
            let changes = changes_rows(&cte.query);
            if matches!(cte.query.body.as_ref(), SetExpr::Merge(_)) {
                return Err(SqlError::unsupported("MERGE in WITH"));
            }
            if changes && with_changes_rows(&cte.query) {
                return Err(not_at_top());
            }
            if changes && with.recursive && by[i].certain.contains(&i) {
                let message = "must not contain data-modifying statements";
                let message = format!("recursive query \"{}\" {message}", names[i]);
                return Err(SqlError::new(SqlState("42P19"), message));
            }
            let mut readers = by[i + 1..].iter().chain([&by_main]);
            if changes && !returns(&cte.query) && readers.any(|r| r.certain.contains(&i)) {
                let name = &names[i];
                return Err(refused(format!(
                    "WITH query \"{name}\" does not have a RETURNING clause"
                )));
            }
            let times: usize = by[i + 1..].iter().chain([&by_main]).map(|r| r.counts[i]).sum();
            let needs = needs(&by[i].counts[..i], &items);
            items.push(Item { cte: cte.clone(), changes, kept: changes || times > 1, needs });
        }
        let main_needs = needs(&by_main.counts, &items);
        Ok(Parts { with, items, main, main_needs })
    }

    /// A part with the items that it reads before it.
    fn statement(
        &self,
        part: &Query,
        ctes: &[Option<Cte>],
        reads: &BTreeSet<usize>,
    ) -> Result<Sql, SqlError> {
        let mut part = part.clone();
        let read = ctes.iter().enumerate().filter(|(i, _)| reads.contains(i));
        let mut with = With {
            cte_tables: read.filter_map(|(_, cte)| cte.clone()).collect(),
            ..self.with.clone()
        };
        if let Some(inner) = part.with.take() {
            let hides = |c: &Cte| {
                let same = |o: &Cte| fold(&o.alias.name) == fold(&c.alias.name);
                with.cte_tables.iter().any(same)
            };
            if inner.cte_tables.iter().any(hides) {
                return Err(SqlError::unsupported(
                    "a WITH that has the name of a query in the WITH around it",
                ));
            }
            with.recursive |= inner.recursive;
            with.cte_tables.extend(inner.cte_tables);
        }
        part.with = (!with.cte_tables.is_empty()).then_some(with);
        Ok(take_in(Sql::Query(Box::new(part))))
    }

    /// All rows of an item that changes nothing.
    fn rows_of(&self, item: usize, ctes: &[Option<Cte>]) -> Result<Query, SqlError> {
        let Item { cte, needs, .. } = &self.items[item];
        let mut query = rewrite::parse_query("SELECT * FROM t")?;
        rewrite::select_of(&mut query)?.from =
            vec![rewrite::table_ref(None, &fold(&cte.alias.name))];
        let read = ctes.iter().enumerate().filter(|(i, _)| needs.contains(i));
        let mut cte_tables: Vec<Cte> = read.filter_map(|(_, cte)| cte.clone()).collect();
        cte_tables.push(cte.clone());
        query.with = Some(With { cte_tables, ..self.with.clone() });
        Ok(query)
    }

    /// Binds all parts in their order; those that are kept stand as relations without rows.
    fn bind(
        &self,
        session: &Session,
        types: &mut Vec<Option<DataType>>,
    ) -> Result<Bound, SqlError> {
        let mut bound = Bound { ctes: Vec::new(), schemas: Vec::new(), fields: None };
        for (i, item) in self.items.iter().enumerate() {
            let described = self.bind_item(session, i, &bound.ctes, types)?;
            let (cte, schema) = match described {
                None => (None, None),
                Some(_) if !item.kept => (Some(item.cte.clone()), None),
                Some(described) => {
                    let memory = session.engine().reservation(MEMORY);
                    let schema = kept_schema(&described.schema);
                    session.keep(kept(i, &described.fields, &schema, Vec::new(), memory)?);
                    (Some(in_place(item, i, &described.fields)?), Some(schema))
                }
            };
            bound.ctes.push(cte);
            bound.schemas.push(schema);
        }
        let main = self.statement(&self.main, &bound.ctes, &self.main_needs)?;
        let mut known = types.clone();
        bound.fields = session.describe_sql(&main, &mut known)?;
        merge(&self.main, types, known);
        Ok(bound)
    }

    fn bind_item(
        &self,
        session: &Session,
        i: usize,
        ctes: &[Option<Cte>],
        types: &mut Vec<Option<DataType>>,
    ) -> Result<Option<Described>, SqlError> {
        let item = &self.items[i];
        let mut known = types.clone();
        let described = if item.changes {
            let change = self.statement(&item.cte.query, ctes, &item.needs)?;
            describe_change(session, &change, &mut known)?
        } else {
            let query = self.rows_of(i, ctes)?;
            let (bound, fields) = session.bind(&session.catalog_view(), &query, &known)?;
            params::merge(&mut known, bound.param_types.clone());
            let schema = Arc::new(bound.plan.schema().as_arrow().clone());
            Some(Described { fields, schema })
        };
        merge(&item.cte.query, types, known);
        Ok(described)
    }

    /// The order in which parts run.
    fn order(&self) -> Vec<Step> {
        let mut done = BTreeSet::new();
        let mut order = Vec::new();
        let mut add = |i: usize, order: &mut Vec<Step>| {
            if self.items[i].kept && done.insert(i) {
                order.push(Step::Item(i));
            }
        };
        self.main_needs.iter().for_each(|i| add(*i, &mut order));
        order.push(Step::Main);
        for (i, item) in self.items.iter().enumerate().rev().filter(|(_, item)| item.changes) {
            item.needs.iter().for_each(|needed| add(*needed, &mut order));
            add(i, &mut order);
        }
        order
    }

    /// Binds the parts and fixes the epoch that they read: again where what they name has changed meanwhile.
    async fn begin(&self, session: &Session) -> Result<(InScope, Bound), SqlError> {
        let mut left = REPLANS;
        loop {
            let scope = session.enter_scope();
            let catalog = session.cluster().catalog();
            let begun = match self.bind(session, &mut Vec::new()) {
                Ok(bound) => {
                    session.fix_scope(&catalog, left > 0).await.map(|right| (bound, right))
                }
                Err(error) => Err(error),
            };
            match begun {
                Ok((bound, true)) => {
                    session.check_described(bound.fields.as_deref())?;
                    return Ok((scope, bound));
                }
                Ok((_, false)) => {}
                Err(error) => {
                    if left == 0 || !session.learns_more(&error, &catalog).await {
                        return Err(error);
                    }
                }
            }
            left -= 1;
        }
    }

    async fn run(&self, session: &Session) -> Result<Outcome, SqlError> {
        let (_scope, bound) = self.begin(session).await?;
        let mut outcome = None;
        for step in self.order() {
            match step {
                Step::Item(i) => self.run_item(session, i, &bound).await?,
                Step::Main => outcome = Some(self.run_main(session, &bound).await?),
            }
        }
        outcome.ok_or_else(|| SqlError::internal("a statement of parts without a main part"))
    }

    async fn run_item(&self, session: &Session, i: usize, bound: &Bound) -> Result<(), SqlError> {
        let item = &self.items[i];
        let (fields, stream) = if item.changes {
            let change = self.statement(&item.cte.query, &bound.ctes, &item.needs)?;
            match super::execute(session, &change).await?.returning {
                Some(returned) => returned,
                None => return Ok(()),
            }
        } else {
            let rows = session.query(&self.rows_of(i, &bound.ctes)?).await?;
            (rows.fields, rows.stream)
        };
        let Some(schema) = &bound.schemas[i] else {
            return Err(SqlError::internal("rows of WITH that are not kept"));
        };
        let (batches, memory) = hold(session, stream).await?;
        session.keep(kept(i, &fields, schema, batches, memory)?);
        Ok(())
    }

    async fn run_main(&self, session: &Session, bound: &Bound) -> Result<Outcome, SqlError> {
        match self.statement(&self.main, &bound.ctes, &self.main_needs)? {
            // All rows are there before anything is committed: a query that fails leaves nothing behind.
            Sql::Query(query) => {
                let RowSet { fields, stream, tag } = session.query(&query).await?;
                let (batches, memory) = hold(session, stream).await?;
                let batches = batches.into_iter().map(move |batch| {
                    let _ = &memory;
                    Ok(batch)
                });
                let stream = futures::stream::iter(batches).boxed();
                Ok(Outcome::Rows(RowSet { fields, stream, tag }))
            }
            change => {
                let Done { tag, returning } = super::execute(session, &change).await?;
                Ok(match returning {
                    Some((fields, stream)) => Outcome::Rows(RowSet { fields, stream, tag }),
                    None => Outcome::Command(tag),
                })
            }
        }
    }
}

fn returns(query: &Query) -> bool {
    match query.body.as_ref() {
        SetExpr::Insert(Sql::Insert(insert)) => insert.returning.is_some(),
        SetExpr::Update(Sql::Update(update)) => update.returning.is_some(),
        SetExpr::Delete(Sql::Delete(delete)) => delete.returning.is_some(),
        _ => false,
    }
}

/// Items that are named, and those that they need.
fn needs(counts: &[usize], items: &[Item]) -> BTreeSet<usize> {
    let direct = counts.iter().enumerate().filter(|(_, times)| **times > 0).map(|(i, _)| i);
    direct.flat_map(|i| items[i].needs.iter().copied().chain([i])).collect()
}

/// Fills in what was found out of a part's parameters.
fn merge(part: &Query, types: &mut Vec<Option<DataType>>, known: Vec<Option<DataType>>) {
    let known: Vec<DataType> = known.into_iter().map(|t| t.unwrap_or(DataType::Null)).collect();
    params::merge_of(part, types, &known);
}

/// How memory for rows of WITH is called.
const MEMORY: &str = "the rows of WITH";

/// The relation of an item's rows: a name that no text of SQL can have, see [`rows::in_hand`].
fn relation_name(item: usize) -> String {
    format!("\0with {item}")
}

/// A column of it: names of RETURNING may be there twice.
fn column_name(column: usize) -> String {
    format!("c{column}")
}

fn kept_schema(schema: &Schema) -> SchemaRef {
    let fields = schema.fields().iter().enumerate();
    let fields: Vec<_> = fields
        .map(|(i, f)| f.as_ref().clone().with_name(column_name(i)).with_nullable(true))
        .collect();
    Arc::new(Schema::new(fields))
}

/// The item with a query of what is kept in place of its own.
fn in_place(item: &Item, i: usize, fields: &[Field]) -> Result<Cte, SqlError> {
    let relation = relation_name(i);
    let mut query = rewrite::empty_query()?;
    let select = rewrite::select_of(&mut query)?;
    let columns = fields.iter().enumerate();
    select.projection = columns
        .map(|(c, field)| rewrite::item(rewrite::column(&relation, &column_name(c)), &field.name))
        .collect();
    select.from = vec![rewrite::table_ref(None, &relation)];
    let mut cte = item.cte.clone();
    cte.query = Box::new(query);
    if !item.changes {
        // They are its columns' names already.
        cte.alias.columns = Vec::new();
        cte.alias.name = Ident::with_quote('"', fold(&cte.alias.name));
    }
    Ok(cte)
}

fn kept(
    item: usize,
    fields: &[Field],
    schema: &SchemaRef,
    batches: Vec<RecordBatch>,
    memory: MemoryReservation,
) -> Result<Kept, SqlError> {
    let columns = fields.iter().enumerate().map(|(i, field)| Column {
        name: column_name(i),
        sql_type: ColumnType { oid: field.type_oid, typmod: field.typmod },
        nullable: true,
        ..Column::default()
    });
    let relation = Relation {
        name: relation_name(item),
        kind: RelationKind::Table as i32,
        columns: columns.collect(),
        ..Relation::default()
    };
    let batches =
        batches.iter().map(|b| conform(schema, b)).collect::<Result<Vec<_>, SqlError>>()?;
    let table =
        MemTable::try_new(schema.clone(), vec![batches]).map_err(sql_error_from_datafusion)?;
    Ok(Kept { relation, provider: Arc::new(table), memory })
}

/// A batch under the names that others know.
fn conform(schema: &SchemaRef, batch: &RecordBatch) -> Result<RecordBatch, SqlError> {
    let columns = batch.columns().iter().zip(schema.fields()).map(|(array, field)| {
        match array.data_type() == field.data_type() {
            true => Ok(array.clone()),
            false => cast(array, field.data_type()).map_err(rows::arrow_error),
        }
    });
    let columns = columns.collect::<Result<Vec<ArrayRef>, SqlError>>()?;
    rows::batch(schema, columns, batch.num_rows())
}

/// All rows of a stream, within the memory of queries.
async fn hold(
    session: &Session,
    mut stream: BatchStream,
) -> Result<(Vec<RecordBatch>, MemoryReservation), SqlError> {
    let memory = session.engine().reservation(MEMORY);
    let mut batches = Vec::new();
    while let Some(batch) = stream.next().await {
        let batch = batch?;
        memory.try_grow(size_of_rows(&batch)).map_err(sql_error_from_datafusion)?;
        batches.push(batch);
    }
    Ok((batches, memory))
}

/// Bytes of a batch's rows: it may be a slice of larger arrays.
fn size_of_rows(batch: &RecordBatch) -> usize {
    let columns = batch.columns().iter().map(|c| c.to_data().get_slice_memory_size());
    columns.sum::<Result<usize, _>>().unwrap_or_else(|_| batch.get_array_memory_size())
}
