//! Backups. A *named* backup is a state of the log whose objects stay in the store until it is released ([`named`]);
//! beside them lies the state itself ([`files`]). The leader makes and releases them for an operator ([`service`]). What
//! it names, or the newest state, is copied into another store by whoever reads both ([`copy`]).

pub mod copy;
pub mod files;
pub mod named;
mod service;
