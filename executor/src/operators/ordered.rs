//! Rows of groups in an order (docs/design.md §3): their keys, in memory and in the store, and how an
//! epoch's changes to them are written. Top-N and window functions keep their rows so.
//!
//! Stored: `group | order | identity → row`. Keyed input may update a row without changing its place;
//! in an epoch its old and new version are both in memory. The in-memory key therefore ends in a hash
//! of the whole row.

use std::cmp::Ordering;
use std::collections::hash_map::Entry;

use arrow::array::{ArrayRef, BinaryBuilder, RecordBatch};
use arrow::compute::SortOptions;
use arrow::datatypes::SchemaRef;
use millrace_common::collections::HashMap;
use millrace_common::identity::{RowCodec, hash_rows};
use millrace_common::keys::{KeyCodec, columns_at};
use millrace_rpc::catalog::RowStorage;

use crate::error::ExecError;
use crate::state::arena::RowRef;
use crate::state::keys::append_storage_key;
use crate::state::{KeyBytes, KeyTable, RowArena, Slot, StateTable};

/// Bytes of the whole-row hash at the end of an in-memory key of Keyed input.
const ROW_HASH: usize = 8;

/// A row in order.
#[derive(Clone, Debug)]
pub struct Ranked {
    /// Order bytes, then identity bytes.
    pub key: KeyBytes,
    /// Length of the order bytes.
    pub order: u32,
    pub at: RowRef,
    pub weight: i64,
}

impl Ranked {
    pub fn order_bytes(&self) -> &[u8] {
        &self.key[..self.order as usize]
    }
}

/// A row's change in this epoch; `at` is held for it.
pub struct Change {
    pub weight: i64,
    /// Length of the order bytes.
    pub order: u32,
    pub at: RowRef,
}

/// The open epoch's changes of rows, by group and key in order.
#[derive(Default)]
pub struct Changes {
    map: HashMap<(Slot, KeyBytes), Change>,
    /// Of the keys.
    key_bytes: usize,
}

/// A change and its place, as they are listed.
pub type Listed = ((Slot, KeyBytes), Change);

impl Changes {
    pub fn len(&self) -> usize {
        self.map.len()
    }

    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = (&(Slot, KeyBytes), &Change)> {
        self.map.iter()
    }

    /// Adds a change; gives back its row's reference if another is held for it already.
    pub fn add(&mut self, place: (Slot, KeyBytes), change: Change) -> Option<RowRef> {
        match self.map.entry(place) {
            Entry::Occupied(mut entry) => {
                entry.get_mut().weight += change.weight;
                Some(change.at)
            }
            Entry::Vacant(entry) => {
                self.key_bytes += entry.key().1.heap_size();
                entry.insert(change);
                None
            }
        }
    }

    /// All of them, in order; there are none afterwards.
    pub fn take(&mut self) -> Vec<Listed> {
        self.key_bytes = 0;
        let mut changes: Vec<Listed> = std::mem::take(&mut self.map).into_iter().collect();
        changes.sort_unstable_by(|a, b| a.0.cmp(&b.0));
        changes
    }

    /// Heap bytes, with those of the rows that they refer to.
    pub fn bytes(&self, arena: &RowArena) -> usize {
        const ENTRY: usize = size_of::<Listed>() * 8 / 7 + 1;
        self.map.len() * (ENTRY + arena.row_bytes()) + self.key_bytes
    }
}

/// How rows are ordered and told apart.
pub struct RowOrder {
    order_columns: Vec<usize>,
    order: KeyCodec,
    identity: RowCodec,
    pub keyed: bool,
    /// A row's old and new version may both be here: whole-row hashes tell them apart.
    versioned: bool,
}

impl RowOrder {
    /// `unique_key`: what tells rows apart within group and order, of `Keyed` storage.
    pub fn new(
        group: &[usize],
        order: &[(usize, SortOptions)],
        storage: RowStorage,
        unique_key: &[usize],
        append_only: bool,
        input: &SchemaRef,
    ) -> Result<RowOrder, ExecError> {
        let keyed = storage == RowStorage::Keyed;
        let given = |c: &usize| group.contains(c) || order.iter().any(|o| o.0 == *c);
        let identity = if keyed {
            RowCodec::of_values(input, unique_key)?
        } else {
            let others: Vec<usize> = (0..input.fields().len()).filter(|c| !given(c)).collect();
            RowCodec::of_rows(input, &others)?
        };
        let sorted = order.iter().map(|&(c, o)| (input.field(c).data_type().clone(), o));
        Ok(RowOrder {
            order: KeyCodec::with_options(sorted)?,
            order_columns: order.iter().map(|o| o.0).collect(),
            identity,
            keyed,
            versioned: keyed && !append_only,
        })
    }

