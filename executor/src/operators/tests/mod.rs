//! Promises of the operators with state, as properties: for random histories, chunkings, epochs,
//! cache sizes and orders of completion, the output accumulated at every barrier is the query over the
//! input accumulated so far; synchronous and asynchronous state access agree; nothing stays behind.

mod eviction;
mod fake;
mod history;
mod keyed;
mod lookup;
mod on_arrival;
mod stateful;
mod values;
