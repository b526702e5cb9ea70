use crate::testing::check;

#[test]
fn replacements() {
    check(&[
        ("regexp_replace('foobarbaz', 'b..', 'X')", "fooXbaz"),
        ("regexp_replace('foobarbaz', 'b..', 'X', 'g')", "fooXX"),
        ("regexp_replace('foobarbaz', 'b(..)', 'X\\1Y', 'g')", "fooXarYXazY"),
        ("regexp_replace('abc', 'B', '[\\&]', 'i')", "a[b]c"),
        ("regexp_replace('a\\b', '\\\\', '/')", "a/b"),
        ("regexp_replace('größe', 'ö', 'oe')", "groeße"),
        ("regexp_replace('abc', 'x*', '-', 'g')", "-a-b-c-"),
        ("regexp_replace('aaa', 'a', 'b', 2)", "aba"),
        ("regexp_replace('aaaa', 'a', 'b', 1, 3)", "aaba"),
        (
            "regexp_replace('A PostgreSQL function', 'a|e|i|o|u', 'X', 1, 0, 'i')",
            "X PXstgrXSQL fXnctXXn",
        ),
        ("regexp_replace('abc', 'b', '$1')", "a$1c"),
        ("regexp_replace('abc', NULL, 'x')", "NULL"),
        ("regexp_replace('abc', '(', 'x')", "error 2201B"),
        ("regexp_replace('abc', 'b', 'x', 'z')", "error 22023"),
    ]);
}

#[test]
fn parts_that_match() {
    check(&[
        ("regexp_substr('number of your street, town zip, FR', '[^,]+', 1, 2)", " town zip"),
        ("regexp_substr('ABCDEFGHI', '(c..)(...)', 1, 1, 'i', 2)", "FGH"),
        ("regexp_substr('abc', 'x')", "NULL"),
        ("regexp_substr('abc', 'b', 0)", "error 22023"),
        ("regexp_match('foobarbequebaz', 'bar.*que')", "{barbeque}"),
        ("regexp_match('foobarbequebaz', '(bar)(beque)')", "{bar,beque}"),
        ("regexp_match('abc', 'x')", "NULL"),
        ("regexp_match('abc', '(x)?b')", "{NULL}"),
        ("regexp_match('ABC', 'b', 'i')", "{B}"),
        ("regexp_match('abc', 'b', 'g')", "error 22023"),
        ("regexp_split_to_array('hello world  x', '\\s+')", "{hello,world,x}"),
        ("regexp_split_to_array('abc', '')", "{a,b,c}"),
        ("regexp_split_to_array(',a,', ',')", "{\"\",a,\"\"}"),
        ("regexp_split_to_array('aXbxc', 'x', 'i')", "{a,b,c}"),
    ]);
}

#[test]
fn places_and_counts() {
    check(&[
        ("regexp_instr('number of your street, town zip, FR', '[^,]+', 1, 2)", "23"),
        ("regexp_instr('abcabc', 'b', 1, 2, 1)", "6"),
        ("regexp_instr('größe', 'ß')", "4"),
        ("regexp_instr('abc', 'x')", "0"),
        ("regexp_count('123456789012', '\\d\\d\\d', 2)", "3"),
        ("regexp_count('abc', '')", "4"),
        ("regexp_count('ABCABCABCaba', 'b', 1, 'i')", "4"),
        ("regexp_count('abc', 'b', 0)", "error 22023"),
        ("regexp_like('Hello World', 'world$', 'i')", "true"),
        ("regexp_like('abc', 'x')", "false"),
    ]);
}

#[test]
fn postgresql_s_regular_expressions() {
    check(&[
        ("regexp_replace('foo.bar', '\\.', '#')", "foo#bar"),
        ("regexp_replace('cat concat', '\\mcat\\M', 'dog', 'g')", "dog concat"),
        ("regexp_replace('cat concat', '\\ycat\\y', 'dog', 'g')", "dog concat"),
        ("regexp_match('a' , '[[:alpha:]]')", "{a}"),
        ("regexp_match('a1_', '\\w+')", "{a1_}"),
        ("regexp_replace('ab12', '[^[:digit:]]', '', 'g')", "12"),
        ("regexp_match('abbb', 'ab{2}')", "{abb}"),
        ("regexp_match('aaa', 'a+?')", "{a}"),
        ("regexp_match('abc', '(?:a)(b)')", "{b}"),
        ("regexp_match('ABC', '(?i)abc')", "{ABC}"),
        ("regexp_match('xay', '\\x61')", "{a}"),
        ("regexp_match('aa', '(a)\\1')", "error 0A000"),
        ("regexp_match('ab', 'a(?=b)')", "error 0A000"),
    ]);
}

#[test]
fn similar_to() {
    check(&[
        ("similar_to('abc', 'abc')", "true"),
        ("similar_to('abc', 'a')", "false"),
        ("similar_to('abc', '%(b|d)%')", "true"),
        ("similar_to('a.c', 'a.c')", "true"),
        ("similar_to('abc', 'a.c')", "false"),
        ("similar_to('abc', 'a_c')", "true"),
        ("similar_to('a%', 'a#%', '#')", "true"),
        ("similar_to('größe', '%ß_')", "true"),
    ]);
}

#[test]
fn like_with_another_escape() {
    check(&[
        ("like_escape('a%b', 'a#%b', '#')", "true"),
        ("like_escape('axb', 'a#%b', '#')", "false"),
        ("like_escape('a\\b', 'a\\b', '')", "true"),
        ("like_escape('größe', 'gr__e', '#')", "true"),
        ("like_escape('abc', 'abc', '##')", "error 22025"),
        ("ilike_escape('GRÖSSE', 'größ%', '#')", "false"),
        ("ilike_escape('ABC', 'a#Bc', '#')", "true"),
        ("like_escape(NULL, 'a', '#')", "NULL"),
    ]);
}

#[test]
fn lists_of_patterns() {
    check(&[
        ("like_any('abc', '{x%,a%}'::text[])", "true"),
        ("like_any('abc', '{x%,NULL}'::text[])", "NULL"),
        ("like_any('abc', '{}'::text[])", "false"),
        ("like_all('abc', '{a%,%c}'::text[])", "true"),
        ("like_all('abc', '{x%,NULL}'::text[])", "false"),
        ("like_all('abc', '{a%,NULL}'::text[])", "NULL"),
        ("like_all('abc', '{}'::text[])", "true"),
        ("ilike_any('ABC', '{b,a%}'::text[])", "true"),
        ("ilike_all('ABC', '{%c,a%}'::text[])", "true"),
    ]);
}

#[test]
fn matches() {
    check(&[("regex_match('abc', 'b')", "true"), ("regex_imatch('ABC', '^b')", "false")]);
}
