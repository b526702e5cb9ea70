//! What is known of INSERT, UPDATE and DELETE before they run: the columns of RETURNING and the types of parameters.

use arrow::array::RecordBatch;
use arrow::datatypes::{DataType, SchemaRef};
use millrace_common::SqlError;
use millrace_rpc::catalog::Relation;
use sqlparser::ast::{Insert, SelectItem, SetExpr, Statement as Sql};

use super::conflict::{self, Conflict, conflict_of};
use super::{insert, returning_query, rows, update};
use crate::session::{Session, params};
use crate::wire::Field;

/// The columns of RETURNING.
pub struct Described {
    pub fields: Vec<Field>,
    /// As they come, with what tells their types.
    pub schema: SchemaRef,
}

type Types = Vec<Option<DataType>>;

/// Binds a statement without running it. `None`: it has no RETURNING.
pub fn describe(
    session: &Session,
    sql: &Sql,
    types: &mut Types,
) -> Result<Option<Described>, SqlError> {
    super::check_calls(sql)?;
    let view = session.catalog_view();
    let (table, alias, items) = match sql {
        Sql::Insert(insert) => {
            let table = insert::table_of(&view, insert)?;
            let alias = insert::alias_of(&table, insert);
            describe_insert(session, &table, &alias, insert, types)?;
            (table, alias, &insert.returning)
        }
        Sql::Update(update) => {
            let plan = update::plan_update(&view, update)?;
            update::infer_parameters(&plan.table, update, types)?;
            let bound = session.bind(&view, &plan.query, types)?.0;
            params::merge_of(&plan.query, types, &bound.param_types);
            (plan.table, plan.alias, &update.returning)
        }
        Sql::Delete(delete) => {
            let plan = update::plan_delete(&view, delete)?;
            let bound = session.bind(&view, &plan.query, types)?.0;
            params::merge_of(&plan.query, types, &bound.param_types);
            (plan.table, plan.alias, &delete.returning)
        }
        other => return Err(SqlError::unsupported(format!("the statement {other}"))),
    };
    session.note_relations(std::slice::from_ref(&table));
    let items = items.as_deref();
    items.map(|items| describe_returning(session, &table, &alias, items, types)).transpose()
}

fn describe_insert(
    session: &Session,
    table: &Relation,
    alias: &str,
    insert: &Insert,
    types: &mut Types,
) -> Result<(), SqlError> {
    insert::infer_parameters(table, insert, types)?;
    if let Some(source) = &insert.source {
        let view = session.catalog_view();
        if !matches!(source.body.as_ref(), SetExpr::Values(_)) {
            let bound = session.bind(&view, source, types)?.0;
            params::merge_of(source, types, &bound.param_types);
        } else {
            let count = params::count(source);
            let unknown = types.len() < count || types.iter().take(count).any(Option::is_none);
            let values = || {
                let targets = insert::targets_of(table, insert)?;
                insert::typed_values(table, source, &targets)
            };
            if session.in_parts() && count == 0 {
                // What its subqueries read is read at the epoch of all parts.
                session.bind(&view, &values()?, &[])?;
            } else if unknown && let Ok((bound, _)) = session.bind(&view, &values()?, types) {
                // Parameters within expressions. What is wrong with them is told when they have values.
                params::merge_of(source, types, &bound.param_types);
            }
        }
    }
    if let Conflict::Update(update) = conflict_of(table, insert)? {
        for assignment in &update.assignments {
            let position = insert::assignment_position(table, &assignment.target)?;
            let t = table.columns[position].sql_type()?.to_arrow();
            params::note_type(&assignment.value, t, types);
        }
        let found = conflict::check_update(session, table, alias, update, types)?;
        params::merge_of(update, types, &found);
    }
    Ok(())
}

/// The columns RETURNING will have.
fn describe_returning(
    session: &Session,
    table: &Relation,
    alias: &str,
    items: &[SelectItem],
    types: &mut Types,
) -> Result<Described, SqlError> {
    let none = RecordBatch::new_empty(rows::nullable(table.arrow_schema()?.as_ref()));
    let (view, query) = returning_query(session, table, alias, items, none)?;
    let (bound, fields) = session.bind(&view, &query, types)?;
    let schema = std::sync::Arc::new(bound.plan.schema().as_arrow().clone());
    params::merge_of(&query, types, &bound.param_types);
    Ok(Described { fields, schema })
}
