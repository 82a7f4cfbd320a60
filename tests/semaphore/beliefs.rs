//! What the guards of several processes believe, added up: never more than the capacity.
//!
//! Each worker logs from when until when its guards said that they are valid, on the boot-time clock,
//! which all processes of a machine share. Workers are killed and paused, connections are cut, replies
//! are lost; a paused holder is one whose permits somebody else gets.
//!
//! `CONTEND_BELIEFS_SECONDS` sets how long it lasts (default 12), `CONTEND_BELIEFS_THREADS` how many
//! threads each of the two processes has (default 8).

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use crate::mysql_ground::ms;
use crate::semaphore_ground::{SHORT, addr_of, connect, number, semaphores, through};
use contend::Moment;
use contend::semaphore::PermitRequest;
use rand::RngExt;
use testbed::{Output, Process, Proxy, TempDir, wait_until, within};

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

fn threads() -> usize {
    let threads = std::env::var("CONTEND_BELIEFS_THREADS");
    threads.map_or(8, |text| text.parse().unwrap())
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

/// Rules "belief ends on the local boot-time clock" and "a reply after its deadline changes nothing".
#[test]
fn what_all_guards_believe_never_exceeds_a_capacity() {
    let seconds = std::env::var("CONTEND_BELIEFS_SECONDS");
    let length = Duration::from_secs(seconds.map_or(12, |text| text.parse().unwrap()));
    within(length + Duration::from_secs(180), || {
        let (direct, url) = semaphores(&CAPACITIES);
        let folder = TempDir::new();
        let proxies = [(); 2].map(|()| Proxy::to(addr_of(&url)));
        let urls = proxies.each_ref().map(|it| through(&url, it.addr()));
        let mut processes = urls.each_ref().map(|url| spawn(url, folder.path()));
        let mut deaths: Vec<(u32, u64)> = Vec::new();
        let (mut pauses, mut samples, mut above) = (0, 0, 0);
        let mut rng = rand::rng();
        let start = Instant::now();
        let mut next = ms(3_000);
        while start.elapsed() < length {
            thread::sleep(ms(rng.random_range(20..120)));
            let over = "SELECT COUNT(*) FROM contend_semaphore WHERE used > capacity OR used < 0";
            above += number(&url, over);
            samples += 1;
            let which = rng.random_range(0..2);
            match rng.random_range(0..8) {
                0 => proxies[which].cut(),
                1 => proxies[which].reset(),
                2 | 3 => proxies[which].lose_reply_to(b"INSERT INTO `contend_permit`"),
                4 => proxies[which].lose_next_reply(),
                _ => {}
            }
            if start.elapsed() >= next {
                next += ms(4_000);
                if rng.random() {
                    processes[which].kill();
                    deaths.push((processes[which].pid(), now()));
                    processes[which] = spawn(&urls[which], folder.path());
                } else {
                    processes[which].pause();
                    thread::sleep(SHORT + SHORT / 2); // longer than its permits last
                    processes[which].resume();
                    pauses += 1;
                }
            }
        }
        proxies.iter().for_each(Proxy::pass);
        fs::write(folder.path().join("stop"), "").unwrap();
        for process in &processes {
            assert!(process.wait(Duration::from_secs(60)).is_some(), "it hangs");
        }
        let (beliefs, most) = judge(folder.path(), &deaths);
        println!(
            "{length:?}: {beliefs} beliefs, {} kills, {pauses} pauses, {} lost replies; \
             {samples} samples in SQL, {above} above capacity; most believed {most:?}",
            deaths.len(),
            proxies.iter().map(Proxy::lost_replies).sum::<usize>(),
        );
        assert_eq!(above, 0);
        assert!(beliefs > 50, "{beliefs}");
        for ((name, capacity), most) in CAPACITIES.iter().zip(most) {
            assert!(most <= i64::from(*capacity), "{name}: {most} believed in");
        }
        // Nothing leaks: an acquire takes back what has expired.
        let leaked = Instant::now();
        wait_until(Duration::from_secs(60), "nothing is held any more", || {
            direct.sweep_expired().unwrap();
            number(&url, "SELECT SUM(used) FROM contend_semaphore") == 0
        });
        println!("all given back {:?} after the end", leaked.elapsed());
        assert!(leaked.elapsed() < SHORT * 2 + ms(20_000));
        assert_eq!(direct.check().unwrap(), []);
    });
}

/// How many beliefs there were, and how much was believed in at most at once, by semaphore.
fn judge(folder: &Path, deaths: &[(u32, u64)]) -> (usize, Vec<i64>) {
    let mut changes: Vec<(u64, i64, usize)> = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let Some(name) = name.strip_prefix("beliefs-") else {
            continue;
        };
        let pid: u32 = name.split('-').next().unwrap().parse().unwrap();
        let death = deaths.iter().find(|(dead, _)| *dead == pid);
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
    for (_, change, which) in changes {
        sums[which] += change;
        most[which] = most[which].max(sums[which]);
    }
    (beliefs, most)
}
