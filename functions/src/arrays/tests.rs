use crate::testing::check;

#[test]
fn elements_are_added() {
    check(&[
        ("array_cat('{1}'::int4[], '{2,3}'::int4[])", "{1,2,3}"),
        ("array_cat('{1}'::int4[], NULL::int4[])", "{1}"),
        ("array_cat(NULL::int4[], NULL::int4[])", "NULL"),
    ]);
}

#[test]
fn elements_are_removed_and_replaced() {
    check(&[
        ("array_remove_all('{1,2,1,NULL}'::int4[], 1)", "{2,NULL}"),
        ("array_remove_all('{1,NULL}'::int4[], NULL::int4)", "{1}"),
        ("array_remove_all(NULL::int4[], 1)", "NULL"),
        ("array_replace_all('{1,2,1}'::int4[], 1, 9)", "{9,2,9}"),
        ("array_replace_all('{1,NULL}'::int4[], NULL::int4, 0)", "{1,0}"),
        ("array_replace_all('{1,2}'::int4[], 2, NULL::int4)", "{1,NULL}"),
        ("trim_array('{1,2,3}'::int4[], 1)", "{1,2}"),
        ("trim_array('{1,2,3}'::int4[], 3)", "{}"),
        ("trim_array('{1,2,3}'::int4[], 4)", "error 2202E"),
        ("trim_array('{1,2,3}'::int4[], -1)", "error 2202E"),
    ]);
}

#[test]
fn elements_are_found() {
    check(&[
        ("array_position('{a,b,a}'::text[], 'a'::text)", "1"),
        ("array_position('{a,b,a}'::text[], 'a'::text, 2)", "3"),
        ("array_position('{a,NULL}'::text[], NULL::text)", "2"),
        ("array_position('{a}'::text[], 'x'::text)", "NULL"),
        ("array_position(NULL::text[], 'x'::text)", "NULL"),
        ("array_positions('{a,b,a}'::text[], 'a'::text)", "{1,3}"),
        ("array_positions('{a}'::text[], 'x'::text)", "{}"),
        ("array_positions('{1,NULL,NULL}'::int4[], NULL::int4)", "{2,3}"),
    ]);
}

#[test]
fn sizes() {
    check(&[
        ("array_ndims('{1}'::int4[])", "1"),
        ("array_ndims('{}'::int4[])", "NULL"),
        ("array_dims('{5,6}'::int4[])", "[1:2]"),
    ]);
}

#[test]
fn arrays_as_sets() {
    check(&[
        ("array_has_all('{1,2,3}'::int4[], '{3,1,1}'::int4[])", "true"),
        ("array_has_all('{1,NULL}'::int4[], '{NULL}'::int4[])", "false"),
        ("array_has_all('{1}'::int4[], '{}'::int4[])", "true"),
        ("array_has_any('{1,2}'::int4[], '{2,3}'::int4[])", "true"),
        ("array_has_any('{1,NULL}'::int4[], '{NULL}'::int4[])", "false"),
        ("array_has_any('{}'::int4[], '{}'::int4[])", "false"),
        ("array_has_any('{1}'::int4[], NULL::int4[])", "NULL"),
    ]);
}

#[test]
fn arrays_and_texts() {
    check(&[
        ("array_to_string('{1,NULL,3}'::int4[], ',')", "1,3"),
        ("array_to_string('{1,NULL,3}'::int4[], ',', '*')", "1,*,3"),
        ("array_to_string('{}'::int4[], ',')", ""),
        ("array_to_string('{t,f}'::bool[], '-')", "t-f"),
        ("array_to_string('{ä,\"b c\"}'::text[], '')", "äb c"),
        ("array_to_string('{NaN,1e20}'::float8[], ',')", "NaN,1e+20"),
        ("array_to_string(NULL::int4[], ',')", "NULL"),
        ("array_to_string('{1}'::int4[], NULL)", "NULL"),
        ("array_to_string('{2024-02-29}'::date[], ',')", "2024-02-29"),
    ]);
}

#[test]
fn numbers_in_a_row() {
    check(&[
        ("array_fill(7, '{3}'::int4[])", "{7,7,7}"),
        ("array_fill(NULL::int4, '{2}'::int4[])", "{NULL,NULL}"),
        ("array_fill(7, '{0}'::int4[])", "{}"),
        ("array_fill(7, '{-1}'::int4[])", "error 54000"),
        ("array_fill(7, NULL::int4[])", "error 22004"),
    ]);
}

#[test]
fn elements_and_slices() {
    check(&[
        ("array_item('{5,6,7}'::int4[], 1)", "5"),
        ("array_item('{5,6,7}'::int4[], 3)", "7"),
        ("array_item('{5,6,7}'::int4[], 0)", "NULL"),
        ("array_item('{5,6,7}'::int4[], 4)", "NULL"),
        ("array_item('{5,6,7}'::int4[], -1)", "NULL"),
        ("array_item('{5,NULL}'::int4[], 2)", "NULL"),
        ("array_item(NULL::int4[], 1)", "NULL"),
        ("array_slice_of('{5,6,7}'::int4[], 2, 3)", "{6,7}"),
        ("array_slice_of('{5,6,7}'::int4[], -1, 1)", "{5}"),
        ("array_slice_of('{5,6,7}'::int4[], 2, 99)", "{6,7}"),
        ("array_slice_of('{5,6,7}'::int4[], 3, 2)", "{}"),
        ("array_slice_of('{5,6,7}'::int4[], 4, 5)", "{}"),
        ("array_slice_of('{5,6,7}'::int4[], NULL::int4, 5)", "NULL"),
        ("array_subscripts('{5,6,7}'::int4[], 1)", "{1,2,3}"),
    ]);
}

#[test]
fn arrays_are_compared_element_by_element() {
    check(&[
        // Below zero, zero or above it, as the arrays are less, equal or greater.
        ("array_cmp('{1,2}'::int4[], '{1,3}'::int4[])", "-1"),
        ("array_cmp('{2}'::int4[], '{1,9}'::int4[])", "1"),
        ("array_cmp('{1}'::int4[], '{1,0}'::int4[])", "-1"),
        ("array_cmp('{1,NULL}'::int4[], '{1,2}'::int4[])", "1"),
        ("array_cmp('{NULL}'::int4[], '{NULL}'::int4[])", "0"),
        ("array_cmp('{}'::int4[], '{NULL}'::int4[])", "-1"),
        ("array_cmp('{1}'::int4[], NULL::int4[])", "NULL"),
        ("array_cmp('{\"1 mon\"}'::interval[], '{\"30 days\"}'::interval[])", "0"),
        ("array_cmp('{NaN}'::float8[], '{Infinity}'::float8[])", "1"),
        ("array_cmp('{-0}'::float8[], '{0}'::float8[])", "0"),
    ]);
}

#[test]
fn equal_values_are_null() {
    check(&[
        ("#nullif('1 mon'::interval, '30 days'::interval)", "NULL"),
        ("#nullif('1 mon'::interval, '31 days'::interval)", "1 mon"),
        ("#nullif('1'::jsonb, '1.0'::jsonb)", "NULL"),
        ("#nullif(NULL::interval, '1 day'::interval)", "NULL"),
        ("#nullif('1 day'::interval, NULL::interval)", "1 day"),
    ]);
}
