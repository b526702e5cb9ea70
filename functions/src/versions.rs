//! Versions of functions: stored job graphs name a function by its name and version, an aggregate by its number and
//! version.
//!
//! A view keeps the results that it was created with. So a function whose result changes for any
//! arguments, by our doing or by an upgrade of DataFusion, gets a new version in [`CHANGED`], and the
//! function that it was stays in [`RETAINED`], or [`RETAINED_AGGREGATES`], for the views that name it. What is not
//! declared here is at version 1. Queries and new views always get the newest version.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use datafusion::logical_expr::ScalarUDF;

use crate::aggregate_kind::AggFunc;

/// The version of a function that is not declared otherwise.
const FIRST: u32 = 1;

/// Scalar, aggregate and window functions that are at a later version than the first.
const CHANGED: &[(&str, u32)] = &[];

/// Scalar functions as they were at an earlier version.
const RETAINED: &[(u32, fn() -> Arc<ScalarUDF>)] = &[];

/// Aggregates of views as they were at an earlier version: variants of their own, with the number and the name of the
/// aggregate that has changed.
const RETAINED_AGGREGATES: &[(AggFunc, u32)] = &[];

/// The version of the function that [`crate::functions`] has under a name.
pub fn newest(name: &str) -> u32 {
    newest_of(CHANGED, name)
}

fn newest_of(changed: &[(&str, u32)], name: &str) -> u32 {
    changed.iter().find(|(n, _)| *n == name).map_or(FIRST, |(_, version)| *version)
}

/// The version of an aggregate that views maintain.
pub fn of_aggregate(func: AggFunc) -> u32 {
    of_aggregate_in(CHANGED, RETAINED_AGGREGATES, func)
}

fn of_aggregate_in(changed: &[(&str, u32)], retained: &[(AggFunc, u32)], func: AggFunc) -> u32 {
    let earlier = retained.iter().find(|(kept, _)| *kept == func);
    earlier.map_or_else(|| newest_of(changed, func.name()), |(_, version)| *version)
}

/// What a stored expression names a scalar function: its name, unless another function has taken it
/// and left it an alias, and its version. `None`: it is not one of the registry.
pub fn name_of(function: &ScalarUDF) -> Option<(&str, u32)> {
    stored().name_of(function)
}

/// A scalar function by what a stored expression names it; `None`: this release does not have it.
pub fn scalar(name: &str, version: u32) -> Option<Arc<ScalarUDF>> {
    stored().scalar(name, version)
}

/// Scalar functions by their names and versions.
struct Stored {
    newest: HashMap<String, (u32, Arc<ScalarUDF>)>,
    retained: Vec<(u32, Arc<ScalarUDF>)>,
}

fn stored() -> &'static Stored {
    static STORED: OnceLock<Stored> = OnceLock::new();
    STORED.get_or_init(|| {
        let all = crate::datafusion_scalars().chain(crate::own_scalars()).collect();
        let retained = RETAINED.iter().map(|(version, function)| (*version, function()));
        Stored::new(all, CHANGED, retained.collect())
    })
}

impl Stored {
    /// Of functions with the same name the last one has it; what it replaces keeps its aliases.
    fn new(
        all: Vec<Arc<ScalarUDF>>,
        changed: &[(&str, u32)],
        retained: Vec<(u32, Arc<ScalarUDF>)>,
    ) -> Stored {
        let entry = |name: &str, f: &Arc<ScalarUDF>| {
            (name.to_owned(), (newest_of(changed, name), Arc::clone(f)))
        };
        let mut newest: HashMap<_, _> = all.iter().map(|f| entry(f.name(), f)).collect();
        for function in &all {
            if newest.get(function.name()).is_some_and(|(_, f)| f != function) {
                for alias in function.aliases().iter().filter(|a| *a != function.name()) {
                    let (name, found) = entry(alias, function);
                    newest.entry(name).or_insert(found);
                }
            }
        }
        Stored { newest, retained }
    }

