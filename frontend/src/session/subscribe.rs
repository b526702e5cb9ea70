//! Subscription cursors and SUBSCRIBE.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use arrow::array::RecordBatch;
use futures::StreamExt;
use millrace_common::{Epoch, RelationId, SqlError, SqlState};
use millrace_connector::options::invalid;
use millrace_planner::ast::{CreateView, CursorStart, DeclareSubscriptionCursor, Subscribe};
use millrace_rpc::catalog::{Relation, RelationKind};
use parking_lot::Mutex;
use sqlparser::ast::{Ident, ObjectName};
use tokio_util::sync::CancellationToken;

use super::cursor::no_cursor;
use super::feed::{ChangeFeed, parse_epoch};
use super::{Outcome, RowSet, Session};
use crate::cluster::Cluster;
use crate::copy::{CopyOut, Format};
use crate::ddl::progress::wait_created;
use crate::ddl::subscription::check_followable;
use crate::ddl::{undo, view};
use crate::query::catalog_view::fold;
use crate::wire::Field;

/// A cursor over a subscription; it lives as long as its session.
pub struct SubscriptionCursor {
    subscription: String,
    feed: ChangeFeed,
    /// Read and not fetched.
    buffer: VecDeque<RecordBatch>,
    /// What the FETCH under way has given.
    given: Vec<RecordBatch>,
}

impl SubscriptionCursor {
    fn buffered(&self) -> usize {
        self.buffer.iter().map(RecordBatch::num_rows).sum()
    }

    /// Takes up to `n` rows off the buffer, until the FETCH has ended.
    fn take(&mut self, mut n: usize) -> Vec<RecordBatch> {
        let mut out = Vec::new();
        while n > 0 {
            let Some(first) = self.buffer.pop_front() else { break };
            let rows = first.num_rows().min(n);
            out.push(first.slice(0, rows));
            if rows < first.num_rows() {
                self.buffer.push_front(first.slice(rows, first.num_rows() - rows));
            }
            n -= rows;
        }
        self.given.clone_from(&out);
        out
    }

    /// The FETCH under way has ended. Unless its client has been sent all that it has given, the next one gives that again.
    fn end_fetch(&mut self, is_sent: bool) {
        let given = std::mem::take(&mut self.given);
        if !is_sent {
            given.into_iter().rev().for_each(|rows| self.buffer.push_front(rows));
        }
    }
}

impl Session {
    /// DECLARE name SUBSCRIPTION CURSOR FOR subscription [SINCE … | FULL].
    pub async fn declare_feed(
        &mut self,
        declare: &DeclareSubscriptionCursor,
    ) -> Result<String, SqlError> {
        let name = fold(&declare.name);
        if self.portals.contains_key(&name) || self.feeds.contains_key(&name) {
            return Err(SqlError::new(
                SqlState("42P03"),
                format!("cursor \"{name}\" already exists"),
            ));
        }
        let catalog = self.catalog_view();
        let subscription = catalog.resolve(&declare.subscription)?;
        if subscription.kind != RelationKind::Subscription as i32 {
            return Err(SqlError::new(
                SqlState::WRONG_OBJECT_TYPE,
                format!("\"{}\" is not a subscription", subscription.name),
            )
            .with_hint("Make one of it with CREATE SUBSCRIPTION."));
        }
        let relation = subscription.depends_on.first().and_then(|id| catalog.snapshot.by_id(*id));
        let relation = relation
            .cloned()
            .ok_or_else(|| SqlError::internal("a subscription without its relation"))?;
        let named = [Arc::clone(&subscription), Arc::clone(&relation)];
        let newest = self.right_epoch_of(&catalog.snapshot, &named).await?;
        let (seen, full) = match &declare.start {
            CursorStart::Full => (newest, true),
            CursorStart::Now => (newest, false),
            CursorStart::Begin => {
                let kept = self.cluster().kept_since(RelationId(relation.id));
                (oldest_kept(&subscription)?.max(kept), false)
            }
            CursorStart::After(text) => {
                (past(parse_epoch(text, self.settings.zone())?, newest)?, false)
            }
        };
        let feed = ChangeFeed::new(self.cluster().clone(), relation, seen, full).await?;
        let subscription = subscription.name.clone();
        let (buffer, given) = (VecDeque::new(), Vec::new());
        let cursor = SubscriptionCursor { subscription, feed, buffer, given };
        self.feeds.insert(name, Mutex::new(cursor));
        Ok("DECLARE CURSOR".to_owned())
    }

