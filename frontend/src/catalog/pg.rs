//! The content of `pg_catalog`.

use std::sync::Arc;

use arrow::array::RecordBatch;
use millrace_common::encoding::interval::{Interval, write_interval};
use millrace_common::settings::SETTINGS;
use millrace_rpc::catalog::{Column, Relation};

use super::SystemTables;
use super::columns::SYSTEM_TABLES;
use super::objects::{
    OWNER, PG_CATALOG, RESERVED, TYPES, columns, format_type, indexes, namespace_oid, namespaces,
    relkind, system_table,
};
use super::procedures::{
    functions_of_array, functions_of_type, modifier_functions, procedures, subscript_function,
};
use super::rows::{Cell, Rows, row};
use crate::secrets::shown_value;

/// What [`table`] fills; every other table of `pg_catalog` is empty.
const FILLED: [&str; 30] = [
    "pg_namespace",
    "pg_class",
    "pg_attribute",
    "pg_attrdef",
    "pg_index",
    "pg_constraint",
    "pg_type",
    "pg_database",
    "pg_roles",
    "pg_authid",
    "pg_user",
    "pg_settings",
    "pg_am",
    "pg_tables",
    "pg_views",
    "pg_matviews",
    "pg_indexes",
    "pg_stat_activity",
    "pg_locks",
    "pg_collation",
    "pg_tablespace",
    "pg_foreign_table",
    "pg_foreign_server",
    "pg_foreign_data_wrapper",
    "pg_language",
    "pg_prepared_statements",
    "pg_cursors",
    "pg_proc",
    "pg_description",
    "pg_timezone_names",
];

/// Whether a table of `pg_catalog` never has a row.
pub fn always_empty(name: &str) -> bool {
    system_table("pg_catalog", name).is_some() && !FILLED.contains(&name)
        || name == "pg_description"
}

/// OID of the foreign server that stands for a connector.
fn server_oid(connector: &str) -> i64 {
    14_000 + connector.bytes().fold(0, |h: i64, b| (h * 31 + i64::from(b)) % 1000)
}

fn connectors(relations: &[Arc<Relation>]) -> Vec<&str> {
    let mut all: Vec<&str> = relations.iter().filter_map(|r| r.option("connector")).collect();
    all.sort_unstable();
    all.dedup();
    all
}

pub fn table(t: &SystemTables, name: &str) -> Option<RecordBatch> {
    if name == "pg_get_keywords" {
        return keywords();
    }
    let mut rows = Rows::new(system_table("pg_catalog", name)?.4);
    match name {
        "pg_namespace" => schemas(t, &mut rows),
        "pg_class" => classes(t, &mut rows),
        "pg_attribute" => attributes(t, &mut rows),
        "pg_attrdef" => defaults(t, &mut rows),
        "pg_index" => index_keys(t, &mut rows),
        "pg_constraint" => constraints(t, &mut rows),
        "pg_type" => types(&mut rows),
        "pg_database" => database(t, &mut rows),
        "pg_roles" | "pg_authid" => roles(t, &mut rows),
        "pg_user" => users(t, &mut rows),
        "pg_settings" => settings(t, &mut rows),
        "pg_timezone_names" => zones(&mut rows),
        "pg_am" => access_methods(&mut rows),
        "pg_tables" => tables(t, &mut rows),
        "pg_views" => views(t, &mut rows),
        "pg_matviews" => materialized_views(t, &mut rows),
        "pg_indexes" => index_definitions(t, &mut rows),
        "pg_stat_activity" => activity(t, &mut rows),
        "pg_locks" => locks(t, &mut rows),
        "pg_collation" => collations(&mut rows),
        "pg_tablespace" => row!(rows; oid: 1663i64, spcname: "pg_default", spcowner: OWNER),
        "pg_foreign_data_wrapper" => {
            row!(rows; oid: 13_900i64, fdwname: "millrace", fdwowner: OWNER)
        }
        "pg_foreign_server" => foreign_servers(t, &mut rows),
        "pg_foreign_table" => foreign_tables(t, &mut rows),
        "pg_language" => {
            row!(rows; oid: 14i64, lanname: "sql", lanowner: OWNER, lanpltrusted: true)
        }
        "pg_proc" => functions(&mut rows),
        "pg_prepared_statements" => prepared_statements(t, &mut rows),
        "pg_cursors" => cursors(t, &mut rows),
        _ => {}
    }
    rows.finish()
}

