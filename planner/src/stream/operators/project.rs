//! [`Project`]: columns computed from each row.

use std::sync::Arc;

use arrow::datatypes::{FieldRef, Schema};
use datafusion::common::Result;
use millrace_common::SqlError;
use millrace_functions::expr::{self, ExprRef};
use millrace_graph::{DerivedWatermark, Operator, Project};

use super::{Input, LineContext, Lowered, OperatorLine, RowRules};
use crate::explain::expr_text;
use crate::explain::text::text;
use crate::passes::identity::{Keyed, with_key};
use crate::passes::properties::Properties;
use crate::passes::prune::{Pruned, Pruning, only, prune_columns, select};
use crate::passes::watermark::{self, port};
use crate::stream::plan::{Op, Stream};
use crate::stream::tables::StateTables;

impl Stream {
    /// A projection with named columns. What is computed may be NULL (a failing expression is), what
    /// is only passed on keeps its nullability.
    pub fn project(self, columns: Vec<(ExprRef, String)>) -> Result<Stream> {
        let mut exprs = Vec::with_capacity(columns.len());
        let mut fields = Vec::with_capacity(columns.len());
        for (e, name) in columns {
            fields.push(expr::output_field(&e, &self.schema, &name)?);
            exprs.push(e);
        }
        let schema = Arc::new(Schema::new(fields));
        Ok(Stream { op: Op::Project(Project { exprs }), inputs: vec![self], schema })
    }

    /// Only some columns, by position.
    pub fn select(self, columns: &[usize]) -> Stream {
        let fields: Vec<FieldRef> =
            columns.iter().map(|&c| Arc::clone(&self.schema.fields()[c])).collect();
        let exprs = columns.iter().map(|&c| expr::column(&self.schema, c)).collect();
        let schema = Arc::new(Schema::new(fields));
        Stream { op: Op::Project(Project { exprs }), inputs: vec![self], schema }
    }
}

impl RowRules for Project {
    fn properties(&self, width: usize, inputs: &[Properties]) -> Properties {
        let columns: Vec<Option<usize>> = self.exprs.iter().map(expr::as_column).collect();
        Properties::of_input(inputs, width).project(&columns)
    }

    fn watermarks(&self, inputs: &[Vec<DerivedWatermark>], _: &[usize]) -> Vec<DerivedWatermark> {
        let one = |(i, e): (usize, &ExprRef)| {
            let (column, steps) = watermark::monotone(e)?;
            let terms = watermark::of(port(inputs, 0), column)?;
            Some(DerivedWatermark { column: i, terms: watermark::then(terms, &steps) })
        };
        self.exprs.iter().enumerate().filter_map(one).collect()
    }

    /// Passes the key on behind its own columns.
    fn with_key(&self, stream: &Stream) -> Result<Option<Keyed>> {
        let Some(input) = stream.inputs.first() else { return Ok(None) };
        let Some((input, key)) = with_key(input)? else { return Ok(None) };
        let mut exprs = self.exprs.clone();
        let mut fields: Vec<FieldRef> = stream.schema.fields().iter().cloned().collect();
        let mut at = Vec::with_capacity(key.len());
        for k in key {
            let have = exprs.iter().position(|e| expr::as_column(e) == Some(k));
            at.push(have.unwrap_or(exprs.len()));
            if have.is_none() {
                exprs.push(expr::column(&input.schema, k));
                fields.push(Arc::clone(&input.schema.fields()[k]));
            }
        }
        let schema = Arc::new(Schema::new(fields));
        let op = Op::Project(Project { exprs });
        Ok(Some((Stream { op, inputs: vec![input], schema }, at)))
    }

    fn prune(self, at: Pruning<'_>) -> Result<Pruned> {
        let (kept, schema, map) = select(at.schema, at.required);
        let needed = kept.iter().flat_map(|&k| expr::columns_of(&self.exprs[k])).collect();
        let (input, below) = prune_columns(only(at.inputs)?, &needed)?;
        let exprs = kept
            .iter()
            .map(|&k| expr::remap(&self.exprs[k], &below, &input.schema))
            .collect::<Result<Vec<_>>>()?;
        Ok((Stream { op: Op::Project(Project { exprs }), inputs: vec![input], schema }, map))
    }

    fn lower(self, _: &mut StateTables, _: &[Input<'_>]) -> Result<Lowered, SqlError> {
        Ok(Lowered::of(Operator::Project(self)))
    }
}

impl OperatorLine for Project {
    fn line(&self, at: &mut LineContext<'_>) -> String {
        let one = |(i, e): (usize, &ExprRef)| {
            let text = text(e, at.inputs[0]);
            let name = at.output.fields().get(i).map_or("", |f| f.name());
            // A computed column may be called by its own text.
            if text == name || expr_text(e) == name { text } else { format!("{text} as {name}") }
        };
        let columns: Vec<String> = self.exprs.iter().enumerate().map(one).collect();
        format!("Project {}", columns.join(", "))
    }
}
