//! Our statements: what `parse` returns.
//!
//! Everything that PostgreSQL and streaming databases share is left to sqlparser ([`Statement::Sql`]:
//! SELECT, INSERT, UPDATE, DELETE, COPY, SET, BEGIN …). What sqlparser cannot say, or says in a way
//! that depends on its version, has a variant of its own with only the parts that mean something here.

pub use sqlparser::ast::{
    ColumnDef, Expr, Ident, ObjectName, Query, Statement as SqlStatement, TableConstraint,
};

/// One statement of a string of statements.
#[derive(Clone, Debug)]
pub struct ParsedStatement {
    pub statement: Statement,
    /// Its own source text, without the semicolon and surrounding white space.
    pub text: String,
    /// Characters of the whole string before `text`; positions in errors count from the whole string.
    pub offset: usize,
}

#[derive(Clone, Debug)]
pub enum Statement {
    /// Whatever sqlparser's PostgreSQL dialect parses and has no variant below.
    Sql(Box<SqlStatement>),
    CreateTable(Box<TableDefinition>),
    CreateSource(Box<TableDefinition>),
    /// CREATE VIEW and CREATE MATERIALIZED VIEW.
    CreateView(Box<CreateView>),
    CreateIndex(Box<CreateIndex>),
    CreateSchema {
        name: Ident,
        if_not_exists: bool,
    },
    Drop(Drop),
    AlterRelation {
        kind: ObjectKind,
        name: ObjectName,
        if_exists: bool,
        action: AlterAction,
    },
    /// ALTER SYSTEM SET name = value, or RESET name.
    AlterSystem {
        name: String,
        value: Option<String>,
    },
    Truncate {
        tables: Vec<ObjectName>,
        cascade: bool,
    },
    Show(Show),
    Describe {
        name: ObjectName,
    },
    Explain(Box<Explain>),
    /// Waits until every running job has committed what was acknowledged before.
    Flush,
    /// Waits until all views under creation are done.
    Wait,
    /// CANCEL JOB[S] ids.
    CancelJobs(Vec<u32>),
}

/// The kind named in DROP and ALTER.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObjectKind {
    Table,
    Source,
    View,
    MaterializedView,
    Index,
    Schema,
    Sink,
}

impl ObjectKind {
    /// As error messages say it.
    pub fn noun(self) -> &'static str {
        match self {
            ObjectKind::Table => "table",
            ObjectKind::Source => "source",
            ObjectKind::View => "view",
            ObjectKind::MaterializedView => "materialized view",
            ObjectKind::Index => "index",
            ObjectKind::Schema => "schema",
            ObjectKind::Sink => "sink",
        }
    }
}

/// CREATE TABLE and CREATE SOURCE.
#[derive(Clone, Debug)]
pub struct TableDefinition {
    pub name: ObjectName,
    pub or_replace: bool,
    pub if_not_exists: bool,
    pub columns: Vec<ColumnDef>,
    pub constraints: Vec<TableConstraint>,
    pub watermark: Option<WatermarkDefinition>,
    pub append_only: bool,
    pub on_conflict: Option<ConflictAction>,
    /// WITH (…): names in lower case, values without quotes; in source order.
    pub options: Vec<(String, String)>,
    /// FORMAT x ENCODE y (options): names in upper case.
    pub format: Option<FormatClause>,
    /// CREATE TABLE … AS query.
    pub query: Option<QueryText>,
}

/// A query and the text it was parsed from, which is what the catalog keeps.
#[derive(Clone, Debug)]
pub struct QueryText {
    pub query: Box<Query>,
    pub text: String,
}

#[derive(Clone, Debug)]
pub struct WatermarkDefinition {
    pub column: Ident,
    pub expr: Expr,
    pub text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConflictAction {
    Overwrite,
    Ignore,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FormatClause {
    pub format: String,
    pub encode: String,
    pub options: Vec<(String, String)>,
}

#[derive(Clone, Debug)]
pub struct CreateView {
    pub name: ObjectName,
    pub materialized: bool,
    pub or_replace: bool,
    pub if_not_exists: bool,
    /// Column names in parentheses after the view's name.
    pub columns: Vec<Ident>,
    pub options: Vec<(String, String)>,
    pub query: QueryText,
    pub emit_on_window_close: bool,
}

#[derive(Clone, Debug)]
pub struct CreateIndex {
    pub name: Option<Ident>,
    pub table: ObjectName,
    pub unique: bool,
    pub if_not_exists: bool,
    /// Column (or expression), ascending, nulls first.
    pub columns: Vec<(Expr, bool, Option<bool>)>,
    pub include: Vec<Ident>,
}

#[derive(Clone, Debug)]
pub struct Drop {
    pub kind: ObjectKind,
    pub names: Vec<ObjectName>,
    pub if_exists: bool,
    pub cascade: bool,
}

#[derive(Clone, Debug)]
pub enum AlterAction {
    Rename(Ident),
    SetSchema(Ident),
    OwnerTo(Ident),
    SetParallelism(String),
    /// SET (name = value, …)
    SetOptions(Vec<(String, String)>),
}

#[derive(Clone, Debug)]
pub enum Show {
    /// Optionally FROM a schema.
    Tables(Option<Ident>),
    Sources(Option<Ident>),
    Views(Option<Ident>),
    MaterializedViews(Option<Ident>),
    Indexes(Option<ObjectName>),
    Schemas,
    Databases,
    Jobs,
    Columns(ObjectName),
    Create(ObjectKind, ObjectName),
    /// SHOW ALL.
    AllSettings,
    /// SHOW name.
    Setting(String),
}

#[derive(Clone, Debug)]
pub struct Explain {
    pub analyze: bool,
    pub verbose: bool,
    /// Options in parentheses: names in lower case; a missing value is `true`.
    pub options: Vec<(String, String)>,
    pub target: ExplainTarget,
}

#[derive(Clone, Debug)]
pub enum ExplainTarget {
    Statement(Statement),
    /// EXPLAIN ANALYZE MATERIALIZED VIEW name: a running job.
    Job(ObjectName),
}