fn relations_of<'a>(
    t: &'a SystemTables,
    kind: &'static str,
) -> impl Iterator<Item = &'a Arc<Relation>> {
    t.catalog().relations().iter().filter(move |r| relkind(r) == kind)
}

fn schemas(t: &SystemTables, rows: &mut Rows) {
    for (oid, name) in &namespaces(t.catalog()) {
        row!(rows; oid: *oid, nspname: name, nspowner: OWNER);
    }
}

fn defaults(t: &SystemTables, rows: &mut Rows) {
    for r in t.catalog().relations() {
        for (number, c) in columns(r) {
            if let Some(default) = default_text(c) {
                let oid = i64::from(r.id) * 2000 + number;
                row!(rows; oid: oid, adrelid: r.id, adnum: number, adbin: default);
            }
        }
    }
}

fn index_keys(t: &SystemTables, rows: &mut Rows) {
    for i in indexes(t.catalog()) {
        let columns: Vec<i64> = i.columns().map(|k| k as i64 + 1).collect();
        let zeros = vec![0i64; i.key.len()];
        row!(rows; indexrelid: i.oid, indrelid: i.table.id, indnatts: columns.len() as i64,
            indnkeyatts: i.key.len() as i64,
            indisunique: i.primary, indisprimary: i.primary, indimmediate: true, indisvalid: true,
            indisready: true, indislive: true, indkey: columns, indcollation: zeros.clone(),
            indclass: zeros, indoption: i.options());
    }
}

fn constraints(t: &SystemTables, rows: &mut Rows) {
    let spaces = namespaces(t.catalog());
    for i in indexes(t.catalog()).iter().filter(|i| i.primary) {
        let key: Vec<i64> = i.key.iter().map(|k| *k as i64 + 1).collect();
        row!(rows; oid: i.oid, conname: &i.name,
            connamespace: namespace_oid(&spaces, &i.table.schema), contype: "p", convalidated: true,
            conrelid: i.table.id, conindid: i.oid, confupdtype: " ", confdeltype: " ",
            confmatchtype: " ", conislocal: true, connoinherit: true, conkey: key);
    }
}

fn database(t: &SystemTables, rows: &mut Rows) {
    row!(rows; oid: 5i64, datname: t.database.as_str(), datdba: OWNER, encoding: 6i64,
        datlocprovider: "c", datallowconn: true, datconnlimit: -1i64, dattablespace: 1663i64,
        datcollate: "C", datctype: "C.UTF-8");
}

fn roles(t: &SystemTables, rows: &mut Rows) {
    for (oid, name) in t.roles() {
        row!(rows; oid: oid, rolname: name, rolsuper: true, rolinherit: true, rolcreaterole: true,
            rolcreatedb: true, rolcanlogin: true, rolreplication: true, rolbypassrls: true,
            rolconnlimit: -1i64);
    }
}

fn users(t: &SystemTables, rows: &mut Rows) {
    for (oid, name) in t.roles() {
        row!(rows; usename: name, usesysid: oid, usecreatedb: true, usesuper: true, userepl: true,
            usebypassrls: true, passwd: "********");
    }
}

fn settings(t: &SystemTables, rows: &mut Rows) {
    for s in SETTINGS {
        row!(rows; name: s.name, setting: t.settings.value(s), category: s.category(),
            short_desc: s.doc, context: "user", vartype: "string", source: "default",
            boot_val: s.default, reset_val: s.default, sourceline: Cell::Null);
    }
}

fn access_methods(rows: &mut Rows) {
    row!(rows; oid: 2i64, amname: "heap", amhandler: 3i64, amtype: "t");
    row!(rows; oid: 403i64, amname: "btree", amhandler: 330i64, amtype: "i");
}

