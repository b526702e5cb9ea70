//! What a RowDescription tells of a query's columns: the column of a relation that each one is, and its declared type.
//!
//! Plans do not know either: rewrites replace columns, and Arrow has no `varchar(n)` and no `timestamp(p)`.
//! So the query is read as it is written, by the rules of PostgreSQL (`markTargetListOrigin`, `exprTypmod`).
//! The result is for clients alone. It never changes what is computed: where something is not understood,
//! nothing is told.

use millrace_common::SqlType;
use millrace_common::types::Element;
use millrace_rpc::catalog::ColumnType;
use sqlparser::ast::*;

use super::output_names::{column_name, fold};
use super::scopes::is_plain;
use crate::bind::expressions::types::column_type;
use crate::catalog::CatalogView;
use crate::parser::joins::constraint;

/// A column of a query.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Output {
    pub name: String,
    /// OID of a relation and the number of its column, if the output is that column and nothing else.
    pub origin: Option<(u32, i16)>,
    /// The type as it was declared, if that is known.
    pub declared: Option<ColumnType>,
}

impl Output {
    /// An expression of that type.
    fn computed(declared: Option<ColumnType>) -> Output {
        Output { declared, ..Output::default() }
    }

    fn named(self, name: String) -> Output {
        Output { name, ..self }
    }
}

/// The columns of a query; `None`: it is not known how many there are.
pub fn outputs(query: &Query, catalog: &dyn CatalogView, database: &str) -> Option<Vec<Output>> {
    Reader { catalog, database, ctes: Vec::new(), scopes: Vec::new() }.query(query)
}

/// Types for the columns of a relation that is made of a query: as declared where the values are stored alike.
pub fn declared_types(types: &[SqlType], outputs: Option<&[Output]>) -> Vec<ColumnType> {
    let declared = |(i, t): (usize, &SqlType)| {
        let told = outputs.filter(|o| o.len() == types.len()).and_then(|o| o.get(i)?.declared);
        let alike = |c: &ColumnType| c.to_sql().is_ok_and(|sql| sql.to_arrow() == t.to_arrow());
        let longer = |c: &ColumnType| c.oid == t.oid() || replaces(t.oid(), c.oid);
        told.filter(|c| alike(c) && longer(c)).unwrap_or_else(|| (*t).into())
    };
    types.iter().enumerate().map(declared).collect()
}

/// Whether values of one type are told to be of another, which plans do not distinguish: `varchar` and text.
pub fn replaces(planned: u32, declared: u32) -> bool {
    (planned == SqlType::Text.oid() && declared == SqlType::Varchar(None).oid())
        || (planned == Element::Text.array_oid() && declared == Element::Varchar(None).array_oid())
}

/// An item of FROM by whose name columns are qualified.
#[derive(Clone, Default)]
struct Table {
    name: Option<String>,
    columns: Vec<Output>,
    /// There are no others.
    complete: bool,
}

/// What FROM has.
#[derive(Clone, Default)]
struct Scope {
    tables: Vec<Table>,
    /// In the order of `*`; the columns that USING merges are there once.
    columns: Vec<Output>,
}

impl Scope {
    fn of(table: Table) -> Scope {
        Scope { columns: table.columns.clone(), tables: vec![table] }
    }

    fn complete(&self) -> bool {
        self.tables.iter().all(|t| t.complete)
    }

    fn table(&self, name: &str) -> Option<&Table> {
        self.tables.iter().find(|t| t.name.as_deref() == Some(name))
    }
}

struct Reader<'a> {
    catalog: &'a dyn CatalogView,
    database: &'a str,
    /// What WITH defines here, inner names last.
    ctes: Vec<(String, Option<Vec<Output>>)>,
    /// The FROM clauses around, inner ones last.
    scopes: Vec<Scope>,
}

