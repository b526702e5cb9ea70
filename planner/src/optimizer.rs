//! Which of DataFusion's rules run, and why.
//!
//! Views are maintained from the optimised plan for ever, so a rule is in their list only if its
//! result is right for every content of the inputs, now and later: no statistics, no clock, no
//! limits moved about. Batch runs DataFusion's own list, with the options below, so that both
//! plan subqueries and types in the same way. `NOT IN` stays null-aware: decorrelation marks the join, and no rule
//! after it changes an anti join's kind.

use std::sync::{Arc, OnceLock};

use chrono::{DateTime, Utc};
use datafusion::common::alias::AliasGenerator;
use datafusion::common::tree_node::{Transformed, TransformedResult, TreeNodeRecursion};
use datafusion::config::ConfigOptions;
use datafusion::error::Result as DataFusionResult;
use datafusion::execution::FunctionRegistry;
use datafusion::logical_expr::registry::MemoryFunctionRegistry;
use datafusion::logical_expr::{Distinct, EmptyRelation, Expr, JoinType, LogicalPlan, Union};
use datafusion::optimizer::analyzer::Analyzer;
use datafusion::optimizer::optimizer::{ApplyOrder, Optimizer};
use datafusion::optimizer::{OptimizerConfig, OptimizerContext, OptimizerRule};
use datafusion::scalar::ScalarValue;
use millrace_common::SqlError;
use millrace_functions::error::{external, sql_error_from_datafusion};
use millrace_functions::interrupt;
use millrace_functions::register_all;
use millrace_functions::tree::{Walk, WalkPlan};
use millrace_functions::window_fn::AS_OF_PROCTIME;

use crate::group_keys::GroupKeys;
use list_pairs::ApartLists;

mod list_pairs;
pub(crate) mod lists;
pub mod short;

type Rule = Arc<dyn OptimizerRule + Send + Sync>;

/// The options both batch and views are planned with.
pub fn config_options() -> ConfigOptions {
    let mut o = ConfigOptions::new();
    // Uncorrelated scalar subqueries become joins, which views can maintain.
    o.optimizer.enable_physical_uncorrelated_scalar_subquery = false;
    // ORDER BY in a subquery with LIMIT has meaning; DataFusion's elimination is not needed.
    o.sql_parser.enable_subquery_sort_elimination = false;
    // Strings are Utf8 everywhere; views of bytes would double every kernel.
    o.sql_parser.map_string_types_to_utf8view = false;
    // 0.1 is a numeric, as in PostgreSQL.
    o.sql_parser.parse_float_as_decimal = true;
    // The branches of a union stay apart: their rows come in the order in which they are written.
    o.optimizer.prefer_existing_union = true;
    o
}

/// DataFusion's rules that views use, in DataFusion's order. What is left out:
///
/// - `push_down_limit`: moves LIMIT below joins and unions, where a stream would have to maintain a
///   top-N for every input;
/// - `single_distinct_aggregation_to_group_by`: our aggregates keep distinct values themselves, with
///   less state than two aggregations;
/// - `replace_distinct_aggregate`: the stream planner has operators for DISTINCT and DISTINCT ON (and
///   the rule panics on the latter without a function registry);
/// - `unions_to_filter`: merges branches of one table by `OR`, and loses duplicates' origin for the
///   properties (append-only, keys) that views derive;
/// - `extract_leaf_expressions`, `push_down_leaf_projections`: for nested file columns.
///
/// `propagate_empty_relation` stays: an empty relation in a plan is constant, not a table that
/// happens to be empty.
const VIEW_RULES: [&str; 19] = [
    // `= ANY (SELECT …)` and `<> ALL (…)` into IN and EXISTS, which the next rules know.
    "rewrite_set_comparison",
    // Filters and projections become simpler to evaluate; errors stay where they are.
    "simplify_expressions",
    "eliminate_join",
    // Subqueries into joins: a stream has nothing else.
    "decorrelate_predicate_subquery",
    "scalar_subquery_to_join",
    "decorrelate_lateral_join",
    // `a.x = b.x OR …`: keys for hash joins.
    "extract_equijoin_predicate",
    "eliminate_duplicated_expr",
    "eliminate_filter",
    "eliminate_cross_join",
    "eliminate_limit",
    "propagate_empty_relation",
    "filter_null_join_keys",
    // An outer join whose padded rows a filter drops is an inner join: less state.
    "eliminate_outer_join",
    // State holds only rows that can matter.
    "push_down_filter",
    "eliminate_group_by_constant",
    "common_sub_expression_eliminate",
    // State holds only columns that can matter.
    "optimize_projections",
    // A union of unions is one operator.
    "optimize_unions",
];

