//! What goes wrong stays where it is (docs/design.md §1, §14): a job that hangs or fails delays no other,
//! bad input is a clear error, reads of state are batched, and sessions under load see what they must.

mod arguments;
mod bad_input;
mod isolation;
mod large;
mod memory;
mod node;
mod pipeline;
mod protocol;
mod rounds;
mod s3;
mod serializable;
mod stress;
mod telling;

#[path = "../crash/ledger.rs"]
mod ledger;
