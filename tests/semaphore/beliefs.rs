//! What the guards of several processes believe, added up: never more than the capacity.
//!
//! Each worker logs from when until when its guards said that they are valid, on the boot-time clock,
//! which all processes of a machine share. Workers are killed and paused, the server is killed and
//! started again, connections are cut, replies are lost; the permits of a paused holder go to others.
//!
//! `CONTEND_BELIEFS_SECONDS` sets how long it lasts (default 12), `CONTEND_BELIEFS_PROCESSES` how many processes there
//! are (default 2), `CONTEND_BELIEFS_THREADS` how many threads each of them has (default 8).

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use crate::ground::{SHORT, addr_of, connect, through};
use crate::mysql_ground::{ms, start};
use contend::Moment;
use contend::semaphore::{PermitRequest, Semaphores};
use rand::RngExt;
use testbed::{Output, Process, Proxy, RedisServer, Server, TempDir, wait_until, within};

const CAPACITIES: [(&str, u32); 2] = [("a", 3), ("b", 5)];

fn now() -> u64 {
    Moment::now().since_origin().as_nanos() as u64
}

/// A worker process: the test below starts it again and again.
#[test]
#[ignore = "run by the test in this file, in processes of its own"]
fn worker() {
    let Ok(url) = std::env::var("CONTEND_BELIEFS_URL") else {
        return;
    };
    let folder = PathBuf::from(std::env::var("CONTEND_BELIEFS_FOLDER").unwrap());
    let semaphores = connect(&url);
    thread::scope(|scope| {
        for thread in 0..threads() {
            let (semaphores, folder) = (&semaphores, &folder);
            scope.spawn(move || {
                let path = folder.join(format!("beliefs-{}-{thread}", std::process::id()));
                let mut log = OpenOptions::new()
                    .create(true)
                    .append(true)
                    .open(path)
                    .unwrap();
                let mut rng = rand::rng();
                while !folder.join("stop").exists() {
                    let (name, _) = CAPACITIES[rng.random_range(0..CAPACITIES.len())];
                    let count = rng.random_range(1..=2);
                    let request = PermitRequest::generated().permits(name, count).ttl(SHORT);
                    let Ok(guard) = semaphores.guard(&request, ms(rng.random_range(0..500))) else {
                        thread::sleep(ms(5)); // the server may be away
                        continue;
                    };
                    let (began, valid) = (now(), guard.valid_for());
                    if valid.is_zero() {
                        continue;
                    }
                    writeln!(log, "begins {began} {name} {count}").unwrap();
                    let hold = Instant::now();
                    let length = Duration::from_micros(rng.random_range(0..40_000));
                    let mut until = began + valid.as_nanos() as u64;
                    while hold.elapsed() < length {
                        thread::sleep(ms(1));
                        let (at, valid) = (now(), guard.valid_for());
                        if valid.is_zero() {
                            break;
                        }
                        until = at + valid.as_nanos() as u64;
                    }
                    // It believed up to here, or to the end that it was last told.
                    writeln!(log, "ends {}", until.min(now())).unwrap();
                    drop(guard);
                }
            });
        }
    });
}

fn setting(name: &str, default: u64) -> u64 {
    let text = std::env::var(format!("CONTEND_BELIEFS_{name}"));
    text.map_or(default, |text| text.parse().unwrap())
}

fn threads() -> u64 {
    setting("THREADS", 8)
}

fn spawn(url: &str, folder: &Path) -> Process {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "beliefs::worker", "--ignored", "--nocapture"])
        .env("CONTEND_BELIEFS_URL", url)
        .env("CONTEND_BELIEFS_FOLDER", folder);
    let log = Output::Log(folder.join("log"));
    Process::spawn(&command, &log).unwrap()
}

#[test]
fn beliefs_stay_within_capacity() {
    let server = start();
    let url = server.create_database("beliefs");
    believe(&server, &url, b"INSERT INTO `contend_permit`");
}

