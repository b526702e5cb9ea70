//! ROLLUP and CUBE that name a column twice, spelled out as the sets of different columns that they are; and of plain
//! expressions that are named twice, one.

use millrace_common::SqlError;
use sqlparser::ast::{Expr, GroupByExpr, Select, SelectItem, Value};

use super::distinct_on::has_merged;
use crate::bind::expressions::desugar::Copies;
use crate::bind::ordering::order::same;
use crate::bind::rewrites::ast::AstRewrite;

/// More sets than this are not spelled out.
const MAX_COLUMNS: usize = 6;

/// Spells out ROLLUP and CUBE that name a column twice.
pub const SPELL_OUT_GROUPING: AstRewrite = AstRewrite {
    name: "spell out grouping",
    select: |select, cx| spell_out(select, &mut cx.copies),
    ..AstRewrite::NONE
};

fn spell_out(select: &mut Select, copies: &mut Copies) -> Result<(), SqlError> {
    let exact = has_merged(select);
    let GroupByExpr::Expressions(exprs, _) = &mut select.group_by else {
        return Ok(());
    };
    drop_repeated(exprs, &select.projection, exact);
    for e in exprs {
        let sets = match &*e {
            Expr::Rollup(parts) if repeats(parts, exact) => {
                copies.again(parts, parts.len())?;
                rolled_up(parts)
            }
            Expr::Cube(parts) if repeats(parts, exact) && parts.len() <= MAX_COLUMNS => {
                copies.again(parts, 1 << parts.len())?;
                cube(parts)
            }
            _ => continue,
        };
        *e = Expr::GroupingSets(sets.into_iter().map(|set| different(set, exact)).collect());
    }
    Ok(())
}

/// Leaves out what is grouped by already, perhaps by its position in the list.
fn drop_repeated(exprs: &mut Vec<Expr>, items: &[SelectItem], exact: bool) {
    let sets = |e: &Expr| matches!(e, Expr::Rollup(_) | Expr::Cube(_) | Expr::GroupingSets(_));
    if exprs.len() < 2 || exprs.iter().any(sets) {
        return;
    }
    let mut seen: Vec<Expr> = Vec::new();
    exprs.retain(|e| {
        let e = placed(e, items).unwrap_or(e);
        let new = !seen.iter().any(|s| same(s, e, exact));
        seen.extend(new.then(|| e.clone()));
        new
    });
}

/// What stands at a position of a list without `*`.
fn placed<'a>(e: &Expr, items: &'a [SelectItem]) -> Option<&'a Expr> {
    let Expr::Value(value) = e else { return None };
    let Value::Number(text, _) = &value.value else { return None };
    let at = text.parse::<usize>().ok()?.checked_sub(1)?;
    let plain = |item: &'a SelectItem| match item {
        SelectItem::UnnamedExpr(e) | SelectItem::ExprWithAlias { expr: e, .. } => Some(e),
        _ => None,
    };
    items.iter().map(plain).collect::<Option<Vec<_>>>()?.get(at).copied()
}

fn repeats(parts: &[Vec<Expr>], exact: bool) -> bool {
    let all = parts.concat();
    let count = all.len();
    different(all, exact).len() < count
}

fn different(exprs: Vec<Expr>, exact: bool) -> Vec<Expr> {
    let mut different: Vec<Expr> = Vec::new();
    for e in exprs {
        if !different.iter().any(|d| same(d, &e, exact)) {
            different.push(e);
        }
    }
    different
}

fn rolled_up(parts: &[Vec<Expr>]) -> Vec<Vec<Expr>> {
    (0..=parts.len()).rev().map(|n| parts[..n].concat()).collect()
}

fn cube(parts: &[Vec<Expr>]) -> Vec<Vec<Expr>> {
    let all = (0..1usize << parts.len()).rev();
    let set = |chosen: usize| -> Vec<Expr> {
        let parts = parts.iter().enumerate().filter(|(i, _)| chosen & (1 << i) != 0);
        parts.flat_map(|(_, part)| part.iter().cloned()).collect()
    };
    all.map(set).collect()
}

#[cfg(test)]
mod tests {
    use super::SPELL_OUT_GROUPING;
    use crate::bind::rewrites::testing::assert_rewritten;

    #[test]
    fn sets_have_each_column_once() {
        let cases = [
            (
                "SELECT 1 FROM t GROUP BY ROLLUP (a, b, a)",
                "SELECT 1 FROM t GROUP BY GROUPING SETS ((a, b), (a, b), (a), ())",
            ),
            ("SELECT 1 FROM t GROUP BY a, b, a", "SELECT 1 FROM t GROUP BY a, b"),
            ("SELECT 1 FROM t GROUP BY ROLLUP (a, b)", "SELECT 1 FROM t GROUP BY ROLLUP (a, b)"),
        ];
        assert_rewritten(SPELL_OUT_GROUPING, &cases);
    }
}
