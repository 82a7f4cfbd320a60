//! What a user reads when the server cannot, may not or will not: each with its kind, one line, and what
//! to do.

use std::net::TcpListener;
use std::sync::Mutex;
use std::thread;

use contend::backend::OnRefusal;
use contend::redis::Builder;
use contend::{Error, ErrorKind, Factory, Moment, connect};
use testbed::{Proxy, RedisServer, TempDir, wait_until, within};

use crate::driven::{Driven, HANG, PATIENCE, ms, soon, subscribe};

fn acquire(factory: &Factory) -> Result<(), Error> {
    let mut contender = Driven::at(factory, "m", "a").raw;
    contender.acquire(OnRefusal::Leave, soon()).map(|_| ())
}

fn refused(url: &str) -> Error {
    acquire(&connect(url).unwrap()).unwrap_err()
}

fn check(error: &Error, kind: ErrorKind, says: &str) {
    let text = error.to_string();
    assert_eq!(error.kind(), kind, "{error:?}");
    assert!(text.contains(says), "{says:?} is not in {text:?}");
    assert!(
        !text.contains('\n') && !text.contains("os error 11)"),
        "{text:?}"
    );
}

#[test]
fn a_server_that_is_away_says_why_and_at_once() {
    within(HANG, || {
        let server = RedisServer::start();
        server.kill();
        let factory = connect(&server.url()).unwrap();
        let locker = factory.locker("m").build().unwrap();
        let began = Moment::now();
        let mut contender = Driven::at(&factory, "m", "a").raw;
        let error = contender.acquire(OnRefusal::Leave, soon()).unwrap_err();
        assert!(Moment::now() - began < ms(8_000));
        check(&error, ErrorKind::Unreachable, "Connection refused");
        assert!(error.is_not_sent());
        let error = locker.try_lock_for(ms(500)).unwrap_err();
        assert_eq!(error.to_string().matches("refused").count(), 1, "{error}");
        assert!(!error.to_string().contains("pool_size"), "{error}");
    });
}

#[test]
fn a_server_that_hangs_says_for_how_long_it_was_waited_for() {
    within(HANG, || {
        let server = RedisServer::start();
        let factory = connect(&server.url()).unwrap();
        acquire(&factory).unwrap();
        server.pause();
        let mut contender = Driven::at(&factory, "m", "a").raw;
        let by = Moment::now() + ms(400);
        let error = contender.acquire(OnRefusal::Leave, by).unwrap_err();
        server.resume();
        check(&error, ErrorKind::Timeout, "no answer within ");
        assert!(!error.is_not_sent());
    });
}

#[test]
fn another_kind_of_server_is_recognised() {
    within(HANG, || {
        // As MySQL does: it speaks first.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || {
            let mut open = Vec::new();
            for client in listener.incoming() {
                let mut client = client.unwrap();
                let greeting = b"J\0\0\0\n8.4.0\0\x08\0\0\0abcdefgh\0";
                let _ = std::io::Write::write_all(&mut client, greeting);
                open.push(client);
            }
        });
        let error = refused(&format!("redis://{address}"));
        check(&error, ErrorKind::Misconfigured, "is this a Redis server?");
        assert!(!error.is_transient());
    });
}

/// Answers whatever it is asked with `answer`, and closes the connection.
fn stranger(answer: &'static [u8]) -> std::net::SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for client in listener.incoming() {
            let mut client = client.unwrap();
            let _ = std::io::Read::read(&mut client, &mut [0; 1024]);
            let _ = std::io::Write::write_all(&mut client, answer);
        }
    });
    address
}

/// It said "unexpected end of file", and nobody thinks of a wrong port then.
#[test]
fn whoever_closes_the_connection_without_an_answer_is_asked_whether_it_is_a_redis_server() {
    within(HANG, || {
        let zookeeper = testbed::ZooKeeperServer::start();
        for address in [stranger(b""), zookeeper.addr()] {
            for (scheme, path) in [
                ("redis", ""),
                ("redis+cluster", ""),
                ("redis+sentinel", "/x"),
            ] {
                let error = refused(&format!("{scheme}://{address}{path}"));
                let says = "closed the connection without an answer; is this a Redis server?";
                // A server that restarts closes it, too.
                check(&error, ErrorKind::Unreachable, says);
                check(&error, ErrorKind::Unreachable, &address.to_string());
            }
        }
    });
}

