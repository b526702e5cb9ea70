use crate::testing::check;

#[test]
fn parts_of_documents() {
    check(&[
        ("jsonb_get('{\"a\": {\"b\": 1}}'::jsonb, 'a')", "{\"b\": 1}"),
        ("jsonb_get('{\"a\": null}'::jsonb, 'a')", "null"),
        ("jsonb_get('{\"a\": 1}'::jsonb, 'x')", "NULL"),
        ("jsonb_get('[1, 2, 3]'::jsonb, -1)", "3"),
        ("jsonb_get('[1, 2, 3]'::jsonb, 3)", "NULL"),
        ("jsonb_get('[1, 2]'::jsonb, 'a')", "NULL"),
        ("jsonb_get('{\"1\": 2}'::jsonb, 1)", "NULL"),
        ("jsonb_get_text('{\"a\": null}'::jsonb, 'a')", "NULL"),
        ("jsonb_get_text('{\"a\": [1, \"x\"]}'::jsonb, 'a')", "[1, \"x\"]"),
        ("jsonb_get_text('[1.50]'::jsonb, 0)", "1.50"),
        ("jsonb_follow('{\"a\": [{\"b\": 1}]}'::jsonb, '{a,0,b}')", "1"),
        ("jsonb_follow('{\"a\": [{\"b\": 1}]}'::jsonb, '{a,x}')", "NULL"),
        ("jsonb_follow('{\"a\": 1}'::jsonb, '{}')", "{\"a\": 1}"),
        ("jsonb_follow('{\"a\": 1}'::jsonb, '{a,NULL}')", "NULL"),
        ("jsonb_follow_text('{\"a\": {\"b\": \"c\"}}'::jsonb, '{a,b}')", "c"),
        ("jsonb_extract_path('{\"a\": [1, {\"b\": 2}]}'::jsonb, 'a', '1', 'b')", "2"),
        ("jsonb_extract_path_text('{\"a\": [\"x\"]}'::jsonb, 'a', '-1')", "x"),
        ("jsonb_get(NULL::jsonb, 'a')", "NULL"),
    ]);
}

#[test]
fn what_documents_are() {
    check(&[
        ("jsonb_typeof('null'::jsonb)", "null"),
        ("jsonb_typeof('1e5'::jsonb)", "number"),
        ("jsonb_typeof('[]'::jsonb)", "array"),
        ("jsonb_typeof('\"x\"'::jsonb)", "string"),
        ("jsonb_array_length('[1, [2, 3]]'::jsonb)", "2"),
        ("jsonb_array_length('{}'::jsonb)", "error 22023"),
        ("jsonb_array_length('1'::jsonb)", "error 22023"),
    ]);
}

#[test]
fn containment_and_keys() {
    check(&[
        ("jsonb_contains('{\"a\": 1, \"b\": [1, 2]}'::jsonb, '{\"b\": [2]}'::jsonb)", "true"),
        ("jsonb_contains('[1, 2]'::jsonb, '[2, 2, 1]'::jsonb)", "true"),
        ("jsonb_contains('[1, 2]'::jsonb, '1'::jsonb)", "true"),
        ("jsonb_contains('1'::jsonb, '[1]'::jsonb)", "false"),
        ("jsonb_contains('{\"a\": {\"b\": 1}}'::jsonb, '{\"b\": 1}'::jsonb)", "false"),
        ("jsonb_contains('1.0'::jsonb, '1'::jsonb)", "true"),
        ("jsonb_contained('{\"a\": 1}'::jsonb, '{\"a\": 1, \"b\": 2}'::jsonb)", "true"),
        ("jsonb_exists('{\"a\": null}'::jsonb, 'a')", "true"),
        ("jsonb_exists('[\"a\", \"b\"]'::jsonb, 'b')", "true"),
        ("jsonb_exists('\"a\"'::jsonb, 'a')", "true"),
        ("jsonb_exists('[1]'::jsonb, '1')", "false"),
    ]);
}

#[test]
fn documents_have_an_order() {
    check(&[
        ("jsonb_cmp('1'::jsonb, '1.00'::jsonb)", "0"),
        ("jsonb_cmp('{\"a\": 1}'::jsonb, '{\"a\": 2}'::jsonb)", "-1"),
        ("jsonb_cmp('[2]'::jsonb, '[1, 1]'::jsonb)", "-1"),
        ("jsonb_cmp('null'::jsonb, '\"a\"'::jsonb)", "-1"),
        ("jsonb_cmp('true'::jsonb, 'false'::jsonb)", "1"),
        ("jsonb_cmp('{}'::jsonb, '[1]'::jsonb)", "1"),
        ("jsonb_cmp('{\"a\": 1, \"b\": 1}'::jsonb, '{\"c\": 1}'::jsonb)", "1"),
    ]);
}

