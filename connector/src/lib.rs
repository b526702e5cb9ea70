//! millrace-connector
