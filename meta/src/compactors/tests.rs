use millrace_common::Epoch;
use millrace_common::RelationId;
use millrace_rpc::call_error::CallError;
use millrace_rpc::catalog::Relation;
use millrace_rpc::services::MergedTable;
use millrace_rpc::version::RunMeta;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::*;

const JOB: JobId = RelationId(7);

/// What a process does with a task.
#[derive(Clone, Copy, Debug)]
enum Does {
    Merges,
    NeverAnswers,
    IsCutOff,
    /// The object store does not take its credentials.
    IsRefused,
    Fails,
}

/// A process that says who it is in what it answers.
struct Process {
    id: u64,
    does: Does,
    /// Tasks that it was given and that were not taken back.
    given: Arc<Mutex<BTreeSet<u64>>>,
    may_end: Arc<Notify>,
}

/// A task that its process has.
struct Given<'a>(&'a Mutex<BTreeSet<u64>>, u64);

impl Drop for Given<'_> {
    fn drop(&mut self) {
        self.0.lock().remove(&self.1);
    }
}

#[async_trait]
impl CompactorService for Process {
    async fn compact(&self, task: CompactionTask) -> Result<VersionEdit, SqlError> {
        self.given.lock().insert(task.task_id);
        let _given = Given(&self.given, task.task_id);
        match self.does {
            Does::Merges => self.may_end.notified().await,
            Does::NeverAnswers => std::future::pending().await,
            Does::IsCutOff => {
                let cause = "planted".into();
                return Err(CallError::Unreachable { peer: "a:1".into(), cause }.into());
            }
            Does::IsRefused => {
                return Err(SqlError::new(SqlState::INSUFFICIENT_PRIVILEGE, "planted"));
            }
            Does::Fails => return Err(SqlError::internal("damaged")),
        }
        Ok(VersionEdit { remove_runs: vec![self.id], ..VersionEdit::default() })
    }

    async fn copy_parts(&self, _: Vec<LivePart>) -> Result<MoveParts, SqlError> {
        Ok(MoveParts { object: self.id.to_string(), ..MoveParts::default() })
    }
}

struct Test {
    all: Arc<Compactors>,
    /// Processes that tell nothing, and since when.
    silent: Arc<Mutex<BTreeMap<u64, Instant>>>,
    /// Processes that the object store does not answer.
    without_store: Arc<Mutex<BTreeSet<u64>>>,
    given: BTreeMap<u64, Arc<Mutex<BTreeSet<u64>>>>,
    may_end: BTreeMap<u64, Arc<Notify>>,
}

impl Test {
    fn new() -> Test {
        let silent = Arc::<Mutex<BTreeMap<u64, Instant>>>::default();
        let without_store = Arc::<Mutex<BTreeSet<u64>>>::default();
        let contact = {
            let (silent, without_store) = (Arc::clone(&silent), Arc::clone(&without_store));
            Arc::new(move |id: u64| {
                let silence = silent.lock().get(&id).map_or(Duration::ZERO, Instant::elapsed);
                let waits = without_store.lock().contains(&id);
                let store_wait = if waits { WITHOUT_STORE * 2 } else { WITHOUT_STORE };
                Some(Contact { silence, store_wait })
            })
        };
        let computes =
            Arc::new(Computes::new(Arc::default(), Default::default(), Box::new(|_, _, _| {})));
        let all = Arc::new(Compactors::new(computes, Arc::default(), contact));
        Test { all, silent, without_store, given: BTreeMap::new(), may_end: BTreeMap::new() }
    }

    fn process(&mut self, id: u64, does: Does) -> Service {
        let given = Arc::clone(self.given.entry(id).or_default());
        let may_end = Arc::clone(self.may_end.entry(id).or_default());
        Arc::new(Process { id, does, given, may_end })
    }

    fn compactor(&mut self, id: u64, does: Does) {
        let service = self.process(id, does);
        self.all.add_compactor(id, service);
    }

    fn end_one(&self, id: u64) {
        self.may_end[&id].notify_one();
    }

    fn falls_silent(&self, id: u64) {
        self.silent.lock().insert(id, Instant::now());
    }

    /// How many tasks each process has.
    fn given(&self) -> Vec<(u64, usize)> {
        self.given.iter().map(|(id, tasks)| (*id, tasks.lock().len())).collect()
    }