fn tables(t: &SystemTables, rows: &mut Rows) {
    for r in relations_of(t, "r") {
        row!(rows; schemaname: &r.schema, tablename: &r.name, tableowner: "postgres",
            hasindexes: r.primary_key);
    }
}

fn views(t: &SystemTables, rows: &mut Rows) {
    for r in relations_of(t, "v") {
        row!(rows; schemaname: &r.schema, viewname: &r.name, viewowner: "postgres",
            definition: view_text(r));
    }
}

fn materialized_views(t: &SystemTables, rows: &mut Rows) {
    for r in relations_of(t, "m") {
        row!(rows; schemaname: &r.schema, matviewname: &r.name, matviewowner: "postgres",
            hasindexes: r.primary_key, ispopulated: true, definition: view_text(r));
    }
}

fn index_definitions(t: &SystemTables, rows: &mut Rows) {
    for i in indexes(t.catalog()) {
        row!(rows; schemaname: &i.table.schema, tablename: &i.table.name, indexname: &i.name,
            indexdef: i.definition(0));
    }
}

fn locks(t: &SystemTables, rows: &mut Rows) {
    for l in t.shared.locks.list() {
        let (class, object, kind) = l.key.parts();
        row!(rows; locktype: "advisory", database: 5i64, relation: Cell::Null, page: Cell::Null,
            tuple: Cell::Null, transactionid: Cell::Null, classid: class, objid: object,
            objsubid: kind, pid: l.holder.pid, mode: l.mode.name(), granted: l.granted);
    }
}

fn collations(rows: &mut Rows) {
    for (oid, name, provider) in [(100i64, "default", "d"), (950, "C", "c")] {
        row!(rows; oid: oid, collname: name, collnamespace: PG_CATALOG, collowner: OWNER,
            collprovider: provider, collisdeterministic: true, collencoding: -1i64);
    }
}

fn foreign_servers(t: &SystemTables, rows: &mut Rows) {
    for connector in connectors(t.catalog().relations()) {
        row!(rows; oid: server_oid(connector), srvname: connector, srvowner: OWNER,
            srvfdw: 13_900i64);
    }
}

fn foreign_tables(t: &SystemTables, rows: &mut Rows) {
    for r in relations_of(t, "f") {
        let options = r.options.iter().filter(|o| o.name != "connector");
        let options: Vec<String> =
            options.map(|o| format!("{}={}", o.name, shown_value(&o.name, &o.value))).collect();
        let server = r.option("connector").map_or(0, server_oid);
        row!(rows; ftrelid: r.id, ftserver: server, ftoptions: options);
    }
}

fn functions(rows: &mut Rows) {
    for (oid, name) in procedures() {
        row!(rows; oid: oid, proname: name, pronamespace: PG_CATALOG, proowner: OWNER,
            prolang: 14i64, prokind: "f", proisstrict: true, provolatile: "s", proparallel: "s");
    }
}

fn prepared_statements(t: &SystemTables, rows: &mut Rows) {
    for (name, p) in &t.prepared {
        let statement = p.statement.as_ref().map_or("", |s| s.text.as_str());
        let types = p.param_oids.iter().map(|oid| format_type(i64::from(*oid), None));
        row!(rows; name: name, statement: statement, prepare_time: p.prepared_at,
            parameter_types: types.collect::<Vec<String>>(), from_sql: p.from_sql);
    }
}

fn cursors(t: &SystemTables, rows: &mut Rows) {
    for (name, hold, declared) in &t.cursors {
        row!(rows; name: name, statement: &declared.statement, is_holdable: *hold,
            is_binary: declared.binary, is_scrollable: declared.scroll, creation_time: declared.at);
    }
}

