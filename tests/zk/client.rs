//! The client under faults that were seen in the `zookeeper` crate.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use crate::support::{CREATOR, HANG, PATIENCE, Verbs, builder, name, session, soon, wait_for};
use contend::zk::{Mode, Session, SessionState};
use contend::{ErrorKind, Moment};
use testbed::{Direction, Proxy, ZooKeeperServer, wait_until, within};

static SERVER: LazyLock<ZooKeeperServer> = LazyLock::new(ZooKeeperServer::start);

const SHORT: Duration = Duration::from_millis(1_500);
const T: Duration = Duration::from_secs(6);
const LONG: Duration = Duration::from_secs(30);

#[test]
fn late_reply_is_not_taken_for_the_next() {
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
fn dropped_session_keeps_nothing_alive_while_cut_off() {
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
fn dropped_session_deletes_its_nodes_at_once() {
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
fn absent_server_is_named() {
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
fn authentication_is_repeated_after_a_reconnect() {
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

/// Makes a node that ends with the session.
fn ephemeral(session: &Session, root: &str) -> String {
    let path = format!("{root}/n-");
    let made = session.create(&path, b"", Mode::EphemeralSequential, soon());
    made.unwrap().0
}

/// What a server answers to a handshake: version 0, T, the session, its password, not read-only.
fn welcome(id: i64, timeout: Duration) -> Vec<u8> {
    let fields: [&[u8]; 6] = [
        &0i32.to_be_bytes(),
        &(timeout.as_millis() as i32).to_be_bytes(),
        &id.to_be_bytes(),
        &16i32.to_be_bytes(),
        &[1; 16],
        &[0],
    ];
    let body = fields.concat();
    [&(body.len() as u32).to_be_bytes()[..], &body].concat()
}

/// Answers the first handshake with session 7 and what follows with nonsense, later handshakes with session 8.
fn impostor() -> std::net::SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let mut answers = vec![welcome(7, LONG), vec![0xff; 64]];
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut request = [0; 4096];
            for answer in &answers {
                if !matches!(stream.read(&mut request), Ok(1..))
                    || stream.write_all(answer).is_err()
                {
                    break;
                }
            }
            answers = vec![welcome(8, LONG)];
        }
    });
    address
}

#[test]
fn session_of_another_id_is_refused() {
    within(HANG, || {
        let session = builder(impostor(), LONG).session().unwrap();
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

/// A stand-in that lets a client in, acknowledges its heartbeats and does not answer its goodbye. It closes
/// nothing: the connection must be ended by the client, though nothing is due to wake its thread.
#[test]
fn closed_session_ends_its_connection_without_an_answer() {
    within(HANG, || {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let session = builder(listener.local_addr().unwrap(), T)
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
        client.write_all(&welcome(7, T)).unwrap();
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
