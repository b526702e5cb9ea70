//! The tables.

use std::sync::Arc;

use arrow::array::{ArrayRef, BooleanArray, Int64Array, RecordBatch, StringArray};
use arrow::datatypes::{DataType, Field, Schema};
use millrace_common::settings::SETTINGS;
use millrace_rpc::catalog::{Relation, RelationKind};

use super::SystemTables;
use crate::query::catalog_view::SYSTEM_SCHEMAS;

/// A table under construction: named columns, filled row by row.
pub struct Rows {
    names: Vec<&'static str>,
    columns: Vec<Cells>,
}

enum Cells {
    Int(Vec<Option<i64>>),
    Text(Vec<Option<String>>),
    Bool(Vec<Option<bool>>),
}

/// One value of a row.
pub enum Cell {
    I(i64),
    T(String),
    B(bool),
    N,
}

impl From<&str> for Cell {
    fn from(s: &str) -> Cell {
        Cell::T(s.to_owned())
    }
}
impl From<String> for Cell {
    fn from(s: String) -> Cell {
        Cell::T(s)
    }
}
impl From<i64> for Cell {
    fn from(v: i64) -> Cell {
        Cell::I(v)
    }
}
impl From<bool> for Cell {
    fn from(v: bool) -> Cell {
        Cell::B(v)
    }
}
impl<T: Into<Cell>> From<Option<T>> for Cell {
    fn from(v: Option<T>) -> Cell {
        v.map_or(Cell::N, Into::into)
    }
}

impl Rows {
    /// `spec`: `name:i name:t name:b …`.
    pub fn new(spec: &'static str) -> Rows {
        let (names, columns) = spec
            .split_whitespace()
            .map(|c| {
                let (name, kind) = c.split_once(':').unwrap_or((c, "t"));
                let cells = match kind {
                    "i" => Cells::Int(vec![]),
                    "b" => Cells::Bool(vec![]),
                    _ => Cells::Text(vec![]),
                };
                (name, cells)
            })
            .unzip();
        Rows { names, columns }
    }

    /// Values by position; what is left out, or of another kind, is NULL.
    pub fn push(&mut self, cells: impl IntoIterator<Item = Cell>) {
        let mut cells = cells.into_iter();
        for column in &mut self.columns {
            match (column, cells.next().unwrap_or(Cell::N)) {
                (Cells::Int(v), Cell::I(i)) => v.push(Some(i)),
                (Cells::Text(v), Cell::T(t)) => v.push(Some(t)),
                (Cells::Bool(v), Cell::B(b)) => v.push(Some(b)),
                (Cells::Int(v), _) => v.push(None),
                (Cells::Text(v), _) => v.push(None),
                (Cells::Bool(v), _) => v.push(None),
            }
        }
    }

    pub fn finish(self) -> Option<RecordBatch> {
        let arrays: Vec<ArrayRef> = self
            .columns
            .into_iter()
            .map(|c| match c {
                Cells::Int(v) => Arc::new(Int64Array::from(v)) as ArrayRef,
                Cells::Text(v) => Arc::new(StringArray::from(v)),
                Cells::Bool(v) => Arc::new(BooleanArray::from(v)),
            })
            .collect();
        let fields: Vec<Field> = self
            .names
            .iter()
            .zip(&arrays)
            .map(|(n, a)| Field::new(*n, a.data_type().clone(), true))
            .collect();
        debug_assert!(fields.iter().all(|f| !matches!(f.data_type(), DataType::Null)));
        RecordBatch::try_new(Arc::new(Schema::new(fields)), arrays).ok()
    }
}

macro_rules! row {
    ($rows:expr; $($v:expr),* $(,)?) => { $rows.push([$(Cell::from($v)),*]) };
}

