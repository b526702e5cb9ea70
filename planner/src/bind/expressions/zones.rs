//! The session's time zone in a bound plan.
//!
//! Binding knows UTC only. Where the session's zone is another, [`rewrite`] puts the zone, as a constant, into every
//! expression whose value depends on it ([`millrace_functions::zones`]); then whatever runs the plan needs
//! no session, and sessions in UTC have the plans that they would have without any of this. What takes
//! instants and is not known not to depend on the zone is refused, never computed in UTC. Materialized views
//! and other definitions that are kept must not depend on a session at all.
//!
//! Literals of unknown type are read while binding ([`Zones::literal`]). As in PostgreSQL, a plain view or a
//! default has the instant that its literal had when it was defined, and everything else is computed in the
//! reader's zone.

use std::cell::Cell;

use datafusion::arrow::datatypes::DataType;
use datafusion::common::tree_node::{Transformed, TreeNode};
use datafusion::common::{DFSchema, Result, ScalarValue};
use datafusion::logical_expr::expr::{InList, ScalarFunction, WindowFunction};
use datafusion::logical_expr::expr_rewriter::NamePreserver;
use datafusion::logical_expr::utils::merge_schema;
use datafusion::logical_expr::{
    BinaryExpr, Cast, Expr, ExprSchemable, Join, LogicalPlan, Operator, Subquery, WindowFrameBound,
    WindowFrameUnits, lit,
};
use millrace_common::encoding::ColumnBuilder;
use millrace_common::types::Element;
use millrace_common::zone::Zone;
use millrace_common::{SqlError, SqlType};
use millrace_functions::cast::fold_literal;
use millrace_functions::error::{external, sql_error_from_datafusion};
use millrace_functions::tree::{Walk, WalkPlan};
use millrace_functions::{call, extract, functions, interval_text, parse};

use super::operators::cast_expr;
use crate::bind::SessionInfo;
use crate::bind::relations::series::constant;
use crate::bind::rewrites::plan::PlanRewrite;

/// In which zone literals are read that name none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Literals {
    #[default]
    Session,
    /// They are part of a stored definition.
    Utc,
    /// They become part of a definition that will be stored, so that the zone must not matter.
    Refused,
}

/// The time zone of what is bound.
#[derive(Clone, Copy, Debug, Default)]
pub struct Zones {
    /// `None`: UTC.
    pub zone: Option<Zone>,
    pub literals: Literals,
}

impl Zones {
    /// Of the text of a stored definition.
    pub fn of_stored(self) -> Zones {
        Zones { literals: Literals::Utc, ..self }
    }

    /// A literal of unknown type, read as `to`.
    pub fn literal(self, text: &str, to: SqlType) -> Result<ScalarValue, SqlError> {
        let zoned = matches!(to, SqlType::Timestamptz | SqlType::Array(Element::Timestamptz));
        let read = self.zone.filter(|_| zoned && self.literals != Literals::Utc);
        let Some(zone) = read else { return fold_literal(text, to) };
        let value = literal_in(zone, text, to)?;
        match self.literals == Literals::Refused && value != fold_literal(text, to)? {
            true => Err(definition()),
            false => Ok(value),
        }
    }

    /// Whether a literal cannot be cast before the zone is known to matter.
    pub fn matters(self, from: &DataType, to: &DataType) -> bool {
        self.zone.is_some() && is_local(from) && is_zoned(to)
    }

    /// An expression in the zone.
    pub fn expr(self, e: Expr, schema: &DFSchema) -> Result<Expr> {
        match self.zone {
            None => Ok(e),
            Some(zone) => Ok(InZone::new(zone).expr(e, schema)?.data),
        }
    }

    /// An expression of a definition, which must not depend on the zone.
    pub fn independent(self, e: Expr, schema: &DFSchema) -> Result<Expr> {
        let Some(zone) = self.zone else { return Ok(e) };
        let done = InZone::new(zone).expr(e, schema)?;
        if done.transformed { Err(external(definition())) } else { Ok(done.data) }
    }
}