#[test]
fn parts_are_removed() {
    check(&[
        ("jsonb_delete('{\"a\": 1, \"b\": 2}'::jsonb, 'a'::text)", "{\"b\": 2}"),
        ("jsonb_delete('[\"a\", \"b\", \"a\"]'::jsonb, 'a'::text)", "[\"b\"]"),
        ("jsonb_delete('[1, 2, 3]'::jsonb, 1)", "[1, 3]"),
        ("jsonb_delete('[1, 2, 3]'::jsonb, -4)", "[1, 2, 3]"),
        ("jsonb_delete('1'::jsonb, 'a'::text)", "error 22023"),
        ("jsonb_delete('{\"a\": 1}'::jsonb, 1)", "error 22023"),
        ("jsonb_delete_keys('{\"a\": 1, \"b\": 2, \"c\": 3}'::jsonb, '{a,c}')", "{\"b\": 2}"),
        ("jsonb_delete_path('{\"a\": [1, {\"b\": 2}]}'::jsonb, '{a,1,b}')", "{\"a\": [1, {}]}"),
        ("jsonb_delete_path('{\"a\": [1]}'::jsonb, '{a,x}')", "error 22P02"),
        (
            "jsonb_strip_nulls('{\"a\": null, \"b\": [null, {\"c\": null}]}'::jsonb)",
            "{\"b\": [null, {}]}",
        ),
    ]);
}

#[test]
fn parts_are_put_in() {
    check(&[
        (
            "jsonb_concat('{\"a\": 1, \"b\": 2}'::jsonb, '{\"b\": 3}'::jsonb)",
            "{\"a\": 1, \"b\": 3}",
        ),
        ("jsonb_concat('[1]'::jsonb, '[2, [3]]'::jsonb)", "[1, 2, [3]]"),
        ("jsonb_concat('[1]'::jsonb, '{\"a\": 2}'::jsonb)", "[1, {\"a\": 2}]"),
        ("jsonb_concat('1'::jsonb, '\"x\"'::jsonb)", "[1, \"x\"]"),
        ("jsonb_concat('1'::jsonb, '{}'::jsonb)", "[1, {}]"),
        ("jsonb_set('{\"a\": {\"b\": 1}}'::jsonb, '{a,b}', '2'::jsonb)", "{\"a\": {\"b\": 2}}"),
        ("jsonb_set('{\"a\": 1}'::jsonb, '{b}', '2'::jsonb)", "{\"a\": 1, \"b\": 2}"),
        ("jsonb_set('{\"a\": 1}'::jsonb, '{b}', '2'::jsonb, false)", "{\"a\": 1}"),
        ("jsonb_set('[1, 2]'::jsonb, '{-1}', '9'::jsonb)", "[1, 9]"),
        ("jsonb_set('[1, 2]'::jsonb, '{5}', '9'::jsonb)", "[1, 2, 9]"),
        ("jsonb_set('[1, 2]'::jsonb, '{-5}', '9'::jsonb)", "[9, 1, 2]"),
        ("jsonb_set('[1]'::jsonb, '{x}', '9'::jsonb)", "error 22P02"),
        ("jsonb_set('1'::jsonb, '{a}', '9'::jsonb)", "error 22023"),
        ("jsonb_set('{\"a\": 1}'::jsonb, '{}', '9'::jsonb)", "{\"a\": 1}"),
        ("jsonb_set('{\"a\": 1}'::jsonb, '{a}', NULL::jsonb)", "NULL"),
        (
            "jsonb_insert('{\"a\": [0, 1]}'::jsonb, '{a,1}', '\"n\"'::jsonb)",
            "{\"a\": [0, \"n\", 1]}",
        ),
        (
            "jsonb_insert('{\"a\": [0, 1]}'::jsonb, '{a,1}', '\"n\"'::jsonb, true)",
            "{\"a\": [0, 1, \"n\"]}",
        ),
        ("jsonb_insert('{\"a\": 1}'::jsonb, '{a}', '2'::jsonb)", "error 22023"),
        ("jsonb_insert('[1]'::jsonb, '{-9}', '2'::jsonb)", "[2, 1]"),
        ("jsonb_set_lax('{\"a\": 1}'::jsonb, '{a}', NULL::jsonb)", "{\"a\": null}"),
        ("jsonb_set_lax('{\"a\": 1}'::jsonb, '{a}', NULL::jsonb, true, 'delete_key')", "{}"),
        (
            "jsonb_set_lax('{\"a\": 1}'::jsonb, '{a}', NULL::jsonb, true, 'return_target')",
            "{\"a\": 1}",
        ),
        (
            "jsonb_set_lax('{\"a\": 1}'::jsonb, '{a}', NULL::jsonb, true, 'raise_exception')",
            "error 22004",
        ),
        ("jsonb_set_lax('{\"a\": 1}'::jsonb, '{a}', NULL::jsonb, true, 'other')", "error 22023"),
    ]);
}

