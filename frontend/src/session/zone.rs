//! The session's time zone, where it is not UTC: how results are shown in it, and what statements that write get from
//! it. What a query computes is the planner's (`bind::zones`).
//!
//! Values become a column's type when they are assigned, long after binding, and as in UTC. So where a zone matters to
//! that, the statement is given the cast that it leaves out, and literals the offset.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, ListArray, RecordBatch, RecordBatchOptions};
use arrow::datatypes::{DataType, Field, Schema, TimeUnit, TimestampMicrosecondType};
use bytes::BytesMut;
use futures::StreamExt;
use millrace_common::types::Element;
use millrace_common::zone::Zone;
use millrace_common::{SqlError, SqlType};
use millrace_planner::bind::zones::{Literals, Zones};
use millrace_planner::parser::with_changes_rows;
use millrace_planner::{Binder, SessionInfo};
use millrace_rpc::catalog::{Column as CatalogColumn, Relation};
use sqlparser::ast::{
    Assignment, Expr, Insert, OnConflictAction, OnInsert, Query, SelectItem, SetExpr,
    Statement as Sql, Update, Value, With,
};

use super::{Outcome, RowSet, Session, busy};
use crate::dml::rewrite;
use crate::dml::{insert, update};
use crate::encoding::{Column, ColumnBuilder};
use crate::query::SessionCatalog;

impl Session {
    /// What the planner is told of the zone. A view's definition must not depend on it.
    pub(super) fn zones(&self, for_view: bool) -> Zones {
        let literals = if for_view { Literals::Refused } else { Literals::Session };
        Zones { zone: self.settings.zone(), literals }
    }

    /// As [`Session::info`], for what is stored as text and bound again by others.
    pub fn info_of_definition(&self, for_view: bool) -> SessionInfo {
        let zones = Zones { literals: Literals::Refused, ..self.zones(for_view) };
        SessionInfo { zones, ..self.info(for_view) }
    }

    /// Refuses an expression to be stored, such as a default, whose literals the zone changes.
    pub fn check_definition(&self, view: &SessionCatalog, query: &Query) -> Result<(), SqlError> {
        match self.settings.zone() {
            None => Ok(()),
            Some(_) => {
                let info = self.info_of_definition(false);
                busy(|| Binder::new(view, info).query(query, &[])).map(|_| ())
            }
        }
    }

    /// All rows of a query that a definition is made of, whoever asks.
    pub async fn collect_in_utc(
        &self,
        view: &SessionCatalog,
        query: &Query,
    ) -> Result<Vec<RecordBatch>, SqlError> {
        let query = crate::catalog::rewrite::for_clients(query, self)?;
        let info = SessionInfo { zones: Zones::default(), ..self.info(false) };
        let bound = busy(|| Binder::new(view, info).query(&query, &[]))?;
        self.fix_epoch(view, &bound).await?;
        let mut stream = self.engine().run(bound.plan, &self.plan_memory()).await?;
        let mut batches = Vec::new();
        while let Some(batch) = stream.next().await {
            batches.push(batch?);
        }
        Ok(batches)
    }

    /// Rows as they are shown in the session's zone.
    pub(super) fn in_zone(&self, outcome: Outcome) -> Outcome {
        let Some(zone) = self.settings.zone() else { return outcome };
        match outcome {
            Outcome::Rows(rows) => Outcome::Rows(shown_in(zone, rows)),
            Outcome::CopyOut(copy) => {
                let mut copy = *copy;
                copy.rows = shown_in(zone, copy.rows);
                Outcome::CopyOut(Box::new(copy))
            }
            other => other,
        }
    }

    /// Gives a statement that writes the casts that depend on the zone.
    pub(super) fn fit_to_zone(&self, sql: &mut Sql) -> Result<(), SqlError> {
        let Some(zone) = self.settings.zone() else { return Ok(()) };
        match sql {
            Sql::Insert(insert) => self.fit_insert(insert, zone),
            Sql::Update(update) => self.fit_update(update),
            Sql::Query(query) if with_changes_rows(query) => Err(SqlError::unsupported(
                "a statement that writes in WITH where TimeZone is not UTC",
            )
            .with_hint("SET LOCAL TimeZone = 'UTC' for this statement.")),
            _ => Ok(()),
        }
    }

    fn fit_insert(&self, insert: &mut Insert, zone: Zone) -> Result<(), SqlError> {
        let view = self.catalog_view();
        let table = insert::table_of(&view, insert)?;
        let targets = insert::targets_of(&table, insert)?;
        let columns: Vec<&CatalogColumn> = targets.iter().map(|t| &table.columns[*t]).collect();
        if let Some(source) = &mut insert.source {
            let Query { with, body, .. } = source.as_mut();
            if let SetExpr::Values(values) = body.as_mut() {
                for row in &mut values.rows {
                    for (e, column) in row.iter_mut().zip(&columns) {
                        read_literal(e, column.sql_type()?, zone)?;
                        self.fit(&view, e, column, with.as_ref())?;
                    }
                }
            } else {
                self.fit_source(&view, source, &columns)?;
            }
        }
        if let Some(OnInsert::OnConflict(conflict)) = &mut insert.on
            && let OnConflictAction::DoUpdate(set) = &mut conflict.action
        {
            for assignment in &mut set.assignments {
                fit_assignment(&table, assignment)?;
            }
        }
        Ok(())
    }

