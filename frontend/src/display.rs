//! Numbers for people: durations, bytes, counts, ratios.

use std::time::Duration;

/// `850 µs`, `12.3 ms`, `4.2 s`, `3 min 5 s`, `2 h 10 min`.
pub fn duration(d: Duration) -> String {
    let us = d.as_micros();
    match us {
        0..1_000 => format!("{us} µs"),
        1_000..1_000_000 => format!("{:.1} ms", us as f64 / 1e3),
        1_000_000..60_000_000 => format!("{:.1} s", us as f64 / 1e6),
        60_000_000..3_600_000_000 => format!("{} min {} s", d.as_secs() / 60, d.as_secs() % 60),
        _ => format!("{} h {} min", d.as_secs() / 3600, d.as_secs() / 60 % 60),
    }
}

/// Whole milliseconds, as [`duration`].
pub fn millis(ms: u64) -> String {
    match ms {
        0..1_000 => format!("{ms} ms"),
        _ => duration(Duration::from_millis(ms)),
    }
}

/// `512 B`, `1.5 KiB`, `3.0 GiB`.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if n < 1024 {
        return format!("{n} B");
    }
    let (mut value, mut unit) = (n as f64 / 1024.0, 0);
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        (value, unit) = (value / 1024.0, unit + 1);
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// `1,234,567`.
pub fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(c);
    }
    text
}

/// `99.5 %` of hits in all; `-` where there was nothing to hit.
pub fn ratio((hits, all): (u64, u64)) -> String {
    match all {
        0 => "-".to_owned(),
        _ => format!("{:.1} %", hits as f64 * 100.0 / all as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!(duration(Duration::from_micros(850)), "850 µs");
        assert_eq!(duration(Duration::from_micros(12_340)), "12.3 ms");
        assert_eq!(duration(Duration::from_secs(185)), "3 min 5 s");
        assert_eq!(millis(950), "950 ms");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(3 << 30), "3.0 GiB");
        assert_eq!(count(1_234_567), "1,234,567");
        assert_eq!(count(999), "999");
        assert_eq!(ratio((199, 200)), "99.5 %");
    }
}
