//! Generated columns of a relation that a connector feeds: their expressions, as they are stored with the relation; and
//! those of a source that its readers compute, because they decide which rows are late.

use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch, RecordBatchOptions};
use arrow::datatypes::{Schema, SchemaRef};
use millrace_functions::expr::ExprRef;
use millrace_functions::expr::{column, replace_columns};
use millrace_graph::codec::decode_graph;
use millrace_graph::{Operator as Op, Project, Source};
use millrace_rpc::catalog::{Column, Relation};

use crate::error::ExecError;
use crate::error_sink::ErrorSink;
use crate::operators::expr::{SafeExpr, sql_error};

/// How a column is stored whose value is the time of arrival: of its rows, no function.
pub const PROCTIME: &str = "proctime()";

/// Generated, and by an expression of the relation's graph.
fn is_computed(column: &Column) -> bool {
    column.generated_sql.as_deref().is_some_and(|sql| sql != PROCTIME)
}

/// The expressions of a relation's generated columns, in their order, and the relation's columns that they read.
pub fn expressions(relation: &Relation) -> Result<(Vec<ExprRef>, Vec<usize>), ExecError> {
    if relation.graph.is_empty() {
        return Ok((Vec::new(), Vec::new()));
    }
    let graph = decode_graph(&relation.graph).map_err(|e| ExecError::Sql(e.into()))?;
    let mut sources = None;
    let mut exprs: Vec<ExprRef> = Vec::new();
    for node in graph.fragments.iter().flat_map(|f| &f.nodes) {
        match &node.op {
            Op::Source(Source { columns, .. }) if sources.is_none() => {
                exprs = (0..node.schema.fields().len()).map(|i| column(&node.schema, i)).collect();
                sources = Some(columns.clone());
            }
            Op::Project(Project { exprs: outer }) if sources.is_some() => {
                exprs = composed(outer, &exprs)?
            }
            Op::Blackhole(_) | Op::Materialize(_) => {}
            _ => return Err(ExecError::internal("a generated column is not a plain expression")),
        }
    }
    let sources =
        sources.ok_or_else(|| ExecError::internal("a relation's graph computes nothing"))?;
    match exprs.len() == relation.columns.iter().filter(|c| is_computed(c)).count() {
        true => Ok((exprs, sources)),
        false => Err(misfit()),
    }
}

/// Projections one above the other as one: what expressions have in common is computed below them.
fn composed(outer: &[ExprRef], inner: &[ExprRef]) -> Result<Vec<ExprRef>, ExecError> {
    let compose = |e: &ExprRef| {
        replace_columns(e, |c| inner.get(c).map(Arc::clone))
            .map_err(|e| ExecError::internal(format!("a generated column's expression: {e}")))
    };
    outer.iter().map(compose).collect()
}

fn misfit() -> ExecError {
    ExecError::internal("a relation's generated columns do not fit its graph")
}

/// How the generated columns that the readers of a source need are made of the columns that its connector reads.
#[derive(Clone, Debug)]
pub struct Generated {
    exprs: Vec<ExprRef>,
    /// Positions of what the expressions are over in what is read.
    over: Vec<usize>,
    /// Of the columns of a whole batch.
    origins: Vec<Origin>,
    /// Of whole batches.
    schema: SchemaRef,
}

/// Where a column comes from: a position in what is read, or among the expressions.
#[derive(Clone, Copy, Debug)]
enum Origin {
    Read(usize),
    Computed(usize),
}

impl Generated {
    /// `whole`: the relation's columns that are wanted. Gives the columns to read too. `None`: none of them is
    /// generated.
    pub fn of(
        relation: &Relation,
        whole: &[usize],
    ) -> Result<Option<(Generated, Vec<usize>)>, ExecError> {
        let computed = |c: usize| relation.columns.get(c).is_some_and(is_computed);
        if !whole.iter().any(|c| computed(*c)) {
            return Ok(None);
        }
        let (all, sources) = expressions(relation)?;
        let mut read: Vec<usize> = whole.iter().copied().filter(|c| !computed(*c)).collect();
        for c in &sources {
            if !read.contains(c) {
                read.push(*c);
            }
        }
        let place = |c: usize| read.iter().position(|r| *r == c).ok_or_else(misfit);
        let over = sources.iter().map(|c| place(*c)).collect::<Result<Vec<_>, _>>()?;
        let (mut exprs, mut origins) = (Vec::new(), Vec::new());
        for &c in whole {
            if !computed(c) {
                origins.push(Origin::Read(place(c)?));
                continue;
            }
            let expr = all.get((0..c).filter(|c| computed(*c)).count()).ok_or_else(misfit)?;
            origins.push(Origin::Computed(exprs.len()));
            exprs.push(Arc::clone(expr));
        }
        let columns = relation.arrow_schema()?.project(whole)?;
        let columns = columns.fields().iter();
        // What violates NOT NULL is found later.
        let nullable: Vec<_> = columns.map(|f| f.as_ref().clone().with_nullable(true)).collect();
        let schema = Arc::new(Schema::new(nullable));
        Ok(Some((Generated { exprs, over, origins, schema }, read)))
    }