/// The sessions; one that waits for an advisory lock says so.
fn activity(t: &SystemTables, rows: &mut Rows) {
    let roles = t.roles();
    let locks = t.shared.locks.list();
    let (own, others) = (t.shared.activity(), t.shared.other_sessions.list());
    for a in own.iter().chain(others.iter()) {
        let waits = locks.iter().any(|l| l.holder.pid == a.pid && !l.granted);
        let role = roles.iter().find(|r| r.1 == a.user).map_or(OWNER, |r| r.0);
        let (host, port) = a.address.rsplit_once(':').unwrap_or((a.address.as_str(), ""));
        row!(rows; datid: 5i64, datname: a.database.as_str(), pid: a.pid, leader_pid: Cell::Null, usesysid: role,
            usename: a.user.as_str(), application_name: a.application.as_str(),
            client_addr: host.trim_matches(['[', ']']), client_port: port.parse::<i64>().ok(),
            backend_start: a.started, xact_start: a.transaction_started, query_start: a.query_started,
            state_change: a.changed, wait_event_type: waits.then_some("Lock"),
            wait_event: waits.then_some("advisory"), state: if a.active { "active" } else { a.resting },
            backend_xid: Cell::Null, backend_xmin: Cell::Null, query_id: Cell::Null, query: a.query.as_str(),
            backend_type: "client backend");
    }
}

/// The time zones as they are now.
fn zones(rows: &mut Rows) {
    let now = chrono::Utc::now().timestamp_micros();
    for (name, zone) in millrace_common::zone::all() {
        let offset = Interval { us: zone.offset(now) * 1_000_000, ..Interval::default() };
        let mut shown = String::new();
        // Writing to a string does not fail.
        let _ = write_interval(&mut shown, offset);
        row!(rows; name: name, abbrev: zone.abbreviation(now).into_owned(), utc_offset: shown,
            is_dst: zone.is_dst(now));
    }
}

/// What the function `pg_get_keywords` returns: the words that need quotes.
fn keywords() -> Option<RecordBatch> {
    let mut rows = Rows::new("word:t catcode:c barelabel:b catdesc:t baredesc:t");
    for word in RESERVED.split_whitespace() {
        row!(rows; word: word, catcode: "R", barelabel: true, catdesc: "reserved",
            baredesc: "can be bare label");
    }
    rows.finish()
}

/// A view's query as `pg_get_viewdef` gives it.
pub fn view_text(r: &Relation) -> String {
    format!(" {};", r.query.trim().trim_end_matches(';').trim_end())
}

/// A default as PostgreSQL stores it: a string literal carries its type.
fn default_text(c: &Column) -> Option<String> {
    let text = c.default_sql.as_ref()?;
    let literal = text.starts_with('\'')
        && text.ends_with('\'')
        && !text[1..text.len().max(2) - 1].contains('\'');
    match c.sql_type() {
        Ok(t) if literal => {
            let name = t.to_string();
            Some(format!("{text}::{}", name.split('(').next().unwrap_or(&name)))
        }
        _ => Some(text.clone()),
    }
}

fn classes(t: &SystemTables, rows: &mut Rows) {
    let spaces = namespaces(t.catalog());
    for (schema, name, oid, kind, spec) in SYSTEM_TABLES {
        row!(rows; oid: *oid, relname: *name, relnamespace: namespace_oid(&spaces, schema), relowner: OWNER,
            relam: if *kind == "r" { 2i64 } else { 0 }, reltuples: -1i64, relpersistence: "p", relkind: *kind,
            relnatts: spec.split_whitespace().count() as i64, relispopulated: true, relreplident: "n");
    }
    let indexes = indexes(t.catalog());
    for r in t.catalog().relations().iter().filter(|r| relkind(r) != "i") {
        let kind = relkind(r);
        row!(rows; oid: r.id, relname: &r.name, relnamespace: namespace_oid(&spaces, &r.schema), relowner: OWNER,
            relam: if matches!(kind, "r" | "m") { 2i64 } else { 0 }, relfilenode: r.id, reltuples: -1i64,
            relhasindex: indexes.iter().any(|i| i.table.id == r.id), relpersistence: "p", relkind: kind,
            relnatts: columns(r).count() as i64, relispopulated: true, relreplident: "d");
    }
    for i in &indexes {
        row!(rows; oid: i.oid, relname: &i.name, relnamespace: namespace_oid(&spaces, &i.table.schema),
            relowner: OWNER, relam: 403i64, relfilenode: i.oid, reltuples: -1i64, relpersistence: "p", relkind: "i",
            relnatts: i.columns().count() as i64, relispopulated: true, relreplident: "n");
    }
}

