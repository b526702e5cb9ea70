//! CREATE TABLE and CREATE SOURCE: columns and constraints.

use sqlparser::ast::*;

use super::{Checked, NOWHERE, start, syntax, unsupported, visit};
use crate::ast::TableDefinition;

pub fn table(table: &TableDefinition) -> Checked {
    for column in &table.columns {
        let ColumnDef { name: _, data_type: _, options } = column;
        for each in options {
            // Names of constraints are not kept.
            let ColumnOptionDef { name: _, option: what } = each;
            option(what)?;
            visit(what)?;
        }
    }
    table.constraints.iter().try_for_each(constraint)?;
    if let Some(watermark) = &table.watermark {
        visit(&watermark.expr)?;
    }
    table.query.as_ref().map_or(Ok(()), |query| visit(&query.query))
}

fn option(option: &ColumnOption) -> Checked {
    match option {
        ColumnOption::Null | ColumnOption::NotNull | ColumnOption::Default(_) => Ok(()),
        ColumnOption::PrimaryKey(key) => primary_key(key),
        ColumnOption::Generated {
            generated_as: _,
            // Without an expression it is an identity column, which is refused by name.
            sequence_options: _,
            generation_expr,
            generation_expr_mode,
            generated_keyword: _,
        } => match generation_expr_mode {
            None | Some(GeneratedExpressionMode::Stored) => Ok(()),
            Some(GeneratedExpressionMode::Virtual) => {
                unsupported(true, "a generated column that is VIRTUAL", start(generation_expr))
            }
        },
        // Refused by name where the column is made.
        ColumnOption::Materialized(_)
        | ColumnOption::Ephemeral(_)
        | ColumnOption::Alias(_)
        | ColumnOption::Unique(_)
        | ColumnOption::ForeignKey(_)
        | ColumnOption::Check(_)
        | ColumnOption::DialectSpecific(_)
        | ColumnOption::CharacterSet(_)
        | ColumnOption::Collation(_)
        | ColumnOption::Comment(_)
        | ColumnOption::OnUpdate(_)
        | ColumnOption::Options(_)
        | ColumnOption::Identity(_)
        | ColumnOption::OnConflict(_)
        | ColumnOption::Policy(_)
        | ColumnOption::Tags(_)
        | ColumnOption::Srid(_)
        | ColumnOption::Invisible => Ok(()),
    }
}

fn constraint(constraint: &TableConstraint) -> Checked {
    match constraint {
        TableConstraint::PrimaryKey(key) => primary_key(key),
        // Refused by name where the table is made.
        TableConstraint::Unique(_)
        | TableConstraint::ForeignKey(_)
        | TableConstraint::Check(_)
        | TableConstraint::Index(_)
        | TableConstraint::FulltextOrSpatial(_)
        | TableConstraint::PrimaryKeyUsingIndex(_)
        | TableConstraint::UniqueUsingIndex(_) => Ok(()),
    }
}

fn primary_key(key: &PrimaryKeyConstraint) -> Checked {
    let PrimaryKeyConstraint {
        name: _,
        index_name,
        index_type,
        columns,
        index_options,
        characteristics,
    } = key;
    syntax(index_name.is_some() || index_type.is_some(), "USING", NOWHERE)?;
    syntax(!index_options.is_empty(), "USING", NOWHERE)?;
    for column in columns {
        let IndexColumn { column: OrderByExpr { expr, options, with_fill }, operator_class } =
            column;
        let OrderByOptions { asc, nulls_first } = options;
        let at = expr.span().end;
        syntax(*asc == Some(true), "ASC", at)?;
        syntax(*asc == Some(false), "DESC", at)?;
        syntax(nulls_first.is_some(), "NULLS", at)?;
        syntax(with_fill.is_some(), "WITH", at)?;
        syntax(operator_class.is_some(), "OPCLASS", at)?;
    }
    let Some(ConstraintCharacteristics { deferrable, initially, enforced }) = characteristics
    else {
        return Ok(());
    };
    let later = matches!(initially, Some(DeferrableInitial::Deferred));
    unsupported(*deferrable == Some(true) || later, "a primary key that is DEFERRABLE", NOWHERE)?;
    syntax(enforced.is_some(), "ENFORCED", NOWHERE)
}
