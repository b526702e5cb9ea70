//! Which store a process works on. Two buckets, or two prefixes of one, may be taken for each other; their ids may not.

use std::fmt;
use std::str::FromStr;

use millrace_common::EnvHandle;
use prost::bytes::Bytes;

/// A random number that a record of the log gives to its store: the first one, or that of the first leader that knows of
/// ids. It stays with the store; a restored copy has another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StoreId([u8; 16]);

impl StoreId {
    /// A new one.
    pub fn random(env: &EnvHandle) -> StoreId {
        StoreId::new(env.random(), env.random())
    }

    /// Of its two halves.
    pub fn new(high: u64, low: u64) -> StoreId {
        StoreId(((u128::from(high) << 64) | u128::from(low)).to_be_bytes())
    }

    /// As messages have it. `None`: they have none.
    pub fn from_bytes(bytes: &[u8]) -> Option<StoreId> {
        Some(StoreId(bytes.try_into().ok()?))
    }

    pub fn to_bytes(self) -> Bytes {
        Bytes::copy_from_slice(&self.0)
    }
}

/// As [`StoreId::from_bytes`] reads it.
pub fn bytes_of(id: Option<StoreId>) -> Bytes {
    id.map(StoreId::to_bytes).unwrap_or_default()
}

impl fmt::Display for StoreId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

/// A text that is no store id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a store id has 32 hexadecimal digits")]
pub struct NoStoreId;

impl FromStr for StoreId {
    type Err = NoStoreId;

    fn from_str(text: &str) -> Result<StoreId, NoStoreId> {
        let is_id = text.len() == 32 && text.bytes().all(|b| b.is_ascii_hexdigit());
        let number = u128::from_str_radix(text, 16).ok().filter(|_| is_id).ok_or(NoStoreId)?;
        Ok(StoreId(number.to_be_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_read_as_it_was_written() {
        let id = StoreId::new(0x0102, 0xff);
        let text = "000000000000010200000000000000ff";
        assert_eq!(id.to_string(), text);
        assert_eq!(text.parse::<StoreId>(), Ok(id));
        assert_eq!(StoreId::from_bytes(&id.to_bytes()), Some(id));
        assert_eq!(StoreId::from_bytes(&bytes_of(None)), None);
        for wrong in ["", "ff", &text[1..], "+00000000000010200000000000000ff"] {
            assert_eq!(wrong.parse::<StoreId>(), Err(NoStoreId), "{wrong}");
        }
    }
}
