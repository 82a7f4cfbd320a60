//! A Redis whose clock is set while clients talk to it, as its clients see it: by what it says of its
//! time. (Its own clock cannot be set for a test; libfaketime and its allocator do not go together.)

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use contend::backend::{Attempt, Contender, OnRefusal, Purpose};
use contend::redis::Builder;
use contend::{ErrorKind, Lease, Moment};
use testbed::{RedisServer, within};

use crate::driven::{Driven, soon};

/// In microseconds.
const HOUR: u64 = 3_600_000_000;

/// Passes everything on, but while it is slow, the time that a script returns is that of
/// an hour ago. Ends with the process.
struct SlowClock {
    address: SocketAddr,
    slow: Arc<AtomicBool>,
}

impl SlowClock {
    fn before(server: SocketAddr) -> SlowClock {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let slow = Arc::new(AtomicBool::new(true));
        let said = Arc::clone(&slow);
        thread::spawn(move || {
            for client in listener.incoming() {
                let client = client.unwrap();
                let server = TcpStream::connect(server).unwrap();
                let ends = (client.try_clone().unwrap(), server.try_clone().unwrap());
                let said = Arc::clone(&said);
                thread::spawn(move || pass(client, server, |_| {}));
                thread::spawn(move || {
                    pass(ends.1, ends.0, |bytes| {
                        if said.load(Ordering::SeqCst) {
                            set_back(bytes);
                        }
                    });
                });
            }
        });
        SlowClock { address, slow }
    }
}

fn pass(mut from: TcpStream, mut to: TcpStream, change: impl Fn(&mut [u8])) {
    let mut buffer = [0; 16 * 1024];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        change(&mut buffer[..count]);
        if to.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}

/// An integer of 16 digits that comes after another integer is a time in microseconds; what comes first
/// is an outcome, or a fence.
fn set_back(bytes: &mut [u8]) {
    for start in 0..bytes.len().saturating_sub(18) {
        let after = bytes[..start].rsplit(|byte| *byte == b'\n').nth(1);
        let after_integer = after.is_some_and(|line| line.first() == Some(&b':'));
        let field = &mut bytes[start..start + 19];
        if after_integer
            && field[0] == b':'
            && field.ends_with(b"\r\n")
            && field[1..17].iter().all(u8::is_ascii_digit)
        {
            let now: u64 = std::str::from_utf8(&field[1..17]).unwrap().parse().unwrap();
            field[1..17].copy_from_slice((now - HOUR).to_string().as_bytes());
        }
    }
}

/// The server compares its time with the deadline that a request names, reckoned from what it said last.
/// After its clock was set, every request looks too late: once, and then both know.
#[test]
fn a_server_whose_clock_was_set_is_asked_once_more() {
    within(Duration::from_secs(120), || {
        let server = RedisServer::start();
        let clock = SlowClock::before(server.addr());
        let factory = Builder::new(clock.address.to_string()).build().unwrap();
        let place = Contender {
            mutex: "m".into(),
            id: "a".into(),
            lease: Lease::default(),
            purpose: Purpose::Lock,
        };
        let mut contender = factory
            .backend()
            .unwrap()
            .contender(&place, &contend::Parker::new().unparker())
            .unwrap();
        let soon = || Moment::now() + Duration::from_secs(20);
        let mut last = 0;
        for (slow, calls) in [(true, 1), (true, 2), (false, 2), (false, 1), (true, 1)] {
            clock.slow.store(slow, Ordering::SeqCst);
            server.cli(&["CONFIG", "RESETSTAT"]);
            let attempt = contender.acquire(OnRefusal::Enqueue, soon());
            let stats = server.cli(&["INFO", "commandstats"]);
            let made = stats
                .lines()
                .find_map(|line| line.strip_prefix("cmdstat_evalsha:calls="))
                .and_then(|rest| rest.split(',').next()?.parse().ok());
            assert_eq!(made, Some(calls), "{stats}");
            match attempt {
                Ok(Attempt::Granted(grant)) => {
                    let fence = grant.owner.fence();
                    assert!(fence > last, "{fence} after {last}");
                    last = fence;
                    assert!(contender.release(fence, soon()).unwrap());
                }
                // Told the same wrong time twice, it gives up for now.
                Err(error) => assert!(slow && calls == 2, "{error:?}"),
                Ok(Attempt::Refused(refusal)) => panic!("{refusal:?}"),
            }
        }
    });
}

/// As an acquire: what the server refused as too late was not done, and who left would stay in the queue.
#[test]
fn a_withdrawal_after_the_clock_was_set_leaves_the_queue() {
    within(Duration::from_secs(120), || {
        let server = RedisServer::start();
        let clock = SlowClock::before(server.addr());
        let factory = Builder::new(clock.address.to_string()).build().unwrap();
        let mut waiter = Driven::at(&factory, "m", "waiter");
        let direct = Builder::new(server.addr().to_string()).build().unwrap();
        Driven::at(&direct, "m", "owner").own();
        waiter.queue();
        let queue = || server.cli(&["ZRANGE", "simba:{m}:contender", "0", "-1"]);
        assert_eq!(queue().trim(), "waiter");
        // From now on an hour ahead of what it said.
        clock.slow.store(false, Ordering::SeqCst);
        waiter.raw.withdraw(soon()).unwrap();
        assert_eq!(queue().trim(), "");
        // It is not claimed to be done where it is refused again: told the same wrong time twice, it gives up.
        waiter.queue();
        clock.slow.store(true, Ordering::SeqCst);
        let _ = waiter.attempt(OnRefusal::Enqueue);
        let error = waiter.raw.withdraw(soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error:?}");
        assert_eq!(queue().trim(), "waiter");
    });
}
