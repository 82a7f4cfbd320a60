//! The client under faults. Each fault that was seen in the `zookeeper` crate is shown absent here.
use crate::support;

use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::Command;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use crate::support::{CREATOR, HANG, PATIENCE, Verbs, builder, name, session, soon, wait_for};
use contend::zk::{Mode, Session, SessionState};
use contend::{ErrorKind, Moment};
use testbed::{Direction, Output, Process, Proxy, ZooKeeperServer, wait_until, within};

static SERVER: LazyLock<ZooKeeperServer> = LazyLock::new(ZooKeeperServer::start);

const SHORT: Duration = Duration::from_millis(1_500);
const LONG: Duration = Duration::from_secs(30);

#[test]
fn a_node_is_made_read_listed_and_deleted() {
    within(HANG, || {
        let root = format!("/{}", name("verbs"));
        let session = session(SERVER.addr(), LONG);
        assert_ne!(session.id(), 0);
        let (path, stat) = session
            .create(&root, b"data", Mode::Persistent, soon())
            .unwrap();
        assert_eq!((path.as_str(), stat.ephemeral_owner), (root.as_str(), 0));
        let child = format!("{root}/n-");
        let (first, own) = session
            .create(&child, b"", Mode::EphemeralSequential, soon())
            .unwrap();
        assert_eq!(first, format!("{root}/n-0000000000"));
        assert_eq!(own.ephemeral_owner, session.id());
        assert!(own.czxid > stat.czxid);
        assert_eq!(session.get_data(&root, soon()).unwrap().0, b"data");
        assert_eq!(
            session.get_children(&root, soon()).unwrap(),
            ["n-0000000000"]
        );
        assert!(session.exists(&root, soon()).unwrap().is_some());
        let error = session
            .create(&root, b"", Mode::Persistent, soon())
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
        session.delete(&first, soon()).unwrap();
        session.sync(soon()).unwrap();
        session.delete(&root, soon()).unwrap();
        assert!(session.exists(&root, soon()).unwrap().is_none());
        let error = session.delete(&root, soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
        session.close();
        assert_eq!(session.state(), SessionState::Closed);
        let error = session.sync(soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    });
}

#[test]
fn the_servers_session_timeout_counts_not_ours_and_a_shorter_one_is_refused() {
    within(HANG, || {
        // The server grants 400 ms to 60 s.
        for (asked, granted) in [(150, 400), (5_000, 5_000), (60_000, 60_000)] {
            let session = session(SERVER.addr(), Duration::from_millis(asked));
            assert_eq!(session.timeout(), Duration::from_millis(granted));
        }
        let session = builder(SERVER.addr(), Duration::from_secs(120))
            .session()
            .unwrap();
        let error = session.sync(soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
        for part in ["60s at most", "120s is needed", "maxSessionTimeout"] {
            assert!(error.to_string().contains(part), "{error}");
        }
        assert!(error.is_not_sent());
    });
}

#[test]
fn a_call_to_a_paused_server_ends_by_its_deadline_and_the_session_goes_on() {
    within(HANG, || {
        let server = ZooKeeperServer::start();
        let session = session(server.addr(), Duration::from_secs(6));
        let id = session.id();
        server.pause();
        let began = Instant::now();
        let by = Moment::now() + Duration::from_millis(300);
        let error = session.sync(by).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        assert!((280..10_000).contains(&began.elapsed().as_millis()));
        wait_for(&session, SessionState::Suspended);
        assert!(session.alive_until().is_some());
        server.resume();
        wait_for(&session, SessionState::Connected);
        session.sync(soon()).unwrap();
        // It was paused for two thirds of the timeout: the same session, or the server's own word.
        assert_eq!(session.id(), id);
    });
}

#[test]
fn a_late_reply_is_not_taken_for_the_next_one() {
    within(HANG, || {
        let proxy = Proxy::to(SERVER.addr());
        let session = session(proxy.addr(), LONG);
        let root = format!("/{}", name("late"));
        session
            .create(&root, b"right", Mode::Persistent, soon())
            .unwrap();
        proxy.black_hole(Direction::ToClient);
        let by = Moment::now() + Duration::from_millis(200);
        assert!(session.get_children("/", by).is_err());
        proxy.pass();
        assert_eq!(session.get_data(&root, soon()).unwrap().0, b"right");
        assert_eq!(proxy.accepted(), 1, "the connection was kept");
    });
}

#[test]
fn a_cut_connection_resumes_the_same_session_under_traffic() {
    within(HANG, || {
        let proxy = Proxy::to(SERVER.addr());
        let session = session(proxy.addr(), LONG);
        let id = session.id();
        let root = format!("/{}", name("cut"));
        session
            .create(&root, b"", Mode::Persistent, soon())
            .unwrap();
        let node = ephemeral(&session, &root);
        for round in 0..10 {
            if round % 2 == 0 {
                proxy.cut();
            } else {
                proxy.reset();
            }
            // A call that was on its way may fail; none hangs, and the next ones go through.
            wait_until(PATIENCE, "calls go through again", || {
                session
                    .exists(&node, soon())
                    .is_ok_and(|stat| stat.is_some())
            });
        }
        assert_eq!(session.id(), id);
        assert_eq!(session.state(), SessionState::Connected);
    });
}

#[test]
fn a_session_expires_by_the_servers_word_and_never_becomes_another() {
    within(HANG, || {
        let proxy = Proxy::to(SERVER.addr());
        let session = session(proxy.addr(), SHORT);
        let id = session.id();
        let other = support::session(SERVER.addr(), LONG);
        let root = format!("/{}", name("expiry"));
        other.create(&root, b"", Mode::Persistent, soon()).unwrap();
        let node = ephemeral(&session, &root);
        proxy.refuse();
        proxy.cut();
        wait_for(&session, SessionState::Suspended);
        wait_until(PATIENCE, "the server has expired the session", || {
            other.exists(&node, soon()).unwrap().is_none()
        });
        assert!(
            session.alive_until().unwrap() < Moment::now(),
            "the node went while the session was certainly alive"
        );
        // No server told it: it does not know, and does not guess.
        assert_eq!(session.state(), SessionState::Suspended);
        proxy.pass();
        wait_for(&session, SessionState::Expired);
        assert_eq!((session.id(), session.alive_until()), (id, None));
        let error = session.sync(soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
    });
}

#[test]
fn a_server_restarted_after_the_timeout_resumes_the_session() {
    within(HANG, || {
        // It counts the timeout anew as soon as its data is loaded, and refuses every client until it serves:
        // on a busy machine that took it more than 1.5 s.
        let timeout = Duration::from_secs(8);
        let server = ZooKeeperServer::start();
        // A server that is away looks like one that refuses us, so that the session is doubted.
        let proxy = Proxy::to(server.addr());
        // A client that asks before its data is loaded gets neither an answer nor an end of the connection, because
        // ZooKeeper fails while it closes it: such a connection must be given up long before the session ends.
        let builder = builder(proxy.addr(), timeout).connect_timeout(Duration::from_secs(1));
        let session = builder.session().unwrap();
        wait_for(&session, SessionState::Connected);
        let id = session.id();
        server.kill();
        wait_for(&session, SessionState::Suspended);
        std::thread::sleep(timeout);
        server.start();
        wait_for(&session, SessionState::Connected);
        assert_eq!(session.id(), id);
    });
}

#[test]
fn a_black_hole_either_way_is_noticed_and_left() {
    within(HANG, || {
        for direction in [Direction::ToServer, Direction::ToClient] {
            let proxy = Proxy::to(SERVER.addr());
            let session = session(proxy.addr(), SHORT);
            proxy.black_hole(direction);
            let began = Instant::now();
            wait_for(&session, SessionState::Suspended);
            // A beat is due within T/6 and gets T/2.
            assert!(began.elapsed() < SHORT + Duration::from_secs(15));
            proxy.pass();
            wait_until(PATIENCE, "a server has had its say", || {
                matches!(
                    session.state(),
                    SessionState::Connected | SessionState::Expired
                )
            });
        }
    });
}

#[test]
fn a_dropped_session_that_was_cut_off_keeps_nothing_alive() {
    within(HANG, || {
        let proxy = Proxy::to(SERVER.addr());
        let other = session(SERVER.addr(), LONG);
        let root = format!("/{}", name("dropped"));
        other.create(&root, b"", Mode::Persistent, soon()).unwrap();
        let cut_off = session(proxy.addr(), SHORT);
        let node = ephemeral(&cut_off, &root);
        proxy.black_hole(Direction::Both);
        let began = Instant::now();
        drop(cut_off);
        assert!(began.elapsed() < Duration::from_secs(10), "drop is bounded");
        proxy.cut();
        proxy.pass();
        wait_until(PATIENCE, "the node is gone", || {
            other.exists(&node, soon()).unwrap().is_none()
        });
        wait_until(PATIENCE, "no connection is left", || proxy.live() == 0);
    });
}

#[test]
fn closing_deletes_the_nodes_at_once() {
    within(HANG, || {
        let other = session(SERVER.addr(), LONG);
        let root = format!("/{}", name("closing"));
        other.create(&root, b"", Mode::Persistent, soon()).unwrap();
        let leaving = session(SERVER.addr(), LONG);
        ephemeral(&leaving, &root);
        drop(leaving);
        // Long before the session would time out: a busy server may take longer than a goodbye waits.
        wait_until(LONG / 2, "its node is gone", || {
            other.get_children(&root, soon()).unwrap().is_empty()
        });
    });
}

#[test]
fn an_unreachable_or_refusing_server_is_an_error_not_a_panic() {
    within(HANG, || {
        let unused = testbed::Port::free();
        for address in [unused.addr().to_string(), "255.255.255.255:2181".to_owned()] {
            let session = builder(&address, LONG).session().unwrap();
            let error = session.sync(soon()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
            assert!(error.to_string().contains(&address), "{error}");
            assert_eq!(session.state(), SessionState::Connecting);
        }
    });
}

#[test]
fn the_next_host_is_tried_when_one_is_away() {
    within(HANG, || {
        let unused = testbed::Port::free();
        for _ in 0..8 {
            let hosts = format!("{},{}", unused.addr(), SERVER.addr());
            session(hosts, LONG).sync(soon()).unwrap();
        }
    });
}

#[test]
fn authentication_is_replayed_and_keeps_others_out() {
    within(HANG, || {
        let proxy = Proxy::to(SERVER.addr());
        let ours = builder(proxy.addr(), LONG)
            .digest("me", "s3cret")
            .session()
            .unwrap();
        let path = format!("/{}", name("auth"));
        ours.create_for(CREATOR, &path, b"mine", Mode::Persistent, soon())
            .unwrap();
        for _ in 0..3 {
            proxy.cut();
            wait_until(PATIENCE, "our own node is ours again", || {
                ours.get_data(&path, soon())
                    .is_ok_and(|(data, _)| data == b"mine")
            });
        }
        let stranger = session(SERVER.addr(), LONG);
        let error = stranger.get_data(&path, soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
        assert!(!format!("{ours:?}{error:?}").contains("s3cret"));
    });
}

#[test]
fn a_container_is_a_true_one() {
    within(HANG, || {
        let server = ZooKeeperServer::start_with(&[], &["-Dznode.container.checkIntervalMs=200"]);
        let session = session(server.addr(), LONG);
        session
            .create("/container", b"", Mode::Container, soon())
            .unwrap();
        let (child, _) = session
            .create("/container/n-", b"", Mode::EphemeralSequential, soon())
            .unwrap();
        session.delete(&child, soon()).unwrap();
        wait_until(PATIENCE, "the empty container is reaped", || {
            session.exists("/container", soon()).unwrap().is_none()
        });
    });
}

/// Makes a node that ends with the session.
fn ephemeral(session: &Session, root: &str) -> String {
    let path = format!("{root}/n-");
    let made = session.create(&path, b"", Mode::EphemeralSequential, soon());
    made.unwrap().0
}

/// Answers the handshake of a connection with the first piece, and whatever follows with the rest; the
/// last conversation is repeated.
fn impostor(conversations: Vec<Vec<Vec<u8>>>) -> std::net::SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for number in 0.. {
            let Ok((mut stream, _)) = listener.accept() else {
                return;
            };
            let pieces = &conversations[number.min(conversations.len() - 1)];
            let mut request = [0; 4096];
            for piece in pieces {
                if !matches!(stream.read(&mut request), Ok(1..)) || stream.write_all(piece).is_err()
                {
                    break;
                }
            }
        }
    });
    address
}

fn frame(fields: &[&[u8]]) -> Vec<u8> {
    let body = fields.concat();
    [&(body.len() as u32).to_be_bytes()[..], &body].concat()
}

fn welcome(id: i64) -> Vec<u8> {
    frame(&[
        &0i32.to_be_bytes(),
        &30_000i32.to_be_bytes(),
        &id.to_be_bytes(),
        &16i32.to_be_bytes(),
        &[1; 16],
        &[0],
    ])
}

#[test]
fn a_server_that_is_none_is_an_error_not_a_panic() {
    within(HANG, || {
        let reply = |xid: i32, body: &[u8]| {
            frame(&[
                &xid.to_be_bytes(),
                &1i64.to_be_bytes(),
                &0i32.to_be_bytes(),
                body,
            ])
        };
        for pieces in [
            vec![b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec()],
            vec![i32::MAX.to_be_bytes().to_vec()],
            vec![(-5i32).to_be_bytes().to_vec()],
            vec![frame(&[&[0; 3]])],
            vec![welcome(7), vec![0xff; 64]],
            vec![welcome(7), reply(999, b"")],
            // The first request is a heartbeat.
            vec![
                welcome(7),
                [reply(1, b""), reply(2, &i32::MAX.to_be_bytes())].concat(),
            ],
            vec![welcome(7), reply(-1, &[9; 7])],
        ] {
            let session = builder(impostor(vec![pieces.clone()]), LONG)
                .session()
                .unwrap();
            let error = session.get_children("/", soon()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Protocol, "{pieces:?}: {error}");
            assert!(!session.state().eq(&SessionState::Expired));
        }
    });
}

#[test]
fn another_session_than_ours_is_not_taken_for_it() {
    within(HANG, || {
        let nonsense = vec![0xff; 64];
        let server = impostor(vec![vec![welcome(7), nonsense.clone()], vec![welcome(8)]]);
        let session = builder(server, LONG).session().unwrap();
        session.sync(soon()).unwrap_err();
        wait_until(PATIENCE, "it was offered another session", || {
            session
                .sync(soon())
                .unwrap_err()
                .to_string()
                .contains("did not give us the session we asked for")
        });
        assert_eq!(session.id(), 7);
        assert_ne!(session.state(), SessionState::Connected);
    });
}

/// Alone in its process, which has a logger.
#[test]
fn a_clean_stop_warns_of_nothing() {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "client::stops", "--ignored", "--nocapture"])
        .env("CONTEND_STOPS_AT", SERVER.addr().to_string());
    let child = Process::spawn(&command, &Output::Pipe).unwrap();
    let mut said = String::new();
    child
        .take_stdout()
        .unwrap()
        .read_to_string(&mut said)
        .unwrap();
    assert!(child.wait(PATIENCE).is_some_and(|status| status.success()));
    assert!(said.contains("stopped"), "{said}");
    assert!(!said.contains("LOGGED"), "{said}");
}

struct Warnings;

impl log::Log for Warnings {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.level() <= log::Level::Warn
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            println!("LOGGED {}", record.args());
        }
    }

    fn flush(&self) {}
}