fn literal_in(zone: Zone, text: &str, to: SqlType) -> Result<ScalarValue, SqlError> {
    if to == SqlType::Timestamptz {
        let us = parse::timestamptz_in(text, zone)?;
        return Ok(ScalarValue::TimestampMicrosecond(Some(us), Some("UTC".into())));
    }
    let mut builder = ColumnBuilder::new(to, 1).in_zone(zone);
    builder.append_text(text)?;
    ScalarValue::try_from_array(&builder.finish(), 0).map_err(sql_error_from_datafusion)
}

fn definition() -> SqlError {
    SqlError::unsupported("a definition that depends on the session's TimeZone")
        .with_hint("SET TimeZone = 'UTC' for this definition, or name the zone with AT TIME ZONE.")
}

fn refused(what: &str) -> SqlError {
    let what = format!("{what} of timestamp with time zone where TimeZone is not UTC");
    SqlError::unsupported(what).with_hint(
        "Make a timestamp of it with AT TIME ZONE, or SET TimeZone = 'UTC' for this statement.",
    )
}

/// Computes in the session's zone.
pub const COMPUTE_IN_ZONE: PlanRewrite = PlanRewrite::new("compute in zone", rewrite);

/// A plan of a session in its zone.
fn rewrite(plan: LogicalPlan, session: &SessionInfo) -> Result<LogicalPlan, SqlError> {
    let Some(zone) = session.zones.zone else { return Ok(plan) };
    let in_zone = InZone::new(zone);
    let done = plan.rewrite_up_with_subqueries(|node| in_zone.node(node));
    let done = done.map_err(sql_error_from_datafusion)?;
    match session.for_view && in_zone.changed.get() {
        true => Err(definition()),
        false => Ok(done.data),
    }
}

/// The type of an expression. A parameter may have none yet; then nothing runs.
fn type_of(e: &Expr, schema: &DFSchema) -> DataType {
    e.get_type(schema).unwrap_or(DataType::Null)
}

/// The type of a subquery's column.
fn first_type(subquery: &Subquery) -> DataType {
    let fields = subquery.subquery.schema().fields();
    fields.first().map_or(DataType::Null, |f| f.data_type().clone())
}

fn is_zoned(t: &DataType) -> bool {
    matches!(t, DataType::Timestamp(_, Some(_)))
}

fn is_local(t: &DataType) -> bool {
    matches!(t, DataType::Timestamp(_, None) | DataType::Date32)
}

fn is_text(t: &DataType) -> bool {
    matches!(t, DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View)
}

/// Whether values hold instants.
fn holds_zoned(t: &DataType) -> bool {
    match t {
        DataType::List(item) | DataType::LargeList(item) | DataType::FixedSizeList(item, _) => {
            holds_zoned(item.data_type())
        }
        DataType::Struct(fields) => fields.iter().any(|f| holds_zoned(f.data_type())),
        t => is_zoned(t),
    }
}

/// Whether values hold times without a zone.
fn holds_local(t: &DataType) -> bool {
    match t {
        DataType::List(item) | DataType::LargeList(item) => holds_local(item.data_type()),
        t => is_local(t),
    }
}

/// Functions of instants whose results are the same in every zone.
const INDEPENDENT: &str = "\
    timezone date_bin overlaps isfinite round_seconds pg_add pg_sub coalesce nullif greatest least #greatest #least \
    make_array array_append array_prepend array_concat array_cat array_element array_item array_slice \
    array_slice_of array_length array_ndims array_dims array_lower array_upper cardinality array_has \
    array_has_all array_has_any array_position array_positions array_remove array_remove_all \
    array_replace array_replace_all array_sort array_distinct array_reverse array_min array_max \
    array_cmp array_fill array_subscripts trim_array arrow_typeof num_nulls num_nonnulls compare_any \
    single_value canonical_float collect_entry pair_entry hop_windows tumble_start window_end \
    width_bucket_of zoned_local zoned_text zoned_iso zoned_add zoned_sub zoned_trunc zoned_to_char \
    zoned_offset";

/// The same of aggregates and window functions.
const INDEPENDENT_AGGREGATES: &str = "\
    min max count array_agg first_value last_value nth_value any_value mode percentile_disc lag lead \
    row_number rank dense_rank percent_rank cume_dist ntile latest session_start session_end";

fn listed(list: &str, name: &str) -> bool {
    // Marks of the planner's own are read by it, not computed.
    name.starts_with('#') || list.split_whitespace().any(|known| known == name)
}

