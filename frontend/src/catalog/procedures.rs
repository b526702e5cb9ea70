//! The functions that the catalogs name (`regproc`), with PostgreSQL's OIDs: clients choose how they read and write a
//! type by the names of its functions.
//!
//! Source: PostgreSQL 15, `pg_type.dat` and `pg_proc.dat`.

/// Of a type: how its functions begin, and the OIDs of those for text (in, out) and for the binary form (recv, send).
type Functions = (i64, &'static str, [i64; 4]);

const OF_TYPES: [Functions; 28] = [
    (16, "bool", [1242, 1243, 2436, 2437]),
    (17, "bytea", [1244, 31, 2412, 2413]),
    (18, "char", [1245, 33, 2434, 2435]),
    (19, "name", [34, 35, 2422, 2423]),
    (20, "int8", [460, 461, 2408, 2409]),
    (21, "int2", [38, 39, 2404, 2405]),
    (22, "int2vector", [40, 41, 2410, 2411]),
    (23, "int4", [42, 43, 2406, 2407]),
    (24, "regproc", [44, 45, 2444, 2445]),
    (25, "text", [46, 47, 2414, 2415]),
    (26, "oid", [1798, 1799, 2418, 2419]),
    (30, "oidvector", [54, 55, 2420, 2421]),
    (114, "json_", [321, 322, 323, 324]),
    (700, "float4", [200, 201, 2424, 2425]),
    (701, "float8", [214, 215, 2426, 2427]),
    (705, "unknown", [109, 110, 2416, 2417]),
    (1042, "bpchar", [1044, 1045, 2430, 2431]),
    (1043, "varchar", [1046, 1047, 2432, 2433]),
    (1082, "date_", [1084, 1085, 2468, 2469]),
    (1083, "time_", [1143, 1144, 2470, 2471]),
    (1114, "timestamp_", [1312, 1313, 2474, 2475]),
    (1184, "timestamptz_", [1150, 1151, 2476, 2477]),
    (1186, "interval_", [1160, 1161, 2478, 2479]),
    (1700, "numeric_", [1701, 1702, 2460, 2461]),
    (2205, "regclass", [2218, 2219, 2452, 2453]),
    (2206, "regtype", [2220, 2221, 2454, 2455]),
    (2950, "uuid_", [2952, 2953, 2961, 2962]),
    (3802, "jsonb_", [3806, 3804, 3805, 3803]),
];

/// Those of all arrays.
const OF_ARRAYS: Functions = (0, "array_", [750, 751, 2400, 2401]);

const ENDINGS: [&str; 4] = ["in", "out", "recv", "send"];

/// Types with a length or a precision: the functions that read and show it.
const MODIFIERS: [(i64, i64, &str, i64, &str); 7] = [
    (1042, 2913, "bpchartypmodin", 2914, "bpchartypmodout"),
    (1043, 2915, "varchartypmodin", 2916, "varchartypmodout"),
    (1083, 2909, "timetypmodin", 2910, "timetypmodout"),
    (1114, 2905, "timestamptypmodin", 2906, "timestamptypmodout"),
    (1184, 2907, "timestamptztypmodin", 2908, "timestamptztypmodout"),
    (1186, 2903, "intervaltypmodin", 2904, "intervaltypmodout"),
    (1700, 2917, "numerictypmodin", 2918, "numerictypmodout"),
];

/// Functions that belong to no single type.
const OTHERS: [(i64, &str); 5] = [
    (3, "heap_tableam_handler"),
    (330, "bthandler"),
    (6098, "jsonb_subscript_handler"),
    (6179, "array_subscript_handler"),
    (6180, "raw_array_subscript_handler"),
];

/// How a type is read and shown: in, out, recv, send.
pub fn functions_of_type(oid: i64) -> [i64; 4] {
    OF_TYPES.iter().find(|t| t.0 == oid).map_or([0; 4], |t| t.2)
}

/// The same of an array of it.
pub fn functions_of_array() -> [i64; 4] {
    OF_ARRAYS.2
}

/// The functions of a type's modifier; 0: it has none.
pub fn modifier_functions(oid: i64) -> [i64; 2] {
    MODIFIERS.iter().find(|m| m.0 == oid).map_or([0; 2], |m| [m.1, m.3])
}

/// What takes an element out of a value of the type.
pub fn subscript_function(oid: i64) -> i64 {
    match oid {
        19 => 6180,
        22 | 30 => 6179,
        3802 => 6098,
        _ => 0,
    }
}

/// All of them: OID and name.
pub fn procedures() -> impl Iterator<Item = (i64, String)> {
    let of_types = OF_TYPES.iter().chain([&OF_ARRAYS]).flat_map(|(_, stem, oids)| {
        oids.iter().zip(ENDINGS).map(move |(oid, ending)| (*oid, format!("{stem}{ending}")))
    });
    let of_modifiers = MODIFIERS
        .iter()
        .flat_map(|(_, read, reads, show, shows)| [(*read, *reads), (*show, *shows)])
        .chain(OTHERS)
        .map(|(oid, name)| (oid, name.to_owned()));
    of_types.chain(of_modifiers)
}

/// The function of a name.
pub fn procedure_named(name: &str) -> Option<i64> {
    procedures().find(|p| p.1 == name).map(|p| p.0)
}

/// The name of a function: a dash for none, a number for one that is not listed.
pub fn procedure_name(oid: i64) -> String {
    match oid {
        0 => "-".to_owned(),
        oid => procedures().find(|p| p.0 == oid).map_or_else(|| oid.to_string(), |p| p.1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::objects::TYPES;

    #[test]
    fn every_type_has_its_functions_once() {
        for (oid, name, ..) in TYPES {
            assert!(functions_of_type(oid).iter().all(|f| *f > 0), "{name}");
        }
        let mut oids: Vec<i64> = procedures().map(|p| p.0).collect();
        let all = oids.len();
        oids.sort_unstable();
        oids.dedup();
        assert_eq!(oids.len(), all);
        assert_eq!(procedure_name(functions_of_type(1114)[3]), "timestamp_send");
        assert_eq!(procedure_named("array_recv"), Some(2400));
    }
}
