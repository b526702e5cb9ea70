//! Every column of a query with correlated subqueries under a name of its own.
//!
//! When a subquery is taken apart it gets an alias, and what its conditions compare is looked for under that
//! alias by name alone. Two tables that call a column the same, or one table that is read twice, are then
//! one. So before that each scan, and each projection and aggregate that computes something, gives its
//! columns names that no other in the statement has. The first to have a name keeps it; of the others it has
//! a suffix that users do not see.
//!
//! A column of an outer query is that of the nearest query around which has it.

use std::collections::HashSet;
use std::sync::Arc;

use datafusion::common::tree_node::{Transformed, TreeNodeRecursion};
use datafusion::common::{Column, DFSchema, DFSchemaRef, DataFusionError, Result};
use datafusion::logical_expr::expr::{Exists, InSubquery, SetComparison};
use datafusion::logical_expr::{
    Aggregate, Distinct, DistinctOn, Expr, Filter, Join, Limit, LogicalPlan, LogicalPlanBuilder,
    Projection, Sort, SortExpr, Subquery, SubqueryAlias, Union, Unnest, Values, Window,
};
use millrace_common::SqlError;
use millrace_functions::error::{external, sql_error_from_datafusion};
use millrace_functions::interrupt;
use millrace_functions::tree::{Walk, WalkPlan};

use super::outer_references;
use crate::bind::names;
use crate::bind::relations::provider::columns_of;
use crate::bind::rewrites::plan::PlanRewrite;

/// Gives columns names of their own where subqueries read them.
pub const NAME_UNIQUELY: PlanRewrite = PlanRewrite::new("name uniquely", |plan, _| rewrite(plan));

/// Gives the columns of a plan such names, where it has subqueries that need them. Its outputs keep theirs.
fn rewrite(plan: LogicalPlan) -> std::result::Result<LogicalPlan, SqlError> {
    let renamed = is_concerned(&plan).and_then(|concerned| match concerned {
        true => Own::default().statement(plan),
        false => Ok(plan),
    });
    renamed.map_err(sql_error_from_datafusion)
}

/// Whether a plan reads columns of queries around a subquery, or compares a value with one, which becomes that.
fn is_concerned(plan: &LogicalPlan) -> Result<bool> {
    let mut found = false;
    plan.walk_with_subqueries(|node| {
        node.apply_expressions(|e| {
            e.walk(|e| {
                found |= matches!(e, Expr::OuterReferenceColumn(..) | Expr::SetComparison(_));
                Ok(if found { TreeNodeRecursion::Stop } else { TreeNodeRecursion::Continue })
            })
        })
    })?;
    Ok(found)
}

/// The columns that an expression can name: those of a plan as it was, and what they are called now.
struct Scope {
    schema: DFSchemaRef,
    columns: Vec<Column>,
}

impl Scope {
    fn of(before: &LogicalPlan, now: &LogicalPlan) -> Result<Scope> {
        let (schema, columns) = (Arc::clone(before.schema()), now.schema().columns());
        if schema.fields().len() != columns.len() {
            return Err(lost_columns());
        }
        Ok(Scope { schema, columns })
    }

    /// The column that is called so with its qualifier.
    fn exact(&self, c: &Column) -> Option<&Column> {
        let called = |(q, f): (Option<&_>, &Arc<_>)| named(q, f, c);
        self.columns.get(self.schema.iter().position(called)?)
    }

    fn any(&self, c: &Column) -> Option<&Column> {
        self.columns.get(self.schema.maybe_index_of_column(c)?)
    }
}

fn named(
    qualifier: Option<&datafusion::common::TableReference>,
    field: &datafusion::arrow::datatypes::FieldRef,
    c: &Column,
) -> bool {
    qualifier == c.relation.as_ref() && *field.name() == c.name
}

/// The column of the first scope that has it.
fn found<'a>(scopes: impl Iterator<Item = &'a Scope> + Clone, c: &Column) -> Option<Column> {
    let mut again = scopes.clone();
    let mut scopes = scopes;
    let exact = scopes.find_map(|scope| scope.exact(c));
    exact.or_else(|| again.find_map(|scope| scope.any(c))).cloned()
}