fn call_of(name: &str, args: Vec<Expr>) -> Result<Expr> {
    let function = functions().scalar(name);
    let missing = || external(SqlError::internal(format!("no function {name}")));
    Ok(function.ok_or_else(missing)?.call(args))
}

struct InZone {
    /// The zone as it is put into plans.
    name: String,
    /// Whether anything depends on it.
    changed: Cell<bool>,
}

impl InZone {
    fn new(zone: Zone) -> InZone {
        InZone { name: zone.name(), changed: Cell::new(false) }
    }

    fn node(&self, plan: LogicalPlan) -> Result<Transformed<LogicalPlan>> {
        let schema = merge_schema(&plan.inputs());
        let plan = match plan {
            LogicalPlan::Join(join) => LogicalPlan::Join(self.join(join)?),
            plan => plan,
        };
        let names = NamePreserver::new(&plan);
        let kept = |e: Expr| -> Result<Transformed<Expr>> {
            let name = names.save(&e);
            Ok(self.expr(e, &schema)?.update_data(|e| name.restore(e)))
        };
        let done = plan.map_expressions(|e| match e {
            // Its parts have the names, not itself.
            Expr::GroupingSet(_) => e.map_children(&kept),
            e => kept(e),
        })?;
        // What is computed of changed columns has a schema that says so.
        match self.changed.get() {
            true => Ok(Transformed::yes(done.data.recompute_schema()?)),
            false => Ok(done),
        }
    }

    /// The pairs of a join, of one kind each.
    fn join(&self, mut join: Join) -> Result<Join> {
        let on = std::mem::take(&mut join.on).into_iter().map(|(l, r)| {
            let types = (type_of(&l, join.left.schema()), type_of(&r, join.right.schema()));
            match types {
                (lt, rt) if is_zoned(&lt) && is_local(&rt) => Ok((l, self.instant(r, &rt)?)),
                (lt, rt) if is_local(&lt) && is_zoned(&rt) => Ok((self.instant(l, &lt)?, r)),
                _ => Ok((l, r)),
            }
        });
        let on = on.collect::<Result<Vec<_>>>()?;
        join.on = on;
        Ok(join)
    }

    fn expr(&self, e: Expr, schema: &DFSchema) -> Result<Transformed<Expr>> {
        e.rewrite_up(|e| {
            Ok(match self.one(&e, schema)? {
                Some(new) => Transformed::yes(new),
                None => Transformed::no(e),
            })
        })
    }

    /// What an expression becomes, its parts being in the zone; `None`: it does not depend on it.
    fn one(&self, e: &Expr, schema: &DFSchema) -> Result<Option<Expr>> {
        match e {
            Expr::Cast(c) => self.cast(&c.expr, &type_of(&c.expr, schema), c.field.data_type()),
            Expr::TryCast(c) => {
                let (from, to) = (type_of(&c.expr, schema), c.field.data_type());
                match holds_zoned(&from) == holds_zoned(to) {
                    true => Ok(None),
                    false => Err(external(refused("a cast"))),
                }
            }
            Expr::BinaryExpr(b) => self.binary(b, schema),
            Expr::InList(list) => self.in_list(list, schema),
            Expr::ScalarFunction(f) => self.function(f, schema),
            Expr::AggregateFunction(a) => {
                self.check_aggregate(a.func.name(), &a.params.args, schema).map(|()| None)
            }
            Expr::WindowFunction(w) => self.check_window(w, schema).map(|()| None),
            Expr::Case(case) => {
                let then = case.when_then_expr.iter().map(|(_, then)| then.as_ref());
                let all = then.chain(case.else_expr.as_deref());
                let types: Vec<DataType> = all.map(|e| type_of(e, schema)).collect();
                unmixed("CASE", &types).map(|()| None)
            }
            Expr::Between(b) => {
                let types = [&b.expr, &b.low, &b.high].map(|e| type_of(e, schema));
                unmixed("BETWEEN", &types).map(|()| None)
            }
            Expr::InSubquery(q) => {
                let types = [type_of(&q.expr, schema), first_type(&q.subquery)];
                unmixed("IN", &types).map(|()| None)
            }
            Expr::SetComparison(q) => {
                let types = [type_of(&q.expr, schema), first_type(&q.subquery)];
                unmixed("ANY", &types).map(|()| None)
            }
            _ => Ok(None),
        }
    }

