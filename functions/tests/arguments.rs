//! Every scalar function with arguments at the edges of their types: it answers, or says why not, in bounded time and
//! memory, and does not panic. No function may run or allocate by the value of an argument without a bound.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicIsize, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use arrow::datatypes::{DataType, Field, FieldRef};
use datafusion::common::ScalarValue;
use datafusion::common::config::ConfigOptions;
use datafusion::logical_expr::type_coercion::functions::fields_with_udf;
use datafusion::logical_expr::{ColumnarValue, ReturnFieldArgs, ScalarFunctionArgs, ScalarUDF};
use millrace_common::SqlType;
use millrace_functions::{call, functions, size_limits};

#[path = "arguments/values.rs"]
mod values;

/// One call may take this long before it counts as one without end: far more than any takes.
const LONGEST: Duration = Duration::from_secs(20);
/// And have this much memory at a time.
const MOST_BYTES: isize = 192 << 20;
/// What queries have, for functions that fit themselves to it.
const QUERY_MEMORY: usize = 64 << 20;
/// Who asks for more than this never gets an answer, so that a failing test does not take the machine with it.
const LAST_BYTES: isize = 8 << 30;
/// Of each list of types so many lists of values are tried.
const CALLS: usize = 100;
/// Of a function so many calls, at most, or a few of each list.
const OF_A_FUNCTION: usize = 3_000;
const FEW: usize = 8;
const MOST_ARGUMENTS: usize = 5;
/// The stack of the server's threads (`millrace_frontend::STACK_BYTES`).
const STACK_BYTES: usize = 32 << 20;

/// Counts the bytes that the calling thread holds.
struct Counting;

static WORKING: AtomicIsize = AtomicIsize::new(0);

