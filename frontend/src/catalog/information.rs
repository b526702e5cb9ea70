//! The content of `information_schema` and of `millrace_catalog`.

use std::collections::BTreeMap;
use std::sync::Arc;

use arrow::array::RecordBatch;
use millrace_common::settings::SETTINGS;
use millrace_common::{RelationId, SqlType};
use millrace_rpc::catalog::Relation;

use super::objects::{TYPES, columns, indexes, namespaces, relkind, system_table};
use super::pg::view_text;
use super::rows::{Cell, Rows, row};
use super::{SystemTables, activity, lookahead};
use crate::cluster::{PlacedVersion, SourceRow};
use crate::ddl::drop::noun;
use crate::ddl::show::{told_jobs, waits_for};
use crate::secrets::shown_definition;

/// What [`table`] fills; every other view of `information_schema` is empty.
const FILLED: [&str; 9] = [
    "tables",
    "columns",
    "schemata",
    "views",
    "table_constraints",
    "key_column_usage",
    "constraint_column_usage",
    "information_schema_catalog_name",
    "enabled_roles",
];

pub fn always_empty(name: &str) -> bool {
    system_table("information_schema", name).is_some() && !FILLED.contains(&name)
}

fn yes_no(yes: bool) -> &'static str {
    if yes { "YES" } else { "NO" }
}

pub fn table(t: &SystemTables, name: &str) -> Option<RecordBatch> {
    let mut rows = Rows::new(system_table("information_schema", name)?.4);
    let database = t.database.as_str();
    let catalog = t.catalog();
    // As in PostgreSQL, the standard has no word for a materialized view: `millrace_catalog.relations` has.
    let listed = || catalog.relations().iter().filter(|r| matches!(relkind(r), "r" | "v" | "f"));
    match name {
        "tables" => {
            for r in listed() {
                let (kind, table) = match relkind(r) {
                    "v" => ("VIEW", false),
                    "f" => ("FOREIGN", false),
                    _ => ("BASE TABLE", true),
                };
                row!(rows; table_catalog: database, table_schema: &r.schema, table_name: &r.name, table_type: kind,
                    is_insertable_into: yes_no(table), is_typed: "NO");
            }
        }
        "columns" => {
            for r in listed() {
                information_columns(t, r, &mut rows);
            }
        }
        "schemata" => {
            for (_, name) in namespaces(catalog) {
                row!(rows; catalog_name: database, schema_name: name, schema_owner: "postgres");
            }
        }
        "views" => {
            for r in listed().filter(|r| relkind(r) == "v") {
                row!(rows; table_catalog: database, table_schema: &r.schema, table_name: &r.name,
                    view_definition: view_text(r), check_option: "NONE", is_updatable: "NO", is_insertable_into: "NO",
                    is_trigger_updatable: "NO", is_trigger_deletable: "NO", is_trigger_insertable_into: "NO");
            }
        }
        "table_constraints" => {
            for i in indexes(catalog).iter().filter(|i| i.primary) {
                let r = &i.table;
                row!(rows; constraint_catalog: database, constraint_schema: &r.schema, constraint_name: &i.name,
                    table_catalog: database, table_schema: &r.schema, table_name: &r.name,
                    constraint_type: "PRIMARY KEY", is_deferrable: "NO", initially_deferred: "NO", enforced: "YES");
            }
        }
        "key_column_usage" | "constraint_column_usage" => {
            for i in indexes(catalog).iter().filter(|i| i.primary) {
                let r = &i.table;
                for (n, c) in i.key.iter().filter_map(|k| r.columns.get(*k)).enumerate() {
                    if name == "key_column_usage" {
                        row!(rows; constraint_catalog: database, constraint_schema: &r.schema,
                            constraint_name: &i.name, table_catalog: database, table_schema: &r.schema,
                            table_name: &r.name, column_name: &c.name, ordinal_position: n as i64 + 1,
                            position_in_unique_constraint: Cell::Null);
                    } else {
                        row!(rows; table_catalog: database, table_schema: &r.schema, table_name: &r.name,
                            column_name: &c.name, constraint_catalog: database, constraint_schema: &r.schema,
                            constraint_name: &i.name);
                    }
                }
            }
        }
        "information_schema_catalog_name" => row!(rows; catalog_name: database),
        "enabled_roles" => row!(rows; role_name: t.user.as_str()),
        _ => {}
    }
    rows.finish()
}

