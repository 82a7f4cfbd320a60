//! Rule 1: a step of the wall clock changes neither ownership nor events.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use contend::{EventKind, Lease};
use testbed::{Output, Process};

/// Set in the process whose wall clock is stepped.
const STEPPED: &str = "CONTEND_TEST_WALL_CLOCK";

/// How long each leads: two ttls and more.
const LEADS: Duration = Duration::from_millis(6_500);

/// The library that shows a process another wall clock, and the real monotonic one.
fn libfaketime() -> PathBuf {
    let mut found = fs::read_dir("/usr/lib")
        .expect("/usr/lib is readable")
        .flatten()
        .map(|entry| entry.path().join("faketime/libfaketimeMT.so.1"));
    found.find(|path| path.exists()).expect(
        "libfaketime is missing: install the Debian package libfaketime, or run ./tests/run",
    )
}

/// Two contenders lead three times in turn, and say so: the event, its fence and the wall clock.
fn elect() {
    // Long enough for a busy machine to renew in.
    let lease = Lease::new(Duration::from_secs(3), Duration::from_secs(1)).unwrap();
    let factory = contend::memory::factory("wall-clock", lease);
    let leads = |id: &str| {
        let (service, events) = factory.contend("m").id(id).channel().unwrap();
        service.start().unwrap();
        (service, events)
    };
    let first = leads("a");
    // It queues first: a thread that was started first may run second.
    testbed::wait_until(Duration::from_secs(30), "the first leads", || {
        first.0.is_owner()
    });
    let both = [first, leads("b")];
    for (service, events) in both.iter().cycle().take(3) {
        for kind in [EventKind::Acquired, EventKind::Released] {
            let event = events
                .iter()
                .find(|event| event.kind != EventKind::OwnerChanged);
            let event = event.unwrap();
            assert_eq!(event.kind, kind);
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
            println!(
                "event {kind} {} {}",
                event.fence().unwrap(),
                now.as_millis()
            );
            if kind == EventKind::Acquired {
                thread::sleep(LEADS);
                assert!(
                    service.is_owner() && events.is_empty(),
                    "in spite of the step"
                );
                service.resign().unwrap();
            }
        }
    }
}

#[test]
fn a_wall_clock_stepped_by_an_hour_changes_neither_ownership_nor_events() {
    if std::env::var_os(STEPPED).is_some() {
        return elect();
    }
    let library = libfaketime();
    testbed::within(Duration::from_secs(100), || {
        let folder = testbed::TempDir::new();
        let clock = folder.path().join("clock");
        fs::write(&clock, "+0").unwrap();
        let (_, test) = concat!(
            module_path!(),
            "::a_wall_clock_stepped_by_an_hour_changes_neither_ownership_nor_events"
        )
        .split_once("::")
        .unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap());
        child
            .args(["--exact", test, "--nocapture", "--test-threads=1"])
            .env(STEPPED, "1")
            .env("LD_PRELOAD", library)
            .env("FAKETIME_TIMESTAMP_FILE", &clock)
            .env("FAKETIME_NO_CACHE", "1")
            .env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
        let child = Process::spawn(&child, &Output::Pipe).unwrap();
        let mut events: Vec<(String, u64, i64)> = Vec::new();
        let mut acquired = 0;
        for line in BufReader::new(child.take_stdout().unwrap()).lines() {
            let line = line.unwrap();
            let Some((_, event)) = line.split_once("event ") else {
                continue;
            };
            let words: Vec<&str> = event.split(' ').collect();
            if words[0] == "acquired" {
                // In the middle of every ownership: forward, back beyond the start, and to the truth.
                fs::write(&clock, ["+3600", "-3600", "+0"][acquired % 3]).unwrap();
                acquired += 1;
            }
            let number = |word: &str| word.parse::<i64>().unwrap();
            events.push((
                words[0].to_owned(),
                number(words[1]) as u64,
                number(words[2]),
            ));
        }
        assert!(
            child
                .wait(Duration::from_secs(10))
                .is_some_and(|it| it.success()),
            "{events:#?}"
        );

        let steps = events.windows(2).map(|pair| pair[1].2 - pair[0].2);
        let (forward, back) = steps.fold((0, 0), |(up, down), step| (up.max(step), down.min(step)));
        assert!(
            forward > 3_000_000 && back < -6_000_000,
            "the clock was not stepped: {events:#?}"
        );
        assert_eq!(events.len(), 6, "{events:#?}");
        let mut last = 0;
        for pair in events.chunks(2) {
            let kinds = (&*pair[0].0, &*pair[1].0);
            assert_eq!(kinds, ("acquired", "released"), "{events:#?}");
            assert_eq!(
                pair[0].1, pair[1].1,
                "a fence is fixed during one ownership"
            );
            assert!(pair[0].1 > last, "fences grow: {events:#?}");
            last = pair[0].1;
        }
    });
}
