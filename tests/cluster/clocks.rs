//! Meta processes whose clocks are wrong: one that leads ends, one that stands by does not take over, and both say so.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::health::{health, health_when};
use crate::leases::told;
use crate::process::Cluster;
use crate::sessions::LIMIT;
use crate::{execute, one};

const NAMES: [&str; 4] = ["meta1", "meta2", "compute", "frontend1"];
/// Seconds: more than a leader's clock may be off, and not so many that the object store would refuse its requests.
const WRONG: i64 = 60;
/// Where the log is.
const LOG: &str = "millrace/meta/log";

/// The clock of a process, which is set while it runs.
pub struct Clock {
    /// What the process has instead of the C library's clock.
    library: PathBuf,
    /// By how many seconds it is ahead of the machine's.
    ahead: PathBuf,
}

impl Clock {
    /// Of the process of this name. It is right.
    pub fn new(dir: &Path, name: &str) -> Clock {
        let clock =
            Clock { library: dir.join("clock.so"), ahead: dir.join(format!("clock-{name}")) };
        if !clock.library.exists() {
            let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cluster/clock.c");
            let mut compiler = Command::new("cc");
            compiler.args(["-shared", "-fPIC", "-o"]).arg(&clock.library).arg(source);
            assert!(compiler.status().is_ok_and(|s| s.success()), "the clock is not compiled");
        }
        std::fs::write(&clock.ahead, 0i64.to_ne_bytes()).expect("a file");
        clock
    }

    /// So many seconds ahead of the machine's.
    pub fn set(&self, ahead: i64) {
        let file = File::options().write(true).open(&self.ahead).expect("its file");
        // The process has it mapped, so it is never shorter.
        file.write_all_at(&ahead.to_ne_bytes(), 0).expect("a write");
    }

    /// A process that has this in its environment has the clock.
    pub fn environment(&self) -> [(&'static str, &Path); 2] {
        [("LD_PRELOAD", self.library.as_path()), ("SET_CLOCK", self.ahead.as_path())]
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_has_a_wrong_clock_does_not_lead_and_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let clocks = ["meta1", "meta2"].map(|name| (name, Clock::new(dir.path(), name)));
    let mut cluster = Cluster::start_with_clocks(dir.path(), &NAMES, clocks.into()).await;
    let client = cluster.connect("frontend1").await;
    execute(&client, "CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1)").await;
    assert!(cluster.process("meta2").log().contains("stands by"));

    cluster.set_clock("meta2", -WRONG);
    assert_eq!(health(&cluster, "meta2").await, Ok(()), "it does not lead anyway");
    cluster.set_clock("meta1", WRONG);
    cluster.process("meta1").await_end(LIMIT);
    let log = cluster.process("meta1").log();
    // By the object store's, or by those of the others where that takes long.
    assert!(log.contains("the clock of this process") && log.contains("ms ahead of"), "{log}");

    let records = cluster.objects_below(LOG);
    told(&mut cluster, "meta2", "stands by until the clock is right").await;
    let said = health(&cluster, "meta2").await.unwrap_err();
    assert!(said.contains("503") && said.contains("ms behind that of the object store"), "{said}");
    assert!(!records.is_empty() && cluster.objects_below(LOG) == records, "it has led");

    // The one whose clock is right leads.
    cluster.set_clock("meta1", 0);
    cluster.begin("meta1");
    execute(&client, "INSERT INTO t VALUES (2)").await;
    assert_eq!(one::<i64>(&client, "SELECT count(*) FROM t").await, 2);
    assert_eq!(health_when(&cluster, "meta2", true).await, Ok(()));
    assert!(!cluster.process("meta2").has_ended(), "it stands by");
}
