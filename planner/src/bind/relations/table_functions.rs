//! Functions that return rows, in FROM: `unnest`, `jsonb_array_elements`, `jsonb_each` and their like.
//!
//! Each has a function of ours that returns the rows as arrays, one for each column. In the AST a call becomes a
//! lateral subquery that marks them ([`ROWS`]); in the plan the marks become `Unnest`s, and lateral joins plans over
//! their left sides ([`crate::bind::subqueries::lateral`]).

use std::ops::ControlFlow;

use datafusion::common::tree_node::Transformed;
use datafusion::common::{Column, Result, UnnestOptions};
use datafusion::logical_expr::{Expr, LogicalPlan, LogicalPlanBuilder, Projection, ident};
use millrace_common::{SqlError, SqlState};
use millrace_functions::error::sql_error_from_datafusion;
use millrace_functions::tree::WalkPlan;
use millrace_functions::window_fn::{ORDINALS, ROWS};
use sqlparser::ast::{
    Array, Expr as Ast, FunctionArg, FunctionArgExpr, Ident, ObjectName, Query, Select, SelectItem,
    SetExpr, TableAlias, TableAliasColumnDef, TableFactor, Value, Values, VisitorMut,
};

use super::provider::columns_of;
use crate::bind::expressions::desugar::{SERIES, call, take};
use crate::bind::names::fold;
use crate::bind::rewrites::ast::AstRewrite;
use crate::bind::rewrites::plan::PlanRewrite;
use crate::bind::subqueries::lateral;
use crate::parser::walk;

/// A function of FROM: its columns, by the function that makes an array of each. A column without a name is called
/// as the function's alias.
struct TableFunction {
    names: &'static [&'static str],
    columns: &'static [(&'static str, &'static str)],
}

const FUNCTIONS: [TableFunction; 7] = [
    TableFunction {
        names: &["jsonb_array_elements", "json_array_elements"],
        columns: &[("jsonb_array_elements_list", "value")],
    },
    TableFunction {
        names: &["jsonb_array_elements_text", "json_array_elements_text"],
        columns: &[("jsonb_array_elements_text_list", "value")],
    },
    TableFunction {
        names: &["jsonb_object_keys", "json_object_keys"],
        columns: &[("jsonb_object_keys_list", "")],
    },
    TableFunction {
        names: &["jsonb_each", "json_each"],
        columns: &[("jsonb_each_keys_list", "key"), ("jsonb_each_values_list", "value")],
    },
    TableFunction {
        names: &["jsonb_each_text", "json_each_text"],
        columns: &[("jsonb_each_keys_list", "key"), ("jsonb_each_texts_list", "value")],
    },
    TableFunction { names: &["regexp_split_to_table"], columns: &[("regexp_split_to_array", "")] },
    TableFunction { names: &["string_to_table"], columns: &[("string_to_array", "")] },
];

/// Whether a function returns a set of rows.
pub fn returns_set(name: &str) -> bool {
    matches!(name, "unnest" | "generate_series" | "generate_subscripts" | "regexp_matches")
        || FUNCTIONS.iter().any(|f| f.names.contains(&name))
}

/// Makes lateral subqueries of the functions in FROM that return rows.
pub const SPELL_OUT_TABLE_FUNCTIONS: AstRewrite = AstRewrite {
    name: "spell out table functions",
    select: |select, _| spell_out(select),
    ..AstRewrite::NONE
};

/// Spells out the functions that a SELECT has in FROM.
fn spell_out(select: &mut Select) -> Result<(), SqlError> {
    let mut whole = Vec::new();
    for table in &mut select.from {
        spell_out_factor(&mut table.relation, &mut whole)?;
        for join in &mut table.joins {
            spell_out_factor(&mut join.relation, &mut whole)?;
        }
    }
    if !whole.is_empty() {
        name_whole_rows(select, &whole);
    }
    Ok(())
}

