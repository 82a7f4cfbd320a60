//! A step of the wall clock changes neither ownership nor events.

use std::io::{BufRead, BufReader};
use std::process::Command;
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use contend::{EventKind, Lease};
use testbed::{FakeClock, Output, Process, TempDir, wait_until, within};

/// Set in the process whose wall clock is stepped.
const STEPPED: &str = "CONTEND_TEST_WALL_CLOCK";

/// How long each leads: two ttls and more, so that it renews by a clock that was stepped.
const LEADS: Duration = Duration::from_millis(6_500);

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
    let is_owner = || first.0.is_owner();
    wait_until(Duration::from_secs(30), "the first leads", is_owner);
    let both = [first, leads("b")];
    for (service, events) in both.iter().cycle().take(3) {
        for kind in [EventKind::Acquired, EventKind::Released] {
            let mut own = events
                .iter()
                .filter(|it| it.kind != EventKind::OwnerChanged);
            let event = own.next().unwrap();
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
fn stepped_wall_clock_changes_nothing() {
    if std::env::var_os(STEPPED).is_some() {
        return elect();
    }
    within(Duration::from_secs(100), || {
        let folder = TempDir::new();
        let clock = FakeClock::new(&folder.path().join("clock"));
        let mut child = Command::new(std::env::current_exe().unwrap());
        child
            .args(["--exact", "wall_clock::stepped_wall_clock_changes_nothing"])
            .args(["--nocapture", "--test-threads=1"])
            .env(STEPPED, "1");
        clock.show(&mut child);
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
                clock.step([3_600, -3_600, 0][acquired % 3]);
                acquired += 1;
            }
            let (fence, at) = (words[1].parse().unwrap(), words[2].parse().unwrap());
            events.push((words[0].to_owned(), fence, at));
        }
        let ended = child.wait(Duration::from_secs(10));
        assert!(ended.is_some_and(|it| it.success()), "{events:#?}");

        let steps = events.windows(2).map(|pair| pair[1].2 - pair[0].2);
        let (forward, back) = steps.fold((0, 0), |(up, down), step| (up.max(step), down.min(step)));
        let is_stepped = forward > 3_000_000 && back < -6_000_000;
        assert!(is_stepped, "the clock was not stepped: {events:#?}");
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
