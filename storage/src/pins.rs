//! Which objects readers of this process still hold, whatever the log says of them.
//!
//! Every [`crate::run::RunReader`] of a version or a compaction holds a [`Pin`] on its object, and a scan
//! holds its readers as long as it lives; so counting pins is counting who may still read. Garbage
//! collection asks before it deletes.

use std::sync::Arc;

use millrace_common::collections::HashMap;
use parking_lot::Mutex;

#[derive(Debug, Default)]
pub(crate) struct ObjectPins {
    counts: Mutex<HashMap<String, usize>>,
}

impl ObjectPins {
    pub fn pin(self: &Arc<Self>, object: &str) -> Pin {
        let mut counts = self.counts.lock();
        match counts.get_mut(object) {
            Some(count) => *count += 1,
            None => drop(counts.insert(object.to_string(), 1)),
        }
        Pin { pins: Arc::clone(self), object: object.to_string() }
    }

    pub fn objects(&self) -> Vec<String> {
        self.counts.lock().keys().cloned().collect()
    }

    pub fn holds(&self, object: &str) -> bool {
        self.counts.lock().contains_key(object)
    }
}

/// One reader's hold on an object.
#[derive(Debug)]
pub(crate) struct Pin {
    pins: Arc<ObjectPins>,
    object: String,
}

impl Clone for Pin {
    fn clone(&self) -> Pin {
        self.pins.pin(&self.object)
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        let mut counts = self.pins.counts.lock();
        if let Some(count) = counts.get_mut(&self.object) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.object);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_is_held_until_its_last_reader_is_gone() {
        let pins = Arc::new(ObjectPins::default());
        let first = pins.pin("data/1/1.seg");
        let second = first.clone();
        drop(first);
        assert!(pins.holds("data/1/1.seg") && !pins.holds("data/1/2.seg"));
        drop(second);
        assert!(!pins.holds("data/1/1.seg"));
    }
}