/// Rows of a lateral VALUES as arrays that are read side by side, one for each column.
fn unnest_values(subquery: &mut Query) -> Result<(), SqlError> {
    let SetExpr::Values(values) = subquery.body.as_mut() else { return Ok(()) };
    let width = values.rows.first().map_or(0, |row| row.content.len());
    if values.rows.iter().any(|row| row.content.len() != width) {
        return Ok(()); // An error, which the planner words.
    }
    let mut body = crate::parser::parse_query("SELECT 1")?.body;
    if let SetExpr::Select(select) = body.as_mut() {
        let column = |i: usize, values: &mut Values| {
            let elem = values.rows.iter_mut().map(|row| take(&mut row.content[i])).collect();
            let expr = call(ROWS, [Ast::Array(Array { elem, named: true })]);
            SelectItem::ExprWithAlias { expr, alias: Ident::new(format!("column{}", i + 1)) }
        };
        select.projection = (0..width).map(|i| column(i, values)).collect();
    }
    subquery.body = body;
    Ok(())
}

/// `whole`: names that stand for the only column of a function's rows.
fn spell_out_factor(
    factor: &mut TableFactor,
    whole: &mut Vec<(String, Ident)>,
) -> Result<(), SqlError> {
    let (name, args, alias, ordinality) = match factor {
        TableFactor::Derived { lateral: true, subquery, .. } => return unnest_values(subquery),
        TableFactor::NestedJoin { table_with_joins, .. } => {
            spell_out_factor(&mut table_with_joins.relation, whole)?;
            for join in &mut table_with_joins.joins {
                spell_out_factor(&mut join.relation, whole)?;
            }
            return Ok(());
        }
        TableFactor::Table {
            name,
            args: Some(args),
            alias,
            with_ordinality,
            version: None,
            sample: None,
            ..
        } => (function_name(name), arguments(&args.args), alias.clone(), *with_ordinality),
        TableFactor::Function { name, args, alias, with_ordinality, .. } => {
            (function_name(name), arguments(args), alias.clone(), *with_ordinality)
        }
        TableFactor::UNNEST { array_exprs, alias, with_ordinality, with_offset: false, .. } => {
            ("unnest".to_owned(), Some(array_exprs.clone()), alias.clone(), *with_ordinality)
        }
        _ => return Ok(()),
    };
    let Some(args) = args else { return Ok(()) };
    let Some(columns) = columns_of_call(&name, args)? else { return Ok(()) };
    let table =
        alias.as_ref().map_or_else(|| Ident::with_quote('"', name.clone()), |a| a.name.clone());
    let mut items = named_lists(columns, &table);
    if ordinality {
        let lists: Vec<Ast> = match name.as_str() {
            "unnest" => items.iter().map(|(_, list)| list.clone()).collect(),
            // The columns of others are of the same rows.
            _ => items.iter().take(1).map(|(_, list)| list.clone()).collect(),
        };
        items.push((Ident::with_quote('"', "ordinality"), ordinals(lists)?));
    }
    let given = alias.map(|a| a.columns).unwrap_or_default();
    if given.len() > items.len() {
        let message = format!(
            "table \"{}\" has {} columns available but {} columns specified",
            fold(&table),
            items.len(),
            given.len()
        );
        return Err(SqlError::new(SqlState("42P10"), message));
    }
    *factor = rows_of(table, items, &given, whole)?;
    Ok(())
}

