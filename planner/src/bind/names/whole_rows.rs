//! A table's name in the place of a value: its whole row. A column of that name comes first, and which there
//! are is known when the query is planned; so such names are marked for
//! [`crate::bind::expressions::operators`].
//!
//! Rows have no type of their own: they are counted, asked whether they are NULL, made documents of, and
//! shown as text where they stand alone in a SELECT list, as do those that are written out, `ROW(1, 2)`.
//! `(t).a` is `t.a`.

use millrace_functions::strings::ROW_TEXT;
use sqlparser::ast::*;

use super::output_names::{column_name, fold};
use crate::bind::expressions::clause_expressions::change_own;
use crate::bind::expressions::desugar::{call, row_items, row_op, row_test, row_text, string};
use crate::bind::rewrites::ast::AstRewrite;

/// Functions of a row.
const FUNCTIONS: [&str; 6] =
    ["count", "to_jsonb", "to_json", "row_to_json", "jsonb_agg", "json_agg"];

/// Marks the rows that a query reads whole.
pub const MARK_WHOLE_ROWS: AstRewrite = AstRewrite {
    name: "mark whole rows",
    select: |select, _| {
        mark(select);
        Ok(())
    },
    expr: |expr, _| {
        name_field(expr);
        Ok(())
    },
    ..AstRewrite::NONE
};

/// Marks the rows that a SELECT reads whole.
fn mark(select: &mut Select) {
    for item in &mut select.projection {
        show_written(item);
    }
    change_own(&mut select.projection, spell_written);
    change_own(&mut select.selection, spell_written);
    change_own(&mut select.having, spell_written);
    let mut tables = Vec::new();
    for from in &select.from {
        collect(from, &mut tables);
    }
    if tables.is_empty() {
        return;
    }
    let marks = Marks { tables: &tables };
    for item in &mut select.projection {
        marks.show(item);
        change_own(item, |e| marks.mark(e));
    }
    for e in [&mut select.selection, &mut select.having].into_iter().flatten() {
        change_own(e, |e| marks.mark(e));
    }
    if let GroupByExpr::Expressions(exprs, _) = &mut select.group_by {
        change_own(exprs, |e| marks.mark(e));
    }
}

/// A row that is written out, as text.
fn show_written(item: &mut SelectItem) {
    let (SelectItem::UnnamedExpr(e) | SelectItem::ExprWithAlias { expr: e, .. }) = &*item else {
        return;
    };
    let Some(shown) = written(e) else { return };
    let name = Ident::with_quote('"', column_name(e));
    put(item, shown, name);
}

/// The text of a row that is written out, or that is cast to text.
fn written(e: &Expr) -> Option<Expr> {
    if let Expr::Cast { expr, data_type: DataType::Text | DataType::Varchar(None), .. } = e {
        return written(expr);
    }
    let mut items = row_items(e)?;
    if items.is_empty() {
        return Some(string("()"));
    }
    for item in &mut items {
        if let Some(inner) = written(item) {
            *item = inner;
        }
    }
    Some(call(ROW_TEXT, items))
}

/// A row that is written out and cast to text is its text, and one that a document is made of is an object: its members
/// are called `f1`, `f2` and so on.
fn spell_written(e: &mut Expr) {
    if let Expr::Cast { .. } = e {
        if let Some(text) = written(e) {
            *e = text;
        }
        return;
    }
    let Expr::Function(f) = e else { return };
    let name = f.name.0.last().and_then(|p| p.as_ident()).map(fold).unwrap_or_default();
    if !FUNCTIONS[1..].contains(&name.as_str()) {
        return;
    }
    let FunctionArguments::List(list) = &mut f.args else { return };
    if let [FunctionArg::Unnamed(FunctionArgExpr::Expr(row))] = list.args.as_mut_slice()
        && let Some(object) = object(row)
    {
        *row = object;
    }
}

fn object(row: &Expr) -> Option<Expr> {
    let items = row_items(row)?;
    let members = items.into_iter().enumerate().flat_map(|(i, item)| {
        let value = object(&item).unwrap_or(item);
        [string(format!("f{}", i + 1)), value]
    });
    Some(call("jsonb_build_object", members.collect::<Vec<_>>()))
}

/// Puts an expression in the place of an item's; it has a name of its own, or is called as what it stands for.
fn put(item: &mut SelectItem, shown: Expr, name: Ident) {
    match item {
        SelectItem::ExprWithAlias { expr, .. } => *expr = shown,
        _ => *item = SelectItem::ExprWithAlias { expr: shown, alias: name },
    }
}

/// A table that FROM names.
struct Table {
    name: String,
    /// An outer join may leave its row out.
    padded: bool,
    /// It is no function, whose name is its column's.
    rows: bool,
}

