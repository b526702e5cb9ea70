//! [`Aggregate`]: grouped aggregation, DISTINCT.

use std::fmt::Write;
use std::sync::Arc;

use arrow::datatypes::{Field, FieldRef, Schema, SchemaRef};
use datafusion::common::Result;
use millrace_common::SqlError;
use millrace_common::access::{AccessClass, RetentionBy};
use millrace_functions::aggregate_kind::AggFunc;
use millrace_graph as graph;
use millrace_graph::state::accumulator_schema;
use millrace_graph::{AggCall, DerivedWatermark, Operator, ValueTable};
use millrace_rpc::catalog::RowStorage;

use super::{Input, LineContext, Lowered, OperatorLine, OperatorRules, RowIdentity};
use crate::explain::text::{column, list, state, vnode};
use crate::passes::classes;
use crate::passes::exchange::{Placed, meet_only};
use crate::passes::identity::Keyed;
use crate::passes::properties::{Distribution, Properties};
use crate::passes::prune::{Map, Pruned, Pruning, all_kept, kept_at, only, prune_exact};
use crate::passes::watermark::{self, port};
use crate::stream::plan::{Aggregate, Call, Op, Stream};
use crate::stream::tables::StateTables;

impl Stream {
    pub fn aggregate(self, group: Vec<usize>, calls: Vec<Call>) -> Stream {
        let groups = group.iter().map(|&g| Arc::clone(&self.schema.fields()[g]));
        let fields: Vec<FieldRef> = groups.chain(calls.iter().map(call_field)).collect();
        let schema = Arc::new(Schema::new(fields));
        let op = Op::Aggregate(Aggregate { group, calls, vnode: vec![], table: () });
        Stream { op, inputs: vec![self], schema }
    }
}

fn call_field(call: &Call) -> FieldRef {
    Arc::new(Field::new(&call.state.name, call.output_type.clone(), call.state.nullable))
}

impl OperatorRules for Aggregate {
    fn properties(&self, width: usize, inputs: &[Properties]) -> Properties {
        let input = Properties::of_input(inputs, width);
        let below = input.select(&self.group);
        let distribution = if self.vnode.is_empty() {
            Distribution::Singleton
        } else {
            let find = |c: &usize| self.group.iter().position(|g| g == c);
            let found = self.vnode.iter().map(find).collect::<Option<Vec<_>>>();
            found.map_or(Distribution::Any, Distribution::Hash)
        };
        let mut keys = below.keys;
        keys.push((0..self.group.len()).collect());
        let mut equal = below.equal;
        equal.extend(self.group.len()..width);
        Properties {
            append_only: self.calls.is_empty() && input.append_only,
            keys,
            equal,
            distribution,
            max_rows: if self.group.is_empty() { Some(1) } else { input.max_rows },
        }
    }

    fn watermarks(&self, inputs: &[Vec<DerivedWatermark>], _: &[usize]) -> Vec<DerivedWatermark> {
        watermark::pick(port(inputs, 0), &self.group)
    }

    fn keeps_state(&self) -> bool {
        true
    }

    fn place(&mut self, inputs: Vec<Placed>) -> Vec<Placed> {
        meet_only(inputs, &self.group, &mut self.vnode)
    }

    fn identity(&mut self) -> Option<RowIdentity<'_>> {
        None
    }

    fn with_key(&self, _: &Stream) -> Result<Option<Keyed>> {
        Ok(None)
    }

    fn prune(mut self, at: Pruning<'_>) -> Result<Pruned> {
        let groups = self.group.len();
        // An aggregate without groups must not lose its last call: it would have no columns.
        let keep = |i: usize| at.required.contains(&(groups + i)) || (groups == 0 && i == 0);
        let mut map: Map = (0..groups).map(Some).collect();
        let mut calls = Vec::new();
        for (i, call) in self.calls.into_iter().enumerate() {
            map.push(keep(i).then_some(groups + calls.len()));
            if keep(i) {
                calls.push(call);
            }
        }
        self.calls = calls;
        let needed = self.columns_read().into_iter().collect();
        let (input, below) = prune_exact(only(at.inputs)?, &needed)?;
        let mut calls = self.calls;
        for call in &mut calls {
            call.arg = call.arg.map(|c| kept_at(&below, c)).transpose()?;
            call.filter = call.filter.map(|c| kept_at(&below, c)).transpose()?;
        }
        let group = all_kept(&below, &self.group)?;
        let vnode = all_kept(&below, &self.vnode)?;
        let mut pruned = input.aggregate(group, calls);
        if let Op::Aggregate(a) = &mut pruned.op {
            a.vnode = vnode;
        }
        Ok((pruned, map))
    }

    fn lower(
        mut self,
        tables: &mut StateTables,
        inputs: &[Input<'_>],
    ) -> Result<Lowered, SqlError> {
        let input = Input::one(inputs)?;
        let order = closing_first(&mut self, input.watermarks);
        let op = with_tables(self, tables, input);
        clean(&op, tables, input.watermarks);
        Ok(Lowered { op: Operator::Aggregate(op), order })
    }
}

