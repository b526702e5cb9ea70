//! PostgreSQL's functions and operators of `jsonb`, over documents in their canonical text
//! ([`millrace_common::json`]).

use std::cmp::Ordering;

use arrow::array::{Array, ArrayRef, AsArray, LargeStringBuilder};
use arrow::datatypes::DataType;
use millrace_common::encoding::array::array_items;
use millrace_common::json::{Doc, Json, Put, push_string};
use millrace_common::types::Element;
use millrace_common::{SqlError, SqlState, SqlType as T};

use super::call::{Args, Def, Out, Overload, over};
use crate::interrupt;

fn invalid(message: impl Into<String>) -> SqlError {
    SqlError::new(SqlState::INVALID_PARAMETER_VALUE, message)
}

fn put(out: &mut Out, doc: Option<Doc<'_>>) -> Result<(), SqlError> {
    match doc {
        Some(doc) => out.json(doc.0),
        None => {
            out.null();
            Ok(())
        }
    }
}

fn put_text(out: &mut Out, doc: Option<Doc<'_>>) -> Result<(), SqlError> {
    match doc.and_then(Doc::text) {
        Some(text) => out.text(&text),
        None => {
            out.null();
            Ok(())
        }
    }
}

/// The steps of a path given as a text array's literal.
fn steps(text: &str) -> Result<Vec<Option<String>>, SqlError> {
    array_items(text).ok_or_else(|| {
        SqlError::new(
            SqlState::INVALID_TEXT_REPRESENTATION,
            format!("malformed array literal: \"{text}\""),
        )
    })
}

fn follow<'a>(doc: Doc<'a>, path: &str) -> Result<Option<Doc<'a>>, SqlError> {
    let mut at = Some(doc);
    for step in steps(path)? {
        at = match (at, step) {
            (Some(doc), Some(step)) => doc.step(&step),
            _ => None,
        };
    }
    Ok(at)
}

fn extract<'a>(a: &'a Args) -> Option<Doc<'a>> {
    (1..a.len()).try_fold(a.doc(0), |doc, i| doc.step(a.text(i)))
}

/// Whether an argument contains another: time in proportion to the product of the lengths at most.
fn contains(a: &Args, out: &mut Out, whole: usize, part: usize) -> Result<(), SqlError> {
    let (whole, part) = (tree(a, whole)?, tree(a, part)?);
    let contains = whole.contains(&part, &mut || interrupt::step(ITEM_BYTES))?;
    out.boolean(contains)
}

/// Of two items that are compared.
const ITEM_BYTES: usize = 16;

/// Whether any of the keys exists, or every one.
fn keys_exist(a: &Args, every: bool, out: &mut Out) -> Result<(), SqlError> {
    for key in steps(a.text(1))?.iter().flatten() {
        interrupt::step(a.doc(0).0.len())?;
        if exists(a.doc(0), key) != every {
            return out.boolean(!every);
        }
    }
    out.boolean(every)
}

fn exists(doc: Doc<'_>, key: &str) -> bool {
    match doc.kind() {
        "object" => doc.field(key).is_some(),
        "array" => doc.items().any(|item| item.is_string(key)),
        "string" => doc.is_string(key),
        _ => false,
    }
}

fn tree(a: &Args, i: usize) -> Result<Json, SqlError> {
    Json::parse(a.doc(i).0)
}

fn delete_keys(a: &Args, keys: &[Option<String>], out: &mut Out) -> Result<(), SqlError> {
    let gone = |key: &str| keys.iter().flatten().any(|k| k == key);
    let left = match tree(a, 0)? {
        Json::Object(entries) => {
            Json::Object(entries.into_iter().filter(|(k, _)| !gone(k)).collect())
        }
        Json::Array(items) => {
            let stays = |item: &Json| !matches!(item, Json::String(s) if gone(s));
            Json::Array(items.into_iter().filter(stays).collect())
        }
        _ => return Err(invalid("cannot delete from scalar")),
    };
    out.json(&left.print())
}

