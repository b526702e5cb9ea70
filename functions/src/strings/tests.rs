use crate::testing::check;

#[test]
fn lengths_count_characters_or_bytes() {
    check(&[
        ("length('größe'::text)", "5"),
        ("char_length('größe'::text)", "5"),
        ("character_length(''::text)", "0"),
        ("octet_length('größe'::text)", "7"),
        ("bit_length('ß'::text)", "16"),
        ("length('\\x00ff'::bytea)", "2"),
        ("octet_length('\\x00ff'::bytea)", "2"),
        ("length('🦀é'::text)", "2"),
        ("length(NULL::text)", "NULL"),
        ("length(12)", "error 42883"),
    ]);
}

#[test]
fn parts_of_texts() {
    check(&[
        ("substr('größe'::text, 3)", "öße"),
        ("substr('größe'::text, 3, 2)", "öß"),
        ("substr('abc', 0, 2)", "a"),
        ("substr('abc', -5)", "abc"),
        ("substr('abc', 2, 0)", ""),
        ("substr('abc', 2, -1)", "error 22011"),
        ("substr('abc', 5)", ""),
        ("substr('abc', -2147483648, 2147483647)", ""),
        ("substring('größe'::text, 2, 100)", "röße"),
        ("substring('\\x010203'::bytea, 2, 1)", "\\x02"),
        ("substr('\\x010203'::bytea, 0, 2)", "\\x01"),
        ("substring('\\x010203'::bytea, 1, -1)", "error 22011"),
        ("substring('foobar'::text, 'o(.)b')", "o"),
        ("substring('foobar'::text, 'x')", "NULL"),
        ("substring('foobar'::text, '%#\"o_b#\"%', '#')", "oob"),
        ("starts_with('größe', 'grö')", "true"),
        ("starts_with('abc', '')", "true"),
        ("split_part('a,b,c', ',', 2)", "b"),
        ("split_part('a,b,c', ',', -1)", "c"),
        ("split_part('a,b,c', ',', 4)", ""),
        ("split_part('a,b,c', ',', 0)", "error 22023"),
        ("split_part('abc', '', 1)", "abc"),
        ("split_part('', ',', 1)", ""),
        ("strpos('größe'::text, 'e')", "5"),
        ("strpos('abc', '')", "1"),
        ("strpos('abc', 'x')", "0"),
    ]);
}

#[test]
fn cases_and_codes() {
    check(&[
        ("initcap('hello wORLD-ok o''neil 3rd')", "Hello World-Ok O'Neil 3rd"),
        ("chr(8364)", "€"),
        ("chr(0)", "error 54000"),
        ("chr(1114112)", "error 54000"),
        ("encode('\\x00ff41'::bytea, 'hex')", "00ff41"),
        ("encode('\\x00ff5c41'::bytea, 'escape')", "\\000\\377\\\\A"),
        ("encode('\\x00ff41'::bytea, 'base64')", "AP9B"),
        ("encode('\\x00'::bytea, 'base85')", "error 22023"),
        ("decode('00FF', 'hex')", "\\x00ff"),
        ("decode('0', 'hex')", "error 22023"),
        ("decode('0g', 'hex')", "error 22023"),
        ("decode('AP9B', 'base64')", "\\x00ff41"),
        ("decode('\\000\\\\a', 'escape')", "\\x005c61"),
    ]);
}

#[test]
fn texts_put_together() {
    check(&[
        ("concat('a', NULL, 1, true, 1.50)", "a1t1.50"),
        ("concat(NULL::text)", ""),
        ("concat_ws(',', 'a', NULL, 'b')", "a,b"),
        ("concat_ws(NULL, 'a', 'b')", "NULL"),
        ("concat_ws(',', NULL::text)", ""),
        ("format('Hello %s, %s%%', 'World', 12)", "Hello World, 12%"),
        ("format('%2$s %1$s', 'a', 'b')", "b a"),
        ("format('%I %L', 'my col', 'it''s')", "\"my col\" 'it''s'"),
        ("format('%L', NULL)", "NULL"),
        ("format('%s|', NULL)", "|"),
        ("format('%I', NULL)", "error 22004"),
        ("format('|%10s|%-10s|', 'ä', 'b')", "|         ä|b         |"),
        ("format('|%*s|', 5, 'x')", "|    x|"),
        ("format('|%-*s|', 5, 'x')", "|x    |"),
        ("format('%s')", "error 22023"),
        ("format('%x', 'a')", "error 22023"),
        ("format('%', 'a')", "error 22023"),
        ("format(NULL, 'a')", "NULL"),
    ]);
}

#[test]
fn quoting() {
    check(&[
        ("quote_ident('col')", "col"),
        ("quote_ident('Col\"x')", "\"Col\"\"x\""),
        ("quote_ident('select')", "\"select\""),
        ("quote_literal('it''s')", "'it''s'"),
        ("quote_literal('a\\b')", "E'a\\\\b'"),
        ("quote_literal(NULL::text)", "NULL"),
        ("quote_nullable(NULL::text)", "NULL"),
        ("quote_literal(12)", "'12'"),
    ]);
}

#[test]
fn trims() {
    check(&[
        ("btrim('  ä  '::text)", "ä"),
        ("btrim('xyxtrimyyx', 'xyz')", "trim"),
        ("ltrim('zzzytest', 'xyz')", "test"),
        ("rtrim('testxxzx', 'xyz')", "test"),
        ("btrim('a', '')", "a"),
    ]);
}

#[test]
fn bits_and_hashes_of_bytes() {
    check(&[
        ("get_byte('\\x1234567890'::bytea, 4)", "144"),
        ("get_byte('\\x12'::bytea, 1)", "error 2202E"),
        ("set_byte('\\x1234567890'::bytea, 4, 64)", "\\x1234567840"),
        ("set_byte('\\x12'::bytea, -1, 64)", "error 2202E"),
        (
            "sha256('abc'::bytea)",
            "\\xba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
        ),
    ]);
}

#[test]
fn nulls_are_counted() {
    check(&[
        ("num_nulls(1, NULL, 2)", "1"),
        ("num_nonnulls(1, NULL, 2)", "2"),
        ("num_nulls(NULL)", "1"),
    ]);
}
