//! CREATE TABLE, CREATE TABLE AS, CREATE SOURCE.

use millrace_common::{SqlError, SqlState, SqlType};
use millrace_planner::Binder;
use millrace_planner::ast::{ConflictAction, TableDefinition};
use millrace_planner::bind::stored_expressions::{self, Kept};
use millrace_planner::parser::folded;
use millrace_rpc::catalog::{
    Column, ColumnType, OnConflict, Relation, RelationKind, RowStorage, Watermark,
};
use sqlparser::ast::{ColumnDef, ColumnOption, DataType, Expr, IndexColumn, TableConstraint};

use super::{Existing, check_name, create, generated, source, undo};
use crate::dml::rewrite;
use crate::query::SessionCatalog;
use crate::query::catalog_view::fold;
use crate::secrets::masked_definition;
use crate::session::Session;

/// The hidden key of relations without one.
pub const ROW_ID: &str = "_row_id";

pub async fn create_table(
    session: &mut Session,
    def: &TableDefinition,
    text: &str,
) -> Result<String, SqlError> {
    let connector = def.options.iter().any(|(name, _)| name == "connector");
    if connector && def.query.is_some() {
        return Err(SqlError::unsupported("CREATE TABLE … AS with a connector"));
    }
    if !connector && (!def.options.is_empty() || def.format.is_some() || !def.includes.is_empty()) {
        return Err(SqlError::unsupported("CREATE TABLE … WITH options without a connector"));
    }
    if let Some(query) = &def.query {
        return create_table_as(session, def, query, text).await;
    }
    let Some(mut relation) = build(session, def, RelationKind::Table, text)? else {
        return Ok("CREATE TABLE".to_owned());
    };
    check_defaults(session, &relation)?;
    if connector {
        source::check_table(session, &mut relation, def)?;
    }
    create(session, relation, 1, def.or_replace).await?;
    Ok("CREATE TABLE".to_owned())
}

pub async fn create_source(
    session: &mut Session,
    def: &TableDefinition,
    text: &str,
) -> Result<String, SqlError> {
    let Some(mut relation) = build(session, def, RelationKind::Source, text)? else {
        return Ok("CREATE SOURCE".to_owned());
    };
    source::check_source(session, &mut relation)?;
    create(session, relation, 0, def.or_replace).await?;
    Ok("CREATE SOURCE".to_owned())
}

/// The table of a query's columns, then its rows. The table stays only if the rows got in: a statement that is cut off
/// while it fills the table drops it too.
async fn create_table_as(
    session: &mut Session,
    def: &TableDefinition,
    query: &millrace_planner::ast::QueryText,
    text: &str,
) -> Result<String, SqlError> {
    let declared = |c: &ColumnDef| c.data_type != DataType::Unspecified || !c.options.is_empty();
    if def.columns.iter().any(declared) || !def.constraints.is_empty() {
        let message = "CREATE TABLE … AS takes the types of its columns from the query";
        return Err(SqlError::new(SqlState::SYNTAX_ERROR, message)
            .with_hint("Give names only, or create the table and INSERT … SELECT."));
    }
    let view = session.catalog_view();
    let (mut bound, _) = session.bind(&view, &query.query, &[])?;
    if def.columns.len() > bound.names.len() {
        let message = "too many column names were specified";
        return Err(SqlError::new(SqlState::SYNTAX_ERROR, message));
    }
    let types = session.declared_types(&view, &query.query, &bound);
    for (name, column) in bound.names.iter_mut().zip(&def.columns) {
        *name = fold(&column.name);
    }
    let columns = bound
        .relation_names()?
        .into_iter()
        .zip(types)
        .map(|(name, t)| plain_column(name, t))
        .collect::<Vec<_>>();
    let with_columns = TableDefinition { columns: Vec::new(), query: None, ..def.clone() };
    let Some(relation) =
        build_with(session, &with_columns, RelationKind::Table, text, columns, Vec::new())?
    else {
        return Ok("CREATE TABLE AS".to_owned());
    };
    let target = format!(
        "{}.{}",
        rewrite::quote_ident(&relation.schema),
        rewrite::quote_ident(&relation.name)
    );
    if !def.with_data {
        create(session, relation, 1, false).await?;
        return Ok("CREATE TABLE AS".to_owned());
    }
    let (id, undo) = undo::create(session, relation, 1, false).await?;
    let insert = crate::statements::parse(&format!("INSERT INTO {target} {}", query.query))?;
    let filled = match insert.first().map(|s| &s.statement) {
        Some(millrace_planner::Statement::Sql(sql)) => crate::dml::execute(session, sql).await,
        _ => Err(SqlError::internal("CREATE TABLE AS made no INSERT")),
    };
    match filled {
        Ok(done) => {
            undo.keep();
            Ok(done.tag.replace("INSERT 0", "SELECT"))
        }
        Err(e) => {
            session.cluster().drop_relations(vec![id]).await?;
            undo.keep();
            Err(e)
        }
    }
}