fn information_columns(t: &SystemTables, r: &Relation, rows: &mut Rows) {
    let database = t.database.as_str();
    let table = relkind(r) == "r";
    for (number, c) in columns(r) {
        let Ok(sql) = c.sql_type() else { continue };
        let name = sql.to_string();
        let (precision, scale): (Option<i64>, Option<i64>) = match sql {
            SqlType::Numeric(Some((p, s))) => (Some(p.into()), Some(s.into())),
            SqlType::SmallInt => (Some(16), Some(0)),
            SqlType::Int => (Some(32), Some(0)),
            SqlType::BigInt => (Some(64), Some(0)),
            SqlType::Real => (Some(24), None),
            SqlType::Double => (Some(53), None),
            _ => (None, None),
        };
        let radix = match sql {
            SqlType::Numeric(_) => Some(10i64),
            _ => precision.map(|_| 2),
        };
        let length = if let SqlType::Varchar(Some(n)) | SqlType::Char(n) = sql {
            Some(i64::from(n))
        } else {
            None
        };
        let text = matches!(sql, SqlType::Text | SqlType::Varchar(_) | SqlType::Char(_));
        let time = match sql {
            SqlType::Date => Some(0i64),
            SqlType::Time | SqlType::Timestamp | SqlType::Timestamptz | SqlType::Interval => {
                Some(6)
            }
            _ => None,
        };
        let array = matches!(sql, SqlType::Array(_));
        let oid = i64::from(c.sql_type.oid);
        let udt = TYPES.iter().find_map(|t| match t {
            t if t.0 == oid => Some(t.1.to_owned()),
            t if array && t.4 == oid => Some(format!("_{}", t.1)),
            _ => None,
        });
        let kind = if array { "ARRAY" } else { name.split('(').next().unwrap_or(&name) };
        row!(rows; table_catalog: database, table_schema: &r.schema, table_name: &r.name, column_name: &c.name,
            ordinal_position: number, column_default: c.default_sql.clone(),
            is_nullable: yes_no(!table || c.nullable), data_type: kind,
            character_maximum_length: length, character_octet_length: text.then(|| length.map_or(1 << 30, |n| n * 4)),
            numeric_precision: precision, numeric_precision_radix: radix, numeric_scale: scale,
            datetime_precision: time, interval_precision: Cell::Null, maximum_cardinality: Cell::Null,
            udt_catalog: database, udt_schema: "pg_catalog", udt_name: udt, dtd_identifier: number.to_string(),
            is_self_referencing: "NO", is_identity: "NO", identity_cycle: "NO",
            is_generated: if c.generated_sql.is_some() { "ALWAYS" } else { "NEVER" },
            is_updatable: yes_no(table));
    }
}

/// The tables of `millrace_catalog`.
pub fn millrace_catalog(t: &SystemTables, name: &str) -> Option<RecordBatch> {
    match name {
        "jobs" => jobs(t),
        "watermarks" => watermarks(t),
        "errors" => errors(t),
        "sources" => sources(t),
        "source_splits" => source_splits(t),
        "settings" => settings(t),
        "state_tables" => state_tables(t),
        "lookahead" => lookahead::table(t),
        "operators" => operators(t),
        "relations" => relations(t),
        "processes" | "workers" => processes(t),
        "runs" => runs(t),
        "tasks" => activity::tasks(t),
        "compactions" => activity::compactions(t),
        "caches" => activity::caches(t),
        "requests" => activity::requests(t),
        _ => None,
    }
}

fn processes(t: &SystemTables) -> Option<RecordBatch> {
    let mut rows = Rows::new(
        "incarnation:i roles:a address:t epoch:i applied_record:i heartbeat_ms:i jobs:i since:t drained:b load:g",
    );
    for p in t.shared.cluster.processes() {
        let roles: Vec<String> = p.roles.iter().map(|role| (*role).to_owned()).collect();
        row!(rows; incarnation: p.incarnation as i64, roles: roles,
            address: (!p.address.is_empty()).then_some(p.address), epoch: p.epoch.0 as i64,
            applied_record: p.applied.map(|n| n as i64),
            heartbeat_ms: p.heartbeat.map(|age| age.as_millis() as i64), jobs: p.jobs as i64,
            since: instant(p.epoch.millis() as i64 * 1_000), drained: p.drained,
            load: p.load.map(cores));
    }
    rows.finish()
}

