//! Descriptors of files and sockets: as many as the system gives, shared out so that clients cannot take those
//! with which the store, its cache and sources work.

/// More are of no use.
const MOST: u64 = 1 << 20;
/// For the store and for sources, at least, where the limit allows it.
const KEPT: usize = 256;

/// Connections that may be open at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shares {
    /// Of clients that have said who they are.
    pub sessions: usize,
    /// Of clients that have not.
    pub pending: usize,
    /// Of the HTTP port.
    pub http: usize,
}

impl Shares {
    /// What of `wanted` a process may have that may open `limit` files, of which it keeps `files` open.
    pub fn of(wanted: Shares, limit: usize, files: usize) -> Shares {
        let kept = (limit / 4).max(KEPT).saturating_add(files);
        // However little there is, some can come in.
        let sockets = limit.saturating_sub(kept).max(limit / 4).max(8);
        let http = wanted.http.min(sockets / 8);
        let pending = wanted.pending.min(sockets / 4);
        Shares { sessions: wanted.sessions.min(sockets - http - pending), pending, http }
    }
}

/// Raises this process's limit of open files to what the system allows it; the limit from now on.
pub fn raise_limit() -> usize {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the call writes to the structure, which outlives it.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } != 0 {
        // What every system has.
        return 1024;
    }
    let wanted = limit.rlim_max.min(MOST);
    if limit.rlim_cur < wanted {
        let raised = libc::rlimit { rlim_cur: wanted, ..limit };
        // SAFETY: the call only reads the structure.
        match unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raised) } {
            0 => limit = raised,
            _ => {
                let error = std::io::Error::last_os_error();
                tracing::warn!(%error, "the limit of open files could not be raised");
            }
        }
    }
    usize::try_from(limit.rlim_cur.min(MOST)).unwrap_or(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_leave_some_descriptors() {
        let wanted = Shares { sessions: 1000, pending: 200, http: 128 };
        assert_eq!(Shares::of(wanted, 65_536, 512), wanted);
        for (limit, files) in [(64, 0), (256, 0), (1024, 0), (1024, 512), (1024, 5000), (2000, 0)] {
            let shares = Shares::of(wanted, limit, files);
            let sockets = shares.sessions + shares.pending + shares.http;
            assert!(sockets <= limit * 3 / 4, "{limit}: {shares:?}");
            assert!(limit < 1024 || files > 0 || limit - sockets >= KEPT, "{limit}: {shares:?}");
            assert!(shares.sessions > 0 && shares.pending > 0 && shares.http > 0, "{shares:?}");
        }
    }
}
