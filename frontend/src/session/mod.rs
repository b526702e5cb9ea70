//! A session: what lives between two statements of one connection, and running one statement.
//!
//! Invariants: a statement reads one epoch; in BEGIN … COMMIT writes are staged and committed as one; after an error in a block everything but its end is refused (25P02). The
//! session never holds a lock across an await.

pub mod advisory;
pub mod cursor;
pub mod execute;
pub mod feed;
mod known;
pub mod live;
mod missing;
pub mod outcome;
pub mod params;
pub(crate) mod planned;
pub mod prepare;
mod quick;
pub mod reads;
pub mod scope;
pub mod scroll;
pub mod set;
pub mod settings;
mod shown;
pub mod step;
pub mod subscribe;
pub mod transaction;
pub mod writes;
mod zone;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use arrow::array::RecordBatch;
use arrow::datatypes::DataType;
use futures::StreamExt;
use millrace_common::{Epoch, RelationId, SqlError, SqlState, SqlType};
use millrace_planner::bind::outputs::{Output, declared_types, outputs, replaces};
use millrace_planner::{Binder, BoundQuery, SessionInfo};
use millrace_rpc::catalog::ColumnType;
use parking_lot::Mutex;
use sqlparser::ast::Query;
use tokio_util::sync::CancellationToken;

pub use live::LiveNotices;
pub use outcome::{Outcome, RowSet};
pub use prepare::{Portal, Prepared};
pub use settings::Settings;
pub use step::Step;
pub use transaction::Block;
pub use writes::StagedWrites;

use crate::catalog::SystemTables;
use crate::catalog::rows::TYPE_OID;
use crate::cluster::{BatchStream, Cluster};
use crate::query::planning::Held;
use crate::query::{ExpressionErrors, QueryEngine, SessionCatalog};
use crate::server::Shared;
use crate::wire::{Field, Told, TransactionStatus};

pub struct Session {
    pub shared: Arc<Shared>,
    pub pid: i32,
    pub user: String,
    pub database: String,
    pub settings: Settings,
    pub block: Block,
    pub prepared: HashMap<String, Arc<Prepared>>,
    pub portals: HashMap<String, Portal>,
    /// Subscription cursors. The lock only makes them shareable; it is never waited for.
    pub feeds: HashMap<String, Mutex<subscribe::SubscriptionCursor>>,
    /// Notices of the statement under way: severity and text.
    pub notices: Vec<(&'static str, SqlError)>,
    /// Notices that the client is to have before the statement ends.
    pub live: Arc<LiveNotices>,
    /// Rows of the statement under way that came too late.
    late: AtomicU64,
    /// Settings that clients are told about when they change.
    pub changed: Vec<&'static str>,
    /// Settings that SET LOCAL hides until the block ends: name and value before.
    pub locals: Vec<(String, String)>,
    /// What ROLLBACK goes back to in a string of statements without BEGIN.
    pub before_string: Option<Box<Settings>>,
    /// The statement under way is the last of those that are an implicit block.
    pub last_of_many: bool,
    /// When the message with the statement under way came, and the first one of its transaction: microseconds since 1970.
    statement_at: i64,
    transaction_at: i64,
    /// Cancels the statement under way.
    pub cancel: CancellationToken,
    /// The step of the statement that is being awaited.
    pub step: Arc<Step>,
    /// Writes of the block. Shared with the catalogs of its statements, whose reads see them.
    pub writes: Arc<Mutex<StagedWrites>>,
    /// What the statement under way has read, if it will be asked.
    pub reads: reads::NotedReads,
    /// The epoch that all reads of the block use, once the first has chosen it.
    pub frozen: Mutex<Option<Epoch>>,
    /// The statement under way is planned again where the catalog that it was planned on turns out to be an older one.
    replans: bool,
    /// The columns that the client was told of a statement whose WITH changes rows, while that is executed.
    described: Option<Vec<Field>>,
    /// Whether the block has had a query: its isolation level stays then.
    pub queried: bool,
    /// What the parts of the statement under way share, if it has parts.
    pub scope: Arc<Mutex<Option<scope::Scope>>>,
}

impl Session {
    pub fn new(shared: Arc<Shared>, pid: i32, user: String, database: String) -> Session {
        let mut settings = Settings::default();
        let (most, reserved) = (shared.config.max_connections, shared.config.reserved());
        settings.preset("max_connections", &most.to_string());
        settings.preset("superuser_reserved_connections", &reserved.to_string());
        Session {
            shared,
            pid,
            user,
            database,
            settings,
            block: Block::None,
            prepared: HashMap::new(),
            portals: HashMap::new(),
            feeds: HashMap::new(),
            notices: Vec::new(),
            live: Arc::default(),
            late: AtomicU64::new(0),
            changed: Vec::new(),
            locals: Vec::new(),
            before_string: None,
            last_of_many: false,
            statement_at: now_us(),
            transaction_at: now_us(),
            cancel: CancellationToken::new(),
            step: Arc::default(),
            writes: Arc::default(),
            reads: Arc::default(),
            frozen: Mutex::default(),
            described: None,
            replans: false,
            queried: false,
            scope: Arc::default(),
        }
    }

