//! What stands in FROM.

use sqlparser::ast::*;

use super::{Checked, NOWHERE, start, syntax, unsupported};
use crate::parser::joins::qualified_join;

pub fn joined(table: &TableWithJoins) -> Checked {
    // The relation has a hook of its own.
    let TableWithJoins { relation: _, joins } = table;
    joins.iter().try_for_each(join)
}

fn join(join: &Join) -> Checked {
    let Join { relation, global, join_operator } = join;
    let at = relation.span().start;
    syntax(*global, "GLOBAL", at)?;
    match join_operator {
        qualified_join!(c) => constraint(c),
        JoinOperator::CrossJoin(c) => match c {
            JoinConstraint::None => Ok(()),
            JoinConstraint::On(e) => syntax(true, "ON", e.span().start),
            JoinConstraint::Using(_) => syntax(true, "USING", NOWHERE),
            JoinConstraint::Natural => syntax(true, "CROSS", at),
        },
        JoinOperator::AsOf { match_condition: _, constraint: c } => constraint(c),
        JoinOperator::Semi(_) | JoinOperator::LeftSemi(_) | JoinOperator::RightSemi(_) => {
            syntax(true, "SEMI", at)
        }
        JoinOperator::Anti(_) | JoinOperator::LeftAnti(_) | JoinOperator::RightAnti(_) => {
            syntax(true, "ANTI", at)
        }
        JoinOperator::CrossApply | JoinOperator::OuterApply => syntax(true, "APPLY", at),
        JoinOperator::StraightJoin(_) => syntax(true, "STRAIGHT_JOIN", at),
        JoinOperator::ArrayJoin | JoinOperator::LeftArrayJoin | JoinOperator::InnerArrayJoin => {
            syntax(true, "ARRAY", at)
        }
    }
}

fn constraint(constraint: &JoinConstraint) -> Checked {
    match constraint {
        // A join without a condition is told where it is bound, with its place.
        JoinConstraint::On(_)
        | JoinConstraint::Using(_)
        | JoinConstraint::Natural
        | JoinConstraint::None => Ok(()),
    }
}

pub fn alias(alias: &TableAlias) -> Checked {
    let TableAlias { explicit: _, name: _, columns, at } = alias;
    for column in columns {
        let TableAliasColumnDef { name, data_type } = column;
        unsupported(data_type.is_some(), "types of an alias's columns", name.span.start)?;
    }
    let place = at.as_ref().map_or(NOWHERE, |at| at.span.start);
    syntax(at.is_some(), "AT", place)
}

pub fn factor(factor: &TableFactor) -> Checked {
    let named = |a: &Option<TableAlias>| a.as_ref().map_or(Ok(()), alias);
    let none = |feature: &str| unsupported(true, feature, factor.span().start);
    match factor {
        TableFactor::Table { .. } => table(factor),
        TableFactor::Derived { lateral: _, subquery, alias, sample } => {
            unsupported(sample.is_some(), "TABLESAMPLE", subquery.span().start)?;
            named(alias)
        }
        TableFactor::TableFunction { expr: _, alias: _ } => none("TABLE (…) in FROM"),
        TableFactor::Function { lateral: _, name: _, args: _, with_ordinality: _, alias } => {
            named(alias)
        }
        TableFactor::UNNEST {
            alias,
            array_exprs,
            with_offset,
            with_offset_alias,
            with_ordinality: _,
        } => {
            let at = start(array_exprs.last());
            syntax(*with_offset || with_offset_alias.is_some(), "WITH", at)?;
            named(alias)
        }
        TableFactor::NestedJoin { table_with_joins, alias } => {
            joined(table_with_joins)?;
            named(alias)
        }
        TableFactor::JsonTable { .. } | TableFactor::OpenJsonTable { .. } => none("JSON_TABLE"),
        TableFactor::Pivot { .. } => none("PIVOT"),
        TableFactor::Unpivot { .. } => none("UNPIVOT"),
        TableFactor::MatchRecognize { .. } => none("MATCH_RECOGNIZE"),
        TableFactor::XmlTable { .. } => none("XMLTABLE"),
        TableFactor::SemanticView { .. } => none("SEMANTIC_VIEW"),
    }
}

fn table(factor: &TableFactor) -> Checked {
    let TableFactor::Table {
        name,
        alias: named,
        args,
        with_hints,
        // Of PROCTIME(), or refused where it is bound.
        version: _,
        // Read, or refused by name, where it is bound.
        with_ordinality: _,
        partitions,
        json_path,
        sample,
        index_hints,
    } = factor
    else {
        return Ok(());
    };
    let at = name.span().start;
    if let Some(args) = args {
        let TableFunctionArgs { args: _, settings } = args;
        syntax(settings.is_some(), "SETTINGS", at)?;
    }
    syntax(!with_hints.is_empty(), "WITH", start(with_hints))?;
    syntax(!partitions.is_empty(), "PARTITION", NOWHERE)?;
    syntax(json_path.is_some(), "[", NOWHERE)?;
    unsupported(sample.is_some(), "TABLESAMPLE", at)?;
    syntax(!index_hints.is_empty(), "INDEX", NOWHERE)?;
    named.as_ref().map_or(Ok(()), alias)
}

/// The table that a statement changes: by its name, and perhaps another one.
pub fn changed(table: &TableWithJoins) -> Checked {
    let TableWithJoins { relation, joins } = table;
    syntax(!joins.is_empty(), "JOIN", joins.first().map_or(NOWHERE, |j| j.relation.span().start))?;
    let at = relation.span().start;
    let TableFactor::Table { name: _, alias, args, version, with_ordinality, .. } = relation else {
        return syntax(true, "(", at);
    };
    syntax(args.is_some(), "(", relation.span().end)?;
    syntax(version.is_some(), "FOR", relation.span().end)?;
    syntax(*with_ordinality, "WITH", relation.span().end)?;
    let columns = alias.as_ref().map_or(&[][..], |alias| &alias.columns);
    syntax(!columns.is_empty(), "(", columns.first().map_or(at, |c| c.name.span.start))
}
