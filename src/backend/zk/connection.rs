//! The socket thread of a session: finds a server, moves bytes between its socket and the protocol, and does
//! what is due. What the bytes mean is in `protocol.rs`.

use std::io::{self, ErrorKind as IoErrorKind, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream, ToSocketAddrs};
use std::time::Duration;

use parking_lot::MutexGuard;
use rand::RngExt;
use rand::seq::SliceRandom;

use super::builder::Config;
use super::protocol::SessionState;
use super::session::{Shared, State};
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::parker::SLICE;

/// How long a write may wait for room in the socket's buffer. The connection counts as broken then.
const WRITE_TIMEOUT: Duration = Duration::from_secs(1);

/// How much is read at once.
const CHUNK: usize = 64 << 10;

/// The first pause after all servers failed.
const FIRST_PAUSE: Duration = Duration::from_millis(20);

/// Connections that last shorter than this count as failures: a server that takes this client in and throws it
/// out must not be asked again at once.
const LASTING: Duration = Duration::from_secs(1);

/// The sending side of a connection. Callers send their requests themselves, so that none waits for the
/// thread to wake up.
pub(super) struct Writer {
    stream: TcpStream,
    cipher: Cipher,
}

impl Writer {
    pub(super) fn send(&mut self, bytes: Vec<u8>) -> io::Result<()> {
        let wire = self.cipher.seal(bytes)?;
        self.stream.write_all(&wire)
    }

    /// Takes what the socket brought and returns what the server said.
    fn open(&mut self, bytes: Vec<u8>) -> io::Result<Vec<u8>> {
        let plain = self.cipher.open(bytes)?;
        // A cipher may have something to say of its own.
        self.send(Vec::new())?;
        Ok(plain)
    }

    /// Ends the connection: the thread, which reads from the same socket, notices.
    pub(super) fn close(self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

/// What is done to the bytes on their way.
enum Cipher {
    Plain,
    #[cfg(feature = "tls")]
    Tls(Box<rustls::ClientConnection>),
}

impl Cipher {
    #[cfg_attr(
        not(feature = "tls"),
        allow(unused_variables, clippy::unnecessary_wraps)
    )]
    fn new(config: &Config, host: &str) -> Result<Cipher> {
        #[cfg(feature = "tls")]
        if let Some(tls) = config.tls.clone() {
            let invalid = |what: &dyn std::fmt::Display| {
                Error::new(ErrorKind::Misconfigured, format!("{host}: TLS: {what}"))
            };
            let name = rustls::pki_types::ServerName::try_from(host.to_owned())
                .map_err(|error| invalid(&error))?;
            let mut connection =
                rustls::ClientConnection::new(tls, name).map_err(|error| invalid(&error))?;
            connection.set_buffer_limit(None);
            return Ok(Cipher::Tls(Box::new(connection)));
        }
        Ok(Cipher::Plain)
    }

    fn seal(&mut self, plain: Vec<u8>) -> io::Result<Vec<u8>> {
        match self {
            Cipher::Plain => Ok(plain),
            #[cfg(feature = "tls")]
            Cipher::Tls(connection) => {
                let mut wire = Vec::new();
                connection.writer().write_all(&plain)?;
                while connection.wants_write() {
                    connection.write_tls(&mut wire)?;
                }
                Ok(wire)
            }
        }
    }

    fn open(&mut self, wire: Vec<u8>) -> io::Result<Vec<u8>> {
        match self {
            Cipher::Plain => Ok(wire),
            #[cfg(feature = "tls")]
            Cipher::Tls(connection) => {
                let mut plain = Vec::new();
                let mut rest = wire.as_slice();
                while !rest.is_empty() {
                    // After the server has ended its stream, nothing more is taken, and it would be offered
                    // for ever.
                    if connection.read_tls(&mut rest)? == 0 {
                        return Err(io::Error::new(
                            IoErrorKind::UnexpectedEof,
                            "the server ended the stream and sent more",
                        ));
                    }
                    let state = connection
                        .process_new_packets()
                        .map_err(|error| io::Error::new(IoErrorKind::InvalidData, error))?;
                    let begin = plain.len();
                    plain.resize(begin + state.plaintext_bytes_to_read(), 0);
                    if let Some(room) = plain.get_mut(begin..) {
                        connection.reader().read_exact(room)?;
                    }
                }
                Ok(plain)
            }
        }
    }
}