fn jobs(t: &SystemTables) -> Option<RecordBatch> {
    let mut rows = Rows::new(
        "id:o schema_name:n name:n state:t progress:t reason:t epoch:i lag_ms:i late_rows:i kind:t rows:i state_bytes:i waits_for:t parallelism:i worker:i generation:i load:g",
    );
    let all = told_jobs(t.shared.cluster.as_ref(), t.catalog());
    let placed: BTreeMap<u32, PlacedVersion> =
        t.shared.cluster.versions().into_iter().map(|p| (p.relation, p)).collect();
    for j in &all {
        let (r, placed) = (t.catalog().by_id(j.relation), placed.get(&j.relation));
        row!(rows; id: j.relation, schema_name: r.map(|r| r.schema.as_str()),
            name: r.map(|r| r.name.as_str()), state: j.state.as_str(), progress: j.progress.clone(),
            reason: j.reason.clone(), epoch: j.epoch as i64, lag_ms: j.lag_ms.map(|l| l as i64),
            late_rows: j.late_rows as i64, kind: r.map(|r| noun(r)), rows: j.rows,
            state_bytes: j.state_bytes() as i64, waits_for: waits_for(j, &all, t.catalog()),
            parallelism: r.map(|r| i64::from(r.parallelism)).filter(|tasks| *tasks > 0),
            worker: placed.map(|p| p.process as i64).filter(|process| *process > 0),
            generation: placed.map(|p| p.version.generation as i64), load: j.load.map(cores));
    }
    rows.finish()
}

/// Of thousandths.
fn cores(load: u32) -> f64 {
    f64::from(load) / 1e3
}

/// The runs that the newest version of each job names.
fn runs(t: &SystemTables) -> Option<RecordBatch> {
    let mut rows = Rows::new(
        "run_id:i relation_id:o schema_name:n relation_name:n table_id:i level:i object:t object_offset:i bytes:i rows:i tombstones:i min_epoch:i max_epoch:i",
    );
    for placed in t.shared.cluster.versions() {
        let relation = t.catalog().by_id(placed.relation);
        for run in &placed.version.runs {
            row!(rows; run_id: run.run_id as i64, relation_id: placed.relation,
                schema_name: relation.map(|r| r.schema.as_str()),
                relation_name: relation.map(|r| r.name.as_str()), table_id: run.table_id,
                level: run.level, object: run.object.as_str(), object_offset: run.offset as i64,
                bytes: run.length as i64, rows: run.rows as i64,
                tombstones: run.tombstones as i64, min_epoch: run.min_epoch as i64,
                max_epoch: run.max_epoch as i64);
        }
    }
    rows.finish()
}

fn watermarks(t: &SystemTables) -> Option<RecordBatch> {
    let mut rows = Rows::new("id:o schema_name:n name:n column_name:n watermark:t");
    for j in t.shared.cluster.jobs() {
        let Some(r) = t.catalog().by_id(j.relation) else { continue };
        for (column, value) in &j.watermarks {
            let column = r.columns.get(*column as usize).map(|c| c.name.as_str());
            row!(rows; id: j.relation, schema_name: &r.schema, name: &r.name,
                column_name: column, watermark: instant(*value));
        }
    }
    rows.finish()
}

fn errors(t: &SystemTables) -> Option<RecordBatch> {
    let mut rows = Rows::new("id:o schema_name:n name:n place:t sqlstate:t count:i message:t");
    for r in t.catalog().relations() {
        for e in t.shared.cluster.expression_errors(RelationId(r.id)) {
            row!(rows; id: r.id, schema_name: &r.schema, name: &r.name, place: e.place,
                sqlstate: e.sqlstate, count: e.count as i64, message: e.samples.into_iter().next());
        }
    }
    rows.finish()
}

/// Relations that read another system, and how far they are.
fn connected(t: &SystemTables) -> impl Iterator<Item = (&Arc<Relation>, SourceRow)> {
    let report = |r: &Relation| t.shared.cluster.source_report(RelationId(r.id));
    let relations = t.catalog().relations().iter().filter(|r| r.has_connector());
    relations.map(move |r| (r, report(r).unwrap_or_default()))
}

fn sources(t: &SystemTables) -> Option<RecordBatch> {
    let mut rows = Rows::new(
        "id:o schema_name:n name:n kind:t connector:t state:t paused:b rate_limit:t splits:i files:i offsets:i lag:i reason:t",
    );
    for (r, report) in connected(t) {
        let lags: Vec<u64> = report.splits.iter().filter_map(|s| s.lag()).collect();
        let taken: u64 = report.splits.iter().map(|s| s.offset.saturating_sub(s.start)).sum();
        row!(rows; id: r.id, schema_name: &r.schema, name: &r.name,
            kind: if relkind(r) == "r" { "table" } else { "source" },
            connector: r.option("connector").map(str::to_owned), state: report.state,
            paused: r.paused, rate_limit: r.option("rate_limit").map(str::to_owned),
            splits: report.splits.len() as i64, files: report.files as i64, offsets: taken as i64,
            lag: (!lags.is_empty()).then(|| lags.iter().sum::<u64>() as i64),
            reason: report.reason);
    }
    rows.finish()
}

