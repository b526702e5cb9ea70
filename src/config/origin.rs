//! Where the settings come from that an error is about.

use std::path::PathBuf;

use clap::ArgMatches;
use clap::parser::ValueSource;

use super::ConfigError;

impl ConfigError {
    /// The error, and where the settings come from that it is about. `given`: the command line and the environment, as
    /// they were read.
    pub fn told(&self, given: &ArgMatches) -> String {
        // Those of the subcommand, where there is one.
        let given = given.subcommand().map_or(given, |(_, given)| given);
        let mut told = self.to_string();
        for name in self.settings() {
            if let Some(origin) = origin(name, given) {
                told.push_str(&format!("; {name} comes from {origin}"));
            }
        }
        told
    }

    /// The settings that were given and that it is about.
    fn settings(&self) -> Vec<&'static str> {
        match self {
            ConfigError::Invalid { name, .. } => vec![*name],
            ConfigError::Half { given, .. } => vec![*given],
            ConfigError::Contradiction { one, other, .. } => vec![*one, *other],
            ConfigError::Read { .. }
            | ConfigError::Parse { .. }
            | ConfigError::Missing { .. }
            | ConfigError::Foreign { .. } => Vec::new(),
        }
    }
}

/// What has given a flag its value. `None`: nothing that is known here.
fn origin(name: &str, given: &ArgMatches) -> Option<String> {
    let id = name.trim_start_matches("--").replace('-', "_");
    let is_read = given.ids().any(|known| known.as_str() == id);
    match is_read.then(|| given.value_source(&id)).flatten() {
        Some(ValueSource::CommandLine) => Some("the command line".to_owned()),
        Some(ValueSource::EnvVariable) => {
            Some(format!("the environment, MILLRACE_{}", id.to_uppercase()))
        }
        // Neither has it, and an error is never about a default.
        _ => {
            let file = given.try_get_one::<PathBuf>("config").ok().flatten()?;
            Some(format!("the config file {}", file.display()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Options;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    /// What is said of a command line that is wrong, or wrong together with its config file.
    fn said(line: &[&str]) -> String {
        let line = [&"millrace"].into_iter().chain(line);
        let given = <Line as clap::CommandFactory>::command().get_matches_from(line);
        let line = <Line as clap::FromArgMatches>::from_arg_matches(&given).unwrap();
        line.options.resolve().unwrap_err().told(&given)
    }

    #[test]
    fn an_error_says_where_the_setting_comes_from() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("millrace.toml");
        let path = file.display().to_string();
        let with = |text: &str, line: &[&str]| {
            std::fs::write(&file, text).unwrap();
            said(&[line, &["--config", &path]].concat())
        };
        let expected = "invalid value for --gc-interval: \"0\" (expected 10ms to 5d)";
        let of_line = format!("{expected}; --gc-interval comes from the command line");
        let of_file = format!("{expected}; --gc-interval comes from the config file {path}");
        assert_eq!(said(&["--gc-interval", "0"]), of_line);
        assert_eq!(with("gc-interval = \"1s\"\n", &["--gc-interval=0"]), of_line);
        assert_eq!(with("gc-interval = \"0\"\n", &[]), of_file);
        let both = with("max-reads = 8\n", &["--min-reads=9"]);
        let origins = format!(
            "; --min-reads comes from the command line; --max-reads comes from the config file {path}"
        );
        assert!(both.ends_with(&origins), "{both}");
        // A file that has nothing to do with it.
        let missing = with("listen = \"127.0.0.1:1\"\n", &["--tls-key=k"]);
        assert!(missing.ends_with("; --tls-key comes from the command line"), "{missing}");
    }
}