thread_local! {
    static COUNTED: Cell<bool> = const { Cell::new(false) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    if !COUNTED.try_with(Cell::get).unwrap_or(false) {
        return;
    }
    let live = WORKING.fetch_add(bytes, Ordering::Relaxed) + bytes;
    let _ = PEAK.try_with(|peak| peak.set(peak.get().max(live)));
    if live >= LAST_BYTES {
        // The test's own thread says what has been called, and ends the process.
        loop {
            std::thread::park();
        }
    }
}

// SAFETY: everything is left to the system's allocator; counting neither allocates nor unwinds.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count(new_size as isize - layout.size() as isize);
        // SAFETY: the caller's promise.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What is being called.
#[derive(Default)]
struct Progress {
    calls: AtomicUsize,
    current: Mutex<(String, Vec<ScalarValue>)>,
    done: AtomicBool,
}

impl Progress {
    fn shown(&self) -> String {
        let current = self.current.lock().unwrap_or_else(|e| e.into_inner());
        shown(&current.0, &current.1)
    }
}

fn shown(name: &str, args: &[ScalarValue]) -> String {
    let one = |v: &ScalarValue| {
        let text = format!("{v:?}");
        match text.char_indices().nth(120) {
            Some((end, _)) => format!("{}… ({} bytes)", &text[..end], text.len()),
            None => text,
        }
    };
    format!("{name}({})", args.iter().map(one).collect::<Vec<_>>().join(", "))
}

/// The lists of types that a function is tried with.
fn type_lists(udf: &ScalarUDF) -> Vec<Vec<DataType>> {
    if let Some(declared) = call::declared_types(udf) {
        return declared.into_iter().flat_map(|list| declared_lists(&list)).collect();
    }
    let mut lists: Vec<Vec<DataType>> = Vec::new();
    let mut add = |list: Vec<DataType>| {
        let known = list.iter().all(values::known);
        if known && !lists.contains(&list) && coerced(udf, &list).is_some() {
            lists.push(list);
        }
    };
    udf.signature().type_signature.get_example_types().into_iter().for_each(&mut add);
    let mut level: Vec<Vec<DataType>> = vec![Vec::new()];
    add(Vec::new());
    for length in 1..=3 {
        // Of three arguments there are too many lists for all types.
        let types = if length < 3 { values::types() } else { values::common_types() };
        let common = |list: &&Vec<DataType>| length < 3 || list.iter().all(|t| types.contains(t));
        let longer = |list: &Vec<DataType>| {
            let (list, types) = (list.clone(), types.clone());
            types
                .into_iter()
                .map(move |t| list.iter().cloned().chain([t]).collect::<Vec<DataType>>())
        };
        level = level.iter().filter(common).flat_map(longer).collect();
        level.iter().cloned().for_each(&mut add);
    }
    // Of more, one and then others that are alike.
    for length in 4..=MOST_ARGUMENTS {
        for (first, other) in pairs(&values::common_types()) {
            add([first].into_iter().chain(vec![other; length - 1]).collect());
        }
    }
    thinned(lists)
}

fn pairs(types: &[DataType]) -> impl Iterator<Item = (DataType, DataType)> {
    types.iter().flat_map(|a| types.iter().map(|b| (a.clone(), b.clone())))
}

/// Some lists of each length, where a function takes whatever it is given.
fn thinned(lists: Vec<Vec<DataType>>) -> Vec<Vec<DataType>> {
    const OF_A_LENGTH: usize = 90;
    let mut by_length: BTreeMap<usize, Vec<Vec<DataType>>> = BTreeMap::new();
    lists.into_iter().for_each(|list| by_length.entry(list.len()).or_default().push(list));
    let some = |all: Vec<Vec<DataType>>| {
        let step = all.len().div_ceil(OF_A_LENGTH).max(1);
        all.into_iter().step_by(step)
    };
    by_length.into_values().flat_map(some).collect()
}

/// An overload's types, with another repetition of the last one where it takes more.
fn declared_lists((types, variadic): &(Vec<SqlType>, bool)) -> Vec<Vec<DataType>> {
    let list: Vec<DataType> = types.iter().map(|t| t.to_arrow()).collect();
    match (variadic, list.last().cloned()) {
        (true, Some(last)) => {
            let longer = list.iter().cloned().chain([last.clone(), last]).collect();
            vec![list, longer]
        }
        _ => vec![list],
    }
}

fn fields(types: &[DataType]) -> Vec<FieldRef> {
    types.iter().map(|t| Arc::new(Field::new("argument", t.clone(), true))).collect()
}

fn coerced(udf: &ScalarUDF, types: &[DataType]) -> Option<Vec<FieldRef>> {
    catch_unwind(AssertUnwindSafe(|| fields_with_udf(&fields(types), udf).ok())).ok().flatten()
}

/// Calls a function as the planner and a plan do. An error is an answer too.
fn call(udf: &ScalarUDF, taken: &[FieldRef], args: &[ScalarValue]) -> Option<()> {
    let args: Vec<ScalarValue> = args
        .iter()
        .zip(taken)
        .map(|(v, f)| v.cast_to(f.data_type()).ok())
        .collect::<Option<_>>()?;
    let constants: Vec<Option<&ScalarValue>> = args.iter().map(Some).collect();
    let of_call = ReturnFieldArgs { arg_fields: taken, scalar_arguments: &constants };
    let return_field = udf.return_field_from_args(of_call).ok()?;
    let columns = args.iter().map(|v| v.to_array_of_size(2).ok().map(ColumnarValue::Array));
    let columns = columns.collect::<Option<Vec<_>>>()?;
    for args in [args.iter().cloned().map(ColumnarValue::Scalar).collect(), columns] {
        let call = ScalarFunctionArgs {
            args,
            arg_fields: taken.to_vec(),
            number_rows: 2,
            return_field: Arc::clone(&return_field),
            config_options: Arc::new(ConfigOptions::default()),
        };
        drop(udf.invoke_with_args(call));
    }
    Some(())
}

/// Tries a function; the first failure, if any.
fn tried(name: &str, udf: &ScalarUDF, progress: &Progress) -> Option<String> {
    let lists = type_lists(udf);
    let calls = (OF_A_FUNCTION / lists.len().max(1)).clamp(FEW, CALLS);
    for types in lists {
        let Some(taken) = coerced(udf, &types) else { continue };
        for args in values::lists(&types, calls) {
            {
                let mut current = progress.current.lock().unwrap_or_else(|e| e.into_inner());
                *current = (name.to_owned(), args.clone());
            }
            progress.calls.fetch_add(1, Ordering::Relaxed);
            let before = WORKING.load(Ordering::Relaxed);
            PEAK.with(|peak| peak.set(before));
            let outcome = catch_unwind(AssertUnwindSafe(|| call(udf, &taken, &args)));
            let most = PEAK.with(Cell::get) - before;
            if let Err(panic) = outcome {
                let message = panic
                    .downcast_ref::<String>()
                    .map(String::as_str)
                    .or(panic.downcast_ref::<&str>().copied());
                let message = message.unwrap_or("no message");
                return Some(format!("{}: panic: {message}", shown(name, &args)));
            }
            if most > MOST_BYTES {
                return Some(format!("{}: took {} MiB", shown(name, &args), most >> 20));
            }
        }
    }
    None
}

fn work(progress: &Progress) -> Vec<String> {
    COUNTED.with(|counted| counted.set(true));
    let all = functions();
    let mut by_name: BTreeMap<String, Arc<ScalarUDF>> = BTreeMap::new();
    for udf in all.scalar_names().iter().filter_map(|name| all.scalar(name)) {
        by_name.insert(udf.name().to_owned(), udf);
    }
    by_name.iter().filter_map(|(name, udf)| tried(name, udf, progress)).collect()
}

#[test]
fn no_function_runs_without_end_or_panics() {
    size_limits::fit_to_memory(QUERY_MEMORY);
    let progress = Arc::new(Progress::default());
    let of_worker = Arc::clone(&progress);
    std::panic::set_hook(Box::new(|_| {}));
    let worker = std::thread::Builder::new().stack_size(STACK_BYTES).spawn(move || {
        let failures = work(&of_worker);
        of_worker.done.store(true, Ordering::Release);
        failures
    });
    let worker = worker.expect("a test may start threads");
    let (mut seen, mut since) = (0, Instant::now());
    while !progress.done.load(Ordering::Acquire) && !worker.is_finished() {
        std::thread::sleep(Duration::from_millis(5));
        let calls = progress.calls.load(Ordering::Relaxed);
        if calls != seen {
            (seen, since) = (calls, Instant::now());
        }
        let held = WORKING.load(Ordering::Relaxed) >> 20;
        if since.elapsed() > LONGEST || held >= LAST_BYTES >> 20 {
            // The call goes on: only the process ends it.
            // Not by a macro, whose output the process would take with it.
            let shown = progress.shown();
            let _ = writeln!(std::io::stderr(), "without end, with {held} MiB: {shown}");
            std::process::exit(1);
        }
    }
    drop(std::panic::take_hook());
    let failures = worker.join().expect("the worker catches panics");
    println!("{} calls", progress.calls.load(Ordering::Relaxed));
    assert!(failures.is_empty(), "{} functions fail:\n{}", failures.len(), failures.join("\n"));
}
