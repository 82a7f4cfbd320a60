//! A Redis whose clock is set while clients talk to it, as its clients see it: by what it says of its
//! time. (Its own clock cannot be set for a test; libfaketime and its allocator do not go together.)

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use contend::ErrorKind;
use contend::backend::OnRefusal;
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
fn stepped_server_clock_costs_one_attempt() {
    within(Duration::from_secs(120), || {
        let server = RedisServer::start();
        let clock = SlowClock::before(server.addr());
        let factory = crate::driven::factory(clock.address);
        let mut contender = Driven::at(&factory, "m", "a");
        clock.slow.store(true, Ordering::SeqCst);
        let fence = contender.own();
        contender.release(fence);
        clock.slow.store(false, Ordering::SeqCst);
        let error = contender
            .raw
            .acquire(OnRefusal::Enqueue, soon())
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout);
        assert!(error.is_not_sent(), "nothing was done: {error:?}");
        assert!(contender.own() > fence);
    });
}