    fn made(&self, name: &str, mut args: Vec<Expr>) -> Result<Expr> {
        self.changed.set(true);
        args.insert(0, lit(self.name.clone()));
        call_of(name, args)
    }

    fn local(&self, e: Expr) -> Result<Expr> {
        self.made("zoned_local", vec![e])
    }

    fn instant(&self, e: Expr, from: &DataType) -> Result<Expr> {
        let e = match from {
            DataType::Date32 => cast_expr(e, from, SqlType::Timestamp).map_err(external)?,
            _ => e,
        };
        self.made("zoned_instant", vec![e])
    }

    /// DataFusion's cast.
    fn cast(&self, e: &Expr, from: &DataType, to: &DataType) -> Result<Option<Expr>> {
        let wrapped = |e: Expr| Expr::Cast(Cast::new(Box::new(e), to.clone()));
        let e = || e.clone();
        Ok(Some(match (from, to) {
            (from, DataType::Timestamp(_, None)) if is_zoned(from) => self.local(e())?,
            (from, DataType::Date32 | DataType::Time64(_)) if is_zoned(from) => {
                wrapped(self.local(e())?)
            }
            (from, to) if is_zoned(from) && is_text(to) => {
                wrapped(self.made("zoned_text", vec![e()])?)
            }
            (from, to) if is_local(from) && is_zoned(to) => self.instant(e(), from)?,
            (from, to) if is_text(from) && is_zoned(to) => self.made("zoned_read", vec![e()])?,
            (DataType::Null, _) => return Ok(None),
            (from, to) if holds_zoned(from) != holds_zoned(to) => {
                return Err(external(refused("a cast")));
            }
            _ => return Ok(None),
        }))
    }

    /// A comparison of an instant with a local time.
    fn binary(&self, b: &BinaryExpr, schema: &DFSchema) -> Result<Option<Expr>> {
        if matches!(b.op, Operator::And | Operator::Or) {
            return Ok(None);
        }
        let (lt, rt) = (type_of(&b.left, schema), type_of(&b.right, schema));
        let (left, right) = (|| b.left.as_ref().clone(), || b.right.as_ref().clone());
        let (left, right) = if is_zoned(&lt) && is_local(&rt) {
            (left(), self.instant(right(), &rt)?)
        } else if is_local(&lt) && is_zoned(&rt) {
            (self.instant(left(), &lt)?, right())
        } else {
            return unmixed("a comparison", &[lt, rt]).map(|()| None);
        };
        Ok(Some(Expr::BinaryExpr(BinaryExpr::new(Box::new(left), b.op, Box::new(right)))))
    }

    fn in_list(&self, list: &InList, schema: &DFSchema) -> Result<Option<Expr>> {
        let all = std::iter::once(list.expr.as_ref()).chain(&list.list);
        let types: Vec<DataType> = all.map(|e| type_of(e, schema)).collect();
        if !(types.iter().any(is_zoned) && types.iter().any(is_local)) {
            return unmixed("IN", &types).map(|()| None);
        }
        let one = |e: &Expr, t: &DataType| match is_local(t) {
            true => self.instant(e.clone(), t),
            false => Ok(e.clone()),
        };
        let expr = one(list.expr.as_ref(), &types[0])?;
        let items = list.list.iter().zip(&types[1..]).map(|(e, t)| one(e, t));
        let items = items.collect::<Result<Vec<_>>>()?;
        Ok(Some(Expr::InList(InList::new(Box::new(expr), items, list.negated))))
    }

    fn function(&self, f: &ScalarFunction, schema: &DFSchema) -> Result<Option<Expr>> {
        let types: Vec<DataType> = f.args.iter().map(|a| type_of(a, schema)).collect();
        let name = f.func.name();
        if let Some(to) = name.strip_prefix("cast_to_") {
            return self.cast_call(f, &types, to);
        }
        if let Some(made) = self.of_times(f, &types)? {
            return Ok(Some(made));
        }
        if call::takes_any(&f.func) && !listed(INDEPENDENT, name) {
            return self.printed(f, &types);
        }
        if !types.iter().any(holds_zoned)
            || listed(INDEPENDENT, name) && unmixed(name, &types).is_ok()
        {
            return Ok(None);
        }
        // These have the zone already, or name another.
        match (name, types.len()) {
            ("extract" | "date_part", _) | ("date_trunc", 3) => Ok(None),
            _ => Err(external(refused(&format!("the function {name}")))),
        }
    }