#[test]
fn documents_are_made_of_values() {
    check(&[
        ("to_jsonb('a\"b'::text)", "\"a\\\"b\""),
        ("to_jsonb(1.50)", "1.50"),
        ("to_jsonb(true)", "true"),
        ("to_jsonb('NaN'::float8)", "\"NaN\""),
        ("to_jsonb('1e30'::float8)", "1000000000000000000000000000000"),
        ("to_jsonb('2024-02-29 13:14'::timestamp)", "\"2024-02-29T13:14:00\""),
        ("to_jsonb('2024-02-29 13:14+00'::timestamptz)", "\"2024-02-29T13:14:00+00:00\""),
        ("to_jsonb('1 day'::interval)", "\"1 day\""),
        ("to_jsonb('{1,NULL}'::int4[])", "[1, null]"),
        ("to_jsonb('\\x00ff'::bytea)", "\"\\\\x00ff\""),
        ("to_jsonb(NULL::int4)", "NULL"),
        ("jsonb_build_object('a', 1, 'b', NULL)", "{\"a\": 1, \"b\": null}"),
        ("jsonb_build_object('a')", "error 22023"),
        ("jsonb_build_object(NULL, 1)", "error 22023"),
        ("jsonb_build_array(1, 'x', NULL, true)", "[1, \"x\", null, true]"),
    ]);
}

#[test]
fn numbers_and_keys_are_normal() {
    check(&[
        ("'{\"b\": 1, \"aa\": 2, \"b\": 3}'::jsonb", "{\"b\": 3, \"aa\": 2}"),
        ("'1.50e2'::jsonb", "150"),
        ("'-0'::jsonb", "0"),
        ("'\"\\u00e4\\ud83e\\udd80\"'::jsonb", "\"ä🦀\""),
        ("'\"\\u0000\"'::jsonb", "error 22P05"),
        ("'[1,]'::jsonb", "error 22P02"),
        ("' [ 1 , \"a\" ] '::jsonb", "[1, \"a\"]"),
        ("'1e5'::jsonb", "100000"),
    ]);
}

#[test]
fn documents_are_printed_on_lines() {
    check(&[
        (
            "jsonb_pretty('{\"a\": [1, {\"b\": null}], \"c\": {}}'::jsonb)",
            "{\n    \"a\": [\n        1,\n        {\n            \"b\": null\n        }\n    ],\n    \"c\": {\n    }\n}",
        ),
        ("jsonb_pretty('[]'::jsonb)", "[\n]"),
    ]);
}

#[test]
fn paths_are_refused() {
    check(&[
        ("jsonb_path_exists('{}'::jsonb, '$.a'::text)", "error 0A000"),
        ("jsonb_path_query('{}'::jsonb, '$.a'::text)", "error 0A000"),
    ]);
}

#[test]
fn elements_and_members() {
    check(&[
        ("jsonb_array_elements_text_list('[1, \"x\", null]'::jsonb)", "{1,x,NULL}"),
        ("jsonb_array_elements_list('[1, \"x\"]'::jsonb)", "{1,\"\\\"x\\\"\"}"),
        ("jsonb_array_elements_list('{}'::jsonb)", "error 22023"),
        ("jsonb_object_keys_list('{\"bb\": 1, \"a\": 2}'::jsonb)", "{a,bb}"),
        ("jsonb_object_keys_list('[1]'::jsonb)", "error 22023"),
    ]);
}
