//! The queries: tables whose state is large, views over them, and the rows that arrive.
//!
//! Every column of an arriving row follows from its number `x` alone, and keys come in no order, so that each mode gets
//! the same rows and must have the same result.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Factors between a row's number and its keys: primes, one for each key.
const FACTORS: [u64; 5] = [2_654_435_761, 40_503_013, 1_299_709, 15_485_863, 179_424_673];

#[derive(Debug)]
pub struct Query {
    pub name: &'static str,
    /// Tables that rows are looked up in.
    pub dimensions: usize,
    /// State caches whose keys are cold.
    pub caches: usize,
    /// How many reads one after another of a view could begin at once, since all their keys are in the row.
    pub parallel_reads: u32,
    /// Views, each reading the one before, the first reading `events`: names and queries. The last is the result.
    pub views: &'static [(&'static str, &'static str)],
    /// Arriving rows a key has before anything is measured.
    pub history: u64,
}

/// The join of `events` with so many dimensions, each by a key of the row.
macro_rules! star {
    ($columns:literal, $($join:literal),*) => {
        concat!("SELECT e.id, e.v", $columns, " FROM events e", $(" JOIN ", $join),*)
    };
}

pub const QUERIES: &[Query] = &[
    Query {
        name: "join1",
        dimensions: 1,
        caches: 1,
        parallel_reads: 1,
        views: &[("out", star!(", d0.a AS a0", "d0 ON e.k0 = d0.k"))],
        history: 0,
    },
    Query {
        name: "join3",
        dimensions: 3,
        caches: 3,
        parallel_reads: 3,
        views: &[(
            "out",
            star!(
                ", d0.a AS a0, d1.a AS a1, d2.a AS a2",
                "d0 ON e.k0 = d0.k",
                "d1 ON e.k1 = d1.k",
                "d2 ON e.k2 = d2.k"
            ),
        )],
        history: 0,
    },
    Query {
        name: "join5",
        dimensions: 5,
        caches: 5,
        parallel_reads: 5,
        views: &[(
            "out",
            star!(
                ", d0.a AS a0, d1.a AS a1, d2.a AS a2, d3.a AS a3, d4.a AS a4",
                "d0 ON e.k0 = d0.k",
                "d1 ON e.k1 = d1.k",
                "d2 ON e.k2 = d2.k",
                "d3 ON e.k3 = d3.k",
                "d4 ON e.k4 = d4.k"
            ),
        )],
        history: 0,
    },
    Query {
        name: "chain5",
        dimensions: 5,
        caches: 5,
        parallel_reads: 1,
        views: &[(
            "out",
            star!(
                ", d0.a AS a0, d4.a AS a4",
                "d0 ON e.k0 = d0.k",
                "d1 ON d0.next = d1.k",
                "d2 ON d1.next = d2.k",
                "d3 ON d2.next = d3.k",
                "d4 ON d3.next = d4.k"
            ),
        )],
        history: 0,
    },
    Query {
        name: "q13",
        dimensions: 1,
        caches: 1,
        parallel_reads: 1,
        views: &[(
            "out",
            "SELECT e.id, e.v, d0.a FROM events e JOIN d0 FOR SYSTEM_TIME AS OF PROCTIME() ON e.k0 = d0.k",
        )],
        history: 0,
    },
    Query {
        name: "q18",
        dimensions: 0,
        caches: 1,
        parallel_reads: 1,
        views: &[(
            "out",
            "SELECT id, k0, v, at, pad FROM (SELECT *, row_number() OVER (PARTITION BY k0 ORDER BY at DESC) AS r \
             FROM events) AS ranked WHERE r <= 1",
        )],
        history: 1,
    },
    Query {
        name: "q19",
        dimensions: 0,
        caches: 1,
        parallel_reads: 1,
        views: &[(
            "out",
            "SELECT * FROM (SELECT *, row_number() OVER (PARTITION BY k0 ORDER BY v DESC) AS r FROM events) AS ranked \
             WHERE r <= 10",
        )],
        history: 3,
    },
    Query {
        name: "q20",
        dimensions: 1,
        caches: 1,
        parallel_reads: 1,
        views: &[(
            "out",
            "SELECT e.id, e.v, e.at, d0.a, d0.b FROM events e JOIN d0 ON e.k0 = d0.k WHERE d0.next % 2 = 0",
        )],
        history: 0,
    },
    Query {
        name: "ads",
        dimensions: 1,
        caches: 1,
        parallel_reads: 1,
        views: &[(
            "out",
            "SELECT d0.next % 100 AS campaign, e.window_start, count(*) AS n \
             FROM TUMBLE(events, at, INTERVAL '10 seconds') e JOIN d0 ON e.k0 = d0.k \
             WHERE e.v % 3 = 0 GROUP BY d0.next % 100, e.window_start",
        )],
        history: 0,
    },
    Query {
        name: "views",
        dimensions: 1,
        caches: 2,
        parallel_reads: 1,
        views: &[
            ("accepted", "SELECT id, k0, v + 1 AS v FROM events WHERE v >= 0"),
            ("named", "SELECT e.id, e.k0, e.v, d0.a FROM accepted e JOIN d0 ON e.k0 = d0.k"),
            ("out", "SELECT k0, count(*) AS n, sum(v) AS v, max(a) AS a FROM named GROUP BY k0"),
        ],
        history: 1,
    },
];

