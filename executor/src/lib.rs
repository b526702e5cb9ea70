//! millrace-executor
