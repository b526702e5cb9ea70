//! The event times of a hint's keys, in few bytes.
//!
//! They decide which entries are evicted first, and which keys are late: about is enough. So one is sent in full, and the
//! others as steps before it, of one byte each. A time is never told too early, so no key that is in time looks late.

use arrow::array::{Array, ArrayRef};

use crate::operators::times_of;

/// Of a key whose rows have no event time.
const NO_TIME: i64 = i64::MIN;
/// Steps of a key without a time.
const NO_STEPS: u8 = u8::MAX;

/// See the module. In microseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum HintTimes {
    /// The rows bring none.
    #[default]
    None,
    /// This column of the key is the time.
    OfKey(usize),
    /// That many steps of 2^`shift` before the latest, by key; none are listed if all are at the latest.
    Before { latest: i64, shift: u8, steps: Vec<u8> },
}

impl HintTimes {
    /// Of as many keys; the least time is none.
    pub fn of(times: &[i64]) -> HintTimes {
        let known = || times.iter().copied().filter(|time| *time != NO_TIME);
        let (Some(latest), Some(earliest)) = (known().max(), known().min()) else {
            return HintTimes::None;
        };
        if times.iter().all(|time| *time == latest) {
            return HintTimes::Before { latest, shift: 0, steps: Vec::new() };
        }
        let most = u64::from(NO_STEPS - 1);
        let range = latest.abs_diff(earliest);
        let mut shift = 0;
        while range >> shift > most {
            shift += 1;
        }
        let steps = times.iter().map(|time| match *time {
            NO_TIME => NO_STEPS,
            time => (latest.abs_diff(time) >> shift) as u8,
        });
        HintTimes::Before { latest, shift, steps: steps.collect() }
    }

    /// By key, with the least time for none; empty: no key has one. `key`: the columns of the key, of as many values
    /// each. `None`: these are no times of it.
    pub fn read(&self, key: &[ArrayRef]) -> Option<Vec<i64>> {
        let count = key.first()?.len();
        match self {
            HintTimes::None => Some(Vec::new()),
            HintTimes::OfKey(at) => {
                let column = key.get(*at).filter(|column| column.data_type().is_temporal())?;
                let times = times_of(column).ok()?;
                Some(times.iter().map(|time| time.unwrap_or(NO_TIME)).collect())
            }
            HintTimes::Before { latest, steps, .. } if steps.is_empty() => {
                Some(vec![*latest; count])
            }
            HintTimes::Before { latest, shift, steps } => {
                if steps.len() != count || u32::from(*shift) >= u64::BITS {
                    return None;
                }
                let time = |steps: &u8| match *steps {
                    NO_STEPS => NO_TIME,
                    steps => latest.saturating_sub_unsigned(u64::from(steps) << shift),
                };
                Some(steps.iter().map(time).collect())
            }
        }
    }

    /// Bytes that are sent.
    pub fn bytes(&self) -> usize {
        match self {
            HintTimes::None | HintTimes::OfKey(_) => 0,
            HintTimes::Before { latest, steps, .. } if steps.is_empty() => size_of_val(latest),
            HintTimes::Before { latest, shift, steps } => {
                size_of_val(latest) + size_of_val(shift) + steps.len()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{Int64Array, TimestampMicrosecondArray};

    use super::*;

    fn key(count: usize) -> Vec<ArrayRef> {
        vec![Arc::new(Int64Array::from(vec![7; count]))]
    }

    #[test]
    fn times_are_never_too_early_and_near() {
        let hour = 3_600_000_000;
        for range in [0, 1, 254, 255, 256, 1_000_000, 24 * hour, i64::MAX] {
            let times: Vec<i64> = (0..256).map(|i| 5 - (range / 255) * i).collect();
            let sent = HintTimes::of(&times);
            assert!(sent.bytes() <= 9 + times.len());
            let read = sent.read(&key(times.len())).unwrap();
            for (time, read) in times.iter().zip(read) {
                let off = read.checked_sub(*time).unwrap();
                assert!(off >= 0 && off <= range / 127, "{read} for {time} of {range}");
            }
        }
        let ends = [i64::MIN + 1, i64::MAX, 0];
        let read = HintTimes::of(&ends).read(&key(3)).unwrap();
        assert!(read.iter().zip(ends).all(|(read, time)| *read >= time));
        assert_eq!(read[1], i64::MAX);
    }

    #[test]
    fn keys_without_a_time_have_none() {
        assert_eq!(HintTimes::of(&[]), HintTimes::None);
        assert_eq!(HintTimes::of(&[NO_TIME; 3]), HintTimes::None);
        let sent = HintTimes::of(&[90, NO_TIME, 40]);
        assert_eq!(sent.read(&key(3)), Some(vec![90, NO_TIME, 40]));
        assert_eq!(HintTimes::of(&[NO_TIME, 8]).read(&key(2)), Some(vec![NO_TIME, 8]));
    }

    #[test]
    fn one_time_for_all_is_sent_once_and_one_of_the_key_not_at_all() {
        let same = HintTimes::of(&[4; 200]);
        assert_eq!((same.bytes(), same.read(&key(200))), (8, Some(vec![4; 200])));
        let times = TimestampMicrosecondArray::from(vec![Some(3), None]);
        let columns = [key(2), vec![Arc::new(times)]].concat();
        let of_key = HintTimes::OfKey(1);
        assert_eq!((of_key.bytes(), of_key.read(&columns)), (0, Some(vec![3, NO_TIME])));
    }

    #[test]
    fn times_of_other_keys_are_none() {
        let few = HintTimes::Before { latest: 9, shift: 0, steps: vec![1, 2] };
        let wide = HintTimes::Before { latest: 9, shift: 200, steps: vec![1, 2, 3] };
        for wrong in [few, wide, HintTimes::OfKey(0), HintTimes::OfKey(1)] {
            assert_eq!(wrong.read(&key(3)), None, "{wrong:?}");
        }
        assert_eq!(HintTimes::None.read(&[]), None);
    }
}
