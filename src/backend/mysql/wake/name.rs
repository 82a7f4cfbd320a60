//! The name of the server-side lock that goes with a mutex.

use std::fmt;
use std::sync::Arc;

/// A name that every server takes (at most 64 characters, case does not matter), and that differs per
/// database, table and mutex: locks of this kind belong to the whole server.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(in crate::backend::mysql) struct WakeName(Arc<str>);

impl WakeName {
    pub(in crate::backend::mysql) fn new(database: &str, table: &str, mutex: &str) -> WakeName {
        // The NUL is in none of the three.
        let hash = fnv1a([database, "\0", table, "\0", mutex]);
        WakeName(format!("contend:{hash:032x}").into())
    }

    /// The name that goes with it and that stands for being the first of those who wait.
    pub(in crate::backend::mysql) fn queue(&self) -> WakeName {
        WakeName(self.0.replacen("contend:", "contend-first:", 1).into())
    }

    /// A name of nobody else's, to know a connection by.
    pub(super) fn unique() -> WakeName {
        WakeName(format!("contend-at:{:032x}", rand::random::<u128>()).into())
    }
}

impl WakeName {
    pub(in crate::backend::mysql) fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for WakeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// FNV-1a, 128 bits: the same in every build and language, which the standard hasher is not. Two
/// mutexes that met in one name would wake each other in vain, and nothing worse.
fn fnv1a<'a>(parts: impl IntoIterator<Item = &'a str>) -> u128 {
    const BASIS: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    parts
        .into_iter()
        .flat_map(str::bytes)
        .fold(BASIS, |hash, byte| {
            (hash ^ u128::from(byte)).wrapping_mul(PRIME)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_the_published_one() {
        assert_eq!(fnv1a([""]), 0x6c62272e07bb014262b821756295c58d);
        assert_eq!(fnv1a(["a"]), 0xd228cb696f1a8caf78912b704e4a8964);
    }

    #[test]
    fn a_name_fits_and_differs_by_database_table_and_mutex() {
        let name = |d, t, m| WakeName::new(d, t, m).as_str().to_owned();
        let one = name("db", "t", "a");
        assert!(one.len() <= 64 && one.to_ascii_lowercase() == one);
        for other in [
            name("db2", "t", "a"),
            name("db", "t2", "a"),
            name("db", "t", "A"),
            WakeName::new("db", "t", "a").queue().as_str().to_owned(),
        ] {
            assert!(other.len() <= 64);
            assert_ne!(one, other);
        }
    }
}