/// OIDs of the schemas: PostgreSQL's for its own, numbers in catalog order for the others.
pub fn namespaces(t: &SystemTables) -> Vec<(i64, String)> {
    let mut all = vec![(11, "pg_catalog".to_owned()), (2200, "public".to_owned())];
    all.push((13_000, "information_schema".to_owned()));
    all.push((13_001, "millrace_catalog".to_owned()));
    let catalog = t.cluster().catalog();
    let mut others: Vec<&String> = catalog.schemas.iter().filter(|s| *s != "public" && !SYSTEM_SCHEMAS.contains(&s.as_str())).collect();
    others.sort();
    all.extend(others.into_iter().enumerate().map(|(i, s)| (13_100 + i as i64, s.clone())));
    all
}

fn namespace_oid(all: &[(i64, String)], name: &str) -> i64 {
    all.iter().find(|(_, n)| n == name).map_or(0, |(oid, _)| *oid)
}

/// `relkind`: sources look like foreign tables.
pub fn relkind(r: &Relation) -> &'static str {
    match RelationKind::try_from(r.kind) {
        Ok(RelationKind::Table) => "r",
        Ok(RelationKind::Source) => "f",
        Ok(RelationKind::View) => "v",
        Ok(RelationKind::MaterializedView) => "m",
        Ok(RelationKind::Index) => "i",
        _ => "r",
    }
}

/// OID of the index that stands for a table's primary key.
fn pkey_oid(r: &Relation) -> i64 {
    i64::from(r.id) + 1_000_000_000
}

const ROLES: [(i64, &str); 2] = [(10, "postgres"), (16_384 - 1, "root")];

