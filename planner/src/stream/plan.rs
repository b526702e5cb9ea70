//! The stream algebra: what a logical plan becomes before it is cut into fragments.
//!
//! A tree of operators over columns by position, with compiled expressions. It is the graph's
//! algebra without ids: no tables, no fragments, and exchanges only after the pass that places them.
//! Every pass takes a tree and gives a tree, so that each can be tested alone.

use std::sync::Arc;

use arrow::datatypes::{DataType, Field, FieldRef, Schema, SchemaRef, TimeUnit};
use arrow::record_batch::RecordBatch;
use millrace_functions::expr;
use millrace_functions::expr::ExprRef;
use millrace_functions::window_call::RankFunction;
use millrace_graph::Expand;
use millrace_rpc::catalog::Relation;

/// A subtree: an operator, its inputs in port order, and the schema of what it puts out.
#[derive(Clone, Debug)]
pub struct Stream {
    pub op: Op,
    pub inputs: Vec<Stream>,
    pub schema: SchemaRef,
}

#[derive(Clone, Debug)]
pub enum Op {
    /// A relation's content and changes; `columns` are positions in the relation.
    Scan {
        relation: Arc<Relation>,
        columns: Vec<usize>,
    },
    Values {
        batch: RecordBatch,
    },
    Filter {
        predicate: ExprRef,
    },
    Project {
        exprs: Vec<ExprRef>,
    },
    Union,
    Hop {
        time_column: usize,
        size_us: i64,
        slide_us: i64,
        offset_us: i64,
    },
    Repeat {
        times_column: usize,
    },
    /// See `millrace_graph::Operator::Unnest`.
    Unnest {
        lists: Vec<usize>,
        keep_empty: bool,
    },
    Expand(Expand),
    Aggregate(Aggregate),
    Join(Join),
    /// Left rows meet the right ones of the time when they are processed (see `millrace_graph::Lookup`); inner or
    /// left outer.
    Lookup(Join),
    TopN(TopN),
    Window(Window),
    /// See `millrace_graph::Operator::WindowClose`.
    WindowClose(EventTimeBuffer),
    /// See `millrace_graph::Operator::Stamp`.
    Stamp {
        add_us: i64,
    },
    /// See `millrace_graph::Operator::TemporalUpperBound`.
    TemporalUpperBound(EventTimeBuffer),
    /// See `millrace_graph::Operator::TemporalLowerBound`.
    TemporalLowerBound(EventTimeBuffer),
    /// Rows move to the owner of their hash; no columns: to the only task.
    Exchange {
        hash: Vec<usize>,
    },
}

/// The column that a call puts out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    pub name: String,
    pub nullable: bool,
}

// The graph's operators before their tables are known. Exchange placement sets their `vnode`.
pub type Aggregate = millrace_graph::Aggregate<Named, ()>;
pub type Call = millrace_graph::AggCall<Named>;
pub type Join = millrace_graph::Join<()>;
pub type JoinSide = millrace_graph::JoinSide<()>;
pub type TopN = millrace_graph::TopN<Identity>;
pub type Window = millrace_graph::Window<Identity>;
pub type EventTimeBuffer = millrace_graph::EventTimeBuffer<()>;

/// Columns that, with group and order, make a row unique; set by the pass `identity`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity(pub Vec<usize>);

fn call_field(call: &Call) -> FieldRef {
    Arc::new(Field::new(&call.state.name, call.output_type.clone(), call.state.nullable))
}

fn joined(left: &Stream, right: &Stream, join: &Join) -> SchemaRef {
    let full = join.kind.output_fields(&left.schema, &right.schema);
    let fields: Vec<FieldRef> = join.output.iter().map(|&i| Arc::clone(&full[i])).collect();
    Arc::new(Schema::new(fields))
}

/// Constructors compute the output schema.
impl Stream {
    pub fn scan(relation: Arc<Relation>, schema: SchemaRef, columns: Vec<usize>) -> Stream {
        Stream { op: Op::Scan { relation, columns }, inputs: vec![], schema }
    }

    pub fn values(batch: RecordBatch) -> Stream {
        let schema = batch.schema();
        Stream { op: Op::Values { batch }, inputs: vec![], schema }
    }

    pub fn filter(self, predicate: ExprRef) -> Stream {
        let schema = Arc::clone(&self.schema);
        Stream { op: Op::Filter { predicate }, inputs: vec![self], schema }
    }

    /// A projection with named columns. What is computed may be NULL (a failing expression is), what
    /// is only passed on keeps its nullability.
    pub fn project(self, columns: Vec<(ExprRef, String)>) -> datafusion::common::Result<Stream> {
        let mut exprs = Vec::with_capacity(columns.len());
        let mut fields = Vec::with_capacity(columns.len());
        for (e, name) in columns {
            fields.push(expr::output_field(&e, &self.schema, &name)?);
            exprs.push(e);
        }
        let schema = Arc::new(Schema::new(fields));
        Ok(Stream { op: Op::Project { exprs }, inputs: vec![self], schema })
    }

    /// Only some columns, by position.
    pub fn select(self, columns: &[usize]) -> Stream {
        let fields: Vec<FieldRef> =
            columns.iter().map(|&c| Arc::clone(&self.schema.fields()[c])).collect();
        let exprs = columns.iter().map(|&c| expr::column(&self.schema, c)).collect();
        let schema = Arc::new(Schema::new(fields));
        Stream { op: Op::Project { exprs }, inputs: vec![self], schema }
    }

    pub fn union(inputs: Vec<Stream>, schema: SchemaRef) -> Stream {
        Stream { op: Op::Union, inputs, schema }
    }

