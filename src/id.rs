//! `ContenderIdGenerator`: names for contenders that have none; and a factory's registry of the ids of its live
//! contenders.

use std::collections::HashSet;
use std::fmt;
use std::fs;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::ThreadId;

use parking_lot::Mutex;

use crate::error::{Error, ErrorKind, Result};

/// The longest id that a generator makes: the width of `owner_id` in the seeds' MySQL table.
const WIDTH: usize = 32;

/// Generates ids that no other contender has.
///
/// Two live contenders of one mutex must never share an id: each would take the other's lease for its
/// own, and both would believe that they own, for up to a ttl. A factory refuses this among its own
/// contenders; across processes, only unique ids prevent it.
///
/// ```
/// use contend::ContenderIdGenerator;
///
/// let id = ContenderIdGenerator::Host.generate(); // like 0:4711@10.0.0.7-93c1f00d
/// assert!(id.len() <= 32 && id != ContenderIdGenerator::Host.generate());
/// assert_eq!(ContenderIdGenerator::Uuid.generate().len(), 32);
/// ```
#[derive(Clone, Default)]
#[non_exhaustive]
pub enum ContenderIdGenerator {
    /// A readable id, `{counter}:{pid}@{host address}-{hex}`. The hex digits are drawn once per process,
    /// because containers share pids and addresses. The default.
    #[default]
    Host,
    /// 32 random hex digits.
    Uuid,
    /// Whatever the closure returns. It must never return the same id twice, in any process.
    Custom(Arc<dyn Fn() -> String + Send + Sync>),
}

impl ContenderIdGenerator {
    /// Creates a generator from a closure.
    ///
    /// ```
    /// use contend::ContenderIdGenerator;
    ///
    /// let pod = "invoice-7d9f"; // unique in the fleet
    /// let ids = ContenderIdGenerator::from_fn(move || {
    ///     format!("{pod}/{}", ContenderIdGenerator::Uuid.generate())
    /// });
    /// assert!(ids.generate().starts_with("invoice-7d9f/"));
    /// ```
    pub fn from_fn(generate: impl Fn() -> String + Send + Sync + 'static) -> ContenderIdGenerator {
        ContenderIdGenerator::Custom(Arc::new(generate))
    }

    /// Returns a new id, of at most 32 bytes unless a closure generates it.
    ///
    /// ```
    /// use contend::ContenderIdGenerator;
    ///
    /// let ids = ContenderIdGenerator::Uuid;
    /// assert_ne!(ids.generate(), ids.generate());
    /// ```
    #[must_use]
    pub fn generate(&self) -> String {
        match self {
            ContenderIdGenerator::Host => host_id(),
            ContenderIdGenerator::Uuid => format!("{:032x}", rand::random::<u128>()),
            ContenderIdGenerator::Custom(generate) => generate(),
        }
    }
}

impl fmt::Debug for ContenderIdGenerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ContenderIdGenerator::Host => "Host",
            ContenderIdGenerator::Uuid => "Uuid",
            ContenderIdGenerator::Custom(_) => "Custom",
        })
    }
}

/// The ids that live contenders of a factory have, and the mutexes that its threads hold or wait for.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    ids: Mutex<HashSet<(Arc<str>, Arc<str>)>>,
    holds: Mutex<HashSet<(ThreadId, Arc<str>)>>,
}

/// The right to contend for a mutex under an id: one id, one contender. Given back on drop.
#[derive(Debug)]
pub(crate) struct LiveId {
    registry: Arc<Registry>,
    key: (Arc<str>, Arc<str>),
}

/// A thread's hold on a mutex; ends on drop, on any thread.
#[derive(Debug)]
pub(crate) struct Hold {
    registry: Arc<Registry>,
    key: (ThreadId, Arc<str>),
}

impl LiveId {
    pub(crate) fn new(registry: &Arc<Registry>, mutex: &Arc<str>, id: &Arc<str>) -> Result<LiveId> {
        let key = (Arc::clone(mutex), Arc::clone(id));
        if registry.ids.lock().insert(key.clone()) {
            let registry = Arc::clone(registry);
            return Ok(LiveId { registry, key });
        }
        Err(Error::new(
            ErrorKind::DuplicateContender,
            format!(
                "{mutex}: a live service or locker of this factory contends as {id:?} already; \
                 two contenders with one id would both believe that they own"
            ),
        ))
    }
}