pub fn pg_catalog(t: &SystemTables, name: &str) -> Option<RecordBatch> {
    let catalog = t.cluster().catalog();
    let spaces = namespaces(t);
    let relations = catalog.relations();
    let visible = |r: &&Arc<Relation>| r.kind != RelationKind::Unspecified as i32;
    let mut rows;
    match name {
        "pg_namespace" => {
            rows = Rows::new("oid:i nspname nspowner:i nspacl");
            for (oid, name) in &spaces {
                row!(rows; *oid, name.as_str(), 10);
            }
        }
        "pg_class" => {
            rows = Rows::new("oid:i relname relnamespace:i reltype:i reloftype:i relowner:i relam:i relfilenode:i reltablespace:i relpages:i reltuples:i relallvisible:i reltoastrelid:i relhasindex:b relisshared:b relpersistence relkind relnatts:i relchecks:i relhasrules:b relhastriggers:b relhassubclass:b relrowsecurity:b relforcerowsecurity:b relispopulated:b relreplident relispartition:b relrewrite:i relacl reloptions relpartbound");
            let class = |rows: &mut Rows, oid: i64, name: String, r: &Relation, kind: &str, natts: i64| {
                row!(rows; oid, name, namespace_oid(&spaces, &r.schema), 0, 0, 10, if kind == "i" { 403 } else { 2 }, oid, 0, 0, -1, 0, 0, r.primary_key && kind == "r", false, "p", kind, natts, 0, false, false, false, false, false, true, "d", false, 0);
            };
            for r in relations.iter().filter(visible) {
                let natts = r.columns.iter().filter(|c| !c.hidden).count() as i64;
                class(&mut rows, i64::from(r.id), r.name.clone(), r, relkind(r), natts);
                if r.primary_key {
                    class(&mut rows, pkey_oid(r), format!("{}_pkey", r.name), r, "i", r.key.len() as i64);
                }
            }
        }
        "pg_attribute" => {
            rows = Rows::new("attrelid:i attname atttypid:i attstattarget:i attlen:i attnum:i attndims:i attcacheoff:i atttypmod:i attbyval:b attstorage attalign attnotnull:b atthasdef:b atthasmissing:b attidentity attgenerated attisdropped:b attislocal:b attinhcount:i attcollation:i attcompression attacl attoptions attfdwoptions");
            for r in relations.iter().filter(visible) {
                let shown = r.columns.iter().enumerate().filter(|(_, c)| !c.hidden);
                let mut attribute = |relid: i64, number: i64, c: &millrace_rpc::catalog::Column| {
                    let len = c.sql_type().map_or(-1, |t| i64::from(t.typlen()));
                    let collation = if matches!(c.sql_type.oid, 25 | 1043) { 100 } else { 0 };
                    row!(rows; relid, c.name.as_str(), i64::from(c.sql_type.oid), -1, len, number, 0, -1, i64::from(c.sql_type.typmod), len > 0, "p", "i", !c.nullable, c.default_sql.is_some(), false, "", "", false, true, 0, collation, "");
                };
                for (i, c) in shown {
                    attribute(i64::from(r.id), i as i64 + 1, c);
                }
                if r.primary_key {
                    for (n, k) in r.key.iter().enumerate() {
                        attribute(pkey_oid(r), n as i64 + 1, &r.columns[*k as usize]);
                    }
                }
            }
        }
        "pg_attrdef" => {
            rows = Rows::new("oid:i adrelid:i adnum:i adbin");
            for r in relations {
                for (i, c) in r.columns.iter().enumerate() {
                    if let Some(default) = &c.default_sql {
                        row!(rows; i64::from(r.id) * 2000 + i as i64, i64::from(r.id), i as i64 + 1, default.as_str());
                    }
                }
            }
        }
        "pg_index" => {
            rows = Rows::new("indexrelid:i indrelid:i indnatts:i indnkeyatts:i indisunique:b indisprimary:b indisexclusion:b indimmediate:b indisclustered:b indisvalid:b indcheckxmin:b indisready:b indislive:b indisreplident:b indkey indcollation indclass indoption indexprs indpred indnullsnotdistinct:b");
            for r in relations.iter().filter(|r| r.primary_key) {
                let key: Vec<String> = r.key.iter().map(|k| (k + 1).to_string()).collect();
                row!(rows; pkey_oid(r), i64::from(r.id), r.key.len() as i64, r.key.len() as i64, true, true, false, true, false, true, false, true, true, false, key.join(" "), "", "", "", Cell::N, Cell::N, false);
            }
        }
        "pg_constraint" => {
            rows = Rows::new("oid:i conname connamespace:i contype condeferrable:b condeferred:b convalidated:b conrelid:i contypid:i conindid:i conparentid:i confrelid:i confupdtype confdeltype confmatchtype conislocal:b coninhcount:i connoinherit:b conkey confkey conbin");
            for r in relations.iter().filter(|r| r.primary_key) {
                let key: Vec<String> = r.key.iter().map(|k| (k + 1).to_string()).collect();
                row!(rows; pkey_oid(r), format!("{}_pkey", r.name), namespace_oid(&spaces, &r.schema), "p", false, false, true, i64::from(r.id), 0, pkey_oid(r), 0, 0, " ", " ", " ", true, 0, true, format!("{{{}}}", key.join(",")));
            }
        }
        "pg_type" => {
            rows = Rows::new("oid:i typname typnamespace:i typowner:i typlen:i typbyval:b typtype typcategory typispreferred:b typisdefined:b typdelim typrelid:i typelem:i typarray:i typinput typbasetype:i typtypmod:i typnotnull:b typndims:i typcollation:i typdefault");
            for (oid, name, len, category, array) in TYPES {
                row!(rows; oid, name, 11, 10, len, len > 0 && len <= 8, "b", category, false, true, ",", 0, 0, array, format!("{name}in"), 0, -1, false, 0, 0);
                if array > 0 {
                    row!(rows; array, format!("_{name}"), 11, 10, -1, false, "b", "A", false, true, ",", 0, oid, 0, "array_in", 0, -1, false, 0, 0);
                }
            }
        }
        "pg_database" => {
            rows = Rows::new("oid:i datname datdba:i encoding:i datlocprovider datistemplate:b datallowconn:b datconnlimit:i dattablespace:i datcollate datctype daticulocale datcollversion datacl");
            row!(rows; 5, t.shared.config.database.as_str(), 10, 6, "c", false, true, -1, 1663, "C", "C.UTF-8");
        }
        "pg_roles" | "pg_authid" => {
            rows = Rows::new("oid:i rolname rolsuper:b rolinherit:b rolcreaterole:b rolcreatedb:b rolcanlogin:b rolreplication:b rolbypassrls:b rolconnlimit:i rolpassword rolvaliduntil rolconfig");
            for (oid, name) in ROLES {
                row!(rows; oid, name, true, true, true, true, true, true, true, -1);
            }
        }
        "pg_user" => {
            rows = Rows::new("usename usesysid:i usecreatedb:b usesuper:b userepl:b usebypassrls:b passwd valuntil useconfig");
            for (oid, name) in ROLES {
                row!(rows; name, oid, true, true, true, true, "********");
            }
        }
        "pg_settings" => {
            rows = Rows::new("name setting unit category short_desc extra_desc context vartype source min_val max_val boot_val reset_val sourcefile sourceline:i pending_restart:b");
            for s in SETTINGS {
                let value = t.settings.value(s);
                row!(rows; s.name, value, Cell::N, s.category(), s.doc, Cell::N, "user", "string", "default", Cell::N, Cell::N, s.default, s.default, Cell::N, Cell::N, false);
            }
        }
        "pg_am" => {
            rows = Rows::new("oid:i amname amhandler amtype");
            row!(rows; 2, "heap", "heap_tableam_handler", "t");
            row!(rows; 403, "btree", "bthandler", "i");
        }
        "pg_tables" => {
            rows = Rows::new("schemaname tablename tableowner tablespace hasindexes:b hasrules:b hastriggers:b rowsecurity:b");
            for r in relations.iter().filter(|r| relkind(r) == "r") {
                row!(rows; r.schema.as_str(), r.name.as_str(), r.owner.as_str(), Cell::N, r.primary_key, false, false, false);
            }
        }
        "pg_views" => {
            rows = Rows::new("schemaname viewname viewowner definition");
            for r in relations.iter().filter(|r| relkind(r) == "v") {
                row!(rows; r.schema.as_str(), r.name.as_str(), r.owner.as_str(), r.query.as_str());
            }
        }
        "pg_matviews" => {
            rows = Rows::new("schemaname matviewname matviewowner tablespace hasindexes:b ispopulated:b definition");
            for r in relations.iter().filter(|r| relkind(r) == "m") {
                row!(rows; r.schema.as_str(), r.name.as_str(), r.owner.as_str(), Cell::N, false, true, r.query.as_str());
            }
        }
        "pg_indexes" => {
            rows = Rows::new("schemaname tablename indexname tablespace indexdef");
            for r in relations.iter().filter(|r| r.primary_key) {
                row!(rows; r.schema.as_str(), r.name.as_str(), format!("{}_pkey", r.name), Cell::N, index_definition(r));
            }
        }
        "pg_stat_activity" => {
            rows = Rows::new("datid:i datname pid:i usesysid:i usename application_name client_addr state query backend_type");
            for a in t.shared.activity() {
                let state = if a.active { "active" } else { "idle" };
                row!(rows; 5, a.database, i64::from(a.pid), 10, a.user, a.application, a.address, state, a.query, "client backend");
            }
        }
        "pg_collation" => {
            rows = Rows::new("oid:i collname collnamespace:i collowner:i collprovider collisdeterministic:b collencoding:i collcollate collctype");
            row!(rows; 100, "default", 11, 10, "d", true, -1);
            row!(rows; 950, "C", 11, 10, "c", true, -1, "C", "C");
        }
        "pg_tablespace" => {
            rows = Rows::new("oid:i spcname spcowner:i spcacl spcoptions");
            row!(rows; 1663, "pg_default", 10);
        }
        _ => rows = Rows::new(empty_table(name)?),
    }
    rows.finish()
}