    fn name_of<'f>(&self, function: &'f ScalarUDF) -> Option<(&'f str, u32)> {
        let own = function.name();
        let is = |f: &ScalarUDF| f.name() == own && *f == *function;
        if let Some((version, _)) = self.retained.iter().find(|(_, f)| is(f)) {
            return Some((own, *version));
        }
        let named = |name: &'f str| self.newest.get(name).map(|(v, f)| (name, *v, f));
        let aliases = function.aliases().iter().map(String::as_str);
        let same = std::iter::once(own).chain(aliases).filter_map(named).find(|(_, _, f)| is(f));
        // DataFusion's own form of a function, where the registry has one of ours for it.
        same.or_else(|| named(own)).map(|(name, version, _)| (name, version))
    }

    fn scalar(&self, name: &str, version: u32) -> Option<Arc<ScalarUDF>> {
        let newest = self.newest.get(name).filter(|(v, _)| *v == version);
        let retained = || self.retained.iter().find(|(v, f)| *v == version && f.name() == name);
        newest.or_else(retained).map(|(_, f)| Arc::clone(f))
    }
}

#[cfg(test)]
mod tests {
    use arrow::datatypes::DataType;
    use datafusion::logical_expr::{ColumnarValue, Volatility, create_udf};

    use super::*;

    fn function(name: &str, returns: DataType) -> Arc<ScalarUDF> {
        let eval = Arc::new(|args: &[ColumnarValue]| Ok(args[0].clone()));
        let made = create_udf(name, vec![DataType::Int64], returns, Volatility::Immutable, eval);
        Arc::new(made)
    }

    #[test]
    fn every_scalar_function_of_the_registry_can_be_stored_and_found() {
        let all = crate::functions();
        for name in all.scalar_names() {
            let function = all.scalar(&name).unwrap();
            let named = name_of(&function);
            let (stored, version) = named.unwrap_or_else(|| panic!("{name} cannot be stored"));
            let found = scalar(stored, version);
            assert!(found.is_some_and(|f| f == function), "{name} is another function once stored");
        }
    }

    #[test]
    fn functions_are_at_version_1_and_at_no_other() {
        assert_eq!(name_of(&crate::functions().scalar("upper").unwrap()), Some(("upper", 1)));
        assert!(scalar("upper", 1).is_some());
        assert!(scalar("upper", 2).is_none());
        assert!(scalar("upper", 0).is_none());
        assert!(scalar("no_such_function", 1).is_none());
        assert_eq!(name_of(&function("no_such_function", DataType::Int64)), None);
    }

    #[test]
    fn a_changed_aggregate_has_a_later_version_than_the_one_that_is_kept() {
        assert_eq!(of_aggregate(AggFunc::Sum), 1);
        let changed = [("sum", 3)];
        // As if this variant were the sum at version 2.
        let retained = [(AggFunc::BitXor, 2)];
        let version = |func| of_aggregate_in(&changed, &retained, func);
        assert_eq!([AggFunc::Sum, AggFunc::BitXor, AggFunc::Count].map(version), [3, 2, 1]);
    }

    /// `date_format` is DataFusion's `to_char`, which PostgreSQL's replaces under that name.
    #[test]
    fn a_function_whose_name_is_taken_is_stored_by_an_alias() {
        let theirs = crate::functions().scalar("date_format").unwrap();
        assert_eq!((theirs.name(), name_of(&theirs)), ("to_char", Some(("date_format", 1))));
        let ours = crate::functions().scalar("to_char").unwrap();
        assert_eq!(name_of(&ours), Some(("to_char", 1)));
    }

    #[test]
    fn a_changed_function_is_found_by_each_of_its_versions() {
        let [old, new] = [DataType::Int64, DataType::Utf8].map(|t| function("f", t));
        let of = |retained| Stored::new(vec![Arc::clone(&new)], &[("f", 2)], retained);
        let kept = of(vec![(1, Arc::clone(&old))]);
        assert_eq!((kept.name_of(&old), kept.name_of(&new)), (Some(("f", 1)), Some(("f", 2))));
        assert_eq!(kept.scalar("f", 1), Some(Arc::clone(&old)));
        assert_eq!(kept.scalar("f", 2), Some(Arc::clone(&new)));
        assert_eq!(kept.scalar("g", 1), None);
        assert_eq!(of(Vec::new()).scalar("f", 1), None, "a version that was given up");
    }
}
