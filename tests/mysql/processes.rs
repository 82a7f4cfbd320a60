//! Processes that share mutexes, and a server that hangs under many services.

use std::io::{BufRead, BufReader, Write};
use std::process::{ChildStdout, Command};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::conformance::{PATIENCE, next, started, wait_for_owner};
use crate::server::{HANG, database, operator, own_server, through};
use contend::EventKind;
use mysql::prelude::Queryable;
use testbed::{Output, Process, Proxy, cpu_time, wait_until, within};

const CHILD: &str = "CONTEND_MYSQL_CHILD";

/// Not a test of its own: what the processes of the tests do.
#[test]
fn child() {
    let Ok(settings) = std::env::var(CHILD) else {
        return;
    };
    let settings: Vec<&str> = settings.split(' ').collect();
    let [role, url, count, seconds] = settings[..] else {
        panic!("{settings:?}");
    };
    let (count, seconds) = (count.parse().unwrap(), seconds.parse().unwrap());
    match role {
        "turns" => take_turns(url, count, seconds),
        _ => wait(url, count),
    }
}

/// Starts a process that plays a role with `count` lockers.
fn spawn(role: &str, url: &str, count: usize, seconds: u64) -> Process {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "processes::child", "--nocapture"])
        .env(CHILD, format!("{role} {url} {count} {seconds}"));
    Process::spawn(&command, &Output::Pipe).unwrap()
}

/// The line of a process' output that begins with `word`, without that word.
fn line(output: &mut BufReader<ChildStdout>, word: &str) -> String {
    for line in output.lines() {
        // The test harness may have begun the line.
        if let Some((_, rest)) = line.unwrap().split_once(word) {
            return rest.to_owned();
        }
    }
    panic!("a process ended without {word}");
}

/// A process of `take_turns`: locks one mutex with so many lockers from the word on for some seconds.
fn take_turns(url: &str, lockers: usize, seconds: u64) {
    let factory = contend::connect(&format!("{url}?ttl=20s")).unwrap();
    let lockers: Vec<_> = (0..lockers)
        .map(|_| factory.locker("m").build().unwrap())
        .collect();
    for locker in &lockers {
        drop(locker.lock().unwrap());
    }
    println!("READY");
    std::io::stdin().read_line(&mut String::new()).unwrap();
    let over = AtomicBool::new(false);
    let counts: Vec<String> = thread::scope(|scope| {
        let threads: Vec<_> = lockers
            .iter()
            .map(|locker| {
                scope.spawn(|| {
                    let mut count = 0;
                    loop {
                        let guard = locker.lock().unwrap();
                        if over.load(Ordering::SeqCst) {
                            return count;
                        }
                        count += 1;
                        // Long enough for the next locker of a process to queue up.
                        thread::sleep(Duration::from_millis(1));
                        drop(guard);
                    }
                })
            })
            .collect();
        thread::sleep(Duration::from_secs(seconds));
        over.store(true, Ordering::SeqCst);
        let joined = threads.into_iter().map(|thread| thread.join().unwrap());
        joined.map(|count: usize| count.to_string()).collect()
    });
    println!("COUNTS {}", counts.join(" "));
}

/// One process starved the others, 3,538 locks against 3 to 29.
#[test]
fn processes_take_turns_whatever_their_lockers() {
    within(HANG, || {
        let url = database();
        let seconds = 3;
        let processes = [4, 4, 1].map(|lockers| spawn("turns", &url, lockers, seconds));
        let mut outputs = processes
            .each_ref()
            .map(|process| BufReader::new(process.take_stdout().unwrap()));
        for output in &mut outputs {
            line(output, "READY");
        }
        let inputs = processes.each_ref().map(|process| {
            let mut input = process.take_stdin().unwrap();
            input.write_all(b"go\n").unwrap();
            input
        });
        let counts = outputs.map(|mut output| -> Vec<usize> {
            let counts = line(&mut output, "COUNTS");
            let counts = counts.split_whitespace();
            counts.map(|count| count.parse().unwrap()).collect()
        });
        drop(inputs);
        println!("locks of 4, 4 and 1 lockers in {seconds} s: {counts:?}");
        let ends =
            |counts: &[usize]| (*counts.iter().min().unwrap(), *counts.iter().max().unwrap());
        let (least, most) = ends(&counts.each_ref().map(|counts| counts.iter().sum()));
        assert!(least * 2 >= most && least > 10, "{counts:?}");
        for counts in &counts {
            let (least, most) = ends(counts);
            assert!(least * 2 + 4 >= most, "{counts:?}");
        }
    });
}