/// On a server that keeps what it acknowledged.
#[test]
fn beliefs_on_redis_stay_within_capacity() {
    let server = RedisServer::start_with(&["--appendonly", "yes", "--appendfsync", "always"]);
    let url = format!("{}/0", server.url());
    believe(&server, &url, b"EVALSHA");
}

/// Rules "belief ends on the local boot-time clock" and "a reply after its deadline changes nothing". Requests that contain
/// `grants` lose their replies now and then.
fn believe(server: &Server, url: &str, grants: &[u8]) {
    let length = Duration::from_secs(setting("SECONDS", 12));
    within(length + Duration::from_secs(180), || {
        let direct = connect(url);
        direct.create_tables().unwrap();
        for (name, capacity) in CAPACITIES {
            direct.create(name, capacity).unwrap();
        }
        let folder = TempDir::new();
        let number = setting("PROCESSES", 2) as usize;
        let proxies: Vec<Proxy> = (0..number).map(|_| Proxy::to(addr_of(url))).collect();
        let urls: Vec<String> = proxies.iter().map(|it| through(url, it.addr())).collect();
        let spawned = urls.iter().map(|url| spawn(url, folder.path()));
        let mut processes: Vec<Process> = spawned.collect();
        let mut faults = Faults::default();
        let (mut samples, mut above) = (0, 0);
        let mut rng = rand::rng();
        let began = Instant::now();
        let (mut next, mut turn) = (ms(1_500), 0);
        while began.elapsed() < length {
            thread::sleep(ms(rng.random_range(20..120)));
            // The server may be away.
            if let Ok(usage) = direct.list() {
                above += usage
                    .iter()
                    .filter(|it| it.held > u64::from(it.capacity))
                    .count();
                samples += 1;
            }
            faults.look(&direct);
            let which = rng.random_range(0..number);
            match rng.random_range(0..8) {
                0 => proxies[which].cut(),
                1 => proxies[which].reset(),
                2 | 3 => proxies[which].lose_reply_to(grants),
                4 => proxies[which].lose_next_reply(),
                _ => {}
            }
            if began.elapsed() < next {
                continue;
            }
            match turn % 3 {
                0 => {
                    processes[which].kill();
                    faults.deaths.push((processes[which].pid(), now()));
                    faults
                        .not_recovered
                        .push((processes[which].pid(), Instant::now()));
                    processes[which] = spawn(&urls[which], folder.path());
                }
                1 => {
                    server.kill();
                    faults.server_kills.push(now());
                    server.start();
                }
                _ => {
                    processes[which].pause();
                    let paused = Instant::now();
                    while paused.elapsed() < SHORT + SHORT / 2 {
                        // Longer than its permits last.
                        thread::sleep(ms(100));
                        faults.look(&direct);
                    }
                    processes[which].resume();
                    faults.pauses += 1;
                }
            }
            turn += 1;
            next = began.elapsed() + ms(2_000);
        }
        proxies.iter().for_each(Proxy::pass);
        fs::write(folder.path().join("stop"), "").unwrap();
        for process in &processes {
            assert!(process.wait(Duration::from_secs(60)).is_some(), "it hangs");
        }
        // Nothing leaks: a sweep, or an acquire, takes back what has expired.
        let ended = Instant::now();
        wait_until(SHORT * 2 + ms(20_000), "nothing is held any more", || {
            direct.sweep_expired().unwrap();
            faults.look(&direct);
            direct
                .list()
                .unwrap()
                .iter()
                .all(|it| it.requests == 0 && it.held == 0)
        });
        let given_back = ended.elapsed();
        let (beliefs, most, back) = judge(folder.path(), &faults);
        println!(
            "{length:?}, {number} processes x {} threads: {beliefs} beliefs, {} kills of a worker, {} of the \
             server, {} pauses, {} lost replies",
            threads(),
            faults.deaths.len(),
            faults.server_kills.len(),
            faults.pauses,
            proxies.iter().map(Proxy::lost_replies).sum::<usize>(),
        );
        println!(
            "{samples} samples, {above} above capacity; most believed {most:?} of {CAPACITIES:?}"
        );
        println!(
            "after each kill of a worker its permits were free after {:?}",
            faults.recovered
        );
        println!("after each kill of the server the next grant came after {back:?}");
        println!("leaked: 0; all given back {given_back:?} after the end (ttl {SHORT:?})");
        assert_eq!(above, 0);
        assert!(beliefs > 20, "{beliefs}");
        for ((name, capacity), most) in CAPACITIES.iter().zip(most) {
            assert!(most <= i64::from(*capacity), "{name}: {most} believed in");
        }
        assert!(!faults.deaths.is_empty() && !faults.server_kills.is_empty());
        assert_eq!(faults.not_recovered, []);
        assert_eq!(direct.check().unwrap(), []);
    });
}

