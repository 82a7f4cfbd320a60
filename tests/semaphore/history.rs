//! A history of acquires and releases by several clients whose connections are cut and whose replies are lost, checked
//! against a model. (What killed and paused processes believe: the campaign.)
//!
//! Triggers write every permit that is granted or released into a table, in the order in which the semaphores' rows
//! were locked, so that the sum of what is held is known at every commit.
//!
//! `CONTEND_HISTORY_SECONDS` sets how long it lasts (default 8).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::ground::{PATIENCE, connect, database, number};
use crate::mysql_ground::{ms, operator};
use contend::semaphore::{Acquisition, Permit, PermitRequest, Release, Semaphores};
use mysql::prelude::Queryable;
use rand::RngExt;
use testbed::{Proxy, wait_until, within};

const CLIENTS: usize = 3;
const THREADS: usize = 4;
const CAPACITIES: [(&str, u32); 5] = [("a", 2), ("b", 3), ("c", 4), ("d", 6), ("e", 8)];
const TTL: Duration = Duration::from_millis(5_200);

const TRIGGERS: [&str; 5] = [
    "CREATE TABLE audit (id BIGINT AUTO_INCREMENT PRIMARY KEY, semaphore_id BIGINT, permit_id BIGINT, \
     change_by INT)",
    "CREATE TABLE violation (semaphore_id BIGINT, used BIGINT)",
    "CREATE TRIGGER granted AFTER INSERT ON contend_permit FOR EACH ROW \
     INSERT INTO audit (semaphore_id, permit_id, change_by) VALUES (NEW.semaphore_id, NEW.id, NEW.count)",
    "CREATE TRIGGER changed AFTER UPDATE ON contend_permit FOR EACH ROW \
     INSERT INTO audit (semaphore_id, permit_id, change_by) SELECT NEW.semaphore_id, NEW.id, \
     IF(NEW.state = 'RELEASED', -NEW.count, NEW.count) FROM DUAL WHERE NEW.state <> OLD.state",
    "CREATE TRIGGER counted AFTER UPDATE ON contend_semaphore FOR EACH ROW \
     INSERT INTO violation SELECT NEW.id, NEW.used FROM DUAL \
     WHERE NEW.used > NEW.capacity OR NEW.used < 0",
];

/// A number for each semaphore: how many permits, or under which fence.
type Numbers = BTreeMap<String, u64>;

/// What was asked for under an external id, and what its caller was told that it got.
struct Entry {
    id: String,
    wish: Numbers,
    got: Option<Numbers>,
}

fn fences(permits: &[Permit]) -> Numbers {
    let pairs = permits
        .iter()
        .map(|it| (it.semaphore.to_string(), it.fence));
    pairs.collect()
}

/// Acquires and releases until it is over. `direct` is another process without faults.
fn work(semaphores: &Semaphores, direct: &Semaphores, over: &AtomicBool) -> Vec<Entry> {
    let mut rng = rand::rng();
    let mut journal = Vec::new();
    let is_over = || over.load(Ordering::SeqCst);
    while !is_over() {
        let id = format!("{:016x}", rng.random::<u64>());
        let mut wish = Numbers::new();
        for _ in 0..rng.random_range(1..=3) {
            let (name, _) = CAPACITIES[rng.random_range(0..CAPACITIES.len())];
            wish.insert(name.to_owned(), rng.random_range(1..=2));
        }
        let request = wish.iter().fold(PermitRequest::new(&*id), |it, (name, n)| {
            it.permits(&**name, *n as u32)
        });
        let request = request.ttl(TTL);
        let got = loop {
            let timeout = ms(if rng.random() { 0 } else { 100 });
            match semaphores.acquire_for(&request, timeout) {
                Ok(
                    Acquisition::Acquired(permits) | Acquisition::AlreadyAcquired { permits, .. },
                ) => break Some(fences(&permits)),
                Ok(_) => break None,
                // Again, under the same external id.
                Err(error) if error.is_transient() && !is_over() => {}
                Err(error) if error.is_transient() => break None,
                Err(error) => panic!("{id}: {error}"),
            }
        };
        if let (Some(got), true) = (&got, rng.random_range(0..4) == 0)
            && let Acquisition::AlreadyAcquired { permits, .. } = direct.acquire(&request).unwrap()
        {
            assert_eq!(&fences(&permits), got, "{id}: another process is told");
        }
        // Some are never released: a sweep has to.
        if got.is_some() && rng.random_range(0..20) > 0 {
            release(semaphores, &id, &is_over);
        }
        journal.push(Entry { id, wish, got });
    }
    journal
}

/// Releases, again and again while that fails, until it is over.
fn release(semaphores: &Semaphores, id: &str, is_over: &dyn Fn() -> bool) {
    loop {
        match semaphores.release(id) {
            Ok(Release::Unknown) => panic!("{id} was acquired, and is not known"),
            Ok(_) => return,
            Err(error) if error.is_transient() && !is_over() => {}
            Err(error) if error.is_transient() => return,
            Err(error) => panic!("{id}: {error}"),
        }
    }
}

