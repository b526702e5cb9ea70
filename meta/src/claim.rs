//! When a standby claims the lead: what it decides from what it has heard, and nothing else.
//!
//! Any claim is safe, because the log decides who leads and a new leader waits for the lease of the one before. What is
//! decided here keeps a leader that works in its place: one that this process cannot reach but others can, or one that
//! goes on writing records. A leader that answers, and that the object store does not answer, which this process reads, does
//! not work.
//!
//! Who is there and does not talk with this process, because of certificates, counts as one that has not lost the leader:
//! if all are so, this process could lead none of them.

use std::time::Duration;

use millrace_rpc::log::ProcessRole;
use tokio::time::Instant;

use crate::cluster::has_role;
use crate::state::MetaState;

/// A leader that nothing was heard of for so long is lost.
pub const LOST: Duration = Duration::from_secs(2);
/// A leader that the object store has answered nothing for so long is cut off from it.
pub const CUT_OFF: Duration = Duration::from_secs(3);
/// After so long a standby reads the log: by the time that the leader counts as cut off, it is to have seen for [`LOST`]
/// that no record comes.
pub const DOUBTFUL: Duration = CUT_OFF.saturating_sub(LOST);
/// [`LOST`] where none of the processes that have registered can be asked: this one may be what is cut off. For so long,
/// too, whoever has kept this process from claiming the lead still does when nothing more is heard of it, and a leader that
/// has refused this process still counts as there.
pub const ALONE: Duration = Duration::from_secs(6);
/// What each standby waits longer than the one before it.
const RANK: Duration = Duration::from_secs(1);
/// A process that has not looked for so long has stood still itself: what it has not heard proves nothing.
const STOOD_STILL: Duration = Duration::from_secs(5);
/// A leader that has led for so long is as good as one that was never deposed.
pub const LED_LONG: Duration = Duration::from_secs(60);
/// What a process waits that was deposed for the first time; it doubles each time.
const FIRST_PENALTY: Duration = Duration::from_secs(1);
const MOST_DOUBLINGS: u32 = 4;

/// What a process waits in addition, before it deposes another one, that was deposed so often since it had led for long.
pub fn penalty(deposed: u32) -> Duration {
    match deposed {
        0 => Duration::ZERO,
        times => FIRST_PENALTY * (1 << (times - 1).min(MOST_DOUBLINGS)),
    }
}

/// A process whose vote counts: it registers with a leader and takes calls.
#[derive(Clone, Debug)]
pub struct Voter {
    pub incarnation: u64,
    /// Never empty.
    pub address: String,
    /// Its first one that takes calls, for people.
    pub role: &'static str,
}

/// The processes whose votes count.
pub fn voters(state: &MetaState) -> Vec<Voter> {
    let name = |role| match role {
        ProcessRole::Compute => Some("compute"),
        ProcessRole::Compactor => Some("compactor"),
        // The address of a frontend is for clients.
        ProcessRole::Meta | ProcessRole::Frontend | ProcessRole::Unspecified => None,
    };
    let live = state.processes.live().iter().map(|(id, process)| (*id, &process.registration));
    let others = live.filter(|(_, p)| !p.address.is_empty() && !has_role(p, ProcessRole::Meta));
    let voters = others.filter_map(|(incarnation, process)| {
        let role = process.roles().find_map(name)?;
        Some(Voter { incarnation, address: process.address.clone(), role })
    });
    voters.collect()
}

/// For how long a standby has not heard of the leader.
#[derive(Debug)]
struct Silence {
    /// The leader answered, or a record came, or this process began to look.
    heard: Instant,
    looked: Instant,
    /// The log's last record when the silence began; `None`: it has not.
    record: Option<u64>,
}

impl Silence {
    fn new(now: Instant) -> Silence {
        Silence { heard: now, looked: now, record: None }
    }

    /// The leader has answered.
    fn hear(&mut self, now: Instant) {
        *self = Silence::new(now);
    }

    /// The leader has not answered, and `record` is the log's last one. Returns for how long nothing was heard: a record
    /// that has come since the silence began is as good as an answer.
    fn note(&mut self, record: u64, now: Instant) -> Duration {
        let stood_still = now.saturating_duration_since(self.looked) > STOOD_STILL;
        let has_come = self.record.is_some_and(|before| before != record);
        if stood_still || has_come {
            self.heard = now;
        }
        self.looked = now;
        self.record = Some(record);
        now.saturating_duration_since(self.heard)
    }
}