fn delete_index(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    match tree(a, 0)? {
        Json::Array(mut items) => {
            let n = i64::from(a.int(1));
            let at = if n < 0 { n + items.len() as i64 } else { n };
            if (0..items.len() as i64).contains(&at) {
                items.remove(at as usize);
            }
            out.json(&Json::Array(items).print())
        }
        Json::Object(_) => Err(invalid("cannot delete from object using integer index")),
        _ => Err(invalid("cannot delete from scalar")),
    }
}

fn change(a: &Args, out: &mut Out, value: Option<&Json>, how: Put) -> Result<(), SqlError> {
    let mut doc = tree(a, 0)?;
    if !matches!(doc, Json::Array(_) | Json::Object(_)) {
        let what = if value.is_some() { "set path in" } else { "delete path in" };
        return Err(invalid(format!("cannot {what} scalar")));
    }
    let path = steps(a.text(1))?;
    let path: Option<Vec<&str>> = path.iter().map(Option::as_deref).collect();
    if let Some(path) = path {
        doc.put(&path, value, how)?;
    }
    out.json(&doc.print())
}

fn set(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    let create = a.len() < 4 || a.boolean(3);
    change(a, out, Some(&tree(a, 2)?), Put::Replace { create })
}

/// What becomes of a document where the new value is NULL.
fn set_lax(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    if (0..a.len()).any(|i| i != 2 && i != 4 && a.is_null(i)) {
        out.null();
        return Ok(());
    }
    let create = a.len() < 4 || a.boolean(3);
    let treatment = if a.len() < 5 { Some("use_json_null") } else { a.text_or_null(4) };
    match treatment {
        Some(_) if !a.is_null(2) => change(a, out, Some(&tree(a, 2)?), Put::Replace { create }),
        Some("use_json_null") => change(a, out, Some(&Json::Null), Put::Replace { create }),
        Some("delete_key") => change(a, out, None, Put::Replace { create: false }),
        Some("return_target") => out.json(a.doc(0).0),
        Some("raise_exception") => {
            let detail =
                "Exception was raised because null_value_treatment is \"raise_exception\".";
            let hint = "To avoid, either change the null_value_treatment argument or ensure that \
                        an SQL NULL is not passed.";
            let e = SqlError::new(SqlState("22004"), "JSON value must not be null");
            Err(e.with_detail(detail).with_hint(hint))
        }
        _ => Err(invalid(
            "null_value_treatment must be \"delete_key\", \"return_target\", \
             \"use_json_null\", or \"raise_exception\"",
        )),
    }
}

fn insert(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    let after = a.len() > 3 && a.boolean(3);
    change(a, out, Some(&tree(a, 2)?), Put::Insert { after })
}

fn build_object(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    if !a.len().is_multiple_of(2) {
        return Err(invalid("argument list must have even number of elements").with_hint(
            "The arguments of jsonb_build_object() must consist of alternating keys and values.",
        ));
    }
    let mut entries = Vec::with_capacity(a.len() / 2);
    for i in (0..a.len()).step_by(2) {
        let key = (!a.is_null(i)).then(|| a.doc(i).text()).flatten();
        let key = key.ok_or_else(|| {
            SqlError::new(
                SqlState::INVALID_PARAMETER_VALUE,
                format!("argument {}: key must not be null", i + 1),
            )
        })?;
        let value = if a.is_null(i + 1) { Json::Null } else { tree(a, i + 1)? };
        entries.push((key.into_owned(), value));
    }
    out.json(&Json::object(entries).print())
}

fn build_array(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    let mut text = String::from("[");
    for i in 0..a.len() {
        if i > 0 {
            text.push_str(", ");
        }
        text.push_str(if a.is_null(i) { "null" } else { a.doc(i).0 });
    }
    text.push(']');
    out.json(&text)
}

fn array_length(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    match a.doc(0).kind() {
        "array" => out.int(a.doc(0).items().count() as i32),
        "object" => Err(invalid("cannot get array length of a non-array")),
        _ => Err(invalid("cannot get array length of a scalar")),
    }
}

fn elements<'a>(a: &'a Args) -> Result<impl Iterator<Item = Doc<'a>>, SqlError> {
    match a.doc(0).kind() {
        "array" => Ok(a.doc(0).items()),
        "object" => Err(invalid("cannot extract elements from an object")),
        _ => Err(invalid("cannot extract elements from a scalar")),
    }
}

