//! The merged columns of joins with USING: an unqualified name is the left side's column, in RIGHT joins the
//! right side's, in FULL joins the first of both that is not NULL. Such a join gets a condition, and the
//! merged columns are written out wherever the query names them; in `*` they come first.
//!
//! DataFusion takes the left side's always, finds the name ambiguous in some clauses, and leaves the columns in their
//! places; what cannot be told from the text is left to it where that is right, in INNER and LEFT joins. Joins in
//! parentheses have been written out by the catalog before ([`super::star_expansion`]).

use millrace_common::SqlError;
use sqlparser::ast::*;

use super::output_names::fold;
use super::scopes::merges;
use crate::bind::expressions::clause_expressions::change_own;
use crate::bind::expressions::desugar::call;
use crate::bind::rewrites::ast::AstRewrite;

/// A column that USING made one.
#[derive(Clone)]
struct Merged {
    name: String,
    value: Expr,
    /// Tables that have it.
    tables: Vec<String>,
}

/// What `*` stands for, in order.
#[derive(Clone)]
enum Item {
    Merged(String),
    /// A table's columns but these.
    Table(Ident, Vec<String>),
}

/// Writes out the columns that USING merges.
pub const SPELL_OUT_USING: AstRewrite = AstRewrite {
    name: "spell out using",
    query: |query, _| spell_out_query(query),
    select: |select, _| spell_out_select(select),
    ..AstRewrite::NONE
};

/// Rewrites the joins of a query's SELECT, and what its ORDER BY says of their columns.
pub fn spell_out_query(query: &mut Query) -> Result<(), SqlError> {
    let SetExpr::Select(select) = query.body.as_mut() else { return Ok(()) };
    let merged = spell_out(select)?;
    let Some(OrderBy { kind: OrderByKind::Expressions(exprs), .. }) = &mut query.order_by else {
        return Ok(());
    };
    for by in exprs {
        // The name of an output column stands for that.
        let is_output = |name: &String| {
            select.projection.iter().any(|item| output_name(item) == Some(name.clone()))
        };
        match &by.expr {
            Expr::Identifier(i) if is_output(&fold(i)) => {}
            _ => replace(&mut by.expr, &merged),
        }
    }
    Ok(())
}

/// Rewrites the joins of a SELECT; of no other use once it is done.
fn spell_out_select(select: &mut Select) -> Result<(), SqlError> {
    spell_out(select).map(|_| ())
}

fn spell_out(select: &mut Select) -> Result<Vec<Merged>, SqlError> {
    if !select.from.iter().any(merges) {
        return Ok(Vec::new());
    }
    let mut from = select.from.clone();
    let chains = match from.iter_mut().map(Chain::of).collect::<Result<Vec<Chain>, _>>() {
        Ok(chains) => chains,
        Err(e) if select.from.iter().any(is_concerned) => return Err(e),
        Err(_) => {
            resolve_in_filter(select);
            select.from.iter_mut().for_each(forget_tables);
            return Ok(Vec::new());
        }
    };
    select.from = from;
    let (mut merged, mut items) = (Vec::new(), Vec::new());
    for one in chains {
        merged.extend(one.merged);
        items.extend(one.items);
    }
    let mut projection = Vec::with_capacity(select.projection.len());
    for item in std::mem::take(&mut select.projection) {
        match item {
            SelectItem::Wildcard(options) if options == WildcardAdditionalOptions::default() => {
                projection.extend(items.iter().map(|item| written(item, &merged)));
            }
            SelectItem::UnnamedExpr(Expr::Identifier(name))
                if find(&merged, &fold(&name)).is_some() =>
            {
                let mut expr = Expr::Identifier(name.clone());
                replace(&mut expr, &merged);
                projection.push(SelectItem::ExprWithAlias { expr, alias: name });
            }
            mut item => {
                if let SelectItem::UnnamedExpr(e) | SelectItem::ExprWithAlias { expr: e, .. } =
                    &mut item
                {
                    replace(e, &merged);
                }
                projection.push(item);
            }
        }
    }
    select.projection = projection;
    for e in [&mut select.selection, &mut select.having, &mut select.qualify].into_iter().flatten()
    {
        replace(e, &merged);
    }
    if let GroupByExpr::Expressions(exprs, _) = &mut select.group_by {
        exprs.iter_mut().for_each(|e| replace(e, &merged));
    }
    if let Some(Distinct::On(exprs)) = &mut select.distinct {
        exprs.iter_mut().for_each(|e| replace(e, &merged));
    }
    select.named_window.iter_mut().for_each(|window| replace(window, &merged));
    Ok(merged)
}

/// DataFusion knows the merged columns of INNER and LEFT joins but in WHERE, where they are ambiguous to it.
/// Of what cannot be told from the text.
fn resolve_in_filter(select: &mut Select) {
    let Some(filter) = &mut select.selection else { return };
    for from in &select.from {
        // What cannot be told from the text stays as it is.
        if let Ok(chain) = Chain::of(&mut from.clone()) {
            replace(filter, &chain.merged);
        }
    }
}