    /// Has a task done, in the background.
    async fn begin(
        &self,
        task_id: u64,
        bytes: u64,
    ) -> tokio::task::JoinHandle<Result<VersionEdit, SqlError>> {
        let (all, task) = (Arc::clone(&self.all), task(task_id, bytes));
        let begun = tokio::spawn(async move { all.compact(task).await });
        tokio::task::yield_now().await;
        begun
    }
}

fn task(task_id: u64, bytes: u64) -> CompactionTask {
    CompactionTask {
        task_id,
        job: JOB,
        relation: Relation::default(),
        inputs: vec![RunMeta { length: bytes, ..RunMeta::default() }],
        table: MergedTable::default(),
        target_level: 1,
        horizon: Epoch::ZERO,
        bottom: true,
    }
}

async fn asked(all: &Compactors) -> String {
    all.copy_parts(vec![]).await.map_or_else(|e| e.state.0.to_owned(), |moved| moved.object)
}

#[tokio::test]
async fn compactors_take_turns_and_compute_stands_in() {
    let mut test = Test::new();
    let compute = test.process(7, Does::Merges);
    let all = Arc::clone(&test.all);
    assert_eq!(asked(&all).await, SqlState::CANNOT_CONNECT_NOW.0);
    all.add_compute(7, compute);
    assert_eq!((asked(&all).await.as_str(), all.processes()), ("7", 1));
    for id in [8, 9] {
        test.compactor(id, Does::Merges);
    }
    assert_eq!(all.processes(), 2);
    let two = [asked(&all).await, asked(&all).await];
    assert!(two.contains(&"8".into()) && two.contains(&"9".into()), "{two:?}");
    test.falls_silent(8);
    test.silent.lock().insert(8, Instant::now() - SILENT * 2);
    assert_eq!([asked(&all).await, asked(&all).await], ["9", "9"]);
    all.remove(9);
    assert_eq!(asked(&all).await, "7", "who tells nothing is not there");
    all.remove(8);
    assert_eq!(asked(&all).await, "7");
}

#[tokio::test(start_paused = true)]
async fn who_has_least_to_do_is_given_more() {
    let mut test = Test::new();
    for id in [1, 2, 3] {
        test.compactor(id, Does::Merges);
    }
    let mut begun = Vec::new();
    for id in 0..3 {
        begun.push(test.begin(id, 100).await);
    }
    assert_eq!(test.given(), [(1, 1), (2, 1), (3, 1)]);
    // One after the other is done by 2, whoever's turn it were.
    for id in 3..8 {
        test.end_one(2);
        tokio::task::yield_now().await;
        begun.push(test.begin(id, 100).await);
        assert_eq!(test.given(), [(1, 1), (2, 1), (3, 1)], "task {id}");
    }
    // Where they have as many, bytes decide: 1 is given two small ones.
    test.end_one(1);
    tokio::task::yield_now().await;
    begun.push(test.begin(8, 1).await);
    begun.push(test.begin(9, 1).await);
    assert_eq!(test.given(), [(1, 2), (2, 1), (3, 1)]);
    begun.iter().for_each(|task| task.abort());
}

#[tokio::test(start_paused = true)]
async fn a_task_of_a_process_that_falls_silent_is_given_to_another() {
    let mut test = Test::new();
    test.compactor(1, Does::NeverAnswers);
    let begun = test.begin(5, 1).await;
    test.compactor(2, Does::Merges);
    test.falls_silent(1);
    let since = Instant::now();
    test.end_one(2);
    let edit = begun.await.unwrap().unwrap();
    assert_eq!(edit.remove_runs, [2], "what the other made of it");
    let took = since.elapsed();
    assert!(took > SILENT && took <= SILENT + LOOK * (LOOKS + 1), "{took:?}");
    assert_eq!(test.given(), [(1, 0), (2, 0)], "the call to the first has ended");
}