/// What `jsonb_each` makes rows of.
fn members<'a>(a: &'a Args) -> Result<impl Iterator<Item = (Doc<'a>, Doc<'a>)>, SqlError> {
    match a.doc(0).kind() {
        "object" => Ok(a.doc(0).entries()),
        _ => Err(invalid("cannot call jsonb_each on a non-object")),
    }
}

fn object_keys(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    match a.doc(0).kind() {
        "object" => {
            let keys: Vec<_> = a.doc(0).entries().map(|(k, _)| k.text()).collect();
            out.texts(keys.iter().map(|k| k.as_deref()))
        }
        "array" => Err(invalid("cannot call jsonb_object_keys on an array")),
        _ => Err(invalid("cannot call jsonb_object_keys on a scalar")),
    }
}

fn object(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    let items = steps(a.text(0))?;
    if !items.len().is_multiple_of(2) {
        return Err(SqlError::new(SqlState("2202E"), "array must have even number of elements"));
    }
    let entries = items.chunks_exact(2).map(|pair| {
        let key = pair[0].clone().ok_or_else(|| {
            SqlError::new(SqlState("22004"), "null value not allowed for object key")
        })?;
        Ok((key, pair[1].clone().map_or(Json::Null, Json::String)))
    });
    let entries = entries.collect::<Result<Vec<_>, SqlError>>()?;
    out.json(&Json::object(entries).print())
}

/// An object of an array of keys and one of values.
fn object_of(a: &Args, out: &mut Out) -> Result<(), SqlError> {
    let (keys, values) = (steps(a.text(0))?, steps(a.text(1))?);
    if keys.len() != values.len() {
        return Err(SqlError::new(SqlState("2202E"), "mismatched array dimensions"));
    }
    let entries = keys.into_iter().zip(values).map(|(key, value)| {
        let key = key.ok_or_else(|| {
            SqlError::new(SqlState("22004"), "null value not allowed for object key")
        })?;
        Ok((key, value.map_or(Json::Null, Json::String)))
    });
    let entries = entries.collect::<Result<Vec<_>, SqlError>>()?;
    out.json(&Json::object(entries).print())
}

fn compare(a: &Args) -> Result<Ordering, SqlError> {
    // Equal texts are equal documents; the reverse does not hold: 1 is 1.0.
    match a.doc(0).0 == a.doc(1).0 {
        true => Ok(Ordering::Equal),
        false => Ok(tree(a, 0)?.compare(&tree(a, 1)?)),
    }
}

/// Values of any type as documents: what `to_jsonb` makes of them.
pub fn documents(array: &ArrayRef) -> Result<ArrayRef, SqlError> {
    let mut out = LargeStringBuilder::new();
    let mut text = String::new();
    let t = array.data_type();
    if *t == DataType::LargeUtf8 {
        return Ok(array.clone());
    }
    if let DataType::List(_) = t {
        let list = array.as_list::<i32>();
        let items = documents(list.values())?;
        let items = items.as_string::<i64>();
        for row in 0..list.len() {
            if list.is_null(row) {
                out.append_null();
                continue;
            }
            text.clear();
            text.push('[');
            let (from, to) = (list.value_offsets()[row], list.value_offsets()[row + 1]);
            for i in from as usize..to as usize {
                if i > from as usize {
                    text.push_str(", ");
                }
                text.push_str(if items.is_null(i) { "null" } else { items.value(i) });
            }
            text.push(']');
            out.append_value(&text);
        }
        return Ok(std::sync::Arc::new(out.finish()));
    }
    let printed = super::cast::to_text(array)?;
    let printed = printed.as_string::<i32>();
    let bare = t.is_integer() || t.is_decimal() || *t == DataType::Boolean;
    let time = matches!(t, DataType::Timestamp(_, _));
    for value in printed {
        let Some(value) = value else {
            out.append_null();
            continue;
        };
        let number = t.is_floating() && !value.contains(['N', 'I']);
        if bare || number {
            match number && value.contains('e') {
                true => out.append_value(millrace_common::json::canonical(value)?),
                false => out.append_value(value),
            }
            continue;
        }
        text.clear();
        match time {
            // ISO 8601, as JSON has it.
            true => {
                let iso = value.replacen(' ', "T", 1);
                push_string(&mut text, &iso);
                if iso.ends_with("+00") {
                    text.insert_str(text.len() - 1, ":00");
                }
            }
            false => push_string(&mut text, value),
        }
        out.append_value(&text);
    }
    Ok(std::sync::Arc::new(out.finish()))
}

