//! Rule 1: a step of the wall clock changes neither ownership nor events.

use crate::tool;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

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

fn number(line: &str, key: &str) -> Option<u64> {
    let rest = line.split_once(&format!("\"{key}\":"))?.1;
    rest.split([',', '}']).next()?.parse().ok()
}

#[test]
fn a_wall_clock_stepped_by_an_hour_changes_neither_ownership_nor_events() {
    let contend = tool::path();
    let library = libfaketime();
    testbed::within(Duration::from_secs(100), || {
        let folder = testbed::TempDir::new();
        let clock = folder.path().join("clock");
        fs::write(&clock, "+0").unwrap();
        let mut child = Command::new(contend)
            .args([
                "elect",
                "--json",
                "--contenders",
                "2",
                "--ttl",
                "2s",
                "--transition",
                "1s",
            ])
            .args(["--lead", "5s", "--for", "15s"])
            .env_remove("CONTEND_URL")
            .env("LD_PRELOAD", library)
            .env("FAKETIME_TIMESTAMP_FILE", &clock)
            .env("FAKETIME_NO_CACHE", "1")
            .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = Vec::new();
        let mut acquired = 0;
        for line in BufReader::new(child.stdout.take().unwrap()).lines() {
            let line = line.unwrap();
            if line.contains("\"acquired\"") {
                // In the middle of every ownership: forward, back beyond the start, and to the truth.
                let offset = ["+3600", "-3600", "+0"][acquired % 3];
                fs::write(&clock, offset).unwrap();
                acquired += 1;
            }
            lines.push(line);
        }
        assert!(child.wait().unwrap().success());

        let stamps: Vec<u64> = lines
            .iter()
            .filter_map(|line| number(line, "at_ms"))
            .collect();
        let steps = stamps
            .windows(2)
            .map(|pair| pair[1] as i64 - pair[0] as i64);
        let (forward, back) = steps.fold((0, 0), |(up, down), step| (up.max(step), down.min(step)));
        assert!(
            forward > 3_000_000 && back < -6_000_000,
            "the clock was not stepped: {lines:#?}"
        );

        let ownership: Vec<(&str, Option<u64>)> = lines
            .iter()
            .filter_map(|line| {
                let event = ["acquired", "released"]
                    .into_iter()
                    .find(|event| line.contains(event))?;
                Some((event, number(line, "fence")))
            })
            .collect();
        // Three turns of five seconds, each longer than two ttls, and none cut short.
        assert!(matches!(ownership.len(), 6 | 8), "{lines:#?}");
        let mut last = None;
        for pair in ownership.chunks(2) {
            assert_eq!(
                (pair[0].0, pair[1].0),
                ("acquired", "released"),
                "{lines:#?}"
            );
            assert_eq!(
                pair[0].1, pair[1].1,
                "a fence is fixed during one ownership"
            );
            assert!(pair[0].1 > last, "fences grow: {lines:#?}");
            last = pair[0].1;
        }
    });
}