pub fn plain_column(name: String, sql_type: ColumnType) -> Column {
    Column { name, sql_type, nullable: true, default_sql: None, hidden: false, ..Column::default() }
}

fn build(
    session: &mut Session,
    def: &TableDefinition,
    kind: RelationKind,
    text: &str,
) -> Result<Option<Relation>, SqlError> {
    let mut key: Vec<String> = Vec::new();
    let mut columns = Vec::with_capacity(def.columns.len() + 1);
    for column in &def.columns {
        columns.push(column_of(column, &mut key).map_err(|e| of_table(e, &def.name))?);
    }
    columns.extend(source::included(def)?);
    check_columns(&columns)?;
    generated::resolve(session, kind, &mut columns)?;
    for constraint in &def.constraints {
        table_constraint(constraint, &mut key).map_err(|e| of_table(e, &def.name))?;
    }
    build_with(session, def, kind, text, columns, key)
}

/// `None`: it exists and that is fine.
fn build_with(
    session: &mut Session,
    def: &TableDefinition,
    kind: RelationKind,
    text: &str,
    mut columns: Vec<Column>,
    key: Vec<String>,
) -> Result<Option<Relation>, SqlError> {
    let view = session.catalog_view();
    let (schema, name) = view.target(&def.name)?;
    let existing =
        check_name(session, &view, &schema, &name, kind, def.if_not_exists, def.or_replace)?;
    if matches!(existing, Existing::Skip) {
        return Ok(None);
    }
    check_columns(&columns)?;
    let mut positions = key_positions(&mut columns, &key)?;
    let primary_key = !positions.is_empty();
    if !primary_key {
        positions = vec![columns.len() as u32];
        columns.push(Column {
            name: ROW_ID.to_owned(),
            sql_type: SqlType::BigInt.into(),
            nullable: false,
            default_sql: None,
            hidden: true,
            ..Column::default()
        });
    }
    if def.append_only && def.on_conflict == Some(ConflictAction::Overwrite) {
        return Err(SqlError::new(
            SqlState::INVALID_TABLE_DEFINITION,
            "an APPEND ONLY table cannot have ON CONFLICT OVERWRITE",
        )
        .with_detail("Its rows would change.")
        .with_hint("Leave one of the two out, or say ON CONFLICT IGNORE."));
    }
    let options = source::options(def)?;
    Ok(Some(Relation {
        watermark: watermark(session, def, kind, &columns)?,
        schema,
        name,
        kind: kind as i32,
        distribution: positions.clone(),
        key: positions,
        primary_key,
        append_only: def.append_only || kind == RelationKind::Source,
        definition: masked_definition(text),
        options,
        format: source::format(def),
        on_conflict: match def.on_conflict {
            None => OnConflict::Error,
            Some(ConflictAction::Overwrite) => OnConflict::Overwrite,
            Some(ConflictAction::Ignore) => OnConflict::Ignore,
        } as i32,
        owner: session.user.clone(),
        storage: RowStorage::Keyed as i32,
        columns,
        ..Relation::default()
    }))
}

/// `WATERMARK FOR column AS expression`: checked, and compiled over all columns.
fn watermark(
    session: &Session,
    def: &TableDefinition,
    kind: RelationKind,
    columns: &[Column],
) -> Result<Option<Watermark>, SqlError> {
    let Some(w) = &def.watermark else { return Ok(None) };
    if !def.append_only && kind != RelationKind::Source {
        return Err(SqlError::unsupported("WATERMARK of a table whose rows can change").with_hint(
            "Declare the table APPEND ONLY, or use CREATE SOURCE, whose rows never change.",
        ));
    }
    let name = fold(&w.column);
    let at = columns.iter().position(|c| c.name == name).ok_or_else(|| no_column(&name))?;
    let typed = columns[at].sql_type()?;
    if !matches!(typed, SqlType::Timestamp | SqlType::Timestamptz) {
        return Err(SqlError::new(
            SqlState::DATATYPE_MISMATCH,
            format!("the watermark column \"{name}\" must be a timestamp, not {typed}"),
        ));
    }
    let shape = Relation { columns: columns.to_vec(), ..Relation::default() };
    let view = session.catalog_view();
    let expr = millrace_planner::stream::compile_watermark(
        &Binder::new(&view, session.info(true)),
        &w.expr,
        shape.arrow_schema()?.as_ref(),
        typed,
    )?;
    Ok(Some(Watermark { column: at as u32, expr_sql: w.text.clone(), expr }))
}

fn no_column(name: &str) -> SqlError {
    SqlError::new(SqlState::UNDEFINED_COLUMN, format!("column \"{name}\" does not exist"))
}

fn check_columns(columns: &[Column]) -> Result<(), SqlError> {
    for (i, column) in columns.iter().enumerate() {
        if columns[..i].iter().any(|c| c.name == column.name) {
            return Err(SqlError::new(
                SqlState::DUPLICATE_COLUMN,
                format!("column \"{}\" specified more than once", column.name),
            ));
        }
        if column.name == ROW_ID {
            return Err(SqlError::new(
                SqlState::DUPLICATE_COLUMN,
                format!("column name \"{ROW_ID}\" conflicts with a system column name"),
            ));
        }
    }
    Ok(())
}

