//! A history of acquires and releases by several processes that are killed, and whose connections are
//! cut, checked against a model.
//!
//! Triggers write every permit that is granted or released into a table, in the order in which the
//! semaphores' rows were locked, so that the sum of what is held is known at every commit. Each worker
//! keeps a journal of what it asked for and what it was told.
//!
//! `CONTEND_HISTORY_SECONDS` sets how long it lasts (default 12).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use crate::ground::{addr_of, connect, database, number, through};
use crate::mysql_ground::{ms, operator};
use contend::semaphore::{Acquisition, PermitRequest, Release, Semaphores};
use mysql::prelude::Queryable;
use rand::RngExt;
use testbed::{Output, Process, Proxy, TempDir, wait_until, within};

const PROCESSES: usize = 4;
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

/// One line of a journal.
#[derive(Clone, Debug, PartialEq)]
enum Entry {
    Wants(String, BTreeMap<String, u32>),
    Got(String, BTreeMap<String, u64>),
    /// This external id is over and done with, as far as the worker cares.
    Done(String),
}

fn read_journal(path: &Path) -> Vec<Entry> {
    let text = fs::read_to_string(path).unwrap_or_default();
    // A line without an end was being written when its process was killed.
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let pairs = |text: &str| -> Vec<(String, u64)> {
        text.split(',')
            .filter_map(|pair| pair.split_once(':'))
            .map(|(name, value)| (name.to_owned(), value.parse().unwrap()))
            .collect()
    };
    whole
        .lines()
        .map(|line| {
            let mut words = line.split(' ');
            let (verb, id) = (words.next().unwrap(), words.next().unwrap().to_owned());
            let pairs = pairs(words.next().unwrap_or_default());
            match verb {
                "wants" => {
                    Entry::Wants(id, pairs.into_iter().map(|(n, c)| (n, c as u32)).collect())
                }
                "got" => Entry::Got(id, pairs.into_iter().collect()),
                "done" => Entry::Done(id),
                other => panic!("{other:?} in a journal"),
            }
        })
        .collect()
}

/// All journals of one thread, one for each life of its process, in the order of its lives.
fn read_journals(folder: &Path, name: &str) -> Vec<Entry> {
    let mut lives: Vec<PathBuf> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            let file = path.file_name().unwrap().to_string_lossy().into_owned();
            file.strip_prefix(name)
                .is_some_and(|life| life.starts_with('-'))
        })
        .collect();
    lives.sort();
    lives.iter().flat_map(|path| read_journal(path)).collect()
}

/// A worker process: the test below starts this one again and again.
#[test]
#[ignore = "run by the test in this file, in processes of its own"]
fn worker() {
    let Ok(url) = std::env::var("CONTEND_HISTORY_URL") else {
        return;
    };
    let folder = PathBuf::from(std::env::var("CONTEND_HISTORY_FOLDER").unwrap());
    let number = std::env::var("CONTEND_HISTORY_WORKER").unwrap();
    let life: usize = std::env::var("CONTEND_HISTORY_LIFE")
        .unwrap()
        .parse()
        .unwrap();
    let semaphores = connect(&url);
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let (semaphores, folder, number) = (&semaphores, &folder, &number);
            scope.spawn(move || {
                let name = format!("journal-{number}-{thread}");
                let past = read_journals(folder, &name);
                let journal = folder.join(format!("{name}-{life:04}"));
                work(semaphores, &past, &journal, &folder.join("stop"));
            });
        }
    });
}

fn work(semaphores: &Semaphores, past: &[Entry], path: &Path, stop: &Path) {
    let file = OpenOptions::new().create_new(true).append(true).open(path);
    let mut file = file.unwrap();
    // One write for each line: what a kill can cut off is the end of the last one.
    let mut note = |line: String| file.write_all(format!("{line}\n").as_bytes()).unwrap();
    let mut rng = rand::rng();
    // What the process before this one did not bring to an end is asked for again, under its id.
    let open = match past.iter().rev().find(|it| matches!(it, Entry::Wants(..))) {
        Some(Entry::Wants(id, wish)) if !past.contains(&Entry::Done(id.clone())) => {
            Some((id.clone(), wish.clone()))
        }
        _ => None,
    };
    let mut next = open;
    while !stop.exists() {
        let (id, wish) = next.take().unwrap_or_else(|| {
            let mut wish = BTreeMap::new();
            for _ in 0..rng.random_range(1..=3) {
                let (name, _) = CAPACITIES[rng.random_range(0..CAPACITIES.len())];
                wish.insert(name.to_owned(), rng.random_range(1..=2));
            }
            (format!("{:016x}", rng.random::<u64>()), wish)
        });
        let text: Vec<String> = wish.iter().map(|(n, c)| format!("{n}:{c}")).collect();
        note(format!("wants {id} {}", text.join(",")));
        let request = wish
            .iter()
            .fold(PermitRequest::new(&*id), |request, (name, count)| {
                request.permits(&**name, *count)
            })
            .ttl(TTL);
        let held = loop {
            let timeout = ms(if rng.random() { 0 } else { 100 });
            match semaphores.acquire_for(&request, timeout) {
                Ok(
                    Acquisition::Acquired(permits) | Acquisition::AlreadyAcquired { permits, .. },
                ) => {
                    let text: Vec<String> = permits
                        .iter()
                        .map(|permit| format!("{}:{}", permit.semaphore, permit.fence))
                        .collect();
                    note(format!("got {id} {}", text.join(",")));
                    break true;
                }
                Ok(_) => break false,
                // Again, under the same external id.
                Err(error) if error.is_transient() && !stop.exists() => {}
                Err(error) if error.is_transient() => break false,
                Err(error) => panic!("{id}: {error}"),
            }
        };
        // Some are never released: a sweep has to.
        if held && rng.random_range(0..20) > 0 {
            thread::sleep(Duration::from_micros(rng.random_range(0..8_000)));
            loop {
                match semaphores.release(&id) {
                    Ok(Release::Unknown) => panic!("{id} was acquired, and is not known"),
                    Ok(_) => break,
                    Err(error) if error.is_transient() && !stop.exists() => {}
                    Err(error) if error.is_transient() => break,
                    Err(error) => panic!("{id}: {error}"),
                }
            }
        }
        note(format!("done {id}"));
    }
}