/// `CREATE UNIQUE INDEX …` of a primary key.
pub fn index_definition(r: &Relation) -> String {
    let key: Vec<&str> = r.key.iter().filter_map(|k| r.columns.get(*k as usize)).map(|c| c.name.as_str()).collect();
    format!("CREATE UNIQUE INDEX {n}_pkey ON {s}.{n} USING btree ({k})", n = r.name, s = r.schema, k = key.join(", "))
}

/// oid, name, length, category, array type.
const TYPES: [(i64, &str, i64, &str, i64); 24] = [
    (16, "bool", 1, "B", 1000),
    (17, "bytea", -1, "U", 1001),
    (18, "char", 1, "Z", 1002),
    (19, "name", 64, "S", 1003),
    (20, "int8", 8, "N", 1016),
    (21, "int2", 2, "N", 1005),
    (23, "int4", 4, "N", 1007),
    (24, "regproc", 4, "N", 1008),
    (25, "text", -1, "S", 1009),
    (26, "oid", 4, "N", 1028),
    (114, "json", -1, "U", 199),
    (700, "float4", 4, "N", 1021),
    (701, "float8", 8, "N", 1022),
    (705, "unknown", -2, "X", 0),
    (1042, "bpchar", -1, "S", 1014),
    (1043, "varchar", -1, "S", 1015),
    (1082, "date", 4, "D", 1182),
    (1083, "time", 8, "D", 1183),
    (1114, "timestamp", 8, "D", 1115),
    (1184, "timestamptz", 8, "D", 1185),
    (1186, "interval", 16, "T", 1187),
    (1700, "numeric", -1, "N", 1231),
    (2205, "regclass", 4, "N", 2210),
    (2950, "uuid", 16, "U", 2951),
];