fn source_splits(t: &SystemTables) -> Option<RecordBatch> {
    let mut rows = Rows::new(
        "source_id:o schema_name:n source_name:n split:i split_name:t start_offset:i current_offset:i available_offset:i lag:i",
    );
    for (r, report) in connected(t) {
        for s in report.splits {
            let lag = s.lag().map(|l| l as i64);
            row!(rows; source_id: r.id, schema_name: &r.schema, source_name: &r.name,
                split: i64::from(s.split), split_name: s.name, start_offset: s.start as i64,
                current_offset: s.offset as i64, available_offset: s.available.map(|a| a as i64),
                lag: lag);
        }
    }
    rows.finish()
}

fn settings(t: &SystemTables) -> Option<RecordBatch> {
    let mut rows = Rows::new("name:t value:t default_value:t description:t");
    for s in SETTINGS {
        row!(rows; name: s.name, value: t.settings.value(s), default_value: s.default,
            description: s.doc);
    }
    rows.finish()
}

fn state_tables(t: &SystemTables) -> Option<RecordBatch> {
    let mut rows = Rows::new(
        "table_id:i relation_id:o schema_name:n relation_name:n is_result:b kept_since:t name:t entries:i bytes:i",
    );
    let jobs = t.shared.cluster.jobs();
    for r in t.catalog().relations() {
        let job = jobs.iter().find(|j| j.relation == r.id);
        // What a rebuild has given the job is known while that is open.
        let open: Vec<u32> = job.iter().flat_map(|j| &j.tables).map(|t| t.id).collect();
        let of_relation = r.first_table_id..r.first_table_id + r.table_count;
        for id in if open.is_empty() { of_relation.collect() } else { open } {
            let bound = job.and_then(|j| j.cleaned.iter().find(|(t, _)| *t == id));
            let held = job.and_then(|j| j.tables.iter().find(|t| t.id == id));
            row!(rows; table_id: id, relation_id: r.id, schema_name: &r.schema,
                relation_name: &r.name, is_result: id == r.first_table_id,
                kept_since: bound.map(|(_, us)| instant(*us)), name: held.map(|t| t.name.as_str()),
                entries: held.map(|t| t.entries as i64), bytes: held.map(|t| t.bytes() as i64));
        }
    }
    rows.finish()
}

/// Operators of running jobs, all tasks of one together; counted since the job's last start.
fn operators(t: &SystemTables) -> Option<RecordBatch> {
    let mut rows = Rows::new(
        "relation_id:o schema_name:n relation_name:n fragment:i node:i operator:t rows_in:i rows_out:i cache_bytes:i cache_hits:i cache_misses:i parked_rows:i fetch_rounds:i settled_early:i",
    );
    for j in t.shared.cluster.jobs() {
        let Some(r) = t.catalog().by_id(j.relation) else { continue };
        for o in &j.operators {
            row!(rows; relation_id: j.relation, schema_name: &r.schema, relation_name: &r.name,
                fragment: o.fragment as i64, node: o.node as i64, operator: o.name.as_str(),
                rows_in: o.rows_in as i64, rows_out: o.rows_out as i64,
                cache_bytes: o.state_bytes as i64, cache_hits: o.cache_hits as i64,
                cache_misses: o.cache_misses as i64, parked_rows: o.parked_rows as i64,
                fetch_rounds: o.fetch_rounds as i64, settled_early: o.settled_early as i64);
        }
    }
    rows.finish()
}

fn relations(t: &SystemTables) -> Option<RecordBatch> {
    let mut rows = Rows::new(
        "id:o schema_name:n name:n kind:t owner:n append_only:b primary_key:a definition:t depends_on:w",
    );
    for r in t.catalog().relations() {
        let kind = match relkind(r) {
            "v" => "view",
            "m" => "materialized view",
            "f" => "source",
            "i" => "index",
            _ => "table",
        };
        let key = r.key.iter().filter_map(|k| r.columns.get(*k as usize));
        let key: Vec<String> = key.filter(|c| !c.hidden).map(|c| c.name.clone()).collect();
        let reads: Vec<i64> = r.depends_on.iter().map(|d| i64::from(*d)).collect();
        row!(rows; id: r.id, schema_name: &r.schema, name: &r.name, kind: kind, owner: "postgres",
            append_only: r.append_only, primary_key: key, definition: shown_definition(r),
            depends_on: reads);
    }
    rows.finish()
}

/// Microseconds since 1970 as a timestamp's text.
fn instant(us: i64) -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = crate::encoding::datetime::write_timestamp(&mut text, us, false);
    text
}
