//! Queries: their clauses, SELECT lists, ORDER BY and LIMIT.

use sqlparser::ast::*;

use super::{Checked, NOWHERE, functions, start, syntax, tables, unsupported};

pub fn query(query: &Query) -> Checked {
    let Query {
        with,
        body,
        order_by,
        limit_clause,
        fetch,
        // Refused where it is bound, which knows what to do instead.
        locks: _,
        for_clause,
        settings,
        format_clause,
        pipe_operators,
    } = query;
    with.as_ref().map_or(Ok(()), with_clause)?;
    set_expr(body)?;
    order_by.as_ref().map_or(Ok(()), order_clause)?;
    limit_clause.as_ref().map_or(Ok(()), limit)?;
    if let Some(fetch) = fetch {
        let Fetch { with_ties: _, percent: _, quantity: _ } = fetch;
    }
    syntax(for_clause.is_some(), "FOR", NOWHERE)?;
    syntax(settings.is_some(), "SETTINGS", NOWHERE)?;
    syntax(format_clause.is_some(), "FORMAT", NOWHERE)?;
    syntax(!pipe_operators.is_empty(), "|>", NOWHERE)
}

fn with_clause(with: &With) -> Checked {
    let With { with_token: _, recursive: _, cte_tables } = with;
    for cte in cte_tables {
        // MATERIALIZED says how, not what.
        let Cte { alias, query: _, from, materialized: _, closing_paren_token: _ } = cte;
        tables::alias(alias)?;
        let at = from.as_ref().map_or(NOWHERE, |from| from.span.start);
        syntax(from.is_some(), "FROM", at)?;
    }
    Ok(())
}

fn set_expr(body: &SetExpr) -> Checked {
    match body {
        // Looked at by themselves.
        SetExpr::Select(_)
        | SetExpr::Query(_)
        | SetExpr::Insert(_)
        | SetExpr::Update(_)
        | SetExpr::Delete(_) => Ok(()),
        SetExpr::SetOperation { left, op, set_quantifier, right } => {
            match op {
                SetOperator::Union | SetOperator::Except | SetOperator::Intersect => {}
                SetOperator::Minus => syntax(true, "MINUS", right.span().start)?,
            }
            match set_quantifier {
                SetQuantifier::All | SetQuantifier::Distinct | SetQuantifier::None => {}
                SetQuantifier::ByName
                | SetQuantifier::AllByName
                | SetQuantifier::DistinctByName => syntax(true, "BY", right.span().start)?,
            }
            set_expr(left)?;
            set_expr(right)
        }
        SetExpr::Values(values) => {
            let Values { explicit_row, value_keyword, rows } = values;
            let at = start(rows.first().and_then(|row| row.content.first()));
            syntax(*explicit_row, "ROW", at)?;
            syntax(*value_keyword, "VALUE", at)
        }
        SetExpr::Merge(_) => unsupported(true, "MERGE", NOWHERE),
        SetExpr::Table(_) => unsupported(true, "TABLE as a query", NOWHERE),
    }
}

fn order_clause(order_by: &OrderBy) -> Checked {
    let OrderBy { kind, interpolate } = order_by;
    syntax(interpolate.is_some(), "INTERPOLATE", NOWHERE)?;
    match kind {
        OrderByKind::All(_) => syntax(true, "ALL", NOWHERE),
        OrderByKind::Expressions(exprs) => order(exprs),
    }
}

pub fn order(exprs: &[OrderByExpr]) -> Checked {
    for by in exprs {
        let OrderByExpr { expr, options, with_fill } = by;
        let OrderByOptions { asc: _, nulls_first: _ } = options;
        syntax(with_fill.is_some(), "FILL", expr.span().start)?;
    }
    Ok(())
}

fn limit(clause: &LimitClause) -> Checked {
    match clause {
        LimitClause::LimitOffset { limit: _, offset, limit_by } => {
            if let Some(offset) = offset {
                // ROW and ROWS mean nothing.
                let Offset { value: _, rows: _ } = offset;
            }
            syntax(!limit_by.is_empty(), "BY", start(limit_by))
        }
        LimitClause::OffsetCommaLimit { offset: _, limit } => syntax(true, ",", start([limit])),
    }
}