fn lost_columns() -> DataFusionError {
    external(SqlError::internal("an operator has other columns than before they got names"))
}

#[derive(Default)]
struct Own {
    taken: HashSet<String>,
    suffixes: usize,
    /// The queries around the one that is looked at, the nearest last.
    around: Vec<Scope>,
}

impl Own {
    /// A name that no column has.
    fn name(&mut self, name: &str) -> String {
        if self.taken.insert(name.to_owned()) {
            return name.to_owned();
        }
        loop {
            self.suffixes += 1;
            let own = names::own_name(name, self.suffixes);
            if self.taken.insert(own.clone()) {
                return own;
            }
        }
    }

    /// A whole statement, whose outputs keep their names.
    fn statement(&mut self, plan: LogicalPlan) -> Result<LogicalPlan> {
        let schema = Arc::clone(plan.schema());
        let plan = self.outermost(plan)?;
        let columns = plan.schema().columns();
        if columns == schema.columns() {
            return Ok(plan);
        }
        if columns.len() != schema.fields().len() {
            return Err(lost_columns());
        }
        let outputs =
            columns.into_iter().zip(schema.iter()).map(|(c, (q, f))| match named(q, f, &c) {
                true => Expr::Column(c),
                false => Expr::Column(c).alias_qualified(q.cloned(), f.name()),
            });
        let outputs = outputs.collect();
        Projection::try_new(outputs, Arc::new(plan)).map(LogicalPlan::Projection)
    }

    /// What stands above the topmost SELECT list does not change names.
    fn outermost(&mut self, plan: LogicalPlan) -> Result<LogicalPlan> {
        match plan {
            LogicalPlan::Sort(sort) => {
                let input = self.outermost(sort.input.as_ref().clone())?;
                self.sort(sort, input)
            }
            LogicalPlan::Limit(limit) => {
                let input = self.outermost(limit.input.as_ref().clone())?;
                self.limit(limit, input)
            }
            LogicalPlan::Projection(p) => self.projection(p, true),
            other => self.node(other),
        }
    }

    fn node(&mut self, plan: LogicalPlan) -> Result<LogicalPlan> {
        interrupt::check().map_err(external)?;
        let width = plan.schema().fields().len();
        let named = match plan {
            LogicalPlan::Subquery(subquery) => LogicalPlan::Subquery(self.subquery(subquery)?),
            LogicalPlan::SubqueryAlias(a) => {
                let input = self.node(Arc::unwrap_or_clone(a.input))?;
                LogicalPlan::SubqueryAlias(SubqueryAlias::try_new(Arc::new(input), a.alias)?)
            }
            LogicalPlan::Projection(p) => self.projection(p, false)?,
            LogicalPlan::Filter(f) => {
                let input = self.node(f.input.as_ref().clone())?;
                let predicate = self.expr(f.predicate, &[Scope::of(&f.input, &input)?])?;
                LogicalPlan::Filter(Filter::try_new(predicate, Arc::new(input))?)
            }
            LogicalPlan::Join(join) => self.join(join)?,
            LogicalPlan::Aggregate(a) => self.aggregate(a)?,
            LogicalPlan::Window(w) => {
                let input = self.node(w.input.as_ref().clone())?;
                let scope = [Scope::of(&w.input, &input)?];
                let calls = self.computed(w.window_expr, &scope)?;
                LogicalPlan::Window(Window::try_new(calls, Arc::new(input))?)
            }
            LogicalPlan::Sort(sort) => {
                let input = self.node(sort.input.as_ref().clone())?;
                self.sort(sort, input)?
            }
            LogicalPlan::Limit(limit) => {
                let input = self.node(limit.input.as_ref().clone())?;
                self.limit(limit, input)?
            }
            LogicalPlan::Distinct(Distinct::All(input)) => {
                let input = self.node(Arc::unwrap_or_clone(input))?;
                LogicalPlan::Distinct(Distinct::All(Arc::new(input)))
            }
            LogicalPlan::Distinct(Distinct::On(on)) => self.distinct_on(on)?,
            LogicalPlan::Union(union) => self.union(union)?,
            LogicalPlan::Unnest(unnest) => self.unnest(unnest)?,
            other => self.leaf(other)?,
        };
        match named.schema().fields().len() == width {
            true => Ok(named),
            false => Err(lost_columns()),
        }
    }

