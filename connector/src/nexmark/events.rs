//! One event of each kind, drawn column by column in the reference generator's order.
//!
//! Each function stops after the last column that is `wanted`; a column before it that is not
//! wanted still consumes its random draws but builds nothing.

use std::sync::LazyLock;

use millrace_common::SqlType;

use super::rng::Rng;
use super::{BASE_TIME_MS, ColumnList, StreamConfig};

const CYCLE: u64 = 50;
const PERSONS: u64 = 1;
const AUCTIONS: u64 = 3;
const FIRST_ID: u64 = 1_000;
const FIRST_CATEGORY: u64 = 10;
const CATEGORIES: u64 = 5;
const ACTIVE_PEOPLE: u64 = 1_000;
const IN_FLIGHT_AUCTIONS: u64 = 100;
/// Ids are drawn up to this far beyond the newest.
const ID_LEAD: u64 = 10;
const HOT_SELLER_RATIO: u64 = 4;
const HOT_AUCTION_RATIO: u64 = 2;
const HOT_BIDDER_RATIO: u64 = 4;
const HOT_CHANNEL_RATIO: u64 = 2;
/// A hot id stays hot for this many ids.
const HOT_BATCH: u64 = 100;
const PERSON_BYTES: usize = 200;
const AUCTION_BYTES: usize = 500;
const BID_BYTES: usize = 100;
const CHANNELS: u32 = 10_000;

const STATES: [&str; 6] = ["az", "ca", "id", "or", "wa", "wy"];
const CITIES: [&str; 10] = [
    "phoenix",
    "los angeles",
    "san francisco",
    "boise",
    "portland",
    "bend",
    "redmond",
    "seattle",
    "kent",
    "cheyenne",
];
const FIRST_NAMES: [&str; 11] = [
    "peter", "paul", "luke", "john", "saul", "vicky", "kate", "julie", "sarah", "deiter", "walter",
];
const LAST_NAMES: [&str; 9] =
    ["shultz", "abrams", "spencer", "white", "bartels", "walton", "smith", "jones", "noris"];
const HOT_CHANNELS: [&str; 4] = ["Google", "Facebook", "Baidu", "Apple"];

/// Which of the three relations an event belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Person,
    Auction,
    Bid,
}

impl Kind {
    pub fn parse(name: &str) -> Option<Kind> {
        match name.to_ascii_lowercase().as_str() {
            "person" => Some(Kind::Person),
            "auction" => Some(Kind::Auction),
            "bid" => Some(Kind::Bid),
            _ => None,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Kind::Person => "person",
            Kind::Auction => "auction",
            Kind::Bid => "bid",
        }
    }

    /// Whether the event with this number is of this kind.
    #[inline]
    pub fn holds(self, number: u64) -> bool {
        let rest = number % CYCLE;
        match self {
            Kind::Person => rest < PERSONS,
            Kind::Auction => (PERSONS..PERSONS + AUCTIONS).contains(&rest),
            Kind::Bid => rest >= PERSONS + AUCTIONS,
        }
    }

    /// Name and type of the columns, in generation order of the relation's definition.
    pub fn columns(self) -> ColumnList {
        const TEXT: SqlType = SqlType::Text;
        const INT: SqlType = SqlType::BigInt;
        const TIME: SqlType = SqlType::Timestamp;
        match self {
            Kind::Person => &[
                ("id", INT),
                ("name", TEXT),
                ("email_address", TEXT),
                ("credit_card", TEXT),
                ("city", TEXT),
                ("state", TEXT),
                ("date_time", TIME),
                ("extra", TEXT),
            ],
            Kind::Auction => &[
                ("id", INT),
                ("item_name", TEXT),
                ("description", TEXT),
                ("initial_bid", INT),
                ("reserve", INT),
                ("date_time", TIME),
                ("expires", TIME),
                ("seller", INT),
                ("category", INT),
                ("extra", TEXT),
            ],
            Kind::Bid => &[
                ("auction", INT),
                ("bidder", INT),
                ("price", INT),
                ("channel", TEXT),
                ("url", TEXT),
                ("date_time", TIME),
                ("extra", TEXT),
            ],
        }
    }
}

/// Where a generated value goes. Text columns are appended to and ended once a row.
pub trait Sink {
    fn wants(&self, column: usize) -> bool;
    fn int(&mut self, column: usize, value: u64);
    /// The bytes of a text column under construction.
    fn text(&mut self, column: usize) -> &mut Vec<u8>;
    /// Ends the row's text in this column.
    fn end_text(&mut self, column: usize);
}

/// Event time in milliseconds, in the reference's own f32 arithmetic.
#[inline]
pub fn timestamp_ms(number: u64, config: &StreamConfig) -> u64 {
    BASE_TIME_MS + ((number as f32 * config.gap_us) / 1_000.0).round() as u64
}

#[inline]
fn last_person(number: u64) -> u64 {
    #[allow(clippy::unnecessary_min_or_max)] // PERSONS is 1 in the reference, and a constant here
    let person = (number % CYCLE).min(PERSONS - 1);
    number / CYCLE * PERSONS + person
}