    /// A function of times that depends on the zone.
    fn of_times(&self, f: &ScalarFunction, types: &[DataType]) -> Result<Option<Expr>> {
        let zoned = |i: usize| types.get(i).is_some_and(is_zoned);
        let interval = |i: usize| matches!(types.get(i), Some(DataType::Interval(_)));
        let args = || f.args.clone();
        let arg = |i: usize| f.args[i].clone();
        Ok(Some(match (f.func.name(), types.len()) {
            ("pg_add" | "pg_sub", 2) if zoned(0) && interval(1) && has_days(&f.args[1]) => {
                let name = if f.func.name() == "pg_add" { "zoned_add" } else { "zoned_sub" };
                self.made(name, args())?
            }
            ("pg_add", 2) if interval(0) && zoned(1) && has_days(&f.args[0]) => {
                self.made("zoned_add", vec![arg(1), arg(0)])?
            }
            ("date_trunc", 2) if zoned(1) => self.made("zoned_trunc", args())?,
            ("to_char", 2) if zoned(0) => self.made("zoned_to_char", args())?,
            ("to_timestamp", 2) => self.made("zoned_to_timestamp", args())?,
            ("make_timestamptz", 6) => {
                self.made("zoned_instant", vec![call_of("make_timestamp", args())?])?
            }
            ("age", 2) if zoned(0) && zoned(1) => {
                call_of("age", vec![self.local(arg(0))?, self.local(arg(1))?])?
            }
            ("overlaps", 4) if zoned(0) && interval(1) => {
                let end = |i: usize| self.made("zoned_add", vec![arg(i), arg(i + 1)]);
                call_of("overlaps", vec![arg(0), end(0)?, arg(2), end(2)?])?
            }
            ("extract" | "date_part", 2) if zoned(1) => return self.field(f),
            _ => return Ok(None),
        }))
    }

    /// A field of an instant: of its local time, but for the seconds since 1970 and the offset itself.
    fn field(&self, f: &ScalarFunction) -> Result<Option<Expr>> {
        let of = &f.args[1];
        let field = match constant(&f.args[0]) {
            Some(ScalarValue::Utf8(Some(field))) => field.to_lowercase(),
            Some(field) if field.is_null() => return Ok(None),
            // It becomes a constant later, when the zone is known no more.
            _ => return Err(external(refused("a field that is not a constant"))),
        };
        Ok(match field.as_str() {
            "epoch" => None,
            "timezone" | "timezone_hour" | "timezone_minute" => {
                let offset = self.made("zoned_offset", vec![lit(field), of.clone()])?;
                let to = match f.func.name() {
                    "extract" => DataType::Decimal128(38, 0),
                    _ => DataType::Float64,
                };
                Some(Expr::Cast(Cast::new(Box::new(offset), to)))
            }
            // What is no field says so of the type as it is.
            _ if !extract::is_field(&field) => None,
            _ => Some(f.func.call(vec![f.args[0].clone(), self.local(of.clone())?])),
        })
    }

    /// A cast by a function of ours, named by its target.
    fn cast_call(&self, f: &ScalarFunction, types: &[DataType], to: &str) -> Result<Option<Expr>> {
        let Some((from, value)) = types.first().zip(f.args.first()) else { return Ok(None) };
        let with = |value: Expr| {
            let args = std::iter::once(value).chain(f.args[1..].iter().cloned());
            f.func.call(args.collect())
        };
        Ok(Some(match to {
            "timestamptz" if is_local(from) => self.instant(value.clone(), from)?,
            "timestamptz" if is_text(from) => self.made("zoned_read", vec![value.clone()])?,
            "timestamp" if is_zoned(from) => self.local(value.clone())?,
            "date" | "time" if is_zoned(from) => with(self.local(value.clone())?),
            "text" | "varchar" | "bpchar" if is_zoned(from) => {
                with(self.made("zoned_text", vec![value.clone()])?)
            }
            "timestamptz" => return Ok(None),
            "timestamptz_array" if *from == DataType::Null => return Ok(None),
            "timestamptz_array" if holds_zoned(from) => return Ok(None),
            "timestamptz_array" => return Err(external(refused("a cast to an array"))),
            _ if holds_zoned(from) => return Err(external(refused("a cast of an array"))),
            _ => return Ok(None),
        }))
    }

