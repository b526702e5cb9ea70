//! What a person calls jobs and processes.

use millrace_rpc::operator::{ClusterOverview, JobOverview, WorkerOverview};

use super::incarnation;
use super::listing::plain;

pub fn full_name(schema: &str, name: &str) -> String {
    format!("{schema}.{name}")
}

/// A job by its id, its name, or its name with its schema.
pub fn job_of<'a>(overview: &'a ClusterOverview, text: &str) -> Result<&'a JobOverview, String> {
    let id: Option<u32> = text.parse().ok();
    let is_named = |job: &&JobOverview| {
        Some(job.id) == id || job.name == text || full_name(&job.schema, &job.name) == text
    };
    let found: Vec<&JobOverview> = overview.jobs.iter().filter(is_named).collect();
    match found[..] {
        [job] => Ok(job),
        [] => Err(format!(
            "there is no job \"{text}\". millrace ctl jobs shows those that there are: tables, materialized views, \
             indexes and sinks"
        )),
        [..] => {
            let names: Vec<String> =
                found.iter().map(|job| plain(&full_name(&job.schema, &job.name))).collect();
            Err(format!("\"{text}\" is the name of several jobs: {}", names.join(", ")))
        }
    }
}

/// A process by its incarnation or its address.
pub fn worker_of<'a>(
    overview: &'a ClusterOverview,
    text: &str,
) -> Result<&'a WorkerOverview, String> {
    let number: Option<u64> = text.parse().ok();
    let mut workers = overview.workers.iter();
    let found = workers.find(|w| Some(incarnation(w)) == number || w.address == text);
    found.ok_or_else(|| {
        format!("there is no process \"{text}\". millrace ctl workers shows those that there are")
    })
}

#[cfg(test)]
mod tests {
    use millrace_rpc::control::ProcessReport;

    use super::*;

    fn overview() -> ClusterOverview {
        let job = |id, schema: &str, name: &str| JobOverview {
            id,
            schema: schema.into(),
            name: name.into(),
            ..JobOverview::default()
        };
        let report = ProcessReport { incarnation: 12, ..ProcessReport::default() };
        let worker = WorkerOverview {
            report: Some(report),
            address: "c:4571".into(),
            ..WorkerOverview::default()
        };
        let jobs = vec![job(1, "public", "t"), job(2, "a", "v"), job(3, "b", "v")];
        ClusterOverview { jobs, workers: vec![worker], ..ClusterOverview::default() }
    }

    #[test]
    fn jobs_are_called_by_id_or_name() {
        let overview = overview();
        let id = |text: &str| job_of(&overview, text).map(|job| job.id);
        assert_eq!((id("1"), id("t"), id("public.t"), id("b.v")), (Ok(1), Ok(1), Ok(1), Ok(3)));
        assert!(id("v").unwrap_err().contains("a.v, b.v"));
        assert!(id("public.v").unwrap_err().contains("no job \"public.v\""));
    }

    #[test]
    fn processes_are_called_by_incarnation_or_address() {
        let overview = overview();
        let worker = |text: &str| worker_of(&overview, text).map(incarnation);
        assert_eq!((worker("12"), worker("c:4571")), (Ok(12), Ok(12)));
        assert!(worker("13").unwrap_err().contains("no process \"13\""));
    }
}