impl Reader<'_> {
    fn query(&mut self, query: &Query) -> Option<Vec<Output>> {
        let known = self.ctes.len();
        for cte in query.with.iter().flat_map(|with| &with.cte_tables) {
            let name = fold(&cte.alias.name);
            if with_itself(query) {
                let first = self.first_part(&cte.query).map(|c| renamed(c, &cte.alias));
                self.ctes.push((name.clone(), first));
            }
            let columns = self.query(&cte.query).map(|c| renamed(c, &cte.alias));
            self.ctes.push((name, columns));
        }
        let columns = self.body(&query.body);
        self.ctes.truncate(known);
        columns
    }

    /// What a recursive query reads of itself: it has the types of its first part.
    fn first_part(&mut self, query: &Query) -> Option<Vec<Output>> {
        let SetExpr::SetOperation { left, .. } = query.body.as_ref() else { return None };
        let columns = self.body(left)?;
        Some(columns.into_iter().map(|c| Output { origin: None, ..c }).collect())
    }

    fn body(&mut self, body: &SetExpr) -> Option<Vec<Output>> {
        match body {
            SetExpr::Select(select) => self.select(select),
            SetExpr::Query(query) => self.query(query),
            SetExpr::SetOperation { left, right, .. } => {
                let left = self.body(left)?;
                let right = self.body(right);
                let of = |i: usize| right.as_ref().and_then(|r| r.get(i)?.declared);
                let both = |(i, l): (usize, Output)| {
                    let declared = common(&[Operand::of(l.declared), Operand::of(of(i))]);
                    Output::computed(declared).named(l.name)
                };
                Some(left.into_iter().enumerate().map(both).collect())
            }
            SetExpr::Values(values) => {
                let width = values.rows.first()?.content.len();
                let mut columns = Vec::with_capacity(width);
                for i in 0..width {
                    let cells = values.rows.iter().filter_map(|row| row.content.get(i));
                    let operands: Vec<Operand> = cells.map(|e| self.operand(e)).collect();
                    let name = format!("column{}", i + 1);
                    columns.push(Output::computed(common(&operands)).named(name));
                }
                Some(columns)
            }
            SetExpr::Table(table) => {
                let part = |name: &Option<String>| name.as_ref().map(Ident::new);
                let parts = [part(&table.schema_name), part(&table.table_name)];
                let name = ObjectName::from(parts.into_iter().flatten().collect::<Vec<_>>());
                let table = self.relation(&name);
                table.complete.then_some(table.columns)
            }
            _ => None,
        }
    }

    fn select(&mut self, select: &Select) -> Option<Vec<Output>> {
        let around = self.scopes.len();
        self.scopes.push(Scope::default());
        for item in &select.from {
            let joined = self.joined(item);
            if let Some(scope) = self.scopes.get_mut(around) {
                scope.tables.extend(joined.tables);
                scope.columns.extend(joined.columns);
            }
        }
        let columns = self.items(&select.projection);
        self.scopes.truncate(around);
        columns
    }

    fn items(&mut self, items: &[SelectItem]) -> Option<Vec<Output>> {
        let mut columns = Vec::with_capacity(items.len());
        for item in items {
            match item {
                SelectItem::UnnamedExpr(e) => columns.push(self.expr(e).named(column_name(e))),
                SelectItem::ExprWithAlias { expr, alias } => {
                    columns.push(self.expr(expr).named(fold(alias)));
                }
                SelectItem::Wildcard(options) if is_plain(options) => {
                    let from = self.scopes.last().filter(|from| from.complete())?;
                    columns.extend(from.columns.iter().cloned());
                }
                SelectItem::QualifiedWildcard(
                    SelectItemQualifiedWildcardKind::ObjectName(name),
                    options,
                ) if is_plain(options) => {
                    let table = self.scopes.last()?.table(&last(name)?).filter(|t| t.complete)?;
                    columns.extend(table.columns.iter().cloned());
                }
                _ => return None,
            }
        }
        Some(columns)
    }

    fn joined(&mut self, from: &TableWithJoins) -> Scope {
        let mut left = self.factor(&from.relation);
        for join in &from.joins {
            let right = self.factor(&join.relation);
            left = joined(left, right, &join.join_operator);
        }
        left
    }

    fn factor(&mut self, factor: &TableFactor) -> Scope {
        let (table, alias) = match factor {
            TableFactor::NestedJoin { table_with_joins, alias } => {
                let inner = self.joined(table_with_joins);
                let Some(alias) = alias else { return inner };
                let complete = inner.complete();
                (Table { columns: inner.columns, complete, name: None }, Some(alias))
            }
            TableFactor::Derived { subquery, alias, .. } => {
                (table_of(self.query(subquery)), alias.as_ref())
            }
            TableFactor::Table { name, alias, args: None, .. } => {
                (self.relation(name), alias.as_ref())
            }
            _ => (Table::default(), None),
        };
        Scope::of(match alias {
            Some(alias) => Table {
                name: Some(fold(&alias.name)),
                columns: renamed(table.columns, alias),
                ..table
            },
            None => table,
        })
    }

    /// A table, a view, or what WITH calls so.
    fn relation(&self, name: &ObjectName) -> Table {
        let parts = name.0.iter().map(|p| p.as_ident().map(fold)).collect::<Option<Vec<_>>>();
        let (schema, table) = match parts.as_deref() {
            Some([table]) => {
                if let Some((_, columns)) = self.ctes.iter().rev().find(|(cte, _)| cte == table) {
                    return Table { name: Some(table.clone()), ..table_of(columns.clone()) };
                }
                (None, table.as_str())
            }
            Some([schema, table]) => (Some(schema.as_str()), table.as_str()),
            Some([database, schema, table]) if database == self.database => {
                (Some(schema.as_str()), table.as_str())
            }
            _ => return Table::default(),
        };
        let columns = match self.catalog.relation(schema, table) {
            Some(relation) => {
                let shown = relation.columns.iter().filter(|c| !c.hidden).zip(1..);
                let column = |(c, number): (&millrace_rpc::catalog::Column, i16)| Output {
                    name: c.name.clone(),
                    // What a statement has in hand of no relation has no OID.
                    origin: (relation.id != 0).then_some((relation.id, number)),
                    declared: Some(c.sql_type),
                };
                Some(shown.map(column).collect())
            }
            None => self.catalog.system_columns(schema, table).map(|(oid, names)| {
                let column = |(name, number): (String, i16)| {
                    Output { origin: Some((oid, number)), ..Output::default() }.named(name)
                };
                names.into_iter().zip(1..).map(column).collect()
            }),
        };
        Table { name: Some(table.to_owned()), ..table_of(columns) }
    }

    fn expr(&mut self, e: &Expr) -> Output {
        match e {
            Expr::Identifier(name) => self.column(None, &fold(name)),
            Expr::CompoundIdentifier(parts) => match parts.as_slice() {
                [.., table, name] => self.column(Some(&fold(table)), &fold(name)),
                _ => Output::default(),
            },
            Expr::Nested(inner) => self.expr(inner),
            Expr::Cast { expr, data_type, .. } => {
                let inner = self.expr(expr);
                match column_type(data_type) {
                    // A cast to the type that is there already is none.
                    Ok(t) if inner.declared == Some(t) => inner,
                    to => Output::computed(to.ok()),
                }
            }
            e => Output::computed(self.type_of(e)),
        }
    }

    /// The type of what is not a column.
    fn type_of(&mut self, e: &Expr) -> Option<ColumnType> {
        match e {
            Expr::Collate { expr, .. } => self.expr(expr).declared,
            Expr::TypedString(t) => column_type(&t.data_type).ok(),
            Expr::Subquery(query) => self.query(query)?.into_iter().next()?.declared,
            Expr::Case { conditions, else_result, .. } => {
                let results = conditions.iter().map(|when| &when.result);
                let all = results.chain(else_result.as_deref());
                let mut operands: Vec<Operand> = all.map(|e| self.operand(e)).collect();
                if else_result.is_none() {
                    operands.push(Operand::Untyped);
                }
                common(&operands)
            }
            Expr::Array(array) => {
                let operands: Vec<Operand> = array.elem.iter().map(|e| self.operand(e)).collect();
                let element = Element::of(common(&operands)?.to_sql().ok()?)?;
                Some(SqlType::Array(element).into())
            }
            Expr::Function(call) => self.type_of_call(call),
            _ => None,
        }
    }

    fn type_of_call(&mut self, call: &Function) -> Option<ColumnType> {
        let FunctionArguments::List(list) = &call.args else { return None };
        let arguments = list.args.iter().map(argument).collect::<Option<Vec<&Expr>>>()?;
        match last(&call.name)?.as_str() {
            "coalesce" | "greatest" | "least" => {
                let operands: Vec<Operand> =
                    arguments.into_iter().map(|e| self.operand(e)).collect();
                common(&operands)
            }
            // The operator that compares takes varchar as text.
            "nullif" => {
                let first = self.expr(arguments.first()?).declared?;
                (first.oid != SqlType::Varchar(None).oid()).then_some(first)
            }
            "lag" | "lead" | "first_value" | "last_value" | "nth_value" => {
                let first = self.expr(arguments.first()?).declared?;
                Some(ColumnType { typmod: -1, ..first })
            }
            _ => None,
        }
    }

    fn operand(&mut self, e: &Expr) -> Operand {
        match e {
            Expr::Value(v) => match v.value {
                Value::SingleQuotedString(_) | Value::Null | Value::Placeholder(_) => {
                    Operand::Untyped
                }
                _ => Operand::Unknown,
            },
            e => Operand::of(self.expr(e).declared),
        }
    }

    /// A column by its name, of the innermost FROM that has it.
    fn column(&self, table: Option<&str>, name: &str) -> Output {
        let of_table = |scope: &Scope, table: &str| {
            scope.table(table)?.columns.iter().find(|c| c.name == name).cloned()
        };
        let found = self.scopes.iter().rev().find_map(|scope| match table {
            Some(table) => of_table(scope, table),
            None => scope.columns.iter().find(|c| c.name == name).cloned(),
        });
        found.unwrap_or_default()
    }
}

