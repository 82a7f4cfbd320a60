//! Turn-taking with an independent client: the `zookeeper` crate, with nodes named as Curator's
//! LeaderLatch names them.

use std::sync::LazyLock;
use std::time::Duration;

use crate::support::{
    HANG, PATIENCE, factory, granted, line, name, refused, session, soon, woken_seat,
};
use contend::{Moment, Unparked, backend::OnRefusal};
use testbed::{ZooKeeperServer, wait_until, within};
use zookeeper::{Acl, CreateMode, ZooKeeper, ZooKeeperExt};

static SERVER: LazyLock<ZooKeeperServer> = LazyLock::new(ZooKeeperServer::start);

const LONG: Duration = Duration::from_secs(50);

/// What Curator's latch does, by hand.
struct Peer {
    client: ZooKeeper,
    mutex_path: String,
    node: Option<String>,
}

impl Peer {
    fn new(mutex: &str) -> Peer {
        let address = SERVER.addr().to_string();
        let client = ZooKeeper::connect(&address, LONG, |_| {}).unwrap();
        let mutex_path = format!("/simba/{mutex}");
        client.ensure_path(&mutex_path).unwrap();
        Peer {
            client,
            mutex_path,
            node: None,
        }
    }

    fn enter(&mut self, id: &str) {
        let uuid = "0b6e7a2c-6c1f-4f0e-9f43-0c2f5a2d7e11";
        let node = self
            .client
            .create(
                &format!("{}/_c_{uuid}-latch-", self.mutex_path),
                id.as_bytes().to_vec(),
                Acl::open_unsafe().clone(),
                CreateMode::EphemeralSequential,
            )
            .unwrap();
        self.node = Some(node);
    }

    fn leave(&mut self) {
        let node = self.node.take().unwrap();
        self.client.delete(&node, None).unwrap();
    }

    /// In the order in which they lead.
    fn line(&self) -> Vec<String> {
        let mut names = self.client.get_children(&self.mutex_path, false).unwrap();
        names.sort_by_key(|name| name[name.rfind("latch-").unwrap()..].to_owned());
        names
    }

    fn leads(&self) -> bool {
        let node = self.node.as_deref().unwrap();
        self.line()
            .first()
            .is_some_and(|first| node.ends_with(first))
    }

    fn leader(&self) -> Option<String> {
        let first = self.line().into_iter().next()?;
        let path = format!("{}/{first}", self.mutex_path);
        let (data, _) = self.client.get_data(&path, false).ok()?;
        String::from_utf8(data).ok()
    }
}

#[test]
fn leadership_passes_both_ways() {
    within(HANG, || {
        let mutex = name("turns");
        let mut peer = Peer::new(&mutex);
        let service = factory(SERVER.addr(), LONG)
            .contend(&mutex)
            .id("ours")
            .build()
            .unwrap();
        let (observer, _seen) = factory(SERVER.addr(), LONG)
            .observe(&mutex)
            .channel()
            .unwrap();
        observer.start().unwrap();
        let mut last = 0;
        for _ in 0..10 {
            peer.enter("theirs");
            assert!(peer.leads());
            service.start().unwrap();
            wait_until(PATIENCE, "ours sees theirs lead", || {
                service.state().after().is_owner("theirs")
                    && observer.state().after().is_owner("theirs")
            });
            assert!(!service.is_owner());
            peer.leave();
            wait_until(PATIENCE, "ours leads", || service.is_owner());
            assert_eq!(peer.leader().as_deref(), Some("ours"));
            assert!(service.fence().unwrap() > last);
            last = service.fence().unwrap();
            peer.enter("theirs");
            assert!(!peer.leads());
            wait_until(PATIENCE, "the observer sees ours", || {
                observer.state().after().is_owner("ours")
            });
            service.stop().unwrap();
            assert!(peer.leads(), "theirs was next in line");
            peer.leave();
        }
        assert!(peer.line().is_empty());
    });
}

#[test]
fn written_node_makes_no_waiter_lead() {
    within(HANG, || {
        let mutex = name("writes");
        let mut peer = Peer::new(&mutex);
        peer.enter("theirs");
        let factory = factory(SERVER.addr(), LONG);
        let (mut contender, parker) = woken_seat(&factory, &mutex, "ours");
        assert_eq!(
            refused(&mut *contender, OnRefusal::Enqueue).owner_id(),
            "theirs"
        );
        let node = peer.node.clone().unwrap();
        peer.client
            .set_data(&node, b"still theirs".to_vec(), None)
            .unwrap();
        // The watch is used up: that rings, but is no reason to lead.
        assert_eq!(parker.park(soon()), Unparked::Wake);
        assert_eq!(
            refused(&mut *contender, OnRefusal::Enqueue).owner_id(),
            "still theirs"
        );
        assert_eq!(parker.park(Moment::now()), Unparked::Timeout);
        peer.leave();
        assert_eq!(parker.park(soon()), Unparked::Wake);
        granted(&mut *contender, OnRefusal::Enqueue);
    });
}

#[test]
fn node_of_our_id_in_another_session_leads_first() {
    within(HANG, || {
        // What a client of an expired session may still see of its own past, or a peer that took our
        // protection: in line before us it leads, whatever it is called.
        let mutex = name("namesake");
        let mut peer = Peer::new(&mutex);
        peer.enter("ours");
        let service = factory(SERVER.addr(), LONG)
            .contend(&mutex)
            .id("ours")
            .build()
            .unwrap();
        service.start().unwrap();
        let reader = session(SERVER.addr(), LONG);
        wait_until(PATIENCE, "both are in line", || {
            line(&reader, &mutex).len() == 2
        });
        assert!(!service.is_owner());
        peer.leave();
        wait_until(PATIENCE, "ours leads", || service.is_owner());
    });
}
