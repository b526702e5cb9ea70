//! Where in the text stands what an error is about, and errors that are told from the text alone.

pub(super) mod error_spans;
pub mod locate;
pub mod misplaced_calls;
pub mod operator_spans;
