//! Which index serves a scan, and the key ranges it reads.
//!
//! Filters stay in the plan: a range may hold more rows than are wanted, never fewer. So a bound that
//! cannot be used is left out, and an exclusive one may be read inclusively.

use std::sync::Arc;

use arrow::array::ArrayRef;
use arrow::datatypes::SchemaRef;
use datafusion::logical_expr::{Between, BinaryExpr, Expr, Operator};
use datafusion::scalar::ScalarValue;
use millrace_common::hash::{hash_columns, vnodes};
use millrace_common::ids::VNODE_COUNT;
use millrace_common::keys::KeyCodec;
use millrace_rpc::catalog::{Relation, RelationKind, RowStorage};

use crate::cluster::{CatalogSnapshot, KeyBounds};

/// What conjuncts of a filter say of one column.
#[derive(Clone, Debug, Default)]
struct Bounds {
    equal: Option<ScalarValue>,
    /// At least, or above.
    lower: Option<ScalarValue>,
    /// At most (true), or below.
    upper: Option<(ScalarValue, bool)>,
}

/// A read of an index in place of the relation it belongs to.
#[derive(Clone, Debug)]
pub struct IndexRead {
    pub index: Arc<Relation>,
    /// Positions in the index of the columns asked for.
    pub columns: Vec<usize>,
    pub ranges: Vec<KeyBounds>,
    /// Leading columns fixed, and whether the next is bounded.
    usefulness: (usize, bool),
}

/// The best index of `relation` for these filters that holds all of `columns` and the filters' own.
pub fn choose(
    catalog: &CatalogSnapshot,
    relation: &Relation,
    schema: &SchemaRef,
    columns: &[usize],
    filters: &[Expr],
) -> Option<IndexRead> {
    if filters.is_empty() {
        return None;
    }
    let mut bounds = vec![Bounds::default(); schema.fields().len()];
    for filter in filters {
        collect(filter, schema, &mut bounds);
    }
    indexes(catalog, relation.id)
        .filter_map(|index| read_of(index, relation, columns, &bounds))
        .max_by_key(|read| (read.usefulness, std::cmp::Reverse(read.index.id)))
}

pub fn indexes(catalog: &CatalogSnapshot, relation: u32) -> impl Iterator<Item = &Arc<Relation>> {
    catalog.dependants(relation).filter(|r| r.kind == RelationKind::Index as i32)
}

fn collect(filter: &Expr, schema: &SchemaRef, bounds: &mut [Bounds]) {
    match filter {
        Expr::BinaryExpr(BinaryExpr { left, op: Operator::And, right }) => {
            collect(left, schema, bounds);
            collect(right, schema, bounds);
        }
        Expr::BinaryExpr(BinaryExpr { left, op, right }) => {
            let (column, value, op) = match (left.as_ref(), right.as_ref()) {
                (Expr::Column(c), Expr::Literal(v, _)) => (c, v, Some(*op)),
                (Expr::Literal(v, _), Expr::Column(c)) => (c, v, op.swap()),
                _ => return,
            };
            let Some(op) = op else { return };
            bound(schema, &column.name, op, value, bounds);
        }
        Expr::Between(Between { expr, negated: false, low, high }) => {
            if let (Expr::Column(c), Expr::Literal(low, _), Expr::Literal(high, _)) =
                (expr.as_ref(), low.as_ref(), high.as_ref())
            {
                bound(schema, &c.name, Operator::GtEq, low, bounds);
                bound(schema, &c.name, Operator::LtEq, high, bounds);
            }
        }
        _ => {}
    }
}

fn bound(
    schema: &SchemaRef,
    column: &str,
    op: Operator,
    value: &ScalarValue,
    bounds: &mut [Bounds],
) {
    let Ok(i) = schema.index_of(column) else { return };
    if value.is_null() || value.data_type() != *schema.field(i).data_type() {
        return;
    }
    let own = &mut bounds[i];
    match op {
        Operator::Eq => own.equal = Some(value.clone()),
        // Of several bounds on one side any one will do.
        Operator::Gt | Operator::GtEq => own.lower = Some(value.clone()),
        Operator::Lt => own.upper = Some((value.clone(), false)),
        Operator::LtEq => own.upper = Some((value.clone(), true)),
        _ => {}
    }
}

