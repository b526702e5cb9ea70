//! SQL text → AST → DataFusion logical plan → stream plan → job graph (docs/design.md §5).

pub mod graph;