#[inline]
fn last_auction(number: u64) -> u64 {
    let (cycle, rest) = (number / CYCLE, number % CYCLE);
    if rest < PERSONS {
        // Never asked for the very first event: only bids and auctions refer to auctions.
        cycle.saturating_sub(1) * AUCTIONS + AUCTIONS - 1
    } else {
        cycle * AUCTIONS + (rest - PERSONS).min(AUCTIONS - 1)
    }
}

#[inline]
fn some_person(number: u64, rng: &mut Rng) -> u64 {
    let people = last_person(number) + 1;
    let active = people.min(ACTIVE_PEOPLE);
    people - active + rng.below(active + ID_LEAD)
}

#[inline]
fn some_auction(number: u64, rng: &mut Rng) -> u64 {
    let newest = last_auction(number);
    let oldest = newest.saturating_sub(IN_FLIGHT_AUCTIONS);
    oldest + rng.below(newest - oldest + 1 + ID_LEAD)
}

#[inline]
fn price_of(unit: f32) -> u64 {
    (10.0_f32.powf(unit * 6.0) * 100.0).round() as u64
}

/// The random text that fills a row up to about `desired` bytes.
#[inline]
fn extra(rng: &mut Rng, current: usize, desired: usize, out: &mut Vec<u8>) {
    if current > desired {
        return;
    }
    let rest = desired - current;
    let delta = (rest + 2) / 5;
    let more = if delta == 0 { 0 } else { rng.below(2 * delta as u64) as usize };
    rng.letters(rest - delta + more, out);
}

#[inline]
fn rng_of(number: u64, config: &StreamConfig) -> Rng {
    Rng::seeded(number ^ config.seed_mask)
}

/// Bid columns: 0 auction, 1 bidder, 2 price, 3 channel, 4 url, 5 date_time, 6 extra.
#[inline]
pub fn bid(number: u64, config: &StreamConfig, last: usize, sink: &mut impl Sink) {
    if sink.wants(5) {
        sink.int(5, timestamp_ms(number, config) * 1_000);
    }
    let rng = &mut rng_of(number, config);
    let auction = if rng.below(HOT_AUCTION_RATIO) > 0 {
        last_auction(number) / HOT_BATCH * HOT_BATCH
    } else {
        some_auction(number, rng)
    };
    if sink.wants(0) {
        sink.int(0, auction + FIRST_ID);
    }
    if last == 0 {
        return;
    }
    let bidder = if rng.below(HOT_BIDDER_RATIO) > 0 {
        last_person(number) / HOT_BATCH * HOT_BATCH + 1
    } else {
        some_person(number, rng)
    };
    if sink.wants(1) {
        sink.int(1, bidder + FIRST_ID);
    }
    if last <= 1 {
        return;
    }
    let unit = rng.unit_f32();
    if sink.wants(2) {
        sink.int(2, price_of(unit));
    }
    if last <= 2 {
        return;
    }
    let map = &*CHANNEL_URLS;
    let (channel, url) = if rng.below(HOT_CHANNEL_RATIO) > 0 {
        let i = rng.below(HOT_CHANNELS.len() as u64) as usize;
        (HOT_CHANNELS[i], map.hot_urls[i].as_str())
    } else {
        let entry = &map.entries[rng.below_u32(CHANNELS) as usize];
        (entry.0.as_str(), entry.1.as_str())
    };
    if sink.wants(3) {
        sink.text(3).extend_from_slice(channel.as_bytes());
        sink.end_text(3);
    }
    if sink.wants(4) {
        sink.text(4).extend_from_slice(url.as_bytes());
        sink.end_text(4);
    }
    if sink.wants(6) {
        extra(rng, 32, BID_BYTES, sink.text(6));
        sink.end_text(6);
    }
}

/// Auction columns: 0 id, 1 item_name, 2 description, 3 initial_bid, 4 reserve, 5 date_time,
/// 6 expires, 7 seller, 8 category, 9 extra.
pub fn auction(number: u64, config: &StreamConfig, last: usize, sink: &mut impl Sink) {
    const NAME: usize = 20;
    const DESCRIPTION: usize = 100;
    let time = timestamp_ms(number, config);
    if sink.wants(0) {
        sink.int(0, last_auction(number) + FIRST_ID);
    }
    if sink.wants(5) {
        sink.int(5, time * 1_000);
    }
    if last == 0 {
        return;
    }
    let rng = &mut rng_of(number, config);
    text_or_skip(rng, NAME, 1, sink);
    text_or_skip(rng, DESCRIPTION, 2, sink);
    let initial = price_of(rng.unit_f32());
    if sink.wants(3) {
        sink.int(3, initial);
    }
    let reserve = initial + price_of(rng.unit_f32());
    if sink.wants(4) {
        sink.int(4, reserve);
    }
    let horizon =
        timestamp_ms(number + IN_FLIGHT_AUCTIONS * CYCLE / AUCTIONS, config).saturating_sub(time);
    let length = 1 + rng.below((horizon * 2).max(1));
    if sink.wants(6) {
        sink.int(6, (time + length) * 1_000);
    }
    let seller = if rng.below(HOT_SELLER_RATIO) > 0 {
        last_person(number) / HOT_BATCH * HOT_BATCH
    } else {
        some_person(number, rng)
    };
    if sink.wants(7) {
        sink.int(7, seller + FIRST_ID);
    }
    let category = FIRST_CATEGORY + rng.below(CATEGORIES);
    if sink.wants(8) {
        sink.int(8, category);
    }
    if sink.wants(9) {
        extra(rng, 8 + NAME + DESCRIPTION + 5 * 8, AUCTION_BYTES, sink.text(9));
        sink.end_text(9);
    }
}

