//! millrace-sqllogictest
