//! The requests of a recovery one by one: which waited for which, and what was read.

use std::ops::Range;

use millrace_rpc::version::JobVersion;
use millrace_storage::sim::RequestRecord;
use tokio::time::Instant;

use super::report::ms;

/// Prints the requests that the new owner began between the decision and the row. `before`: its rounds until then.
/// `jobs`: names and versions of the jobs whose state may have been read.
pub fn print(
    requests: &[RequestRecord],
    (decided, row): (Instant, Instant),
    before: u64,
    jobs: &[(&str, &JobVersion)],
) {
    println!("{:>6} {:>9} {:>8} {:>9}  request", "round", "began_ms", "took_ms", "bytes");
    for request in requests.iter().filter(|r| r.ended >= decided && r.began <= row) {
        println!(
            "{:>6} {:>9.1} {:>8.1} {:>9}  {:?} {}: {}",
            request.round.saturating_sub(before),
            ms(request.began.saturating_duration_since(decided)),
            ms(request.ended - request.began),
            request.range.as_ref().map_or(String::new(), |r| (r.end - r.start).to_string()),
            request.kind,
            request.location,
            what(request, jobs),
        );
    }
}

/// What lies where a request has read.
fn what(request: &RequestRecord, jobs: &[(&str, &JobVersion)]) -> String {
    let Some(range) = &request.range else { return "the object".to_owned() };
    let mut found = Vec::new();
    for (name, version) in jobs {
        let parts = parts_of(version, &request.location).filter(|(at, _)| overlap(at, range));
        found.extend(parts.map(|(_, part)| format!("{part} of {name}")));
    }
    if found.is_empty() { "something else".to_owned() } else { found.join(", ") }
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

/// What of a version lies in an object.
fn parts_of(version: &JobVersion, object: &str) -> impl Iterator<Item = (Range<u64>, String)> {
    let slices = version.tail.iter().filter(move |slice| slice.object == object);
    let slices = slices.map(|s| (s.offset..s.offset + s.length, "a slice of the tail".to_owned()));
    let runs = version.runs.iter().filter(move |run| run.object == object).flat_map(|run| {
        let end = run.offset + run.length;
        let opens = end - run.meta_length;
        let name = |what: &str| {
            let length = run.length;
            format!("{what} of run {:x} ({length} bytes, level {})", run.run_id, run.level)
        };
        let top = if run.top.is_empty() { "the index" } else { "the top index" };
        // Partitions of an index lie among them, at the end.
        [(run.offset..opens, name("blocks")), (opens..end, name(top))]
    });
    slices.chain(runs)
}
