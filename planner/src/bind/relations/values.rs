//! VALUES lists whose rows have expressions of several kinds in one column.
//!
//! PostgreSQL resolves the type of such a column as that of a UNION's: literals of unknown type take the type of
//! the others, and these must have one in common. Each element becomes a call with the others as witnesses
//! ([`VALUES`]), which [`crate::bind::expressions::operators`] resolves where types are known.

use std::ops::ControlFlow;
use std::sync::Arc;

use datafusion::arrow::datatypes::FieldRef;
use datafusion::common::tree_node::Transformed;
use datafusion::logical_expr::{Expr, LogicalPlan, Values};
use millrace_common::SqlError;
use millrace_functions::error::sql_error_from_datafusion;
use millrace_functions::tree::WalkPlan;
use sqlparser::ast::{
    CastKind, Expr as Ast, Ident, Query, SelectItem, SetExpr, SetOperator, SetQuantifier,
    UnaryOperator, Value, Values as AstValues, VisitorMut,
};

use crate::bind::expressions::desugar::{Copies, Op, VALUES, resolved, size, take};
use crate::bind::rewrites::ast::AstRewrite;
use crate::bind::rewrites::plan::PlanRewrite;
use crate::parser::walk;

/// Gives the columns of VALUES their names.
pub const NAME_VALUES: PlanRewrite = PlanRewrite::new("name values", |plan, _| name(plan));

/// Gives the columns of VALUES the names that an alias has for them, in place of a projection above: DataFusion loses
/// the names when it takes a correlated subquery apart.
fn name(plan: LogicalPlan) -> Result<LogicalPlan, SqlError> {
    let named = plan.rewrite_up_with_subqueries(|node| {
        let LogicalPlan::Projection(p) = &node else { return Ok(Transformed::no(node)) };
        let LogicalPlan::Values(values) = p.input.as_ref() else {
            return Ok(Transformed::no(node));
        };
        let same = |(e, field): (&Expr, &FieldRef)| match e {
            Expr::Alias(a) if a.relation.is_none() => {
                matches!(&*a.expr, Expr::Column(c) if c.name == *field.name())
            }
            _ => false,
        };
        let fields = values.schema.fields();
        if p.expr.len() != fields.len() || !p.expr.iter().zip(fields).all(same) {
            return Ok(Transformed::no(node));
        }
        let schema = Arc::clone(&p.schema);
        Ok(Transformed::yes(LogicalPlan::Values(Values { schema, ..values.clone() })))
    });
    named.map(|t| t.data).map_err(sql_error_from_datafusion)
}

/// Kinds of expressions in a column; beyond this many it is left to itself.
const MAX_KINDS: usize = 8;

/// Marks the columns of VALUES that have expressions of several kinds.
pub const TYPE_VALUES: AstRewrite = AstRewrite {
    name: "type values",
    query: |query, cx| unify(&mut query.body, &mut cx.copies),
    ..AstRewrite::NONE
};

/// Marks the columns of mixed kinds in the VALUES lists of a query; subqueries have their own turn. A list with
/// subqueries in it becomes a UNION ALL of its rows, because they are not evaluated in VALUES.
fn unify(body: &mut SetExpr, copies: &mut Copies) -> Result<(), SqlError> {
    match body {
        SetExpr::Values(values) if values.rows.iter().any(|r| r.iter().any(has_subquery)) => {
            if let Some(union) = union_of(values)? {
                *body = union;
            }
        }
        SetExpr::Values(values) => mark(values, copies)?,
        SetExpr::SetOperation { left, right, .. } => {
            unify(left, copies)?;
            unify(right, copies)?;
        }
        _ => {}
    }
    Ok(())
}

fn has_subquery(e: &Ast) -> bool {
    struct Has;
    impl VisitorMut for Has {
        type Break = ();

        fn pre_visit_query(&mut self, _: &mut Query) -> ControlFlow<()> {
            ControlFlow::Break(())
        }
    }
    walk::visit_mut(&mut e.clone(), &mut Has).is_break()
}