/// Brings the first group column with a watermark to the front, so that the state tables that have only
/// the group's key can be cleaned by it. Gives the new order of the output columns, if it is another.
fn closing_first(a: &mut Aggregate, marks: &[DerivedWatermark]) -> Option<Vec<usize>> {
    let values = a.calls.iter().any(|c| {
        c.distinct || c.func.is_collected() || matches!(c.func, AggFunc::Min | AggFunc::Max)
    });
    let at = a.group.iter().position(|g| watermark::of(marks, *g).is_some())?;
    if at == 0 || !values {
        return None;
    }
    let column = a.group.remove(at);
    a.group.insert(0, column);
    let groups = [at].into_iter().chain((0..a.group.len()).filter(|&g| g != at));
    Some(groups.chain(a.group.len()..a.group.len() + a.calls.len()).collect())
}

fn with_tables(a: Aggregate, tables: &mut StateTables, input: Input<'_>) -> graph::Aggregate {
    // (arg, filter, descending) of the value tables made so far.
    let mut values: Vec<((usize, Option<usize>, bool), usize)> = Vec::new();
    let mut calls = Vec::with_capacity(a.calls.len());
    // Extremes first: a DISTINCT call can share their table whatever its direction.
    let mut order: Vec<usize> = (0..a.calls.len()).collect();
    order.sort_by_key(|&i| a.calls[i].distinct);
    for &i in &order {
        let call = &a.calls[i];
        let append_only = input.properties.append_only;
        let direction = classes::value_order(call.func, call.distinct, append_only);
        let mut value = None;
        if let (Some(descending), Some(arg)) = (direction, call.arg) {
            let key = (arg, call.filter, descending);
            let fits = |k: &(usize, Option<usize>, bool)| {
                *k == key
                    || (call.distinct
                        && !call.func.is_collected()
                        && (k.0, k.1) == (arg, call.filter))
            };
            value = Some(match values.iter().find(|(k, _)| fits(k)) {
                Some((k, table)) => (*table, k.2),
                None => {
                    let points = call.distinct && !call.func.is_collected();
                    let table = value_table(tables, input.schema, arg, points);
                    values.push((key, table));
                    (table, descending)
                }
            });
        }
        let state = value.map(|(table, descending)| ValueTable { table, descending });
        calls.push((i, call.clone().with_state(state)));
    }
    calls.sort_by_key(|(i, _)| *i);
    let calls: Vec<AggCall> = calls.into_iter().map(|(_, call)| call).collect();
    let schema = accumulator_schema(&a.group, &calls, input.schema);
    let name = if calls.is_empty() { "distinct" } else { "aggregate" };
    let table = tables.add(name, AccessClass::PointUpdate, RowStorage::Keyed, schema);
    graph::Aggregate { group: a.group, vnode: a.vnode, calls, table }
}

fn value_table(tables: &mut StateTables, input: &SchemaRef, arg: usize, distinct: bool) -> usize {
    let value: Field = input.field(arg).clone().with_nullable(false);
    let schema = Arc::new(Schema::new(vec![value]));
    let name = if distinct { "distinct values" } else { "extreme values" };
    tables.add(name, classes::value_class(!distinct), RowStorage::Multiset, schema)
}

/// Lets go of groups below the watermark of a group column, which [`closing_first`] has put first where a value table
/// needs that.
fn clean(a: &graph::Aggregate, tables: &mut StateTables, marks: &[DerivedWatermark]) {
    let found = a.group.iter().enumerate().find_map(|(i, &g)| Some((i, watermark::of(marks, g)?)));
    let Some((at, terms)) = found else { return };
    tables.retain(a.table, RetentionBy::Value(at), terms.to_vec());
    for values in a.calls.iter().filter_map(|c| c.state) {
        tables.retain(values.table, RetentionBy::Key, terms.to_vec());
    }
}

impl OperatorLine for Aggregate {
    fn line(&self, at: &mut LineContext<'_>) -> String {
        line(self, at.inputs[0])
    }
}

impl OperatorLine for graph::Aggregate {
    fn line(&self, at: &mut LineContext<'_>) -> String {
        let input = at.inputs[0];
        let group = list(input, &self.group);
        at.keys.push((self.table, format!("({group})")));
        let mut tables = vec![self.table];
        for c in &self.calls {
            if let (Some(ValueTable { table, descending }), Some(arg)) = (c.state, c.arg) {
                let direction = if descending { " desc" } else { "" };
                let comma = if self.group.is_empty() { "" } else { ", " };
                let value = column(input, arg);
                at.keys.push((table, format!("({group}{comma}{value}{direction})")));
                if !tables.contains(&table) {
                    tables.push(table);
                }
            }
        }
        line(self, input) + &vnode(input, &self.vnode, &self.group) + &state(&tables)
    }
}

/// What an aggregation groups by and calls.
fn line<S, T>(a: &graph::Aggregate<S, T>, input: &Schema) -> String {
    let mut line = if a.calls.is_empty() { "Distinct".to_owned() } else { "Aggregate".into() };
    if !a.group.is_empty() {
        let _ = write!(line, " by ({})", list(input, &a.group));
    }
    if !a.calls.is_empty() {
        let calls: Vec<String> = a.calls.iter().map(|c| call(c, input)).collect();
        let _ = write!(line, ": {}", calls.join(", "));
    }
    line
}

/// A call of an aggregate over an input column, of all rows or of those where another column is true.
fn call<S>(call: &AggCall<S>, input: &Schema) -> String {
    let name = call.func.name();
    let distinct = if call.distinct { "distinct " } else { "" };
    let arg = call.arg.map_or("*".into(), |a| column(input, a));
    let filter = call.filter.map_or(String::new(), |f| format!(" filter ({})", column(input, f)));
    format!("{name}({distinct}{arg}){filter}")
}