impl Drop for LiveId {
    fn drop(&mut self) {
        self.registry.ids.lock().remove(&self.key);
    }
}

impl Hold {
    pub(crate) fn new(registry: &Arc<Registry>, mutex: &Arc<str>) -> Result<Hold> {
        let key = (std::thread::current().id(), Arc::clone(mutex));
        if registry.holds.lock().insert(key.clone()) {
            let registry = Arc::clone(registry);
            return Ok(Hold { registry, key });
        }
        Err(Error::new(
            ErrorKind::Reentrant,
            format!(
                "{mutex}: this thread holds the lock already and would wait for itself; drop its guard \
                 first, or pass it on"
            ),
        ))
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.registry.holds.lock().remove(&self.key);
    }
}

fn host_id() -> String {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let counter = COUNTER.fetch_add(1, Ordering::Relaxed);
    let head = format!("{counter}:{}@", std::process::id());
    let tail = format!("-{:08x}", process_salt());
    let address = host_address();
    // Where all of it is too long, the first digits of the address say least.
    let room = WIDTH.saturating_sub(head.len() + tail.len());
    let cut = address.len().saturating_sub(room);
    let mut id = head + &address[cut..] + &tail;
    id.truncate(WIDTH);
    id
}

/// Random digits of this process; drawn anew in a child, which shares the parent's memory but not its pid.
fn process_salt() -> u32 {
    static SALT: OnceLock<(u32, u32)> = OnceLock::new();
    let here = std::process::id();
    match SALT.get_or_init(|| (here, rand::random())) {
        (pid, salt) if *pid == here => *salt,
        (_, salt) => salt ^ here.rotate_left(16),
    }
}

/// An address of this machine that is not a loopback one, if the system tells without a look-up.
fn host_address() -> &'static str {
    static ADDRESS: OnceLock<String> = OnceLock::new();
    ADDRESS.get_or_init(|| {
        let table = fs::read_to_string("/proc/net/fib_trie").unwrap_or_default();
        local_addresses(&table)
            .find(|address| !address.is_loopback())
            .unwrap_or(Ipv4Addr::LOCALHOST)
            .to_string()
    })
}

/// In the kernel's routing trie, the line before `/32 host LOCAL` holds an address of this machine.
fn local_addresses(table: &str) -> impl Iterator<Item = Ipv4Addr> + '_ {
    table
        .lines()
        .zip(table.lines().skip(1))
        .filter(|(_, next)| next.trim() == "/32 host LOCAL")
        .filter_map(|(line, _)| line.trim().strip_prefix("|-- ")?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn ids_are_valid_and_unique() {
        let mut ids = HashSet::new();
        for _ in 0..10_000 {
            for generator in [ContenderIdGenerator::Host, ContenderIdGenerator::Uuid] {
                let id = generator.generate();
                assert!(id.len() <= WIDTH, "{id}");
                crate::name::check_id(&id).unwrap();
                assert!(ids.insert(id));
            }
        }
    }

    #[test]
    fn host_id_shows_the_pid() {
        let (one, two) = (host_id(), host_id());
        assert!(one.contains(&format!(":{}@", std::process::id())), "{one}");
        let hex = one.rsplit_once('-').unwrap().1;
        assert_eq!(hex.len(), 8);
        assert_eq!(Some(hex), two.rsplit_once('-').map(|(_, hex)| hex));
    }

    #[test]
    fn addresses_are_found_in_the_routing_trie() {
        let table = "Main:\n  +-- 0.0.0.0/0\n     |-- 10.1.2.0\n        /24 link UNICAST\n     \
                     |-- 10.1.2.3\n        /32 host LOCAL\n     |-- 127.0.0.1\n        /32 host LOCAL\n";
        let found: Vec<_> = local_addresses(table).map(|a| a.to_string()).collect();
        assert_eq!(found, ["10.1.2.3", "127.0.0.1"]);
    }
}
