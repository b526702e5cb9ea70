//! The lines of the operators that end a job. They exist in graphs only.

use millrace_graph as graph;
use millrace_rpc::catalog::RowStorage;

use super::{LineContext, OperatorLine};
use crate::explain::text::list;

impl OperatorLine for graph::Materialize {
    fn line(&self, at: &mut LineContext<'_>) -> String {
        let Some(layout) = at.graph.map(|g| &g.output) else { return "Materialize".into() };
        let key = list(&layout.schema, &layout.key);
        let (stored, how) = match layout.storage {
            RowStorage::Keyed => (format!("({key})"), format!("key ({key})")),
            RowStorage::Multiset => ("(all columns)".into(), "multiset".into()),
            RowStorage::Append => ("(sequence)".into(), "append".into()),
        };
        at.keys.push((0, stored));
        let vnode = match layout.distribution.as_slice() {
            [] => String::new(),
            columns => format!(", vnode ({})", list(&layout.schema, columns)),
        };
        format!("Materialize {how}{vnode}")
    }
}

impl OperatorLine for graph::Blackhole {
    fn line(&self, _: &mut LineContext<'_>) -> String {
        "Blackhole".into()
    }
}

impl OperatorLine for graph::Sink {
    fn line(&self, at: &mut LineContext<'_>) -> String {
        let Some(layout) = at.graph.map(|g| &g.output) else { return "Sink".into() };
        match (layout.append_only, layout.storage) {
            (true, _) => "Sink append".into(),
            (false, RowStorage::Keyed) => {
                format!("Sink key ({})", list(&layout.schema, &layout.key))
            }
            (false, RowStorage::Multiset | RowStorage::Append) => "Sink multiset".into(),
        }
    }
}
