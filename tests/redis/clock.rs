//! A Redis whose clock is set while clients talk to it. (The clock of a real one cannot be set for a test;
//! libfaketime and its allocator do not go together.)

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, UNIX_EPOCH};

use contend::ErrorKind;
use contend::backend::OnRefusal;
use testbed::within;

use crate::driven::{Driven, soon};

const HOUR: u64 = 3_600;

/// Answers each script with an outcome and a time in seconds, and passes on its last argument.
fn server(mut answers: Vec<(i64, u64)>) -> (SocketAddr, Receiver<u64>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (said, hears) = channel();
    thread::spawn(move || {
        // One connection, and one request at a time.
        let (mut client, _) = listener.accept().unwrap();
        let mut buffer = [0; 4_096];
        while let Ok(count @ 1..) = client.read(&mut buffer) {
            let request = String::from_utf8_lossy(&buffer[..count]);
            let answer = if request.contains("EVALSHA") {
                let last = request.trim_end().rsplit("\r\n").next().unwrap();
                said.send(last.parse().unwrap()).unwrap();
                let (outcome, seconds) = answers.remove(0);
                format!("*2\r\n:{outcome}\r\n:{seconds}000000\r\n")
            } else {
                "$-1\r\n".to_owned()
            };
            client.write_all(answer.as_bytes()).unwrap();
        }
    });
    (address, hears)
}

/// A request names its deadline by the clock that the last reply told. After that was set, every request looks too
/// late: once, and then both know.
#[test]
fn stepped_server_clock_costs_one_attempt() {
    within(Duration::from_secs(120), || {
        let now = UNIX_EPOCH.elapsed().unwrap().as_secs();
        let (address, asked) = server(vec![(7, now - HOUR), (-1, now), (8, now)]);
        let builder = contend::redis::Builder::new(address.to_string()).pool_size(1);
        let mut contender = Driven::at(&builder.build().unwrap(), "m", "a");
        assert_eq!(contender.own(), 7);
        assert_eq!(asked.recv().unwrap(), 0, "not known yet");
        let late = contender.raw.acquire(OnRefusal::Leave, soon()).unwrap_err();
        assert_eq!(late.kind(), ErrorKind::Timeout);
        assert!(late.is_not_sent(), "nothing was done: {late:?}");
        let limits = (now - HOUR) * 1_000..(now - HOUR + 60) * 1_000;
        assert!(limits.contains(&asked.recv().unwrap()));
        assert_eq!(contender.own(), 8);
        assert!(asked.recv().unwrap() > now * 1_000);
    });
}
