//! PostgreSQL's functions and operators where DataFusion's differ.
//!
//! One set for batch and views: the binder resolves names in [`functions`], a session registers them
//! with [`register_all`], and a stored job graph finds them again by name.

pub mod aggregate_kind;
pub mod aggregates;
pub mod arith;
pub mod arrays;
pub mod asof;
pub mod byte_order;
pub mod bytea;
pub mod call;
pub mod canonical;
mod canonical_nan;
pub mod cast;
mod constant_list;
pub mod datetime;
pub mod distinct_list;
pub mod each_row;
pub mod error;
pub mod exact_aggregates;
pub mod expr;
pub mod extract;
pub mod frame;
pub mod framed;
pub mod greatest_least;
pub mod interrupt;
mod interruptible_aggregates;
pub mod jsonb;
pub mod jsonb_agg;
pub mod kernels;
pub mod math;
pub mod min_max;
pub mod ntile;
pub mod number_format;
pub mod numeric;
pub mod ordered;
pub mod ordered_entries;
pub mod parse;
pub mod patterns;
mod plain;
pub mod quantified;
pub mod round;
pub mod row_counts;
pub mod scalar_subquery_check;
pub mod session;
pub mod sign;
pub mod size_limits;
pub mod sliding_aggregates;
pub mod sorted_array;
pub mod statistics;
pub mod string_agg;
pub mod strings;
#[cfg(test)]
mod testing;
pub mod text;
pub mod text_only;
pub mod time_format;
pub mod times;
pub mod tree;
pub mod types;
pub mod undefined_function;
pub mod variance_sums;
pub mod versions;
pub mod width_bucket;
pub mod window_call;
pub mod window_fn;
mod wrapped;
pub mod zones;

pub use millrace_common::encoding::interval_text;

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use datafusion::common::Result;
use datafusion::execution::FunctionRegistry;
use datafusion::logical_expr::{AggregateUDF, ScalarUDF, WindowUDF};

/// Functions of DataFusion that PostgreSQL does not have and whose name would hide a mistake.
const HIDDEN: [&str; 3] = ["union_extract", "union_tag", "arrow_cast"];

/// Aggregates of DataFusion under names that PostgreSQL does not have, of functions that ours replace.
const HIDDEN_AGGREGATES: [&str; 6] =
    ["var", "var_sample", "var_population", "covar", "quantile_cont", "approx_distinct"];

/// Every function by name and alias.
pub struct Functions {
    scalars: HashMap<String, Arc<ScalarUDF>>,
    aggregates: HashMap<String, Arc<AggregateUDF>>,
    windows: HashMap<String, Arc<WindowUDF>>,
}

impl Functions {
    pub fn scalar(&self, name: &str) -> Option<Arc<ScalarUDF>> {
        self.scalars.get(name).cloned()
    }

    pub fn aggregate(&self, name: &str) -> Option<Arc<AggregateUDF>> {
        self.aggregates.get(name).cloned()
    }

    pub fn window(&self, name: &str) -> Option<Arc<WindowUDF>> {
        self.windows.get(name).cloned()
    }

    pub fn scalar_names(&self) -> Vec<String> {
        self.scalars.keys().cloned().collect()
    }

    pub fn aggregate_names(&self) -> Vec<String> {
        self.aggregates.keys().cloned().collect()
    }

    pub fn window_names(&self) -> Vec<String> {
        self.windows.keys().cloned().collect()
    }
}