pub fn select(select: &Select) -> Checked {
    let Select {
        select_token: _,
        // Comments, as they are in PostgreSQL.
        optimizer_hints: _,
        distinct,
        select_modifiers,
        top,
        top_before_distinct: _,
        projection,
        exclude,
        // Refused where it is bound, which knows what to do instead.
        into: _,
        from,
        lateral_views,
        prewhere,
        selection: _,
        connect_by,
        group_by,
        cluster_by,
        distribute_by,
        sort_by,
        having: _,
        named_window,
        qualify: _,
        window_before_qualify: _,
        value_table_mode,
        flavor,
    } = select;
    match distinct {
        None | Some(Distinct::All | Distinct::Distinct | Distinct::On(_)) => {}
    }
    items(projection)?;
    from.iter().try_for_each(tables::joined)?;
    match group_by {
        GroupByExpr::All(_) => syntax(true, "ALL", NOWHERE)?,
        GroupByExpr::Expressions(exprs, modifiers) => {
            syntax(!modifiers.is_empty(), "WITH", start(exprs.last()))?
        }
    }
    for NamedWindowDefinition(_, window) in named_window {
        match window {
            NamedWindowExpr::NamedWindow(_) => {}
            NamedWindowExpr::WindowSpec(spec) => functions::window(spec)?,
        }
    }
    let modified = select_modifiers.as_ref().is_some_and(|m| *m != SelectModifiers::default());
    unsupported(modified, "a modifier of SELECT", NOWHERE)?;
    syntax(top.is_some(), "TOP", NOWHERE)?;
    syntax(exclude.is_some(), "EXCLUDE", NOWHERE)?;
    syntax(!lateral_views.is_empty(), "VIEW", NOWHERE)?;
    syntax(prewhere.is_some(), "PREWHERE", start(prewhere))?;
    syntax(!connect_by.is_empty(), "CONNECT", NOWHERE)?;
    syntax(!cluster_by.is_empty(), "CLUSTER", start(cluster_by))?;
    syntax(!distribute_by.is_empty(), "DISTRIBUTE", start(distribute_by))?;
    syntax(!sort_by.is_empty(), "SORT", start(sort_by.first().map(|by| &by.expr)))?;
    syntax(value_table_mode.is_some(), "AS", NOWHERE)?;
    match flavor {
        SelectFlavor::Standard => Ok(()),
        SelectFlavor::FromFirst | SelectFlavor::FromFirstNoSelect => syntax(true, "FROM", NOWHERE),
    }
}

/// Of a SELECT list, or of RETURNING.
pub fn items(items: &[SelectItem]) -> Checked {
    for item in items {
        match item {
            SelectItem::UnnamedExpr(_) => {}
            SelectItem::ExprWithAlias { expr: _, alias: _ } => {}
            SelectItem::ExprWithAliases { expr, aliases: _ } => syntax(true, "(", expr.span().end)?,
            SelectItem::QualifiedWildcard(kind, options) => {
                match kind {
                    SelectItemQualifiedWildcardKind::ObjectName(_) => {}
                    SelectItemQualifiedWildcardKind::Expr(e) => {
                        unsupported(true, "all fields of a row (.*)", e.span().start)?
                    }
                }
                wildcard(options)?
            }
            SelectItem::Wildcard(options) => wildcard(options)?,
        }
    }
    Ok(())
}

pub fn wildcard(options: &WildcardAdditionalOptions) -> Checked {
    let WildcardAdditionalOptions {
        wildcard_token,
        opt_ilike,
        opt_exclude,
        opt_except,
        opt_replace,
        opt_rename,
        opt_alias,
    } = options;
    let at = wildcard_token.0.span.end;
    let no = |present: bool, word: &str| unsupported(present, &format!("{word} after *"), at);
    no(opt_ilike.is_some(), "ILIKE")?;
    no(opt_exclude.is_some(), "EXCLUDE")?;
    no(opt_except.is_some(), "EXCEPT")?;
    no(opt_replace.is_some(), "REPLACE")?;
    no(opt_rename.is_some(), "RENAME")?;
    no(opt_alias.is_some(), "a name")
}
