//! What crosses the seams between roles (docs/design.md §6, §13): protobuf messages, which are also
//! the durable formats of the meta log, and the service traits that one process serves by direct
//! calls and a cluster over gRPC.
//!
//! Durable messages are written as prost structs, and in proto/ as text; what only crosses the network is generated from
//! there. Field tags are the format and never change meaning.

pub mod call_error;
pub mod catalog;
pub mod catalog_diff;
pub mod control;
pub mod dml;
pub mod log;
pub mod loopback;
pub mod operator;
pub mod proto;
pub mod read;
pub mod remote;
pub mod request;
pub mod rows;
pub mod sequence;
pub mod services;
pub mod source_poll;
pub mod store_id;
pub mod stream;
pub mod version;
pub mod vnode_set;
