use super::*;
use crate::ast::Statement as Ours;
use crate::parser::{parse, parse_text};

fn numbers(n: usize) -> String {
    (0..n).map(|i| format!("{i},\n ")).collect::<String>() + "-5"
}

fn sql(text: &str) -> Statement {
    match parse(text).unwrap().pop().unwrap().statement {
        Ours::Sql(sql) => *sql,
        other => panic!("{other:?}"),
    }
}

/// A list in all kinds of texts is what it would be without being kept as text, places included.
#[test]
fn unfolded_is_as_written() {
    let list = numbers(1_000);
    let strings = (0..500).map(|i| format!("'é{i}'',\n;'")).collect::<Vec<_>>().join(" ,");
    let rows = (0..500).map(|i| format!("({i}, 'a''{i}',\n NULL, -1.5)")).collect::<Vec<_>>();
    let rows = rows.join(", ");
    for text in [
        format!(
            "SELECT 'é' FROM t WHERE a IN ({list}) AND b = 'x' OR c IN ({list}, NULL) ORDER BY 1"
        ),
        format!("SELECT a FROM t WHERE NOT a NOT IN ( {strings} )\n AND x < 1;  SELECT 2"),
        format!(
            "-- a 'comment IN (\nINSERT INTO s.\"t\" (a, b, c, d) VALUES {rows} RETURNING a;SELECT 1"
        ),
        format!("INSERT INTO t VALUES\n{rows} ON CONFLICT DO NOTHING"),
        format!(
            "SELECT $$ IN ({list}) $$, E'\\' IN ({list})', \" IN ({list})\", x /* IN ({list}) */"
        ),
    ] {
        let mut parsed = parse(&text).unwrap();
        let plain = parse_text(&text, None).unwrap();
        assert_eq!(parsed.len(), plain.len());
        for (parsed, plain) in parsed.iter_mut().zip(&plain) {
            assert_eq!((&parsed.text, parsed.offset), (&plain.text, plain.offset));
            let Ours::Sql(sql) = &mut parsed.statement else { panic!("{text}") };
            let Ours::Sql(expected) = &plain.statement else { panic!("{text}") };
            unfold_rows(sql).unwrap();
            unfold(sql.as_mut()).unwrap();
            assert_eq!(sql, expected);
        }
    }
}

#[test]
fn what_is_kept_as_text() {
    let list = numbers(1_000);
    let folds = |text: &str| Folded::of(text).map_or(0, |f| f.folds.len());
    assert_eq!(folds(&format!("SELECT 1 WHERE 1 IN ({list})")), 1);
    assert_eq!(folds(&format!("SELECT 1 WHERE 1 IN ({list}, 1+1)")), 0);
    assert_eq!(folds(&format!("SELECT 1 WHERE 1 IN ({list}, 'a')")), 0);
    assert_eq!(folds(&format!("SELECT 1 WHERE 1 IN ({list}, 1.5)")), 0);
    assert_eq!(folds(&format!("SELECT 1 WHERE 1 IN ({list}, $1)")), 0);
    assert_eq!(folds("SELECT 1 WHERE 1 IN (1, 2, 3)"), 0);
    assert_eq!(folds(&format!("SELECT ' IN ({list})'")), 0);
    let rows = "(1, 'a'), ".repeat(1_000);
    assert_eq!(folds(&format!("INSERT INTO t VALUES {rows} (2, NULL)")), 1);
    assert_eq!(folds(&format!("INSERT INTO t VALUES {rows} (2, DEFAULT)")), 0);
    assert_eq!(folds(&format!("INSERT INTO t VALUES {rows} (2)")), 0);
    assert_eq!(folds(&format!("INSERT INTO t VALUES {rows} (2, 3) ORDER BY 1")), 0);
    assert_eq!(folds(&format!("INSERT INTO t VALUES {rows} (2, 3) UNION SELECT 1, 2")), 0);
    assert_eq!(folds(&format!("SELECT * FROM (VALUES {rows} (2, 3)) v")), 0);
}

#[test]
fn cells_of_rows() {
    let text =
        format!("INSERT INTO t VALUES {} (-7, 'a''b' , true)", "(1, NULL, false),".repeat(200));
    let Statement::Insert(insert) = sql(&text) else { panic!("no INSERT") };
    let SetExpr::Values(values) = *insert.source.unwrap().body else { panic!("no VALUES") };
    let rows = rows(&values).unwrap();
    assert_eq!((rows.width, rows.count, rows.cells().count()), (3, 201, 603));
    let last: Vec<_> = rows.cells().skip(600).collect();
    assert!(matches!(&last[0], Cell::Number("-7")));
    assert!(matches!(&last[1], Cell::Text(t) if t == "a'b"));
    assert!(matches!(&last[2], Cell::Boolean(true)));
}