/// Arrays, each by a name of its own, so that `*` may name all.
fn named_lists(columns: Vec<(&'static str, Ast)>, table: &Ident) -> Vec<(Ident, Ast)> {
    let numbered =
        |i: usize| Ident { value: format!("{}_{}", table.value, i + 1), ..table.clone() };
    columns
        .into_iter()
        .enumerate()
        .map(|(i, (column, list))| match column {
            "" if i == 0 => (table.clone(), list),
            "" => (numbered(i), list),
            named => (Ident::with_quote('"', named), list),
        })
        .collect()
}

/// The lateral subquery of the rows that are read from arrays side by side. `given`: names of the
/// first columns, instead of their own.
fn rows_of(
    table: Ident,
    items: Vec<(Ident, Ast)>,
    given: &[TableAliasColumnDef],
    whole: &mut Vec<(String, Ident)>,
) -> Result<TableFactor, SqlError> {
    let names: Vec<Ident> = items.iter().map(|(name, _)| name.clone()).collect();
    let mut named =
        given.iter().map(|c| c.name.clone()).chain(names.iter().skip(given.len()).cloned());
    // Their names are the alias's columns'; those of the left side may be the same.
    let projection = items.into_iter().enumerate().map(|(i, (_, list))| {
        let alias = Ident::with_quote('"', format!("#rows{i}"));
        SelectItem::ExprWithAlias { expr: call(ROWS, [list]), alias }
    });
    let projection = projection.collect();
    let columns: Vec<TableAliasColumnDef> =
        named.by_ref().map(|name| TableAliasColumnDef { name, data_type: None }).collect();
    if let [only] = columns.as_slice()
        && fold(&only.name) != fold(&table)
    {
        whole.push((fold(&table), only.name.clone()));
    }
    let mut subquery = crate::parser::parse_query("SELECT 1")?;
    if let SetExpr::Select(select) = subquery.body.as_mut() {
        select.projection = projection;
    }
    Ok(TableFactor::Derived {
        lateral: true,
        subquery,
        alias: Some(TableAlias { explicit: true, name: table, columns, at: None }),
        sample: None,
    })
}

/// The numbers of rows that are read from arrays side by side: as many as the longest has elements.
fn ordinals(mut lists: Vec<Ast>) -> Result<Ast, SqlError> {
    if lists.len() == 1
        && let Some(only) = lists.pop()
    {
        return Ok(call(ORDINALS, [only]));
    }
    let zero = || Ast::value(Value::Number("0".into(), false));
    let lengths = lists.into_iter().map(|l| call("coalesce", [call("cardinality", [l]), zero()]));
    let longest = call("greatest", lengths.collect::<Vec<Ast>>());
    let first = crate::parser::parse_expr("1::bigint")?;
    let mut last = first.clone();
    if let Ast::Cast { expr, .. } = &mut last {
        **expr = longest;
    }
    Ok(call(SERIES, [first, last]))
}

fn function_name(name: &ObjectName) -> String {
    name.0.last().and_then(|p| p.as_ident()).map(fold).unwrap_or_default()
}

/// Arguments by position; `None`: others are among them.
fn arguments(args: &[FunctionArg]) -> Option<Vec<Ast>> {
    let plain = args.iter().map(|a| match a {
        FunctionArg::Unnamed(FunctionArgExpr::Expr(e)) => Some(e.clone()),
        _ => None,
    });
    plain.collect()
}

/// A call's columns and their arrays; `None`: the function is another's business.
fn columns_of_call(
    name: &str,
    args: Vec<Ast>,
) -> Result<Option<Vec<(&'static str, Ast)>>, SqlError> {
    if name == "unnest" {
        return Ok(Some(args.into_iter().map(|list| ("", list)).collect()));
    }
    if name == "generate_series" {
        // Constants make a relation that is not held in memory.
        let lateral = args.iter().any(reads_columns);
        return Ok(lateral.then(|| vec![("", call(SERIES, args))]));
    }
    if name == "regexp_matches" {
        return Ok(Some(vec![("", match_rows(args))]));
    }
    let Some(function) = FUNCTIONS.iter().find(|f| f.names.contains(&name)) else {
        return Ok(None);
    };
    let columns = function.columns.iter();
    Ok(Some(columns.map(|(list, column)| (*column, call(list, args.clone()))).collect()))
}

/// The rows of `regexp_matches`, which are arrays, as an array.
pub fn match_rows(args: Vec<Ast>) -> Ast {
    call("text_arrays", [call("regexp_matches_list", args)])
}

/// Whether an expression names a column.
pub fn reads_columns(e: &Ast) -> bool {
    struct Reads;
    impl VisitorMut for Reads {
        type Break = ();

        fn pre_visit_expr(&mut self, e: &mut Ast) -> ControlFlow<()> {
            match e {
                Ast::Identifier(_) | Ast::CompoundIdentifier(_) => ControlFlow::Break(()),
                _ => ControlFlow::Continue(()),
            }
        }
    }
    walk::visit_mut(&mut e.clone(), &mut Reads).is_break()
}

/// A function's alias stands for its row, and that is its only column.
fn name_whole_rows(select: &mut Select, whole: &[(String, Ident)]) {
    for item in &mut select.projection {
        if let SelectItem::UnnamedExpr(e @ Ast::Identifier(_)) = item
            && let Ast::Identifier(name) = &*e
            && whole.iter().any(|(alias, _)| *alias == fold(name))
        {
            let alias = name.clone();
            *item = SelectItem::ExprWithAlias { expr: take(e), alias };
        }
    }
    struct Whole<'a>(&'a [(String, Ident)]);
    impl VisitorMut for Whole<'_> {
        type Break = ();

        fn post_visit_expr(&mut self, e: &mut Ast) -> ControlFlow<()> {
            if let Ast::Identifier(name) = e
                && let Some((_, column)) = self.0.iter().find(|(alias, _)| *alias == fold(name))
            {
                *e = Ast::CompoundIdentifier(vec![name.clone(), column.clone()]);
            }
            ControlFlow::Continue(())
        }
    }
    let _ = walk::visit_mut(select, &mut Whole(whole));
}