#[test]
#[ignore = "run by the other test, as another process"]
fn stops() {
    log::set_logger(&Warnings).unwrap();
    log::set_max_level(log::LevelFilter::Warn);
    for _ in 0..5 {
        let server = std::env::var("CONTEND_STOPS_AT").unwrap();
        let factory = support::factory(server, LONG);
        let service = factory.contend(name("stops")).build().unwrap();
        service.start().unwrap();
        support::wait_leads(&service);
        service.stop().unwrap();
        drop((service, factory));
    }
    println!("stopped");
}

/// A stand-in that lets a client in, acknowledges its heartbeats and does not answer its goodbye. It closes
/// nothing: the connection must be ended by the client, though nothing is due to wake its thread.
#[test]
fn closing_a_session_ends_its_connection_though_the_server_does_not_answer() {
    within(HANG, || {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let session = builder(listener.local_addr().unwrap(), Duration::from_secs(6))
            .session()
            .unwrap();
        let (mut client, _) = listener.accept().unwrap();
        let mut frame = move || {
            let mut length = [0; 4];
            client.read_exact(&mut length).ok()?;
            let mut frame = vec![0; u32::from_be_bytes(length) as usize];
            client.read_exact(&mut frame).ok()?;
            Some((frame, client.try_clone().unwrap()))
        };
        let (_, mut client) = frame().unwrap();
        // Protocol, T = 6 s, session 7, a password of 16 bytes, not read-only.
        let mut welcome = [0_u8; 41];
        welcome[3] = 37;
        welcome[8..12].copy_from_slice(&6_000_i32.to_be_bytes());
        welcome[19] = 7;
        welcome[23] = 16;
        client.write_all(&welcome).unwrap();
        let server = std::thread::spawn(move || {
            while let Some((request, mut client)) = frame() {
                // A `sync`, answered without an error.
                if request[4..8] == 9_i32.to_be_bytes() {
                    let mut reply = vec![0, 0, 0, 21];
                    reply.extend_from_slice(&request[..4]);
                    reply.extend_from_slice(&[0; 12]);
                    reply.extend_from_slice(&[0, 0, 0, 1, b'/']);
                    client.write_all(&reply).unwrap();
                }
            }
        });
        wait_for(&session, SessionState::Connected);
        session.close();
        wait_until(PATIENCE, "the connection is closed", || {
            server.is_finished()
        });
        server.join().unwrap();
    });
}
