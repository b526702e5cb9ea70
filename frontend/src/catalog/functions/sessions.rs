//! The session, the other ones, and the server.

use millrace_common::SqlError;

use super::{Entry, FALSE, NULL, int, text};
use crate::catalog::SystemTables;
use crate::catalog::rows::Cell;
use crate::server::Activity;

/// Those that do something to a session.
pub(super) const ACTING: [&str; 2] = ["pg_cancel_backend", "pg_terminate_backend"];

pub(super) const FUNCTIONS: &[Entry] = &[
    ("pg_is_in_recovery", 'b', FALSE),
    ("pg_is_wal_replay_paused", 'b', FALSE),
    ("pg_jit_available", 'b', FALSE),
    ("pg_blocking_pids", 'a', |t, a| {
        let blocking = |pid: i64| {
            let found = i32::try_from(pid).map(|pid| t.shared.locks.blocking(pid));
            found.unwrap_or_default().iter().map(i32::to_string).collect::<Vec<_>>()
        };
        Ok(int(a, 0)?.map(blocking).into())
    }),
    // Nobody counts scans.
    ("pg_stat_get_numscans", 'i', |_, _| Ok(0i64.into())),
    ("current_schema", 'n', |t, _| Ok(schemas(t, false).into_iter().next().into())),
    ("current_schemas", 'a', |t, a| Ok(schemas(t, a.first() == Some(&Cell::Bool(true))).into())),
    ("current_setting", 't', |t, a| match (text(a, 0), a.get(1)) {
        (None, _) => Ok(Cell::Null),
        (Some(name), missing) => match t.settings.shown(name) {
            Ok(value) => Ok(value.into()),
            Err(_) if missing == Some(&Cell::Bool(true)) => Ok(Cell::Null),
            Err(e) => Err(e),
        },
    }),
    ("version", 't', |t, _| {
        let pg = t.settings.get("server_version").unwrap_or_default();
        Ok(format!(
            "PostgreSQL {pg} (Millrace {}), compiled by rustc, 64-bit",
            env!("CARGO_PKG_VERSION")
        )
        .into())
    }),
    ("pg_backend_pid", 'd', |t, _| Ok(t.pid.into())),
    ("pg_cancel_backend", 'b', |t, a| Ok(int(a, 0)?.map(|pid| t.shared.signal(pid, false)).into())),
    ("pg_terminate_backend", 'b', |t, a| {
        Ok(int(a, 0)?.map(|pid| t.shared.signal(pid, true)).into())
    }),
    ("pg_postmaster_start_time", 'z', |t, _| Ok(t.shared.started.into())),
    ("pg_conf_load_time", 'z', |t, _| Ok(t.shared.started.into())),
    ("pg_notification_queue_usage", 'g', |_, _| Ok(0i64.into())),
    ("pg_current_xact_id", 'i', |t, _| Ok((t.shared.next_number() as i64).into())),
    ("pg_current_xact_id_if_assigned", 'i', NULL),
    ("txid_current", 'i', |t, _| Ok((t.shared.next_number() as i64).into())),
    ("txid_current_if_assigned", 'i', NULL),
    ("pg_my_temp_schema", 'o', |_, _| Ok(0i64.into())),
    ("inet_server_addr", 't', |t, _| Ok(own(t).and_then(|a| host(&a.server_address)).into())),
    ("inet_server_port", 'd', |t, _| Ok(own(t).and_then(|a| port(&a.server_address)).into())),
    ("inet_client_addr", 't', |t, _| Ok(own(t).and_then(|a| host(&a.address)).into())),
    ("inet_client_port", 'd', |t, _| Ok(own(t).and_then(|a| port(&a.address)).into())),
    // It is a statement of its own that waits; here is only its type.
    ("pg_sleep", 't', |_, _| Err(SqlError::unsupported("pg_sleep within a query"))),
    ("set_config", 't', |_, _| {
        Err(SqlError::unsupported("set_config within a query")
            .with_hint("SELECT set_config(name, value, is_local) by itself sets it; so does SET."))
    }),
];

fn schemas(t: &SystemTables, implicit: bool) -> Vec<String> {
    let exists = |s: &&String| t.catalog().schemas.contains(s) || s.as_str() == "pg_catalog";
    let named = t.search_path.iter().filter(exists).cloned();
    let system = implicit && !t.search_path.iter().any(|s| s == "pg_catalog");
    system.then(|| "pg_catalog".to_owned()).into_iter().chain(named).collect()
}

/// This session, as others see it.
fn own(t: &SystemTables) -> Option<Activity> {
    t.shared.activity().into_iter().find(|a| a.pid == t.pid)
}

fn host(address: &str) -> Option<String> {
    let (host, _) = address.rsplit_once(':')?;
    Some(host.trim_matches(['[', ']']).to_owned())
}

fn port(address: &str) -> Option<i64> {
    address.rsplit_once(':')?.1.parse().ok()
}
