//! What a mutex is called on the server: its keys, its channels, its slot in a cluster.

use super::subscriber::Channel;

/// The number of slots of a cluster.
pub(super) const SLOTS: u16 = 16_384;

/// The names of one mutex. The braces are literal: what they enclose decides the slot, so that all
/// keys of a mutex lie on one node. No name contains a brace, so nothing here can be a key or channel of
/// another mutex or id.
pub(super) struct Keys {
    /// The owner's id; also the channel of `acquired@@ID` and `released@@ID`.
    pub(super) mutex: String,
    /// The fence of the present ownership.
    pub(super) token: String,
    /// The last fence.
    pub(super) fence: String,
    /// Who waits.
    pub(super) queue: String,
    /// When the mutex's schedule ran last.
    pub(super) run: String,
    pub(super) slot: u16,
}

impl Keys {
    pub(super) fn of(prefix: &str, mutex: &str) -> Keys {
        let key = format!("{prefix}:{{{mutex}}}");
        Keys {
            token: format!("{key}:token"),
            fence: format!("{key}:fence"),
            queue: format!("{key}:contender"),
            run: format!("{key}:run"),
            slot: slot(mutex.as_bytes()),
            mutex: key,
        }
    }

    /// The channels of changes of ownership and of hand-overs, and the one on which the contender `id` hears that its
    /// turn has come.
    pub(super) fn channels(&self, id: Option<&str>) -> Vec<(Vec<u8>, Channel)> {
        let mutex = &self.mutex;
        let mut channels = vec![
            (mutex.clone().into_bytes(), Channel::Changes),
            (format!("{mutex}!handed").into_bytes(), Channel::Handed),
        ];
        if let Some(id) = id {
            channels.push((format!("{mutex}:{id}").into_bytes(), Channel::Turn));
        }
        channels
    }

    /// The name of the mutex to which `key` belongs, if it is an owner's or a queue's.
    pub(super) fn mutex_of<'a>(prefix: &str, key: &'a str) -> Option<&'a str> {
        let rest = key.strip_prefix(prefix)?.strip_prefix(":{")?;
        let (name, suffix) = rest.rsplit_once('}')?;
        (suffix.is_empty() || suffix == ":contender").then_some(name)
    }
}

/// CRC-16/XMODEM modulo the number of slots, as the cluster specification has it. Computed once per
/// contender, so a table would cost more than it saves.
fn slot(tag: &[u8]) -> u16 {
    let mut crc: u16 = 0;
    for &byte in tag {
        crc ^= u16::from(byte) << 8;
        for _ in 0..8 {
            let carry = crc & 0x8000 != 0;
            crc <<= 1;
            if carry {
                crc ^= 0x1021;
            }
        }
    }
    crc % SLOTS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_are_those_of_simba() {
        let keys = Keys::of("simba", "demo");
        assert_eq!(keys.mutex, "simba:{demo}");
        assert_eq!(keys.queue, "simba:{demo}:contender");
        assert_eq!(keys.fence, "simba:{demo}:fence");
        assert_eq!(keys.token, "simba:{demo}:token");
        let channels = keys.channels(Some("0:12@10.0.0.1"));
        let names: Vec<_> = channels.iter().map(|(name, _)| &**name).collect();
        let expected: [&[u8]; 3] = [
            b"simba:{demo}",
            b"simba:{demo}!handed",
            b"simba:{demo}:0:12@10.0.0.1",
        ];
        assert_eq!(names, expected);
    }

    #[test]
    fn a_mutex_is_found_by_its_owner_and_by_its_queue() {
        let mutex_of = |key| Keys::mutex_of("simba", key);
        assert_eq!(mutex_of("simba:{demo}"), Some("demo"));
        assert_eq!(mutex_of("simba:{demo}:contender"), Some("demo"));
        assert_eq!(mutex_of("simba:{demo}:fence"), None);
        assert_eq!(mutex_of("simba:{demo}:run"), None);
        assert_eq!(mutex_of("simbas:{demo}"), None);
        assert_eq!(mutex_of("simba:demo"), None);
    }

    #[test]
    fn the_slot_is_that_of_the_cluster_specification() {
        assert_eq!(slot(b"123456789"), 0x31c3);
        assert_eq!(slot(b"foo"), 12_182); // CLUSTER KEYSLOT foo
    }
}