    /// The columns of a query that is inserted.
    fn fit_source(
        &self,
        view: &SessionCatalog,
        source: &mut Query,
        columns: &[&CatalogColumn],
    ) -> Result<(), SqlError> {
        let types = self.bind(view, source, &[])?.0.types;
        for (i, (from, column)) in types.iter().zip(columns).enumerate() {
            let to = column.sql_type()?;
            if !depends(*from, to) {
                continue;
            }
            let width = types.len();
            let item = match source.body.as_mut() {
                SetExpr::Select(select)
                    if select.distinct.is_none() && select.projection.len() == width =>
                {
                    select.projection.get_mut(i)
                }
                _ => None,
            };
            match item {
                Some(SelectItem::UnnamedExpr(e) | SelectItem::ExprWithAlias { expr: e, .. }) => {
                    wrap(e, to)?
                }
                _ => return Err(unfit(*from, to)),
            }
        }
        Ok(())
    }

    /// A value of VALUES.
    fn fit(
        &self,
        view: &SessionCatalog,
        e: &mut Expr,
        column: &CatalogColumn,
        with: Option<&With>,
    ) -> Result<(), SqlError> {
        let to = column.sql_type()?;
        if rewrite::is_literal(e) || !may_depend(to) {
            return Ok(());
        }
        let given = match default_of(e, column)? {
            Some(default) => default,
            None => e.clone(),
        };
        let mut query = rewrite::empty_query()?;
        query.with = with.cloned();
        rewrite::select_of(&mut query)?.projection = vec![rewrite::item(given.clone(), "v")];
        let from = self.bind(view, &query, &[])?.0.types.first().copied();
        if from.is_some_and(|from| depends(from, to)) {
            *e = given;
            wrap(e, to)?;
        }
        Ok(())
    }

    /// An expression that stands by itself, such as a default, and is assigned to a type.
    pub fn fit_value(&self, mut e: Expr, to: SqlType) -> Result<Expr, SqlError> {
        if self.settings.zone().is_none() || rewrite::is_literal(&e) || !may_depend(to) {
            return Ok(e);
        }
        let mut query = rewrite::empty_query()?;
        rewrite::select_of(&mut query)?.projection = vec![rewrite::item(e.clone(), "v")];
        let from = self.bind(&self.catalog_view(), &query, &[])?.0.types.first().copied();
        if from.is_some_and(|from| depends(from, to)) {
            wrap(&mut e, to)?;
        }
        Ok(e)
    }

    fn fit_update(&self, update: &mut Update) -> Result<(), SqlError> {
        let view = self.catalog_view();
        let plan = update::plan_update(&view, update)?;
        let (bound, fields) = self.bind(&view, &plan.query, &[])?;
        for (i, assignment) in update.assignments.iter_mut().enumerate() {
            let position = insert::assignment_position(&plan.table, &assignment.target)?;
            let column = &plan.table.columns[position];
            let name = format!("new{i}");
            let at = fields.iter().position(|f| f.name == name);
            let (Some(from), to) = (at.and_then(|at| bound.types.get(at)), column.sql_type()?)
            else {
                continue;
            };
            if depends(*from, to) {
                if let Some(default) = default_of(&assignment.value, column)? {
                    assignment.value = default;
                }
                wrap(&mut assignment.value, to)?;
            }
        }
        Ok(())
    }
}

/// A value of ON CONFLICT DO UPDATE SET.
fn fit_assignment(table: &Relation, assignment: &mut Assignment) -> Result<(), SqlError> {
    let position = insert::assignment_position(table, &assignment.target)?;
    let column = &table.columns[position];
    let to = column.sql_type()?;
    let same = match &assignment.value {
        Expr::CompoundIdentifier(parts) => {
            parts.last().is_some_and(|name| crate::query::catalog_view::fold(name) == column.name)
        }
        value => rewrite::is_literal(value),
    };
    // A generated column is set to nothing but DEFAULT.
    if same || !may_depend(to) || column.generated_sql.is_some() {
        return Ok(());
    }
    if let Some(default) = default_of(&assignment.value, column)? {
        assignment.value = default;
    }
    wrap(&mut assignment.value, to)
}

/// The default that DEFAULT stands for.
fn default_of(e: &Expr, column: &CatalogColumn) -> Result<Option<Expr>, SqlError> {
    match (rewrite::is_default(e), column.default_sql.as_deref()) {
        (true, default) => rewrite::parse_expr(default.unwrap_or("NULL")).map(Some),
        (false, _) => Ok(None),
    }
}