/// What a standby keeps from look to look.
#[derive(Debug)]
pub struct Watch {
    silence: Silence,
    /// Since when nobody leads.
    vacant_since: Option<Instant>,
    /// When somebody was found last who keeps this process from claiming the lead.
    hindered: Option<Instant>,
    /// When something at the leader's address was found last that does not talk with this process.
    refused: Option<Instant>,
    /// What this process waits in addition, because it was deposed.
    penalty: Duration,
}

/// Whether this was found, and is not so long ago that it counts for nothing.
fn is_recent(found: Option<Instant>, now: Instant) -> bool {
    found.is_some_and(|found| now.saturating_duration_since(found) < ALONE)
}

impl Watch {
    /// A process that begins to look.
    pub fn new(penalty: Duration, now: Instant) -> Watch {
        let silence = Silence::new(now);
        Watch { silence, vacant_since: None, hindered: None, refused: None, penalty }
    }

    /// The leader has answered, and does not wait for the object store; or another one leads by now, which was not asked yet.
    pub fn hear(&mut self, now: Instant) {
        self.silence.hear(now);
        self.vacant_since = None;
    }

    /// Somebody was found who keeps this process from claiming the lead.
    pub fn hinder(&mut self, now: Instant) {
        self.hindered = Some(now);
    }

    /// Something at the leader's address does not talk with this process. The others know whether it leads.
    pub fn refuse(&mut self, now: Instant) {
        self.refused = Some(now);
    }

    /// Nobody keeps this process from claiming the lead when there is a reason to.
    pub fn unhinder(&mut self) {
        (self.hindered, self.refused) = (None, None);
    }

    /// Whether somebody has kept this process from claiming the lead, and may only be slow.
    pub fn is_hindered(&self, now: Instant) -> bool {
        is_recent(self.hindered, now)
    }

    /// Whether something at the leader's address has refused this process, and may only be slow.
    pub fn is_refused(&self, now: Instant) -> bool {
        is_recent(self.refused, now)
    }

    /// The log has been read up to `record`: nobody leads, or the leader has not answered, or has waited for the object store
    /// for `log_wait`. Returns what is known before others are asked; `None`: whatever they say, it is too early for a claim.
    pub fn note(
        &mut self,
        is_vacant: bool,
        log_wait: Option<Duration>,
        record: u64,
        now: Instant,
    ) -> Option<Heard> {
        let mut silence = self.silence.note(record, now);
        if is_vacant {
            let since = *self.vacant_since.get_or_insert(now);
            silence = now.saturating_duration_since(since);
        } else {
            self.vacant_since = None;
            if silence < LOST {
                return None;
            }
        }
        Some(Heard {
            is_vacant,
            log_wait,
            silence,
            leader_refuses: self.is_refused(now),
            is_hindered: self.is_hindered(now),
            penalty: self.penalty,
            ..Heard::default()
        })
    }
}

/// What a standby has heard.
#[derive(Clone, Debug, Default)]
pub struct Heard {
    /// Whether the leader has said in the log that it leads no longer, or there was none.
    pub is_vacant: bool,
    /// Of a leader that answers: for how long it has waited for the object store, as it says.
    pub log_wait: Option<Duration>,
    /// For how long the leader has neither answered nor written a record.
    pub silence: Duration,
    /// Processes that have registered and take calls.
    pub registered: usize,
    /// Of those that could be asked: for how long they have not heard of the leader. `None`: they never have.
    pub answers: Vec<Option<Duration>>,
    /// Of the others: how many are there and do not talk with this process.
    pub refusals: usize,
    /// Whether something at the leader's address does not talk with this process, or did not, and may only be slow.
    pub leader_refuses: bool,
    /// Whether somebody has kept this process from claiming the lead, and may only be slow.
    pub is_hindered: bool,
    /// Standbys that answer and come before this one.
    pub rank: usize,
    /// What this process waits before it deposes another one, because it was deposed.
    pub penalty: Duration,
}

impl Heard {
    /// Whether others are asked whether they have lost the leader: not where it answers, and waits for the object store.
    pub fn asks_voters(&self) -> bool {
        self.log_wait.is_none()
    }

    /// Whether most of those that are there do not talk with this process: it must not lead them.
    pub fn most_refuse(&self) -> bool {
        self.refusals > self.answers.len()
    }
}