fn with_itself(query: &Query) -> bool {
    query.with.as_ref().is_some_and(|with| with.recursive)
}

fn argument(a: &FunctionArg) -> Option<&Expr> {
    match a {
        FunctionArg::Unnamed(FunctionArgExpr::Expr(e)) => Some(e),
        _ => None,
    }
}

/// One of several expressions of which one value is made.
#[derive(Clone, Copy)]
enum Operand {
    Typed(ColumnType),
    /// A literal that takes the type of the others.
    Untyped,
    Unknown,
}

impl Operand {
    fn of(declared: Option<ColumnType>) -> Operand {
        declared.map_or(Operand::Unknown, Operand::Typed)
    }
}

/// The type of a value made of one of several: it has a modifier if all have the same one.
fn common(operands: &[Operand]) -> Option<ColumnType> {
    let mut all: Option<ColumnType> = None;
    let mut alike = true;
    for operand in operands {
        match (operand, all) {
            (Operand::Unknown, _) => return None,
            (Operand::Untyped, _) => alike = false,
            (Operand::Typed(t), Some(before)) if before.oid != t.oid => return None,
            (Operand::Typed(t), before) => {
                alike &= before.is_none_or(|before| before.typmod == t.typmod);
                all = Some(*t);
            }
        }
    }
    all.map(|t| if alike { t } else { ColumnType { typmod: -1, ..t } })
}