fn spawn(number: usize, life: usize, url: &str, folder: &Path) -> Process {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "history::worker", "--ignored", "--nocapture"])
        .env("CONTEND_HISTORY_URL", url)
        .env("CONTEND_HISTORY_FOLDER", folder)
        .env("CONTEND_HISTORY_WORKER", number.to_string())
        .env("CONTEND_HISTORY_LIFE", life.to_string());
    let log = Output::Log(folder.join(format!("log-{number}")));
    Process::spawn(&command, &log).unwrap()
}

#[test]
fn commits_stay_within_capacity_and_grants_are_accounted_for() {
    let seconds = std::env::var("CONTEND_HISTORY_SECONDS");
    let length = Duration::from_secs(seconds.map_or(12, |text| text.parse().unwrap()));
    within(length + Duration::from_secs(120), || {
        let url = database();
        for trigger in TRIGGERS {
            operator(&url).query_drop(trigger).unwrap();
        }
        let semaphores = connect(&url);
        for (name, capacity) in CAPACITIES {
            semaphores.create(name, capacity).unwrap();
        }
        let folder = TempDir::new();
        let counts = storm(&url, &semaphores, folder.path(), length);
        bring_home(&url, &semaphores);
        let grants = judge(&url, &semaphores, folder.path());
        println!("{grants} grants in {length:?}; {counts:?}");
        assert!(
            grants > 100 && counts.kills > 0 && counts.cuts > 0,
            "{counts:?}"
        );
    });
}

#[derive(Debug, Default)]
struct Counts {
    kills: usize,
    cuts: usize,
    lost_replies: usize,
    swept: usize,
}

/// Runs the workers through kills and cuts, sweeping all the while.
fn storm(url: &str, semaphores: &Semaphores, folder: &Path, length: Duration) -> Counts {
    let proxies: Vec<Proxy> = (0..PROCESSES).map(|_| Proxy::to(addr_of(url))).collect();
    let urls: Vec<String> = proxies
        .iter()
        .map(|proxy| format!("{}?pool_size=4", through(url, proxy.addr())))
        .collect();
    let mut processes: Vec<Process> = (0..PROCESSES)
        .map(|number| spawn(number, 0, &urls[number], folder))
        .collect();
    let mut counts = Counts::default();
    let mut rng = rand::rng();
    let start = Instant::now();
    let mut next_kill = ms(1_500);
    while start.elapsed() < length {
        thread::sleep(ms(rng.random_range(50..200)));
        let proxy = &proxies[rng.random_range(0..PROCESSES)];
        match rng.random_range(0..6) {
            0 => proxy.cut(),
            1 => proxy.reset(),
            2 | 3 => proxy.lose_reply_to(b"INSERT INTO `contend_permit_request`"),
            4 => proxy.lose_next_reply(),
            _ => counts.swept += semaphores.sweep_expired().unwrap().len(),
        }
        counts.cuts += 1;
        if start.elapsed() >= next_kill {
            next_kill += ms(1_000);
            let number = rng.random_range(0..PROCESSES);
            processes[number].kill();
            counts.kills += 1;
            processes[number] = spawn(number, counts.kills, &urls[number], folder);
        }
    }
    for proxy in &proxies {
        proxy.pass();
    }
    fs::write(folder.join("stop"), "").unwrap();
    for (number, process) in processes.iter().enumerate() {
        let status = process.wait(Duration::from_secs(60));
        let log = fs::read_to_string(folder.join(format!("log-{number}"))).unwrap();
        assert!(
            status.is_some_and(|status| status.success()),
            "{number}: {status:?}\n{log}"
        );
        assert!(!log.contains("panicked"), "{log}");
    }
    counts.lost_replies = proxies.iter().map(Proxy::lost_replies).sum();
    counts
}

