//! millrace-compactor