/// Takes off the tables that are noted before the columns of USING (see [`super::natural`]).
fn forget_tables(from: &mut TableWithJoins) {
    let nested = |factor: &mut TableFactor| {
        if let TableFactor::NestedJoin { table_with_joins, .. } = factor {
            forget_tables(table_with_joins);
        }
    };
    nested(&mut from.relation);
    for join in &mut from.joins {
        nested(&mut join.relation);
        use JoinOperator as J;
        if let J::Join(c) | J::Inner(c) | J::Left(c) | J::LeftOuter(c) = &mut join.join_operator
            && let JoinConstraint::Using(names) = c
        {
            names.iter_mut().for_each(|name| {
                name.0.drain(..name.0.len().saturating_sub(1));
            });
        }
    }
}

/// Whether columns are merged by a RIGHT or FULL join.
fn is_concerned(from: &TableWithJoins) -> bool {
    let merges =
        |c: &JoinConstraint| matches!(c, JoinConstraint::Using(_) | JoinConstraint::Natural);
    from.joins.iter().any(|j| match &j.join_operator {
        JoinOperator::Right(c) | JoinOperator::RightOuter(c) | JoinOperator::FullOuter(c) => {
            merges(c)
        }
        _ => false,
    })
}

fn unsupported(what: &str) -> SqlError {
    SqlError::unsupported(format!("{what} in a query with a RIGHT or FULL join by USING"))
        .with_hint("Write the join's condition with ON.")
}

#[derive(Default)]
struct Chain {
    tables: Vec<Ident>,
    merged: Vec<Merged>,
    items: Vec<Item>,
}

impl Chain {
    /// Of a FROM item, whose USING clauses become conditions.
    fn of(from: &mut TableWithJoins) -> Result<Chain, SqlError> {
        let first = table_name(&from.relation)?;
        let mut chain = Chain {
            items: vec![Item::Table(first.clone(), Vec::new())],
            tables: vec![first],
            merged: Vec::new(),
        };
        for join in &mut from.joins {
            let right = table_name(&join.relation)?;
            let operator = &mut join.join_operator;
            let (outer, constraint) = match operator {
                JoinOperator::Right(c) | JoinOperator::RightOuter(c) => (Outer::Right, c),
                JoinOperator::FullOuter(c) => (Outer::Full, c),
                JoinOperator::Join(c)
                | JoinOperator::Inner(c)
                | JoinOperator::Left(c)
                | JoinOperator::LeftOuter(c)
                | JoinOperator::CrossJoin(c) => (Outer::Left, c),
                _ => return Err(unsupported("this join")),
            };
            chain.join(constraint, right, outer)?;
        }
        Ok(chain)
    }

    fn join(
        &mut self,
        constraint: &mut JoinConstraint,
        right: Ident,
        outer: Outer,
    ) -> Result<(), SqlError> {
        let mut using = Vec::new();
        match constraint {
            JoinConstraint::Natural => return Err(unsupported("NATURAL JOIN")),
            JoinConstraint::Using(names) => {
                let mut conditions = Vec::new();
                for name in names.iter() {
                    let parts: Vec<&Ident> = name.0.iter().filter_map(|p| p.as_ident()).collect();
                    let Some((name, table)) = parts.split_last() else { continue };
                    conditions.push(self.merge(name, table.first().copied(), &right, outer)?);
                    using.push(fold(name));
                }
                let all = conditions.into_iter().reduce(|a, b| binary(a, BinaryOperator::And, b));
                if let Some(all) = all {
                    *constraint = JoinConstraint::On(all);
                }
            }
            JoinConstraint::On(condition) => replace(condition, &self.merged),
            JoinConstraint::None => {}
        }
        let mut items: Vec<Item> = using.iter().cloned().map(Item::Merged).collect();
        for item in std::mem::take(&mut self.items) {
            match item {
                Item::Merged(name) if using.contains(&name) => {}
                Item::Merged(name) => items.push(Item::Merged(name)),
                Item::Table(table, mut without) => {
                    let is_of =
                        |m: &&Merged| using.contains(&m.name) && m.tables.contains(&fold(&table));
                    without.extend(self.merged.iter().filter(is_of).map(|m| m.name.clone()));
                    without.sort();
                    without.dedup();
                    items.push(Item::Table(table, without));
                }
            }
        }
        items.push(Item::Table(right.clone(), using));
        self.items = items;
        self.tables.push(right);
        Ok(())
    }

