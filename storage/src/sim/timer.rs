//! Waits of a store whose requests take less than a tick of tokio's timers.
//!
//! Those end at the first millisecond after their time. A read of a local disk takes a tenth of that: a benchmark that
//! waited so would measure the timer.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::sync::{Arc, OnceLock};

use parking_lot::{Condvar, Mutex};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until};

/// How a store waits.
#[derive(Clone, Default)]
pub(super) enum Timer {
    /// On tokio's clock, which a test may pause.
    #[default]
    Clock,
    /// On a thread that the operating system wakes about when the time has come.
    Thread(Arc<Waits>),
}

/// Those who wait, by the time.
#[derive(Default)]
pub(super) struct Waits {
    queue: Mutex<BinaryHeap<Reverse<Wait>>>,
    changed: Condvar,
}

struct Wait {
    until: Instant,
    waiter: oneshot::Sender<()>,
}

impl Timer {
    /// One thread serves all stores of the process. An error of the operating system leaves tokio's clock.
    pub fn thread() -> Timer {
        static WAITS: OnceLock<Option<Arc<Waits>>> = OnceLock::new();
        let waits = WAITS.get_or_init(|| {
            let waits = Arc::new(Waits::default());
            let served = Arc::clone(&waits);
            let thread = std::thread::Builder::new().name("store timer".to_owned());
            thread.spawn(move || served.serve()).ok().map(|_| waits)
        });
        waits.clone().map_or(Timer::Clock, Timer::Thread)
    }

    pub async fn sleep_until(&self, until: Instant) {
        match self {
            Timer::Clock => sleep_until(until).await,
            Timer::Thread(waits) => {
                let end = waits.add(until);
                // The thread goes on as long as the process.
                let _ = end.await;
            }
        }
    }
}

impl Waits {
    fn add(&self, until: Instant) -> oneshot::Receiver<()> {
        let (waiter, end) = oneshot::channel();
        let mut queue = self.queue.lock();
        let is_first = queue.peek().is_none_or(|Reverse(first)| until < first.until);
        queue.push(Reverse(Wait { until, waiter }));
        drop(queue);
        if is_first {
            self.changed.notify_one();
        }
        end
    }

    fn serve(&self) {
        let mut queue = self.queue.lock();
        loop {
            let now = Instant::now();
            while queue.peek().is_some_and(|Reverse(next)| next.until <= now) {
                if let Some(Reverse(wait)) = queue.pop() {
                    // Who does not wait any more has gone.
                    let _ = wait.waiter.send(());
                }
            }
            match queue.peek().map(|Reverse(next)| next.until) {
                Some(next) => drop(self.changed.wait_until(&mut queue, next.into_std())),
                None => self.changed.wait(&mut queue),
            }
        }
    }
}

impl PartialEq for Wait {
    fn eq(&self, other: &Wait) -> bool {
        self.until == other.until
    }
}

impl Eq for Wait {}

impl PartialOrd for Wait {
    fn partial_cmp(&self, other: &Wait) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Wait {
    fn cmp(&self, other: &Wait) -> Ordering {
        self.until.cmp(&other.until)
    }
}