/// Columns of tables that are always empty here.
fn empty_table(name: &str) -> Option<&'static str> {
    Some(match name {
        "pg_description" => "objoid:i classoid:i objsubid:i description",
        "pg_shdescription" => "objoid:i classoid:i description",
        "pg_proc" => "oid:i proname pronamespace:i proowner:i prolang:i prokind prorettype:i proargtypes pronargs:i proretset:b prosrc proacl provolatile",
        "pg_policy" => "oid:i polname polrelid:i polcmd polpermissive:b polroles polqual polwithcheck",
        "pg_publication" => "oid:i pubname pubowner:i puballtables:b pubinsert:b pubupdate:b pubdelete:b pubtruncate:b pubviaroot:b",
        "pg_publication_rel" => "oid:i prpubid:i prrelid:i prqual prattrs",
        "pg_publication_namespace" => "oid:i pnpubid:i pnnspid:i",
        "pg_publication_tables" => "pubname schemaname tablename",
        "pg_subscription" => "oid:i subdbid:i subname subowner:i subenabled:b",
        "pg_statistic_ext" => "oid:i stxrelid:i stxname stxnamespace:i stxowner:i stxstattarget:i stxkeys stxkind stxexprs",
        "pg_inherits" => "inhrelid:i inhparent:i inhseqno:i inhdetachpending:b",
        "pg_trigger" => "oid:i tgrelid:i tgparentid:i tgname tgfoid:i tgtype:i tgenabled tgisinternal:b tgconstrrelid:i tgconstrindid:i tgconstraint:i tgdeferrable:b tginitdeferred:b",
        "pg_rewrite" => "oid:i rulename ev_class:i ev_type ev_enabled is_instead:b ev_qual ev_action",
        "pg_foreign_table" => "ftrelid:i ftserver:i ftoptions",
        "pg_foreign_server" => "oid:i srvname srvowner:i srvfdw:i srvtype srvversion srvacl srvoptions",
        "pg_foreign_data_wrapper" => "oid:i fdwname fdwowner:i fdwhandler:i fdwvalidator:i",
        "pg_depend" => "classid:i objid:i objsubid:i refclassid:i refobjid:i refobjsubid:i deptype",
        "pg_enum" => "oid:i enumtypid:i enumsortorder:i enumlabel",
        "pg_range" => "rngtypid:i rngsubtype:i rngmultitypid:i rngcollation:i rngsubopc:i",
        "pg_sequence" => "seqrelid:i seqtypid:i seqstart:i seqincrement:i seqmax:i seqmin:i seqcache:i seqcycle:b",
        "pg_sequences" => "schemaname sequencename sequenceowner data_type start_value:i min_value:i max_value:i increment_by:i cycle:b cache_size:i last_value:i",
        "pg_extension" => "oid:i extname extowner:i extnamespace:i extrelocatable:b extversion",
        "pg_available_extensions" => "name default_version installed_version comment",
        "pg_language" => "oid:i lanname lanowner:i lanispl:b lanpltrusted:b",
        "pg_partitioned_table" => "partrelid:i partstrat partnatts:i partdefid:i partattrs",
        "pg_auth_members" => "roleid:i member:i grantor:i admin_option:b",
        "pg_db_role_setting" => "setdatabase:i setrole:i setconfig",
        "pg_locks" => "locktype database:i relation:i pid:i mode granted:b",
        "pg_operator" => "oid:i oprname oprnamespace:i oprleft:i oprright:i oprresult:i",
        "pg_opclass" => "oid:i opcmethod:i opcname opcnamespace:i opcintype:i opcdefault:b",
        "pg_aggregate" => "aggfnoid:i aggkind",
        "pg_cast" => "oid:i castsource:i casttarget:i castfunc:i castcontext castmethod",
        "pg_conversion" => "oid:i conname connamespace:i",
        "pg_event_trigger" => "oid:i evtname evtevent evtowner:i evtenabled",
        "pg_ts_config" => "oid:i cfgname cfgnamespace:i",
        "pg_prepared_statements" => "name statement",
        "pg_cursors" => "name statement is_holdable:b",
        _ => return None,
    })
}