/// Whether an assignment between the types depends on the zone.
fn depends(from: SqlType, to: SqlType) -> bool {
    use SqlType::{Char, Date, Text, Time, Timestamp, Timestamptz, Varchar};
    matches!(
        (from, to),
        (Timestamp | Date, Timestamptz)
            | (Timestamptz, Timestamp | Date | Time | Text | Varchar(_) | Char(_))
            | (SqlType::Array(Element::Timestamptz), Text | Varchar(_) | Char(_))
    )
}

/// Whether any assignment to the type does.
fn may_depend(to: SqlType) -> bool {
    use SqlType::{Char, Date, Text, Time, Timestamp, Timestamptz, Varchar};
    matches!(to, Timestamptz | Timestamp | Date | Time | Text | Varchar(_) | Char(_))
}

fn unfit(from: SqlType, to: SqlType) -> SqlError {
    SqlError::unsupported(format!(
        "inserting {from} into a column of type {to} where TimeZone is not UTC"
    ))
    .with_hint("Cast the query's column to the type of the table's.")
}

/// `CAST(e AS type)`; a text keeps its length for the assignment to check.
fn wrap(e: &mut Expr, to: SqlType) -> Result<(), SqlError> {
    let name = match to {
        SqlType::Varchar(_) | SqlType::Char(_) => "text".to_owned(),
        to => to.to_string(),
    };
    let mut cast = rewrite::typed_literal(None, &name)?;
    if let Expr::Cast { expr, .. } = &mut cast {
        std::mem::swap(expr.as_mut(), e);
    }
    *e = cast;
    Ok(())
}

/// Gives the literal of an instant its offset. What is no instant stays, for whoever reads it to say why.
fn read_literal(e: &mut Expr, to: SqlType, zone: Zone) -> Result<(), SqlError> {
    let Expr::Value(literal) = e else { return Ok(()) };
    let Value::SingleQuotedString(text) = &mut literal.value else { return Ok(()) };
    if !matches!(to, SqlType::Timestamptz | SqlType::Array(Element::Timestamptz)) {
        return Ok(());
    }
    let mut builder = ColumnBuilder::new(to, 1).in_zone(zone);
    if builder.append_text(text).is_err() {
        return Ok(());
    }
    let mut utc = BytesMut::new();
    Column::new(&builder.finish())?.put_text(0, &mut utc)?;
    *text = String::from_utf8_lossy(&utc).into_owned();
    Ok(())
}

/// OIDs of `timestamptz` and its array.
const ZONED: [u32; 2] = [1184, 1185];

fn shown_in(zone: Zone, rows: RowSet) -> RowSet {
    if !rows.fields.iter().any(|f| ZONED.contains(&f.type_oid)) {
        return rows;
    }
    let name: Arc<str> = zone.name().into();
    let RowSet { fields, stream, tag } = rows;
    let stream = stream.map(move |batch| batch.and_then(|b| labelled(&b, &name))).boxed();
    RowSet { fields, stream, tag }
}

/// A batch whose instants say the zone in which they are shown.
fn labelled(batch: &RecordBatch, zone: &Arc<str>) -> Result<RecordBatch, SqlError> {
    let columns: Vec<ArrayRef> = batch
        .columns()
        .iter()
        .map(|c| in_zone(c, zone).map(|shown| shown.unwrap_or_else(|| Arc::clone(c))))
        .collect::<Result<_, SqlError>>()?;
    let schema = batch.schema();
    let fields: Vec<Field> = schema
        .fields()
        .iter()
        .zip(&columns)
        .map(|(f, c)| f.as_ref().clone().with_data_type(c.data_type().clone()))
        .collect();
    let schema = Arc::new(Schema::new_with_metadata(fields, schema.metadata().clone()));
    let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    RecordBatch::try_new_with_options(schema, columns, &options)
        .map_err(crate::dml::rows::arrow_error)
}

fn in_zone(array: &ArrayRef, zone: &Arc<str>) -> Result<Option<ArrayRef>, SqlError> {
    Ok(match array.data_type() {
        DataType::Timestamp(TimeUnit::Microsecond, Some(_)) => {
            let instants = array.as_primitive::<TimestampMicrosecondType>().clone();
            Some(Arc::new(instants.with_timezone(Arc::clone(zone))) as ArrayRef)
        }
        DataType::List(item) => {
            let list = array.as_list::<i32>();
            let Some(items) = in_zone(list.values(), zone)? else { return Ok(None) };
            let item = Arc::new(item.as_ref().clone().with_data_type(items.data_type().clone()));
            let (offsets, nulls) = (list.offsets().clone(), list.nulls().cloned());
            let list = ListArray::try_new(item, offsets, items, nulls);
            Some(Arc::new(list.map_err(crate::dml::rows::arrow_error)?) as ArrayRef)
        }
        _ => None,
    })
}
