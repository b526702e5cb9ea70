//! Inner loops by themselves: rows a second of one thread, over the real operators and the real store
//! in memory.

use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::array::{ArrayRef, BinaryArray, Int64Array, RecordBatch, StringArray};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use millrace_common::access::AccessClass;
use millrace_common::hash::{hash_columns, vnodes};
use millrace_common::keys::KeyCodec;
use millrace_common::{DeltaChunk, RelationId, TableId};
use millrace_executor::error_sink::ErrorSink;
use millrace_executor::memory::MemoryGovernor;
use millrace_executor::operator::{Operator, OperatorContext, Output};
use millrace_executor::options::ExecOptions;
use millrace_executor::stats::OperatorMetrics;
use millrace_functions::aggregate_kind::AggFunc;
use millrace_graph::state::accumulator_schema;
use millrace_graph::{AggCall, JoinKind, JoinSide, Node, SideState};
use millrace_rpc::version::JobVersion;
use millrace_storage::object::open_object_store;
use millrace_storage::{
    JobStore, Lookup, RowStorage, StateStore, StoreOptions, TableDesc, TableWriter,
};
use serde::Serialize;

/// Rows of a chunk, as sources make them.
const CHUNK_ROWS: usize = 8_192;
const EPOCH_CHUNKS: usize = 32;

#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// Seconds each measurement runs
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Distinct keys
    #[arg(long, default_value_t = 100_000)]
    keys: i64,
}

#[derive(Serialize)]
struct Rate<'a> {
    micro: &'a str,
    rows_per_s: f64,
}

pub async fn run(args: &Args) -> Result<(), String> {
    let chunks = chunks(args.keys).map_err(|e| e.to_string())?;
    hashing(args, &chunks)?;
    encoding(args, &chunks)?;
    aggregate(args, &chunks).await?;
    join(args, &chunks).await?;
    seal(args, &chunks).await?;
    build_runs(args, &chunks).await?;
    multi_get(args, &chunks).await
}

/// Runs `work` (which says how many rows it did) until the time is up.
fn measure(
    args: &Args,
    name: &str,
    mut work: impl FnMut() -> Result<usize, String>,
) -> Result<(), String> {
    let limit = Duration::from_secs_f64(args.seconds);
    work()?;
    let started = Instant::now();
    let mut rows = 0;
    while started.elapsed() < limit {
        rows += work()?;
    }
    report(name, rows, started.elapsed());
    Ok(())
}

fn report(name: &str, rows: usize, took: Duration) {
    let rate = Rate { micro: name, rows_per_s: rows as f64 / took.as_secs_f64() };
    println!("{:28} {:>12.0} rows/s", rate.micro, rate.rows_per_s);
    if let Ok(line) = serde_json::to_string(&rate) {
        println!("{line}");
    }
}

fn schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new("key", DataType::Int64, true),
        Field::new("amount", DataType::Int64, true),
        Field::new("text", DataType::Utf8, true),
    ]))
}

/// An epoch of rows; keys are drawn at random, reproducibly.
fn chunks(keys: i64) -> Result<Vec<DeltaChunk>, arrow::error::ArrowError> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut draw = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    (0..EPOCH_CHUNKS)
        .map(|_| {
            let key = Int64Array::from_iter_values(
                (0..CHUNK_ROWS).map(|_| (draw() % keys as u64) as i64),
            );
            let amount =
                Int64Array::from_iter_values((0..CHUNK_ROWS).map(|_| (draw() % 10_000) as i64));
            let text =
                StringArray::from_iter_values((0..CHUNK_ROWS).map(|_| format!("{:016x}", draw())));
            let columns: Vec<ArrayRef> = vec![Arc::new(key), Arc::new(amount), Arc::new(text)];
            Ok(DeltaChunk::inserts(RecordBatch::try_new(schema(), columns)?))
        })
        .collect()
}

fn hashing(args: &Args, chunks: &[DeltaChunk]) -> Result<(), String> {
    let columns = |c: &DeltaChunk| c.batch.columns().to_vec();
    measure(args, "hash one BIGINT", || {
        for chunk in chunks {
            std::hint::black_box(
                hash_columns(&columns(chunk)[..1], chunk.num_rows()).map_err(text)?,
            );
        }
        Ok(chunks.len() * CHUNK_ROWS)
    })?;
    measure(args, "hash BIGINT, BIGINT, TEXT", || {
        for chunk in chunks {
            std::hint::black_box(hash_columns(&columns(chunk), chunk.num_rows()).map_err(text)?);
        }
        Ok(chunks.len() * CHUNK_ROWS)
    })
}

