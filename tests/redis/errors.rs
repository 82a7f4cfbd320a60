//! What a caller reads when the server cannot, may not or will not: each with its kind, one line, and what to do.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::thread;

use contend::backend::OnRefusal;
use contend::redis::Builder;
use contend::{Error, ErrorKind, Factory, Moment, connect};
use testbed::{Proxy, RedisServer, TempDir, wait_until, within};

use crate::driven::{Driven, HANG, PATIENCE, ms, soon};

fn acquire(factory: &Factory) -> Result<(), Error> {
    let mut contender = Driven::at(factory, "m", "a").raw;
    contender.acquire(OnRefusal::Leave, soon()).map(|_| ())
}

fn refused(url: &str) -> Error {
    acquire(&connect(url).unwrap()).unwrap_err()
}

#[track_caller]
fn check(error: &Error, kind: ErrorKind, says: &str) {
    let text = error.to_string();
    assert_eq!(error.kind(), kind, "{error:?}");
    assert!(text.contains(says), "{says:?} is not in {text:?}");
    assert!(!text.contains('\n'), "{text:?}");
}

/// Answers whatever it is asked with `answer`, and closes the connection.
fn stranger(answer: &'static [u8]) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for client in listener.incoming() {
            let mut client = client.unwrap();
            let _ = client.read(&mut [0; 1_024]);
            let _ = client.write_all(answer);
        }
    });
    address
}

#[test]
fn other_kinds_of_servers_are_recognised() {
    within(HANG, || {
        let redis = RedisServer::start();
        let asks = "is this a Redis server?";
        let closing = "closed the connection: did it restart? is it a Redis server?";
        let [closes, http] = [&b""[..], b"HTTP/1.1 400 Bad Request\r\n\r\n"].map(stranger);
        let mysql = testbed::MariaDbServer::start();
        for (url, kind, says) in [
            // A server that restarts closes connections, too: that is transient.
            (format!("redis://{closes}"), ErrorKind::Unreachable, closing),
            (
                format!("redis+cluster://{closes}"),
                ErrorKind::Unreachable,
                closing,
            ),
            (
                format!("redis+sentinel://{closes}/x"),
                ErrorKind::Unreachable,
                closing,
            ),
            (format!("redis://{http}"), ErrorKind::Misconfigured, asks),
            (
                format!("redis://{}", mysql.addr()),
                ErrorKind::Misconfigured,
                asks,
            ),
            (
                format!("redis+cluster://{}", redis.addr()),
                ErrorKind::Misconfigured,
                "use redis://",
            ),
            #[cfg(feature = "tls")]
            (
                format!("rediss://{closes}"),
                ErrorKind::Unreachable,
                "redis at",
            ),
        ] {
            check(&refused(&url), kind, says);
        }
    });
}

#[test]
fn absent_and_silent_servers_are_told_apart() {
    within(HANG, || {
        let server = RedisServer::start();
        let factory = connect(&server.url()).unwrap();
        let mut contender = Driven::at(&factory, "m", "a");
        let fence = contender.own();
        contender.release(fence);
        // Without time nothing is asked.
        let mut within = |time| {
            let by = Moment::now() + ms(time);
            contender.raw.acquire(OnRefusal::Leave, by).unwrap_err()
        };
        let error = within(0);
        check(&error, ErrorKind::Timeout, &server.addr().to_string());
        assert!(error.is_not_sent(), "{error}");
        server.pause();
        let error = within(400);
        server.resume();
        check(&error, ErrorKind::Timeout, "no answer within ");
        assert!(!error.is_not_sent());

        server.kill();
        let began = Moment::now();
        let error = refused(&server.url());
        assert!(Moment::now() - began < ms(8_000), "it says so at once");
        check(&error, ErrorKind::Unreachable, "Connection refused");
        assert!(error.is_not_sent());
    });
}

#[test]
fn inability_of_the_moment_is_transient() {
    within(HANG, || {
        let server = RedisServer::start();
        let factory = connect(&server.url()).unwrap();
        acquire(&factory).unwrap();
        let config = |key: &str, value: &str| server.cli(&["CONFIG", "SET", key, value]);
        for (key, limit, none, says) in [
            ("maxmemory", "1", "0", "raise maxmemory"),
            ("min-replicas-to-write", "1", "0", "min-replicas-to-write"),
        ] {
            config(key, limit);
            check(
                &acquire(&factory).unwrap_err(),
                ErrorKind::Unavailable,
                says,
            );
            config(key, none);
            acquire(&factory).unwrap();
        }
        config("lua-time-limit", "10"); // called busy-reply-threshold since 7.0
        let port = server.port().to_string();
        let mut busy = Command::new("redis-cli");
        busy.args(["-p", &port, "EVAL", "while true do end", "0"]);
        let mut busy = busy.stdout(Stdio::null()).spawn().unwrap();
        wait_until(PATIENCE, "a script blocks it", || {
            let mut contender = Driven::at(&factory, "m", "a").raw;
            let attempt = contender.acquire(OnRefusal::Leave, Moment::now() + ms(500));
            attempt.is_err_and(|error| error.to_string().contains("a script blocks the server"))
        });
        server.cli(&["SCRIPT", "KILL"]);
        busy.wait().unwrap();
        wait_until(PATIENCE, "it goes on", || acquire(&factory).is_ok());
    });
}

