//! The suite of a user: everything that the fronts do, with exactly the privileges that the README names.
//! (Redis: `redis::settings::the_rights_that_are_listed_suffice_and_each_is_needed`.)

use std::time::Duration;

use contend::semaphore::PermitRequest;
use contend::{EventKind, Factory, Schedule};
use testbed::{MariaDbServer, ZooKeeperServer, wait_until, within};

const LIMIT: Duration = Duration::from_secs(150);
const PATIENCE: Duration = Duration::from_secs(40);

/// Leads, hands over, locks, observes, schedules, inspects and revokes.
fn use_everything(factory: &Factory) {
    factory.ping(Duration::from_secs(10)).unwrap();
    let (first, events) = factory.contend("m").id("first").channel().unwrap();
    first.start().unwrap();
    assert_eq!(
        events.recv_timeout(PATIENCE).unwrap().kind,
        EventKind::Acquired
    );
    let (second, others) = factory.contend("m").id("second").channel().unwrap();
    second.start().unwrap();
    let observer = factory.observe("m").build().unwrap();
    observer.start().unwrap();
    wait_until(PATIENCE, "the observer sees the owner", || {
        observer.state().after().is_owner("first")
    });
    wait_until(PATIENCE, "the second one waits", || {
        second.state().after().is_owner("first")
    });
    assert_eq!(factory.owner("m").unwrap().owner_id(), "first");
    assert!(factory.list().unwrap().iter().any(|mutex| &**mutex == "m"));
    factory.participants("m").unwrap();
    first.stop().unwrap();
    wait_until(PATIENCE, "it was handed over", || second.is_owner());
    let fence = second.fence().unwrap();
    assert!(factory.revoke("m", fence).unwrap());
    wait_until(PATIENCE, "it was taken away, and comes back", || {
        second.fence().is_some_and(|newer| newer > fence)
    });
    drop((second, others, observer));

    let locker = factory.locker("lock").build().unwrap();
    let other = factory.locker("lock").build().unwrap();
    let guard = locker.lock().unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| other.try_lock_for(PATIENCE).map(|guard| guard.fence()));
        // Until it waits.
        std::thread::sleep(Duration::from_millis(300));
        let fence = guard.fence();
        drop(guard);
        assert!(waiting.join().unwrap().unwrap() > fence);
    });
    drop(factory.lock_all(["a", "b"]).lock().unwrap());

    let (runs, done) = contend::crossbeam_channel::unbounded();
    let scheduler = factory
        .scheduler("tick")
        .build(Schedule::every(Duration::from_secs(1)), move |context| {
            let _ = runs.send(context.fence());
        })
        .unwrap();
    scheduler.start().unwrap();
    for _ in 0..2 {
        done.recv_timeout(PATIENCE).unwrap();
    }
    wait_until(PATIENCE, "nothing is wrong", || {
        scheduler.last_error().is_none()
    });
    scheduler.stop().unwrap();
}

/// `SELECT`, `INSERT`, `UPDATE` on the table of mutexes; for semaphores `DELETE` too, on theirs.
#[test]
fn mysql_needs_the_listed_grants_alone() {
    within(LIMIT, || {
        let server = MariaDbServer::start();
        let url = server.create_database("d");
        let root = contend::connect(&format!("{url}?create_table=true")).unwrap();
        drop(root.locker("m").build().unwrap().lock().unwrap());
        root.semaphores().unwrap().create_tables().unwrap();
        server.sql("CREATE USER app IDENTIFIED BY 'pw'");
        server.sql("GRANT SELECT, INSERT, UPDATE ON d.simba_mutex TO app");
        let url = url.replace("root@", "app:pw@");
        use_everything(&contend::connect(&url).unwrap());

        let tables = server.sql(
            "SELECT table_name FROM information_schema.tables \
             WHERE table_schema = 'd' AND table_name <> 'simba_mutex'",
        );
        for table in tables.lines() {
            server.sql(&format!(
                "GRANT SELECT, INSERT, UPDATE, DELETE ON d.{table} TO app"
            ));
        }
        let factory = contend::connect(&url).unwrap();
        let semaphores = factory.semaphores().unwrap();
        // They are there: the right to make them is not needed.
        semaphores.create_tables().unwrap();
        semaphores.create("few", 2).unwrap();
        let request = PermitRequest::new("r").permits("few", 2);
        let guard = semaphores.guard(&request, Duration::from_secs(10)).unwrap();
        assert!(guard.is_valid());
        guard.release().unwrap();
        semaphores.sweep_expired().unwrap();
        semaphores.delete_requests(Duration::ZERO, 10).unwrap();
        assert!(semaphores.check().unwrap().is_empty());
    });
}

/// With a digest the nodes belong to it: others can neither read nor delete them.
#[test]
fn zookeeper_nodes_belong_to_their_digest() {
    within(LIMIT, || {
        let server = ZooKeeperServer::start();
        let hosts = server.addr();
        let ours =
            contend::connect(&format!("zk://app:pw@{hosts}/app?session_timeout=6s")).unwrap();
        use_everything(&ours);
        let guard = ours.locker("mine").build().unwrap().lock().unwrap();
        let theirs = contend::connect(&format!("zk://{hosts}/app?session_timeout=6s")).unwrap();
        // From another thread: this one has the lock, and would be told so without asking the server.
        let other = theirs.locker("mine").build().unwrap();
        let tried =
            std::thread::spawn(move || other.try_lock_for(Duration::from_secs(2)).map(drop));
        let error = tried.join().unwrap().unwrap_err();
        assert_eq!(error.kind(), contend::ErrorKind::Denied, "{error}");
        assert!(theirs.revoke("mine", guard.fence()).is_err());
        assert!(guard.is_valid());
    });
}