/// Positions of the key's columns, which become NOT NULL.
fn key_positions(columns: &mut [Column], key: &[String]) -> Result<Vec<u32>, SqlError> {
    let mut positions = Vec::with_capacity(key.len());
    for name in key {
        let position = columns.iter().position(|c| c.name == *name).ok_or_else(|| {
            SqlError::new(
                SqlState::UNDEFINED_COLUMN,
                format!("column \"{name}\" named in key does not exist"),
            )
        })?;
        if positions.contains(&(position as u32)) {
            return Err(SqlError::new(
                SqlState::DUPLICATE_COLUMN,
                format!("column \"{name}\" appears twice in primary key constraint"),
            ));
        }
        columns[position].nullable = false;
        positions.push(position as u32);
    }
    Ok(positions)
}

fn column_of(def: &ColumnDef, key: &mut Vec<String>) -> Result<Column, SqlError> {
    // Of `c AS expr` the type follows from the expression.
    let mut column = plain_column(fold(&def.name), SqlType::Text.into());
    if def.data_type != DataType::Unspecified {
        column.sql_type = super::types::column_type(&def.data_type)?;
    }
    for option in &def.options {
        match &option.option {
            ColumnOption::Null => {}
            ColumnOption::NotNull => column.nullable = false,
            ColumnOption::Default(expr) => {
                stored_expressions::check(expr, Kept::Default)?;
                column.default_sql = Some(folded::to_sql(expr)?);
            }
            ColumnOption::Generated { generation_expr: Some(expr), .. } => {
                stored_expressions::check(expr, Kept::Generated)?;
                if def.data_type == DataType::Unspecified {
                    column.sql_type = generated::UNTYPED;
                }
                column.generated_sql = Some(folded::to_sql(expr)?);
            }
            ColumnOption::PrimaryKey(_) => add_key(key, vec![column.name.clone()])?,
            other => {
                let what = other.to_string();
                let what = what.split('(').next().unwrap_or_default().trim().to_owned();
                let e = SqlError::unsupported(format!("the column option {what}"));
                return Err(if what.contains("IDENTITY") {
                    e.with_hint("Give keys in the INSERT; a table without a key has a hidden one.")
                } else {
                    e
                });
            }
        }
    }
    Ok(column)
}

fn add_key(key: &mut Vec<String>, columns: Vec<String>) -> Result<(), SqlError> {
    if !key.is_empty() {
        return Err(SqlError::new(
            SqlState::INVALID_TABLE_DEFINITION,
            "multiple primary keys for a table are not allowed",
        ));
    }
    *key = columns;
    Ok(())
}

fn table_constraint(constraint: &TableConstraint, key: &mut Vec<String>) -> Result<(), SqlError> {
    match constraint {
        TableConstraint::PrimaryKey(pk) => {
            let names = pk.columns.iter().map(index_column).collect::<Result<_, _>>()?;
            add_key(key, names)
        }
        other => {
            let text = other.to_string();
            let what = if text.contains("UNIQUE") {
                "a UNIQUE constraint beside the primary key"
            } else if text.contains("FOREIGN KEY") {
                "a FOREIGN KEY constraint"
            } else if text.contains("CHECK") {
                "a CHECK constraint"
            } else {
                "this table constraint"
            };
            Err(SqlError::unsupported(what))
        }
    }
}

/// The error with the table's name in it.
fn of_table(mut e: SqlError, table: &sqlparser::ast::ObjectName) -> SqlError {
    if let Ok((_, name)) = SessionCatalog::split_name(table) {
        e.message = e.message.replace("for a table are", &format!("for table \"{name}\" are"));
    }
    e
}

fn index_column(column: &IndexColumn) -> Result<String, SqlError> {
    match &column.column.expr {
        Expr::Identifier(ident) => Ok(fold(ident)),
        other => Err(SqlError::unsupported(format!("the expression {other} in a key"))),
    }
}

/// A DEFAULT must bind by itself and fit its column.
fn check_defaults(session: &Session, relation: &Relation) -> Result<(), SqlError> {
    for column in &relation.columns {
        let Some(default) = &column.default_sql else { continue };
        let to = column.sql_type()?;
        let expr = rewrite::type_unknown(rewrite::parse_expr(default)?, to)?;
        let query = rewrite::parse_query(&format!("SELECT {expr}"))?;
        let view = session.catalog_view();
        session.check_definition(&view, &query)?;
        let (bound, _) = session.bind(&view, &query, &[])?;
        if let Some(from) = bound.types.first() {
            crate::dml::assign::check(*from, &column.name, to).map_err(|mut e| {
                e.message = e.message.replace(" but expression is", " but default expression is");
                e
            })?;
        }
    }
    Ok(())
}