/// "max number of clients reached" is no final refusal.
#[test]
fn full_server_may_pass() {
    within(HANG, || {
        let server = RedisServer::start();
        server.cli(&["CONFIG", "SET", "maxclients", "2"]);
        let client = redis::Client::open(server.url()).unwrap();
        let full = [(); 2].map(|()| client.get_connection().unwrap());
        let factory = connect(&server.url()).unwrap();
        let error = acquire(&factory).unwrap_err();
        check(&error, ErrorKind::Unavailable, "raise maxclients");
        assert!(error.is_transient() && error.is_not_sent());
        drop(full);
        wait_until(PATIENCE, "it is let in", || acquire(&factory).is_ok());
    });
}

/// A replica that reads only, and one that serves nothing without its master.
#[test]
fn replica_asks_for_its_master() {
    within(HANG, || {
        let master = RedisServer::start();
        let port = master.port().to_string();
        let replica_of = ["--replicaof", "127.0.0.1", &port];
        let reads = RedisServer::start_with(&replica_of);
        let stale = [&replica_of[..], &["--replica-serve-stale-data", "no"]].concat();
        let stale = RedisServer::start_with(&stale);
        let says = |server: &RedisServer| {
            let factory = connect(&server.url()).unwrap();
            wait_until(PATIENCE, "it says that it is a replica", || {
                let error = acquire(&factory).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
                error.to_string().contains("connect to the master")
            });
            factory
        };
        let factory = says(&reads);
        // Promoted, it serves: the connection that said no was thrown away.
        reads.cli(&["REPLICAOF", "NO", "ONE"]);
        acquire(&factory).unwrap();
        master.kill();
        says(&stale);
    });
}

#[test]
fn denied_user_is_told_which_and_where() {
    within(HANG, || {
        let server = RedisServer::start();
        let user = "ACL SETUSER app on >right ~simba:* resetchannels &simba:* +@all";
        server.cli(&user.split(' ').collect::<Vec<_>>());
        let addr = server.addr();
        let error = refused(&format!("redis://app:wrong@{addr}"));
        for says in ["check user and password", "\"app\"", &addr.to_string()] {
            check(&error, ErrorKind::Denied, says);
        }
        let error = refused(&format!("redis://app:right@{addr}/99"));
        check(&error, ErrorKind::Misconfigured, "no such database");
        acquire(&connect(&format!("redis://app:right@{addr}")).unwrap()).unwrap();
    });
}

/// A server that writes refused log-ins down, or counts them, must not suffer from a wrong password. A call meanwhile
/// hears the known reason at once.
#[test]
fn refused_log_in_is_repeated_ever_more_slowly() {
    within(HANG, || {
        let server = RedisServer::start_with(&["--requirepass", "right"]);
        let proxy = Proxy::to(server.addr());
        let factory = connect(&format!("redis://:wrong@{}", proxy.addr())).unwrap();
        let until = Moment::now() + ms(5_000);
        while !until.remaining().is_zero() {
            let error = acquire(&factory).unwrap_err();
            check(&error, ErrorKind::Denied, "check user and password");
            thread::sleep(ms(5));
        }
        // At 0, 0.5, 1.5 and 3.5 s, and as often for messages; without a longer pause about thirty.
        let asked = proxy.accepted();
        assert!(asked <= 16, "{asked} log-ins in 5 s");
        server.cli(&["-a", "right", "CONFIG", "SET", "requirepass", "wrong"]);
        wait_until(PATIENCE, "it is let in", || acquire(&factory).is_ok());
    });
}

#[test]
fn rotated_password_is_asked_for() {
    within(HANG, || {
        static PASSWORD: Mutex<String> = Mutex::new(String::new());
        let server = RedisServer::start();
        let set = |password: &str| {
            *PASSWORD.lock().unwrap() = password.to_owned();
            let user = format!("ACL SETUSER app on resetpass >{password} ~* &* +@all");
            server.cli(&user.split(' ').collect::<Vec<_>>());
        };
        set("first");
        let factory = Builder::new(server.addr().to_string())
            .credentials(|| ("app".to_owned(), PASSWORD.lock().unwrap().clone()));
        let factory = factory.build().unwrap();
        acquire(&factory).unwrap();
        set("second");
        server.cli(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
        // A connection may have been refused before the server knew the second password.
        wait_until(PATIENCE, "the second password serves", || {
            acquire(&factory).is_ok()
        });
    });
}

#[test]
fn unix_socket_serves() {
    within(HANG, || {
        let folder = TempDir::new();
        let socket = folder.path().join("redis.sock");
        let socket = socket.to_str().unwrap();
        let server = RedisServer::start_with(&["--unixsocket", socket]);
        let factory = connect(&format!("redis:///3?socket={socket}")).unwrap();
        acquire(&factory).unwrap();
        assert_eq!(server.cli(&["-n", "3", "EXISTS", "simba:{m}"]).trim(), "1");
        server.kill();
        check(
            &acquire(&factory).unwrap_err(),
            ErrorKind::Unreachable,
            socket,
        );
    });
}

/// The first reply was lost with its connection, and the second says that there was nothing to release.
#[test]
fn release_in_doubt_says_so() {
    within(HANG, || {
        let server = RedisServer::start();
        let proxy = Proxy::to(server.addr());
        let mut owner = Driven::at(&crate::driven::factory(proxy.addr()), "m", "a");
        // So that the server knows the script: a lost "unknown script" leaves no doubt.
        let fence = owner.own();
        owner.release(fence);
        let fence = owner.own();
        proxy.lose_reply_to(b"EVALSHA");
        let error = owner.raw.release(fence, soon()).unwrap_err();
        assert_eq!(proxy.lost_replies(), 1);
        check(&error, ErrorKind::Unreachable, "is not known");
        check(&error, ErrorKind::Unreachable, &proxy.addr().to_string());
        assert!(!error.is_not_sent());
    });
}
