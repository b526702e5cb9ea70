//! A small deterministic generator of TPC-H-shaped rows and of changes to them.
//!
//! The schema and the queries are the benchmark's; the rows are ours: as many relations, keys and
//! foreign keys, but words and dates from domains so narrow that every query has rows to find at a
//! thousandth of its smallest scale.

use std::fmt::Write;

use super::rng::Rng;

const NATIONS: [(&str, usize); 10] = [
    ("FRANCE", 3),
    ("GERMANY", 3),
    ("BRAZIL", 1),
    ("CANADA", 1),
    ("ARGENTINA", 1),
    ("SAUDI ARABIA", 4),
    ("CHINA", 2),
    ("INDIA", 2),
    ("JAPAN", 2),
    ("KENYA", 0),
];
const REGIONS: [&str; 5] = ["AFRICA", "AMERICA", "ASIA", "EUROPE", "MIDDLE EAST"];
const COLOURS: [&str; 4] = ["green", "forest", "azure", "plum"];
const TYPES: [&str; 5] = [
    "ECONOMY ANODIZED STEEL",
    "PROMO BURNISHED COPPER",
    "LARGE POLISHED BRASS",
    "MEDIUM POLISHED TIN",
    "SMALL PLATED BRASS",
];
const BRANDS: [&str; 4] = ["Brand#12", "Brand#23", "Brand#34", "Brand#45"];
const CONTAINERS: [&str; 4] = ["SM BOX", "MED BOX", "LG BOX", "MED BAG"];
const SIZES: [i64; 5] = [15, 3, 9, 14, 5];
const SEGMENTS: [&str; 3] = ["BUILDING", "MACHINERY", "FURNITURE"];
const PRIORITIES: [&str; 5] = ["1-URGENT", "2-HIGH", "3-MEDIUM", "4-NOT SPECIFIED", "5-LOW"];
const MODES: [&str; 5] = ["MAIL", "SHIP", "AIR", "AIR REG", "TRUCK"];
const INSTRUCTIONS: [&str; 2] = ["DELIVER IN PERSON", "NONE"];
const CODES: [&str; 7] = ["13", "31", "23", "29", "30", "18", "17"];
const COMMENTS: [&str; 4] =
    ["quiet ideas", "special packages and requests", "Customer had Complaints", "bold accounts"];

/// How many rows there are of everything.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub suppliers: i64,
    pub parts: i64,
    pub customers: i64,
    pub orders: i64,
}

impl Sizes {
    /// The benchmark's numbers at a scale factor (1.0: six million line items).
    pub fn of(scale: f64) -> Sizes {
        let at = |n: f64, least: i64| ((n * scale) as i64).max(least);
        Sizes {
            suppliers: at(10_000.0, 12),
            parts: at(200_000.0, 40),
            customers: at(150_000.0, 40),
            orders: at(1_500_000.0, 200),
        }
    }
}

/// Rows of one INSERT.
const BATCH: usize = 500;

pub struct Generator {
    rng: Rng,
    sizes: Sizes,
    next_order: i64,
}

impl Generator {
    pub fn new(seed: u64, sizes: Sizes) -> Generator {
        Generator { rng: Rng::new(seed), sizes, next_order: 1 }
    }

    /// The statements that fill the tables.
    pub fn load(&mut self) -> Vec<String> {
        let mut out = Vec::new();
        let regions: Vec<String> =
            REGIONS.iter().enumerate().map(|(i, r)| format!("({i}, '{r}', NULL)")).collect();
        insert(&mut out, "region", regions);
        let nations = NATIONS.iter().enumerate();
        let nations = nations.map(|(i, (n, r))| format!("({i}, '{n}', {r}, NULL)")).collect();
        insert(&mut out, "nation", nations);
        let sizes = self.sizes;
        let suppliers = (1..=sizes.suppliers).map(|k| self.supplier(k)).collect();
        insert(&mut out, "supplier", suppliers);
        let parts = (1..=sizes.parts).map(|k| self.part(k)).collect();
        insert(&mut out, "part", parts);
        let supplied =
            (1..=sizes.parts).flat_map(|p| (0..4).map(move |i| (p, i))).collect::<Vec<_>>();
        let supplied = supplied.into_iter().map(|(p, i)| self.partsupp(p, i)).collect();
        insert(&mut out, "partsupp", supplied);
        let customers = (1..=sizes.customers).map(|k| self.customer(k)).collect();
        insert(&mut out, "customer", customers);
        out.extend(self.orders(sizes.orders));
        out
    }