    pub fn cluster(&self) -> &Arc<dyn Cluster> {
        &self.shared.cluster
    }

    pub fn engine(&self) -> &QueryEngine {
        &self.shared.engine
    }

    /// Begins a step of a statement.
    pub fn begin_step(&mut self) -> Arc<Step> {
        self.step = Arc::default();
        Arc::clone(&self.step)
    }

    /// The memory of what the step under way plans.
    pub fn plan_memory(&self) -> Arc<Held> {
        self.step.held(self.engine())
    }

    pub fn status(&self) -> TransactionStatus {
        match self.block {
            Block::None | Block::Implicit => TransactionStatus::Idle,
            Block::Open { .. } => TransactionStatus::Transaction,
            Block::Failed { .. } => TransactionStatus::Error,
        }
    }

    /// A message with statements has come. Their `now()` is the time of their transaction.
    pub fn arrive(&mut self) {
        self.statement_at = now_us();
        if matches!(self.block, Block::None) {
            self.transaction_at = self.statement_at;
        }
    }

    pub fn notice(&mut self, severity: &'static str, state: SqlState, message: impl Into<String>) {
        self.notices.push((severity, SqlError::new(state, message)));
    }

    /// Whether `client_min_messages` lets a notice of this severity through.
    pub fn is_told(&self, severity: &str) -> bool {
        match self.settings.get("client_min_messages").unwrap_or_default() {
            "error" => false,
            "warning" => severity != "NOTICE",
            _ => true,
        }
    }

    /// Rows that were older than their table's watermark.
    pub fn note_late(&self, rows: u64) {
        self.late.fetch_add(rows, Ordering::Relaxed);
    }

    /// Tells the client of late rows.
    pub fn notice_late(&mut self) {
        let rows = self.late.swap(0, Ordering::Relaxed);
        if rows > 0 {
            let (noun, verb) = if rows == 1 { ("row", "was") } else { ("rows", "were") };
            let message =
                format!("{rows} {noun} {verb} not inserted: older than the table's watermark");
            self.notice("NOTICE", SqlState::SUCCESS, message);
        }
    }

    /// `search_path` with `"$user"` resolved and quotes taken off.
    pub fn search_path(&self) -> Vec<String> {
        let path = self.settings.get("search_path").unwrap_or("public");
        path.split(',')
            .map(|s| s.trim())
            .map(|s| {
                s.strip_prefix('"')
                    .and_then(|s| s.strip_suffix('"'))
                    .map_or_else(|| s.to_lowercase(), str::to_owned)
            })
            .map(|s| if s == "$user" { self.user.clone() } else { s })
            .filter(|s| !s.is_empty())
            .collect()
    }

    /// The catalog for one statement.
    pub fn catalog_view(&self) -> SessionCatalog {
        let view = SessionCatalog::new(
            self.cluster().clone(),
            self.search_path(),
            SystemTables::new(self),
        )
        .with_reads(Arc::clone(&self.reads));
        match self.scope.lock().as_ref() {
            Some(scope) => scope.narrow(view),
            None => view.with_writes(Arc::clone(&self.writes)),
        }
    }

    pub fn info(&self, for_view: bool) -> SessionInfo {
        SessionInfo {
            database: self.database.clone(),
            user: self.user.clone(),
            now_us: self.transaction_at,
            statement_us: self.statement_at,
            for_view,
            zones: self.zones(for_view),
        }
    }