    pub fn hop(self, time_column: usize, size_us: i64, slide_us: i64, offset_us: i64) -> Stream {
        let time = self.schema.field(time_column).data_type().clone();
        let mut fields: Vec<FieldRef> = self.schema.fields().iter().cloned().collect();
        for name in ["window_start", "window_end"] {
            fields.push(Arc::new(Field::new(name, time.clone(), false)));
        }
        Stream {
            op: Op::Hop { time_column, size_us, slide_us, offset_us },
            inputs: vec![self],
            schema: Arc::new(Schema::new(fields)),
        }
    }

    pub fn repeat(self, times_column: usize) -> Stream {
        let schema = Arc::clone(&self.schema);
        Stream { op: Op::Repeat { times_column }, inputs: vec![self], schema }
    }

    /// The elements take the places of the lists.
    pub fn unnest(self, lists: Vec<usize>, keep_empty: bool) -> Stream {
        let fields = self.schema.fields().iter().enumerate().map(|(i, f)| match f.data_type() {
            DataType::List(item) if lists.contains(&i) => {
                Arc::new(Field::new(f.name(), item.data_type().clone(), true))
            }
            _ => Arc::clone(f),
        });
        let schema = Arc::new(Schema::new(fields.collect::<Vec<FieldRef>>()));
        Stream { op: Op::Unnest { lists, keep_empty }, inputs: vec![self], schema }
    }

    pub fn expand(self, expand: Expand) -> Stream {
        let own = self.schema.fields();
        let copies =
            expand.columns.iter().map(|&c| Arc::new(own[c].as_ref().clone().with_nullable(true)));
        let id = Arc::new(Field::new("grouping_id", DataType::Int64, false));
        let fields: Vec<FieldRef> = own.iter().cloned().chain(copies).chain([id]).collect();
        let schema = Arc::new(Schema::new(fields));
        Stream { op: Op::Expand(expand), inputs: vec![self], schema }
    }

    pub fn aggregate(self, group: Vec<usize>, calls: Vec<Call>) -> Stream {
        let groups = group.iter().map(|&g| Arc::clone(&self.schema.fields()[g]));
        let fields: Vec<FieldRef> = groups.chain(calls.iter().map(call_field)).collect();
        let schema = Arc::new(Schema::new(fields));
        let op = Op::Aggregate(Aggregate { group, calls, vnode: vec![], table: () });
        Stream { op, inputs: vec![self], schema }
    }

    pub fn join(self, right: Stream, join: Join) -> Stream {
        let schema = joined(&self, &right, &join);
        Stream { op: Op::Join(join), inputs: vec![self, right], schema }
    }

    pub fn lookup(self, right: Stream, join: Join) -> Stream {
        let schema = joined(&self, &right, &join);
        Stream { op: Op::Lookup(join), inputs: vec![self, right], schema }
    }

    pub fn top_n(self, top: TopN) -> Stream {
        let mut fields: Vec<FieldRef> = self.schema.fields().iter().cloned().collect();
        if top.emit_rank {
            let name = match top.rank {
                RankFunction::RowNumber => "row_number",
                RankFunction::Rank => "rank",
                RankFunction::DenseRank => "dense_rank",
            };
            fields.push(Arc::new(Field::new(name, DataType::Int64, false)));
        }
        let schema = Arc::new(Schema::new(fields));
        Stream { op: Op::TopN(top), inputs: vec![self], schema }
    }

    pub fn window(self, window: Window) -> Stream {
        let mut fields: Vec<FieldRef> = self.schema.fields().iter().cloned().collect();
        for call in &window.calls {
            let (name, output) = (&call.function, call.output_type.clone());
            fields.push(Arc::new(Field::new(name, output, call.numbering.is_none())));
        }
        let schema = Arc::new(Schema::new(fields));
        Stream { op: Op::Window(window), inputs: vec![self], schema }
    }

    pub fn window_close(self, column: usize) -> Stream {
        let schema = Arc::clone(&self.schema);
        let op = Op::WindowClose(EventTimeBuffer { column, vnode: vec![], table: () });
        Stream { op, inputs: vec![self], schema }
    }

    pub fn stamp(self, add_us: i64) -> Stream {
        let time = DataType::Timestamp(TimeUnit::Microsecond, None);
        let stamp = Arc::new(Field::new("expires", time, false));
        let fields: Vec<FieldRef> = self.schema.fields().iter().cloned().chain([stamp]).collect();
        let schema = Arc::new(Schema::new(fields));
        Stream { op: Op::Stamp { add_us }, inputs: vec![self], schema }
    }

    pub fn expire(self, column: usize) -> Stream {
        let schema = Arc::clone(&self.schema);
        let op = Op::TemporalUpperBound(EventTimeBuffer { column, vnode: vec![], table: () });
        Stream { op, inputs: vec![self], schema }
    }

    pub fn appear(self, column: usize) -> Stream {
        let schema = Arc::clone(&self.schema);
        let op = Op::TemporalLowerBound(EventTimeBuffer { column, vnode: vec![], table: () });
        Stream { op, inputs: vec![self], schema }
    }

    pub fn exchange(self, hash: Vec<usize>) -> Stream {
        let schema = Arc::clone(&self.schema);
        Stream { op: Op::Exchange { hash }, inputs: vec![self], schema }
    }

    pub fn width(&self) -> usize {
        self.schema.fields().len()
    }

    /// The same operator over other inputs, for passes that rebuild from below.
    pub fn map_inputs<E>(
        self,
        mut f: impl FnMut(Stream) -> Result<Stream, E>,
    ) -> Result<Stream, E> {
        let inputs = self.inputs.into_iter().map(&mut f).collect::<Result<Vec<_>, E>>()?;
        Ok(Stream { op: self.op, inputs, schema: self.schema })
    }
}