    /// A scan, or what is taken for one: its outputs get names of their own.
    fn leaf(&mut self, plan: LogicalPlan) -> Result<LogicalPlan> {
        let plan = outer_references::renamed(plan, &self.outer_names())?;
        if let LogicalPlan::Values(values) = plan {
            let fields = values.schema.iter().map(|(q, f)| {
                let own = f.as_ref().clone().with_name(self.name(f.name()));
                (q.cloned(), Arc::new(own))
            });
            let metadata = values.schema.metadata().clone();
            let schema = Arc::new(DFSchema::new_with_metadata(fields.collect(), metadata)?);
            return Ok(LogicalPlan::Values(Values { schema, ..values }));
        }
        let mut changed = false;
        let columns = plan.schema().columns().into_iter().map(|c| {
            let own = self.name(&c.name);
            if own == c.name {
                return Expr::Column(c);
            }
            changed = true;
            let qualifier = c.relation.clone();
            Expr::Column(c).alias_qualified(qualifier, own)
        });
        let columns: Vec<Expr> = columns.collect();
        match changed {
            true => Projection::try_new(columns, Arc::new(plan)).map(LogicalPlan::Projection),
            false => Ok(plan),
        }
    }

    /// The columns of the queries around that are called something else now.
    fn outer_names(&self) -> Vec<(Column, Column)> {
        let mut seen = HashSet::new();
        let all = self.around.iter().rev().flat_map(|scope| {
            scope.schema.columns().into_iter().zip(scope.columns.iter().cloned())
        });
        let nearest = all.filter(|(before, _)| seen.insert(before.clone()));
        nearest.filter(|(before, now)| before != now).collect()
    }

    /// `outermost`: under the names that there are.
    fn projection(&mut self, p: Projection, outermost: bool) -> Result<LogicalPlan> {
        let input = self.node(p.input.as_ref().clone())?;
        let scope = [Scope::of(&p.input, &input)?];
        let exprs = if outermost {
            let kept = p.expr.into_iter().zip(p.schema.iter()).map(|(e, (q, f))| {
                let e = self.expr(e, &scope)?;
                let (qualifier, name) = e.qualified_name();
                Ok(match qualifier.as_ref() == q && name == *f.name() {
                    true => e,
                    false => e.alias_qualified(q.cloned(), f.name()),
                })
            });
            kept.collect::<Result<Vec<_>>>()?
        } else {
            self.computed(p.expr, &scope)?
        };
        Projection::try_new(exprs, Arc::new(input)).map(LogicalPlan::Projection)
    }

    /// Expressions that become columns; what is one already keeps its name.
    fn computed(&mut self, exprs: Vec<Expr>, scope: &[Scope]) -> Result<Vec<Expr>> {
        let named = exprs.into_iter().map(|e| {
            Ok(match self.expr(e, scope)? {
                e @ (Expr::Column(_) | Expr::GroupingSet(_)) => e,
                Expr::Alias(mut alias) => {
                    alias.name = self.name(&alias.name);
                    Expr::Alias(alias)
                }
                e => {
                    let name = e.schema_name().to_string();
                    let own = self.name(&name);
                    if own == name { e } else { e.alias(own) }
                }
            })
        });
        named.collect()
    }

