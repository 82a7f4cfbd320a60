//! Servers that know less than they once told us. ZooKeeper refuses a client that has seen more than the
//! server has, without a word and for ever.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::support::{HANG, PATIENCE, factory, line, name, session, wait_leads};
use contend::Factory;
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

/// A server restored to an older copy has the session, and the node of its leader; one that lost all has neither. Both
/// must go, or they would be in the way until the session times out.
#[test]
fn service_leads_again_on_a_server_that_lost_some_or_all() {
    within(HANG * 2, || {
        let server = ZooKeeperServer::start();
        let older = server.folder().join("older");
        let factory = factory(server.addr(), T);
        let service = factory.contend("m").id("a").build().unwrap();
        service.start().unwrap();
        wait_leads(&service);
        // What the servers have acknowledged is in there.
        copy(&data(&server), &older);
        for restored in [true, false] {
            let nodes = line(&session(server.addr(), T), "m");
            go_ahead(&factory);
            server.kill();
            // The session may have expired then.
            wait_until(PATIENCE, "it has stepped down", || !service.is_owner());
            sleep(T);
            fs::remove_dir_all(data(&server)).unwrap();
            if restored {
                copy(&older, &data(&server));
            }
            server.start();
            let back = Instant::now();
            wait_leads(&service);
            println!("leads again {:?} after the server was back", back.elapsed());
            let reader = session(server.addr(), T);
            wait_until(PATIENCE, "its old node is gone", || {
                line(&reader, "m").iter().all(|name| !nodes.contains(name))
            });
        }
    });
}
