//! Versions of functions: stored job graphs name a function by its name and version.
//!
//! A view keeps the results that it was created with. So a function whose result changes for any
//! arguments, by our doing or by an upgrade of DataFusion, gets a new version in [`CHANGED`], and the
//! function that it was stays in [`RETAINED`] for the views that name it. What is not declared here is
//! at version 1. Queries and new views always get the newest version.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use datafusion::logical_expr::ScalarUDF;

/// The version of a function that is not declared otherwise.
const FIRST: u32 = 1;

/// Scalar, aggregate and window functions that are at a later version than the first.
const CHANGED: &[(&str, u32)] = &[];

/// Scalar functions as they were at an earlier version.
const RETAINED: &[(u32, fn() -> Arc<ScalarUDF>)] = &[];

/// The version of the function that [`crate::functions`] has under a name.
pub fn newest(name: &str) -> u32 {
    newest_of(CHANGED, name)
}

fn newest_of(changed: &[(&str, u32)], name: &str) -> u32 {
    changed.iter().find(|(n, _)| *n == name).map_or(FIRST, |(_, version)| *version)
}

/// The version of a scalar function; `None`: it is not one of the registry, so a stored expression
/// cannot name it.
pub fn version_of(function: &ScalarUDF) -> Option<u32> {
    stored().version_of(function)
}

/// A scalar function by what a stored expression names it; `None`: this release does not have it.
pub fn scalar(name: &str, version: u32) -> Option<Arc<ScalarUDF>> {
    stored().scalar(name, version)
}

/// Scalar functions by their own names (never by an alias) and versions.
struct Stored {
    newest: HashMap<String, (u32, Arc<ScalarUDF>)>,
    retained: Vec<(u32, Arc<ScalarUDF>)>,
}

fn stored() -> &'static Stored {
    static STORED: OnceLock<Stored> = OnceLock::new();
    STORED.get_or_init(|| {
        let all = crate::datafusion_scalars().chain(crate::own_scalars());
        let retained = RETAINED.iter().map(|(version, function)| (*version, function()));
        Stored::new(all, CHANGED, retained.collect())
    })
}

impl Stored {
    /// Of functions with the same name the last one counts.
    fn new(
        all: impl Iterator<Item = Arc<ScalarUDF>>,
        changed: &[(&str, u32)],
        retained: Vec<(u32, Arc<ScalarUDF>)>,
    ) -> Stored {
        let newest = all.map(|f| (f.name().to_owned(), (newest_of(changed, f.name()), f)));
        Stored { newest: newest.collect(), retained }
    }

    fn version_of(&self, function: &ScalarUDF) -> Option<u32> {
        let retained = self.retained.iter().find(|(_, f)| **f == *function);
        let newest = || self.newest.get(function.name()).map(|(version, _)| *version);
        retained.map(|(version, _)| *version).or_else(newest)
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
    fn functions_are_at_version_1_and_at_no_other() {
        assert_eq!(version_of(&crate::functions().scalar("upper").unwrap()), Some(1));
        assert!(scalar("upper", 1).is_some());
        assert!(scalar("upper", 2).is_none());
        assert!(scalar("upper", 0).is_none());
        assert!(scalar("no_such_function", 1).is_none());
        assert_eq!(version_of(&function("no_such_function", DataType::Int64)), None);
    }

    #[test]
    fn a_changed_function_is_found_by_each_of_its_versions() {
        let [old, new] = [DataType::Int64, DataType::Utf8].map(|t| function("f", t));
        let of = |retained| Stored::new([Arc::clone(&new)].into_iter(), &[("f", 2)], retained);
        let kept = of(vec![(1, Arc::clone(&old))]);
        assert_eq!((kept.version_of(&old), kept.version_of(&new)), (Some(1), Some(2)));
        assert_eq!(kept.scalar("f", 1), Some(Arc::clone(&old)));
        assert_eq!(kept.scalar("f", 2), Some(Arc::clone(&new)));
        assert_eq!(kept.scalar("g", 1), None);
        assert_eq!(of(Vec::new()).scalar("f", 1), None, "a version that was given up");
    }
}