/// Serves the session until it is over.
pub(super) fn run(shared: &Shared) {
    let config = &shared.config;
    let longest_pause =
        (config.session_timeout / 6).clamp(Duration::from_millis(50), Duration::from_secs(1));
    let mut pause = FIRST_PAUSE;
    let mut addresses = Vec::new();
    loop {
        match look_up(&config.hosts) {
            Ok(found) => addresses = found,
            Err(error) if addresses.is_empty() => shared.in_trouble(error),
            // The servers may be well although their names cannot be looked up.
            Err(error) => log::debug!("{error}; trying the addresses found before"),
        }
        let attempt = |host: &str, address, is_last| converse(shared, host, address, is_last);
        while try_each(&mut addresses, attempt) {
            if shared.is_over() {
                return;
            }
            pause = FIRST_PAUSE;
        }
        // Half of it by chance, so that the clients of a server that comes back do not come at once.
        shared.pause(pause.mul_f64(rand::rng().random_range(0.5..1.0)));
        pause = (pause * 2).min(longest_pause);
    }
}

/// Every address of every host. Fails if there is none.
fn look_up(hosts: &[(String, u16)]) -> Result<Vec<(String, SocketAddr)>> {
    let mut found: Vec<(String, SocketAddr)> = Vec::new();
    let mut failure = Error::new(ErrorKind::Unreachable, "no host has an address");
    for (host, port) in hosts {
        match (host.as_str(), *port).to_socket_addrs() {
            Ok(addresses) => {
                for address in addresses {
                    if !found.iter().any(|(_, known)| *known == address) {
                        found.push((host.clone(), address));
                    }
                }
            }
            Err(error) => {
                let what = format!("{host}:{port}: cannot find its address: {error}");
                failure = Error::new(ErrorKind::Unreachable, what).with_source(error);
            }
        }
    }
    if found.is_empty() {
        return Err(failure);
    }
    Ok(found)
}

/// Tries the addresses in random order, the one tried last at the end, until an attempt returns `true`. `attempt` is
/// told whether the address is the last one. Returns `false` if no attempt returned `true`.
fn try_each(
    addresses: &mut [(String, SocketAddr)],
    mut attempt: impl FnMut(&str, SocketAddr, bool) -> bool,
) -> bool {
    let last = addresses.last().cloned();
    addresses.shuffle(&mut rand::rng());
    if addresses.first() == last.as_ref() && !addresses.is_empty() {
        addresses.rotate_left(1);
    }
    let mut left = addresses.len();
    let lasting = addresses.iter().position(|(host, address)| {
        left -= 1;
        attempt(host, *address, left == 0)
    });
    if let Some(index) = lasting {
        addresses.rotate_left(index + 1);
    }
    lasting.is_some()
}

/// Connects to one server and stays with it. Returns `true` if that lasted, or the session is over.
fn converse(shared: &Shared, host: &str, address: SocketAddr, is_last: bool) -> bool {
    let (began, epoch) = (Moment::now(), shared.epoch());
    let Err(error) = connect(shared, host, address) else {
        return true;
    };
    shared.lost(&error);
    if shared.is_over() {
        return true;
    }
    let served = shared.epoch() != epoch;
    if served {
        log::warn!("{}: connection lost: {error}", shared.config.realm);
        if Moment::now() - began >= LASTING {
            return true;
        }
    }
    // A server that was there may be there again after the pause: callers wait for it, unless it
    // has said what a retry cannot fix.
    if is_last && (!served || !error.is_transient()) {
        shared.in_trouble(error);
    }
    false
}