#[test]
fn commits_stay_within_capacity() {
    let seconds = std::env::var("CONTEND_HISTORY_SECONDS");
    let length = Duration::from_secs(seconds.map_or(8, |text| text.parse().unwrap()));
    within(length + PATIENCE * 3, || {
        let url = database();
        for trigger in TRIGGERS {
            operator(&url).query_drop(trigger).unwrap();
        }
        let direct = connect(&url);
        for (name, capacity) in CAPACITIES {
            direct.create(name, capacity).unwrap();
        }
        let proxies: Vec<Proxy> = (0..CLIENTS).map(|_| Proxy::before(&url)).collect();
        let clients = proxies.iter().map(|it| connect(&it.url(&url)));
        let clients: Vec<Semaphores> = clients.collect();
        let over = AtomicBool::new(false);
        let journal: Vec<Entry> = thread::scope(|scope| {
            let workers = (0..CLIENTS * THREADS).map(|number| {
                let (client, direct, over) = (&clients[number % CLIENTS], &direct, &over);
                scope.spawn(move || work(client, direct, over))
            });
            let workers: Vec<_> = workers.collect();
            misbehave(&proxies, &direct, length);
            over.store(true, Ordering::SeqCst);
            let journals = workers.into_iter().map(|it| it.join().unwrap());
            journals.flatten().collect()
        });
        wait_until(PATIENCE, "nothing is held any more", || {
            direct.sweep_expired().unwrap();
            number(&url, "SELECT SUM(used) FROM contend_semaphore") == 0
        });
        for table in ["contend_permit", "contend_permit_request"] {
            let held = format!("SELECT COUNT(*) FROM {table} WHERE state = 'ACQUIRED'");
            assert_eq!(number(&url, &held), 0);
        }
        check_commits(&url);
        let grants = check_grants(&url, &journal);
        let lost: usize = proxies.iter().map(Proxy::lost_replies).sum();
        println!("{grants} grants in {length:?}, {lost} lost replies");
        assert!(grants > 100 && lost > 0, "{grants} grants, {lost} lost");
        assert_eq!(direct.check().unwrap(), []);
    });
}

/// Cuts connections, loses replies, and sweeps all the while.
fn misbehave(proxies: &[Proxy], direct: &Semaphores, length: Duration) {
    let mut rng = rand::rng();
    let start = Instant::now();
    while start.elapsed() < length {
        thread::sleep(ms(rng.random_range(20..120)));
        let proxy = &proxies[rng.random_range(0..proxies.len())];
        match rng.random_range(0..6) {
            0 => proxy.cut(),
            1 => proxy.reset(),
            2 | 3 => proxy.lose_reply_to(b"INSERT INTO `contend_permit_request`"),
            4 => proxy.lose_next_reply(),
            _ => drop(direct.sweep_expired().unwrap()),
        }
    }
    proxies.iter().for_each(Proxy::pass);
}

/// At no commit more was held than there is, and each permit was granted and released once.
fn check_commits(url: &str) {
    let mut conn = operator(url);
    let violations: Vec<(u64, i64)> = conn.query("SELECT * FROM violation").unwrap();
    assert_eq!(violations, [], "counters beyond their capacity");
    let audit: Vec<(String, i64, u64, i64)> = conn
        .query(
            "SELECT s.name, s.capacity, a.permit_id, a.change_by FROM audit a \
             JOIN contend_semaphore s ON s.id = a.semaphore_id ORDER BY a.id",
        )
        .unwrap();
    let mut held: HashMap<String, i64> = HashMap::new();
    let (mut live, mut seen) = (BTreeSet::new(), BTreeSet::new());
    for (name, capacity, permit, change) in audit {
        let sum = held.entry(name.clone()).or_default();
        *sum += change;
        assert!((0..=capacity).contains(sum), "{name} holds {sum}");
        if change > 0 {
            let is_new = seen.insert(permit) && live.insert(permit);
            assert!(is_new, "{permit} granted twice");
        } else {
            assert!(live.remove(&permit), "{permit} released twice");
        }
    }
    assert!(live.is_empty() && held.values().all(|sum| *sum == 0));
}

/// What was granted is what was asked for, all or nothing, and what the callers were told.
fn check_grants(url: &str, journal: &[Entry]) -> usize {
    let rows: Vec<(String, String, u64, u64)> = operator(url)
        .query(
            "SELECT r.external_id, s.name, p.count, p.id FROM contend_permit_request r \
             JOIN contend_permit p ON p.permit_request_id = r.id \
             JOIN contend_semaphore s ON s.id = p.semaphore_id",
        )
        .unwrap();
    let mut granted: HashMap<String, (Numbers, Numbers)> = HashMap::new();
    for (id, semaphore, count, fence) in rows {
        let (counts, fences) = granted.entry(id).or_default();
        counts.insert(semaphore.clone(), count);
        fences.insert(semaphore, fence);
    }
    let grants = granted.len();
    for Entry { id, wish, got } in journal {
        match (granted.remove(id), got) {
            (Some((counts, fences)), got) => {
                assert_eq!(&counts, wish, "{id} was granted in part");
                assert!(got.as_ref().is_none_or(|got| *got == fences), "{id}");
            }
            (None, got) => assert_eq!(got, &None, "{id} was told of a grant that is not there"),
        }
    }
    let unasked: Vec<&String> = granted.keys().collect();
    assert!(unasked.is_empty(), "{unasked:?}");
    grants
}
