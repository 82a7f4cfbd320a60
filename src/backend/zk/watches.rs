//! Which waiter is woken for which node: watches, and the table of them that outlives a connection.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Weak};

use crate::parker::Unparker;

/// Fewer watches than this are not searched for forgotten ones.
const MANY: usize = 128;

/// A watch on one node. Fires once, when something happened to the node.
/// A dropped watch is forgotten: what happens to the node wakes no thread.
#[derive(Debug)]
pub(super) struct Watch {
    state: AtomicU8,
    wakes: Arc<Unparker>,
}

/// The server has not said that it keeps the watch, or something happened. Proves nothing about the node.
const UNSET: u8 = 0;
/// The server keeps it.
const SET: u8 = 1;
/// It was set over an earlier connection. What happened meanwhile is told watch by watch, in any order.
const RESUMED: u8 = 2;
/// The node is gone, by a server's word.
const GONE: u8 = 3;

impl Watch {
    pub(super) fn new(wakes: &Arc<Unparker>) -> Arc<Watch> {
        Arc::new(Watch {
            state: AtomicU8::new(UNSET),
            wakes: Arc::clone(wakes),
        })
    }

    pub(super) fn is_set(&self) -> bool {
        self.state.load(Ordering::Acquire) == SET
    }

    /// Whether the holder will be told when the node goes.
    pub(super) fn is_kept(&self) -> bool {
        matches!(self.state.load(Ordering::Acquire), SET | RESUMED)
    }

    pub(super) fn is_gone(&self) -> bool {
        self.state.load(Ordering::Acquire) == GONE
    }

    fn fire(&self, gone: bool) {
        let state = if gone { GONE } else { UNSET };
        self.state.store(state, Ordering::Release);
        self.wakes.unpark();
    }
}

/// What a watch is set on, as `SetWatches` has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A node that is there: its deletion, or a change of its data.
    Data,
    /// A node that is not there: its creation.
    Exists,
    /// The children of a node, and its deletion.
    Children,
}

/// The watches that the server holds for the session: one per node, with any number of holders. A node has watches of
/// one kind at a time: contenders are watched by their data, mutexes by their children or for their creation.
#[derive(Debug, Default)]
pub(super) struct Watches {
    table: HashMap<String, (Kind, Vec<Weak<Watch>>)>,
}

impl Watches {
    /// The server keeps the watch: called while its reply is read, as the next frame may be the event.
    pub(super) fn add(&mut self, kind: Kind, path: &str, watch: &Weak<Watch>) {
        if let Some(watch) = watch.upgrade() {
            watch.state.store(SET, Ordering::Release);
        }
        let entry = self.table.entry(path.to_owned());
        let (of, holders) = entry.or_insert((kind, Vec::new()));
        *of = kind;
        if holders.len() == holders.capacity() {
            // Only before the list would grow, so that adding to a long one does not read all of it.
            holders.retain(is_held);
        }
        holders.push(Weak::clone(watch));
    }

    /// Something happened to the node, or the server has dropped its watches.
    pub(super) fn fire(&mut self, path: &str, gone: bool) {
        if let Some((_, holders)) = self.table.remove(path) {
            let held = holders.iter().filter_map(Weak::upgrade);
            held.for_each(|watch| watch.fire(gone));
        }
    }

    /// The connection is lost. Wakes every holder; the nodes are watched on over the next connection.
    pub(super) fn disconnected(&self) {
        let holders = self.table.values().flat_map(|(_, holders)| holders);
        for watch in holders.filter_map(Weak::upgrade).filter(|it| it.is_set()) {
            watch.state.store(RESUMED, Ordering::Release);
            watch.wakes.unpark();
        }
    }

    /// The watched paths, for a server that has not heard of them.
    pub(super) fn all(&self) -> impl Iterator<Item = (Kind, &str)> {
        self.table
            .iter()
            .map(|(path, (kind, _))| (*kind, path.as_str()))
    }

    /// Forgets watches without a holder, if there are many watches. Returns their nodes: the server keeps those watches
    /// until it is told.
    pub(super) fn prune(&mut self) -> Vec<String> {
        if self.table.len() < MANY {
            return Vec::new();
        }
        let is_unheld = |holders: &[Weak<Watch>]| !holders.iter().any(is_held);
        let unheld = self.table.extract_if(|_, (_, holders)| is_unheld(holders));
        unheld.map(|(path, _)| path).collect()
    }
}

fn is_held(watch: &Weak<Watch>) -> bool {
    watch.strong_count() > 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Moment;
    use crate::parker::{Parker, Unparked};

    fn add(watches: &mut Watches, kind: Kind, path: &str, watch: &Arc<Watch>) {
        watches.add(kind, path, &Arc::downgrade(watch));
    }

    #[test]
    fn event_fires_every_watch_of_the_node_once() {
        let parker = Parker::new();
        let wake = Arc::new(parker.unparker());
        let mut watches = Watches::default();
        let [one, two, forgotten] = [(); 3].map(|()| Watch::new(&wake));
        for watch in [&one, &two, &forgotten] {
            add(&mut watches, Kind::Data, "/a", watch);
        }
        assert!(one.is_set() && two.is_set());
        drop(forgotten);
        watches.fire("/a", true);
        assert!(one.is_gone() && two.is_gone());
        assert_eq!(parker.park(Moment::now()), Unparked::Wake);
        watches.fire("/a", true);
        assert_eq!(parker.park(Moment::now()), Unparked::Timeout);
        assert_eq!(watches.all().count(), 0);
    }

    /// Events that were missed come one by one: what was told before says nothing about order any more.
    #[test]
    fn watch_of_a_lost_connection_still_tells_of_a_deletion() {
        let parker = Parker::new();
        let mut watches = Watches::default();
        let watch = Watch::new(&Arc::new(parker.unparker()));
        add(&mut watches, Kind::Data, "/a", &watch);
        assert!(watch.is_set() && watch.is_kept());
        for woken in [Unparked::Wake, Unparked::Timeout] {
            watches.disconnected();
            assert!(!watch.is_set() && watch.is_kept() && !watch.is_gone());
            assert_eq!(parker.park(Moment::now()), woken);
        }
        assert_eq!(watches.all().count(), 1);
        watches.fire("/a", true);
        assert!(watch.is_gone() && !watch.is_kept());
        assert_eq!(parker.park(Moment::now()), Unparked::Wake);
    }

    #[test]
    fn dropped_watches_do_not_pile_up() {
        let wake = Arc::new(Parker::new().unparker());
        let mut watches = Watches::default();
        for _ in 0..1000 {
            add(&mut watches, Kind::Data, "/a", &Watch::new(&wake));
        }
        assert!(watches.table.values().all(|(_, list)| list.len() <= 8));
        let held = Watch::new(&wake);
        add(&mut watches, Kind::Data, "/b", &held);
        add(&mut watches, Kind::Data, "/b", &Watch::new(&wake));
        for number in 0..200 {
            let path = format!("/{number}");
            add(&mut watches, Kind::Exists, &path, &Watch::new(&wake));
        }
        let unwatched = watches.prune();
        assert_eq!(unwatched.len(), 201, "all but /b");
        assert!(!unwatched.iter().any(|path| path == "/b"));
        assert_eq!(watches.table.len(), 1);
    }
}