fn view_rules() -> Vec<Rule> {
    let all = usable_rules();
    with_own(all.into_iter().filter(|r| VIEW_RULES.contains(&r.name())).collect())
}

/// The optimiser rules of the batch session; its options are [`config_options`].
pub fn batch_rules() -> Vec<Rule> {
    with_own(usable_rules())
}

/// DataFusion's rules, where their results are right.
fn usable_rules() -> Vec<Rule> {
    let usable = |rule: Rule| -> Rule {
        let wrong: fn(&LogicalPlan) -> bool = match rule.name() {
            "push_down_filter" => filters_distinct_on,
            "single_distinct_aggregation_to_group_by" => adds_up_twice,
            "simplify_expressions" => return Arc::new(ApartLists(rule)),
            _ => return rule,
        };
        Arc::new(Except { rule, wrong })
    };
    Optimizer::new().rules.into_iter().map(usable).collect()
}

/// A rule that leaves those nodes alone which it would change to something else.
#[derive(Debug)]
struct Except {
    rule: Rule,
    wrong: fn(&LogicalPlan) -> bool,
}

impl OptimizerRule for Except {
    fn name(&self) -> &str {
        self.rule.name()
    }

    fn apply_order(&self) -> Option<ApplyOrder> {
        self.rule.apply_order()
    }

    fn rewrite(
        &self,
        plan: LogicalPlan,
        config: &dyn OptimizerConfig,
    ) -> DataFusionResult<Transformed<LogicalPlan>> {
        match (self.wrong)(&plan) {
            true => Ok(Transformed::no(plan)),
            false => self.rule.rewrite(plan, config),
        }
    }
}

/// A filter of the rows that DISTINCT ON has chosen. Below it other rows would be chosen.
fn filters_distinct_on(plan: &LogicalPlan) -> bool {
    let LogicalPlan::Filter(filter) = plan else { return false };
    match filter.input.as_ref() {
        LogicalPlan::Distinct(Distinct::On(_)) => true,
        input => filters_distinct_on(input),
    }
}

/// An aggregate of distinct values beside a plain sum. The rule would sum per value first and then those sums: the sum of
/// integers is of another type, the sum of floats would be rounded twice. Of calls with several arguments it takes one.
fn adds_up_twice(plan: &LogicalPlan) -> bool {
    let LogicalPlan::Aggregate(aggregate) = plan else { return false };
    // A column by one of the names that the rule gives.
    let taken = |e: &Expr| match e {
        Expr::Column(c) => c.name.starts_with("alias") || c.name.starts_with("group_alias"),
        _ => false,
    };
    if aggregate.group_expr.iter().any(taken) {
        return true;
    }
    aggregate.aggr_expr.iter().any(|e| match e {
        Expr::AggregateFunction(f) if f.params.distinct => f.params.args.len() != 1,
        Expr::AggregateFunction(f) => !matches!(f.func.name(), "min" | "max"),
        _ => true,
    })
}

/// Rules with [`SettledConditions`] where conditions have become as simple as they get, and [`GroupKeys`] before each that
/// trusts what is known of keys.
fn with_own(mut rules: Vec<Rule>) -> Vec<Rule> {
    let after = rules.iter().position(|r| r.name() == "simplify_expressions");
    rules.insert(after.map_or(0, |at| at + 1), Arc::new(SettledConditions));
    let trusts = |rule: &Rule| {
        matches!(
            rule.name(),
            "replace_distinct_aggregate"
                | "eliminate_join"
                | "eliminate_duplicated_expr"
                | "optimize_projections"
        )
    };
    let own = |rule: Rule| match trusts(&rule) {
        true => vec![Arc::new(GroupKeys) as Rule, rule],
        false => vec![rule],
    };
    rules.into_iter().flat_map(own).collect()
}

