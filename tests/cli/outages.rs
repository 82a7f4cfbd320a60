//! The log of a server that goes away again and again: one line per change, none twice in a row, none
//! untrue. `CONTEND_TEST_OUTAGES=100 cargo test --all-features --test cli -- outages --nocapture` is an
//! hour's worth.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use testbed::{Direction, Proxy, within};

use crate::backends::{Backend, HANG, mysql, redis, zk};
use crate::program::{PATIENCE, Program};

/// How many outages: a few in CI.
fn outages() -> usize {
    let text = std::env::var("CONTEND_TEST_OUTAGES");
    text.map_or(3, |text| text.parse().expect("a number"))
}

#[test]
fn redis_away_again_and_again() {
    log_of_outages("redis", redis());
}

#[test]
fn mysql_away_again_and_again() {
    log_of_outages("mysql", mysql());
}

#[test]
fn zookeeper_away_again_and_again() {
    log_of_outages("zk", zk());
}

/// Told to end before the first call has failed: nothing was wrong yet, and nothing was done either.
#[test]
fn a_server_that_has_not_answered_by_the_end_shows_in_the_exit_code() {
    within(HANG, || {
        // Connections are taken, and nothing is said.
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = silent.local_addr().unwrap();
        let commands = [
            &["elect", "m"][..],
            &["elect", "m", "--", "true"],
            &["schedule", "m", "--every", "1s"],
            &["schedule", "m", "--every", "1s", "--", "true"],
        ];
        for url in [
            format!("redis://{addr}"),
            format!("mysql://u@{addr}/x"),
            format!("zk://{addr}"),
        ] {
            for args in commands {
                let mut program = Program::start(&url, args);
                program.says("started");
                let (code, lines) = program.terminate();
                assert_eq!(code, 69, "{url}: {args:?}: {lines:#?}");
                // The last line: why.
                let why = lines.last().unwrap();
                let is_it = why.starts_with("contend: ") && !why.ends_with("stopped");
                assert!(is_it, "{url}: {args:?}: {lines:#?}");
            }
        }
        for args in [commands[0], commands[2]] {
            let mut program = Program::start("memory://", args);
            program.says("started");
            let (code, lines) = program.terminate();
            assert_eq!(code, 0, "{args:?}: {lines:#?}");
        }
    });
}

/// How the server goes away.
#[derive(Clone, Copy, Debug)]
enum Outage {
    /// Connections end, and new ones are refused.
    Down,
    /// Nothing arrives any more.
    Hung,
    /// Connections end, and new ones are welcome.
    Cut,
}

/// An owner, a waiter and their log at info, through a proxy.
fn log_of_outages(name: &str, backend: &Backend) {
    let outages = outages();
    let limit = Duration::from_secs(60) + Duration::from_secs(30) * u32::try_from(outages).unwrap();
    within(limit, || {
        let proxy = Proxy::to(backend.addr);
        let elect = ["-v", "elect", "--mutex", "troubled", "--contenders", "2"];
        let ids = ["--id", "c"];
        let mut program = Program::start(&backend.through(&proxy), &[&elect[..], &ids].concat());
        program.says("leads");
        let mut log = Log::default();
        for number in 0..outages {
            let outage = [Outage::Down, Outage::Hung, Outage::Cut][number % 3];
            match outage {
                Outage::Down => proxy.refuse(),
                Outage::Hung => proxy.black_hole(Direction::Both),
                Outage::Cut => {}
            }
            if !matches!(outage, Outage::Hung) {
                proxy.cut();
            }
            let began = Instant::now();
            if !matches!(outage, Outage::Cut) {
                // Long enough to be noticed, and to lose the lease now and then.
                let length = Duration::from_millis([600, 1_500, 3_500][number / 3 % 3]);
                log.read(&mut program, began + length, true);
            }
            proxy.pass();
            if matches!(outage, Outage::Hung) {
                // Bytes that were held up come late: their connections are gone for good.
                proxy.cut();
            }
            log.settle(&mut program, outage);
        }
        let (code, lines) = program.terminate();
        assert_eq!(code, 0, "{lines:#?}");
        let tally = log.tally();
        println!(
            "{name}: {outages} outages, {} lines of log: {tally}",
            log.lines.len()
        );
        for line in log.lines.iter().take(40) {
            println!("    {line}");
        }
        log.check();
    });
}

/// The log as it was read, without the time of each line.
#[derive(Default)]
struct Log {
    lines: Vec<String>,
    /// Who is in trouble.
    troubled: Vec<String>,
}

impl Log {
    /// Reads until `end`, or for as long as lines come; while the server is away nobody hears from it.
    fn read(&mut self, program: &mut Program, end: Instant, is_away: bool) {
        while let Some(line) = program.next_by(end) {
            // Only the log: `elect` prints what happens too.
            let Some((_, line)) = line.split_once(" UTC ") else {
                continue;
            };
            let untrue =
                is_away && (line.contains("answers again") || line.contains(": connected"));
            assert!(
                !untrue,
                "while the server was away: {line}\n{:#?}",
                self.lines
            );
            let who = line.split(": ").nth(1).unwrap_or_default().to_owned();
            if line.ends_with("; trying again") {
                self.troubled.push(who);
            } else if line.ends_with("the backend answers again") {
                let known = self.troubled.contains(&who);
                assert!(known, "of no trouble: {line}\n{:#?}", self.lines);
                self.troubled.retain(|troubled| *troubled != who);
            }
            self.lines.push(line.to_owned());
        }
    }

    /// Reads until nobody is in trouble any more, and somebody leads.
    fn settle(&mut self, program: &mut Program, outage: Outage) {
        let patience = Instant::now() + PATIENCE;
        loop {
            self.read(program, Instant::now() + Duration::from_millis(300), false);
            let leads = self.last_is(&[" acquired, "], &[" released, "]);
            // The session after one that has expired connects without a word.
            let connected = self.last_is(
                &[": connected", ": the session has expired"],
                &[": connection lost: ", ": no server can be used: "],
            );
            if leads && connected && self.troubled.is_empty() {
                return;
            }
            let lines = &self.lines;
            assert!(
                Instant::now() < patience,
                "{outage:?} does not end: {lines:#?}"
            );
        }
    }

    /// Whether one of `good` was logged later than any of `bad`, or nothing of that yet.
    fn last_is(&self, good: &[&str], bad: &[&str]) -> bool {
        let is_one = |line: &str, of: &[&str]| of.iter().any(|it| line.contains(it));
        let mut lines = self.lines.iter().rev();
        lines
            .find(|line| is_one(line, good) || is_one(line, bad))
            .is_none_or(|line| is_one(line, good))
    }

    fn tally(&self) -> String {
        let count = |text: &str| self.lines.iter().filter(|line| line.contains(text)).count();
        let troubles = count("; trying again");
        format!(
            "{troubles} of trouble, {} of its end, {} acquired, {} released",
            count("answers again"),
            count(" acquired, "),
            count(" released, ")
        )
    }

    fn check(&self) {
        for pair in self.lines.windows(2) {
            assert_ne!(pair[0], pair[1], "twice in a row");
        }
        // Per change and contender one line: trouble and its end, a loss and a gain.
        let most = 12 * (outages() + 1);
        assert!(
            self.lines.len() <= most,
            "{} lines: {:#?}",
            self.lines.len(),
            self.lines
        );
    }
}
