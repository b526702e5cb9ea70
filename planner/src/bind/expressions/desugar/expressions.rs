//! Expressions, each rewritten after its parts, and the constructs that are calls by another name.

use millrace_common::{SqlError, SqlState};
use sqlparser::ast::*;

use super::calls::number;
use super::ops::{Op, binary, call, null, ours, resolved, string, take};
use super::{calls, comparisons, literals, patterns, subscripts};
use crate::bind::SessionInfo;
use crate::bind::names::fold;
use crate::bind::rewrites::ast::AstRewrite;

/// Spells out expressions in terms whose types are known when they are planned.
pub const SPELL_OUT_EXPRESSIONS: AstRewrite = AstRewrite {
    name: "spell out expressions",
    expr_done: |expr, cx| {
        cx.copies.within(expr)?;
        rewrite(expr, cx.session)
    },
    ..AstRewrite::NONE
};

fn rewrite(expr: &mut Expr, session: &SessionInfo) -> Result<(), SqlError> {
    let new = match expr {
        Expr::Cast { .. } | Expr::TypedString(_) => match literals::moment(expr, session)? {
            Some(moment) => Some(moment),
            None => literals::rewrite(expr)?,
        },
        Expr::Value(_) | Expr::UnaryOp { .. } | Expr::Interval(_) | Expr::Array(_) => {
            literals::rewrite(expr)?
        }
        Expr::SimilarTo { .. }
        | Expr::AnyOp { .. }
        | Expr::AllOp { .. }
        | Expr::Like { .. }
        | Expr::ILike { .. } => patterns::rewrite(expr)?,
        Expr::InSubquery { .. }
        | Expr::Between { .. }
        | Expr::IsNull(_)
        | Expr::IsNotNull(_)
        | Expr::IsDistinctFrom(_, _)
        | Expr::IsNotDistinctFrom(_, _)
        | Expr::InList { .. }
        | Expr::BinaryOp { .. } => comparisons::rewrite(expr)?,
        Expr::Function(f) => calls::rewrite(f, session)?,
        Expr::CompoundFieldAccess { root, access_chain } => {
            subscripts::rewrite(root, access_chain)?
        }
        Expr::Collate { expr: e, collation } => {
            check_collation(collation)?;
            Some(take(e))
        }
        _ => construct(expr),
    };
    if let Some(new) = new {
        *expr = new;
    }
    Ok(())
}

/// 42704 for an order of texts other than that of their bytes.
fn check_collation(name: &ObjectName) -> Result<(), SqlError> {
    let parts: Vec<String> = name.0.iter().filter_map(|p| p.as_ident()).map(fold).collect();
    let known = match parts.as_slice() {
        [name] => name.as_str(),
        [schema, name] if schema == "pg_catalog" => name.as_str(),
        _ => "",
    };
    if matches!(known, "C" | "POSIX" | "ucs_basic" | "default") {
        return Ok(());
    }
    let shown = parts.join(".");
    let message = format!("collation \"{shown}\" for encoding \"UTF8\" does not exist");
    let error = SqlError::new(SqlState::UNDEFINED_OBJECT, message);
    Err(error.with_hint("Texts are ordered by their bytes, which is COLLATE \"C\"."))
}

/// CASE, EXTRACT and their like; `None`: it stays as it is.
fn construct(expr: &mut Expr) -> Option<Expr> {
    Some(match expr {
        Expr::Trim { expr: e, trim_where, trim_what, trim_characters: None } => {
            let name = match trim_where {
                Some(TrimWhereField::Leading) => "ltrim",
                Some(TrimWhereField::Trailing) => "rtrim",
                _ => "btrim",
            };
            let what = trim_what.as_mut().map(|w| take(w));
            call(name, [take(e)].into_iter().chain(what))
        }
        Expr::Case { operand, conditions, else_result, .. } => {
            let operand = operand.take();
            let mut parts = Vec::with_capacity(conditions.len() * 2 + 1);
            for when in conditions.iter_mut() {
                let value = take(&mut when.condition);
                parts.push(match &operand {
                    Some(o) => binary(o.as_ref().clone(), BinaryOperator::Eq, value),
                    None => value,
                });
                parts.push(take(&mut when.result));
            }
            parts.extend(else_result.take().map(|e| *e));
            resolved("case", parts)
        }
        Expr::Extract { field, expr: e, .. } => {
            let field = field.to_string().trim_matches('\'').to_lowercase();
            call("extract", [string(field), take(e)])
        }
        Expr::Position { expr: e, r#in } => call("position", [take(r#in), take(e)]),
        Expr::Substring { expr: e, substring_from, substring_for, .. } => {
            let from = substring_from.as_mut().map(|f| take(f));
            let from = from.unwrap_or_else(|| ours(Op::Number, string("1"), null()));
            let length = substring_for.as_mut().map(|f| take(f));
            call("substring", [take(e), from].into_iter().chain(length))
        }
        Expr::Overlay { expr: e, overlay_what, overlay_from, overlay_for } => {
            let length = overlay_for.as_mut().map(|f| take(f));
            let args = [take(e), take(overlay_what), take(overlay_from)];
            call("overlay", args.into_iter().chain(length))
        }
        Expr::Floor { expr: e, field: CeilFloorKind::DateTimeField(DateTimeField::NoDateTime) } => {
            call("floor", [number(take(e))])
        }
        Expr::Ceil { expr: e, field: CeilFloorKind::DateTimeField(DateTimeField::NoDateTime) } => {
            call("ceil", [number(take(e))])
        }
        Expr::AtTimeZone { timestamp, time_zone } => {
            call("timezone", [take(time_zone), take(timestamp)])
        }
        _ => return None,
    })
}