fn text_or_skip(rng: &mut Rng, length: usize, column: usize, sink: &mut impl Sink) {
    if sink.wants(column) {
        rng.letters(length, sink.text(column));
        sink.end_text(column);
    } else {
        rng.skip_letters(length);
    }
}

/// Person columns: 0 id, 1 name, 2 email_address, 3 credit_card, 4 city, 5 state, 6 date_time,
/// 7 extra.
pub fn person(number: u64, config: &StreamConfig, last: usize, sink: &mut impl Sink) {
    const EMAIL_NAME: usize = 7;
    const EMAIL_HOST: usize = 5;
    const EMAIL: usize = EMAIL_NAME + 1 + EMAIL_HOST + 4;
    const CARD: usize = 19;
    if sink.wants(0) {
        sink.int(0, last_person(number) + FIRST_ID);
    }
    if sink.wants(6) {
        sink.int(6, timestamp_ms(number, config) * 1_000);
    }
    if last == 0 {
        return;
    }
    let rng = &mut rng_of(number, config);
    let first = FIRST_NAMES[rng.below_u32(FIRST_NAMES.len() as u32) as usize];
    let family = LAST_NAMES[rng.below_u32(LAST_NAMES.len() as u32) as usize];
    if sink.wants(1) {
        let out = sink.text(1);
        out.extend_from_slice(first.as_bytes());
        out.push(b' ');
        out.extend_from_slice(family.as_bytes());
        sink.end_text(1);
    }
    if sink.wants(2) {
        let out = sink.text(2);
        rng.letters(EMAIL_NAME, out);
        out.push(b'@');
        rng.letters(EMAIL_HOST, out);
        out.extend_from_slice(b".com");
        sink.end_text(2);
    } else {
        rng.skip_letters(EMAIL_NAME + EMAIL_HOST);
    }
    let card: [u32; 4] = std::array::from_fn(|_| rng.below_u32(10_000));
    if sink.wants(3) {
        let out = sink.text(3);
        for (i, group) in card.iter().enumerate() {
            if i > 0 {
                out.push(b' ');
            }
            for divisor in [1_000, 100, 10, 1] {
                out.push(b'0' + (group / divisor % 10) as u8);
            }
        }
        sink.end_text(3);
    }
    let city = CITIES[rng.below_u32(CITIES.len() as u32) as usize];
    if sink.wants(4) {
        sink.text(4).extend_from_slice(city.as_bytes());
        sink.end_text(4);
    }
    let state = STATES[rng.below_u32(STATES.len() as u32) as usize];
    if sink.wants(5) {
        sink.text(5).extend_from_slice(state.as_bytes());
        sink.end_text(5);
    }
    if sink.wants(7) {
        let name = first.len() + 1 + family.len();
        let current = 8 + name + EMAIL + CARD + city.len() + state.len();
        extra(rng, current, PERSON_BYTES, sink.text(7));
        sink.end_text(7);
    }
}

/// Channel names and URLs that bids choose from.
struct ChannelUrls {
    entries: Vec<(String, String)>,
    hot_urls: [String; 4],
}

static CHANNEL_URLS: LazyLock<ChannelUrls> = LazyLock::new(|| ChannelUrls {
    entries: (0..CHANNELS).map(channel_entry).collect(),
    hot_urls: std::array::from_fn(|i| base_url(i as u64)),
});

fn channel_entry(i: u32) -> (String, String) {
    let mut url = base_url(u64::from(i));
    if Rng::seeded(u64::from(i)).below_u32(10) > 0 {
        let id = i64::from((i as i32).reverse_bits()).abs();
        url.push_str(&format!("&channel_id={id}"));
    }
    (format!("channel-{i}"), url)
}

fn base_url(seed: u64) -> String {
    let mut rng = Rng::seeded(seed);
    let [a, b, c]: [String; 3] = std::array::from_fn(|_| path_part(&mut rng));
    format!("https://www.nexmark.com/{a}/{b}/{c}/item.htm?query=1")
}

/// Three or four letters, now and then an underscore instead.
fn path_part(rng: &mut Rng) -> String {
    let length = 3 + rng.below(2);
    (0..length)
        .map(|_| if rng.below_u32(13) == 0 { '_' } else { char::from(rng.letter()) })
        .collect()
}