fn encoding(args: &Args, chunks: &[DeltaChunk]) -> Result<(), String> {
    let codec = KeyCodec::for_columns(&schema(), &[0]).map_err(text)?;
    measure(args, "storage keys of one BIGINT", || {
        for chunk in chunks {
            std::hint::black_box(keys_of(&codec, chunk)?);
        }
        Ok(chunks.len() * CHUNK_ROWS)
    })
}

fn keys_of(codec: &KeyCodec, chunk: &DeltaChunk) -> Result<BinaryArray, String> {
    let columns = &chunk.batch.columns()[..1];
    let hashes = hash_columns(columns, chunk.num_rows()).map_err(text)?;
    codec.storage_keys(&vnodes(&hashes), columns).map_err(text)
}

/// A job with these tables, in memory.
async fn store(tables: Vec<(SchemaRef, RowStorage, AccessClass)>) -> Result<Arc<JobStore>, String> {
    let objects = open_object_store("memory:").map_err(text)?;
    let store = StateStore::open(StoreOptions::new(objects, 1)).await.map_err(text)?;
    let describe =
        |(i, (value_schema, storage, class)): (usize, (SchemaRef, RowStorage, AccessClass))| {
            TableDesc {
                id: TableId(i as u32),
                name: format!("table {i}"),
                value_schema,
                storage,
                class,
                relation: false,
                retention: None,
            }
        };
    let tables = tables.into_iter().enumerate().map(describe).collect();
    store.open_job(RelationId(1), tables, &JobVersion::default()).await.map_err(text)
}

fn operator(
    node: &Node,
    inputs: &[SchemaRef],
    job: &Arc<JobStore>,
) -> Result<Box<dyn Operator>, String> {
    let writers = |local: usize| Ok(job.writer(TableId(local as u32))?);
    let context = OperatorContext {
        job: RelationId(1),
        task: 0,
        vnodes: 0..256,
        event_time: Vec::new(),
        writers: &writers,
        options: Arc::new(ExecOptions { cache_bytes: 4 << 30, ..ExecOptions::default() }),
        errors: Arc::new(ErrorSink::default()),
        metrics: OperatorMetrics::new(0, 0, "micro"),
        governor: MemoryGovernor::new(8 << 30),
        lookahead: Arc::default(),
        shed: Arc::default(),
        clock: job.env().clone(),
        restored: millrace_common::Epoch::ZERO,
        first_arrival: 0,
    };
    millrace_executor::operators::build(node, inputs, &context).map_err(text)
}

/// An epoch of an operator: all chunks, then the barrier and the seal.
async fn epoch(op: &mut dyn Operator, chunks: &[(usize, &DeltaChunk)]) -> Result<(), String> {
    let mut out = Output::default();
    for (port, chunk) in chunks {
        op.push(*port, DeltaChunk::clone(chunk), &mut out).map_err(text)?;
        while op.is_pending() {
            op.progress(&mut out).await.map_err(text)?;
        }
        std::hint::black_box(out.take());
    }
    op.barrier(&mut out).await.map_err(text)?;
    std::hint::black_box(out.take());
    let mut sealed = Vec::new();
    op.seal(&mut sealed).map_err(text)
}

async fn timed_epochs(
    args: &Args,
    name: &str,
    op: &mut dyn Operator,
    chunks: &[(usize, &DeltaChunk)],
) -> Result<(), String> {
    let limit = Duration::from_secs_f64(args.seconds);
    let started = Instant::now();
    let mut rows = 0;
    while started.elapsed() < limit {
        epoch(op, chunks).await?;
        rows += chunks.iter().map(|c| c.1.num_rows()).sum::<usize>();
    }
    report(name, rows, started.elapsed());
    Ok(())
}

async fn aggregate(args: &Args, chunks: &[DeltaChunk]) -> Result<(), String> {
    let call = |func, arg, output_type| AggCall {
        func,
        arg,
        distinct: false,
        filter: None,
        output_type,
        state: None,
    };
    let calls = vec![
        call(AggFunc::Count, None, DataType::Int64),
        call(AggFunc::Max, Some(1), DataType::Int64),
    ];
    let state = accumulator_schema(&[0], &calls, &schema());
    let job = store(vec![(state, RowStorage::Keyed, AccessClass::PointUpdate)]).await?;
    let fields = ["key", "count", "max"].map(|n| Field::new(n, DataType::Int64, true));
    let node = Node {
        op: millrace_graph::Operator::Aggregate(millrace_graph::Aggregate {
            group: vec![0],
            vnode: vec![0],
            calls,
            table: 0,
        }),
        inputs: vec![0],
        schema: Arc::new(Schema::new(fields.to_vec())),
        append_only: false,
        marks: vec![],
    };
    let mut op = operator(&node, &[schema()], &job)?;
    let input: Vec<_> = chunks.iter().map(|c| (0, c)).collect();
    timed_epochs(args, "aggregate count, max", op.as_mut(), &input).await
}