/// A join whose condition is never true finds nothing on the side that could add to the other's rows. Left as it is the
/// condition would be pushed down like any other without columns: below an aggregate, which has its row all the same.
#[derive(Debug)]
struct SettledConditions;

impl OptimizerRule for SettledConditions {
    fn name(&self) -> &str {
        "settled_conditions"
    }

    fn apply_order(&self) -> Option<ApplyOrder> {
        Some(ApplyOrder::TopDown)
    }

    fn rewrite(
        &self,
        plan: LogicalPlan,
        _config: &dyn OptimizerConfig,
    ) -> DataFusionResult<Transformed<LogicalPlan>> {
        match plan {
            LogicalPlan::Join(mut join)
                if !join.null_aware && join.filter.as_ref().is_some_and(is_never_true) =>
            {
                use JoinType as J;
                let side = match join.join_type {
                    J::Inner | J::Left | J::LeftSemi | J::LeftAnti | J::LeftMark => &mut join.right,
                    J::Right | J::RightSemi | J::RightAnti | J::RightMark => &mut join.left,
                    // Both sides' rows stay, and nothing is pushed down.
                    J::Full => return Ok(Transformed::no(LogicalPlan::Join(join))),
                };
                let schema = Arc::clone(side.schema());
                let nothing = EmptyRelation { produce_one_row: false, schema };
                *side = Arc::new(LogicalPlan::EmptyRelation(nothing));
                join.filter = None;
                Ok(Transformed::yes(LogicalPlan::Join(join)))
            }
            plan => Ok(Transformed::no(plan)),
        }
    }
}

/// A rule that ends with the statement that is planned: asked at every node, where DataFusion walks the plan, and else before
/// the rule does.
#[derive(Debug)]
struct Interruptible(Rule);

impl OptimizerRule for Interruptible {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn apply_order(&self) -> Option<ApplyOrder> {
        self.0.apply_order()
    }

    fn rewrite(
        &self,
        plan: LogicalPlan,
        config: &dyn OptimizerConfig,
    ) -> DataFusionResult<Transformed<LogicalPlan>> {
        interrupt::check().map_err(external)?;
        match self.0.name() {
            "simplify_expressions" => interrupt::folding(|| self.0.rewrite(plan, config)),
            _ => self.0.rewrite(plan, config),
        }
    }
}

fn is_never_true(condition: &Expr) -> bool {
    match condition {
        Expr::Literal(ScalarValue::Boolean(value), _) => *value != Some(true),
        Expr::Literal(value, _) => value.is_null(),
        _ => false,
    }
}

/// The plan a view's stream plan is made of.
pub fn optimize_for_view(plan: LogicalPlan) -> Result<LogicalPlan, SqlError> {
    let mut rules = view_rules();
    if calls(&plan, AS_OF_PROCTIME)? {
        // Makes semi joins where duplicates do not matter. What is looked up is the right side of an inner or left join.
        rules.retain(|r| r.name() != "eliminate_join");
    }
    if calls(&plan, "now")? {
        // Would compute what two temporal filters have in common, the time, once for every row.
        rules.retain(|r| r.name() != "common_sub_expression_eliminate");
    }
    optimize(plan, rules, config_options())
}

/// Whether a plan calls a function.
fn calls(plan: &LogicalPlan, function: &str) -> Result<bool, SqlError> {
    let mut found = false;
    let searched = plan.walk_with_subqueries(|node| {
        node.apply_expressions(|e| {
            e.walk(|e| {
                found |= matches!(e, Expr::ScalarFunction(f) if f.func.name() == function);
                Ok(TreeNodeRecursion::Continue)
            })
        })?;
        Ok(if found { TreeNodeRecursion::Stop } else { TreeNodeRecursion::Continue })
    });
    searched.map(|_| found).map_err(sql_error_from_datafusion)
}

/// The options of a batch session: [`config_options`], and uncorrelated scalar subqueries are computed
/// by themselves, so that more than one row of them is an error.
pub fn batch_options() -> ConfigOptions {
    let mut o = config_options();
    o.optimizer.enable_physical_uncorrelated_scalar_subquery = true;
    o
}

/// The plan a batch query runs as.
pub fn optimize_for_batch(plan: LogicalPlan) -> Result<LogicalPlan, SqlError> {
    optimize(plan, batch_rules(), batch_options())
}

