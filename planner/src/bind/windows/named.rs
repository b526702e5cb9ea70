//! Named windows: `OVER w` and `OVER (w …)` are written out, because DataFusion forgets the window that
//! a longer definition starts from.

use millrace_common::{SqlError, SqlState};
use millrace_functions::window_fn::EXCLUDE;
use sqlparser::ast::*;

use crate::bind::expressions::clause_expressions::try_change_own;
use crate::bind::expressions::desugar::Copies;
use crate::bind::names::fold;
use crate::bind::rewrites::ast::AstRewrite;

/// Writes out the windows that ORDER BY names.
pub const WRITE_OUT_ORDER_WINDOWS: AstRewrite = AstRewrite {
    name: "write out order windows",
    query: |query, cx| write_out_order(query, &mut cx.copies),
    ..AstRewrite::NONE
};

/// Writes out the windows that a query's ORDER BY names: those of its SELECT.
fn write_out_order(query: &mut Query, copies: &mut Copies) -> Result<(), SqlError> {
    let SetExpr::Select(select) = query.body.as_ref() else { return Ok(()) };
    let Some(OrderBy { kind: OrderByKind::Expressions(exprs), .. }) = &mut query.order_by else {
        return Ok(());
    };
    exprs.iter_mut().try_for_each(|by| write_out_in(&mut by.expr, &select.named_window, copies))
}

/// Writes out the windows that a SELECT names.
pub const WRITE_OUT_WINDOWS: AstRewrite = AstRewrite {
    name: "write out windows",
    select: |select, cx| write_out(select, &mut cx.copies),
    ..AstRewrite::NONE
};

/// Writes out the windows that a SELECT list names; subqueries have windows of their own.
fn write_out(select: &mut Select, copies: &mut Copies) -> Result<(), SqlError> {
    let windows = std::mem::take(&mut select.named_window);
    for item in &mut select.projection {
        if let SelectItem::UnnamedExpr(e) | SelectItem::ExprWithAlias { expr: e, .. } = item {
            write_out_in(e, &windows, copies)?;
        }
    }
    match &mut select.qualify {
        Some(e) => write_out_in(e, &windows, copies),
        None => Ok(()),
    }
}

fn write_out_in(
    e: &mut Expr,
    windows: &[NamedWindowDefinition],
    copies: &mut Copies,
) -> Result<(), SqlError> {
    try_change_own(e, |expr| {
        let Expr::Function(Function { over: Some(over), .. }) = expr else { return Ok(()) };
        let spec = match over {
            WindowType::NamedWindow(name) => find(windows, name)?,
            WindowType::WindowSpec(spec) if spec.window_name.is_some() => extended(windows, spec)?,
            WindowType::WindowSpec(_) => return Ok(()),
        };
        copies.again(&spec, 1)?;
        *over = WindowType::WindowSpec(spec);
        Ok(())
    })
}

/// The definition of a name, which may start from one before it.
fn find(windows: &[NamedWindowDefinition], name: &Ident) -> Result<WindowSpec, SqlError> {
    let wanted = fold(name);
    let Some(at) = windows.iter().position(|w| fold(&w.0) == wanted) else {
        let message = format!("window \"{wanted}\" does not exist");
        return Err(SqlError::new(SqlState::UNDEFINED_OBJECT, message));
    };
    match &windows[at].1 {
        NamedWindowExpr::NamedWindow(other) => find(&windows[..at], other),
        NamedWindowExpr::WindowSpec(spec) => extended(&windows[..at], spec),
    }
}

/// A definition with what the window it starts from says.
fn extended(windows: &[NamedWindowDefinition], spec: &WindowSpec) -> Result<WindowSpec, SqlError> {
    let Some(name) = &spec.window_name else { return Ok(spec.clone()) };
    let base = find(windows, name)?;
    let refused = |what: &str| {
        let message = format!("cannot {what} of window \"{}\"", fold(name));
        Err(SqlError::new(SqlState("42P20"), message))
    };
    // What the frame leaves out stands there too.
    let (marks, own): (Vec<Expr>, Vec<Expr>) =
        spec.partition_by.iter().cloned().partition(leaves_out);
    if !own.is_empty() {
        return refused("override PARTITION BY clause");
    }
    if !spec.order_by.is_empty() && !base.order_by.is_empty() {
        return refused("override ORDER BY clause");
    }
    if base.window_frame.is_some() {
        return refused("copy the frame clause");
    }
    let order_by = if spec.order_by.is_empty() { base.order_by } else { spec.order_by.clone() };
    Ok(WindowSpec {
        window_name: None,
        partition_by: base.partition_by.into_iter().chain(marks).collect(),
        order_by,
        window_frame: spec.window_frame.clone(),
    })
}

/// The parser's mark of rows that a frame leaves out, for [`super::frames`].
fn leaves_out(e: &Expr) -> bool {
    matches!(e, Expr::Function(f) if f.name == ObjectName::from(vec![Ident::with_quote('"', EXCLUDE)]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bind::rewrites::testing::{assert_rewritten, rewritten};

    #[test]
    fn windows_are_written_out_where_a_list_names_them() {
        let sql = "SELECT sum(b) OVER (w ORDER BY c), count(*) OVER w FROM t \
                   WINDOW w AS (PARTITION BY a)";
        let expected = "SELECT sum(b) OVER (PARTITION BY a ORDER BY c), \
                        count(*) OVER (PARTITION BY a) FROM t";
        assert_rewritten(WRITE_OUT_WINDOWS, &[(sql, expected)]);
    }

    #[test]
    fn order_by_names_the_windows_of_its_select() {
        let sql = "SELECT 1 FROM t WINDOW w AS (PARTITION BY a) ORDER BY sum(b) OVER w";
        let expected = "SELECT 1 FROM t WINDOW w AS (PARTITION BY a) \
                        ORDER BY sum(b) OVER (PARTITION BY a)";
        assert_rewritten(WRITE_OUT_ORDER_WINDOWS, &[(sql, expected)]);
    }

    #[test]
    fn a_window_overrides_nothing_of_the_one_it_starts_from() {
        let sql = "SELECT sum(a) OVER (w PARTITION BY b) FROM t WINDOW w AS (ORDER BY a)";
        assert_eq!(rewritten(WRITE_OUT_WINDOWS, sql).unwrap_err().state, SqlState("42P20"));
        let missing = rewritten(WRITE_OUT_WINDOWS, "SELECT sum(a) OVER w FROM t").unwrap_err();
        assert_eq!(missing.state, SqlState::UNDEFINED_OBJECT);
    }
}
