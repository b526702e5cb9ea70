//! Answers compared with PostgreSQL's: the conformance suite, expressions, TPC-H. Each asks a server of its own one
//! statement after another, which leaves cores idle; in one binary they run beside each other.

mod conformance;
mod expressions;
mod tpch;
