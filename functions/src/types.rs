//! Types as messages name them, and the type that two of them have in common.

use std::sync::Arc;

use arrow::datatypes::DataType;
use millrace_common::SqlType;

use crate::call;

/// A type's name in a message.
pub fn type_name(t: &Option<DataType>) -> String {
    match t {
        None => "unknown".into(),
        Some(DataType::Struct(_)) => "record".into(),
        Some(DataType::List(item)) => format!("{}[]", type_name(&Some(item.data_type().clone()))),
        Some(t) => match SqlType::from_arrow(t) {
            Ok(SqlType::Numeric(_)) => "numeric".into(),
            Ok(t) => t.to_string(),
            Err(_) => t.to_string(),
        },
    }
}

/// The short internal name that PostgreSQL gives an unnamed cast's column.
pub fn type_column_name(t: SqlType) -> &'static str {
    match t {
        SqlType::Boolean => "bool",
        SqlType::SmallInt => "int2",
        SqlType::Int => "int4",
        SqlType::BigInt => "int8",
        SqlType::Real => "float4",
        SqlType::Double => "float8",
        SqlType::Numeric(_) => "numeric",
        SqlType::Text => "text",
        SqlType::Varchar(_) => "varchar",
        SqlType::Char(_) => "bpchar",
        SqlType::Bytea => "bytea",
        SqlType::Date => "date",
        SqlType::Time => "time",
        SqlType::Timestamp => "timestamp",
        SqlType::Timestamptz => "timestamptz",
        SqlType::Interval => "interval",
        SqlType::Uuid => "uuid",
        SqlType::Jsonb => "jsonb",
        SqlType::Array(e) => type_column_name(e.scalar()),
    }
}

/// The type of two that values of both can be given: the wider one.
pub fn common_type(a: &DataType, b: &DataType) -> Option<DataType> {
    use DataType as D;
    if a == b {
        return Some(a.clone());
    }
    let whole = |t: &D| match t {
        D::Int16 => Some((5u8, 0i8)),
        D::Int32 => Some((10, 0)),
        D::Int64 => Some((19, 0)),
        D::Decimal128(p, s) => Some((*p, *s)),
        _ => None,
    };
    match (a, b) {
        (D::Decimal128(_, _), _) | (_, D::Decimal128(_, _))
            if let (Some((p1, s1)), Some((p2, s2))) = (whole(a), whole(b)) =>
        {
            let scale = s1.max(s2);
            let digits = (p1 as i8 - s1).max(p2 as i8 - s2) + scale;
            Some(D::Decimal128(digits.clamp(1, 38) as u8, scale.min(38)))
        }
        (D::List(x), D::List(y)) => {
            let of = common_type(x.data_type(), y.data_type())?;
            Some(D::List(Arc::new(x.as_ref().clone().with_data_type(of))))
        }
        _ => {
            let (x, y) = (SqlType::from_arrow(a).ok()?, SqlType::from_arrow(b).ok()?);
            match (call::implicit_cast(x, y), call::implicit_cast(y, x)) {
                (true, _) => Some(b.clone()),
                (_, true) => Some(a.clone()),
                _ => None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::testing::sql_type;

    use super::*;

    fn arrow(name: &str) -> DataType {
        sql_type(name).to_arrow()
    }

    #[test]
    fn messages_name_types_as_postgresql_does() {
        let cases = [
            ("int2", "smallint"),
            ("int4", "integer"),
            ("float4", "real"),
            ("float8", "double precision"),
            ("numeric(10,2)", "numeric"),
            ("numeric", "numeric"),
            ("text", "text"),
            ("timestamp", "timestamp without time zone"),
            ("timestamptz", "timestamp with time zone"),
            ("int4[]", "integer[]"),
            ("numeric(10,2)[]", "numeric[]"),
            ("jsonb", "jsonb"),
        ];
        for (name, expected) in cases {
            assert_eq!(type_name(&Some(arrow(name))), expected);
        }
        assert_eq!(type_name(&None), "unknown");
        assert_eq!(type_name(&Some(DataType::Struct(Default::default()))), "record");
    }

    #[test]
    fn columns_of_casts_have_the_internal_names() {
        let same = ["bool", "int2", "int4", "int8", "float4", "float8", "numeric", "text", "date"];
        for name in same {
            assert_eq!(type_column_name(sql_type(name)), name);
        }
        assert_eq!(type_column_name(sql_type("char(3)")), "bpchar");
        assert_eq!(type_column_name(sql_type("varchar(3)")), "varchar");
        assert_eq!(type_column_name(sql_type("numeric(5,2)")), "numeric");
        assert_eq!(type_column_name(sql_type("timestamptz[]")), "timestamptz");
    }

    #[test]
    fn the_wider_type_holds_values_of_both() {
        let cases = [
            ("int2", "int4", Some("int4")),
            ("int8", "int4", Some("int8")),
            ("int4", "float4", Some("float4")),
            ("float4", "float8", Some("float8")),
            ("numeric(10,2)", "float8", Some("float8")),
            ("numeric(10,2)", "numeric(12,4)", Some("numeric(12,4)")),
            ("numeric(10,2)", "numeric(8,4)", Some("numeric(12,4)")),
            ("numeric(5,2)", "int4", Some("numeric(12,2)")),
            ("int8", "numeric(38,30)", Some("numeric(38,30)")),
            ("date", "timestamptz", Some("timestamptz")),
            ("timestamp", "timestamptz", Some("timestamptz")),
            ("time", "interval", Some("interval")),
            ("int4[]", "int8[]", Some("int8[]")),
            ("numeric(5,1)[]", "int2[]", Some("numeric(6,1)[]")),
            ("int4", "text", None),
            ("bool", "int4", None),
            ("int4[]", "int4", None),
            ("int4[]", "text[]", None),
            ("uuid", "bytea", None),
        ];
        for (a, b, expected) in cases {
            let expected = expected.map(arrow);
            assert_eq!(common_type(&arrow(a), &arrow(b)), expected, "{a} and {b}");
            assert_eq!(common_type(&arrow(b), &arrow(a)), expected, "{b} and {a}");
        }
    }

    #[test]
    fn a_type_and_itself_have_it_in_common() {
        for name in ["int4", "text", "jsonb", "numeric", "numeric(38,30)", "interval[]"] {
            assert_eq!(common_type(&arrow(name), &arrow(name)), Some(arrow(name)));
        }
    }
}