/// What was done to the workers and the server, and when it was over.
#[derive(Debug, Default)]
struct Faults {
    deaths: Vec<(u32, u64)>,
    server_kills: Vec<u64>,
    pauses: usize,
    not_recovered: Vec<(u32, Instant)>,
    recovered: Vec<Duration>,
}

impl Faults {
    /// Looks whether killed workers still hold something: their process ids are in their external ids.
    fn look(&mut self, direct: &Semaphores) {
        let mut holders = Vec::new();
        for (name, _) in CAPACITIES {
            match direct.holders(name) {
                Ok(more) => holders.extend(more),
                // The server may be away.
                Err(_) => return,
            }
        }
        let recovered = &mut self.recovered;
        self.not_recovered.retain(|(pid, since)| {
            let theirs = format!(":{pid}@");
            let holds = holders.iter().any(|it| it.external_id.contains(&theirs));
            if !holds {
                recovered.push(since.elapsed());
            }
            holds
        });
    }
}

/// How many beliefs there were, how much was believed in at most at once, by semaphore, and how long after
/// each kill of the server the next belief began.
fn judge(folder: &Path, faults: &Faults) -> (usize, Vec<i64>, Vec<Duration>) {
    let mut changes: Vec<(u64, i64, usize)> = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let Some(name) = name.strip_prefix("beliefs-") else {
            continue;
        };
        let pid: u32 = name.split('-').next().unwrap().parse().unwrap();
        let death = faults.deaths.iter().find(|(dead, _)| *dead == pid);
        let text = fs::read_to_string(&path).unwrap();
        let mut open = None;
        for line in text.lines() {
            let words: Vec<&str> = line.split(' ').collect();
            match words[..] {
                ["begins", at, semaphore, count] => {
                    let which = CAPACITIES.iter().position(|(it, _)| *it == semaphore);
                    let count: i64 = count.parse().unwrap();
                    changes.push((at.parse().unwrap(), count, which.unwrap()));
                    open = Some((count, which.unwrap()));
                }
                ["ends", at] => {
                    let (count, which) = open.take().unwrap();
                    changes.push((at.parse().unwrap(), -count, which));
                }
                _ => assert!(death.is_some(), "{line:?}"),
            }
        }
        if let (Some((count, which)), Some((_, at))) = (open, death) {
            changes.push((*at, -count, which));
        }
    }
    // What ends in the same nanosecond as the next one begins ends first.
    changes.sort();
    let mut sums = vec![0; CAPACITIES.len()];
    let mut most = sums.clone();
    let beliefs = changes.iter().filter(|(_, change, _)| *change > 0).count();
    for (_, change, which) in &changes {
        sums[*which] += change;
        most[*which] = most[*which].max(sums[*which]);
    }
    let kills = faults.server_kills.iter();
    let back = kills.filter_map(|kill| {
        // What was granted before may be noted a little later.
        let mut begun = changes
            .iter()
            .filter(|(at, change, _)| *at > kill + 50_000_000 && *change > 0);
        begun.next().map(|(at, ..)| Duration::from_nanos(at - kill))
    });
    let back = back.collect();
    (beliefs, most, back)
}