    /// In-memory keys of a batch's rows, with the lengths of their order parts.
    pub fn keys(&self, batch: &RecordBatch) -> Result<RowKeys, ExecError> {
        let hashes =
            if self.versioned { hash_rows(batch.columns(), batch.num_rows())? } else { Vec::new() };
        Ok(RowKeys {
            order: encode(&self.order, &columns_at(batch, &self.order_columns))?,
            identity: match self.identity.is_empty() {
                true => None,
                false => Some(self.identity.rows(batch.columns(), batch.num_rows())?),
            },
            hashes,
        })
    }

    /// Of a row's key in memory, what its storage key ends in.
    pub fn stored<'a>(&self, key: &'a [u8]) -> &'a [u8] {
        let suffix = if self.versioned { ROW_HASH } else { 0 };
        &key[..key.len().saturating_sub(suffix)]
    }

    /// Changes in order, those of one stored row together: of its versions, which lie side by side.
    pub fn by_stored<'a>(&self, changes: &'a [Listed]) -> impl Iterator<Item = &'a [Listed]> {
        changes.chunk_by(|a, b| a.0.0 == b.0.0 && self.stored(&a.0.1) == self.stored(&b.0.1))
    }

    /// Whether changes of one stored row, made to its versions as they are (`weight` is that of one by its key
    /// in memory; `others`: how many there are beside the changed ones), leave what may be stored. If not,
    /// more is to come in the epoch.
    pub fn is_settled(
        &self,
        changes: &[Listed],
        weight: impl Fn(&[u8]) -> i64,
        others: usize,
    ) -> bool {
        let mut versions = others;
        for ((_, key), change) in changes {
            let after = weight(key) + change.weight;
            if after < 0 || (self.keyed && after > 1) {
                return false;
            }
            versions += usize::from(after > 0);
        }
        !self.keyed || versions <= 1
    }

    /// The storage key of a row of a group.
    pub fn append_key(
        &self,
        out: &mut BinaryBuilder,
        scratch: &mut Vec<u8>,
        groups: &KeyTable,
        (slot, key): (Slot, &[u8]),
    ) {
        let parts: [&[u8]; 2] = [groups.key(slot), self.stored(key)];
        append_storage_key(out, scratch, groups.vnode(slot), &parts);
    }

    /// Writes an epoch's net changes, given in order.
    pub fn write(
        &self,
        changes: &[Listed],
        groups: &KeyTable,
        arena: &RowArena,
        table: &mut dyn StateTable,
    ) -> Result<(), ExecError> {
        let mut keys = BinaryBuilder::with_capacity(changes.len(), changes.len() * 32);
        let (mut rows, mut weights) = (Vec::new(), Vec::new());
        let mut scratch = Vec::with_capacity(64);
        for versions in self.by_stored(changes) {
            // The one that is put wins.
            let put = versions.iter().find(|v| v.1.weight > 0);
            let chosen = put.or_else(|| versions.iter().find(|v| v.1.weight < 0));
            if let Some(((slot, key), change)) = chosen {
                self.append_key(&mut keys, &mut scratch, groups, (*slot, key));
                rows.push(change.at);
                weights.push(if self.keyed { i64::from(put.is_some()) } else { change.weight });
            }
        }
        if !rows.is_empty() {
            let batch = arena.batch(&rows)?;
            table.write(keys.finish(), Some(weights.into()), batch)?;
        }
        Ok(())
    }
}

/// Encoded keys of a batch.
pub struct RowKeys {
    order: Option<arrow_row::Rows>,
    identity: Option<arrow_row::Rows>,
    /// Of whole rows; empty where the identity is the whole row.
    hashes: Vec<u64>,
}

fn encode(codec: &KeyCodec, columns: &[ArrayRef]) -> Result<Option<arrow_row::Rows>, ExecError> {
    if columns.is_empty() { Ok(None) } else { Ok(Some(codec.rows(columns)?)) }
}

impl RowKeys {
    /// Writes a row's key; returns the length of its order part.
    pub fn write(&self, row: usize, out: &mut Vec<u8>) -> u32 {
        out.clear();
        if let Some(order) = &self.order {
            out.extend_from_slice(order.row(row).data());
        }
        let order = out.len() as u32;
        if let Some(identity) = &self.identity {
            out.extend_from_slice(identity.row(row).data());
        }
        if let Some(hash) = self.hashes.get(row) {
            out.extend_from_slice(&hash.to_be_bytes());
        }
        order
    }

    pub fn cmp_order(&self, row: usize, other: &[u8]) -> Ordering {
        let order: &[u8] = self.order.as_ref().map_or(&[], |o| o.row(row).data());
        order.cmp(other)
    }
}
