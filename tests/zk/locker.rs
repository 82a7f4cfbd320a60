//! What a locker leaves on a ZooKeeper server that did not answer.

use std::time::{Duration, Instant};

use crate::support::{HANG, PATIENCE, factory, name};
use testbed::{ZooKeeperServer, within};

/// Longer than the whole test: what a session has made does not go away by itself.
const SESSION: Duration = Duration::from_secs(30);

/// Neither the attempt nor the way out is answered, but the server makes the node when it goes on. The
/// session lives, and so does the locker: only the locker can take it away.
#[test]
fn a_try_that_a_paused_server_did_not_answer_blocks_nobody_afterwards() {
    within(HANG, || {
        let server = ZooKeeperServer::start();
        let (ours, theirs) = (
            factory(server.addr(), SESSION),
            factory(server.addr(), SESSION),
        );
        let mutex = name("ghost");
        let short = |factory: &contend::Factory| {
            let locker = factory.locker(&mutex).ttl(Duration::from_secs(2));
            locker.build().unwrap()
        };
        let (ours, theirs) = (short(&ours), short(&theirs));
        // Connected, and the parents are there.
        drop(ours.try_lock_for(PATIENCE).unwrap());
        drop(theirs.try_lock_for(PATIENCE).unwrap());

        server.pause();
        let failed = ours.try_lock().unwrap_err();
        println!("not locked: {failed}");
        server.resume();
        let began = Instant::now();
        let guard = theirs
            .try_lock_for(SESSION / 2)
            .expect("no ghost of the attempt is left");
        println!("locked by the other after {:?}", began.elapsed());
        guard.unlock().unwrap();
        drop(ours.try_lock_for(PATIENCE).unwrap());
    });
}
