//! Our statements: what `parse` returns.
//!
//! Everything that PostgreSQL and streaming databases share is left to sqlparser ([`Statement::Sql`]:
//! SELECT, INSERT, UPDATE, DELETE, COPY, SET, BEGIN …). What sqlparser cannot say, or says in a way
//! that depends on its version, has a variant of its own with only the parts that mean something here.

use std::sync::Arc;

use sqlparser::ast::{
    ColumnDef, Expr, FetchDirection, Ident, ObjectName, Query, Statement as SqlStatement,
    TableConstraint,
};

/// One statement of a string of statements.
#[derive(Clone, Debug)]
pub struct ParsedStatement {
    pub statement: Statement,
    /// Its own source text, without the semicolon and surrounding white space.
    pub text: String,
    /// Characters of the whole string before `text`; positions in errors count from the whole string.
    pub offset: usize,
    /// The whole string, where positions count; shared by its statements. Empty where it is not known.
    pub source: Arc<str>,
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
    CreateSink(Box<CreateSink>),
    CreateSubscription(Box<CreateSubscription>),
    /// DECLARE name SUBSCRIPTION CURSOR FOR subscription.
    DeclareSubscriptionCursor(Box<DeclareSubscriptionCursor>),
    /// FETCH [NEXT | n] FROM cursor WITH (timeout = …).
    FetchWait {
        cursor: Ident,
        count: u64,
        timeout: String,
    },
    /// MOVE [direction] [FROM | IN] cursor: FETCH without the rows.
    Move {
        cursor: Ident,
        direction: FetchDirection,
    },
    /// SUBSCRIBE TO query, plain or inside COPY … TO STDOUT.
    Subscribe(Box<Subscribe>),
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
    /// CREATE, ALTER and DROP of USER or ROLE.
    User(UserStatement),
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

/// A change of users.
#[derive(Clone, PartialEq, Eq)]
pub enum UserStatement {
    /// The password: `None`: not named; `Some(None)`: PASSWORD NULL.
    Create {
        name: Ident,
        if_not_exists: bool,
        password: Option<Option<String>>,
    },
    Alter {
        name: Ident,
        password: Option<Option<String>>,
    },
    Drop {
        names: Vec<Ident>,
        if_exists: bool,
    },
}

impl std::fmt::Debug for UserStatement {
    /// Passwords are not for logs.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            UserStatement::Create { .. } => "Create",
            UserStatement::Alter { .. } => "Alter",
            UserStatement::Drop { .. } => "Drop",
        })
    }
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
    Subscription,
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
            ObjectKind::Subscription => "subscription",
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
    /// INCLUDE fact [AS name]: names in lower case.
    pub includes: Vec<(String, Option<Ident>)>,
    /// CREATE TABLE … AS query; its columns then have names only.
    pub query: Option<QueryText>,
    /// The query's rows are put in: not WITH NO DATA.
    pub with_data: bool,
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
    /// Not WITH NO DATA.
    pub with_data: bool,
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

/// CREATE SINK name [INTO table [(columns)]] FROM relation | AS query WITH (…) [FORMAT … ENCODE …].
#[derive(Clone, Debug)]
pub struct CreateSink {
    pub name: ObjectName,
    pub if_not_exists: bool,
    /// The table it feeds, and its columns as far as they are listed.
    pub into: Option<(ObjectName, Vec<Ident>)>,
    pub query: QueryText,
    /// FROM: the query is all columns of a relation.
    pub from_relation: bool,
    pub options: Vec<(String, String)>,
    pub format: Option<FormatClause>,
}

#[derive(Clone, Debug)]
pub struct CreateSubscription {
    pub name: ObjectName,
    pub if_not_exists: bool,
    pub from: ObjectName,
    pub options: Vec<(String, String)>,
}

#[derive(Clone, Debug)]
pub struct DeclareSubscriptionCursor {
    pub name: Ident,
    pub subscription: ObjectName,
    pub start: CursorStart,
}

/// Where a subscription cursor begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CursorStart {
    /// The snapshot, then the changes after it.
    Full,
    /// Changes from now on.
    Now,
    /// The oldest change that is kept.
    Begin,
    /// After an epoch, or after a point in time given as text.
    After(String),
}

#[derive(Clone, Debug)]
pub struct Subscribe {
    /// The relation that is named instead of a query.
    pub relation: Option<ObjectName>,
    pub query: QueryText,
    /// AS OF: an epoch or a point in time; the stream goes on after it.
    pub as_of: Option<String>,
    /// `snapshot`, `progress`.
    pub options: Vec<(String, String)>,
    /// COPY (SUBSCRIBE …) TO STDOUT, with these options; `None`: plain.
    pub copy: Option<Vec<(String, String)>>,
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
    /// PAUSE and RESUME of what comes from a connector.
    Pause(bool),
    Rebuild,
}

#[derive(Clone, Debug)]
pub enum Show {
    /// Optionally FROM a schema.
    Tables(Option<Ident>),
    Sources(Option<Ident>),
    Views(Option<Ident>),
    MaterializedViews(Option<Ident>),
    Indexes(Option<ObjectName>),
    Sinks(Option<Ident>),
    Subscriptions(Option<Ident>),
    SubscriptionCursors,
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