fn read_of(
    index: &Arc<Relation>,
    relation: &Relation,
    columns: &[usize],
    bounds: &[Bounds],
) -> Option<IndexRead> {
    let in_index = |c: &usize| {
        let name = &relation.columns.get(*c)?.name;
        index.columns.iter().position(|own| own.name == *name)
    };
    let columns = columns.iter().map(in_index).collect::<Option<Vec<_>>>()?;
    let key: Vec<usize> = match RowStorage::try_from(index.storage).ok()? {
        RowStorage::Keyed => index.key.iter().map(|k| *k as usize).collect(),
        RowStorage::Multiset => (0..index.columns.len()).collect(),
        RowStorage::Append => return None,
    };
    let of_key = |k: &usize| {
        let name = &index.columns.get(*k)?.name;
        bounds.get(relation.columns.iter().position(|c| c.name == *name)?)
    };
    let stated: Vec<&Bounds> = key.iter().map_while(of_key).collect();
    let fixed: Vec<ScalarValue> = stated.iter().map_while(|b| b.equal.clone()).collect();
    let next = stated.get(fixed.len()).filter(|b| b.lower.is_some() || b.upper.is_some());
    if fixed.is_empty() && next.is_none() {
        return None;
    }
    let usefulness = (fixed.len(), next.is_some());
    let ranges = ranges(&fixed, next.copied())?;
    Some(IndexRead { index: index.clone(), columns, ranges, usefulness })
}

/// Key ranges of fixed leading columns and a bound on the next: one in the vnode of the first column
/// if that is fixed, else one in each vnode.
fn ranges(fixed: &[ScalarValue], next: Option<&Bounds>) -> Option<Vec<KeyBounds>> {
    let prefix = encode(fixed)?;
    let with = |value: &ScalarValue| encode(&[fixed, std::slice::from_ref(value)].concat());
    let from = match next.and_then(|b| b.lower.as_ref()) {
        Some(value) => with(value)?,
        None => prefix.clone(),
    };
    let until = match next.and_then(|b| b.upper.as_ref()) {
        Some((value, true)) => successor(with(value)?),
        Some((value, false)) => Some(with(value)?),
        None => successor(prefix),
    };
    let in_vnode = |vnode: u16| {
        let key = |bytes: &[u8]| [&vnode.to_be_bytes()[..], bytes].concat();
        let until = match &until {
            Some(bytes) => key(bytes),
            None => (vnode + 1).to_be_bytes().to_vec(),
        };
        KeyBounds { from: key(&from), until }
    };
    match fixed.first() {
        Some(first) => {
            let column = [first.to_array_of_size(1).ok()?];
            let vnode = *vnodes(&hash_columns(&column, 1).ok()?).first()?;
            Some(vec![in_vnode(vnode)])
        }
        None => Some((0..VNODE_COUNT as u16).map(in_vnode).collect()),
    }
}

/// The key bytes that values begin with; none for no values.
fn encode(values: &[ScalarValue]) -> Option<Vec<u8>> {
    if values.is_empty() {
        return Some(Vec::new());
    }
    let columns: Vec<ArrayRef> =
        values.iter().map(|v| v.to_array_of_size(1)).collect::<Result<_, _>>().ok()?;
    let codec = KeyCodec::new(columns.iter().map(|c| c.data_type().clone())).ok()?;
    let rows = codec.rows(&columns).ok()?;
    Some(rows.row(0).as_ref().to_vec())
}

/// The first bytes after all that begin with these; `None`: there are none.
fn successor(mut bytes: Vec<u8>) -> Option<Vec<u8>> {
    while let Some(last) = bytes.pop() {
        if last < u8::MAX {
            bytes.push(last + 1);
            return Some(bytes);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn int(v: i32) -> ScalarValue {
        ScalarValue::Int32(Some(v))
    }

    #[test]
    fn a_fixed_first_column_reads_one_vnode_and_a_range_reads_all() {
        let one = ranges(&[int(7)], None).unwrap();
        assert_eq!(one.len(), 1);
        let bounds =
            Bounds { lower: Some(int(-5)), upper: Some((int(5), true)), ..Bounds::default() };
        let all = ranges(&[], Some(&bounds)).unwrap();
        assert_eq!(all.len(), VNODE_COUNT);
        for (v, range) in all.iter().enumerate() {
            let key =
                |i: i32| [&(v as u16).to_be_bytes()[..], &encode(&[int(i)]).unwrap()].concat();
            let inside = |i| range.from <= key(i) && key(i) < range.until;
            assert_eq!([-6, -5, 0, 5, 6].map(inside), [false, true, true, true, false]);
        }
    }

    #[test]
    fn a_range_after_a_fixed_column_keeps_to_its_prefix() {
        let bounds = Bounds { lower: Some(int(3)), ..Bounds::default() };
        let range = &ranges(&[int(1)], Some(&bounds)).unwrap()[0];
        let vnode = &range.from[..2];
        let inside = |a, b| {
            let key = [vnode, &encode(&[int(a), int(b)]).unwrap()].concat();
            range.from <= key && key < range.until
        };
        assert!(
            inside(1, 3) && inside(1, i32::MAX) && !inside(1, 2) && !inside(2, 3) && !inside(0, 9)
        );
    }

    #[test]
    fn what_begins_with_the_largest_bytes_has_no_successor() {
        assert_eq!(successor(vec![1, 255]), Some(vec![2]));
        assert_eq!(successor(vec![255, 255]), None);
    }
}