    /// New orders with their line items.
    pub fn orders(&mut self, count: i64) -> Vec<String> {
        let (mut orders, mut items) = (Vec::new(), Vec::new());
        for _ in 0..count {
            let key = self.next_order;
            self.next_order += 1;
            orders.push(self.order(key));
            let lines = self.rng.between(1, 7);
            items.extend((1..=lines).map(|line| self.lineitem(key, line)));
        }
        let mut out = Vec::new();
        insert(&mut out, "orders", orders);
        insert(&mut out, "lineitem", items);
        out
    }

    /// One round of changes: new orders, corrections, deletions.
    pub fn changes(&mut self, round: usize) -> Vec<String> {
        let mut out = self.orders(self.sizes.orders / 20 + 1);
        let rng = &mut self.rng;
        let some = |rng: &mut Rng, modulus: i64| rng.between(0, modulus - 1);
        let mut push = |sql: String| out.push(sql);
        push(format!(
            "UPDATE lineitem SET l_quantity = l_quantity + 1, l_discount = 0.06 \
             WHERE (l_orderkey * 7 + l_linenumber) % 31 = {}",
            some(rng, 31)
        ));
        push(format!("DELETE FROM lineitem WHERE l_orderkey % 23 = {}", some(rng, 23)));
        push(format!("DELETE FROM orders WHERE o_orderkey % 23 = {}", some(rng, 23)));
        push(format!(
            "UPDATE orders SET o_orderpriority = '1-URGENT', o_custkey = o_custkey % 7 + 1 \
             WHERE o_orderkey % 19 = {}",
            some(rng, 19)
        ));
        push(format!(
            "UPDATE supplier SET s_nationkey = (s_nationkey + 1) % {}, s_comment = '{}' \
             WHERE s_suppkey % 5 = {}",
            NATIONS.len(),
            rng.pick(&COMMENTS),
            some(rng, 5)
        ));
        push(format!(
            "UPDATE part SET p_brand = '{}', p_type = '{}' WHERE p_partkey % 9 = {}",
            rng.pick(&BRANDS),
            rng.pick(&TYPES),
            some(rng, 9)
        ));
        push(format!(
            "UPDATE partsupp SET ps_supplycost = ps_supplycost * 0.5, ps_availqty = ps_availqty + 9 \
             WHERE ps_partkey % 6 = {}",
            some(rng, 6)
        ));
        push(format!(
            "UPDATE customer SET c_acctbal = -c_acctbal, c_mktsegment = 'BUILDING' \
             WHERE c_custkey % 8 = {}",
            some(rng, 8)
        ));
        if round % 2 == 1 {
            push(format!("DELETE FROM partsupp WHERE ps_suppkey % 6 = {}", some(rng, 6)));
            push("UPDATE nation SET n_name = n_name || 'X' WHERE n_nationkey = 7".to_string());
        }
        out
    }

    fn money(&mut self, low: i64, high: i64) -> String {
        let cents = self.rng.between(low * 100, high * 100);
        let sign = if cents < 0 { "-" } else { "" };
        format!("{sign}{}.{:02}", cents.abs() / 100, cents.abs() % 100)
    }

    fn phone(&mut self) -> String {
        format!("{}-{:03}", self.rng.pick(&CODES), self.rng.between(0, 999))
    }

    /// A day between 1992 and 1998, `shift` days later.
    fn day(&mut self) -> i64 {
        self.rng.between(0, 7 * 365)
    }