    /// Binds a query; its output columns as a client sees them.
    pub fn bind(
        &self,
        view: &SessionCatalog,
        written: &Query,
        params: &[Option<DataType>],
    ) -> Result<(BoundQuery, Vec<Field>), SqlError> {
        let (bound, mut fields) = self.bind_untold(view, written, params)?;
        tell(&mut fields, self.outputs(view, written).as_deref());
        Ok((bound, fields))
    }

    /// The same for a query whose rows no client sees: its columns have their types only.
    fn bind_untold(
        &self,
        view: &SessionCatalog,
        written: &Query,
        params: &[Option<DataType>],
    ) -> Result<(BoundQuery, Vec<Field>), SqlError> {
        let query = crate::catalog::rewrite::for_clients(written, self)?;
        let plan = || Binder::new(view, self.info(false)).query(&query, params);
        let bound = match quick::is_quick_to_bind(view, &query) {
            true => self.plan_memory().binding(plan)?,
            false => self.plan_memory().binding(|| busy(plan))?,
        };
        self.note_relations(&bound.relations);
        let fields = fields_of(&bound.names, &bound.types, Some(bound.plan.schema().as_arrow()));
        Ok((bound, fields))
    }

    /// What is known of a query's columns as it is written.
    pub fn outputs(&self, view: &SessionCatalog, query: &Query) -> Option<Vec<Output>> {
        outputs(query, view, &self.database)
    }

    /// Types for the columns of a relation that is made of a query.
    pub fn declared_types(
        &self,
        view: &SessionCatalog,
        query: &Query,
        bound: &BoundQuery,
    ) -> Vec<ColumnType> {
        declared_types(&bound.types, self.outputs(view, query).as_deref())
    }

    /// The newest epoch at which the relations are exact, as `read_freshness` asks.
    pub async fn read_epoch(&self, ids: &[RelationId]) -> Result<Epoch, SqlError> {
        if let Some(epoch) = self.scope_epoch() {
            return match self.cluster().exact_at(ids, epoch) {
                true => Ok(epoch),
                false => Err(scope::no_version()),
            };
        }
        if !self.freezes_snapshot() {
            return self.newest_epoch(ids).await;
        }
        let frozen = *self.frozen.lock();
        if let Some(epoch) = frozen {
            return match self.cluster().exact_at(ids, epoch) {
                true => Ok(epoch),
                false => Err(SqlError::new(
                    SqlState::SERIALIZATION_FAILURE,
                    "a relation has no version at the transaction's snapshot",
                )
                .with_hint(
                    "Retry the transaction, reading its views first, or use READ COMMITTED.",
                )),
            };
        }
        let epoch = self.newest_epoch(ids).await?;
        *self.frozen.lock() = Some(epoch);
        Ok(epoch)
    }

    async fn newest_epoch(&self, ids: &[RelationId]) -> Result<Epoch, SqlError> {
        let timeout = self.read_timeout()?;
        self.cluster().read_epoch(ids, timeout, self.reads_fresh()?).await
    }

    /// Whether reads miss nothing that was acknowledged before.
    fn reads_fresh(&self) -> Result<bool, SqlError> {
        Ok(self.settings.get("read_freshness")? != "any")
    }

    /// How long a read waits for its epoch; 0 where nothing sets it.
    fn read_timeout(&self) -> Result<Duration, SqlError> {
        let setting = millrace_common::settings::find("read_wait_timeout")?;
        let millis = match self.settings.is_set(setting) {
            true => None,
            false => self.cluster().setting(setting.name).and_then(|v| v.parse().ok()),
        };
        let millis = millis.or_else(|| self.settings.millis(setting.name));
        Ok(Duration::from_millis(millis.unwrap_or(0)))
    }

    /// Starts a query; rows come through the set's stream.
    pub async fn query(&self, query: &Query) -> Result<RowSet, SqlError> {
        if let Some(pause) = crate::catalog::rewrite::sleeps(query) {
            tokio::time::sleep(pause).await;
            return RowSet::text(&["pg_sleep"], vec![vec![Some(String::new())]], "SELECT {n}");
        }
        if let Some(calls) = crate::catalog::rewrite::lock_calls(query) {
            return self.take_locks(&calls).await;
        }
        let view = self.catalog_view();
        let (bound, fields) = self.bind(&view, query, &[])?;
        self.fix_epoch(&view, &bound).await?;
        let errors = match self.settings.get("expression_errors")? {
            "null" => ExpressionErrors::Null,
            _ => ExpressionErrors::Raised,
        };
        let stream = self.engine().run_with(bound.plan, errors, &self.plan_memory()).await?;
        Ok(RowSet::select(fields, stream))
    }

