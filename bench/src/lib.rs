//! millrace-bench