    /// Rows as they are read, with their generated columns. Where one fails it is NULL and reported; without a place to
    /// report to, as for a query, it is an error.
    pub fn complete(
        &self,
        read: &RecordBatch,
        errors: Option<&Arc<ErrorSink>>,
    ) -> Result<RecordBatch, ExecError> {
        let input = read.project(&self.over)?;
        let value = |e: &ExprRef| value(e, &input, errors);
        let computed = self.exprs.iter().map(value).collect::<Result<Vec<_>, _>>()?;
        let column = |origin: &Origin| match origin {
            Origin::Read(at) => Arc::clone(read.column(*at)),
            Origin::Computed(at) => Arc::clone(&computed[*at]),
        };
        let columns: Vec<ArrayRef> = self.origins.iter().map(column).collect();
        let options = RecordBatchOptions::new().with_row_count(Some(read.num_rows()));
        Ok(RecordBatch::try_new_with_options(Arc::clone(&self.schema), columns, &options)?)
    }
}

fn value(
    expr: &ExprRef,
    input: &RecordBatch,
    errors: Option<&Arc<ErrorSink>>,
) -> Result<ArrayRef, ExecError> {
    match errors {
        Some(errors) => {
            let expr = Arc::clone(expr);
            SafeExpr::new(expr, "generated column", Arc::clone(errors)).evaluate(input)
        }
        None => {
            let value = expr.evaluate(input).and_then(|v| v.into_array(input.num_rows()));
            value.map_err(|e| ExecError::Sql(sql_error(&e)))
        }
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{Int32Array, Int64Array};
    use arrow::datatypes::{DataType, Field};
    use datafusion::logical_expr::Operator;
    use datafusion::physical_expr::expressions::{BinaryExpr, CastExpr, Column};

    use super::*;

    fn col(index: usize) -> ExprRef {
        Arc::new(Column::new("c", index))
    }

    fn sum(a: ExprRef, b: ExprRef) -> ExprRef {
        Arc::new(BinaryExpr::new(a, Operator::Plus, b))
    }

    #[test]
    fn columns_are_put_where_they_were_asked_for() {
        let made = Generated {
            exprs: vec![Arc::new(CastExpr::new(col(0), DataType::Int64, None))],
            over: vec![1],
            origins: vec![Origin::Computed(0), Origin::Read(0)],
            schema: Arc::new(Schema::new(vec![
                Field::new("t", DataType::Int64, true),
                Field::new("a", DataType::Int32, true),
            ])),
        };
        let ints = |v: [i32; 2]| Arc::new(Int32Array::from(v.to_vec())) as ArrayRef;
        let read = RecordBatch::try_from_iter([("a", ints([1, 2])), ("b", ints([3, 4]))]).unwrap();
        let whole = made.complete(&read, None).unwrap();
        let times: ArrayRef = Arc::new(Int64Array::from(vec![3, 4]));
        assert_eq!(whole.column(0), &times);
        assert_eq!(whole.column(1), &ints([1, 2]));
    }

    #[test]
    fn an_expression_is_over_what_is_read_whatever_lies_between() {
        // (b + a) and, from it, (b + a) + b.
        let inner = [sum(col(1), col(0)), col(1)];
        let outer = [col(0), sum(col(0), col(1))];
        let exprs = composed(&outer, &inner).unwrap();
        let ints = |v: [i32; 2]| Arc::new(Int32Array::from(v.to_vec())) as ArrayRef;
        let read =
            RecordBatch::try_from_iter([("a", ints([1, 2])), ("b", ints([10, 20]))]).unwrap();
        assert_eq!(&value(&exprs[0], &read, None).unwrap(), &ints([11, 22]));
        assert_eq!(&value(&exprs[1], &read, None).unwrap(), &ints([21, 42]));
        assert!(composed(&[col(2)], &inner).is_err());
    }
}
