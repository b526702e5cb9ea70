//! A reader that follows a relation through deaths of the server: what it was told adds up to the content at every
//! epoch that it was told is complete.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use futures::StreamExt;
use tokio_postgres::{Client, Error};

use crate::client::{Fate, Tally, describe};
use crate::rng::Rng;

const PATIENCE: Duration = Duration::from_secs(120);

/// Rows as COPY prints them, with how often they are there.
type Rows = BTreeMap<String, i64>;

pub struct Follower {
    relation: &'static str,
    content: Rows,
    /// The last epoch that is complete.
    through: Option<String>,
}

/// A line of SUBSCRIBE.
enum Line {
    Change(i64, String),
    Complete(String),
}

fn parse(line: &str) -> Option<Line> {
    let mut fields = line.splitn(4, '\t');
    let (epoch, op, weight) = (fields.next()?, fields.next()?, fields.next()?);
    match op {
        "progress" => Some(Line::Complete(epoch.to_string())),
        _ => Some(Line::Change(weight.parse().ok()?, fields.next()?.to_string())),
    }
}

impl Follower {
    pub fn new(relation: &'static str) -> Follower {
        Follower { relation, content: Rows::new(), through: None }
    }

    /// Reads on until the time is over or the server is gone.
    pub async fn follow(
        &mut self,
        client: &Client,
        second: &Client,
        tally: &Tally,
        mut rng: Rng,
        until: Instant,
    ) {
        while Instant::now() < until && !client.is_closed() {
            let outcome = self.read(client, until, Some((second, &mut rng)), tally, None).await;
            let what = format!("SUBSCRIBE TO {}", self.relation);
            if tally.fate(&what, &outcome) == Fate::Refused
                && let Err(e) = &outcome
                && e.as_db_error().is_some_and(|e| e.code().code() == "72000")
            {
                *self = Follower::new(self.relation);
            }
            // What refused it may refuse it again at once.
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Reads on, while nobody writes, until its content is that of the relation.
    pub async fn catch_up(&mut self, client: &Client, tally: &Tally) -> Result<(), String> {
        let sql = format!("COPY (SELECT * FROM {}) TO STDOUT", self.relation);
        let wanted = copied(client, &sql).await.map_err(|e| describe(&e))?;
        let until = Instant::now() + PATIENCE;
        self.read(client, until, None, tally, Some(&wanted)).await.map_err(|e| describe(&e))?;
        if self.content == wanted {
            return Ok(());
        }
        let more: Vec<_> =
            self.content.iter().filter(|(r, n)| wanted.get(*r) != Some(n)).take(5).collect();
        let less: Vec<_> =
            wanted.iter().filter(|(r, n)| self.content.get(*r) != Some(n)).take(5).collect();
        Err(format!(
            "the changes of {} do not add up to it at {:?}: they have {more:?}, it has {less:?}",
            self.relation, self.through
        ))
    }

    /// One SUBSCRIBE, ended by its time or once the content is what is `wanted`.
    async fn read(
        &mut self,
        client: &Client,
        until: Instant,
        mut compare: Option<(&Client, &mut Rng)>,
        tally: &Tally,
        wanted: Option<&Rows>,
    ) -> Result<(), Error> {
        let options = match &self.through {
            Some(epoch) => format!("AS OF {epoch} WITH (snapshot = false, progress = true)"),
            None => "WITH (progress = true)".to_string(),
        };
        let sql = format!("COPY (SUBSCRIBE TO {} {options}) TO STDOUT", self.relation);
        let stream = client.copy_out(&sql).await?;
        futures::pin_mut!(stream);
        let mut changes: Vec<(i64, String)> = Vec::new();
        loop {
            let next = tokio::time::timeout_at(until.into(), stream.next()).await;
            let chunk = match next {
                Ok(Some(chunk)) => chunk?,
                Ok(None) => return Ok(()),
                Err(_) => return end(client).await,
            };
            for line in String::from_utf8_lossy(&chunk).lines() {
                match parse(line) {
                    Some(Line::Change(weight, row)) => changes.push((weight, row)),
                    Some(Line::Complete(epoch)) => {
                        self.apply(std::mem::take(&mut changes), &epoch, tally);
                        if let Some((second, rng)) = &mut compare
                            && rng.chance(3)
                        {
                            self.compare(second, tally).await;
                        }
                        if wanted.is_some_and(|w| *w == self.content) {
                            return end(client).await;
                        }
                    }
                    None => tally.is_wrong(format!("{sql} says {line:?}")),
                }
            }
        }
    }

    fn apply(&mut self, changes: Vec<(i64, String)>, epoch: &str, tally: &Tally) {
        for (weight, row) in changes {
            *self.content.entry(row).or_default() += weight;
        }
        self.content.retain(|_, n| *n != 0);
        self.through = Some(epoch.to_string());
        if let Some((row, n)) = self.content.iter().find(|(_, n)| **n < 0) {
            tally.is_wrong(format!("at {epoch} {} has {row:?} {n} times", self.relation));
        }
        if self.relation.starts_with("torn") && !self.content.is_empty() {
            let content = &self.content;
            tally.is_wrong(format!("at {epoch} {} has {content:?}", self.relation));
        }
        tally.count("epochs followed");
    }

    /// The snapshot at the epoch through which we have read is what we have.
    async fn compare(&self, second: &Client, tally: &Tally) {
        let Some(epoch) = &self.through else { return };
        let sql = format!(
            "COPY (SUBSCRIBE TO {} AS OF {epoch} WITH (progress = true)) TO STDOUT",
            self.relation
        );
        let snapshot = async {
            let stream = second.copy_out(&sql).await?;
            futures::pin_mut!(stream);
            let mut snapshot = Rows::new();
            while let Some(chunk) = stream.next().await {
                for line in String::from_utf8_lossy(&chunk?).lines() {
                    match parse(line) {
                        Some(Line::Change(n, row)) => *snapshot.entry(row).or_default() += n,
                        _ => {
                            end(second).await?;
                            return Ok(snapshot);
                        }
                    }
                }
            }
            Ok(snapshot)
        };
        let snapshot: Result<Rows, Error> = snapshot.await;
        if tally.fate(&sql, &snapshot) != Fate::Done {
            return;
        }
        tally.count("snapshots compared with changes");
        if let Ok(snapshot) = snapshot
            && snapshot != self.content
        {
            let content = &self.content;
            tally.is_wrong(format!(
                "at {epoch} {} is {snapshot:?}, its changes add up to {content:?}",
                self.relation
            ));
        }
    }
}

/// Cancels the session's SUBSCRIBE, which runs until then.
async fn end(client: &Client) -> Result<(), Error> {
    match client.is_closed() {
        true => Ok(()),
        false => client.cancel_token().cancel_query(tokio_postgres::NoTls).await,
    }
}

async fn copied(client: &Client, sql: &str) -> Result<Rows, Error> {
    let stream = client.copy_out(sql).await?;
    futures::pin_mut!(stream);
    let mut rows = Rows::new();
    while let Some(chunk) = stream.next().await {
        for line in String::from_utf8_lossy(&chunk?).lines() {
            *rows.entry(line.to_string()).or_default() += 1;
        }
    }
    Ok(rows)
}
