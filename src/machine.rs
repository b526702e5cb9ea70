//! How much memory this process may use: the machine's, or less in a container.

use std::path::Path;

/// Bytes of the machine's memory where nothing can be read.
const UNKNOWN: usize = 4 << 30;

/// The least of the machine's memory and the limits of the control groups (cgroup v1 and v2) that the process is in.
pub fn memory() -> usize {
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let limit = group_limit(Path::new("/sys/fs/cgroup"), &groups);
    let total = total().unwrap_or(UNKNOWN);
    limit.map_or(total, |limit| total.min(usize::try_from(limit).unwrap_or(total)))
}

fn total() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|l| l.starts_with("MemTotal:"))?;
    let kib: usize = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}

/// The least limit of the groups in `groups` (the text of `/proc/self/cgroup`) and of those around them, below where
/// the hierarchies are mounted.
fn group_limit(mount: &Path, groups: &str) -> Option<u64> {
    let limits = groups.lines().filter_map(|line| {
        let mut parts = line.splitn(3, ':');
        let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        let unified = controllers.is_empty();
        match unified {
            true => least(mount, path, "memory.max"),
            false if controllers.split(',').any(|c| c == "memory") => {
                least(&mount.join("memory"), path, "memory.limit_in_bytes")
            }
            false => None,
        }
    });
    limits.min()
}

/// Within a container the path may be that of the host, of which only the top is mounted.
fn least(top: &Path, path: &str, file: &str) -> Option<u64> {
    let path = Path::new(path.trim_start_matches('/'));
    let limits = path.ancestors().filter_map(|group| {
        // "max" is no limit.
        std::fs::read_to_string(top.join(group).join(file)).ok()?.trim().parse().ok()
    });
    limits.min()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hierarchy(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        dir
    }

    #[test]
    fn the_least_limit_of_a_group_and_those_around_it_counts() {
        let dir = hierarchy(&[
            ("a/memory.max", "1000000\n"),
            ("a/b/memory.max", "max\n"),
            ("other/memory.max", "5\n"),
        ]);
        assert_eq!(group_limit(dir.path(), "0::/a/b\n"), Some(1_000_000));
        assert_eq!(group_limit(dir.path(), "0::/a/b/c\n"), Some(1_000_000));
        assert_eq!(group_limit(dir.path(), "0::/\n"), None);
    }

    #[test]
    fn a_container_sees_its_own_group_as_the_top() {
        let v2 = hierarchy(&[("memory.max", "268435456\n")]);
        assert_eq!(group_limit(v2.path(), "0::/\n"), Some(268_435_456));
        let v1 = hierarchy(&[("memory/memory.limit_in_bytes", "268435456\n")]);
        let groups = "5:cpu,cpuacct:/docker/1f\n4:memory:/docker/1f\n0::/docker/1f\n";
        assert_eq!(group_limit(v1.path(), groups), Some(268_435_456));
    }
}
