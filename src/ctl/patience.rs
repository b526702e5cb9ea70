//! How long a command of `millrace ctl` may take, and what an operator is told when it has taken longer: what was waited
//! for, what becomes of it, and what to do.

use std::time::Duration;

use super::asking::Failure;
use super::backup::BackupCommand;
use super::{CtlCommand, LeaderCommand};
use crate::config::duration;
use crate::standalone::described;

/// Without --timeout. What the leader is asked for takes seconds, also a backup; a restore takes what its size takes.
const LIMIT: Duration = Duration::from_secs(60);

/// As --timeout gives it. A number alone, which elsewhere is one of milliseconds, is refused: nobody means so few.
pub(super) fn limit(text: &str) -> Result<Duration, String> {
    match duration("--timeout", text).map_err(|e| e.to_string())? {
        limit if !limit.is_zero() && text.trim().parse::<f64>().is_ok() => {
            Err(format!("{text} has no unit: 30s and 10min have one"))
        }
        limit => Ok(limit),
    }
}

/// `None`: as long as it takes.
pub(super) fn of(command: &CtlCommand, given: Option<Duration>) -> Option<Duration> {
    let default = match command {
        CtlCommand::Leader(_) => LIMIT,
        CtlCommand::Restore(_) => Duration::ZERO,
    };
    Some(given.unwrap_or(default)).filter(|limit| !limit.is_zero())
}

/// What the work comes to, or an error when it takes longer than the limit.
pub(super) async fn within<T>(
    limit: Option<Duration>,
    work: impl Future<Output = Result<T, String>>,
    late: impl FnOnce(Duration) -> String,
) -> Result<T, String> {
    let Some(limit) = limit else { return work.await };
    tokio::time::timeout(limit, work).await.unwrap_or_else(|_| Err(late(limit)))
}

/// What is told of a command that has taken too long; `asked`: whether the leader had been found.
pub(super) fn late(command: &CtlCommand, limit: Duration, asked: bool) -> String {
    let (what, then) = match command {
        CtlCommand::Restore(_) => (
            "the backup is not copied as a whole".to_owned(),
            "Run the command again with a longer --timeout: it goes on with what is there."
                .to_owned(),
        ),
        CtlCommand::Leader(_) if !asked => (
            "no meta process has been found that leads".to_owned(),
            "Nothing has been asked for: run the command again.".to_owned(),
        ),
        CtlCommand::Leader(command) => outcome(command),
    };
    format!("{what}, after {} ms (--timeout). {then}", limit.as_millis())
}

/// What is told of a change that the leader has refused, or of which nobody who leads has told the outcome.
pub(super) fn failed(command: &LeaderCommand, failure: Failure) -> String {
    match failure {
        Failure::Refused(error) => described(&error.into()),
        Failure::Unknown(error) => {
            let (what, then) = outcome(command);
            format!("{what}: {error}. {then}")
        }
    }
}