/// Sweeps until nothing is held.
fn bring_home(url: &str, semaphores: &Semaphores) {
    wait_until(Duration::from_secs(30), "nothing is held any more", || {
        semaphores.sweep_expired().unwrap();
        number(url, "SELECT SUM(used) FROM contend_semaphore") == 0
    });
    assert_eq!(semaphores.check().unwrap(), []);
    let held = "SELECT COUNT(*) FROM contend_permit WHERE state = 'ACQUIRED'";
    assert_eq!(number(url, held), 0);
    let held = "SELECT COUNT(*) FROM contend_permit_request WHERE state = 'ACQUIRED'";
    assert_eq!(number(url, held), 0);
}

/// Compares what the tables, the triggers and the journals say; how many grants there were.
fn judge(url: &str, semaphores: &Semaphores, folder: &Path) -> usize {
    let mut conn = operator(url);
    let violations: Vec<(u64, i64)> = conn.query("SELECT * FROM violation").unwrap();
    assert_eq!(violations, [], "counters beyond their capacity");

    let ids: HashMap<u64, (String, u32)> = conn
        .query_map(
            "SELECT id, name, capacity FROM contend_semaphore",
            |(id, name, capacity)| (id, (name, capacity)),
        )
        .unwrap()
        .into_iter()
        .collect();
    let audit: Vec<(u64, u64, u64, i64)> = conn
        .query("SELECT id, semaphore_id, permit_id, change_by FROM audit ORDER BY id")
        .unwrap();
    let mut held: HashMap<u64, i64> = HashMap::new();
    let mut live: BTreeSet<u64> = BTreeSet::new();
    let mut seen: BTreeSet<u64> = BTreeSet::new();
    for (line, semaphore, permit, change) in &audit {
        let (name, capacity) = &ids[semaphore];
        let sum = held.entry(*semaphore).or_default();
        *sum += change;
        assert!(
            (0..=i64::from(*capacity)).contains(sum),
            "{name} holds {sum} of {capacity} at line {line}"
        );
        if *change > 0 {
            assert!(
                seen.insert(*permit) && live.insert(*permit),
                "{permit} granted twice"
            );
        } else {
            assert!(live.remove(permit), "{permit} released twice");
        }
    }
    assert!(live.is_empty() && held.values().all(|sum| *sum == 0));

    let mut wishes: HashMap<String, BTreeMap<String, u32>> = HashMap::new();
    let mut gots: HashMap<String, BTreeMap<String, u64>> = HashMap::new();
    for process in 0..PROCESSES {
        for thread in 0..THREADS {
            for entry in read_journals(folder, &format!("journal-{process}-{thread}")) {
                match entry {
                    Entry::Wants(id, wish) => {
                        let before = wishes.insert(id.clone(), wish.clone());
                        assert!(before.is_none_or(|before| before == wish), "{id}");
                    }
                    Entry::Got(id, fences) => {
                        let before = gots.insert(id.clone(), fences.clone());
                        assert!(
                            before.is_none_or(|before| before == fences),
                            "{id} got twice"
                        );
                    }
                    Entry::Done(_) => {}
                }
            }
        }
    }
    type Row = (String, Option<u64>, Option<u64>, Option<u32>);
    let rows: Vec<Row> = conn
        .query(
            "SELECT r.external_id, p.id, p.semaphore_id, p.count FROM contend_permit_request r \
             LEFT JOIN contend_permit p ON p.permit_request_id = r.id ORDER BY p.id",
        )
        .unwrap();
    type Granted = BTreeMap<String, (u64, u32)>;
    let mut granted: HashMap<String, Granted> = HashMap::new();
    for (external_id, permit, semaphore, count) in rows {
        let permits = granted.entry(external_id).or_default();
        if let (Some(permit), Some(semaphore), Some(count)) = (permit, semaphore, count) {
            permits.insert(ids[&semaphore].0.clone(), (permit, count));
        }
    }
    let mut grants = 0;
    for (id, permits) in &granted {
        let wish = wishes
            .get(id)
            .unwrap_or_else(|| panic!("{id} was not asked for"));
        // All of it, or it was forgotten.
        if !permits.is_empty() {
            grants += 1;
            let counts: BTreeMap<String, u32> = permits
                .iter()
                .map(|(name, (_, count))| (name.clone(), *count))
                .collect();
            assert_eq!(&counts, wish, "{id} was granted in part");
        }
    }
    for (id, fences) in &gots {
        let permits: BTreeMap<String, u64> = granted
            .get(id)
            .unwrap_or_else(|| panic!("{id} was told of a grant that is not there"))
            .iter()
            .map(|(name, (permit, _))| (name.clone(), *permit))
            .collect();
        assert_eq!(fences, &permits, "{id} was told of other permits");
    }
    assert_eq!(semaphores.check().unwrap(), []);
    grants
}
