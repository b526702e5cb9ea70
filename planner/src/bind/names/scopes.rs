//! Which columns the items of FROM have, told from the catalog before a query is planned.
//!
//! NATURAL joins need it, which become joins by the columns that both sides have ([`super::natural`]); and GROUP BY the
//! primary key of a table, which takes in the columns that depend on it
//! ([`crate::bind::aggregates::functional_dependency`]); and DISTINCT ON the position of a column of `*`
//! ([`crate::bind::aggregates::distinct_on`]); and an alias that names some of the columns, for which
//! DataFusion wants all.

use std::collections::HashMap;
use std::ops::ControlFlow;

use millrace_common::SqlError;
use millrace_rpc::catalog::RelationKind;
use sqlparser::ast::*;

use super::ambiguous;
use super::natural::{self, Form};
use super::output_names::{column_name, fold, repeated_name};
use super::star_expansion;
use crate::bind::aggregates::distinct_on;
use crate::bind::aggregates::functional_dependency;
use crate::bind::expressions::desugar::Copies;
use crate::bind::rewrites::ast::{AstRewrite, Whole};
use crate::catalog::CatalogView;
use crate::parser::joins;
use crate::parser::walk;

/// Writes out what of a query depends on the columns of the relations that it reads.
pub const RESOLVE_SCOPES: AstRewrite = AstRewrite {
    name: "resolve scopes",
    whole: |node, cx| match node {
        Whole::Query(query) => resolve(query, cx.catalog, &cx.session.database),
        Whole::Expr(_) => Ok(()),
    },
    ..AstRewrite::NONE
};

fn resolve(query: &mut Query, catalog: &dyn CatalogView, database: &str) -> Result<(), SqlError> {
    match is_concerned(query) {
        true => {
            let copies = Copies::default();
            Scopes { catalog, database, ctes: Vec::new(), copies }.query(query)
        }
        false => Ok(()),
    }
}

/// A table by whose name columns are qualified.
#[derive(Clone, Debug, Default)]
pub struct Table {
    pub name: Option<Ident>,
    /// The ones that are known.
    pub columns: Vec<String>,
    /// There are no others.
    pub complete: bool,
    /// The places of its primary key's columns; none where there is no such key.
    pub key: Vec<usize>,
}

/// What an unqualified name may mean.
#[derive(Clone, Debug)]
pub struct Column {
    pub name: String,
    /// The place of the table that it is of; `None`: it is made of several.
    pub table: Option<usize>,
    /// USING made it of two.
    pub merged: bool,
    /// What a merged one is, if that is known.
    pub value: Option<Expr>,
}

/// Tables that are joined.
#[derive(Clone, Debug, Default)]
pub struct Joined {
    pub tables: Vec<Table>,
    /// In the order of `*`.
    pub columns: Vec<Column>,
}

impl Joined {
    fn of(table: Table) -> Joined {
        let column = |name: &String| Column {
            name: name.clone(),
            table: Some(0),
            merged: false,
            value: None,
        };
        Joined { columns: table.columns.iter().map(column).collect(), tables: vec![table] }
    }

    /// All of its columns are known.
    pub fn complete(&self) -> bool {
        self.tables.iter().all(|t| t.complete)
    }

    /// The only column of a name, by its table, or by its tables if USING merged it.
    pub fn value(&self, name: &str) -> Option<Expr> {
        let column = star_expansion::only(self, name)?;
        if column.merged {
            return column.value.clone();
        }
        let table = self.tables.get(column.table?)?.name.clone()?;
        Some(Expr::CompoundIdentifier(vec![table, Ident::with_quote('"', name)]))
    }

    /// What `*` stands for, if that is known.
    pub fn all_columns(&self) -> Option<Vec<Expr>> {
        let named = |c: &Column| {
            let name = Ident::with_quote('"', &c.name);
            let table =
                c.table.filter(|_| !c.merged).and_then(|at| self.tables.get(at)?.name.clone());
            match table {
                Some(table) => Expr::CompoundIdentifier(vec![table, name]),
                None => Expr::Identifier(name),
            }
        };
        self.complete().then(|| self.columns.iter().map(named).collect())
    }

