//! Logical plan → stream algebra: one function a node kind. [`crate::stream::operators`] says which.

use std::cell::Cell;
use std::sync::Arc;

use arrow::array::ArrayRef;
use arrow::compute;
use arrow::datatypes::{DataType, Field, FieldRef, Schema, SchemaRef};
use arrow::record_batch::{RecordBatch, RecordBatchOptions};
use datafusion::common::{DFSchema, TableReference};
use datafusion::logical_expr::{
    EmptyRelation, Expr, Filter, LogicalPlan, Projection, TableScan, Union, Values,
};
use millrace_common::{SqlError, SqlState};
use millrace_functions::error::sql_error_from_datafusion;
use millrace_functions::expr;
use millrace_rpc::catalog::{Relation, RelationKind};

use crate::catalog::CatalogView;
use crate::stream::compile::compile;
use crate::stream::plan::Stream;

pub(super) type Result<T> = std::result::Result<T, SqlError>;

/// Walks a logical plan.
pub struct Converter<'a> {
    pub(super) catalog: &'a dyn CatalogView,
    /// Calls of `as_of_proctime` met, and those that belong to a lookup join (see `stream::lookup`).
    pub(super) marks: Cell<usize>,
    pub(super) lookups: Cell<usize>,
}

impl<'a> Converter<'a> {
    pub fn new(catalog: &'a dyn CatalogView) -> Converter<'a> {
        Converter { catalog, marks: Cell::new(0), lookups: Cell::new(0) }
    }

    pub(super) fn scan(&self, scan: &TableScan) -> Result<Stream> {
        let relation = self.relation(&scan.table_name)?;
        // By name: a table source may or may not show hidden columns.
        let source = scan.source.schema();
        let all: Vec<usize> = match &scan.projection {
            Some(projection) if scan.filters.is_empty() => projection.clone(),
            _ => (0..source.fields().len()).collect(),
        };
        let fields: Vec<&FieldRef> = all.iter().map(|&c| &source.fields()[c]).collect();
        let columns =
            fields.iter().map(|f| position(&relation, f.name())).collect::<Result<Vec<_>>>()?;
        let schema = relation_fields(&relation, &columns)?;
        let mut stream = Stream::scan(relation, schema, columns);
        if !scan.filters.is_empty() {
            let qualified = DFSchema::try_from_qualified_schema(scan.table_name.clone(), &source)
                .map_err(sql_error_from_datafusion)?;
            for filter in scan.filters.iter().filter_map(|f| self.without_marks(f)) {
                stream = super::temporal::filter(stream, &filter, &qualified)?;
            }
            if let Some(projection) = &scan.projection {
                stream = stream.select(projection);
            }
        }
        Ok(match scan.fetch {
            Some(fetch) => super::order::first_rows(stream, 0, Some(fetch as u64)),
            None => stream,
        })
    }

    pub(super) fn relation(&self, name: &TableReference) -> Result<Arc<Relation>> {
        let relation = self.catalog.relation(name.schema(), name.table()).ok_or_else(|| {
            in_view(format!("reading {name}"))
                .with_hint("Only tables, sources and materialized views can be read by a view.")
        })?;
        match relation.kind() {
            RelationKind::Table | RelationKind::Source | RelationKind::MaterializedView => {
                Ok(relation)
            }
            _ => Err(SqlError::new(
                SqlState::WRONG_OBJECT_TYPE,
                format!("\"{}\" cannot be read by a materialized view", relation.name),
            )),
        }
    }

    pub(super) fn filter(&self, filter: &Filter) -> Result<Stream> {
        let input = self.convert(&filter.input)?;
        match self.without_marks(&filter.predicate) {
            Some(predicate) => super::temporal::filter(input, &predicate, filter.input.schema()),
            None => Ok(input),
        }
    }

    pub(super) fn projection(&self, projection: &Projection) -> Result<Stream> {
        let input = self.convert(&projection.input)?;
        project(input, projection)
    }

    pub(super) fn union(&self, union: &Union) -> Result<Stream> {
        let mut inputs = Vec::with_capacity(union.inputs.len());
        for plan in &union.inputs {
            inputs.push(self.convert(plan)?);
        }
        // The coerced types are the union's; a column is nullable if it is in any input.
        let target = union.schema.as_arrow();
        let fields: Vec<Field> = target
            .fields()
            .iter()
            .enumerate()
            .map(|(i, f)| {
                let nullable = inputs.iter().any(|s| s.schema.field(i).is_nullable());
                f.as_ref().clone().with_nullable(nullable).with_metadata(Default::default())
            })
            .collect();
        let schema = Arc::new(Schema::new(fields));
        let inputs =
            inputs.into_iter().map(|input| cast_to(input, &schema)).collect::<Result<Vec<_>>>()?;
        Ok(Stream::union(inputs, schema))
    }

    pub(super) fn values(&self, values: &Values) -> Result<Stream> {
        let schema = plain_schema(values.schema.as_arrow());
        let empty = DFSchema::empty();
        let mut columns: Vec<Vec<ArrayRef>> = vec![Vec::new(); schema.fields().len()];
        for row in &values.values {
            for (c, e) in row.iter().enumerate() {
                let value = self.constant(e, &empty)?;
                let value = compute::cast(&value, schema.field(c).data_type())
                    .map_err(|e| sql_error_from_datafusion(e.into()))?;
                columns[c].push(value);
            }
        }
        let columns = columns
            .iter()
            .zip(schema.fields())
            .map(|(parts, field)| concat(parts, field.data_type()))
            .collect::<Result<Vec<_>>>()?;
        Ok(Stream::values(batch(schema, columns, values.values.len())?))
    }

    fn constant(&self, e: &Expr, empty: &DFSchema) -> Result<ArrayRef> {
        let row = batch(Arc::new(Schema::empty()), vec![], 1)?;
        let value = compile(e, empty)?.evaluate(&row);
        value.and_then(|v| v.into_array(1)).map_err(sql_error_from_datafusion)
    }

    pub(super) fn empty(&self, empty: &EmptyRelation) -> Result<Stream> {
        let schema = plain_schema(empty.schema.as_arrow());
        let rows = usize::from(empty.produce_one_row);
        let null = |f: &FieldRef| arrow::array::new_null_array(f.data_type(), rows);
        let columns = schema.fields().iter().map(null).collect();
        Ok(Stream::values(batch(schema, columns, rows)?))
    }
}

/// A projection over an input that stands for the projection's own.
pub(super) fn project(input: Stream, projection: &Projection) -> Result<Stream> {
    project_as(input, &projection.expr, projection.input.schema(), &projection.schema)
}

/// Expressions over a stream whose columns are those of `schema`, with the names that they have in `output`.
pub(super) fn project_as(
    input: Stream,
    exprs: &[Expr],
    schema: &DFSchema,
    output: &DFSchema,
) -> Result<Stream> {
    let columns = exprs
        .iter()
        .zip(output.fields())
        .map(|(e, field)| Ok((compile(e, schema)?, field.name().clone())))
        .collect::<Result<Vec<_>>>()?;
    input.project(columns).map_err(sql_error_from_datafusion)
}

/// The input with its columns cast to `schema`'s types and named so.
pub(super) fn cast_to(input: Stream, schema: &Schema) -> Result<Stream> {
    let mut same = input.width() == schema.fields().len();
    let mut columns = Vec::with_capacity(schema.fields().len());
    for (i, field) in schema.fields().iter().enumerate() {
        let column = expr::column(&input.schema, i);
        let from = input.schema.field(i);
        let cast = from.data_type() != field.data_type();
        same &= !cast && from.name() == field.name();
        let e = if cast { expr::cast(column, field.data_type().clone()) } else { column };
        columns.push((e, field.name().clone()));
    }
    if same {
        return Ok(input);
    }
    input.project(columns).map_err(sql_error_from_datafusion)
}

/// All columns of the input, and more expressions behind them, for operators that take only columns.
/// Expressions that are columns, and repeated ones, add nothing.
pub(super) struct Extended {
    input: Stream,
    extra: Vec<millrace_functions::expr::ExprRef>,
}

impl Extended {
    pub fn new(input: Stream) -> Extended {
        Extended { input, extra: vec![] }
    }

