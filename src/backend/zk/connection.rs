//! The socket thread of a session: finds a server, moves bytes between its socket and the protocol, and does
//! what is due. What the bytes mean is in `protocol.rs`.

use std::io::{self, ErrorKind as IoErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream, ToSocketAddrs};
use std::time::Duration;

use rand::RngExt;
use rand::seq::SliceRandom;

use super::builder::Config;
use super::session::Shared;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};

/// How long a write may wait for room in the socket's buffer. What does not fit is kept and sent by the
/// session's thread.
const WRITE_TIMEOUT: Duration = Duration::from_millis(10);

/// How often the thread looks for room in the buffer then.
const WRITE_RETRY: Duration = Duration::from_millis(5);

/// How much is read at once.
const CHUNK: usize = 64 << 10;

/// The first pause after all servers failed.
const FIRST_PAUSE: Duration = Duration::from_millis(20);

/// Connections that last shorter than this count as failures: a server that takes us in and throws us
/// out must not be asked again at once.
const LASTING: Duration = Duration::from_secs(1);

/// The sending side of a connection. Callers send their requests themselves, so that none waits for the
/// thread to wake up.
pub(super) struct Writer {
    stream: TcpStream,
    cipher: Cipher,
    /// What the socket had no room for.
    unsent: Vec<u8>,
}

impl Writer {
    fn new(stream: TcpStream, cipher: Cipher) -> Writer {
        Writer {
            stream,
            cipher,
            unsent: Vec::new(),
        }
    }

    /// Sends, or keeps what there is no room for.
    pub(super) fn send(&mut self, bytes: Vec<u8>) -> io::Result<()> {
        let blocked = !self.unsent.is_empty();
        self.cipher.seal(bytes, &mut self.unsent)?;
        if blocked { Ok(()) } else { self.flush() }
    }

