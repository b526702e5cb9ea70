//! Parts of statements as they are sent.

use millrace_common::{Epoch, RelationId};

use super::super::convert::required;
use crate::call_error::CallError;
use crate::dml::{
    DmlAnswer, DmlKind, InsertConflict, LoadKind, OnRepeat, ReadRows, ReadSet, TableRead,
};
use crate::proto::{self, Empty, dml_event, dml_kind, load_kind, table_read};

fn conflict_to_proto(on_conflict: InsertConflict) -> i32 {
    let on_conflict = match on_conflict {
        InsertConflict::Error => proto::InsertConflict::Error,
        InsertConflict::Nothing => proto::InsertConflict::Nothing,
        InsertConflict::Overwrite => proto::InsertConflict::Overwrite,
    };
    on_conflict as i32
}

fn conflict_from_proto(on_conflict: i32) -> Result<InsertConflict, CallError> {
    Ok(match proto::InsertConflict::try_from(on_conflict) {
        Ok(proto::InsertConflict::Error) => InsertConflict::Error,
        Ok(proto::InsertConflict::Nothing) => InsertConflict::Nothing,
        Ok(proto::InsertConflict::Overwrite) => InsertConflict::Overwrite,
        Err(_) => return Err(CallError::missing("insert conflict")),
    })
}

pub(super) fn kind_to_proto(kind: DmlKind) -> Option<proto::DmlKind> {
    use dml_kind::Kind;
    let kind = match kind {
        DmlKind::Insert { on_conflict } => Kind::Insert(conflict_to_proto(on_conflict)),
        DmlKind::Change => Kind::Change(Empty {}),
        DmlKind::Feed { on_conflict } => Kind::Feed(conflict_to_proto(on_conflict)),
        DmlKind::Upsert => Kind::Upsert(Empty {}),
        DmlKind::Replicate => Kind::Replicate(Empty {}),
    };
    Some(proto::DmlKind { kind: Some(kind) })
}

pub(super) fn kind_from_proto(kind: Option<proto::DmlKind>) -> Result<DmlKind, CallError> {
    use dml_kind::Kind;
    Ok(match required(kind.and_then(|k| k.kind), "kind")? {
        Kind::Insert(c) => DmlKind::Insert { on_conflict: conflict_from_proto(c)? },
        Kind::Change(_) => DmlKind::Change,
        Kind::Feed(c) => DmlKind::Feed { on_conflict: conflict_from_proto(c)? },
        Kind::Upsert(_) => DmlKind::Upsert,
        Kind::Replicate(_) => DmlKind::Replicate,
    })
}

pub(super) fn load_kind_to_proto(kind: LoadKind) -> proto::LoadKind {
    use load_kind::Kind;
    let kind = match kind {
        LoadKind::Insert { on_conflict } => Kind::Insert(conflict_to_proto(on_conflict)),
        LoadKind::Replace { read_at } => Kind::Replace(read_at.0),
        LoadKind::Change { read_at, on_repeat } => {
            let on_repeat = match on_repeat {
                OnRepeat::Duplicate => proto::OnRepeat::Duplicate,
                OnRepeat::SecondTime => proto::OnRepeat::SecondTime,
            };
            Kind::Change(proto::LoadChange { read_at: read_at.0, on_repeat: on_repeat as i32 })
        }
    };
    proto::LoadKind { kind: Some(kind) }
}

pub(super) fn load_kind_from_proto(kind: Option<proto::LoadKind>) -> Result<LoadKind, CallError> {
    use load_kind::Kind;
    Ok(match required(kind.and_then(|k| k.kind), "kind")? {
        Kind::Insert(c) => LoadKind::Insert { on_conflict: conflict_from_proto(c)? },
        Kind::Replace(read_at) => LoadKind::Replace { read_at: Epoch(read_at) },
        Kind::Change(change) => {
            let on_repeat = match proto::OnRepeat::try_from(change.on_repeat) {
                Ok(proto::OnRepeat::Duplicate) => OnRepeat::Duplicate,
                Ok(proto::OnRepeat::SecondTime) => OnRepeat::SecondTime,
                Err(_) => return Err(CallError::missing("on repeat")),
            };
            LoadKind::Change { read_at: Epoch(change.read_at), on_repeat }
        }
    })
}

pub(super) fn read_to_proto(set: ReadSet) -> proto::ReadSet {
    let read = |read: TableRead| proto::TableRead {
        table: read.table.0,
        epoch: read.epoch.0,
        rows: Some(match read.rows {
            ReadRows::All => table_read::Rows::All(Empty {}),
            ReadRows::Keys(keys) => table_read::Rows::Keys(proto::StorageKeys { keys }),
            ReadRows::Where(predicate) => table_read::Rows::Predicate(predicate),
        }),
    };
    let reads = set.reads.into_iter().map(read).collect();
    proto::ReadSet { reads, locks: set.locks.unwrap_or(0) }
}

pub(super) fn read_from_proto(set: proto::ReadSet) -> Result<ReadSet, CallError> {
    let read = |read: proto::TableRead| {
        let rows = match required(read.rows, "rows")? {
            table_read::Rows::All(_) => ReadRows::All,
            table_read::Rows::Keys(keys) => ReadRows::Keys(keys.keys),
            table_read::Rows::Predicate(predicate) => ReadRows::Where(predicate),
        };
        Ok(TableRead { table: RelationId(read.table), epoch: Epoch(read.epoch), rows })
    };
    let reads = set.reads.into_iter().map(read).collect::<Result<_, CallError>>()?;
    Ok(ReadSet { reads, locks: Some(set.locks).filter(|id| *id != 0) })
}

pub(super) fn answer_to_proto(answer: DmlAnswer) -> proto::DmlEvent {
    let event = match answer {
        DmlAnswer::Applied { epoch, rows, late } => {
            dml_event::Event::Applied(proto::DmlApplied { epoch: epoch.0, rows, late })
        }
        DmlAnswer::Conflict => dml_event::Event::Conflict(Empty {}),
    };
    proto::DmlEvent { event: Some(event) }
}

/// `None`: the rows have entered, and the outcome is still to come.
pub(super) fn answer_from_proto(event: proto::DmlEvent) -> Result<Option<DmlAnswer>, CallError> {
    Ok(match required(event.event, "event")? {
        dml_event::Event::Entered(_) => None,
        dml_event::Event::Applied(a) => {
            Some(DmlAnswer::Applied { epoch: Epoch(a.epoch), rows: a.rows, late: a.late })
        }
        dml_event::Event::Conflict(_) => Some(DmlAnswer::Conflict),
    })
}