#[tokio::test(start_paused = true)]
async fn a_task_of_a_process_that_the_store_does_not_answer_is_given_to_another() {
    let mut test = Test::new();
    test.compactor(1, Does::NeverAnswers);
    let begun = test.begin(5, 1).await;
    let since = Instant::now();
    test.without_store.lock().insert(1);
    // The process that the job is placed on stands in: the log here places it on none, which is 0.
    let compute = test.process(0, Does::Merges);
    test.all.add_compute(0, compute);
    test.end_one(0);
    assert_eq!(begun.await.unwrap().unwrap().remove_runs, [0]);
    assert!(since.elapsed() <= LOOK * (LOOKS + 1), "{:?}", since.elapsed());
    test.without_store.lock().clear();
    test.compactor(2, Does::IsRefused);
    let begun = test.begin(6, 1).await;
    assert_eq!(test.given(), [(0, 0), (1, 1), (2, 0)]);
    begun.abort();
    test.all.remove(1);
    test.end_one(0);
    assert_eq!(test.begin(7, 1).await.await.unwrap().unwrap().remove_runs, [0]);
}

/// A leader that has stood still finds everybody silent, until it has taken what it was told meanwhile.
#[tokio::test(start_paused = true)]
async fn who_was_only_not_heard_keeps_its_task() {
    let mut test = Test::new();
    test.compactor(1, Does::Merges);
    let begun = test.begin(5, 1).await;
    test.silent.lock().insert(1, Instant::now() - SILENT * 2);
    tokio::time::sleep(LOOK + LOOK / 2).await;
    test.silent.lock().clear();
    tokio::time::sleep(SILENT * 2).await;
    assert_eq!(test.given(), [(1, 1)]);
    test.end_one(1);
    assert_eq!(begun.await.unwrap().unwrap().remove_runs, [1]);
}

/// A process may do first what it was given before.
#[tokio::test(start_paused = true)]
async fn a_lease_counts_what_the_process_has_besides() {
    let mut test = Test::new();
    test.compactor(1, Does::NeverAnswers);
    let large = test.begin(1, 100 * BYTES_A_SECOND).await;
    let began = Instant::now();
    assert!(test.begin(2, 1).await.await.unwrap().is_err());
    assert!(began.elapsed() >= LEASE + Duration::from_secs(100), "{:?}", began.elapsed());
    assert!(large.await.unwrap().is_err());
}

#[tokio::test(start_paused = true)]
async fn a_lease_ends_although_the_process_tells_of_itself() {
    let mut test = Test::new();
    test.compactor(1, Does::NeverAnswers);
    let bytes = 100 * BYTES_A_SECOND;
    let lease = LEASE + Duration::from_secs(100);
    let since = Instant::now();
    for doublings in 0..3 {
        // Nobody else is there: its runs are tried again later.
        let before = since.elapsed();
        let error = test.begin(doublings, bytes).await.await.unwrap().unwrap_err();
        assert_eq!(error.state, SqlState::CANNOT_CONNECT_NOW);
        let lasted = since.elapsed() - before;
        assert!(lasted >= lease * (1 << doublings), "{lasted:?}: the next has more time");
        assert!(lasted < lease * (1 << doublings) + LOOK, "{lasted:?}");
        assert_eq!(test.given(), [(1, 0)]);
    }
    test.compactor(2, Does::Merges);
    test.end_one(2);
    assert_eq!(test.begin(9, bytes).await.await.unwrap().unwrap().remove_runs, [2]);
    let known = test.all.known.lock();
    assert!(known.overdue.is_empty());
    assert!(known.load.values().all(|load| *load == Load::default()), "{:?}", known.load);
}

#[tokio::test(start_paused = true)]
async fn another_does_what_a_process_that_is_cut_off_cannot() {
    let mut test = Test::new();
    for id in [1, 2] {
        test.compactor(id, Does::IsCutOff);
    }
    assert!(is_unreachable(&test.begin(1, 1).await.await.unwrap().unwrap_err()), "both were asked");
    // The process that the job is placed on stands in: the log here places it on none, which is 0.
    let compute = test.process(0, Does::Merges);
    test.all.add_compute(0, compute);
    test.end_one(0);
    assert_eq!(test.begin(2, 1).await.await.unwrap().unwrap().remove_runs, [0]);
    test.compactor(3, Does::Merges);
    test.end_one(3);
    assert_eq!(test.begin(2, 1).await.await.unwrap().unwrap().remove_runs, [3]);
}

#[tokio::test(start_paused = true)]
async fn a_task_that_fails_is_not_tried_elsewhere() {
    let mut test = Test::new();
    test.compactor(1, Does::Fails);
    let first = test.begin(1, 1).await;
    test.compactor(2, Does::NeverAnswers);
    assert_eq!(first.await.unwrap().unwrap_err().message, "damaged");
    assert_eq!(test.given(), [(1, 0), (2, 0)]);
}
