//! millrace-storage