    /// Merges a column of what has been joined so far with the right side's; gives the condition. `owner`:
    /// the table that is known to have it.
    fn merge(
        &mut self,
        name: &Ident,
        owner: Option<&Ident>,
        right: &Ident,
        outer: Outer,
    ) -> Result<Expr, SqlError> {
        let of = |table: &Ident| Expr::CompoundIdentifier(vec![table.clone(), name.clone()]);
        let theirs = of(right);
        let at = self.merged.iter().position(|m| m.name == fold(name));
        let (ours, mut tables) = match (at, self.tables.as_slice()) {
            (Some(at), _) => {
                let merged = self.merged.remove(at);
                (merged.value, merged.tables)
            }
            (None, [only]) => (of(only), vec![fold(only)]),
            (None, _) if let Some(owner) = owner => (of(owner), vec![fold(owner)]),
            // Which of them has it, only the catalog knows.
            (None, _) => return Err(unsupported("USING of a column of one of several tables")),
        };
        tables.push(fold(right));
        let value = match outer {
            Outer::Left => ours.clone(),
            Outer::Right => theirs.clone(),
            Outer::Full => call("coalesce", [ours.clone(), theirs.clone()]),
        };
        self.merged.push(Merged { name: fold(name), value, tables });
        Ok(binary(ours, BinaryOperator::Eq, theirs))
    }
}

#[derive(Clone, Copy)]
enum Outer {
    Left,
    Right,
    Full,
}

fn binary(left: Expr, op: BinaryOperator, right: Expr) -> Expr {
    Expr::BinaryOp { left: Box::new(left), op, right: Box::new(right) }
}

/// By which a table's columns are qualified.
fn table_name(factor: &TableFactor) -> Result<Ident, SqlError> {
    let name = match factor {
        TableFactor::Table { alias: Some(alias), .. }
        | TableFactor::Derived { alias: Some(alias), .. }
        | TableFactor::Function { alias: Some(alias), .. } => Some(alias.name.clone()),
        TableFactor::Table { name, args: None, .. } => {
            name.0.last().and_then(|p| p.as_ident()).cloned()
        }
        _ => None,
    };
    name.ok_or_else(|| unsupported("a FROM item without a name"))
}

fn find<'a>(merged: &'a [Merged], name: &str) -> Option<&'a Merged> {
    merged.iter().find(|m| m.name == name)
}

/// An item that `*` stands for.
fn written(item: &Item, merged: &[Merged]) -> SelectItem {
    match item {
        Item::Merged(name) => SelectItem::ExprWithAlias {
            expr: find(merged, name).map_or_else(|| column(name), |m| m.value.clone()),
            alias: Ident::with_quote('"', name),
        },
        Item::Table(table, without) => {
            let kind =
                SelectItemQualifiedWildcardKind::ObjectName(ObjectName::from(vec![table.clone()]));
            let mut names = without.iter().map(|name| Ident::with_quote('"', name));
            let except = names.next().map(|first_element| ExceptSelectItem {
                first_element,
                additional_elements: names.collect(),
            });
            let options = WildcardAdditionalOptions { opt_except: except, ..Default::default() };
            SelectItem::QualifiedWildcard(kind, options)
        }
    }
}

fn column(name: &str) -> Expr {
    Expr::Identifier(Ident::with_quote('"', name))
}

fn output_name(item: &SelectItem) -> Option<String> {
    match item {
        SelectItem::ExprWithAlias { alias, .. } => Some(fold(alias)),
        SelectItem::UnnamedExpr(Expr::Identifier(i)) => Some(fold(i)),
        _ => None,
    }
}

/// Writes merged columns out. Subqueries may have columns of the same name, and are left alone.
fn replace(clause: &mut impl VisitMut, merged: &[Merged]) {
    if !merged.is_empty() {
        change_own(clause, |expr| {
            if let Expr::Identifier(name) = &*expr
                && let Some(found) = find(merged, &fold(name))
            {
                *expr = Expr::Nested(Box::new(found.value.clone()));
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::SPELL_OUT_USING;
    use crate::bind::rewrites::testing::{assert_rewritten, rows};

    #[test]
    fn merged_columns_are_the_side_s_whose_rows_are_all_kept() {
        let cases = [
            (
                "SELECT k, a.x FROM a JOIN b USING (k) WHERE k > 1",
                "SELECT (a.k) AS k, a.x FROM a JOIN b ON a.k = b.k WHERE (a.k) > 1",
            ),
            (
                "SELECT k FROM a RIGHT JOIN b USING (k)",
                "SELECT (b.k) AS k FROM a RIGHT JOIN b ON a.k = b.k",
            ),
            (
                "SELECT sum(x) OVER w FROM a JOIN b USING (k) WINDOW w AS (PARTITION BY k)",
                "SELECT sum(x) OVER w FROM a JOIN b ON a.k = b.k WINDOW w AS (PARTITION BY (a.k))",
            ),
            // An output's name stands for it.
            (
                "SELECT x AS k FROM a JOIN b USING (k) ORDER BY k",
                "SELECT x AS k FROM a JOIN b ON a.k = b.k ORDER BY k",
            ),
        ];
        assert_rewritten(SPELL_OUT_USING, &cases);
    }

    /// `x.a` has 1 and 2, `y.a` 2 and 3.
    #[test]
    fn of_a_full_join_the_first_that_is_not_null_is_merged() {
        let sql = "SELECT a FROM (VALUES (1), (2)) AS x (a) FULL JOIN (VALUES (2), (3)) AS y (a) \
                   USING (a) ORDER BY a";
        assert_eq!(rows(sql), ["1", "2", "3"]);
    }
}