pub fn information_schema(t: &SystemTables, name: &str) -> Option<RecordBatch> {
    let catalog = t.cluster().catalog();
    let database = t.shared.config.database.as_str();
    let kind = |r: &Relation| match relkind(r) {
        "v" => "VIEW",
        "f" => "FOREIGN",
        "m" => "MATERIALIZED VIEW",
        _ => "BASE TABLE",
    };
    let mut rows;
    match name {
        "tables" => {
            rows = Rows::new("table_catalog table_schema table_name table_type self_referencing_column_name reference_generation user_defined_type_catalog user_defined_type_schema user_defined_type_name is_insertable_into is_typed commit_action");
            for r in catalog.relations() {
                let insertable = if relkind(r) == "r" { "YES" } else { "NO" };
                row!(rows; database, r.schema.as_str(), r.name.as_str(), kind(r), Cell::N, Cell::N, Cell::N, Cell::N, Cell::N, insertable, "NO");
            }
        }
        "columns" => {
            rows = Rows::new("table_catalog table_schema table_name column_name ordinal_position:i column_default is_nullable data_type character_maximum_length:i numeric_precision:i numeric_scale:i datetime_precision:i udt_catalog udt_schema udt_name is_identity is_generated is_updatable");
            for r in catalog.relations() {
                for (i, c) in r.columns.iter().enumerate().filter(|(_, c)| !c.hidden) {
                    let Ok(sql) = c.sql_type() else { continue };
                    let (length, precision, scale) = match sql {
                        millrace_common::SqlType::Varchar(n) => (n.map(i64::from), None, None),
                        millrace_common::SqlType::Numeric(Some((p, s))) => (None, Some(i64::from(p)), Some(i64::from(s))),
                        millrace_common::SqlType::SmallInt => (None, Some(16), Some(0)),
                        millrace_common::SqlType::Int => (None, Some(32), Some(0)),
                        millrace_common::SqlType::BigInt => (None, Some(64), Some(0)),
                        _ => (None, None, None),
                    };
                    let data_type = sql.to_string();
                    let data_type = data_type.split('(').next().unwrap_or_default().to_owned();
                    let udt = TYPES.iter().find(|t| t.0 == i64::from(sql.oid())).map(|t| t.1);
                    row!(rows; database, r.schema.as_str(), r.name.as_str(), c.name.as_str(), i as i64 + 1, c.default_sql.clone(), if c.nullable { "YES" } else { "NO" }, data_type, length, precision, scale, Cell::N, database, "pg_catalog", udt, "NO", "NEVER", if relkind(r) == "r" { "YES" } else { "NO" });
                }
            }
        }
        "schemata" => {
            rows = Rows::new("catalog_name schema_name schema_owner default_character_set_catalog default_character_set_schema default_character_set_name sql_path");
            for (_, name) in namespaces(t) {
                row!(rows; database, name, "postgres");
            }
        }
        "views" => {
            rows = Rows::new("table_catalog table_schema table_name view_definition check_option is_updatable is_insertable_into");
            for r in catalog.relations().iter().filter(|r| relkind(r) == "v") {
                row!(rows; database, r.schema.as_str(), r.name.as_str(), r.query.as_str(), "NONE", "NO", "NO");
            }
        }
        "table_constraints" => {
            rows = Rows::new("constraint_catalog constraint_schema constraint_name table_catalog table_schema table_name constraint_type is_deferrable initially_deferred enforced");
            for r in catalog.relations().iter().filter(|r| r.primary_key) {
                row!(rows; database, r.schema.as_str(), format!("{}_pkey", r.name), database, r.schema.as_str(), r.name.as_str(), "PRIMARY KEY", "NO", "NO", "YES");
            }
        }
        "key_column_usage" => {
            rows = Rows::new("constraint_catalog constraint_schema constraint_name table_catalog table_schema table_name column_name ordinal_position:i position_in_unique_constraint:i");
            for r in catalog.relations().iter().filter(|r| r.primary_key) {
                for (n, k) in r.key.iter().enumerate() {
                    row!(rows; database, r.schema.as_str(), format!("{}_pkey", r.name), database, r.schema.as_str(), r.name.as_str(), r.columns[*k as usize].name.as_str(), n as i64 + 1);
                }
            }
        }
        "referential_constraints" => rows = Rows::new("constraint_catalog constraint_schema constraint_name unique_constraint_catalog unique_constraint_schema unique_constraint_name match_option update_rule delete_rule"),
        "routines" => rows = Rows::new("specific_catalog specific_schema specific_name routine_catalog routine_schema routine_name routine_type data_type"),
        _ => return None,
    }
    rows.finish()
}

pub fn millrace_catalog(t: &SystemTables, name: &str) -> Option<RecordBatch> {
    let catalog = t.cluster().catalog();
    let mut rows;
    match name {
        "jobs" => {
            rows = Rows::new("id:i schema_name name state progress reason epoch:i lag_ms:i");
            for j in t.cluster().jobs() {
                let r = catalog.by_id(j.relation);
                row!(rows; i64::from(j.relation), r.map(|r| r.schema.as_str()), r.map(|r| r.name.as_str()), j.state, j.progress, j.reason, j.epoch as i64, j.lag_ms.map(|l| l as i64));
            }
        }
        "settings" => {
            rows = Rows::new("name value default_value description");
            for s in SETTINGS {
                row!(rows; s.name, t.settings.value(s), s.default, s.doc);
            }
        }
        "state_tables" => {
            rows = Rows::new("table_id:i relation_id:i relation_name");
            for r in catalog.relations() {
                for id in r.first_table_id..r.first_table_id + r.table_count {
                    row!(rows; i64::from(id), i64::from(r.id), r.name.as_str());
                }
            }
        }
        _ => return None,
    }
    rows.finish()
}