/// Whether the standby claims the lead now.
pub fn claims(heard: &Heard) -> bool {
    if heard.is_hindered || heard.log_wait.is_some_and(|wait| wait < CUT_OFF) {
        return false;
    }
    let is_cut_off = heard.log_wait.is_some();
    let least = match (heard.is_vacant, heard.registered, heard.answers.len()) {
        (true, ..) => Duration::ZERO,
        (_, 1.., 0) if !is_cut_off => ALONE,
        _ => LOST,
    };
    let penalty = if heard.is_vacant { Duration::ZERO } else { heard.penalty };
    if heard.silence < least + RANK * heard.rank as u32 + penalty {
        return false;
    }
    let answered = heard.answers.len();
    if heard.most_refuse() {
        return false;
    }
    if heard.is_vacant || is_cut_off {
        return true;
    }
    if answered == 0 {
        return !heard.leader_refuses;
    }
    let has_lost = |silence: &&Option<Duration>| silence.is_none_or(|silence| silence >= LOST);
    let lost = heard.answers.iter().filter(has_lost).count();
    lost * 2 > answered + heard.refusals
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn silent(seconds: u32) -> Heard {
        Heard { silence: SECOND * seconds, ..Heard::default() }
    }

    fn answered(seconds: &[u32]) -> Heard {
        let answers: Vec<_> = seconds.iter().map(|s| Some(SECOND * *s)).collect();
        Heard { registered: answers.len(), answers, ..silent(3) }
    }

    #[test]
    fn the_lead_is_claimed_when_most_have_lost_the_leader() {
        assert!(claims(&answered(&[3, 3, 0])));
        assert!(!claims(&answered(&[3, 0])), "half is not more than half");
        assert!(!claims(&answered(&[0, 0, 3])));
        assert!(!claims(&Heard { silence: SECOND, ..answered(&[9, 9]) }), "it answers this one");
        let unheard = Heard { registered: 1, answers: vec![None], ..silent(3) };
        assert!(claims(&unheard), "one that never heard of a leader has none");
    }

    #[test]
    fn who_can_ask_nobody_waits_for_longer() {
        assert!(claims(&silent(2)), "nobody has registered");
        let cut_off = |seconds| Heard { registered: 3, ..silent(seconds) };
        assert!(!claims(&cut_off(5)));
        assert!(claims(&cut_off(6)));
    }

    #[test]
    fn who_is_there_and_refuses_this_process_has_not_lost_the_leader() {
        let refused = |refusals, lost: &[u32]| Heard { refusals, ..answered(lost).with_silence(9) };
        assert!(!claims(&refused(1, &[])));
        assert!(!claims(&refused(1, &[3])), "half is not more than half");
        assert!(claims(&refused(1, &[3, 3])));
        let alone = Heard { leader_refuses: true, registered: 2, ..silent(9) };
        assert!(!claims(&alone), "it answers others");
        assert!(claims(&Heard { leader_refuses: true, ..answered(&[3, 3, 0]) }), "not them");
        let vacant = Heard { is_vacant: true, ..silent(9) };
        assert!(!claims(&Heard { refusals: 1, ..vacant.clone() }));
        assert!(claims(&Heard { refusals: 1, answers: vec![None], ..vacant }));
    }

    #[test]
    fn standbys_follow_each_other_and_the_deposed_come_later() {
        assert!(!claims(&Heard { rank: 1, ..answered(&[3]) }.with_silence(2)));
        assert!(claims(&Heard { rank: 1, ..answered(&[3]) }.with_silence(3)));
        assert!(!claims(&Heard { penalty: SECOND * 4, ..answered(&[3]) }.with_silence(5)));
        assert!(claims(&Heard { penalty: SECOND * 4, ..answered(&[3]) }.with_silence(6)));
    }

    #[test]
    fn where_nobody_leads_nobody_is_asked() {
        let vacant = Heard { is_vacant: true, silence: Duration::ZERO, ..answered(&[0, 0]) };
        assert!(claims(&vacant));
        assert!(claims(&Heard { penalty: SECOND, ..vacant.clone() }), "nobody is deposed");
        assert!(!claims(&Heard { rank: 1, ..vacant.clone() }));
        assert!(claims(&Heard { rank: 1, silence: SECOND, ..vacant }));
    }

    #[test]
    fn a_leader_that_is_cut_off_from_the_store_is_lost_though_it_answers() {
        let cut_off = Heard { log_wait: Some(CUT_OFF), ..answered(&[0, 0]) };
        assert!(claims(&cut_off));
        let waits = Heard { log_wait: Some(CUT_OFF - SECOND), ..cut_off.clone() };
        assert!(!claims(&waits), "the store may still answer it");
        assert!(!claims(&Heard { silence: SECOND, ..cut_off.clone() }), "a record has come");
        assert!(!claims(&Heard { rank: 2, ..cut_off.clone() }));
        assert!(claims(&Heard { answers: vec![], ..cut_off }), "this process is not cut off");
    }

    impl Heard {
        fn with_silence(self, seconds: u32) -> Heard {
            Heard { silence: SECOND * seconds, ..self }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn silence_lasts_while_neither_an_answer_nor_a_record_comes() {
        let mut silence = Silence::new(Instant::now());
        tokio::time::advance(SECOND).await;
        assert_eq!(silence.note(7, Instant::now()), SECOND);
        tokio::time::advance(SECOND).await;
        assert_eq!(silence.note(7, Instant::now()), SECOND * 2);
        tokio::time::advance(SECOND).await;
        assert_eq!(silence.note(8, Instant::now()), Duration::ZERO, "a record has come");
        tokio::time::advance(SECOND).await;
        assert_eq!(silence.note(8, Instant::now()), SECOND);
        silence.hear(Instant::now());
        tokio::time::advance(SECOND).await;
        assert_eq!(
            silence.note(9, Instant::now()),
            SECOND,
            "records that came before count for nothing"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_watch_asks_others_only_when_the_leader_may_be_lost() {
        let mut watch = Watch::new(SECOND, Instant::now());
        let mut looks = Vec::new();
        for _ in 0..4 {
            looks.push(watch.note(false, None, 7, Instant::now()).map(|heard| heard.silence));
            tokio::time::advance(SECOND).await;
        }
        assert_eq!(looks, [None, None, Some(SECOND * 2), Some(SECOND * 3)]);
        let heard = watch.note(false, Some(CUT_OFF), 7, Instant::now()).unwrap();
        assert_eq!((heard.penalty, heard.log_wait), (SECOND, Some(CUT_OFF)));
        assert!(!heard.asks_voters());
        watch.hear(Instant::now());
        assert!(watch.note(false, None, 7, Instant::now()).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn who_was_kept_from_the_lead_claims_none_until_nothing_more_was_heard_for_long() {
        let mut watch = Watch::new(Duration::ZERO, Instant::now());
        watch.hinder(Instant::now());
        for _ in 0..ALONE.as_secs() {
            let heard = watch.note(true, None, 7, Instant::now()).unwrap();
            assert!(!claims(&heard), "nobody leads, and this process must not");
            tokio::time::advance(SECOND).await;
        }
        assert!(claims(&watch.note(true, None, 7, Instant::now()).unwrap()));
        watch.hinder(Instant::now());
        assert!(!claims(&watch.note(true, None, 7, Instant::now()).unwrap()), "it is there again");
        watch.unhinder();
        assert!(claims(&watch.note(true, None, 7, Instant::now()).unwrap()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_leader_that_has_refused_this_process_is_there_unless_others_have_lost_it() {
        let mut watch = Watch::new(Duration::ZERO, Instant::now());
        let mut refuses = Vec::new();
        watch.refuse(Instant::now());
        for _ in 0..=ALONE.as_secs() {
            let heard = watch.note(false, None, 7, Instant::now());
            refuses.push(heard.map(|heard| heard.leader_refuses));
            tokio::time::advance(SECOND).await;
        }
        let (early, there) = (None, Some(true));
        assert_eq!(refuses, [early, early, there, there, there, there, Some(false)]);
        watch.refuse(Instant::now());
        let alone = watch.note(false, None, 7, Instant::now()).unwrap();
        assert!(!claims(&alone));
        assert!(claims(&Heard { registered: 1, answers: vec![Some(LOST)], ..alone }));
        watch.unhinder();
        assert!(claims(&watch.note(false, None, 7, Instant::now()).unwrap()));
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_leads_from_when_that_was_first_seen() {
        let mut watch = Watch::new(Duration::ZERO, Instant::now());
        tokio::time::advance(SECOND).await;
        let mut vacant = |record| watch.note(true, None, record, Instant::now()).unwrap().silence;
        assert_eq!(vacant(7), Duration::ZERO);
        tokio::time::advance(SECOND).await;
        assert_eq!(vacant(8), SECOND, "records of nobody prove no leader");
        watch.hear(Instant::now());
        let heard = watch.note(true, None, 8, Instant::now()).unwrap();
        assert_eq!(heard.silence, Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn who_has_stood_still_has_heard_nothing() {
        let mut silence = Silence::new(Instant::now());
        assert_eq!(silence.note(7, Instant::now()), Duration::ZERO);
        tokio::time::advance(SECOND * 9).await;
        assert_eq!(silence.note(7, Instant::now()), Duration::ZERO);
        tokio::time::advance(SECOND).await;
        assert_eq!(silence.note(7, Instant::now()), SECOND);
    }
}