fn collect(from: &TableWithJoins, tables: &mut Vec<Table>) {
    let first = tables.len();
    collect_factor(&from.relation, tables);
    for join in &from.joins {
        let right = tables.len();
        collect_factor(&join.relation, tables);
        use JoinOperator as J;
        let (left_padded, right_padded) = match &join.join_operator {
            J::Left(_) | J::LeftOuter(_) => (false, true),
            J::Right(_) | J::RightOuter(_) => (true, false),
            J::FullOuter(_) => (true, true),
            _ => (false, false),
        };
        for (i, table) in tables.iter_mut().enumerate().skip(first) {
            table.padded |= if i < right { left_padded } else { right_padded };
        }
    }
}

fn collect_factor(factor: &TableFactor, tables: &mut Vec<Table>) {
    let rows = !matches!(factor, TableFactor::Table { args: Some(_), .. });
    let name = match factor {
        TableFactor::NestedJoin { table_with_joins, alias: None } => {
            return collect(table_with_joins, tables);
        }
        TableFactor::Table { alias: Some(alias), .. }
        | TableFactor::Derived { alias: Some(alias), .. } => Some(fold(&alias.name)),
        TableFactor::Table { name, .. } => name.0.last().and_then(|p| p.as_ident()).map(fold),
        _ => None,
    };
    tables.extend(name.map(|name| Table { name, padded: false, rows }));
}

struct Marks<'a> {
    tables: &'a [Table],
}

impl Marks<'_> {
    /// A table's name that stands alone in a list, or is cast to text.
    fn show(&self, item: &mut SelectItem) {
        let (SelectItem::UnnamedExpr(e) | SelectItem::ExprWithAlias { expr: e, .. }) = &*item
        else {
            return;
        };
        let value = match e {
            Expr::Cast { expr, data_type: DataType::Text | DataType::Varchar(None), .. } => {
                expr.as_ref()
            }
            e => e,
        };
        let Some((table, name)) = self.table(value) else { return };
        if !table.rows {
            return;
        }
        let shown = row_text(name.clone(), &table.name, table.padded);
        put(item, shown, Ident::with_quote('"', fold(&name)));
    }

    /// The table that a name is of, if nothing else is meant by it here.
    fn table(&self, e: &Expr) -> Option<(&Table, Ident)> {
        let Expr::Identifier(name) = e else { return None };
        let folded = fold(name);
        self.tables.iter().find(|t| t.name == folded).map(|t| (t, name.clone()))
    }

    fn argument(&self, arg: &mut FunctionArgExpr) {
        if let FunctionArgExpr::QualifiedWildcard(name) = &*arg
            && let [part] = name.0.as_slice()
            && let Some(name) = part.as_ident()
        {
            let row = Expr::Identifier(name.clone());
            if self.table(&row).is_some() {
                *arg = FunctionArgExpr::Expr(row);
            }
        }
        if let FunctionArgExpr::Expr(e) = arg
            && let Some((table, name)) = self.table(e)
        {
            *e = row_op(name, &table.name, table.padded);
        }
    }

    fn mark(&self, e: &mut Expr) {
        match e {
            Expr::Function(f) => {
                let name = f.name.0.last().and_then(|p| p.as_ident()).map(fold);
                let of_rows = name.is_some_and(|n| FUNCTIONS.contains(&n.as_str()));
                if let FunctionArguments::List(list) = &mut f.args
                    && let ([FunctionArg::Unnamed(arg)], true) = (list.args.as_mut_slice(), of_rows)
                {
                    self.argument(arg);
                }
            }
            Expr::IsNull(inner) => {
                if let Some((table, name)) = self.table(inner) {
                    *e = row_test(name, &table.name, false);
                }
            }
            Expr::IsNotNull(inner) => {
                if let Some((table, name)) = self.table(inner) {
                    *e = row_test(name, &table.name, true);
                }
            }
            _ => {}
        }
    }
}

/// `(t).a` as `t.a`.
fn name_field(e: &mut Expr) {
    let Expr::CompoundFieldAccess { root, access_chain } = e else { return };
    let Expr::Nested(inner) = root.as_ref() else { return };
    if let Some(items) = row_items(inner) {
        let [AccessExpr::Dot(Expr::Identifier(field))] = access_chain.as_slice() else { return };
        let place = fold(field).strip_prefix('f').and_then(|n| n.parse::<usize>().ok());
        if let Some(item) = place.and_then(|n| items.into_iter().nth(n.checked_sub(1)?)) {
            *e = Expr::Nested(Box::new(item));
        }
        return;
    }
    let Expr::Identifier(table) = inner.as_ref() else { return };
    let Some(AccessExpr::Dot(Expr::Identifier(column))) = access_chain.first() else { return };
    let column = Expr::CompoundIdentifier(vec![table.clone(), column.clone()]);
    if access_chain.len() == 1 {
        *e = column;
    } else {
        access_chain.remove(0);
        **root = column;
    }
}

#[cfg(test)]
mod tests {
    use super::MARK_WHOLE_ROWS;
    use crate::bind::rewrites::testing::assert_rewritten;

    #[test]
    fn a_field_of_a_row_is_a_column() {
        let sql = "SELECT (t).a, (ROW(1, b)).f2 FROM t";
        assert_rewritten(MARK_WHOLE_ROWS, &[(sql, "SELECT t.a, (b) FROM t")]);
    }
}
