//! The binder's rewrites, as two ordered lists: those of the AST ([`ast`]), which run before a query is
//! planned, and those of the logical plan ([`plan`]).
//!
//! Each rewrite has a name and stands in the file of its subject. An entry of a list says which rewrites it
//! needs to stand behind, and why. Beside the lists run only parts that planning needs earlier: USING of a query with
//! DISTINCT ([`super::ordering`]), and the types of set operations in FROM and in views ([`super::relations`]).

pub mod ast;
pub mod plan;

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