/// A view's plan in a form that runs in batch: the expressions stay where the view computes them.
pub fn optimize_like_view(plan: LogicalPlan) -> Result<LogicalPlan, SqlError> {
    let plan = optimize(plan, view_rules(), config_options())?;
    let distinct = |r: &Rule| r.name() == "replace_distinct_aggregate";
    let rules = batch_rules().into_iter().filter(distinct).collect();
    crate::operands::project(optimize(plan, rules, config_options())?)
}

fn optimize(
    plan: LogicalPlan,
    rules: Vec<Rule>,
    options: ConfigOptions,
) -> Result<LogicalPlan, SqlError> {
    let chooses = rules.iter().any(|r| r.name() == "replace_distinct_aggregate")
        && has_distinct_on(&plan).map_err(sql_error_from_datafusion)?;
    let optimizer = Optimizer::with_rules(interruptible(rules));
    let plan = run_rules(plan, &optimizer, &Arc::new(options))?;
    match chooses {
        true => {
            let plan = plan.rewrite_up_with_subqueries(with_new_types).data();
            plan.map_err(sql_error_from_datafusion)
        }
        false => Ok(plan),
    }
}

fn interruptible(rules: impl IntoIterator<Item = Rule>) -> Vec<Rule> {
    rules.into_iter().map(|rule| Arc::new(Interruptible(rule)) as Rule).collect()
}

/// A plan as the analyser and these rules leave it, whose lists are computed for each row.
fn run_rules(
    plan: LogicalPlan,
    optimizer: &Optimizer,
    options: &Arc<ConfigOptions>,
) -> Result<LogicalPlan, SqlError> {
    interrupt::check()?;
    let run = || {
        let plan = Analyzer::new().execute_and_check(plan, options, |_, _| {})?;
        interrupt::check().map_err(external)?;
        // Without a start time `now()` is not folded to a constant.
        let config = Context(
            OptimizerContext::new_with_config_options(Arc::clone(options))
                .without_query_execution_start_time(),
        );
        optimizer.optimize(plan, &config, |_, _| {})
    };
    lists::computed_for_each_row(run().map_err(sql_error_from_datafusion)?)
}

/// What DISTINCT ON chooses may be NULL for DataFusion once it is an aggregate, which nodes above do not know.
fn with_new_types(node: LogicalPlan) -> DataFusionResult<Transformed<LogicalPlan>> {
    let node = match node {
        LogicalPlan::Union(u) => LogicalPlan::Union(Union::try_new_with_loose_types(u.inputs)?),
        node => node.recompute_schema()?,
    };
    Ok(Transformed::yes(node))
}

fn has_distinct_on(plan: &LogicalPlan) -> DataFusionResult<bool> {
    let mut found = false;
    plan.walk_with_subqueries(|node| {
        found |= matches!(node, LogicalPlan::Distinct(Distinct::On(_)));
        Ok(if found { TreeNodeRecursion::Stop } else { TreeNodeRecursion::Continue })
    })?;
    Ok(found)
}

/// DataFusion's context with our functions: its rule for DISTINCT ON looks one up, and panics where
/// there is no registry.
struct Context(OptimizerContext);

impl OptimizerConfig for Context {
    fn query_execution_start_time(&self) -> Option<DateTime<Utc>> {
        self.0.query_execution_start_time()
    }

    fn alias_generator(&self) -> &Arc<AliasGenerator> {
        self.0.alias_generator()
    }

    fn options(&self) -> Arc<ConfigOptions> {
        self.0.options()
    }

    fn function_registry(&self) -> Option<&dyn FunctionRegistry> {
        static REGISTRY: OnceLock<Option<MemoryFunctionRegistry>> = OnceLock::new();
        let registry = REGISTRY.get_or_init(|| {
            let mut registry = MemoryFunctionRegistry::new();
            register_all(&mut registry).ok().map(|()| registry)
        });
        registry.as_ref().map(|r| r as &dyn FunctionRegistry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A renamed rule must not vanish from the list unnoticed.
    #[test]
    fn every_listed_rule_exists() {
        let known: Vec<String> =
            Optimizer::new().rules.iter().map(|r| r.name().to_owned()).collect();
        for rule in VIEW_RULES {
            assert!(known.iter().any(|k| k == rule), "{rule} is not one of {known:?}");
        }
    }
}