/// The least row number whose key is any of all, in [`ADAPT`]; those below have one of 100, whose state a cache holds.
pub const COLD_ROWS: u64 = 1_000_000_000;

/// A join by a key that a projection makes: of few keys, and of all from [`COLD_ROWS`] on.
pub const ADAPT: Query = Query {
    name: "adapt",
    dimensions: 1,
    caches: 1,
    parallel_reads: 1,
    views: &[(
        "out",
        "SELECT e.id, e.v, d0.a FROM (SELECT id, v, CASE WHEN id < 1000000000 THEN k0 % 100 ELSE k0 END AS k \
         FROM events) AS e JOIN d0 ON e.k = d0.k",
    )],
    history: 0,
};

impl Query {
    pub fn by_name(name: &str) -> Option<&'static Query> {
        QUERIES.iter().find(|q| q.name == name)
    }

    /// A key comes out of the row that the read before has found.
    pub fn is_chained(&self) -> bool {
        self.views.len() == 1 && self.caches > self.parallel_reads as usize
    }

    pub fn tables(&self) -> Vec<String> {
        let events = "CREATE TABLE events (id BIGINT, k0 BIGINT, k1 BIGINT, k2 BIGINT, k3 BIGINT, k4 BIGINT, \
                      v BIGINT, at TIMESTAMP, pad VARCHAR) APPEND ONLY";
        let dimension = |d| {
            format!("CREATE TABLE d{d} (k BIGINT PRIMARY KEY, next BIGINT, a VARCHAR, b VARCHAR)")
        };
        std::iter::once(events.to_owned()).chain((0..self.dimensions).map(dimension)).collect()
    }

    pub fn create_views(&self) -> impl Iterator<Item = String> {
        self.views.iter().map(|(n, sql)| format!("CREATE MATERIALIZED VIEW {n} AS {sql}"))
    }

    /// The name of the last view.
    pub fn result(&self) -> &'static str {
        self.views.last().map_or("events", |(name, _)| name)
    }

    /// Rows `first` to `last` of a dimension.
    pub fn load(d: usize, keys: u64, first: u64, last: u64) -> String {
        // Text that compresses to half, as hexadecimal digits do.
        format!(
            "INSERT INTO d{d} SELECT x, x::bigint * {} % {keys}, md5(x::text), md5((x + {d})::text) || md5((x + 1)::text) \
             FROM generate_series({first}, {last}) AS s(x)",
            FACTORS[d % FACTORS.len()],
        )
    }

    /// Arriving rows of the numbers from `first` to `last`, which may be parameters.
    pub fn insert(keys: &Keys, first: &str, last: &str) -> String {
        let columns = FACTORS.map(|factor| keys.of_row(factor)).join(", ");
        let time = "TIMESTAMP '2026-01-01 00:00:00' + x * INTERVAL '1 millisecond'";
        let pad = PADS.map(|factor| format!("(x * {factor} % {MODULUS})::text")).join(" || ");
        format!(
            "INSERT INTO events SELECT x, {columns}, x * {PRICE} % {MODULUS}, {time}, {pad} \
             FROM generate_series({first}, {last}) AS s(x)"
        )
    }

    /// One arriving row, whose values are parameters: planned and computed in a fraction of the time.
    pub const INSERT_ROW: &str = "INSERT INTO events VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)";
}