/// Two sides of a join; columns of USING and NATURAL come first, once each.
fn joined(left: Scope, right: Scope, operator: &JoinOperator) -> Scope {
    let has = |side: &Scope, name: &str| side.columns.iter().any(|c| c.name == name);
    let merged: Vec<String> = match constraint(operator) {
        Some(JoinConstraint::Using(names)) => names.iter().filter_map(last).collect(),
        Some(JoinConstraint::Natural) => {
            let names = left.columns.iter().map(|c| &c.name);
            names.filter(|name| has(&right, name)).cloned().collect()
        }
        _ => Vec::new(),
    };
    let of = |side: &Scope, name: &str| side.columns.iter().find(|c| c.name == name).cloned();
    let one = |name: &String| {
        let (l, r) = (of(&left, name).unwrap_or_default(), of(&right, name).unwrap_or_default());
        let alike = l.declared == r.declared;
        match operator {
            JoinOperator::FullOuter(_) => Output::computed(l.declared.filter(|_| alike)),
            JoinOperator::Right(_) | JoinOperator::RightOuter(_) if alike => r,
            _ if alike => l,
            _ => Output::default(),
        }
        .named(name.clone())
    };
    let mut columns: Vec<Output> = merged.iter().map(one).collect();
    let others = left.columns.into_iter().chain(right.columns);
    columns.extend(others.filter(|c| !merged.contains(&c.name)));
    let tables = left.tables.into_iter().chain(right.tables).collect();
    Scope { tables, columns }
}

fn table_of(columns: Option<Vec<Output>>) -> Table {
    let complete = columns.is_some();
    Table { name: None, columns: columns.unwrap_or_default(), complete }
}

/// An alias may name the first columns anew.
fn renamed(mut columns: Vec<Output>, alias: &TableAlias) -> Vec<Output> {
    for (column, new) in columns.iter_mut().zip(&alias.columns) {
        column.name = fold(&new.name);
    }
    columns
}

fn last(name: &ObjectName) -> Option<String> {
    name.0.last().and_then(|p| p.as_ident()).map(fold)
}