    fn supplier(&mut self, k: i64) -> String {
        let nation = self.rng.below(NATIONS.len());
        let (phone, balance) = (self.phone(), self.money(-900, 9_000));
        let comment = self.rng.pick(&COMMENTS);
        format!("({k}, 'Supplier#{k}', 'street {k}', {nation}, '{phone}', {balance}, '{comment}')")
    }

    fn part(&mut self, k: i64) -> String {
        let rng = &mut self.rng;
        let name = format!("{} {}", rng.pick(&COLOURS), rng.pick(&COLOURS));
        let (brand, kind) = (rng.pick(&BRANDS), rng.pick(&TYPES));
        let (size, container) = (SIZES[rng.below(SIZES.len())], rng.pick(&CONTAINERS));
        let price = self.money(900, 2_000);
        format!("({k}, '{name}', 'Maker', '{brand}', '{kind}', {size}, '{container}', {price}, '')")
    }

    fn supplier_of(&self, part: i64, i: i64) -> i64 {
        (part + i * (self.sizes.suppliers / 4)) % self.sizes.suppliers + 1
    }

    fn partsupp(&mut self, part: i64, i: i64) -> String {
        let supplier = self.supplier_of(part, i);
        let (quantity, cost) = (self.rng.between(1, 60), self.money(1, 50));
        format!("({part}, {supplier}, {quantity}, {cost}, '')")
    }

    fn customer(&mut self, k: i64) -> String {
        let nation = self.rng.below(NATIONS.len());
        let (phone, balance) = (self.phone(), self.money(-900, 9_000));
        let (segment, comment) = (self.rng.pick(&SEGMENTS), self.rng.pick(&COMMENTS));
        format!(
            "({k}, 'Customer#{k}', 'street {k}', {nation}, '{phone}', {balance}, '{segment}', '{comment}')"
        )
    }

    fn order(&mut self, key: i64) -> String {
        // A third of the customers order nothing.
        let customer = loop {
            let c = self.rng.between(1, self.sizes.customers);
            if c % 3 != 0 {
                break c;
            }
        };
        let status = if self.rng.chance(50) { "F" } else { "O" };
        let (total, day) = (self.money(1_000, 90_000), self.day());
        let (priority, comment) = (self.rng.pick(&PRIORITIES), self.rng.pick(&COMMENTS));
        format!(
            "({key}, {customer}, '{status}', {total}, date '1992-01-01' + {day}, '{priority}', \
             'Clerk', 0, '{comment}')"
        )
    }

    fn lineitem(&mut self, order: i64, line: i64) -> String {
        let part = self.rng.between(1, self.sizes.parts);
        let i = self.rng.between(0, 3);
        let supplier = self.supplier_of(part, i);
        let quantity = self.rng.between(1, 50);
        let price = self.money(900, 50_000);
        let (discount, tax) = (self.rng.between(0, 10), self.rng.between(0, 8));
        let (flag, status) = (self.rng.pick(&["R", "A", "N"]), self.rng.pick(&["O", "F"]));
        let ship = self.day();
        let (commit, receipt) = (ship + self.rng.between(-20, 30), ship + self.rng.between(1, 30));
        let (how, mode) = (self.rng.pick(&INSTRUCTIONS), self.rng.pick(&MODES));
        let date = |day: i64| format!("date '1992-01-01' + {day}");
        format!(
            "({order}, {part}, {supplier}, {line}, {quantity}, {price}, 0.{discount:02}, 0.{tax:02}, \
             '{flag}', '{status}', {}, {}, {}, '{how}', '{mode}', '')",
            date(ship),
            date(commit),
            date(receipt)
        )
    }
}

fn insert(out: &mut Vec<String>, table: &str, rows: Vec<String>) {
    for rows in rows.chunks(BATCH) {
        let mut sql = String::new();
        let _ = write!(sql, "INSERT INTO {table} VALUES {}", rows.join(", "));
        out.push(sql);
    }
}