/// `Ok` when the session is over, an error when another server must be found.
fn connect(shared: &Shared, host: &str, address: SocketAddr) -> Result<()> {
    let place = if host.parse::<IpAddr>().is_ok() {
        address.to_string()
    } else {
        format!("{host} ({address})")
    };
    let failed = |what: &str, error: io::Error| {
        let what = format!("{place}: {what}: {error}");
        Error::new(ErrorKind::Unreachable, what).with_source(error)
    };
    let unusable = |error| failed("cannot set up the connection", error);
    let began = Moment::now();
    let patience = shared.state.lock().protocol.patience(began);
    let cipher = Cipher::new(&shared.config, host)?;
    let limit = patience.min(shared.config.connect_timeout);
    let mut stream = TcpStream::connect_timeout(&address, limit)
        .map_err(|error| failed("cannot connect", error))?;
    let writer = stream
        .set_nodelay(true)
        .and_then(|()| stream.set_write_timeout(Some(WRITE_TIMEOUT)))
        .and_then(|()| stream.try_clone())
        .map(|stream| Writer { stream, cipher })
        .map_err(unusable)?;
    if !shared.begin(writer, began + patience) {
        return Ok(());
    }
    let mut chunk = vec![0; CHUNK];
    loop {
        let now = Moment::now();
        let ticked = shared.tick(now).map_err(|error| error.context(&place))?;
        let Some(wake_at) = ticked else {
            return Ok(());
        };
        let wait = (wake_at - now).clamp(Duration::from_millis(1), SLICE);
        stream.set_read_timeout(Some(wait)).map_err(unusable)?;
        match stream.read(&mut chunk) {
            Ok(count @ 1..) => {
                let bytes = chunk.get(..count).unwrap_or_default().to_vec();
                let received = shared.received(bytes);
                received.map_err(|error| error.context(&place))?;
            }
            // `Interrupted`: the process was paused and goes on.
            Err(error) if is_timeout(&error) || error.kind() == IoErrorKind::Interrupted => {}
            Err(error) if error.kind() != IoErrorKind::ConnectionReset => {
                return Err(failed("connection lost", error));
            }
            // Servers of other kinds do that during the handshake, and a ZooKeeper server without a quorum: it may
            // pass.
            Ok(0) | Err(_) => {
                let hint = if shared.closed_by_server() {
                    " without an answer; it does not serve now, or is not a ZooKeeper server"
                } else {
                    ""
                };
                let what = format!("{place}: the server closed the connection{hint}");
                return Err(Error::new(ErrorKind::Unreachable, what));
            }
        }
    }
}

fn is_timeout(error: &io::Error) -> bool {
    let kind = error.kind();
    matches!(kind, IoErrorKind::WouldBlock | IoErrorKind::TimedOut)
}

/// What the thread does to the state.
impl Shared {
    fn is_over(&self) -> bool {
        let state = self.state.lock();
        state.closing || state.protocol.is_over()
    }

    fn epoch(&self) -> u64 {
        self.state.lock().protocol.epoch
    }

    /// A connection was opened, which has to serve by then. Returns `false` if the session is over.
    fn begin(&self, writer: Writer, by: Moment) -> bool {
        let mut state = self.state.lock();
        if state.closing {
            return false;
        }
        let now = Moment::now();
        state.protocol.begin(now, by - now);
        state.writer = Some(writer);
        state.settle();
        true
    }

    /// Does what is due. Returns when there is more to do; `None` if the session is over.
    fn tick(&self, now: Moment) -> Result<Option<Moment>> {
        let mut state = self.state.lock();
        if state.protocol.is_over() {
            return Ok(None);
        }
        state.protocol.tick(now)?;
        state.settle();
        if state.writer.is_none() {
            let what = "cannot write to the server";
            return Err(Error::new(ErrorKind::Unreachable, what));
        }
        Ok(Some(state.protocol.wake_at()))
    }

    fn received(&self, bytes: Vec<u8>) -> Result<()> {
        let mut state = self.state.lock();
        let Some(writer) = &mut state.writer else {
            return Ok(());
        };
        let plain = writer.open(bytes).map_err(|error| {
            Error::new(ErrorKind::Unreachable, format!("TLS: {error}")).with_source(error)
        })?;
        let before = state.protocol.state();
        let result = state.protocol.received(&plain, Moment::now());
        state.settle();
        if before != SessionState::Connected && state.protocol.is_serving() {
            self.connected(state, before);
        }
        result
    }

    fn connected(&self, mut state: MutexGuard<'_, State>, before: SessionState) {
        state.trouble = None;
        state.wake();
        drop(state);
        self.changed.notify_all();
        if before == SessionState::Suspended {
            log::info!("{}: connected", self.config.realm);
        }
        self.probe.tell(|probe| probe.connected());
    }

    /// Returns `true` if the server has not answered the handshake.
    fn closed_by_server(&self) -> bool {
        let mut state = self.state.lock();
        let entering = state.protocol.is_entering();
        state.protocol.closed_by_server(Moment::now());
        entering
    }

