//! The record stream to a worker: whatever is lost on the way, everybody is as if it had not been.

use std::time::Duration;

use millrace_rpc::log::{Entry, SetSetting};

use super::fake::{Cluster, Stream};
use super::view;

/// Larger than what is kept for a process, together.
const LARGE: usize = 1 << 20;
const LARGE_RECORDS: usize = 20;

#[tokio::test(start_paused = true)]
async fn a_stream_that_loses_and_repeats_records_changes_nothing() {
    let mut gaps = 0;
    for seed in 0..8 {
        let (c, t, v) = Cluster::with_view().await;
        let w = c.created(view("w", &[v, t])).await;
        c.fake.set_stream(Stream::Faulty(seed));
        for n in 1..=20 {
            // While a message is sent again, further records come, so that some messages have several.
            let others = async {
                for i in 0..3 {
                    let setting = SetSetting { name: format!("#{i}"), value: Some(n.to_string()) };
                    let log = c.meta.shared.log().unwrap();
                    assert!(log.append(Entry::SetSetting(setting)).await.unwrap().is_ok());
                }
            };
            let (epoch, ()) = futures::join!(c.insert(t), others);
            assert_eq!(c.fake.value_at(t, epoch), n, "seed {seed}");
            if n % 5 == 0 {
                assert_eq!(c.read(&[t, v, w]).await, [n, n, 2 * n], "seed {seed}");
            }
        }
        gaps += c.fake.gaps();
        let c = c.restart().await;
        c.insert(t).await;
        assert_eq!(c.read(&[t, v, w]).await, [21, 21, 42], "seed {seed}");
    }
    assert!(gaps > 0, "no record was lost that another had followed");
}

#[tokio::test(start_paused = true)]
async fn what_a_process_has_missed_is_read_from_the_log() {
    let (c, t, v) = Cluster::with_view().await;
    c.insert(t).await;
    c.fake.set_stream(Stream::Broken);
    let mut insert = Box::pin(c.insert(t));
    assert!(tokio::time::timeout(Duration::from_secs(1), &mut insert).await.is_err());
    for n in 0..LARGE_RECORDS {
        let setting = SetSetting { name: format!("#{n}"), value: Some("x".repeat(LARGE)) };
        let log = c.meta.shared.log().unwrap();
        assert!(log.append(Entry::SetSetting(setting)).await.unwrap().is_ok());
    }
    assert!(tokio::time::timeout(Duration::from_secs(1), &mut insert).await.is_err());
    let reads = c.store.requests();
    c.fake.set_stream(Stream::Sound);
    insert.await;
    assert!(c.store.requests() > reads, "the records are not in memory any more");
    assert_eq!(c.read(&[t, v]).await, [2, 2]);
}