/// A process of `two_connections_...`: waits for so many mutexes until its input ends.
fn wait(url: &str, mutexes: usize) {
    let factory = contend::connect(&format!("{url}?ttl=60s")).unwrap();
    let id = std::process::id().to_string();
    let services: Vec<_> = (0..mutexes)
        .map(|number| started(&factory, &format!("m{number}"), &id))
        .collect();
    for (service, _) in &services {
        wait_for_owner(service, "owner");
    }
    println!("WAITS");
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

/// Two connections per process wait, for any number of mutexes.
#[test]
fn two_connections_of_a_process_wait_for_any_number_of_mutexes() {
    within(HANG, || {
        const MUTEXES: usize = 20;
        let url = database();
        let holder = contend::connect(&format!("{url}?ttl=60s")).unwrap();
        let owners: Vec<_> = (0..MUTEXES)
            .map(|number| started(&holder, &format!("m{number}"), "owner"))
            .collect();
        for (_, events) in &owners {
            next(events, EventKind::Acquired);
        }
        let mut conn = operator(&url);
        let name = url.rsplit('/').next().unwrap().to_owned();
        let mut count = |what: &str| -> u64 {
            let sql = format!(
                "SELECT COUNT(*) FROM information_schema.processlist WHERE db = '{name}' {what}"
            );
            conn.query_first(sql).unwrap().unwrap()
        };
        let processes: Vec<Process> = (0..2).map(|_| spawn("waits", &url, MUTEXES, 0)).collect();
        for process in &processes {
            line(&mut BufReader::new(process.take_stdout().unwrap()), "WAITS");
        }
        let many = processes.len() as u64;
        wait_until(PATIENCE, "each waits in one statement", || {
            count("AND state = 'User lock'") == many
        });
        let all = count("") - 1;
        println!(
            "{many} processes that wait for {MUTEXES} mutexes each: {many} statements wait; with the \
             owner's process {all} connections, of which 2 per waiting process wait, the rest are of pools"
        );
        assert!(all <= many * 10 + 8, "{all}");
        drop(owners);
        let mut operator = operator(&url);
        wait_until(PATIENCE, "every mutex has a new owner", || {
            let owned: Option<usize> = operator
                .query_first("SELECT COUNT(*) FROM simba_mutex WHERE owner_id REGEXP '^[0-9]+$'")
                .unwrap();
            owned == Some(MUTEXES)
        });
    });
}

/// A server that hangs is not hammered with handshakes, and a dropped factory goes.
#[test]
fn hung_server_is_knocked_at_ever_more_slowly() {
    let (seconds, count) = (6, 8);
    within(HANG, || {
        let (server, url) = own_server(&["--max-connect-errors=20"]);
        let proxy = Proxy::to(server.addr());
        let through = through(&proxy, &url);
        let factory = contend::connect(&format!("{through}?ttl=2s&transition=1s")).unwrap();
        let services: Vec<_> = (0..count)
            .map(|number| started(&factory, &format!("m{number}"), "a"))
            .collect();
        for (_, events) in &services {
            next(events, EventKind::Acquired);
        }
        let accepted = proxy.accepted();
        let spent = cpu_time(std::process::id());
        server.pause();
        thread::sleep(Duration::from_secs(seconds));
        let begun = proxy.accepted() - accepted;
        println!(
            "{count} services, a server that hangs for {seconds} s: {begun} handshakes begun, {:?} of CPU \
             in this process",
            cpu_time(std::process::id()).saturating_sub(spent)
        );
        assert!(begun < 20, "{begun}: as many as lock a host out");
        server.resume();
        // A server that had locked us out would refuse this, and them (1129).
        operator(&url).query_drop("DO 1").unwrap();
        for (service, _) in &services {
            wait_until(PATIENCE, "it owns again", || service.is_owner());
        }
        server.pause();
        let began = Instant::now();
        drop((services, factory));
        let took = began.elapsed();
        println!("dropping {count} services while it hangs: {took:?}");
        // One after the other, each with a last call.
        assert!(took < Duration::from_secs(2) * count, "{took:?}");
        wait_until(Duration::from_secs(10), "no connection is left", || {
            connections_to(proxy.port()) == 0
        });
    });
}

/// How many connections of this machine to a local port are open.
fn connections_to(port: u16) -> usize {
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let end = format!(":{port:04X}");
    let is_open = |line: &&str| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        columns[2].ends_with(&end) && columns[3] == "01"
    };
    table.lines().filter(is_open).count()
}
