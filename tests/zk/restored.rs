//! Servers that know less than they once told us. ZooKeeper refuses a client that has seen more than the
//! server has, without a word and for ever.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::support::{HANG, PATIENCE, Verbs, factory, name, session, soon, wait_for, wait_leads};
use contend::zk::{Mode, SessionState};
use contend::{Factory, Moment};
use testbed::{ZooKeeperServer, wait_until, within};

const T: Duration = Duration::from_secs(3);

fn data(server: &ZooKeeperServer) -> PathBuf {
    server.folder().join("data").join("version-2")
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for file in fs::read_dir(from).unwrap() {
        let file = file.unwrap().path();
        fs::copy(&file, to.join(file.file_name().unwrap())).unwrap();
    }
}

/// Each cycle is two changes, and both are seen.
fn go_ahead(factory: &Factory) {
    let locker = factory.locker(name("ahead")).build().unwrap();
    for _ in 0..50 {
        drop(locker.try_lock_for(PATIENCE).unwrap());
    }
}

#[test]
fn service_leads_again_on_a_server_that_lost_all() {
    within(HANG, || {
        let server = ZooKeeperServer::start();
        let factory = factory(server.addr(), T);
        let service = factory.contend("m").id("a").build().unwrap();
        service.start().unwrap();
        wait_leads(&service);
        go_ahead(&factory);
        server.kill();
        fs::remove_dir_all(data(&server)).unwrap();
        server.start();
        let back = Instant::now();
        wait_until(PATIENCE, "it has stepped down", || !service.is_owner());
        wait_leads(&service);
        println!("leads again {:?} after the server was back", back.elapsed());
    });
}

/// The copy has the session, and a node of it: both must go, or they would be in the way until the
/// session times out, and the client must not go on with what it remembers.
#[test]
fn session_ends_on_a_server_restored_to_an_older_copy() {
    within(HANG, || {
        let server = ZooKeeperServer::start();
        let older = server.folder().join("older");
        let ours = session(server.addr(), T);
        let (known, _) = ours
            .create("/known-", b"", Mode::EphemeralSequential, soon())
            .unwrap();
        // What it has acknowledged is in there.
        copy(&data(&server), &older);
        for _ in 0..50 {
            ours.create("/x", b"", Mode::Persistent, soon()).unwrap();
            ours.delete("/x", soon()).unwrap();
        }
        server.kill();
        let alive_until = ours.alive_until().unwrap();
        wait_until(PATIENCE, "the session may have expired", || {
            alive_until < Moment::now()
        });
        assert_eq!(ours.state(), SessionState::Suspended);
        fs::remove_dir_all(data(&server)).unwrap();
        copy(&older, &data(&server));
        server.start();
        let back = Instant::now();
        wait_for(&ours, SessionState::Expired);
        println!("given up {:?} after the server was back", back.elapsed());
        let reader = session(server.addr(), T);
        wait_until(PATIENCE, "its node is gone", || {
            reader.exists(&known, soon()).unwrap().is_none()
        });
    });
}