fn getters() -> Vec<Def> {
    const J: T = T::Jsonb;
    vec![
        Def::new(
            "jsonb_get",
            &[
                over(&[J, T::Text], J, |a, out| put(out, a.doc(0).field(a.text(1)))),
                over(&[J, T::Int], J, |a, out| put(out, a.doc(0).item(a.int(1).into()))),
            ],
        ),
        Def::new(
            "jsonb_get_text",
            &[
                over(&[J, T::Text], T::Text, |a, out| put_text(out, a.doc(0).field(a.text(1)))),
                over(&[J, T::Int], T::Text, |a, out| put_text(out, a.doc(0).item(a.int(1).into()))),
            ],
        ),
        Def::new(
            "jsonb_follow",
            &[over(&[J, T::Text], J, |a, out| put(out, follow(a.doc(0), a.text(1))?))],
        ),
        Def::new(
            "jsonb_follow_text",
            &[over(&[J, T::Text], T::Text, |a, out| put_text(out, follow(a.doc(0), a.text(1))?))],
        ),
        Def::new(
            "jsonb_extract_path",
            &[Overload {
                args: &[J, T::Text],
                variadic: true,
                returns: J,
                eval: |a, out| put(out, extract(a)),
            }],
        ),
        Def::new(
            "jsonb_extract_path_text",
            &[Overload {
                args: &[J, T::Text],
                variadic: true,
                returns: T::Text,
                eval: |a, out| put_text(out, extract(a)),
            }],
        ),
        Def::new("jsonb_typeof", &[over(&[J], T::Text, |a, out| out.text(a.doc(0).kind()))]),
        Def::new("jsonb_array_length", &[over(&[J], T::Int, array_length)]),
    ]
}

fn predicates() -> Vec<Def> {
    const J: T = T::Jsonb;
    vec![
        Def::new("jsonb_contains", &[over(&[J, J], T::Boolean, |a, out| contains(a, out, 0, 1))]),
        Def::new("jsonb_contained", &[over(&[J, J], T::Boolean, |a, out| contains(a, out, 1, 0))]),
        Def::new(
            "jsonb_exists",
            &[over(&[J, T::Text], T::Boolean, |a, out| out.boolean(exists(a.doc(0), a.text(1))))],
        ),
        Def::new(
            "jsonb_exists_any",
            &[over(&[J, T::Text], T::Boolean, |a, out| keys_exist(a, false, out))],
        ),
        Def::new(
            "jsonb_exists_all",
            &[over(&[J, T::Text], T::Boolean, |a, out| keys_exist(a, true, out))],
        ),
        Def::new("jsonb_cmp", &[over(&[J, J], T::Int, |a, out| out.int(compare(a)? as i32))]),
    ]
}

/// The language of paths (SQL/JSON) is not built.
const ABSENT: [&str; 10] = [
    "jsonb_path_exists",
    "jsonb_path_exists_tz",
    "jsonb_path_match",
    "jsonb_path_match_tz",
    "jsonb_path_query",
    "jsonb_path_query_tz",
    "jsonb_path_query_array",
    "jsonb_path_query_array_tz",
    "jsonb_path_query_first",
    "jsonb_path_query_first_tz",
];

pub fn defs() -> Vec<Def> {
    let mut all = getters();
    all.extend(predicates());
    all.extend(ABSENT.map(Def::absent));
    all.extend(changes());
    all.extend(constructors());
    all.extend(lists());
    let random = over(&[], T::Uuid, |_, out| out.uuid(random_uuid()));
    all.push(Def::new("gen_random_uuid", &[random]).volatile());
    all
}