    fn join(&mut self, j: Join) -> Result<LogicalPlan> {
        let left = self.node(j.left.as_ref().clone())?;
        // What stands on the right of a lateral join reads its left side.
        self.around.push(Scope::of(&j.left, &left)?);
        let right = self.node(j.right.as_ref().clone());
        let left_scope = self.around.pop().ok_or_else(lost_columns)?;
        let right = right?;
        let scopes = [left_scope, Scope::of(&j.right, &right)?];
        let on =
            j.on.into_iter()
                .map(|(a, b)| Ok((self.expr(a, &scopes[..1])?, self.expr(b, &scopes[1..])?)));
        let on = on.collect::<Result<Vec<_>>>()?;
        let filter = j.filter.map(|f| self.expr(f, &scopes)).transpose()?;
        let join = Join::try_new(
            Arc::new(left),
            Arc::new(right),
            on,
            filter,
            j.join_type,
            j.join_constraint,
            j.null_equality,
            j.null_aware,
        )?;
        Ok(LogicalPlan::Join(join))
    }

    fn aggregate(&mut self, a: Aggregate) -> Result<LogicalPlan> {
        let input = self.node(a.input.as_ref().clone())?;
        let scope = [Scope::of(&a.input, &input)?];
        let group = self.computed(a.group_expr, &scope)?;
        let calls = self.computed(a.aggr_expr, &scope)?;
        Ok(LogicalPlan::Aggregate(Aggregate::try_new(Arc::new(input), group, calls)?))
    }

    fn sort(&mut self, sort: Sort, input: LogicalPlan) -> Result<LogicalPlan> {
        let scope = [Scope::of(&sort.input, &input)?];
        let expr = self.sort_exprs(sort.expr, &scope)?;
        Ok(LogicalPlan::Sort(Sort { expr, input: Arc::new(input), fetch: sort.fetch }))
    }

    fn sort_exprs(&mut self, exprs: Vec<SortExpr>, scope: &[Scope]) -> Result<Vec<SortExpr>> {
        let renamed = exprs.into_iter().map(|by| {
            let expr = self.expr(by.expr, scope)?;
            Ok(SortExpr { expr, asc: by.asc, nulls_first: by.nulls_first })
        });
        renamed.collect()
    }

    fn limit(&mut self, limit: Limit, input: LogicalPlan) -> Result<LogicalPlan> {
        let scope = [Scope::of(&limit.input, &input)?];
        let mut count =
            |e: Option<Box<Expr>>| e.map(|e| self.expr(*e, &scope).map(Box::new)).transpose();
        let (skip, fetch) = (count(limit.skip)?, count(limit.fetch)?);
        Ok(LogicalPlan::Limit(Limit { skip, fetch, input: Arc::new(input) }))
    }

    fn distinct_on(&mut self, on: DistinctOn) -> Result<LogicalPlan> {
        let input = self.node(on.input.as_ref().clone())?;
        let scope = [Scope::of(&on.input, &input)?];
        let on_expr = on.on_expr.into_iter().map(|e| self.expr(e, &scope));
        let on_expr = on_expr.collect::<Result<Vec<_>>>()?;
        let select = self.computed(on.select_expr, &scope)?;
        let sort = on.sort_expr.map(|by| self.sort_exprs(by, &scope)).transpose()?;
        let on = DistinctOn::try_new(on_expr, select, sort, Arc::new(input))?;
        Ok(LogicalPlan::Distinct(Distinct::On(on)))
    }

    /// All branches get the names of the first one: a union has no others.
    fn union(&mut self, union: Union) -> Result<LogicalPlan> {
        let inputs = union.inputs.iter().map(|input| self.node(input.as_ref().clone()));
        let inputs = inputs.collect::<Result<Vec<_>>>()?;
        let Some(first) = inputs.first() else { return Err(lost_columns()) };
        let first = first.schema().columns();
        let same = union.inputs.first().is_some_and(|before| before.schema().columns() == first);
        if same || first.len() != union.schema.fields().len() {
            let inputs = inputs.into_iter().map(Arc::new).collect();
            return Ok(LogicalPlan::Union(Union { inputs, schema: union.schema }));
        }
        let outputs = first.iter().zip(union.schema.iter());
        let outputs: Vec<Column> =
            outputs.map(|(c, (q, _))| Column::new(q.cloned(), c.name.clone())).collect();
        let inputs = inputs.into_iter().map(|input| {
            let columns = columns_of(&input).into_iter().zip(&outputs);
            let columns = columns.map(|(c, output)| match &c {
                Expr::Column(own) if own == output => c,
                _ => c.alias_qualified(output.relation.clone(), output.name.clone()),
            });
            let columns = columns.collect();
            Ok(Arc::new(LogicalPlan::Projection(Projection::try_new(columns, Arc::new(input))?)))
        });
        let inputs = inputs.collect::<Result<Vec<_>>>()?;
        Union::try_new_with_loose_types(inputs).map(LogicalPlan::Union)
    }