/// What the leader has not answered, and what may become of it.
fn outcome(command: &LeaderCommand) -> (String, String) {
    let look = |with: &str| {
        format!(
            "It may be done all the same, or be under way: look with `millrace ctl {with}`, and run the command again \
             if it is not."
        )
    };
    match command {
        LeaderCommand::Move { job, undo: true, .. } => (
            format!("the leader has not answered that {job} is placed by its load again"),
            look("placement"),
        ),
        LeaderCommand::Move { job, worker, .. } => {
            let worker = worker.as_deref().unwrap_or_default();
            let what = format!("the leader has not answered that {job} is moved to {worker}");
            (what, look("placement"))
        }
        LeaderCommand::Drain { worker, undo } => {
            let what = if *undo { "takes jobs again" } else { "is drained" };
            (format!("the leader has not answered that {worker} {what}"), look("workers"))
        }
        LeaderCommand::Backup(BackupCommand::Create { .. }) => {
            ("the leader has not answered that the backup is made".to_owned(), look("backup list"))
        }
        LeaderCommand::Backup(BackupCommand::Release { name }) => {
            (format!("the leader has not answered that {name} is released"), look("backup list"))
        }
        LeaderCommand::Collection { run: true } => (
            "the leader has not ended a round of garbage collection".to_owned(),
            "The round goes on there: `millrace ctl collection` shows what is left.".to_owned(),
        ),
        LeaderCommand::Store
        | LeaderCommand::Workers
        | LeaderCommand::Jobs
        | LeaderCommand::Placement
        | LeaderCommand::Versions
        | LeaderCommand::Collection { run: false }
        | LeaderCommand::Backup(BackupCommand::List) => (
            "the leader has not answered".to_owned(),
            "Nothing has been changed: run the command again.".to_owned(),
        ),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use millrace_rpc::call_error::CallError;

    use super::*;
    use crate::ctl::CtlOptions;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        options: CtlOptions,
    }

    fn options(arguments: &[&str]) -> CtlOptions {
        let arguments = std::iter::once("millrace").chain(arguments.iter().copied());
        Cli::try_parse_from(arguments).unwrap_or_else(|e| panic!("{e}")).options
    }

    const RESTORE: [&str; 6] = ["restore", "monday", "--from", "file:///a", "--to", "file:///b"];

    #[test]
    fn each_command_has_a_limit_that_can_be_given() {
        let limit_of = |arguments: &[&str]| {
            let options = options(arguments);
            of(&options.command, options.timeout)
        };
        assert_eq!(limit_of(&["backup", "create"]), Some(LIMIT));
        assert_eq!(limit_of(&["drain", "7"]), Some(LIMIT));
        assert_eq!(limit_of(&RESTORE), None, "it takes what its size takes");
        let given = Some(Duration::from_secs(90));
        assert_eq!(limit_of(&["move", "t", "7", "--timeout", "90s"]), given);
        assert_eq!(limit_of(&["--timeout", "1.5min", "workers"]), given);
        assert_eq!(limit_of(&[&RESTORE[..], &["--timeout", "90s"]].concat()), given);
        assert_eq!(limit_of(&["jobs", "--timeout", "0"]), None);
        for wrong in [&["move", "t"][..], &["move", "t", "7", "--undo"]] {
            let arguments = std::iter::once("millrace").chain(wrong.iter().copied());
            assert!(Cli::try_parse_from(arguments).is_err(), "{wrong:?}");
        }
        for wrong in ["-1s", "soon", "7"] {
            let timeout = format!("--timeout={wrong}");
            assert!(Cli::try_parse_from(["millrace", "jobs", &timeout]).is_err(), "{wrong}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_command_ends_when_its_time_is_over() {
        let began = tokio::time::Instant::now();
        let never = std::future::pending::<Result<(), String>>();
        let told = within(Some(LIMIT), never, |limit| format!("late by {limit:?}")).await;
        assert_eq!((told, began.elapsed()), (Err("late by 60s".to_owned()), LIMIT));
        for limit in [Some(LIMIT), None] {
            let work = async {
                tokio::time::sleep(LIMIT / 2).await;
                Ok(1)
            };
            assert_eq!(within(limit, work, |_| "late".to_owned()).await, Ok(1));
        }
    }

    #[test]
    fn who_waited_in_vain_is_told_for_what_and_what_to_do() {
        let told = |arguments: &[&str], asked| {
            late(&options(arguments).command, Duration::from_secs(2), asked)
        };
        for (arguments, what, then) in [
            (&["move", "orders", "7"][..], "orders is moved to 7", "millrace ctl placement"),
            (&["move", "orders", "--undo"], "orders is placed by its load", "ctl placement"),
            (&["drain", "7"], "7 is drained", "millrace ctl workers"),
            (&["drain", "7", "--undo"], "7 takes jobs again", "millrace ctl workers"),
            (&["backup", "create"], "the backup is made", "millrace ctl backup list"),
            (&["backup", "release", "monday"], "monday is released", "millrace ctl backup list"),
            (&["collection", "--run"], "garbage collection", "goes on there"),
            (&["jobs"], "has not answered", "run the command again"),
            (&RESTORE, "is not copied as a whole", "goes on with what is there"),
        ] {
            let said = told(arguments, true);
            let is_told = said.contains(what) && said.contains(then) && said.contains("2000 ms");
            assert!(is_told, "{arguments:?}: {said}");
        }
        let said = told(&["drain", "7"], false);
        assert!(said.contains("leads") && said.contains("Nothing has been asked for"), "{said}");
    }

    #[test]
    fn only_of_a_change_without_an_outcome_it_is_told_that_it_may_be_done() {
        let CtlCommand::Leader(command) = options(&["drain", "7"]).command else {
            panic!("the leader is asked for it");
        };
        let error = || {
            let (peer, cause) = ("m:1".to_owned(), "nobody listens".to_owned());
            CallError::NotConnected { peer, cause }
        };
        let unknown = failed(&command, Failure::Unknown(error()));
        for part in ["that 7 is drained", "m:1 cannot be reached", "millrace ctl workers"] {
            assert!(unknown.contains(part), "{unknown}");
        }
        let refused = failed(&command, Failure::Refused(error()));
        assert!(refused.contains("m:1 cannot be reached"), "{refused}");
        assert!(!refused.contains("may be done"), "{refused}");
    }
}
