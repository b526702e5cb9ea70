//! The settings of a session: those that mean something here, and those that other systems or programs brought along.
//!
//! A name with a dot belongs to the program that sets it, as in PostgreSQL: it is kept and given back. So is what
//! PostgreSQL takes and Millrace has no use for. Of settings of other streaming databases the client is told why they do
//! nothing; then a script written for one of them runs. Any other name is PostgreSQL's error.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};

use millrace_common::SqlError;
use millrace_common::settings::{SessionSettings, Setting, find};

/// All settings of a session. What is not overridden here is [`SessionSettings`]'s.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    known: SessionSettings,
    /// By name in lower case.
    custom: BTreeMap<String, String>,
}

impl Deref for Settings {
    type Target = SessionSettings;

    fn deref(&self) -> &SessionSettings {
        &self.known
    }
}

impl DerefMut for Settings {
    fn deref_mut(&mut self) -> &mut SessionSettings {
        &mut self.known
    }
}

impl Settings {
    /// The value of a setting of either kind.
    pub fn get(&self, name: &str) -> Result<&str, SqlError> {
        // Statements ask all the time, and hardly any session has others.
        if self.custom.is_empty() {
            return self.known.get(name);
        }
        match self.custom.get(&name.to_lowercase()) {
            Some(value) => Ok(value),
            None => self.known.get(name),
        }
    }

    /// A value as SHOW prints it.
    pub fn shown(&self, name: &str) -> Result<String, SqlError> {
        match self.custom.get(&name.to_lowercase()) {
            Some(value) => Ok(value.clone()),
            None => find(name).map(|s| s.show(self.known.value(s))),
        }
    }

    /// Sets a value; the setting, if it is one of ours.
    pub fn set(&mut self, name: &str, value: &str) -> Result<Option<&'static Setting>, SqlError> {
        if is_custom(name) {
            self.custom.insert(name.to_lowercase(), value.to_owned());
            return Ok(None);
        }
        self.known.set(name, value).map(Some)
    }

    pub fn reset(&mut self, name: &str) -> Result<Option<&'static Setting>, SqlError> {
        if is_custom(name) {
            self.custom.remove(&name.to_lowercase());
            return Ok(None);
        }
        self.known.reset(name).map(Some)
    }

    pub fn reset_all(&mut self) {
        self.known.reset_all();
        self.custom.clear();
    }
}

/// Whether a setting is kept for the client and has no meaning here.
pub fn is_custom(name: &str) -> bool {
    find(name).is_err() && (is_dotted(name) || no_effect(name).is_some() || of_postgres(name))
}

/// `class.name`: identifiers, of which there are at least two.
fn is_dotted(name: &str) -> bool {
    let first = |c: char| c.is_ascii_alphabetic() || c == '_';
    let rest = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '$');
    name.contains('.')
        && name.split('.').all(|part| part.starts_with(first) && part.chars().all(rest))
}

const FRESH: &str =
    "Reads see everything that was acknowledged before them; there is nothing to wait for.";
const TASKS: &str = "How many tasks a job has is the server's choice.";
const RUNS: &str = "There is one way to run a query.";
const PLANS: &str = "How a query is planned is the server's choice.";
const RATES: &str = "Sources have an option of their own: ALTER SOURCE … SET (rate_limit = …). Everything else goes as fast as it can.";
const PLACE: &str = "The server is one database, and all of its processors are used by everyone.";
const FLINK: &str = "State has no time to live unless a view says WITH (ttl = …); everything else is the server's choice.";

/// Settings of other streaming databases, and why they do nothing. A name that ends in `*` is all that begin with it.
const NO_EFFECT: &[(&str, &str)] = &[
    ("rw_implicit_flush", FRESH),
    ("implicit_flush", FRESH),
    ("visibility_mode", FRESH),
    ("query_epoch", FRESH),
    ("real_time_recency*", FRESH),
    ("streaming_parallelism*", TASKS),
    ("batch_parallelism", TASKS),
    ("max_parallelism", TASKS),
    ("query_mode", RUNS),
    ("batch_enable_*", RUNS),
    ("rw_batch_enable_*", RUNS),
    ("sink_decouple", "A slow sink never holds up anything else."),
    ("synchronous_ddl", "CREATE waits unless background_ddl is on."),
    ("create_compaction_group_for_mv", PLANS),
    ("enable_join_ordering", PLANS),
    ("enable_share_plan", PLANS),
    ("enable_two_phase_agg", PLANS),
    ("force_two_phase_agg", PLANS),
    ("rw_force_two_phase_agg", PLANS),
    ("enable_index_selection", PLANS),
    ("rw_enable_*", PLANS),
    ("streaming_*", PLANS),
    ("rw_streaming_*", PLANS),
    ("backfill_rate_limit", RATES),
    ("source_rate_limit", RATES),
    ("sink_rate_limit", RATES),
    ("dml_rate_limit", RATES),
    ("bypass_cluster_limits", PLACE),
    ("cluster", PLACE),
    ("cluster_replica", PLACE),
    ("database", PLACE),
    ("emit_*_notice", "There are no such notices."),
    ("auto_route_*", PLACE),
    ("max_query_result_size", "Rows are sent as they come; a result may be of any size."),
    ("statement_logging_sample_rate", "Statements are not logged."),
    ("welcome_message", "There is none."),
    ("table.*", FLINK),
    ("execution.*", FLINK),
    ("sql-client.*", FLINK),
    ("pipeline.*", FLINK),
    ("parallelism.default", FLINK),
    ("state.*", FLINK),
    ("restart-strategy*", FLINK),
    ("taskmanager.*", FLINK),
    ("jobmanager.*", FLINK),
];

