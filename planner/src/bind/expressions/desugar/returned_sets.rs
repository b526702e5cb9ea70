//! Functions in a SELECT list that return sets of rows.

use sqlparser::ast::*;

use super::calls::unnamed_arguments;
use super::ops::{SERIES, call, take};
use crate::bind::expressions::clause_expressions::change_own;
use crate::bind::relations::table_functions::match_rows;
use crate::bind::rewrites::ast::AstRewrite;

/// Functions that return sets of rows, and the ones of arrays that they are in a SELECT list.
const SETS: [(&str, &str); 7] = [
    ("generate_series", SERIES),
    ("jsonb_array_elements", "jsonb_array_elements_list"),
    ("jsonb_array_elements_text", "jsonb_array_elements_text_list"),
    ("jsonb_object_keys", "jsonb_object_keys_list"),
    ("regexp_split_to_table", "regexp_split_to_array"),
    ("string_to_table", "string_to_array"),
    ("generate_subscripts", "array_subscripts"),
];

/// Whether a function returns a set of rows.
pub(in crate::bind) fn returns_rows(name: &str) -> bool {
    matches!(name, "unnest" | "regexp_matches") || SETS.iter().any(|(set, _)| *set == name)
}

/// Unnests arrays in place of functions that return sets.
pub const UNNEST_SETS: AstRewrite = AstRewrite {
    name: "unnest sets",
    select: |select, _| {
        select.projection.iter_mut().for_each(spread_series);
        change_own(&mut select.projection, spread_matches);
        Ok(())
    },
    ..AstRewrite::NONE
};

/// `generate_series` in a SELECT list is a set of rows.
fn spread_series(item: &mut SelectItem) {
    if let SelectItem::UnnamedExpr(e) | SelectItem::ExprWithAlias { expr: e, .. } = item
        && let Expr::Function(f) = e
        && let Some((_, list)) = SETS.iter().find(|s| f.name.to_string().eq_ignore_ascii_case(s.0))
    {
        f.name = ObjectName::from(vec![Ident::with_quote('"', *list)]);
        let list = take(e);
        *e = call("unnest", [list]);
    }
}

/// `regexp_matches` in a SELECT list is a set of rows, of which the list may also name the elements.
fn spread_matches(e: &mut Expr) {
    if let Expr::Function(f) = &*e
        && f.over.is_none()
        && f.name.to_string().eq_ignore_ascii_case("regexp_matches")
        && let Some(args) = unnamed_arguments(f)
    {
        *e = call("unnest", [match_rows(args)]);
    }
}

#[cfg(test)]
mod tests {
    use super::UNNEST_SETS;
    use crate::bind::rewrites::testing::assert_rewritten;

    #[test]
    fn sets_are_arrays_that_are_unnested() {
        let sql = "SELECT jsonb_object_keys(d), abs(a) FROM t";
        let expected = "SELECT \"unnest\"(\"jsonb_object_keys_list\"(d)), abs(a) FROM t";
        assert_rewritten(UNNEST_SETS, &[(sql, expected)]);
    }
}
