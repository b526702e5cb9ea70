//! millrace-meta