    /// The next rows of a subscription cursor: what is there now or, with a time-out, what comes first.
    /// A FETCH that is cancelled loses no row, nor one whose rows are being sent then.
    pub async fn fetch_changes(
        &mut self,
        name: &str,
        wanted: usize,
        timeout: Option<Duration>,
    ) -> Result<RowSet, SqlError> {
        let (fields, relation) = {
            let cursor = self.feeds.get_mut(name).ok_or_else(|| no_cursor(name))?.get_mut();
            (cursor.feed.fields()?, RelationId(cursor.feed.relation.id))
        };
        let upto = self.read_epoch(&[relation]).await?;
        let cursor = self.feeds.get_mut(name).ok_or_else(|| no_cursor(name))?.get_mut();
        while cursor.buffered() < wanted {
            match cursor.feed.ready(upto).await? {
                Some(rows) => cursor.buffer.push_back(rows),
                None => break,
            }
        }
        if let Some(timeout) = timeout
            && cursor.buffered() == 0
            && let Ok(rows) = tokio::time::timeout(timeout, cursor.feed.next(false)).await
        {
            cursor.buffer.push_back(rows?);
        }
        Ok(RowSet::ready(fields, cursor.take(wanted), "FETCH {n}"))
    }

    /// The statement under way has ended; `is_sent`: all that it gives has been sent.
    pub fn end_fetch(&mut self, is_sent: bool) {
        self.feeds.values_mut().for_each(|cursor| cursor.get_mut().end_fetch(is_sent));
    }

    /// Columns of a subscription cursor.
    pub fn feed_fields(&self, name: &str) -> Option<Vec<Field>> {
        self.feeds.get(name).and_then(|c| c.lock().feed.fields().ok())
    }

    /// SHOW SUBSCRIPTION CURSORS.
    pub fn subscription_cursors(&self) -> Vec<Vec<Option<String>>> {
        let mut rows: Vec<_> = self
            .feeds
            .iter()
            .map(|(name, c)| vec![Some(name.clone()), Some(c.lock().subscription.clone())])
            .collect();
        rows.sort();
        rows
    }

    /// SUBSCRIBE: rows over COPY OUT, until the client has enough.
    pub async fn subscribe(&mut self, def: &Subscribe) -> Result<Outcome, SqlError> {
        let (mut snapshot, mut progress) = (true, false);
        for (name, value) in &def.options {
            let on = millrace_common::settings::parse_bool(value).ok_or_else(|| {
                invalid(format!("invalid value for option \"{name}\": \"{value}\""))
                    .with_hint("Give true or false.")
            })?;
            match name.as_str() {
                "snapshot" => snapshot = on,
                "progress" => progress = on,
                other => {
                    return Err(invalid(format!("unknown option \"{other}\""))
                        .with_hint("Options of SUBSCRIBE: snapshot, progress."));
                }
            }
        }
        let format = format(def.copy.as_deref().unwrap_or_default())?;
        let (relation, guard) = self.subscribed(def).await?;
        let newest = self.read_epoch(&[RelationId(relation.id)]).await?;
        let seen = match &def.as_of {
            Some(text) => past(parse_epoch(text, self.settings.zone())?, newest)?,
            None => newest,
        };
        let feed = ChangeFeed::new(self.cluster().clone(), relation, seen, snapshot).await?;
        let fields = feed.fields()?;
        let rows = futures::stream::unfold(Some((feed, guard)), move |state| async move {
            let (mut feed, guard) = state?;
            match feed.next(progress).await {
                Ok(rows) => Some((Ok(rows), Some((feed, guard)))),
                Err(e) => Some((Err(e), None)),
            }
        });
        let rows = RowSet { fields, stream: rows.boxed(), tag: "COPY {n}".to_owned() };
        Ok(Outcome::CopyOut(Box::new(CopyOut { rows, format, live: true })))
    }

    /// The relation to follow: the one that is named, or a view made for this session.
    async fn subscribed(
        &mut self,
        def: &Subscribe,
    ) -> Result<(Arc<Relation>, Option<Ephemeral>), SqlError> {
        if let Some(name) = &def.relation {
            let relation = self.catalog_view().resolve(name)?;
            let plain = relation.kind == RelationKind::View as i32
                || relation.kind == RelationKind::Source as i32;
            if !plain {
                check_followable(&relation)?;
                return Ok((relation, None));
            }
        }
        if def.as_of.is_some() {
            return Err(SqlError::unsupported("SUBSCRIBE AS OF to a query")
                .with_hint("Create a materialized view of it and subscribe to that."));
        }
        self.ephemeral_view(def).await
    }