    fn unnest(&mut self, u: Unnest) -> Result<LogicalPlan> {
        let input = self.node(u.input.as_ref().clone())?;
        let scope = Scope::of(&u.input, &input)?;
        let now = |c: Column| found(std::iter::once(&scope), &c).unwrap_or(c);
        let columns = u.exec_columns.into_iter().map(now).collect();
        let mut options = u.options;
        for step in &mut options.recursions {
            step.input_column = now(step.input_column.clone());
        }
        LogicalPlanBuilder::from(input).unnest_columns_with_options(columns, options)?.build()
    }

    fn expr(&mut self, e: Expr, scopes: &[Scope]) -> Result<Expr> {
        let renamed = e.rewrite_down(|e| {
            Ok(match e {
                Expr::Column(c) => match found(scopes.iter(), &c) {
                    Some(now) if now != c => Transformed::yes(Expr::Column(now)),
                    _ => Transformed::no(Expr::Column(c)),
                },
                Expr::OuterReferenceColumn(field, c) => match found(self.around.iter().rev(), &c) {
                    Some(now) if now != c => {
                        let field = Arc::new(field.as_ref().clone().with_name(&now.name));
                        Transformed::yes(Expr::OuterReferenceColumn(field, now))
                    }
                    _ => Transformed::no(Expr::OuterReferenceColumn(field, c)),
                },
                Expr::ScalarSubquery(s) => {
                    Transformed::yes(Expr::ScalarSubquery(self.within(s, scopes)?))
                }
                Expr::Exists(Exists { subquery, negated }) => {
                    let subquery = self.within(subquery, scopes)?;
                    Transformed::yes(Expr::Exists(Exists { subquery, negated }))
                }
                Expr::InSubquery(InSubquery { expr, subquery, negated }) => {
                    let subquery = self.within(subquery, scopes)?;
                    Transformed::yes(Expr::InSubquery(InSubquery { expr, subquery, negated }))
                }
                Expr::SetComparison(x) => {
                    let subquery = self.within(x.subquery, scopes)?;
                    Transformed::yes(Expr::SetComparison(SetComparison { subquery, ..x }))
                }
                other => Transformed::no(other),
            })
        });
        renamed.map(|t| t.data)
    }

    /// A subquery of an expression over these columns.
    fn within(&mut self, subquery: Subquery, scopes: &[Scope]) -> Result<Subquery> {
        let depth = self.around.len();
        // Of two sides the left one is the nearer.
        self.around.extend(
            scopes
                .iter()
                .rev()
                .map(|s| Scope { schema: Arc::clone(&s.schema), columns: s.columns.clone() }),
        );
        let named = self.subquery(subquery);
        self.around.truncate(depth);
        named
    }

    fn subquery(&mut self, subquery: Subquery) -> Result<Subquery> {
        let plan = self.node(Arc::unwrap_or_clone(subquery.subquery))?;
        let outer_ref_columns = plan.all_out_ref_exprs();
        Ok(Subquery { subquery: Arc::new(plan), outer_ref_columns, spans: subquery.spans })
    }
}

#[cfg(test)]
mod tests {
    use crate::bind::rewrites::testing::rows;

    /// Both tables call their columns the same.
    #[test]
    fn columns_of_one_name_are_told_apart() {
        let sql = "SELECT a, (SELECT count(*) FROM (VALUES (1), (1), (2)) AS w (a) WHERE w.a = v.a) \
                   FROM (VALUES (1), (2), (3)) AS v (a) ORDER BY a";
        assert_eq!(rows(sql), ["1|2", "2|1", "3|0"]);
    }
}
