//! Expressions.

use sqlparser::ast::*;

use super::{Checked, functions, start, syntax, unsupported};

pub fn check(e: &Expr) -> Checked {
    let at = || start([e]);
    let no = |feature: &str| unsupported(true, feature, at());
    match e {
        Expr::Function(f) => functions::call(f),
        Expr::Cast { kind, expr: _, data_type: _, array, format } => {
            match kind {
                CastKind::Cast | CastKind::DoubleColon => {}
                CastKind::TryCast => syntax(true, "TRY_CAST", at())?,
                CastKind::SafeCast => syntax(true, "SAFE_CAST", at())?,
            }
            syntax(*array, "ARRAY", at())?;
            syntax(format.is_some(), "FORMAT", at())
        }
        Expr::Ceil { expr: _, field } | Expr::Floor { expr: _, field } => match field {
            CeilFloorKind::DateTimeField(DateTimeField::NoDateTime) => Ok(()),
            CeilFloorKind::DateTimeField(_) | CeilFloorKind::Scale(_) => {
                no("CEIL and FLOOR to a field or scale")
            }
        },
        Expr::Array(Array { elem: _, named: _ }) => Ok(()),
        Expr::Interval(Interval {
            value: _,
            leading_field: _,
            leading_precision: _,
            last_field: _,
            fractional_seconds_precision: _,
        }) => Ok(()),
        Expr::TypedString(TypedString { data_type: _, value: _, uses_odbc_syntax: _ }) => Ok(()),
        Expr::CompoundFieldAccess { root: _, access_chain } => {
            access_chain.iter().try_for_each(access)
        }
        Expr::Case { case_token: _, end_token: _, operand: _, conditions, else_result: _ } => {
            for CaseWhen { condition: _, result: _ } in conditions {}
            Ok(())
        }
        Expr::JsonAccess { .. } => no("access to a document by a path after ':'"),
        Expr::IsNormalized { .. } => no("IS NORMALIZED"),
        Expr::InUnnest { .. } => syntax(true, "UNNEST", at()),
        Expr::RLike { .. } => syntax(true, "RLIKE", at()),
        Expr::Convert { .. } => no("CONVERT"),
        Expr::Prefixed { .. } => no("a string with a character set"),
        Expr::Struct { .. } | Expr::Named { .. } => no("STRUCT"),
        Expr::Dictionary(_) | Expr::Map(_) => no("a map"),
        Expr::MatchAgainst { .. } => no("MATCH … AGAINST"),
        Expr::OuterJoin(_) => no("the operator (+)"),
        Expr::Prior(_) => no("PRIOR"),
        Expr::Lambda(_) => no("a function within an expression"),
        Expr::MemberOf(_) => no("MEMBER OF"),
        other => used(other),
    }
}

fn access(access: &AccessExpr) -> Checked {
    match access {
        AccessExpr::Dot(_) => Ok(()),
        AccessExpr::Subscript(Subscript::Index { index: _ }) => Ok(()),
        AccessExpr::Subscript(Subscript::Slice { lower_bound: _, upper_bound: _, stride }) => {
            syntax(stride.is_some(), ":", start(stride))
        }
    }
}

/// Expressions all of whose parts are used.
fn used(e: &Expr) -> Checked {
    match e {
        Expr::Identifier(_)
        | Expr::CompoundIdentifier(_)
        | Expr::IsFalse(_)
        | Expr::IsNotFalse(_)
        | Expr::IsTrue(_)
        | Expr::IsNotTrue(_)
        | Expr::IsNull(_)
        | Expr::IsNotNull(_)
        | Expr::IsUnknown(_)
        | Expr::IsNotUnknown(_)
        | Expr::IsDistinctFrom(_, _)
        | Expr::IsNotDistinctFrom(_, _)
        | Expr::InList { expr: _, list: _, negated: _ }
        | Expr::InSubquery { expr: _, subquery: _, negated: _ }
        | Expr::Between { expr: _, negated: _, low: _, high: _ }
        | Expr::BinaryOp { left: _, op: _, right: _ }
        | Expr::Like { negated: _, any: _, expr: _, pattern: _, escape_char: _ }
        | Expr::ILike { negated: _, any: _, expr: _, pattern: _, escape_char: _ }
        | Expr::SimilarTo { negated: _, expr: _, pattern: _, escape_char: _ }
        | Expr::AnyOp { left: _, compare_op: _, right: _, is_some: _ }
        | Expr::AllOp { left: _, compare_op: _, right: _ }
        | Expr::UnaryOp { op: _, expr: _ }
        | Expr::AtTimeZone { timestamp: _, time_zone: _ }
        | Expr::Extract { field: _, syntax: _, expr: _ }
        | Expr::Position { expr: _, r#in: _ }
        | Expr::Substring {
            expr: _,
            substring_from: _,
            substring_for: _,
            special: _,
            shorthand: _,
        }
        | Expr::Trim { trim_where: _, trim_what: _, expr: _, trim_characters: _ }
        | Expr::Overlay { expr: _, overlay_what: _, overlay_from: _, overlay_for: _ }
        | Expr::Collate { expr: _, collation: _ }
        | Expr::Nested(_)
        | Expr::Value(_)
        | Expr::Exists { subquery: _, negated: _ }
        | Expr::Subquery(_)
        | Expr::GroupingSets(_)
        | Expr::Cube(_)
        | Expr::Rollup(_)
        | Expr::Tuple(_)
        | Expr::Wildcard(_)
        | Expr::QualifiedWildcard(_, _) => Ok(()),
        other => unsupported(true, &format!("the expression {other}"), start([other])),
    }
}
