//! The state tables of a job graph under construction.

use arrow::datatypes::SchemaRef;
use millrace_common::access::{AccessClass, RetentionBy};
use millrace_graph::{DerivedWatermark, Retention, StateTable, WatermarkTerm};
use millrace_rpc::catalog::RowStorage;

/// State tables, numbered as operators add them.
pub struct StateTables(Vec<StateTable>);

impl StateTables {
    /// `rows`: table 0, the relation's own.
    pub fn new(rows: StateTable) -> StateTables {
        StateTables(vec![rows])
    }

    /// Adds a table and gives its number.
    pub fn add(
        &mut self,
        name: &str,
        class: AccessClass,
        storage: RowStorage,
        schema: SchemaRef,
    ) -> usize {
        self.0.push(StateTable {
            name: name.into(),
            class,
            value_schema: schema,
            storage,
            relation: false,
            retention: None,
        });
        self.0.len() - 1
    }

    /// Rows whose time is below the least of the terms are never reached again.
    pub fn retain(&mut self, table: usize, by: RetentionBy, terms: Vec<WatermarkTerm>) {
        if let Some(table) = self.0.get_mut(table) {
            table.retention = Some(Retention { by, terms });
        }
    }

    /// The same of a table of groups, by the first of the input's watermarks that is of a column of the group.
    pub fn retain_by_group(&mut self, table: usize, group: &[usize], input: &[DerivedWatermark]) {
        if let Some(mark) = input.iter().find(|m| group.contains(&m.column)) {
            self.retain(table, RetentionBy::Value(mark.column), mark.terms.clone());
        }
    }

    /// All of them, by number.
    pub fn into_list(self) -> Vec<StateTable> {
        self.0
    }
}
