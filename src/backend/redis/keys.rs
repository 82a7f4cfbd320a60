//! What a mutex is called on the server: its keys, its channels, its slot in a cluster.

/// The number of slots of a cluster.
pub(super) const SLOTS: u16 = 16_384;

/// The names of one mutex. The braces are literal: what they enclose decides the slot, so that all
/// keys of a mutex lie on one node.
#[derive(Clone, Debug)]
pub(super) struct Keys {
    /// The owner's id, and the channel of `acquired@@`.
    pub(super) mutex: String,
    /// The queue.
    pub(super) queue: String,
    /// Fence and reservation.
    pub(super) lease: String,
    pub(super) slot: u16,
}

impl Keys {
    pub(super) fn of(prefix: &str, mutex: &str) -> Keys {
        let key = format!("{prefix}:{{{mutex}}}");
        Keys {
            queue: format!("{key}:contender"),
            lease: format!("{key}:lease"),
            slot: slot(mutex.as_bytes()),
            mutex: key,
        }
    }

    /// Where the contender `id` is told that its turn has come.
    pub(super) fn turn(&self, id: &str) -> Vec<u8> {
        format!("{}:{id}", self.mutex).into_bytes()
    }

    /// Where the contender `id` is told that it comes after somebody who has a claim time.
    pub(super) fn next(&self, id: &str) -> Vec<u8> {
        format!("{}!next:{id}", self.mutex).into_bytes()
    }

    /// Where everybody is told of a new owner.
    pub(super) fn acquired(&self) -> Vec<u8> {
        self.mutex.clone().into_bytes()
    }

    /// Where observers are told that nobody owns.
    pub(super) fn released(&self) -> Vec<u8> {
        format!("{}!released", self.mutex).into_bytes()
    }
}

/// CRC-16/XMODEM modulo the number of slots, as the cluster specification has it. Computed once per
/// seat, so a table would cost more than it saves.
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
        assert_eq!(
            keys.turn("0:12@10.0.0.1"),
            b"simba:{demo}:0:12@10.0.0.1".to_vec()
        );
    }

    #[test]
    fn the_slot_is_that_of_the_cluster_specification() {
        assert_eq!(slot(b"123456789"), 0x31c3);
        assert_eq!(slot(b"foo"), 12_182); // CLUSTER KEYSLOT foo
    }
}
