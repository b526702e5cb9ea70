//! Type names: sqlparser's data types to [`SqlType`].

use millrace_common::types::Element;
use millrace_common::{SqlError, SqlState, SqlType};
use millrace_rpc::catalog::ColumnType;
use sqlparser::ast::{
    ArrayElemTypeDef, CharacterLength, DataType, ExactNumberInfo, ObjectName, TimezoneInfo,
};

/// The type a user wrote.
pub fn sql_type(t: &DataType) -> Result<SqlType, SqlError> {
    use DataType as D;
    Ok(match t {
        D::Boolean | D::Bool => SqlType::Boolean,
        D::SmallInt(_) | D::Int2(_) => SqlType::SmallInt,
        D::Int(_) | D::Integer(_) | D::Int4(_) => SqlType::Int,
        D::BigInt(_) | D::Int8(_) => SqlType::BigInt,
        D::Real | D::Float4 => SqlType::Real,
        D::Double(_) | D::DoublePrecision | D::Float8 => SqlType::Double,
        D::Float(ExactNumberInfo::Precision(1..=24)) => SqlType::Real,
        D::Float(_) => SqlType::Double,
        D::Numeric(n) | D::Decimal(n) | D::Dec(n) => numeric(n)?,
        D::Text | D::String(None) => SqlType::Text,
        D::Varchar(n) | D::CharacterVarying(n) | D::CharVarying(n) => SqlType::Varchar(length(n)?),
        D::Bytea => SqlType::Bytea,
        D::Date => SqlType::Date,
        D::Time(_, TimezoneInfo::None | TimezoneInfo::WithoutTimeZone) => SqlType::Time,
        D::Timestamp(_, TimezoneInfo::None | TimezoneInfo::WithoutTimeZone) => SqlType::Timestamp,
        D::Timestamp(_, TimezoneInfo::WithTimeZone | TimezoneInfo::Tz) => SqlType::Timestamptz,
        D::Interval { fields: None, .. } => SqlType::Interval,
        D::Interval { .. } => return Err(SqlError::unsupported(format!("the type {t}"))),
        D::Character(n) | D::Char(n) => SqlType::Char(length(n)?.unwrap_or(1)),
        D::Custom(name, args) if args.is_empty() => custom(name)?,
        D::Regclass => SqlType::BigInt,
        D::JSONB | D::JSON => SqlType::Jsonb,
        D::Uuid => SqlType::Uuid,
        D::Array(
            ArrayElemTypeDef::SquareBracket(item, _)
            | ArrayElemTypeDef::AngleBracket(item)
            | ArrayElemTypeDef::Parenthesis(item),
        ) => match Element::of(sql_type(item)?) {
            Some(element) => SqlType::Array(element),
            None => return Err(SqlError::unsupported("an array of more than one dimension")),
        },
        D::Array(ArrayElemTypeDef::None) => return Err(unknown("array")),
        other => return Err(unknown(&other.to_string())),
    })
}

fn custom(name: &ObjectName) -> Result<SqlType, SqlError> {
    let text = name.to_string().to_lowercase();
    let last = text.rsplit('.').next().unwrap_or(&text).trim_matches('"');
    Ok(match last {
        "timestamptz" => SqlType::Timestamptz,
        "name" | "char" | "bpchar" | "unknown" => SqlType::Text,
        "oid" | "regclass" | "regtype" | "regproc" | "regnamespace" => SqlType::BigInt,
        "bool" => SqlType::Boolean,
        "int2" => SqlType::SmallInt,
        "int4" => SqlType::Int,
        "int8" => SqlType::BigInt,
        "float4" => SqlType::Real,
        "float8" => SqlType::Double,
        "text" => SqlType::Text,
        "varchar" => SqlType::Varchar(None),
        "numeric" => SqlType::Numeric(None),
        "json" | "jsonb" => SqlType::Jsonb,
        "uuid" => SqlType::Uuid,
        "serial" | "serial4" | "bigserial" | "serial8" | "smallserial" | "serial2" => {
            return Err(SqlError::unsupported(format!("the type {last}")).with_hint(
                "There are no sequences; a table without a primary key numbers its rows.",
            ));
        }
        _ => return Err(unknown(&text)),
    })
}

/// The type of a column, with the digits of seconds that a time keeps in its modifier.
pub fn column_type(t: &DataType) -> Result<ColumnType, SqlError> {
    let plain = ColumnType::from(sql_type(t)?);
    let whole = |digits: u64| i32::try_from(digits).ok().filter(|d| *d < 6);
    let typmod = match t {
        DataType::Timestamp(Some(digits), _) | DataType::Time(Some(digits), _) => whole(*digits),
        // PostgreSQL's modifier of an interval has its fields, all of them, in the upper half.
        DataType::Interval { precision: Some(digits), .. } => {
            whole(*digits).map(|d| (0x7fff << 16) | d)
        }
        _ => None,
    };
    Ok(ColumnType { typmod: typmod.unwrap_or(plain.typmod), ..plain })
}

fn unknown(name: &str) -> SqlError {
    let name = name.to_lowercase();
    SqlError::new(SqlState::UNDEFINED_OBJECT, format!("type \"{name}\" does not exist"))
}

fn length(n: &Option<CharacterLength>) -> Result<Option<u32>, SqlError> {
    match n {
        None | Some(CharacterLength::Max) => Ok(None),
        Some(CharacterLength::IntegerLength { length, .. }) => match u32::try_from(*length) {
            Ok(n) if (1..=10_485_760).contains(&n) => Ok(Some(n)),
            _ => Err(SqlError::new(
                SqlState::INVALID_PARAMETER_VALUE,
                "the length of a text must be between 1 and 10485760",
            )),
        },
    }
}

fn numeric(n: &ExactNumberInfo) -> Result<SqlType, SqlError> {
    let (p, s) = match *n {
        ExactNumberInfo::None => return Ok(SqlType::Numeric(None)),
        ExactNumberInfo::Precision(p) => (p, 0),
        ExactNumberInfo::PrecisionAndScale(p, s) => (p, s),
    };
    let invalid = |m: String| Err(SqlError::new(SqlState::INVALID_PARAMETER_VALUE, m));
    if !(1..=1000).contains(&p) {
        return invalid(format!("NUMERIC precision {p} must be between 1 and 1000"));
    }
    if p > 38 {
        return Err(SqlError::unsupported(format!("numeric with precision {p}"))
            .with_hint("The largest precision is 38."));
    }
    if !(0..=p as i64).contains(&s) {
        return invalid(format!("NUMERIC scale {s} must be between 0 and precision {p}"));
    }
    Ok(SqlType::Numeric(Some((p as u8, s as i8))))
}