    /// The position of an expression over the input.
    pub fn add(&mut self, e: millrace_functions::expr::ExprRef) -> usize {
        if let Some(c) = expr::as_column(&e) {
            return c;
        }
        let width = self.input.width();
        if let Some(i) = self.extra.iter().position(|have| have == &e) {
            return width + i;
        }
        self.extra.push(e);
        width + self.extra.len() - 1
    }

    pub fn input(&self) -> &Stream {
        &self.input
    }

    pub fn finish(self) -> Result<Stream> {
        if self.extra.is_empty() {
            return Ok(self.input);
        }
        let schema = Arc::clone(&self.input.schema);
        let own = schema
            .fields()
            .iter()
            .enumerate()
            .map(|(i, f)| (expr::column(&schema, i), f.name().clone()));
        let more = self.extra.into_iter().map(|e| {
            let name = crate::explain::expr_text(&e);
            (e, name)
        });
        let columns = own.chain(more).collect();
        self.input.project(columns).map_err(sql_error_from_datafusion)
    }
}

/// A refusal that says where.
pub(super) fn in_view(feature: impl std::fmt::Display) -> SqlError {
    SqlError::unsupported(format!("{feature} in a materialized view"))
}

/// Columns that hash and sort; what cannot be a key is refused.
pub(super) fn check_key(stream: &Stream, columns: &[usize], what: &str) -> Result<()> {
    for &c in columns {
        let t = stream.schema.field(c).data_type();
        let array = matches!(t, DataType::List(item) if !item.data_type().is_nested());
        if t.is_nested() && !array {
            return Err(in_view(format!("{what} a column of type {t}")));
        }
    }
    Ok(())
}

pub(super) fn node_name(plan: &LogicalPlan) -> String {
    let text = plan.display().to_string();
    let end = text.find(|c: char| !c.is_alphanumeric()).unwrap_or(text.len());
    format!("the operator {}", &text[..end])
}

fn position(relation: &Relation, name: &str) -> Result<usize> {
    relation.columns.iter().position(|c| c.name == name).ok_or_else(|| {
        SqlError::internal(format!("relation {} has no column {name}", relation.name))
    })
}

fn relation_fields(relation: &Relation, columns: &[usize]) -> Result<SchemaRef> {
    Ok(Arc::new(
        relation
            .arrow_schema()?
            .project(columns)
            .map_err(|e| SqlError::internal(format!("columns of {}: {e}", relation.name)))?,
    ))
}

fn plain_schema(schema: &Schema) -> SchemaRef {
    let field = |f: &FieldRef| Field::new(f.name(), f.data_type().clone(), true);
    Arc::new(Schema::new(schema.fields().iter().map(field).collect::<Vec<_>>()))
}

fn batch(schema: SchemaRef, columns: Vec<ArrayRef>, rows: usize) -> Result<RecordBatch> {
    let options = RecordBatchOptions::new().with_row_count(Some(rows));
    RecordBatch::try_new_with_options(schema, columns, &options)
        .map_err(|e| sql_error_from_datafusion(e.into()))
}

fn concat(parts: &[ArrayRef], data_type: &DataType) -> Result<ArrayRef> {
    if parts.is_empty() {
        return Ok(arrow::array::new_empty_array(data_type));
    }
    let parts: Vec<&dyn arrow::array::Array> = parts.iter().map(AsRef::as_ref).collect();
    compute::concat(&parts).map_err(|e| sql_error_from_datafusion(e.into()))
}
