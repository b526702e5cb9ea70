//! What crosses the seams between roles (docs/design.md §6, §13): protobuf messages, which are also
//! the durable formats of the meta log, and the service traits that one process serves by direct
//! calls and a cluster over gRPC.
//!
//! Messages are written as prost structs: field tags are the format and never change meaning.

pub mod catalog;
pub mod catalog_diff;
pub mod log;
pub mod proto;
pub mod sequence;
pub mod services;
pub mod stream;
pub mod version;
pub mod vnode_set;