/// Makes rows of the arrays that functions in FROM return.
pub const UNNEST_TABLE_FUNCTIONS: PlanRewrite =
    PlanRewrite::new("unnest table functions", |plan, session| rewrite(plan, session.for_view));

/// Turns marks of rows into `Unnest`s, and lateral joins into plans over their left sides.
fn rewrite(plan: LogicalPlan, for_view: bool) -> std::result::Result<LogicalPlan, SqlError> {
    let rewritten = plan
        .rewrite_up_with_subqueries(|node| match &node {
            LogicalPlan::Projection(p) if p.expr.iter().any(|e| list_of(e).is_some()) => {
                Ok(Transformed::yes(spread(p)?))
            }
            LogicalPlan::Join(join) => match lateral::over_left(join, for_view) {
                Some(plan) => Ok(Transformed::yes(plan)),
                None => Ok(Transformed::no(node)),
            },
            _ => Ok(Transformed::no(node)),
        })
        .map_err(sql_error_from_datafusion)?;
    if !rewritten.transformed {
        return Ok(rewritten.data);
    }
    let recomputed =
        rewritten.data.rewrite_up_with_subqueries(|n| n.recompute_schema().map(Transformed::yes));
    recomputed.map(|t| t.data).map_err(sql_error_from_datafusion)
}

/// The array whose elements a column's rows are.
fn list_of(e: &Expr) -> Option<&Expr> {
    match e {
        Expr::Alias(a) => list_of(&a.expr),
        Expr::ScalarFunction(f) if f.func.name() == ROWS => f.args.first(),
        _ => None,
    }
}

fn list_name(column: usize) -> String {
    format!("#list{column}")
}

/// The rows of a projection's arrays, read side by side.
fn spread(p: &Projection) -> Result<LogicalPlan> {
    let lists = p.expr.iter().enumerate();
    let lists: Vec<(usize, Expr)> =
        lists.filter_map(|(i, e)| Some((i, list_of(e)?.clone().alias(list_name(i))))).collect();
    let names = lists.iter().map(|(i, _)| Column::from_name(list_name(*i))).collect();
    let mut below = columns_of(&p.input);
    below.extend(lists.into_iter().map(|(_, list)| list));
    let outputs =
        p.schema.iter().zip(&p.expr).enumerate().map(
            |(i, ((qualifier, field), e))| match list_of(e) {
                Some(_) => ident(list_name(i)).alias_qualified(qualifier.cloned(), field.name()),
                None => e.clone(),
            },
        );
    let outputs: Vec<Expr> = outputs.collect();
    LogicalPlanBuilder::from(p.input.as_ref().clone())
        .project(below)?
        .unnest_columns_with_options(names, UnnestOptions::new().with_preserve_nulls(false))?
        .project(outputs)?
        .build()
}

#[cfg(test)]
mod tests {
    use crate::bind::rewrites::testing::rows;

    #[test]
    fn functions_in_from_are_read_side_by_side() {
        let sql = "SELECT x, n FROM unnest(ARRAY[30, 40]) WITH ORDINALITY AS u (x, n) ORDER BY n";
        assert_eq!(rows(sql), ["30|1", "40|2"]);
        let sql = "SELECT v.a, x FROM (VALUES (1), (2)) AS v (a), generate_series(1, v.a) AS x \
                   ORDER BY 1, 2";
        assert_eq!(rows(sql), ["1|1", "2|1", "2|2"]);
    }
}