    /// What `table.*` stands for, if that is known.
    pub fn columns_of(&self, table: &ObjectName) -> Option<Vec<Expr>> {
        let table = self.table(table)?;
        let qualifier = table.name.as_ref()?;
        let named = |c: &String| {
            Expr::CompoundIdentifier(vec![qualifier.clone(), Ident::with_quote('"', c)])
        };
        Some(table.columns.iter().map(named).collect())
    }

    /// The table that is called so, if all of its columns are known.
    fn table(&self, name: &ObjectName) -> Option<&Table> {
        let name = last(name).map(|name| fold(&name));
        let called = |t: &&Table| t.name.as_ref().map(fold) == name;
        self.tables.iter().find(called).filter(|t| t.complete)
    }

    /// What stands beside it in FROM, behind it.
    pub fn extend(&mut self, other: Joined) {
        let before = self.tables.len();
        self.tables.extend(other.tables);
        self.columns.extend(other.columns.into_iter().map(|c| c.moved(before)));
    }
}

impl Column {
    /// Its table stands behind others.
    pub fn moved(self, by: usize) -> Column {
        Column { table: self.table.map(|t| t + by), ..self }
    }
}

/// Whether a query has a NATURAL join, or one with USING, or GROUP BY, or DISTINCT ON with `*`, or `*` that may repeat
/// names, or aliases that name columns, or WITH, or names that may be ambiguous.
fn is_concerned(query: &Query) -> bool {
    struct Concerned;
    impl Visitor for Concerned {
        type Break = ();

        fn pre_visit_query(&mut self, query: &Query) -> ControlFlow<()> {
            match query.with.is_some() {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        }

        fn pre_visit_select(&mut self, select: &Select) -> ControlFlow<()> {
            match is_select_concerned(select) || ambiguous::may_be(select) {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        }
    }
    walk::visit(query, &mut Concerned).is_break()
}

fn is_select_concerned(select: &Select) -> bool {
    select.from.iter().any(merges)
        || functional_dependency::group_exprs(select).is_some()
        || distinct_on::has_wildcard(select)
        || select.from.iter().any(renames)
        || select.from.iter().any(star_expansion::has_named_join)
        || star_expansion::may_repeat(select)
}

/// Whether a FROM item has columns by other names.
fn renames(from: &TableWithJoins) -> bool {
    let renamed = |factor: &TableFactor| match factor {
        TableFactor::NestedJoin { table_with_joins, alias } => {
            has_columns(alias) || renames(table_with_joins)
        }
        TableFactor::Derived { alias, .. } | TableFactor::Table { alias, args: None, .. } => {
            has_columns(alias)
        }
        _ => false,
    };
    renamed(&from.relation) || from.joins.iter().any(|join| renamed(&join.relation))
}

fn has_columns(alias: &Option<TableAlias>) -> bool {
    alias.as_ref().is_some_and(|alias| !alias.columns.is_empty())
}

/// Whether columns of a FROM item are merged.
pub fn merges(from: &TableWithJoins) -> bool {
    let nested = |factor: &TableFactor| match factor {
        TableFactor::NestedJoin { table_with_joins, .. } => merges(table_with_joins),
        _ => false,
    };
    let by_name = |join: &Join| {
        let constraint = joins::constraint(&join.join_operator);
        matches!(constraint, Some(JoinConstraint::Using(_) | JoinConstraint::Natural))
    };
    nested(&from.relation) || from.joins.iter().any(|join| nested(&join.relation) || by_name(join))
}

struct Scopes<'a> {
    catalog: &'a dyn CatalogView,
    database: &'a str,
    /// Names that WITH gives here, inner ones last, and their columns where they are known.
    ctes: Vec<(String, Option<Vec<String>>)>,
    copies: Copies,
}

impl Scopes<'_> {
    fn query(&mut self, query: &mut Query) -> Result<(), SqlError> {
        let known = self.ctes.len();
        if let Some(with) = &mut query.with {
            for cte in &mut with.cte_tables {
                let columns = self.query_columns(&cte.query).map(|c| renamed(c, &cte.alias));
                name_others(&mut cte.alias, columns.as_deref().unwrap_or_default());
                let named = (fold(&cte.alias.name), columns);
                // Only a recursive one sees itself.
                if with.recursive {
                    self.ctes.push(named);
                    self.query(&mut cte.query)?;
                } else {
                    self.query(&mut cte.query)?;
                    self.ctes.push(named);
                }
            }
        }
        let done = self.body(query);
        self.ctes.truncate(known);
        done
    }

    fn body(&mut self, query: &mut Query) -> Result<(), SqlError> {
        if let SetExpr::Select(select) = query.body.as_mut() {
            self.select(select, query.order_by.as_mut())?;
        }
        let mut within = Within { scopes: self, queries: 0 };
        let flow = walk::visit_mut(query.body.as_mut(), &mut within);
        let flow = match flow {
            ControlFlow::Continue(()) => walk::visit_mut(&mut query.order_by, &mut within),
            broken => broken,
        };
        let flow = match flow {
            ControlFlow::Continue(()) => walk::visit_mut(&mut query.limit_clause, &mut within),
            broken => broken,
        };
        match flow {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(e) => Err(*e),
        }
    }

    fn select(
        &mut self,
        select: &mut Select,
        mut order_by: Option<&mut OrderBy>,
    ) -> Result<(), SqlError> {
        if !is_select_concerned(select) {
            return match ambiguous::may_be(select) || ambiguous::reads_any(select, &self.ctes) {
                true => self.names(select).map_or(Ok(()), |from| ambiguous::check(select, &from)),
                false => Ok(()),
            };
        }
        select.from.iter_mut().try_for_each(star_expansion::name_joins)?;
        let matters = select.from.iter().any(merges) || star_expansion::may_repeat(select);
        let known = if matters { self.known(select) } else { None };
        let repeats = known.as_ref().is_some_and(|from| star_expansion::repeats(select, from));
        let hides = star_expansion::hides_inputs(select, order_by.as_deref());
        let conditions = known.is_some() && (star_expansion::nests(select) || repeats || hides);
        let form = if conditions { Form::Condition } else { Form::Tables };
        let mut from = Joined::default();
        for item in &mut select.from {
            from.extend(self.joined(item, form)?);
        }
        if !conditions {
            star_expansion::refuse_nested(select)?;
        }
        ambiguous::check(select, &from)?;
        if distinct_on::has_wildcard(select) {
            distinct_on::place(select, order_by.as_deref_mut(), &from, &mut self.copies)?;
        }
        functional_dependency::spell_out(select, order_by.as_deref(), &from);
        match conditions {
            true => star_expansion::write_out(select, order_by, &from),
            false => Ok(()),
        }
    }

    /// What FROM has, if all of that is known.
    fn known(&mut self, select: &Select) -> Option<Joined> {
        self.names(select).filter(|from| star_expansion::is_known(select, from))
    }

    /// What is known of FROM, unless something is wrong with it, which is said where it is planned.
    fn names(&mut self, select: &Select) -> Option<Joined> {
        let mut from = Joined::default();
        for item in &select.from {
            from.extend(self.joined(&mut item.clone(), Form::Names).ok()?);
        }
        Some(from)
    }

    /// What a FROM item joins; its NATURAL joins are written out.
    fn joined(&mut self, from: &mut TableWithJoins, form: Form) -> Result<Joined, SqlError> {
        let mut left = self.factor(&mut from.relation, form)?;
        for join in &mut from.joins {
            let right = self.factor(&mut join.relation, form)?;
            left = natural::join(left, right, &mut join.join_operator, form)?;
        }
        Ok(left)
    }

    fn factor(&mut self, factor: &mut TableFactor, form: Form) -> Result<Joined, SqlError> {
        let (table, alias) = match factor {
            TableFactor::NestedJoin { table_with_joins, alias } => {
                // Only a join in a row may note tables.
                let form = if form == Form::Tables { Form::Names } else { form };
                let inner = self.joined(table_with_joins, form)?;
                let Some(alias) = alias else { return Ok(inner) };
                let complete = inner.complete();
                let columns = inner.columns.into_iter().map(|c| c.name).collect();
                (Table { columns, complete, ..Table::default() }, Some(&*alias))
            }
            TableFactor::Derived { subquery, alias, .. } => {
                let columns = self.query_columns(subquery);
                (table_of(columns), alias.as_ref())
            }
            TableFactor::Table { name, alias, args: None, .. } => {
                (self.relation(name), alias.as_ref())
            }
            TableFactor::Table { name, alias, .. } | TableFactor::Function { name, alias, .. } => {
                (Table { name: last(name), ..Table::default() }, alias.as_ref())
            }
            TableFactor::UNNEST { alias, .. } => (Table::default(), alias.as_ref()),
            _ => (Table::default(), None),
        };
        let table = match alias {
            Some(alias) => Table {
                name: Some(alias.name.clone()),
                columns: renamed(table.columns, alias),
                ..table
            },
            None => table,
        };
        if let TableFactor::NestedJoin { alias, .. }
        | TableFactor::Derived { alias, .. }
        | TableFactor::Table { alias, args: None, .. } = factor
            && let Some(alias) = alias
        {
            name_others(alias, &table.columns);
        }
        Ok(Joined::of(table))
    }

    /// A table, a view, or what WITH calls so.
    fn relation(&self, name: &ObjectName) -> Table {
        let unknown = || Table { name: last(name), ..Table::default() };
        let parts = name.0.iter().map(|p| p.as_ident().map(fold)).collect::<Option<Vec<_>>>();
        let (schema, table) = match parts.as_deref() {
            Some([table]) => {
                if let Some((_, columns)) = self.ctes.iter().rev().find(|(cte, _)| cte == table) {
                    return Table { name: last(name), ..table_of(columns.clone()) };
                }
                (None, table.as_str())
            }
            Some([schema, table]) => (Some(schema.as_str()), table.as_str()),
            Some([database, schema, table]) if database == self.database => {
                (Some(schema.as_str()), table.as_str())
            }
            _ => return unknown(),
        };
        if let Some(relation) = self.catalog.relation(schema, table) {
            let shown = relation.columns.iter().enumerate().filter(|(_, c)| !c.hidden);
            let (places, columns): (Vec<usize>, Vec<String>) =
                shown.map(|(place, c)| (place, c.name.clone())).unzip();
            let has_key = relation.kind() == RelationKind::Table && relation.primary_key;
            let at = |k: &u32| places.iter().position(|place| *place == *k as usize);
            let key = relation.key.iter().filter(|_| has_key).map(at).collect::<Option<Vec<_>>>();
            let key = key.unwrap_or_default();
            return Table { name: last(name), columns, complete: true, key };
        }
        match self.catalog.system_table(schema, table) {
            Some(source) => {
                let columns = source.schema().fields().iter().map(|f| f.name().clone()).collect();
                Table { name: last(name), columns, complete: true, key: Vec::new() }
            }
            None => unknown(),
        }
    }

    /// The names of a query's columns, where they can be told.
    fn query_columns(&mut self, query: &Query) -> Option<Vec<String>> {
        let known = self.ctes.len();
        for cte in query.with.iter().flat_map(|with| &with.cte_tables) {
            let columns = self.query_columns(&cte.query).map(|c| renamed(c, &cte.alias));
            self.ctes.push((fold(&cte.alias.name), columns));
        }
        let columns = self.body_columns(&query.body);
        self.ctes.truncate(known);
        columns
    }

    fn body_columns(&mut self, body: &SetExpr) -> Option<Vec<String>> {
        match body {
            SetExpr::Select(select) => self.select_columns(select),
            SetExpr::Query(query) => self.query_columns(query),
            SetExpr::SetOperation { left, .. } => self.body_columns(left),
            SetExpr::Values(values) => {
                let width = values.rows.first()?.content.len();
                Some((1..=width).map(|i| format!("column{i}")).collect())
            }
            _ => None,
        }
    }

    fn select_columns(&mut self, select: &Select) -> Option<Vec<String>> {
        let wild = |item: &SelectItem| {
            matches!(item, SelectItem::Wildcard(_) | SelectItem::QualifiedWildcard(..))
        };
        let mut from = Joined::default();
        if select.projection.iter().any(wild) {
            for item in &select.from {
                // What is wrong with it is said where it is planned.
                from.extend(self.joined(&mut item.clone(), Form::Names).ok()?);
            }
        }
        let mut columns = Vec::with_capacity(select.projection.len());
        for item in &select.projection {
            match item {
                SelectItem::UnnamedExpr(e) => columns.push(column_name(e)),
                SelectItem::ExprWithAlias { alias, .. } => columns.push(fold(alias)),
                SelectItem::Wildcard(options) if is_plain(options) && from.complete() => {
                    columns.extend(from.columns.iter().map(|c| c.name.clone()));
                }
                SelectItem::QualifiedWildcard(
                    SelectItemQualifiedWildcardKind::ObjectName(name),
                    options,
                ) if is_plain(options) => {
                    columns.extend(from.table(name)?.columns.iter().cloned());
                }
                _ => return None,
            }
        }
        Some(columns)
    }
}

