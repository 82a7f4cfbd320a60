//! Who is told about which node: sentinels, and the table of them that outlives a connection.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::message::{Change, Event};
use crate::bell::Waker;

/// Whom to wake, once there is somebody: a seat can watch before anybody listens.
#[derive(Debug, Default)]
pub(super) struct Alarm {
    waker: Mutex<Option<Waker>>,
}

impl Alarm {
    pub(super) fn set(&self, waker: Option<&Waker>) {
        *self.waker.lock() = waker.cloned();
    }

    pub(super) fn is_set(&self) -> bool {
        self.waker.lock().is_some()
    }

    pub(super) fn ring(&self) {
        if let Some(waker) = &*self.waker.lock() {
            waker.wake();
        }
    }
}

/// One look-out at one node. Fires once: when something happened to the node, or the session ended.
/// Dropped, it is forgotten, and what happens to the node rings nobody.
#[derive(Debug)]
pub(super) struct Sentinel {
    fired: AtomicBool,
    /// Told by a server: the node was deleted. A watch that fired for another reason proves nothing.
    gone: AtomicBool,
    alarm: Arc<Alarm>,
}

impl Sentinel {
    pub(super) fn new(alarm: &Arc<Alarm>) -> Arc<Sentinel> {
        Arc::new(Sentinel {
            fired: AtomicBool::new(false),
            gone: AtomicBool::new(false),
            alarm: Arc::clone(alarm),
        })
    }

    pub(super) fn has_fired(&self) -> bool {
        self.fired.load(Ordering::Acquire)
    }

    pub(super) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    pub(super) fn fire(&self, gone: bool) {
        self.gone.store(gone, Ordering::Release);
        self.fired.store(true, Ordering::Release);
        self.alarm.ring();
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

/// The watches that the server holds for the session. One entry for any number of sentinels: the
/// server keeps one watch per session and node, and tells once.
#[derive(Debug, Default)]
pub(super) struct Watches {
    table: HashMap<(Kind, String), Vec<Weak<Sentinel>>>,
}

impl Watches {
    pub(super) fn add(&mut self, kind: Kind, path: String, sentinel: &Weak<Sentinel>) {
        let sentinels = self.table.entry((kind, path)).or_default();
        // Whoever left did not say so: without this, watching a quiet node over and over would pile up.
        sentinels.retain(|known| known.strong_count() > 0);
        sentinels.push(Weak::clone(sentinel));
    }

    pub(super) fn fire(&mut self, event: Event) {
        let kinds: &[Kind] = match event.change {
            Change::Created => &[Kind::Exists],
            Change::Deleted => &[Kind::Data, Kind::Exists, Kind::Children],
            Change::Data => &[Kind::Data],
            Change::Children => &[Kind::Children],
            Change::Other => &[],
        };
        for kind in kinds {
            let key = (*kind, event.path.clone());
            let sentinels = self.table.remove(&key).unwrap_or_default();
            fire_all(sentinels, event.change == Change::Deleted);
        }
    }

    /// The session is over, and with it every watch.
    pub(super) fn end(&mut self) {
        for (_, sentinels) in self.table.drain() {
            fire_all(sentinels, false);
        }
    }

    /// The watched paths of every kind, for a server that has not heard of them. Lists that nobody
    /// waits for any more are dropped.
    pub(super) fn all(&mut self) -> impl Iterator<Item = (Kind, &str)> {
        self.table
            .retain(|_, sentinels| sentinels.iter().any(|known| known.strong_count() > 0));
        self.table.keys().map(|(kind, path)| (*kind, path.as_str()))
    }
}

fn fire_all(sentinels: Vec<Weak<Sentinel>>, gone: bool) {
    for sentinel in sentinels.iter().filter_map(Weak::upgrade) {
        sentinel.fire(gone);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Bell, Moment, Ring};

    #[test]
    fn an_event_fires_every_sentinel_of_the_node_once_and_none_of_the_forgotten() {
        let bell = Bell::new();
        let alarm = Arc::new(Alarm::default());
        alarm.set(Some(&bell.waker()));
        let mut watches = Watches::default();
        let sentinels = [(); 3].map(|()| Sentinel::new(&alarm));
        for sentinel in &sentinels {
            watches.add(Kind::Data, "/a".into(), &Arc::downgrade(sentinel));
        }
        let [one, two, forgotten] = sentinels;
        drop(forgotten);
        let deleted = Event {
            change: Change::Deleted,
            path: "/a".into(),
        };
        watches.fire(deleted.clone());
        assert!(one.has_fired() && two.is_gone());
        assert_eq!(bell.wait(Moment::now()), Ring::Wake);
        watches.fire(deleted);
        assert_eq!(bell.wait(Moment::now()), Ring::Silence);
        assert_eq!(watches.all().count(), 0);
    }

    #[test]
    fn sentinels_that_left_do_not_pile_up() {
        let alarm = Arc::new(Alarm::default());
        let mut watches = Watches::default();
        for _ in 0..1000 {
            let sentinel = Sentinel::new(&alarm);
            watches.add(Kind::Data, "/a".into(), &Arc::downgrade(&sentinel));
        }
        assert!(watches.table.values().all(|list| list.len() <= 2));
        assert_eq!(watches.all().count(), 0);
    }
}