    /// Sends what was kept.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        let mut done = 0;
        let result = loop {
            let rest = self.unsent.get(done..).unwrap_or_default();
            if rest.is_empty() {
                break Ok(());
            }
            match self.stream.write(rest) {
                Ok(0) => break Err(IoErrorKind::WriteZero.into()),
                Ok(count) => done += count,
                Err(error) if error.kind() == IoErrorKind::Interrupted => {}
                Err(error) if is_timeout(&error) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        self.unsent.drain(..done);
        result
    }

    pub(super) fn is_blocked(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Takes what the socket brought and returns what the server said.
    pub(super) fn open(&mut self, bytes: Vec<u8>) -> io::Result<Vec<u8>> {
        let plain = self.cipher.open(bytes)?;
        // A cipher may have something to say of its own.
        self.send(Vec::new())?;
        Ok(plain)
    }

    /// Ends the connection: the thread, which reads from the same socket, notices.
    pub(super) fn close(&mut self) {
        let _ = self.flush();
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
        if let Some(tls) = config.tls() {
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

    /// Appends `plain`, sealed, to `wire`.
    fn seal(&mut self, plain: Vec<u8>, wire: &mut Vec<u8>) -> io::Result<()> {
        match self {
            Cipher::Plain if wire.is_empty() => *wire = plain,
            Cipher::Plain => wire.extend_from_slice(&plain),
            #[cfg(feature = "tls")]
            Cipher::Tls(connection) => {
                connection.writer().write_all(&plain)?;
                while connection.wants_write() {
                    connection.write_tls(wire)?;
                }
            }
        }
        Ok(())
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

/// The addresses of all hosts, in random order. Looked up anew after each has been tried; while that
/// fails, those found before are tried again: the servers may be well although nobody can tell their names.
struct Route {
    hosts: Vec<(String, u16)>,
    look_up: fn(&[(String, u16)]) -> Result<Vec<(String, SocketAddr)>>,
    addresses: Vec<(String, SocketAddr)>,
    next: usize,
}

impl Route {
    fn new(hosts: &[(String, u16)]) -> Route {
        Route {
            hosts: hosts.to_vec(),
            look_up,
            addresses: Vec::new(),
            next: 0,
        }
    }

    /// The address to be tried next: after a loss the one that failed comes last.
    fn next(&mut self) -> Result<(String, SocketAddr)> {
        if self.next >= self.addresses.len() {
            let last = self.addresses.last().cloned();
            match (self.look_up)(&self.hosts) {
                Ok(found) => self.addresses = found,
                Err(error) if self.addresses.is_empty() => return Err(error),
                Err(error) => log::debug!("{error}; trying the addresses found before"),
            }
            self.addresses.shuffle(&mut rand::rng());
            if self.addresses.first() == last.as_ref() {
                self.addresses.rotate_left(1);
            }
            self.next = 0;
        }
        let address = self.addresses.get(self.next).cloned();
        self.next += 1;
        address.ok_or_else(|| Error::new(ErrorKind::Unreachable, "no host has an address"))
    }
}

/// Every address of every host. Fails if there is none.
fn look_up(hosts: &[(String, u16)]) -> Result<Vec<(String, SocketAddr)>> {
    let mut found: Vec<(String, SocketAddr)> = Vec::new();
    let mut failure = None;
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
                failure = Some(
                    Error::new(
                        ErrorKind::Unreachable,
                        format!("{host}:{port}: cannot find its address: {error}"),
                    )
                    .with_source(error),
                );
            }
        }
    }
    match failure {
        Some(failure) if found.is_empty() => Err(failure),
        _ => Ok(found),
    }
}

pub(super) fn run(shared: &Shared) {
    let config = shared.config();
    let mut route = Route::new(&config.hosts);
    let longest_pause =
        (config.session_timeout / 6).clamp(Duration::from_millis(50), Duration::from_secs(1));
    let mut pause = FIRST_PAUSE;
    let mut failures = 0;
    while !shared.is_closing() {
        let began = Moment::now();
        let epoch = shared.epoch();
        let attempt = route
            .next()
            .and_then(|(host, address)| converse(shared, &host, address, route.addresses.len()));
        let Err(error) = attempt else {
            break;
        };
        shared.lost(&error);
        if shared.is_closing() {
            break;
        }
        let was_connected = shared.epoch() != epoch;
        if was_connected {
            log::warn!("{}: connection lost: {error}", config.realm);
            if Moment::now() - began >= LASTING {
                pause = FIRST_PAUSE;
                failures = 0;
                continue;
            }
        }
        failures += 1;
        if failures < route.addresses.len() {
            continue;
        }
        failures = 0;
        // A server that was there may be there again after the pause: callers wait for it, unless it
        // has said what a retry cannot fix.
        if !was_connected || !error.is_transient() {
            shared.in_trouble(error);
        }
        // Half of it by chance, so that the clients of a server that comes back do not come at once.
        shared.pause(pause.mul_f64(rand::rng().random_range(0.5..1.0)));
        pause = (pause * 2).min(longest_pause);
    }
    shared.thread_ends();
}

/// Connects to one server and stays with it. `Ok` when the session is over, an error when another
/// server must be found.
fn converse(shared: &Shared, host: &str, address: SocketAddr, addresses: usize) -> Result<()> {
    let place = if host.parse::<std::net::IpAddr>().is_ok() {
        address.to_string()
    } else {
        format!("{host} ({address})")
    };
    let failed = |what: &str, error: io::Error| {
        let kind = if is_timeout(&error) {
            ErrorKind::Timeout
        } else {
            ErrorKind::Unreachable
        };
        Error::new(kind, format!("{place}: {what}: {error}")).with_source(error)
    };
    let began = Moment::now();
    let patience = shared.patience(began);
    let cipher = Cipher::new(shared.config(), host)?;
    let limit = patience.min(shared.config().connect_timeout);
    let mut stream = TcpStream::connect_timeout(&address, limit)
        .map_err(|error| failed("cannot connect", error))?;
    let writer = stream
        .set_nodelay(true)
        .and_then(|()| stream.set_write_timeout(Some(WRITE_TIMEOUT)))
        .and_then(|()| stream.try_clone())
        .map_err(|error| failed("cannot set up the connection", error))?;
    // What connecting took is not given once more.
    let left = patience.saturating_sub(Moment::now() - began);
    shared
        .begin(Writer::new(writer, cipher), left, addresses)
        .map_err(|error| failed("cannot write", error))?;
    let mut chunk = vec![0; CHUNK];
    loop {
        let now = Moment::now();
        let wake = match shared.tick(now) {
            Ok(Some(wake)) => wake,
            Ok(None) => return Ok(()),
            Err(error) => return Err(error.context(&place)),
        };
        let wait = if wake.blocked {
            WRITE_RETRY.min(wake.at - now)
        } else {
            wake.at - now
        };
        let wait = wait.clamp(Duration::from_millis(1), Duration::from_secs(3600));
        stream
            .set_read_timeout(Some(wait))
            .map_err(|error| failed("cannot set up the connection", error))?;
        match stream.read(&mut chunk) {
            Ok(0) => {
                let entering = shared.is_entering();
                if shared.closed_by_server() {
                    return Ok(());
                }
                return Err(closed(&place, entering));
            }
            Ok(count) => {
                let bytes = chunk.get(..count).unwrap_or_default().to_vec();
                shared
                    .received(bytes)
                    .map_err(|error| error.context(&place))?;
            }
            // `Interrupted`: our process was paused and goes on.
            Err(error) if is_timeout(&error) || error.kind() == IoErrorKind::Interrupted => {}
            Err(error) => {
                let entering = shared.is_entering();
                if shared.closed_by_server() {
                    return Ok(());
                }
                if entering && error.kind() == IoErrorKind::ConnectionReset {
                    return Err(closed(&place, entering).with_source(error));
                }
                return Err(failed("connection lost", error));
            }
        }
    }
}

/// `entering`: before it let us in. As servers of other kinds do, and one of ours without a quorum: it may pass.
fn closed(place: &str, entering: bool) -> Error {
    let hint = if entering {
        " without an answer; it does not serve now, or is not a ZooKeeper server"
    } else {
        ""
    };
    Error::new(
        ErrorKind::Unreachable,
        format!("{place}: the server closed the connection{hint}"),
    )
}

/// When the thread has something to do besides reading.
pub(super) struct Wake {
    pub(super) at: Moment,
    /// The socket's buffer is full.
    pub(super) blocked: bool,
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        IoErrorKind::WouldBlock | IoErrorKind::TimedOut
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_address_of_every_host_is_tried_in_turn() {
        let hosts = [
            ("127.0.0.1".to_owned(), 1),
            ("127.0.0.2".to_owned(), 1),
            ("::1".to_owned(), 1),
        ];
        let mut route = Route::new(&hosts);
        for _ in 0..20 {
            let mut seen: Vec<String> = (0..3)
                .map(|_| route.next().unwrap().1.to_string())
                .collect();
            seen.sort();
            assert_eq!(seen, ["127.0.0.1:1", "127.0.0.2:1", "[::1]:1"]);
        }
        // One name with three addresses.
        let mut route = Route::new(&[("name".to_owned(), 1)]);
        route.look_up = |hosts| {
            let (host, port) = &hosts[0];
            let address = |last| SocketAddr::from(([10, 0, 0, last], *port));
            Ok((1..4).map(|last| (host.clone(), address(last))).collect())
        };
        for _ in 0..20 {
            let mut seen: Vec<String> = (0..3)
                .map(|_| route.next().unwrap().1.to_string())
                .collect();
            seen.sort();
            assert_eq!(seen, ["10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"]);
        }
        let mut nowhere = Route::new(&[("no such host".to_owned(), 1)]);
        let error = nowhere.next().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unreachable);
        assert!(error.to_string().contains("no such host:1"), "{error}");
    }

    /// A DNS outage says nothing about the servers, which may all be well.
    #[test]
    fn what_was_found_before_is_tried_again_while_names_cannot_be_looked_up() {
        let mut route = Route::new(&[("name".to_owned(), 1)]);
        route.look_up = |hosts| {
            let address = |last| SocketAddr::from(([10, 0, 0, last], 1));
            let found = (1..4).map(|last| (hosts[0].0.clone(), address(last)));
            Ok(found.collect())
        };
        let round = |route: &mut Route| {
            let mut seen: Vec<String> = (0..3)
                .map(|_| route.next().unwrap().1.to_string())
                .collect();
            let last = seen.last().cloned();
            seen.sort();
            (seen, last)
        };
        let (found, mut last) = round(&mut route);
        route.look_up = |_| Err(Error::new(ErrorKind::Unreachable, "no name server answers"));
        for _ in 0..20 {
            let first = route.next().unwrap().1.to_string();
            assert_ne!(Some(first), last, "the one that failed last comes last");
            route.next -= 1;
            let (seen, this) = round(&mut route);
            assert_eq!(seen, found);
            last = this;
        }
    }

    /// What rustls does not take after the end of its stream, it does not take in the next round either.
    #[cfg(feature = "tls")]
    #[test]
    fn bytes_after_the_end_of_a_tls_stream_are_a_lost_connection() {
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
                let mut wire = Vec::new();
                cipher.seal(Vec::new(), &mut wire).unwrap();
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