/// Whether `*` stands for all columns, under their names.
pub fn is_plain(options: &WildcardAdditionalOptions) -> bool {
    *options == WildcardAdditionalOptions::default()
}

fn last(name: &ObjectName) -> Option<Ident> {
    name.0.last().and_then(|p| p.as_ident()).cloned()
}

fn table_of(columns: Option<Vec<String>>) -> Table {
    let complete = columns.is_some();
    Table { columns: columns.unwrap_or_default(), complete, ..Table::default() }
}

/// An alias may name the first columns anew.
fn renamed(mut columns: Vec<String>, alias: &TableAlias) -> Vec<String> {
    for (column, new) in columns.iter_mut().zip(&alias.columns) {
        *column = fold(&new.name);
    }
    columns
}

/// An alias that names the first columns names the others as they are, all by names of their own.
fn name_others(alias: &mut TableAlias, columns: &[String]) {
    if alias.columns.is_empty() {
        return;
    }
    let others = columns
        .iter()
        .skip(alias.columns.len())
        .map(|name| TableAliasColumnDef { name: Ident::with_quote('"', name), data_type: None });
    let others: Vec<TableAliasColumnDef> = others.collect();
    alias.columns.extend(others);
    let mut seen: HashMap<String, usize> = HashMap::new();
    for column in &mut alias.columns {
        let name = fold(&column.name);
        let count = seen.entry(name.clone()).or_insert(0);
        *count += 1;
        if *count > 1 {
            column.name = repeated_name(&name, *count);
        }
    }
}

