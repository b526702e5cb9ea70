//! Why a meta process that stands by must not claim the lead, although it hears of no leader: those that take part would
//! not follow it. Its log and its `/health` say so, because nobody else may take the lead either.

use millrace_common::{SqlError, SqlState};
use millrace_rpc::call_error::CallError;
use parking_lot::Mutex;
use tracing::warn;

const BUILD_HINT: &str =
    "All processes of a cluster run the same build: stop those of the other one first.";

/// Shared by who finds it and who tells it.
#[derive(Debug, Default)]
pub struct Hindrance(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    /// `None`: there is none.
    why: Option<String>,
    /// The last claim has found that the clock of this process is wrong.
    clock: Option<String>,
    /// What the log was told last, since the leader was heard of last.
    told: Option<String>,
}

impl Hindrance {
    /// `None`: it may claim the lead when there is a reason to.
    pub fn get(&self) -> Option<String> {
        let known = self.0.lock();
        known.clock.clone().or_else(|| known.why.clone())
    }

    /// How the clock was found to be wrong by a claim; `None`: it is right. Whether nobody was told of it before, since the
    /// leader was heard of last.
    pub fn set_clock(&self, wrong: Option<String>) -> bool {
        let is_wrong = wrong.is_some();
        let before = std::mem::replace(&mut self.0.lock().clock, wrong);
        is_wrong && before.is_none()
    }

    /// Whether the last claim has failed because of the clock.
    pub fn is_of_clock(&self) -> bool {
        self.0.lock().clock.is_some()
    }

    pub fn set(&self, why: Option<String>) {
        let mut known = self.0.lock();
        if let Some(why) = &why
            && known.told.as_ref() != Some(why)
        {
            warn!("this process does not claim the lead: {why}");
            known.told = Some(why.clone());
        }
        known.why = why;
    }

    /// The leader is there and answers: nobody needs this process, whatever keeps it from the lead.
    pub fn clear(&self) {
        *self.0.lock() = Known::default();
    }
}

/// What is told of a process that takes part and has refused a handshake because it speaks another protocol version.
pub fn other_version(role: &str, address: &str, error: &CallError) -> String {
    format!("the {role} process at {address} takes part in this cluster: {error}")
}

/// A process does not start because it could not lead those that take part.
pub fn not_led(other_version: String) -> SqlError {
    SqlError::new(SqlState::PROTOCOL_VIOLATION, other_version).with_hint(BUILD_HINT)
}

/// What is told where something answers at the address of a process, and does not talk with this one: `who` should be
/// there.
pub fn refused(who: &str, address: &str, error: &CallError) -> String {
    format!(
        "{who} at {address} is there and does not talk with this process: {error}; check --rpc-tls-cert, --rpc-tls-key \
         and --rpc-tls-ca of both"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_clock_is_told_until_it_is_right_or_a_leader_answers() {
        let (hindrance, wrong) = (Hindrance::default(), || Some("it is wrong".to_owned()));
        assert!(hindrance.set_clock(wrong()));
        assert!(!hindrance.set_clock(wrong()), "the log has it");
        // A look that finds nothing else does not end it: the next claim does.
        hindrance.set(None);
        assert_eq!((hindrance.get(), hindrance.is_of_clock()), (wrong(), true));
        assert!(!hindrance.set_clock(None));
        assert_eq!((hindrance.get(), hindrance.is_of_clock()), (None, false));
        hindrance.set_clock(wrong());
        hindrance.clear();
        assert_eq!(hindrance.get(), None);
        assert!(hindrance.set_clock(wrong()), "it is told once more");
    }
}
