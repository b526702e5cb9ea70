//! Functions that plans are made of and that are no functions of SQL: a query that calls one by its name is told that
//! there is none.

use std::ops::ControlFlow;

use sqlparser::ast::{Expr, ObjectName, VisitMut, VisitorMut};

use super::output_names::{fold, table_alias};
use crate::bind::rewrites::ast::{AstRewrite, Whole};
use crate::parser::walk;

/// Ours, which the rewrites of this module call.
const OWN: [&str; 34] = [
    "array_subscripts",
    "canonical_float",
    "collect_entry",
    "compare_any",
    "hop_windows",
    "ilike_all",
    "ilike_any",
    "ilike_escape",
    "jsonb_array_elements_list",
    "jsonb_array_elements_text_list",
    "jsonb_each_keys_list",
    "jsonb_each_texts_list",
    "jsonb_each_values_list",
    "jsonb_object_keys_list",
    "like_all",
    "like_any",
    "pair_entry",
    "pg_abs",
    "pg_add",
    "pg_div",
    "pg_mod",
    "pg_mul",
    "pg_neg",
    "pg_sub",
    "regex_match",
    "regexp_matches_list",
    "row_text",
    "single_value",
    "text_arrays",
    "tumble_start",
    "width_bucket_of",
    "window_end",
    "zoned_iso",
    "zoned_text",
];

/// DataFusion's, of types and files that are not known here.
const THEIRS: [&str; 17] = [
    "arrow_field",
    "arrow_metadata",
    "arrow_try_cast",
    "arrow_typeof",
    "cast_to_type",
    "file_row_index",
    "get_field",
    "input_file_name",
    "map",
    "map_entries",
    "map_extract",
    "map_keys",
    "map_values",
    "named_struct",
    "struct",
    "try_cast_to_type",
    "with_metadata",
];

/// Hides internal functions from the text of a statement.
pub const HIDE_INTERNAL_CALLS: AstRewrite = AstRewrite {
    name: "hide internal calls",
    whole: |node, _| {
        match node {
            Whole::Query(query) => hide(*query),
            Whole::Expr(expr) => hide(*expr),
        }
        Ok(())
    },
    ..AstRewrite::NONE
};

/// Gives such calls of a query as it is written names that no function has, shown as theirs.
fn hide(query: &mut impl VisitMut) {
    struct Hide;
    impl VisitorMut for Hide {
        type Break = ();

        fn pre_visit_expr(&mut self, e: &mut Expr) -> ControlFlow<()> {
            if let Expr::Function(f) = e
                && let [.., part] = f.name.0.as_slice()
                && let Some(name) = part.as_ident().map(fold)
                && (OWN.contains(&name.as_str()) || THEIRS.contains(&name.as_str()))
            {
                f.name = ObjectName::from(vec![table_alias(&name)]);
            }
            ControlFlow::Continue(())
        }
    }
    let _ = walk::visit_mut(query, &mut Hide);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bind::rewrites::testing::assert_rewritten;

    #[test]
    fn only_internal_functions_have_other_names() {
        let cases = [
            ("SELECT pg_add(1, 2), abs(a) FROM t", "SELECT \"pg_add\u{1f}\"(1, 2), abs(a) FROM t"),
            ("SELECT map_keys(a) FROM t", "SELECT \"map_keys\u{1f}\"(a) FROM t"),
        ];
        assert_rewritten(HIDE_INTERNAL_CALLS, &cases);
    }
}
