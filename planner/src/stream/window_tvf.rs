//! TUMBLE and HOP: the shapes the binder gives them become the hop operator.

use datafusion::logical_expr::{Extension, Unnest};

use crate::stream::convert::{Converter, Result, in_view};
use crate::stream::plan::Stream;

impl Converter<'_> {
    pub(super) fn unnest(&self, _unnest: &Unnest) -> Result<Stream> {
        Err(in_view("unnest"))
    }

    pub(super) fn extension(&self, extension: &Extension) -> Result<Stream> {
        Err(in_view(format!("the operator {}", extension.node.name())))
    }
}
