//! DataFusion's functions of texts, which it calls with whatever it can make a text of. PostgreSQL has them for texts only:
//! of numbers and bytes they are not found.

use std::sync::Arc;

use arrow::datatypes::DataType;
use datafusion::common::Result;
use datafusion::logical_expr::{ScalarUDF, Signature};

use crate::error::{external, undefined_function};
use crate::types::type_name;
use crate::wrapped::{Change, wrapped};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Takes {
    Text,
    Bytes,
    Number,
}

use Takes::{Bytes as B, Number as N, Text as T};

const FUNCTIONS: [(&str, &[&[Takes]]); 11] = [
    ("ascii", &[&[T]]),
    ("left", &[&[T, N]]),
    ("right", &[&[T, N]]),
    ("lpad", &[&[T, N], &[T, N, T]]),
    ("rpad", &[&[T, N], &[T, N, T]]),
    ("repeat", &[&[T, N]]),
    ("replace", &[&[T, T, T]]),
    ("reverse", &[&[T]]),
    ("translate", &[&[T, T, T]]),
    ("md5", &[&[T], &[B]]),
    ("string_to_array", &[&[T, T], &[T, T, T]]),
];

/// The function as PostgreSQL has it.
pub fn text_only(udf: Arc<ScalarUDF>) -> Arc<ScalarUDF> {
    match FUNCTIONS.iter().find(|f| f.0 == udf.name()) {
        Some((_, takes)) => {
            let signature = Signature::user_defined(udf.signature().volatility);
            wrapped(udf, TextOnly { takes, signature })
        }
        None => udf,
    }
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct TextOnly {
    takes: &'static [&'static [Takes]],
    signature: Signature,
}

/// What a type is given as; `None`: it is not taken. A text may be a literal of any type.
fn given_as(takes: Takes, t: &DataType) -> Option<DataType> {
    use DataType as D;
    match (takes, t) {
        (Takes::Text, D::Utf8 | D::Null) => Some(D::Utf8),
        (Takes::Text, D::Utf8View) => Some(t.clone()),
        (Takes::Bytes, D::Binary) => Some(D::Binary),
        (Takes::Number, t) if t.is_integer() || matches!(t, D::Utf8 | D::Null) => Some(D::Int64),
        _ => None,
    }
}

impl Change for TextOnly {
    fn signature<'a>(&'a self, _: &'a ScalarUDF) -> &'a Signature {
        &self.signature
    }

    fn coerce_types(&self, inner: &ScalarUDF, args: &[DataType]) -> Result<Vec<DataType>> {
        let fits = |takes: &&&[Takes]| takes.len() == args.len();
        let given = |takes: &&[Takes]| {
            takes.iter().zip(args).map(|(takes, t)| given_as(*takes, t)).collect::<Option<Vec<_>>>()
        };
        self.takes.iter().filter(fits).find_map(given).ok_or_else(|| {
            let name = |t: &DataType| type_name(&Some(t.clone()).filter(|t| !t.is_null()));
            let types: Vec<String> = args.iter().map(name).collect();
            external(undefined_function(&format!("{}({})", inner.name(), types.join(", "))))
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::testing::check;

    #[test]
    fn texts_are_counted_in_characters() {
        check(&[
            ("left('größe'::text, 3)", "grö"),
            ("left('größe'::text, -3)", "gr"),
            ("left('ab', 0)", ""),
            ("right('größe'::text, 3)", "öße"),
            ("right('größe'::text, -1)", "röße"),
            ("right('abc', -5)", ""),
            ("lpad('ä'::text, 3, 'xy')", "xyä"),
            ("lpad('größe'::text, 2)", "gr"),
            ("rpad('ä'::text, 4, 'ö')", "äööö"),
            ("rpad('a', 0)", ""),
            ("rpad('a', 3, '')", "a"),
            ("repeat('ö', 3)", "ööö"),
            ("repeat('a', -1)", ""),
            ("repeat('', 5)", ""),
            ("reverse('größe'::text)", "eßörg"),
            ("replace('aXbX', 'X', 'ßß')", "aßßbßß"),
            ("replace('abc', '', 'x')", "abc"),
            ("translate('größe', 'öß', 'os')", "grose"),
            ("translate('12345', '143', 'ax')", "a2x5"),
            ("ascii('ä'::text)", "228"),
            ("ascii('')", "0"),
            ("md5('ä'::text)", "8419b71c87a225a2c70b50486fbee545"),
            ("md5('\\x00ff'::bytea)", "d07d34efac6328007ad67c7e0a985e00"),
            ("string_to_array('a,b,,c'::text, ',')", "{a,b,\"\",c}"),
            ("string_to_array('abc', NULL)", "{a,b,c}"),
            ("string_to_array('', ',')", "{}"),
            ("string_to_array('a,b', ',', 'b')", "{a,NULL}"),
            ("string_to_array('abc', '')", "{abc}"),
            ("left(NULL, 1)", "NULL"),
            ("repeat(NULL::text, 2)", "NULL"),
            ("replace('a', NULL, 'b')", "NULL"),
        ]);
    }
}