/// Goes on in the queries and SELECTs of a query.
struct Within<'s, 'a> {
    scopes: &'s mut Scopes<'a>,
    /// Queries that the visitor is in, each of which has had its turn.
    queries: usize,
}

impl VisitorMut for Within<'_, '_> {
    type Break = Box<SqlError>;

    fn pre_visit_query(&mut self, query: &mut Query) -> ControlFlow<Box<SqlError>> {
        if self.queries == 0
            && let Err(e) = self.scopes.query(query)
        {
            return ControlFlow::Break(Box::new(e));
        }
        self.queries += 1;
        ControlFlow::Continue(())
    }

    fn post_visit_query(&mut self, _: &mut Query) -> ControlFlow<Box<SqlError>> {
        self.queries -= 1;
        ControlFlow::Continue(())
    }

    fn pre_visit_select(&mut self, select: &mut Select) -> ControlFlow<Box<SqlError>> {
        match self.queries {
            0 => match self.scopes.select(select, None) {
                Ok(()) => ControlFlow::Continue(()),
                Err(e) => ControlFlow::Break(Box::new(e)),
            },
            _ => ControlFlow::Continue(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bind::rewrites::testing::assert_rewritten;

    #[test]
    fn an_alias_of_some_columns_names_the_others_as_they_are() {
        let no_alias = "SELECT a, count(*) FROM t WHERE b > 1 ORDER BY a";
        let cases = [
            ("SELECT x, name FROM k AS s (x)", "SELECT x, name FROM k AS s (x, \"name\")"),
            // What no catalog is needed for stays.
            (no_alias, no_alias),
        ];
        assert_rewritten(RESOLVE_SCOPES, &cases);
    }
}
