//! What goes wrong stays where it is (docs/design.md §1, §14): a job that hangs or fails delays no other,
//! bad input is a clear error, reads of state are batched, and sessions under load see what they must.

mod bad_input;
mod isolation;
mod large;
mod node;
mod protocol;
mod rounds;
mod s3;
mod stress;

#[path = "../crash/ledger.rs"]
mod ledger;