/// Our own scalar functions.
fn own_scalars() -> Vec<Arc<ScalarUDF>> {
    use arith::ArithOp as A;
    let mut all: Vec<Arc<ScalarUDF>> =
        [A::Add, A::Sub, A::Mul, A::Div, A::Mod].iter().map(|op| op.function()).collect();
    all.extend([arith::negate_function(), arith::abs_function()]);
    all.extend(cast::cast_functions().iter().cloned());
    all.extend(window_fn::functions());
    all.push(size_limits::text_concat());
    all.extend(extract::functions());
    all.extend(round::functions());
    all.extend(arrays::functions());
    all.extend(greatest_least::functions());
    all.extend(sorted_array::functions());
    all.extend(width_bucket::functions());
    all.extend([
        sign::sign_function(),
        ordered_entries::collect_entry(),
        exact_aggregates::pair_entry(),
        quantified::compare_any(),
        scalar_subquery_check::scalar_subquery_check(),
        row_counts::limit(),
        row_counts::offset(),
        canonical::canonical(),
        byte_order::order_key(),
        each_row::each_row(),
    ]);
    all.extend(call::defs().values().cloned());
    all
}

/// DataFusion's scalar functions, as PostgreSQL has them.
fn datafusion_scalars() -> impl Iterator<Item = Arc<ScalarUDF>> {
    let theirs = datafusion::functions::all_default_functions();
    let nested = datafusion::functions_nested::all_default_nested_functions();
    let theirs = theirs.into_iter().chain(nested).map(size_limits::with_size_limits);
    theirs.map(canonical_nan::with_canonical_nan).map(text_only::text_only)
}

/// All functions; ours replace DataFusion's of the same name.
pub fn functions() -> &'static Functions {
    static ALL: OnceLock<Functions> = OnceLock::new();
    ALL.get_or_init(|| {
        let mut f = Functions {
            scalars: HashMap::new(),
            aggregates: HashMap::new(),
            windows: HashMap::new(),
        };
        for udf in datafusion_scalars().chain(own_scalars()) {
            for alias in udf.aliases() {
                f.scalars.insert(alias.clone(), Arc::clone(&udf));
            }
            f.scalars.insert(udf.name().to_owned(), udf);
        }
        // Functions of arrays that ours replace are not called by DataFusion's other names of them either.
        let replaced = f.scalars.iter().filter_map(|(name, udf)| {
            let own = f.scalars.get(udf.name()).filter(|_| udf.name().starts_with("array_"))?;
            (!Arc::ptr_eq(own, udf)).then(|| (name.clone(), Arc::clone(own)))
        });
        let replaced: Vec<(String, Arc<ScalarUDF>)> = replaced.collect();
        f.scalars.extend(replaced);
        HIDDEN.iter().for_each(|name| drop(f.scalars.remove(*name)));
        let theirs = datafusion::functions_aggregate::all_default_aggregate_functions();
        let theirs = theirs.into_iter().map(min_max::exact_extreme);
        for udf in
            theirs.chain(aggregates::functions()).map(sliding_aggregates::with_sliding_frames)
        {
            for alias in udf.aliases() {
                f.aggregates.insert(alias.clone(), Arc::clone(&udf));
            }
            f.aggregates.insert(udf.name().to_owned(), udf);
        }
        HIDDEN_AGGREGATES.iter().for_each(|name| drop(f.aggregates.remove(*name)));
        let theirs = datafusion::functions_window::all_default_window_functions();
        let sessions = [session::session_start(), session::session_end()];
        let own = sessions.into_iter().chain([asof::latest(), ntile::ntile(), framed::framed()]);
        for udf in theirs.into_iter().chain(own) {
            for alias in udf.aliases() {
                f.windows.insert(alias.clone(), Arc::clone(&udf));
            }
            f.windows.insert(udf.name().to_owned(), udf);
        }
        f
    })
}

/// Registers every function that a plan of ours may hold.
pub fn register_all(registry: &mut dyn FunctionRegistry) -> Result<()> {
    let all = functions();
    for udf in all.scalars.values() {
        registry.register_udf(Arc::clone(udf))?;
    }
    for udf in own_scalars() {
        registry.register_udf(udf)?;
    }
    for udf in all.aggregates.values() {
        registry.register_udaf(Arc::clone(udf))?;
    }
    for udf in aggregates::functions().into_iter().map(sliding_aggregates::with_sliding_frames) {
        registry.register_udaf(udf)?;
    }
    for udf in all.windows.values() {
        registry.register_udwf(Arc::clone(udf))?;
    }
    Ok(())
}