fn union_of(values: &mut AstValues) -> Result<Option<SetExpr>, SqlError> {
    let mut union: Option<SetExpr> = None;
    for row in &mut values.rows {
        let mut body = crate::parser::parse_query("SELECT 1")?.body;
        if let SetExpr::Select(select) = body.as_mut() {
            let named = row.iter_mut().enumerate().map(|(i, expr)| SelectItem::ExprWithAlias {
                expr: take(expr),
                alias: Ident::new(format!("column{}", i + 1)),
            });
            select.projection = named.collect();
        }
        union = Some(match union {
            None => *body,
            Some(left) => SetExpr::SetOperation {
                op: SetOperator::Union,
                set_quantifier: SetQuantifier::All,
                left: Box::new(left),
                right: body,
            },
        });
    }
    Ok(union)
}

#[derive(Clone, PartialEq)]
enum Kind {
    /// NULL, which is of every type.
    Null,
    /// A literal of unknown type.
    Unknown,
    Number,
    /// Anything else, by its cast's type or its text.
    Other(String),
}

fn kind(e: &Ast) -> Kind {
    match e {
        // Of its column's type, whatever it is made of.
        Ast::BinaryOp { op, .. } if matches!(Op::decode(op), Some(Op::Assign(_))) => {
            Kind::Other(op.to_string())
        }
        Ast::Nested(inner) => kind(inner),
        Ast::UnaryOp { op: UnaryOperator::Minus | UnaryOperator::Plus, expr } => kind(expr),
        Ast::Value(v) => match &v.value {
            Value::Null => Kind::Null,
            Value::Number(_, _) => Kind::Number,
            Value::Boolean(_) => Kind::Other("boolean".into()),
            Value::SingleQuotedString(_)
            | Value::EscapedStringLiteral(_)
            | Value::UnicodeStringLiteral(_)
            | Value::DollarQuotedString(_) => Kind::Unknown,
            other => Kind::Other(other.to_string()),
        },
        Ast::TypedString(t) => Kind::Other(t.data_type.to_string()),
        Ast::Interval(_) => Kind::Other("INTERVAL".into()),
        Ast::Cast { kind: CastKind::Cast | CastKind::DoubleColon, data_type, .. } => {
            Kind::Other(data_type.to_string())
        }
        other => Kind::Other(other.to_string()),
    }
}

/// Larger expressions than this are counted where each row gets a copy of them.
const SMALL: usize = 16;

fn mark(values: &mut AstValues, copies: &mut Copies) -> Result<(), SqlError> {
    let width = values.rows.first().map_or(0, |row| row.content.len());
    if values.rows.iter().any(|row| row.content.len() != width) {
        return Ok(()); // An error, which the planner words.
    }
    for column in 0..width {
        let mut witnesses: Vec<(Kind, Ast)> = Vec::new();
        for row in &values.rows {
            let e = &row.content[column];
            let kind = kind(e);
            if kind != Kind::Null && !witnesses.iter().any(|(k, _)| *k == kind) {
                witnesses.push((kind, e.clone()));
            }
            if witnesses.len() > MAX_KINDS {
                break;
            }
        }
        if !(2..=MAX_KINDS).contains(&witnesses.len()) {
            continue;
        }
        for (_, e) in witnesses.iter().filter(|(_, e)| size(e) > SMALL) {
            copies.again(e, values.rows.len())?;
        }
        for row in &mut values.rows {
            let own = take(&mut row.content[column]);
            let others = witnesses.iter().map(|(_, e)| e.clone());
            row.content[column] = resolved(VALUES, std::iter::once(own).chain(others));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use millrace_common::SqlType;

    use crate::bind::rewrites::testing::{bound, rows};

    #[test]
    fn a_column_of_several_kinds_has_a_common_type() {
        assert_eq!(rows("VALUES (1), ('2')"), ["1", "2"]);
        assert_eq!(bound("VALUES (1), ('2')").unwrap().types, [SqlType::Int]);
    }
}