/// Of prices of no order, each once.
const PRICE: u64 = 48_271;
/// Of texts that compress to half, about.
const PADS: [u64; 4] = [69_621, 39_373, 16_807, 630_360];
/// Seconds from 1970 until the time of row 0, 2026-01-01 00:00:00.
const FIRST_TIME: u64 = 1_767_225_600;

/// The values of an arriving row, as [`Query::insert`] has them.
#[derive(Debug)]
pub struct Row {
    pub id: i64,
    pub keys: [i64; FACTORS.len()],
    pub price: i64,
    pub time: SystemTime,
    pub pad: String,
}

impl Row {
    pub fn new(keys: &Keys, x: u64) -> Row {
        let times = |factor: u64| x * factor % MODULUS;
        Row {
            id: x as i64,
            keys: FACTORS.map(|factor| keys.at(x, factor)),
            price: times(PRICE) as i64,
            time: UNIX_EPOCH + Duration::from_secs(FIRST_TIME) + Duration::from_millis(x),
            pad: PADS.map(|factor| times(factor).to_string()).concat(),
        }
    }
}

/// Which keys arriving rows have.
#[derive(Clone, Copy, Debug)]
pub struct Keys {
    pub count: u64,
    /// The exponent of Zipf's law; 0: each key in its turn.
    pub skew: f64,
}

impl Keys {
    /// Each key in its turn.
    pub fn in_turn(count: u64) -> Keys {
        Keys { count, skew: 0.0 }
    }

    /// The range and the exponent of Zipf's law. Its continuous form has an inverse: of a uniform number u the rank is
    /// (1 + u ((n + 1)^(1 - s) - 1))^(1 / (1 - s)). Ranks are then put in no order.
    fn law(&self) -> (f64, f64) {
        let rest = 1.0 - if (self.skew - 1.0).abs() < 1e-6 { 1.0 - 1e-6 } else { self.skew };
        ((self.count as f64 + 1.0).powf(rest) - 1.0, 1.0 / rest)
    }

    /// A key of row `x`.
    fn at(&self, x: u64, factor: u64) -> i64 {
        let count = self.count as i64;
        if self.skew <= 0.0 {
            return (x * factor) as i64 % count;
        }
        let (range, exponent) = self.law();
        let uniform = (x * factor % MODULUS) as f64 / MODULUS as f64;
        let rank = ((1.0 + uniform * range).powf(exponent).floor() as i64 - 1).min(count - 1);
        rank * SPREAD as i64 % count
    }

    /// The same, as SQL.
    fn of_row(&self, factor: u64) -> String {
        let count = self.count;
        if self.skew <= 0.0 {
            return format!("x * {factor} % {count}");
        }
        let (range, exponent) = self.law();
        let uniform = format!("(x * {factor} % {MODULUS})::double precision / {MODULUS}");
        let number = |value: f64| format!("'{value:e}'::double precision");
        let rank = format!(
            "least(floor(power(1 + {uniform} * {}, {}))::bigint - 1, {count} - 1)",
            number(range),
            number(exponent)
        );
        format!("{rank} * {SPREAD} % {count}")
    }
}

/// A prime.
const MODULUS: u64 = 2_147_483_647;
/// Another one: spreads ranks over the keys.
const SPREAD: u64 = 7_368_787;