    /// A function of values as they are printed, or as documents.
    fn printed(&self, f: &ScalarFunction, types: &[DataType]) -> Result<Option<Expr>> {
        if !types.iter().any(holds_zoned) {
            return Ok(None);
        }
        let how = if call::takes_documents(&f.func) { "zoned_iso" } else { "zoned_text" };
        let args = f.args.iter().zip(types).map(|(e, t)| match t {
            t if is_zoned(t) => self.made(how, vec![e.clone()]),
            t if holds_zoned(t) => {
                Err(external(refused(&format!("{} of an array", f.func.name()))))
            }
            _ => Ok(e.clone()),
        });
        Ok(Some(f.func.call(args.collect::<Result<Vec<_>>>()?)))
    }

    fn check_aggregate(&self, name: &str, args: &[Expr], schema: &DFSchema) -> Result<()> {
        let types: Vec<DataType> = args.iter().map(|a| type_of(a, schema)).collect();
        if types.iter().any(holds_zoned) && !listed(INDEPENDENT_AGGREGATES, name) {
            return Err(external(refused(&format!("the aggregate {name}"))));
        }
        unmixed(name, &types)
    }

    fn check_window(&self, w: &WindowFunction, schema: &DFSchema) -> Result<()> {
        self.check_aggregate(w.fun.name(), &w.params.args, schema)?;
        let frame = &w.params.window_frame;
        let Some(by) = w.params.order_by.first() else { return Ok(()) };
        if frame.units != WindowFrameUnits::Range || !holds_zoned(&type_of(&by.expr, schema)) {
            return Ok(());
        }
        let by_days = [&frame.start_bound, &frame.end_bound].into_iter().any(|bound| match bound {
            // An interval as it is written; what is none says so later.
            WindowFrameBound::Preceding(ScalarValue::Utf8(Some(text)))
            | WindowFrameBound::Following(ScalarValue::Utf8(Some(text))) => {
                interval_text::interval(text)
                    .is_ok_and(|(months, days, _)| (months, days) != (0, 0))
            }
            WindowFrameBound::Preceding(v) | WindowFrameBound::Following(v) => {
                !v.is_null() && has_days(&Expr::Literal(v.clone(), None))
            }
            WindowFrameBound::CurrentRow => false,
        });
        if by_days { Err(external(refused("RANGE by days or months"))) } else { Ok(()) }
    }
}

/// Whether an interval may have days or months, which are not the same length in every zone.
fn has_days(e: &Expr) -> bool {
    match e {
        Expr::Literal(ScalarValue::IntervalMonthDayNano(Some(i)), _) => {
            i.months != 0 || i.days != 0
        }
        Expr::Literal(ScalarValue::IntervalMonthDayNano(None), _) => false,
        _ => true,
    }
}

/// Instants and local times of one construct, which would be taken for UTC.
fn unmixed(what: &str, types: &[DataType]) -> Result<()> {
    match types.iter().any(holds_zoned) && types.iter().any(holds_local) {
        true => Err(external(refused(&format!("{what} of timestamp and")))),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn literal(text: &str, literals: Literals) -> Result<ScalarValue, SqlError> {
        let zone = Zone::of_name("Europe/Berlin");
        Zones { zone, literals }.literal(text, SqlType::Timestamptz)
    }

    #[test]
    fn literals_are_read_where_they_are_written() {
        let utc = |text: &str| fold_literal(text, SqlType::Timestamptz).unwrap();
        let (plain, named) = ("2024-07-01 12:00", "2024-07-01 12:00+05");
        assert_eq!(literal(plain, Literals::Session).unwrap(), utc("2024-07-01 10:00"));
        assert_eq!(literal(plain, Literals::Utc).unwrap(), utc(plain));
        assert_eq!(literal(plain, Literals::Refused).unwrap_err().state.0, "0A000");
        for literals in [Literals::Session, Literals::Utc, Literals::Refused] {
            assert_eq!(literal(named, literals).unwrap(), utc("2024-07-01 07:00"));
        }
        assert_eq!(Zones::default().literal(plain, SqlType::Timestamptz).unwrap(), utc(plain));
    }
}