async fn join(args: &Args, chunks: &[DeltaChunk]) -> Result<(), String> {
    let append = || (schema(), RowStorage::Append, AccessClass::RangeRead);
    let job = store(vec![append(), append()]).await?;
    let side = |table| JoinSide {
        keys: vec![0],
        vnode: vec![0],
        state: SideState {
            table,
            storage: RowStorage::Append,
            unique_key: Vec::new(),
            unique_per_key: false,
        },
    };
    let both = schema().fields().iter().chain(schema().fields()).cloned().collect::<Vec<_>>();
    let node = Node {
        op: millrace_graph::Operator::Join(millrace_graph::Join {
            kind: JoinKind::Inner,
            left: side(0),
            right: side(1),
            residual: None,
            null_aware: false,
            null_equals_null: false,
            output: (0..both.len()).collect(),
        }),
        inputs: vec![0, 1],
        schema: Arc::new(Schema::new(both)),
        append_only: true,
        marks: vec![],
    };
    let mut op = operator(&node, &[schema(), schema()], &job)?;
    // One row in sixteen on the left, so that pairs stay about as many as rows.
    let left: Vec<DeltaChunk> = chunks.iter().map(|c| c.slice(0, CHUNK_ROWS / 16)).collect();
    epoch(op.as_mut(), &left.iter().map(|c| (0, c)).collect::<Vec<_>>()).await?;
    let input: Vec<_> = chunks.iter().map(|c| (1, c)).collect();
    timed_epochs(args, "join, about one pair a row", op.as_mut(), &input).await
}

async fn seal(args: &Args, chunks: &[DeltaChunk]) -> Result<(), String> {
    let job = store(vec![(schema(), RowStorage::Keyed, AccessClass::PointUpdate)]).await?;
    let codec = KeyCodec::for_columns(&schema(), &[0]).map_err(text)?;
    let keys = chunks.iter().map(|c| keys_of(&codec, c)).collect::<Result<Vec<_>, _>>()?;
    let mut writer = job.writer(TableId(0)).map_err(text)?;
    measure(args, "memtable write and seal", || {
        for (key, chunk) in keys.iter().zip(chunks) {
            writer.write(key.clone(), None, chunk.batch.clone());
        }
        std::hint::black_box(writer.seal().map_err(text)?);
        // A new writer: sealed runs that nobody publishes would pile up.
        writer = job.writer(TableId(0)).map_err(text)?;
        Ok(chunks.len() * CHUNK_ROWS)
    })
}

/// A job whose table holds the chunks in an open memtable, and what encodes its keys.
async fn written(chunks: &[DeltaChunk]) -> Result<(Arc<JobStore>, TableWriter, KeyCodec), String> {
    let job = store(vec![(schema(), RowStorage::Keyed, AccessClass::PointUpdate)]).await?;
    let codec = KeyCodec::for_columns(&schema(), &[0]).map_err(text)?;
    let mut writer = job.writer(TableId(0)).map_err(text)?;
    for chunk in chunks {
        writer.write(keys_of(&codec, chunk)?, None, chunk.batch.clone());
    }
    Ok((job, writer, codec))
}

/// From sealed rows to bytes in the (memory) store: blocks, index, filter.
async fn build_runs(args: &Args, chunks: &[DeltaChunk]) -> Result<(), String> {
    let (job, mut writer, _) = written(chunks).await?;
    let run = writer.seal().map_err(text)?.pop().ok_or("nothing was sealed")?;
    let limit = Duration::from_secs_f64(args.seconds);
    let started = Instant::now();
    let (mut rows, mut commit) = (0, 0);
    while started.elapsed() < limit {
        commit += 1;
        std::hint::black_box(job.persist(commit, vec![run.clone()]).await.map_err(text)?);
        rows += run.num_rows();
    }
    report("persist", rows, started.elapsed());
    Ok(())
}

async fn multi_get(args: &Args, chunks: &[DeltaChunk]) -> Result<(), String> {
    let (_job, mut writer, codec) = written(chunks).await?;
    std::hint::black_box(writer.seal().map_err(text)?);
    let questions = chunks
        .iter()
        .map(|c| keys_of(&codec, &c.slice(0, 1_024)))
        .collect::<Result<Vec<_>, _>>()?;
    measure(args, "multi_get of 1024, memory", || {
        for keys in &questions {
            match writer.multi_get(keys.clone()) {
                Lookup::Ready(found) => drop(std::hint::black_box(found)),
                Lookup::Pending(_) => return Err("memory alone must answer".to_string()),
            }
        }
        Ok(questions.len() * 1_024)
    })
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}
