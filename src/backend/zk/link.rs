//! The session's thread: finds a server, shakes hands, reads what it says, beats.

use std::io::{ErrorKind as IoErrorKind, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::Duration;

use rand::RngExt;
use rand::seq::SliceRandom;

use super::message::{Request, Welcome, encode_hello};
use super::session::Shared;
use super::session_state::SessionState;
use super::setback;
use super::wire::{Encoder, Frames};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};

/// How long a write may wait for room in the socket's buffer. Requests are small: where there is no
/// room for this long, nobody has read for much longer.
const WRITE_TIMEOUT: Duration = Duration::from_millis(200);

/// The first pause after all servers failed.
const FIRST_PAUSE: Duration = Duration::from_millis(20);

/// Connections that last shorter than this count as failures: a server that takes us in and throws us
/// out must not be asked again at once.
const LASTING: Duration = Duration::from_secs(1);

pub(super) fn run(shared: &Shared) {
    let mut hosts = shared.config.hosts.clone();
    hosts.shuffle(&mut rand::rng());
    let longest_pause = (shared.config.session_timeout / 6)
        .clamp(Duration::from_millis(50), Duration::from_secs(1));
    let mut pause = FIRST_PAUSE;
    let mut failures = 0;
    // After a loss it goes on with the next host: the one that failed us comes last.
    for (host, port) in hosts.iter().cycle() {
        let epoch = {
            let state = shared.state.lock();
            if state.closing {
                break;
            }
            state.epoch
        };
        let began = Moment::now();
        let Err(error) = converse(shared, host, *port) else {
            break;
        };
        let mut state = shared.state.lock();
        state.disconnect(&error);
        let was_connected = state.epoch != epoch;
        if was_connected {
            log::warn!("{}: connection lost: {error}", shared.config.realm);
            if Moment::now() - began >= LASTING {
                pause = FIRST_PAUSE;
                failures = 0;
                continue;
            }
        }
        failures += 1;
        if failures < hosts.len() {
            continue;
        }
        failures = 0;
        // A server that was there may be there again after the pause: callers wait for it, unless it
        // has said what waiting does not mend.
        if !was_connected || !error.is_transient() {
            if state.trouble.is_none() {
                log::warn!("{}: no server can be used: {error}", shared.config.realm);
            }
            state.trouble = Some(error);
            shared.changed.notify_all();
        }
        // Half of it by chance, so that the clients of a server that comes back do not come at once.
        let until = Moment::now() + pause.mul_f64(rand::rng().random_range(0.5..1.0));
        while !state.closing && !until.remaining().is_zero() {
            shared.changed.wait_for(&mut state, until.remaining());
        }
        pause = (pause * 2).min(longest_pause);
    }
    let mut state = shared.state.lock();
    if !state.phase.is_over() {
        state.end(SessionState::Closed);
    }
    state.thread_over = true;
    shared.changed.notify_all();
}

/// Connects to one server and stays with it. `Ok` when the session is over, an error when another
/// server must be found.
fn converse(shared: &Shared, host: &str, port: u16) -> Result<()> {
    let failed = |what: &str, error: std::io::Error| {
        Error::new(
            match error.kind() {
                IoErrorKind::TimedOut | IoErrorKind::WouldBlock => ErrorKind::Timeout,
                _ => ErrorKind::Unreachable,
            },
            format!("{host}:{port}: {what}: {error}"),
        )
        .with_source(error)
    };
    let mut stream = dial(shared, host, port).map_err(|error| failed("cannot connect", error))?;
    let writer = stream
        .set_nodelay(true)
        .and_then(|()| stream.set_write_timeout(Some(WRITE_TIMEOUT)))
        .and_then(|()| stream.try_clone())
        .map_err(|error| failed("cannot set up the connection", error))?;
    let mut frames = Frames::default();
    let Handshake {
        sent,
        welcome,
        forgetful,
    } = shake_hands(shared, &mut stream, &mut frames)
        .map_err(|error| error.context(format!("{host}:{port}")))?;
    {
        let mut state = shared.state.lock();
        state.refusals = 0;
        let timeout = u64::try_from(welcome.timeout_ms).unwrap_or(0);
        if state.id != 0 && (timeout == 0 || welcome.id == 0) {
            log::warn!("{}: the session has expired", shared.config.realm);
            if !state.phase.is_over() {
                state.end(SessionState::Expired);
            }
            shared.changed.notify_all();
            return Ok(());
        }
        // Another session than ours would come without our nodes, and look as if all were well.
        if timeout == 0 || welcome.id == 0 || (state.id != 0 && welcome.id != state.id) {
            return Err(Error::new(
                ErrorKind::Protocol,
                format!("{host}:{port}: the server did not give us the session we asked for"),
            ));
        }
        if welcome.read_only {
            return Err(Error::new(
                ErrorKind::Unavailable,
                format!("{host}:{port}: the server is read-only"),
            ));
        }
        if forgetful {
            drop(state);
            if setback::judge(shared, &mut stream, &mut frames)
                .map_err(|error| error.context(format!("{host}:{port}")))?
            {
                return Ok(());
            }
            state = shared.state.lock();
        }
        if state.phase.is_over() {
            // Closed while we were at it: without a goodbye the server would keep our nodes for T.
            let mut goodbye = Encoder::default();
            Request::Close.encode(1, &mut goodbye);
            let _ = stream.write_all(goodbye.as_bytes());
            return Ok(());
        }
        let timeout = Duration::from_millis(timeout);
        if state.id == 0 && timeout != shared.config.session_timeout {
            log::warn!(
                "{}: asked for a session timeout of {:?}, got {timeout:?}",
                shared.config.realm,
                shared.config.session_timeout,
            );
        }
        // Servers with different limits may grant different timeouts to one session, and a new leader
        // goes by the first: only the shortest is certain.
        let timeout = if state.id == 0 {
            timeout
        } else {
            timeout.min(state.pulse.timeout())
        };
        state.id = welcome.id;
        state.password = welcome.password;
        state.pulse.connected(sent, timeout, Moment::now());
        log::debug!("{}: connected to {host}:{port}", shared.config.realm);
        state.connected(writer)?;
        shared.changed.notify_all();
    }
    loop {
        // Frames may be left from the handshake's read.
        while let Some(frame) = frames.next().map_err(|what| {
            Error::new(ErrorKind::Protocol, "the server sent no ZooKeeper frame").with_source(what)
        })? {
            shared.state.lock().receive(&frame)?;
        }
        let wait = {
            let mut state = shared.state.lock();
            if state.phase.is_over() {
                return Ok(());
            }
            let now = Moment::now();
            if state.pulse.next_beat() <= now && !state.closing {
                state.beat()?;
            }
            state.end_leases(now);
            let give_up = state.pulse.give_up_at();
            if give_up <= now {
                return Err(Error::new(
                    ErrorKind::Timeout,
                    format!("{host}:{port}: the server does not answer"),
                ));
            }
            let next = if state.closing {
                now + WRITE_TIMEOUT
            } else {
                state.pulse.next_beat()
            };
            (give_up.min(next) - now).max(Duration::from_millis(1))
        };
        stream
            .set_read_timeout(Some(wait))
            .map_err(|error| failed("cannot set up the connection", error))?;
        match frames.fill(&mut stream) {
            Ok(0) => {
                return Err(Error::new(
                    ErrorKind::Unreachable,
                    format!("{host}:{port}: the server closed the connection"),
                ));
            }
            Ok(_) => {}
            // `Interrupted`: our process was paused and goes on.
            Err(error)
                if matches!(
                    error.kind(),
                    IoErrorKind::WouldBlock | IoErrorKind::TimedOut | IoErrorKind::Interrupted
                ) => {}
            Err(error) => return Err(failed("connection lost", error)),
        }
    }
}