fn attributes(t: &SystemTables, rows: &mut Rows) {
    let mut attribute = |relid: i64, number: i64, c: &Column, not_null: bool| {
        let len = c.sql_type().map_or(-1, |t| i64::from(t.typlen()));
        let collation = if matches!(c.sql_type.oid, 25 | 1043) { 100i64 } else { 0 };
        let storage = match c.sql_type.oid {
            1700 => "m",
            _ if len < 0 => "x",
            _ => "p",
        };
        row!(rows; attrelid: relid, attname: &c.name, atttypid: c.sql_type.oid, attstattarget: -1i64,
            attlen: len, attnum: number, attcacheoff: -1i64, atttypmod: c.sql_type.typmod,
            attbyval: (1..=8).contains(&len), attalign: "i", attstorage: storage, attnotnull: not_null,
            atthasdef: c.default_sql.is_some(), attislocal: true, attcollation: collation);
    };
    for r in t.catalog().relations().iter().filter(|r| relkind(r) != "i") {
        let table = matches!(relkind(r), "r" | "f");
        for (number, c) in columns(r) {
            attribute(i64::from(r.id), number, c, table && !c.nullable);
        }
    }
    for i in indexes(t.catalog()) {
        for (n, c) in i.columns().filter_map(|k| i.table.columns.get(k)).enumerate() {
            let plain = Column { default_sql: None, ..c.clone() };
            attribute(i.oid, n as i64 + 1, &plain, false);
        }
    }
    for (_, _, oid, _, spec) in SYSTEM_TABLES {
        for (n, column) in spec.split_whitespace().enumerate() {
            let (name, kind) = column.split_once(':').unwrap_or((column, "t"));
            let (t, len) = match kind {
                "b" => (16i64, 1i64),
                "s" => (21, 2),
                "d" => (23, 4),
                "i" => (20, 8),
                "f" => (700, 4),
                "g" => (701, 8),
                "o" => (26, 4),
                "r" => (24, 4),
                "n" => (19, 64),
                "c" => (18, 1),
                "z" => (1184, 8),
                "a" => (1009, -1),
                "v" => (22, -1),
                "k" => (1005, -1),
                "w" => (30, -1),
                _ => (25, -1),
            };
            row!(rows; attrelid: *oid, attname: name, atttypid: t, attstattarget: -1i64, attlen: len,
                attnum: n as i64 + 1, attcacheoff: -1i64, atttypmod: -1i64, attalign: "i",
                attstorage: if len < 0 { "x" } else { "p" }, attislocal: true);
        }
    }
}

fn types(rows: &mut Rows) {
    for (oid, name, len, category, array) in TYPES {
        let collation = if matches!(oid, 25 | 1042 | 1043) { 100i64 } else { 0 };
        let [input, output, receive, send] = functions_of_type(oid);
        let [modin, modout] = modifier_functions(oid);
        row!(rows; oid: oid, typname: name, typnamespace: PG_CATALOG, typowner: OWNER, typlen: len,
            typbyval: (1..=8).contains(&len), typtype: "b", typcategory: category, typisdefined: true,
            typispreferred: matches!(name, "bool" | "text" | "float8" | "oid" | "timestamptz" | "interval"),
            typdelim: ",", typarray: array, typinput: input, typoutput: output, typreceive: receive, typsend: send,
            typmodin: modin, typmodout: modout, typsubscript: subscript_function(oid), typalign: "i",
            typstorage: "p", typtypmod: -1i64, typcollation: collation);
        if array > 0 {
            let [input, output, receive, send] = functions_of_array();
            row!(rows; oid: array, typname: format!("_{name}"), typnamespace: PG_CATALOG, typowner: OWNER,
                typlen: -1i64, typtype: "b", typcategory: "A", typisdefined: true, typdelim: ",", typelem: oid,
                typinput: input, typoutput: output, typreceive: receive, typsend: send, typmodin: modin,
                typmodout: modout, typsubscript: 6179i64, typalign: "i", typstorage: "x", typtypmod: -1i64,
                typcollation: collation);
        }
    }
}
