//! The client under faults that were seen in the `zookeeper` crate.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use crate::support::{CREATOR, HANG, PATIENCE, Verbs, builder, name, session, soon, wait_for};
use contend::ErrorKind;
use contend::zk::{Mode, Session, SessionState};
use testbed::{Direction, Proxy, ZooKeeperServer, wait_until, within};

static SERVER: LazyLock<ZooKeeperServer> = LazyLock::new(ZooKeeperServer::start);

const SHORT: Duration = Duration::from_millis(1_500);
const T: Duration = Duration::from_secs(6);
const LONG: Duration = Duration::from_secs(30);

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
        // A version, T, the session, and its password.
        let mut welcome = vec![0, 0, 0, 36, 0, 0, 0, 0];
        welcome.extend_from_slice(&(T.as_millis() as u32).to_be_bytes());
        welcome.extend_from_slice(&[0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 16]);
        welcome.extend_from_slice(&[1; 16]);
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
        drop(session);
        wait_until(PATIENCE, "the connection is closed", || {
            server.is_finished()
        });
        server.join().unwrap();
    });
}