    /// Rows of a query that a statement is made of, as they come. No client sees them: of the columns only the types
    /// are known.
    pub async fn stream(
        &self,
        view: &SessionCatalog,
        query: &Query,
    ) -> Result<(Vec<Field>, BatchStream), SqlError> {
        let (bound, fields) = self.bind_untold(view, query, &[])?;
        self.fix_epoch(view, &bound).await?;
        Ok((fields, self.engine().run(bound.plan, &self.plan_memory()).await?))
    }

    /// All rows of a query that a statement is made of.
    pub async fn collect(
        &self,
        view: &SessionCatalog,
        query: &Query,
    ) -> Result<(Vec<Field>, Vec<RecordBatch>), SqlError> {
        let (bound, fields) = self.bind(view, query, &[])?;
        self.fix_epoch(view, &bound).await?;
        let mut stream = self.engine().run(bound.plan, &self.plan_memory()).await?;
        let mut batches = Vec::new();
        while let Some(batch) = stream.next().await {
            batches.push(batch?);
        }
        Ok((fields, batches))
    }
}

/// Output columns: the planner's SQL types, except where only Arrow tells (arrays, OIDs).
pub fn fields_of(
    names: &[String],
    types: &[SqlType],
    schema: Option<&arrow::datatypes::Schema>,
) -> Vec<Field> {
    names
        .iter()
        .zip(types)
        .enumerate()
        .map(|(i, (name, t))| {
            let arrow_field = schema.and_then(|s| s.fields().get(i));
            let told = arrow_field
                .and_then(|f| f.metadata().get(TYPE_OID))
                .and_then(|oid| oid.parse().ok());
            if let Some(type_oid) = told {
                let type_len = crate::encoding::catalog_type_len(type_oid);
                let told = Told::default();
                return Field { name: name.clone(), type_oid, type_len, typmod: -1, told };
            }
            let arrow = arrow_field.map(|f| f.data_type());
            if let Some(special @ (DataType::List(_) | DataType::LargeList(_) | DataType::UInt32)) =
                arrow
                && let Ok(field) = crate::encoding::describe_column(name, special)
            {
                return field;
            }
            Field {
                name: name.clone(),
                type_oid: t.oid(),
                type_len: t.typlen(),
                typmod: t.typmod(),
                told: Told::default(),
            }
        })
        .collect()
}

/// Notes of columns what their query tells of them.
fn tell(fields: &mut [Field], outputs: Option<&[Output]>) {
    let outputs = outputs.filter(|o| o.len() == fields.len()).unwrap_or_default();
    for (i, field) in fields.iter_mut().enumerate() {
        let output = outputs.get(i).filter(|o| o.name == field.name);
        if let Some((table_oid, column)) = output.and_then(|o| o.origin) {
            (field.told.table_oid, field.told.column) = (table_oid, column);
        }
        let fits = |t: &ColumnType| t.oid == field.type_oid || replaces(field.type_oid, t.oid);
        field.told.declared = match output.and_then(|o| o.declared).filter(fits) {
            Some(t) => Some((t.oid, t.typmod)),
            // The digits that an expression is computed with are no declaration.
            None if field.type_oid == NUMERIC_OID => Some((NUMERIC_OID, -1)),
            None => None,
        };
    }
}

const NUMERIC_OID: u32 = 1700;

/// Microseconds since 1970.
fn now_us() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_micros()).unwrap_or(i64::MAX)
}

/// The error of a statement that was asked to stop.
pub fn canceled() -> SqlError {
    SqlError::new(SqlState::QUERY_CANCELED, "canceling statement due to user request")
}

pub fn timed_out() -> SqlError {
    SqlError::new(SqlState::QUERY_CANCELED, "canceling statement due to statement timeout")
}

/// Runs what keeps a processor busy for a while, without holding up the other connections of the thread.
pub(crate) fn busy<T>(work: impl FnOnce() -> T) -> T {
    use tokio::runtime::{Handle, RuntimeFlavor};
    match Handle::try_current().map(|h| h.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(work),
        _ => work(),
    }
}