    /// The connection is lost, or could not be opened.
    fn lost(&self, error: &Error) {
        let mut state = self.state.lock();
        state.disconnect(error);
        let is_over = state.closing || state.protocol.is_over();
        drop(state);
        if !is_over {
            self.probe.tell(|probe| probe.disconnected(error));
        }
    }

    /// Every address was tried in vain.
    fn in_trouble(&self, error: Error) {
        let mut state = self.state.lock();
        if state.trouble.is_none() {
            log::warn!("{}: no server can be used: {error}", self.config.realm);
        }
        state.trouble = Some(error);
        self.changed.notify_all();
    }

    fn pause(&self, pause: Duration) {
        let until = Moment::now() + pause;
        let mut state = self.state.lock();
        while !state.closing && !until.remaining().is_zero() {
            self.changed
                .wait_for(&mut state, until.remaining().min(SLICE));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_address_is_tried_and_the_last_one_comes_last() {
        let address = |last| SocketAddr::from(([10, 0, 0, last], 1));
        let mut addresses: Vec<_> = (1..4)
            .map(|last| ("name".to_owned(), address(last)))
            .collect();
        let mut last = None;
        for _ in 0..20 {
            let mut seen = Vec::new();
            let lasted = try_each(&mut addresses, |_, address, is_last| {
                seen.push(address);
                assert_eq!(is_last, seen.len() == 3);
                false
            });
            assert!(!lasted);
            assert_ne!(seen.first(), last.as_ref());
            last = seen.last().copied();
            seen.sort();
            assert_eq!(seen, (1..4).map(address).collect::<Vec<_>>());
            // One lasts, is lost, and comes last.
            assert!(try_each(&mut addresses, |_, address, _| {
                last = Some(address);
                address.ip() == seen[1].ip()
            }));
        }
        assert!(!try_each(&mut [], |_, _, _| true));
    }

    #[test]
    fn host_without_an_address_is_named() {
        let hosts = [("127.0.0.1".to_owned(), 1), ("::1".to_owned(), 1)];
        assert_eq!(look_up(&hosts).unwrap().len(), 2);
        let error = look_up(&[("no such host".to_owned(), 1)]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreachable);
        assert!(error.to_string().contains("no such host:1"), "{error}");
    }

    /// What rustls does not take after the end of its stream, it does not take in the next round either.
    #[cfg(feature = "tls")]
    #[test]
    fn bytes_after_the_end_of_a_tls_stream_lose_the_connection() {
        use rustls::pki_types::pem::PemObject;
        use rustls::pki_types::{CertificateDer, PrivateKeyDer};

        testbed::within(Duration::from_secs(60), || {
            let files = testbed::Certificates::make();
            let builder = super::super::builder::Builder::new("localhost");
            let builder = builder.tls(true).tls_ca(files.file("ca.pem"));
            let mut cipher = Cipher::new(&builder.config().unwrap(), "localhost").unwrap();
            let certificate = CertificateDer::from_pem_file(files.file("server.pem")).unwrap();
            let key = PrivateKeyDer::from_pem_file(files.file("server.key")).unwrap();
            let config = rustls::ServerConfig::builder()
                .with_no_client_auth()
                .with_single_cert(vec![certificate], key)
                .unwrap();
            let mut server = rustls::ServerConnection::new(config.into()).unwrap();
            for _ in 0..4 {
                let wire = cipher.seal(Vec::new()).unwrap();
                let mut rest = wire.as_slice();
                while !rest.is_empty() {
                    server.read_tls(&mut rest).unwrap();
                    server.process_new_packets().unwrap();
                }
                let mut wire = Vec::new();
                while server.wants_write() {
                    server.write_tls(&mut wire).unwrap();
                }
                cipher.open(wire).unwrap();
            }
            assert!(!server.is_handshaking());

            server.writer().write_all(b"last words").unwrap();
            server.send_close_notify();
            let mut wire = Vec::new();
            while server.wants_write() {
                server.write_tls(&mut wire).unwrap();
            }
            assert_eq!(cipher.open(wire.clone()).unwrap(), b"last words");
            let error = cipher.open(wire).unwrap_err();
            assert_eq!(error.kind(), IoErrorKind::UnexpectedEof, "{error}");
        });
    }
}
