//! Who is woken for which node: watches, and the table of them that outlives a connection.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Weak};

use super::message::{Change, Event};
use crate::parker::Unparker;

/// A watch on one node. Fires once: when something happened to the node, or the session ended.
/// Dropped, it is forgotten, and what happens to the node wakes nobody.
#[derive(Debug)]
pub(super) struct Watch {
    state: AtomicU8,
    wakes: Arc<Unparker>,
}

/// Asked for; the server has not answered yet.
const DUE: u8 = 0;
/// The server keeps it.
const CONFIRMED: u8 = 1;
/// Something happened to the node, or the session ended. Proves nothing about the node.
const CHANGED: u8 = 2;
/// The node is gone, by a server's word.
const GONE: u8 = 3;
/// The server refused to keep it.
const REFUSED: u8 = 4;

impl Watch {
    pub(super) fn new(wakes: &Arc<Unparker>) -> Arc<Watch> {
        Arc::new(Watch {
            state: AtomicU8::new(DUE),
            wakes: Arc::clone(wakes),
        })
    }

    pub(super) fn is_confirmed(&self) -> bool {
        self.state.load(Ordering::Acquire) == CONFIRMED
    }

    pub(super) fn is_due(&self) -> bool {
        self.state.load(Ordering::Acquire) == DUE
    }

    pub(super) fn is_gone(&self) -> bool {
        self.state.load(Ordering::Acquire) == GONE
    }

    pub(super) fn is_refused(&self) -> bool {
        self.state.load(Ordering::Acquire) == REFUSED
    }

    /// The server keeps the watch, unless it has fired by now.
    pub(super) fn confirm(&self) {
        let _ = self
            .state
            .compare_exchange(DUE, CONFIRMED, Ordering::AcqRel, Ordering::Acquire);
    }

    /// The server does not keep the watch. Its holder is woken, and asks again.
    pub(super) fn refuse(&self) {
        self.state.store(REFUSED, Ordering::Release);
        self.wakes.unpark();
    }

    pub(super) fn fire(&self, gone: bool) {
        let state = if gone { GONE } else { CHANGED };
        self.state.store(state, Ordering::Release);
        self.wakes.unpark();
    }
}

/// What a watch is set on. The server keeps these apart, and so does `SetWatches`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    /// A node that is there: its deletion, or a change of its data.
    Data,
    /// A node that is not there: its creation.
    Exists,
    /// The children of a node, and its deletion.
    Children,
}

/// The watches that the server holds for the session. One entry for any number of holders: the server
/// keeps one watch per session and node, and fires it once.
#[derive(Debug, Default)]
pub(super) struct Watches {
    table: HashMap<(Kind, String), Vec<Weak<Watch>>>,
}

impl Watches {
    pub(super) fn add(&mut self, kind: Kind, path: String, watch: &Weak<Watch>) {
        let holders = self.table.entry((kind, path)).or_default();
        if holders.len() == holders.capacity() {
            // Dropped holders did not say so. Looked for only before the list would grow, so that adding
            // to a long one does not read all of it.
            holders.retain(|known| known.strong_count() > 0);
        }
        holders.push(Weak::clone(watch));
    }

    pub(super) fn fire(&mut self, event: Event) {
        let kinds: &[Kind] = match event.change {
            Change::Created => &[Kind::Exists],
            Change::Deleted => &[Kind::Data, Kind::Exists, Kind::Children],
            Change::Data => &[Kind::Data],
            Change::Children => &[Kind::Children],
            Change::Other => &[],
        };
        let mut key = (Kind::Data, event.path);
        for kind in kinds {
            key.0 = *kind;
            let holders = self.table.remove(&key).unwrap_or_default();
            fire_all(holders, event.change == Change::Deleted);
        }
    }

    /// The session is over, and with it every watch.
    pub(super) fn end(&mut self) {
        for (_, holders) in self.table.drain() {
            fire_all(holders, false);
        }
    }

    /// Wakes every holder without firing its watch.
    pub(super) fn unpark_all(&self) {
        for watch in self.table.values().flatten().filter_map(Weak::upgrade) {
            watch.wakes.unpark();
        }
    }

    /// The watched paths of every kind, for a server that has not heard of them. Lists that nobody
    /// waits for any more are dropped.
    pub(super) fn all(&mut self) -> impl Iterator<Item = (Kind, &str)> {
        self.table
            .retain(|_, holders| holders.iter().any(|known| known.strong_count() > 0));
        self.table.keys().map(|(kind, path)| (*kind, path.as_str()))
    }
}

fn fire_all(holders: Vec<Weak<Watch>>, gone: bool) {
    for watch in holders.iter().filter_map(Weak::upgrade) {
        watch.fire(gone);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Moment;
    use crate::parker::{Parker, Unparked};

    #[test]
    fn an_event_fires_every_watch_of_the_node_once_and_none_of_the_forgotten() {
        let parker = Parker::new();
        let wake = Arc::new(parker.unparker());
        let mut watches = Watches::default();
        let held = [(); 3].map(|()| Watch::new(&wake));
        for watch in &held {
            watches.add(Kind::Data, "/a".into(), &Arc::downgrade(watch));
        }
        let [one, two, forgotten] = held;
        one.confirm();
        assert!(one.is_confirmed() && two.is_due());
        drop(forgotten);
        let deleted = Event {
            change: Change::Deleted,
            path: "/a".into(),
        };
        watches.fire(deleted.clone());
        assert!(one.is_gone() && two.is_gone());
        two.confirm();
        assert!(two.is_gone(), "a reply after the event changes nothing");
        assert_eq!(parker.park(Moment::now()), Unparked::Wake);
        watches.fire(deleted);
        assert_eq!(parker.park(Moment::now()), Unparked::Timeout);
        assert_eq!(watches.all().count(), 0);
    }

    #[test]
    fn dropped_watches_do_not_pile_up() {
        let wake = Arc::new(Parker::new().unparker());
        let mut watches = Watches::default();
        for _ in 0..1000 {
            let watch = Watch::new(&wake);
            watches.add(Kind::Data, "/a".into(), &Arc::downgrade(&watch));
        }
        assert!(watches.table.values().all(|list| list.len() <= 8));
        assert_eq!(watches.all().count(), 0);
    }
}