#[test]
fn http_and_mysql_are_recognised() {
    within(HANG, || {
        let mariadb = testbed::MariaDbServer::start();
        let http = stranger(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n");
        for address in [http, mariadb.addr()] {
            let error = refused(&format!("redis://{address}"));
            check(&error, ErrorKind::Misconfigured, "is this a Redis server?");
        }
    });
}

/// Calls end early on purpose, so that none outlasts its deadline: it said "within 2000 ms" after 1676 ms.
#[test]
fn a_time_that_is_named_was_waited_for() {
    within(HANG, || {
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = silent.local_addr().unwrap();
        let began = Moment::now();
        let error = refused(&format!("redis://{address}?connect_timeout=2s"));
        let took = Moment::now() - began;
        check(&error, ErrorKind::Timeout, "no answer within ");
        let text = error.to_string();
        let (_, named) = text.split_once("no answer within ").unwrap();
        let named: u64 = named.strip_suffix(" ms").unwrap().parse().unwrap();
        assert!((1_000..10_000).contains(&named), "{error}");
        assert!(ms(named) <= took, "{error}, after {took:?}");
    });
}

#[test]
fn what_a_server_cannot_do_now_is_transient_and_says_what_to_do() {
    within(HANG, || {
        let server = RedisServer::start();
        let factory = connect(&server.url()).unwrap();
        acquire(&factory).unwrap();
        let config = |key: &str, value: &str| server.cli(&["CONFIG", "SET", key, value]);
        config("maxmemory", "1");
        let error = acquire(&factory).unwrap_err();
        check(&error, ErrorKind::Unavailable, "raise maxmemory");
        config("maxmemory", "0");
        config("min-replicas-to-write", "1");
        let error = acquire(&factory).unwrap_err();
        check(&error, ErrorKind::Unavailable, "min-replicas-to-write");
        config("min-replicas-to-write", "0");
        acquire(&factory).unwrap();

        config("lua-time-limit", "10"); // called busy-reply-threshold since 7.0
        let port = server.port().to_string();
        let mut cli = std::process::Command::new("redis-cli");
        cli.args(["-p", &port, "EVAL", "while true do end", "0"])
            .stdout(std::process::Stdio::null());
        let mut busy = cli.spawn().unwrap();
        let mut error = None;
        wait_until(PATIENCE, "a script blocks it", || {
            let mut contender = Driven::at(&factory, "m", "a").raw;
            let by = Moment::now() + ms(500);
            error = contender.acquire(OnRefusal::Leave, by).err();
            (error.as_ref()).is_some_and(|error| error.kind() == ErrorKind::Unavailable)
        });
        check(
            &error.unwrap(),
            ErrorKind::Unavailable,
            "a script blocks the server",
        );
        server.cli(&["SCRIPT", "KILL"]);
        busy.wait().unwrap();
        wait_until(PATIENCE, "it goes on", || acquire(&factory).is_ok());
    });
}

#[test]
fn a_replica_without_its_master_says_so() {
    within(HANG, || {
        let master = RedisServer::start();
        let port = master.port().to_string();
        let replica = RedisServer::start_with(&[
            "--replicaof",
            "127.0.0.1",
            &port,
            "--replica-serve-stale-data",
            "no",
        ]);
        master.kill();
        let factory = connect(&replica.url()).unwrap();
        wait_until(PATIENCE, "it says that its master is away", || {
            let error = acquire(&factory).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
            error.to_string().contains("connect to the master")
        });
    });
}

#[test]
fn a_user_that_is_denied_is_told_which_and_where() {
    within(HANG, || {
        let server = RedisServer::start();
        server.cli(&[
            "ACL",
            "SETUSER",
            "app",
            "on",
            ">right",
            "~simba:*",
            "resetchannels",
            "&simba:*",
            "+@all",
        ]);
        let addr = server.addr();
        let error = refused(&format!("redis://app:wrong@{addr}"));
        check(&error, ErrorKind::Denied, "check user and password");
        assert!(error.to_string().contains("\"app\""), "{error}");
        assert!(error.to_string().contains(&addr.to_string()), "{error}");
        assert!(!format!("{error:?}").contains("wrong\""), "{error:?}");
        let error = refused(&format!("redis://app:right@{addr}/99"));
        check(&error, ErrorKind::Misconfigured, "no such database");
        acquire(&connect(&format!("redis://app:right@{addr}")).unwrap()).unwrap();

        let locked = RedisServer::start_with(&["--requirepass", "secret"]);
        check(
            &refused(&locked.url()),
            ErrorKind::Denied,
            "check user and password",
        );
    });
}

/// A factory alone logged in four times a second, for ever: a server that writes refused log-ins down, or
/// counts them, must not suffer from a wrong password. A call meanwhile hears the known reason at once.
#[test]
fn a_server_that_refuses_the_log_in_is_asked_ever_more_slowly() {
    within(HANG, || {
        let server = RedisServer::start_with(&["--requirepass", "right"]);
        let proxy = Proxy::to(server.addr());
        let factory = connect(&format!("redis://:wrong@{}", proxy.addr())).unwrap();
        let until = Moment::now() + ms(5_000);
        let mut longest = ms(0);
        while !until.remaining().is_zero() {
            let began = Moment::now();
            let error = acquire(&factory).unwrap_err();
            check(&error, ErrorKind::Denied, "check user and password");
            let error = subscribe(&factory, "m", soon()).unwrap_err();
            check(&error, ErrorKind::Denied, "check user and password");
            longest = longest.max(Moment::now() - began);
            thread::sleep(ms(5));
        }
        // For calls four, at 0, 0.5, 1.5 and 3.5 s, and for messages seven; without a longer pause about thirty.
        let asked = proxy.accepted();
        println!("{asked} log-ins refused in 5 s; the slowest answer took {longest:?}");
        assert!(asked <= 16, "{asked} log-ins in 5 s");
        assert!(longest < ms(3_000), "{longest:?}");
        server.cli(&["-a", "right", "CONFIG", "SET", "requirepass", "wrong"]);
        wait_until(PATIENCE, "it is let in", || acquire(&factory).is_ok());
    });
}

/// "12 warnings in 1.3 s, flapping between two kinds."
#[test]
fn a_missing_right_on_channels_is_denied_every_time() {
    within(HANG, || {
        let server = RedisServer::start();
        server.cli(&[
            "ACL",
            "SETUSER",
            "app",
            "on",
            ">pw",
            "~simba:*",
            "resetchannels",
            "+@all",
        ]);
        let factory = connect(&format!("redis://app:pw@{}", server.addr())).unwrap();
        let service = factory.contend("m").build().unwrap();
        service.start().unwrap();
        wait_until(PATIENCE, "it says why", || service.last_error().is_some());
        let until = Moment::now() + ms(1_500);
        while !until.remaining().is_zero() {
            if let Some(error) = service.last_error() {
                check(&error, ErrorKind::Denied, "the user needs");
            }
            thread::sleep(ms(5));
        }
    });
}

#[test]
fn a_password_that_rotates_is_asked_for() {
    within(HANG, || {
        let server = RedisServer::start();
        let rotate = |password: &str| {
            let new = format!(">{password}");
            server.cli(&[
                "ACL",
                "SETUSER",
                "app",
                "on",
                "resetpass",
                &new,
                "~*",
                "&*",
                "+@all",
            ]);
        };
        static PASSWORD: Mutex<String> = Mutex::new(String::new());
        let set = |password: &str| {
            *PASSWORD.lock().unwrap() = password.to_owned();
            rotate(password);
        };
        set("first");
        let factory = Builder::new(server.addr().to_string())
            .credentials(|| ("app".to_owned(), PASSWORD.lock().unwrap().clone()))
            .build()
            .unwrap();
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
fn a_unix_socket_serves() {
    within(HANG, || {
        let folder = TempDir::new();
        let socket = folder.path().join("redis.sock");
        let socket = socket.to_str().unwrap();
        let server = RedisServer::start_with(&["--unixsocket", socket]);
        let factory = connect(&format!("redis:///3?socket={socket}")).unwrap();
        let locker = factory.locker("m").build().unwrap();
        let guard = locker.lock().unwrap();
        assert_eq!(server.cli(&["-n", "3", "EXISTS", "simba:{m}"]).trim(), "1");
        drop(guard);
        factory.backend().unwrap().ping(soon()).unwrap();
        server.kill();
        let error = acquire(&factory).unwrap_err();
        check(&error, ErrorKind::Unreachable, socket);
    });
}

/// Rule "trouble is visible": the pool hears of it, and the probe does.
#[test]
fn a_probe_hears_of_connections() {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    #[derive(Default)]
    struct Counts(AtomicUsize, AtomicUsize);
    impl contend::Probe for Counts {
        fn connected(&self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
        fn disconnected(&self, _: &Error) {
            self.1.fetch_add(1, Ordering::SeqCst);
        }
    }
    within(HANG, || {
        let server = RedisServer::start();
        let proxy = Proxy::to(server.addr());
        let factory = Builder::new(proxy.addr().to_string()).build().unwrap();
        let counts = Arc::new(Counts::default());
        factory
            .backend()
            .unwrap()
            .set_probe(Arc::clone(&counts) as Arc<_>);
        acquire(&factory).unwrap();
        proxy.cut();
        wait_until(PATIENCE, "it was told", || {
            // The proxy may cut one that is just being opened, too.
            let _ = acquire(&factory);
            counts.0.load(Ordering::SeqCst) > 0 && counts.1.load(Ordering::SeqCst) > 0
        });
        wait_until(
            PATIENCE,
            "it is served again, by an open connection",
            || {
                let condition = factory.backend().unwrap().condition();
                let open = condition.pool.unwrap().open;
                acquire(&factory).is_ok() && open >= 1
            },
        );
    });
}

/// A server says which arguments came with an unknown command: a mutex's name is no error of the server.
#[test]
fn a_server_without_scripts_is_misconfigured_whatever_the_mutex_is_called() {
    within(HANG, || {
        let server = RedisServer::start_with(&["--rename-command", "EVALSHA", ""]);
        let factory = connect(&server.url()).unwrap();
        let mut contender = Driven::at(&factory, "LOADING-OOM", "a").raw;
        let error = contender.acquire(OnRefusal::Leave, soon()).unwrap_err();
        check(&error, ErrorKind::Misconfigured, "all commands enabled");
        assert!(!error.to_string().contains("LOADING"), "{error}");
    });
}

/// A restart of the server closes connections in their handshake, too: `lock()` must not give up on that.
#[cfg(feature = "tls")]
#[test]
fn a_connection_that_ends_in_its_tls_handshake_is_tried_again() {
    within(HANG, || {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || {
            for client in listener.incoming() {
                let mut hello = [0; 16];
                let _ = std::io::Read::read(&mut client.unwrap(), &mut hello);
            }
        });
        let error = refused(&format!("rediss://{address}"));
        check(&error, ErrorKind::Unreachable, "redis at 127.0.0.1");
        assert!(error.is_transient());
    });
}

/// The first reply was lost with its connection, and the second says that there was nothing to release.
#[test]
fn a_release_in_doubt_says_which_server_was_lost_and_how() {
    within(HANG, || {
        let server = RedisServer::start();
        let proxy = Proxy::to(server.addr());
        let factory = Builder::new(proxy.addr().to_string()).build().unwrap();
        let mut owner = Driven::at(&factory, "m", "a");
        // So that the server knows the script: a lost "unknown script" leaves no doubt.
        let fence = owner.own();
        owner.release(fence);
        let fence = owner.own();
        proxy.lose_reply_to(b"EVALSHA");
        let error = owner.raw.release(fence, soon()).unwrap_err();
        assert_eq!(proxy.lost_replies(), 1);
        check(&error, ErrorKind::Unreachable, "is not known");
        check(&error, ErrorKind::Unreachable, "end of file while");
        check(
            &error,
            ErrorKind::Unreachable,
            &format!("redis at {}: ", proxy.addr()),
        );
        assert!(!error.is_not_sent());
    });
}

/// A call without time sends nothing: its outcome is known.
#[test]
fn a_call_without_time_says_that_nothing_was_asked() {
    within(HANG, || {
        let server = RedisServer::start();
        let factory = connect(&server.url()).unwrap();
        acquire(&factory).unwrap();
        let mut contender = Driven::at(&factory, "m", "a").raw;
        let now = Moment::now();
        let error = contender.acquire(OnRefusal::Leave, now).unwrap_err();
        check(&error, ErrorKind::Timeout, &server.addr().to_string());
        assert!(error.is_not_sent(), "{error}");
        assert!(!error.to_string().contains("within 0 ms"), "{error}");
    });
}