    async fn ephemeral_view(
        &mut self,
        def: &Subscribe,
    ) -> Result<(Arc<Relation>, Option<Ephemeral>), SqlError> {
        let incarnation = self.shared.config.incarnation.given().await?;
        let catalog = self.catalog_view();
        let name = format!("_subscribe_{}_{:08x}", self.pid, rand::random::<u32>());
        let ident = ObjectName::from(vec![Ident::new(name.as_str())]);
        let (schema, name) = catalog.target(&ident)?;
        let create = CreateView {
            name: ident,
            materialized: true,
            or_replace: false,
            if_not_exists: false,
            columns: Vec::new(),
            options: Vec::new(),
            query: def.query.clone(),
            with_data: true,
            emit_on_window_close: false,
        };
        let (bound, names) = view::bind(self, &catalog, &create)?;
        let graph = view::plan(&catalog, &bound, &create)?;
        let relation = Relation {
            schema,
            name,
            kind: RelationKind::MaterializedView as i32,
            definition: format!("SUBSCRIBE TO {}", def.query.text),
            query: def.query.text.clone(),
            depends_on: view::depends_on(&bound),
            owner: self.user.clone(),
            ephemeral: incarnation.max(1),
            ..Relation::default()
        };
        let relation = view::with_graph(relation, &graph, &bound, &names)?;
        let cluster = self.cluster().clone();
        let tables = graph.tables.len().max(1) as u32;
        let name = format!("{}.{}", relation.schema, relation.name);
        let (id, undo) = undo::create(self, relation, tables, false).await?;
        let guard = Ephemeral { cluster: cluster.clone(), id, name };
        undo.keep();
        wait_created(self, id, CancellationToken::new()).await?;
        let created = cluster.catalog().by_id(id.0).cloned();
        let created = created.ok_or_else(|| {
            SqlError::new(SqlState::UNDEFINED_TABLE, "the subscription's view was dropped")
        })?;
        Ok((created, Some(guard)))
    }
}

/// A view that is dropped when nobody reads it any more.
struct Ephemeral {
    cluster: Arc<dyn Cluster>,
    id: RelationId,
    /// For the log.
    name: String,
}

impl Drop for Ephemeral {
    fn drop(&mut self) {
        let (cluster, id) = (Arc::clone(&self.cluster), self.id);
        let name = std::mem::take(&mut self.name);
        let Ok(handle) = tokio::runtime::Handle::try_current() else { return };
        handle.spawn(async move {
            if let Err(e) = cluster.drop_relations(vec![id]).await {
                tracing::warn!(relation = name, %id, error = %e, "a subscription's view was not removed");
            }
        });
    }
}

/// The oldest epoch from which a subscription's changes are complete.
fn oldest_kept(subscription: &Relation) -> Result<Epoch, SqlError> {
    let retention = millrace_common::settings::parse_duration(
        subscription.option("retention").unwrap_or("1d"),
    )?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let from = Epoch::from_millis(now.saturating_sub(retention).as_millis() as u64);
    Ok(from.max(Epoch(subscription.created_epoch)))
}

/// An epoch that has not come yet cannot be gone on from.
fn past(epoch: Epoch, newest: Epoch) -> Result<Epoch, SqlError> {
    if epoch <= newest {
        return Ok(epoch);
    }
    Err(invalid(format!("epoch {epoch} is in the future"))
        .with_detail(format!("The newest epoch of the relation is {newest}.")))
}

/// The options of COPY (SUBSCRIBE …) TO STDOUT.
fn format(options: &[(String, String)]) -> Result<Format, SqlError> {
    let csv = options.iter().any(|(n, v)| n == "format" && v.eq_ignore_ascii_case("csv"));
    let mut format = Format::new(csv);
    for (name, value) in options {
        match name.as_str() {
            "format" if matches!(value.to_ascii_lowercase().as_str(), "csv" | "text") => {}
            "header" => format.header = millrace_common::settings::parse_bool(value) != Some(false),
            "null" => format.null = value.clone(),
            "delimiter" => match value.as_bytes() {
                [one] if one.is_ascii() && !b"\r\n".contains(one) => format.delimiter = *one,
                _ => return Err(invalid("COPY delimiter must be a single one-byte character")),
            },
            _ => {
                return Err(SqlError::unsupported(format!(
                    "COPY option {name} {value} with SUBSCRIBE"
                ))
                .with_hint("Available: FORMAT text or csv, HEADER, DELIMITER, NULL."));
            }
        }
    }
    Ok(format)
}