/// The first address of the host that accepts.
fn dial(shared: &Shared, host: &str, port: u16) -> std::io::Result<TcpStream> {
    let addresses: Vec<SocketAddr> = (host, port).to_socket_addrs()?.collect();
    let mut failure = std::io::Error::from(IoErrorKind::AddrNotAvailable);
    for address in addresses {
        match TcpStream::connect_timeout(&address, shared.config.connect_timeout) {
            Ok(stream) => return Ok(stream),
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

/// How a connection began.
struct Handshake {
    /// When it was asked for.
    sent: Moment,
    welcome: Welcome,
    /// We kept to ourselves what we have seen.
    forgetful: bool,
}

/// Says who we are and hears who we are to the server.
fn shake_hands(shared: &Shared, stream: &mut TcpStream, frames: &mut Frames) -> Result<Handshake> {
    let sent = Moment::now();
    let mut hello = Encoder::default();
    let forgetful = {
        let state = shared.state.lock();
        let forgetful = setback::is_likely(&state, sent);
        encode_hello(
            &mut hello,
            if forgetful { 0 } else { state.last_zxid },
            shared.config.timeout_ms(),
            state.id,
            &state.password,
        );
        forgetful
    };
    let frame = stream
        .write_all(hello.as_bytes())
        .map_err(unanswered)
        .and_then(|()| next_frame(stream, frames, sent + shared.config.connect_timeout))
        .inspect_err(|error| {
            // Also how a server refuses that is behind what we have seen.
            if error.kind() == ErrorKind::Unreachable {
                shared.state.lock().refusals += 1;
            }
        })?;
    let welcome = Welcome::decode(&frame).map_err(|what| {
        Error::new(ErrorKind::Protocol, "not a ZooKeeper server's handshake").with_source(what)
    })?;
    Ok(Handshake {
        sent,
        welcome,
        forgetful,
    })
}

/// What the server says next, for who has asked something and waits for nothing else.
pub(super) fn next_frame(
    stream: &mut TcpStream,
    frames: &mut Frames,
    by: Moment,
) -> Result<Vec<u8>> {
    loop {
        let frame = frames.next().map_err(|what| {
            Error::new(ErrorKind::Protocol, "the server sent no ZooKeeper frame").with_source(what)
        })?;
        if let Some(frame) = frame {
            return Ok(frame);
        }
        let left = by.remaining();
        if left.is_zero() {
            return Err(Error::new(
                ErrorKind::Timeout,
                "the server did not answer the handshake in time",
            ));
        }
        stream.set_read_timeout(Some(left)).map_err(unanswered)?;
        match frames.fill(stream) {
            Ok(0) => {
                return Err(Error::new(
                    ErrorKind::Unreachable,
                    "the server closed the connection instead of answering the handshake",
                ));
            }
            Ok(_) => {}
            Err(error)
                if matches!(
                    error.kind(),
                    IoErrorKind::WouldBlock | IoErrorKind::TimedOut | IoErrorKind::Interrupted
                ) => {}
            Err(error) => return Err(unanswered(error)),
        }
    }
}

pub(super) fn unanswered(error: std::io::Error) -> Error {
    Error::new(ErrorKind::Unreachable, format!("no handshake: {error}")).with_source(error)
}