/// Documents made of others.
fn changes() -> Vec<Def> {
    const J: T = T::Jsonb;
    vec![
        Def::new(
            "jsonb_delete",
            &[
                over(&[J, T::Text], J, |a, out| delete_keys(a, &[Some(a.text(1).to_owned())], out)),
                over(&[J, T::Int], J, delete_index),
            ],
        ),
        Def::new(
            "jsonb_delete_keys",
            &[over(&[J, T::Text], J, |a, out| delete_keys(a, &steps(a.text(1))?, out))],
        ),
        Def::new(
            "jsonb_delete_path",
            &[over(&[J, T::Text], J, |a, out| {
                change(a, out, None, Put::Replace { create: false })
            })],
        ),
        Def::new(
            "jsonb_concat",
            &[over(&[J, J], J, |a, out| out.json(&tree(a, 0)?.concat(tree(a, 1)?).print()))],
        ),
        Def::new(
            "jsonb_set",
            &[over(&[J, T::Text, J], J, set), over(&[J, T::Text, J, T::Boolean], J, set)],
        ),
        Def::new(
            "jsonb_insert",
            &[over(&[J, T::Text, J], J, insert), over(&[J, T::Text, J, T::Boolean], J, insert)],
        ),
        Def::new(
            "jsonb_strip_nulls",
            &[over(&[J], J, |a, out| out.json(&tree(a, 0)?.strip_nulls().print()))],
        ),
        Def::new(
            "jsonb_pretty",
            &[over(&[J], T::Text, |a, out| {
                let mut text = String::new();
                tree(a, 0)?.pretty(&mut text, 0);
                out.text(&text)
            })],
        ),
        Def::new(
            "jsonb_set_lax",
            &[
                over(&[J, T::Text, J], J, set_lax),
                over(&[J, T::Text, J, T::Boolean], J, set_lax),
                over(&[J, T::Text, J, T::Boolean, T::Text], J, set_lax),
            ],
        )
        .takes_nulls(),
    ]
}

/// Documents made of values.
fn constructors() -> Vec<Def> {
    const J: T = T::Jsonb;
    let any = |eval| Overload { args: &[T::Text], variadic: true, returns: J, eval };
    vec![
        Def::new(
            "jsonb_object",
            &[over(&[T::Text], J, object), over(&[T::Text, T::Text], J, object_of)],
        ),
        Def::new("to_jsonb", &[over(&[T::Text], J, |a, out| out.json(a.doc(0).0))]).documents(),
        Def::new("jsonb_build_object", &[over(&[], J, build_object), any(build_object)])
            .takes_nulls()
            .documents(),
        Def::new("jsonb_build_array", &[over(&[], J, build_array), any(build_array)])
            .takes_nulls()
            .documents(),
    ]
}

/// What a document consists of, as arrays.
fn lists() -> Vec<Def> {
    const J: T = T::Jsonb;
    vec![
        Def::new(
            "jsonb_array_elements_list",
            &[over(&[J], T::Array(Element::Jsonb), |a, out| out.jsons(elements(a)?.map(|d| d.0)))],
        ),
        Def::new(
            "jsonb_array_elements_text_list",
            &[over(&[J], T::Array(Element::Text), |a, out| {
                let items: Vec<_> = elements(a)?.map(Doc::text).collect();
                out.texts(items.iter().map(|i| i.as_deref()))
            })],
        ),
        Def::new("jsonb_object_keys_list", &[over(&[J], T::Array(Element::Text), object_keys)]),
        Def::new(
            "jsonb_each_keys_list",
            &[over(&[J], T::Array(Element::Text), |a, out| {
                let keys: Vec<_> = members(a)?.map(|(k, _)| k.text()).collect();
                out.texts(keys.iter().map(|k| k.as_deref()))
            })],
        ),
        Def::new(
            "jsonb_each_values_list",
            &[over(&[J], T::Array(Element::Jsonb), |a, out| {
                out.jsons(members(a)?.map(|(_, v)| v.0))
            })],
        ),
        Def::new(
            "jsonb_each_texts_list",
            &[over(&[J], T::Array(Element::Text), |a, out| {
                let values: Vec<_> = members(a)?.map(|(_, v)| v.text()).collect();
                out.texts(values.iter().map(|v| v.as_deref()))
            })],
        ),
    ]
}

/// A version 4 UUID.
fn random_uuid() -> [u8; 16] {
    let mut bytes: [u8; 16] = rand::random();
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    bytes
}

#[cfg(test)]
mod tests;