/// Why a setting that another streaming database has does nothing here.
pub fn no_effect(name: &str) -> Option<&'static str> {
    let name = name.to_lowercase();
    let meant = |pattern: &str| match pattern.split_once('*') {
        Some((begin, end)) => name.starts_with(begin) && name.ends_with(end),
        None => name == pattern,
    };
    find(&name).err()?;
    NO_EFFECT.iter().find(|(pattern, _)| meant(pattern)).map(|(_, why)| *why)
}

/// What PostgreSQL takes, and what changes neither results nor how they are shown.
const OF_POSTGRES: &str = "\
    commit_delay commit_siblings compute_query_id cpu_index_tuple_cost cpu_operator_cost \
    cpu_tuple_cost deadlock_timeout debug_pretty_print debug_print_parse debug_print_rewritten \
    default_statistics_target default_toast_compression effective_io_concurrency \
    enable_async_append enable_gathermerge enable_incremental_sort enable_memoize \
    enable_parallel_append enable_parallel_hash enable_partition_pruning \
    enable_partitionwise_aggregate enable_partitionwise_join enable_tidscan escape_string_warning \
    force_parallel_mode from_collapse_limit geqo_effort geqo_generations geqo_pool_size geqo_seed \
    geqo_selection_bias geqo_threshold gin_fuzzy_search_limit gin_pending_list_limit \
    hash_mem_multiplier jit_above_cost jit_expressions jit_inline_above_cost \
    jit_optimize_above_cost jit_tuple_deforming join_collapse_limit log_duration \
    log_error_verbosity log_executor_stats log_lock_waits log_min_duration_sample \
    log_min_duration_statement log_min_error_statement log_parameter_max_length \
    log_parameter_max_length_on_error log_parser_stats log_planner_stats log_statement_sample_rate \
    log_statement_stats log_temp_files log_transaction_sample_rate logical_decoding_work_mem \
    maintenance_io_concurrency max_parallel_maintenance_workers max_parallel_workers \
    max_stack_depth min_parallel_index_scan_size min_parallel_table_scan_size \
    parallel_leader_participation parallel_setup_cost parallel_tuple_cost \
    recursive_worktable_factor stats_fetch_consistency synchronize_seqscans tcp_keepalives_count \
    tcp_keepalives_interval tcp_user_timeout temp_buffers temp_file_limit temp_tablespaces \
    track_activities track_counts track_functions track_io_timing track_wal_io_timing \
    update_process_title vacuum_cost_delay vacuum_cost_limit vacuum_freeze_min_age \
    vacuum_freeze_table_age wal_compression wal_skip_threshold";

fn of_postgres(name: &str) -> bool {
    OF_POSTGRES.split_whitespace().any(|known| known.eq_ignore_ascii_case(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_others_are_kept() {
        let mut s = Settings::default();
        assert!(s.get("app.user").is_err());
        s.set("App.User", "7").unwrap();
        assert_eq!(s.get("app.user").unwrap(), "7");
        s.reset("app.user").unwrap();
        assert!(s.get("app.user").is_err());
        s.set("geqo_threshold", "3").unwrap();
        s.set("statement_timeout", "2s").unwrap();
        assert_eq!(s.millis("statement_timeout"), Some(2000));
        s.reset_all();
        assert!(s.get("geqo_threshold").is_err());
        for name in ["nonsense", "a.", ".a", "a.1", "a b.c", "statement_timeout"] {
            assert!(!is_custom(name), "{name}");
        }
        assert_eq!(s.set("nonsense", "1").unwrap_err().state.0, "42704");
    }

    #[test]
    fn other_databases_settings_say_why_they_do_nothing() {
        assert_eq!(no_effect("RW_IMPLICIT_FLUSH"), Some(FRESH));
        assert_eq!(no_effect("streaming_parallelism_for_table"), Some(TASKS));
        assert_eq!(no_effect("emit_timestamp_notice"), Some("There are no such notices."));
        assert_eq!(no_effect("execution.runtime-mode"), Some(FLINK));
        assert_eq!(no_effect("search_path"), None);
        assert_eq!(no_effect("background_ddl"), None);
    }
}
