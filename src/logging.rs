//! The log that the process writes to standard error.

use std::ffi::OsStr;

use tracing_subscriber::EnvFilter;

use crate::config::LogFormat;

/// From here on the process has a log of what MILLRACE_LOG says, else of `level`.
pub fn begin(level: &str, format: LogFormat) {
    let given = std::env::var_os("MILLRACE_LOG");
    let (filter, unusable) = filter(given.as_deref(), level);
    let builder = tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(
            format == LogFormat::Text && std::io::IsTerminal::is_terminal(&std::io::stderr()),
        )
        // A log that cannot be written (a full disk, a closed pipe) is no reason to end.
        .log_internal_errors(false)
        .with_env_filter(filter);
    match format {
        LogFormat::Text => builder.init(),
        LogFormat::Json => {
            builder.json().flatten_event(true).with_current_span(false).init();
            // What would be written beside the log is an entry of it.
            std::panic::set_hook(Box::new(|panic| tracing::error!("{panic}")));
        }
    }
    if let Some(reason) = unusable {
        tracing::warn!(?given, reason, "MILLRACE_LOG cannot be understood: the level is {level}");
    }
}

/// What is logged: what MILLRACE_LOG says, or `level`. Where the former cannot be understood, why not.
fn filter(given: Option<&OsStr>, level: &str) -> (EnvFilter, Option<String>) {
    let Some(given) = given else { return (EnvFilter::new(level), None) };
    let read = match given.to_str() {
        Some(text) => EnvFilter::try_new(text).map_err(|e| e.to_string()),
        None => Err("it is not UTF-8".to_owned()),
    };
    match read {
        Ok(filter) => (filter, None),
        Err(reason) => (EnvFilter::new(level), Some(reason)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_level_of_the_log_that_cannot_be_understood_is_told_of() {
        let filtered = |given: Option<&str>| {
            let (filter, unusable) = filter(given.map(OsStr::new), "warn");
            (filter.to_string(), unusable.is_some())
        };
        assert_eq!(filtered(None), ("warn".to_owned(), false));
        assert_eq!(filtered(Some("millrace_meta=loud")), ("warn".to_owned(), true));
        let meta = "millrace_meta=debug";
        assert_eq!(filtered(Some(meta)), (meta.to_owned(), false));
    }
}
