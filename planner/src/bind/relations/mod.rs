//! Where rows come from: tables and views of the catalog, functions in FROM, ASOF joins, VALUES and set operations.
//!
//! The [`provider`] answers what `SqlToRel` asks of the catalog; what is no plain scan becomes an ordinary
//! plan that batch runs and views maintain.

pub mod asof;
pub mod from_items;
pub(super) mod plan_size;
pub mod provider;
pub(super) mod series;
pub mod set_operations;
pub mod table_functions;
pub mod unions;
pub mod values;
pub mod window_tvf;
