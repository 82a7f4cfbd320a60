//! The socket thread of a session: finds a server, moves bytes between its socket and the protocol, and does
//! what is due. What the bytes mean is in `protocol.rs`.

use std::io::{self, ErrorKind as IoErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream, ToSocketAddrs};
use std::time::Duration;

use rand::RngExt;
use rand::seq::SliceRandom;

use super::protocol::SessionState;
use super::session::Shared;
use crate::clock::Moment;
use crate::error::{Error, ErrorKind, Result};
use crate::parker::SLICE;

/// How long a write may wait for room in the socket's buffer. The connection counts as broken then.
const WRITE_TIMEOUT: Duration = Duration::from_secs(1);

/// How much is read at once.
const CHUNK: usize = 64 << 10;

/// The first pause after all servers failed, and the pause after a connection was lost.
const FIRST_PAUSE: Duration = Duration::from_millis(20);

/// The sending side of a connection. Callers send their requests themselves, so that none waits for the
/// thread to wake up.
pub(super) struct Writer {
    stream: TcpStream,
    #[cfg(feature = "tls")]
    tls: Option<rustls::ClientConnection>,
}

impl Writer {
    pub(super) fn send(&mut self, plain: &[u8]) -> io::Result<()> {
        #[cfg(feature = "tls")]
        if let Some(tls) = &mut self.tls {
            tls.writer().write_all(plain)?;
            while tls.wants_write() {
                tls.write_tls(&mut self.stream)?;
            }
            return Ok(());
        }
        self.stream.write_all(plain)
    }

    /// Takes what the socket brought and returns what the server said.
    fn open(&mut self, wire: Vec<u8>) -> io::Result<Vec<u8>> {
        #[cfg(feature = "tls")]
        if let Some(tls) = &mut self.tls {
            let plain = decrypt(tls, &wire)?;
            // The cipher may have something to say of its own.
            self.send(&[])?;
            return Ok(plain);
        }
        Ok(wire)
    }

    /// Ends the connection: the thread, which reads from the same socket, notices.
    pub(super) fn close(self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

#[cfg(feature = "tls")]
fn encrypted(
    config: &super::builder::Config,
    host: &str,
) -> Result<Option<rustls::ClientConnection>> {
    let Some(tls) = config.tls.clone() else {
        return Ok(None);
    };
    let invalid =
        |what: &dyn std::fmt::Display| Error::new(ErrorKind::Misconfigured, format!("TLS: {what}"));
    let name = rustls::pki_types::ServerName::try_from(host.to_owned());
    let name = name.map_err(|error| invalid(&error))?;
    let client = rustls::ClientConnection::new(tls, name);
    let mut client = client.map_err(|error| invalid(&error))?;
    client.set_buffer_limit(None);
    Ok(Some(client))
}

#[cfg(feature = "tls")]
fn decrypt(tls: &mut rustls::ClientConnection, mut wire: &[u8]) -> io::Result<Vec<u8>> {
    let mut plain = Vec::new();
    while !wire.is_empty() {
        // After the server has ended its stream, nothing more is taken, and it would be offered for ever.
        if tls.read_tls(&mut wire)? == 0 {
            return Err(IoErrorKind::UnexpectedEof.into());
        }
        let state = tls.process_new_packets().map_err(io::Error::other)?;
        let mut chunk = vec![0; state.plaintext_bytes_to_read()];
        tls.reader().read_exact(&mut chunk)?;
        plain.append(&mut chunk);
    }
    Ok(plain)
}

/// Serves the session until it is over.
pub(super) fn run(shared: &Shared) {
    let config = &shared.config;
    let longest_pause =
        (config.session_timeout / 6).clamp(Duration::from_millis(50), Duration::from_secs(1));
    let mut pause = FIRST_PAUSE;
    let mut addresses = Vec::new();
    let mut last = None;
    let mut served = false;
    loop {
        // Not after a connection that served: that may take long.
        if !served {
            match look_up(&config.hosts) {
                Ok(found) => addresses = found,
                Err(error) if addresses.is_empty() => shared.in_trouble(error),
                // The servers may be well although their names cannot be looked up.
                Err(error) => log::debug!("{error}; trying the addresses found before"),
            }
        }
        arrange(&mut addresses, last);
        let (mut left, began) = (addresses.len(), Moment::now());
        served = addresses.iter().any(|(host, address)| {
            left -= 1;
            last = Some(*address);
            converse(shared, host, *address, left == 0)
        });
        if shared.is_over() {
            return;
        }
        // Not for a server that serves and then closes the connection, again and again.
        if served && Moment::now() - began >= longest_pause {
            pause = FIRST_PAUSE;
        }
        // Half of it by chance, so that the clients of a server that comes back do not come at once.
        shared.pause(pause.mul_f64(rand::rng().random_range(0.5..1.0)));
        pause = (pause * 2).min(longest_pause);
    }
}

/// Every address of every host, once. Fails if there is none.
fn look_up(hosts: &[(String, u16)]) -> Result<Vec<(String, SocketAddr)>> {
    let mut found = Vec::new();
    let mut failure = Error::new(ErrorKind::Unreachable, "no host has an address");
    for (host, port) in hosts {
        match (host.as_str(), *port).to_socket_addrs() {
            Ok(addresses) => found.extend(addresses.map(|address| (host.clone(), address))),
            Err(error) => {
                failure = failed(&format!("{host}:{port}: cannot find its address"), error)
            }
        }
    }
    found.sort_by_key(|(_, address)| *address);
    found.dedup_by_key(|(_, address)| *address);
    if found.is_empty() {
        return Err(failure);
    }
    Ok(found)
}

/// Puts the addresses into random order, and the one that was tried last at the end.
fn arrange(addresses: &mut [(String, SocketAddr)], last: Option<SocketAddr>) {
    addresses.shuffle(&mut rand::rng());
    addresses.sort_by_key(|(_, address)| Some(*address) == last);
}

fn failed(what: &str, error: io::Error) -> Error {
    Error::new(ErrorKind::Unreachable, format!("{what}: {error}")).with_source(error)
}

/// Connects to one server and stays with it. Returns `true` if it served, or the session is over.
fn converse(shared: &Shared, host: &str, address: SocketAddr, is_last: bool) -> bool {
    let before = shared.state.lock().protocol.connections_served;
    let Err(error) = connect(shared, host, address) else {
        return true;
    };
    let error = error.context(format!("{host} ({address})"));
    let mut state = shared.state.lock();
    state.disconnect(&error);
    let served = state.protocol.connections_served != before;
    drop(state);
    if shared.is_over() {
        return true;
    }
    shared.config.probe.tell(|probe| probe.disconnected(&error));
    if served {
        log::warn!("{}: connection lost: {error}", shared.config.realm);
    }
    // A server that was there may be there again after the pause: callers wait for it, unless it
    // has said what a retry cannot fix.
    if is_last && (!served || !error.is_transient()) {
        shared.in_trouble(error);
    }
    served
}

/// `Ok` when the session is over, an error when another server must be found.
#[cfg_attr(not(feature = "tls"), allow(unused_variables))]
fn connect(shared: &Shared, host: &str, address: SocketAddr) -> Result<()> {
    use IoErrorKind::{ConnectionReset, Interrupted, TimedOut, WouldBlock};
    let unusable = |error| failed("cannot set up the connection", error);
    let began = Moment::now();
    let patience = shared.state.lock().protocol.patience(began);
    let limit = patience.min(shared.config.connect_timeout);
    let mut stream = TcpStream::connect_timeout(&address, limit)
        .map_err(|error| failed("cannot connect", error))?;
    let set_up = stream.set_nodelay(true);
    let set_up = set_up.and_then(|()| stream.set_write_timeout(Some(WRITE_TIMEOUT)));
    let writer = Writer {
        stream: set_up.and_then(|()| stream.try_clone()).map_err(unusable)?,
        #[cfg(feature = "tls")]
        tls: encrypted(&shared.config, host)?,
    };
    let mut state = shared.state.lock();
    if state.protocol.is_over() {
        return Ok(());
    }
    state.protocol.begin(Moment::now(), began + patience);
    state.writer = Some(writer);
    state.send();
    drop(state);
    let mut chunk = vec![0; CHUNK];
    let mut bytes = Vec::new();
    while let Some(wake_at) = shared.advance(bytes)? {
        let wait = wake_at.remaining().clamp(Duration::from_millis(1), SLICE);
        stream.set_read_timeout(Some(wait)).map_err(unusable)?;
        let read = stream.read(&mut chunk);
        bytes = match read.map_err(|error| (error.kind(), error)) {
            Ok(count @ 1..) => chunk.get(..count).unwrap_or_default().to_vec(),
            // `Interrupted`: the process was paused and goes on.
            Err((WouldBlock | TimedOut | Interrupted, _)) => Vec::new(),
            Ok(0) | Err((ConnectionReset, _)) => {
                let mut state = shared.state.lock();
                return Err(state.protocol.closed_by_server(Moment::now()));
            }
            Err((_, error)) => return Err(failed("connection lost", error)),
        };
    }
    Ok(())
}

/// What the thread does to the state.
impl Shared {
    fn is_over(&self) -> bool {
        self.state.lock().protocol.is_over()
    }

    /// Takes what the socket brought, and does what is due. Returns when there is more to do; `None` if the session has
    /// expired. One that was closed waits for the server's answer, which is the end of the connection.
    fn advance(&self, bytes: Vec<u8>) -> Result<Option<Moment>> {
        let mut state = self.state.lock();
        let Some(writer) = &mut state.writer else {
            let what = "cannot write to the server";
            return Err(Error::new(ErrorKind::Unreachable, what));
        };
        let plain = writer.open(bytes).map_err(|error| failed("TLS", error))?;
        let (now, served) = (Moment::now(), state.protocol.is_serving());
        let received = state.protocol.received(&plain, now);
        let ticked = received.and_then(|()| state.protocol.tick(now));
        state.send();
        let expired = state.protocol.state() == SessionState::Expired;
        let wake_at = (!expired).then_some(state.protocol.wake_at());
        if !served && state.protocol.is_serving() {
            state.trouble = None;
            state.wake();
            self.changed.notify_all();
            if state.protocol.connections_served > 1 {
                log::info!("{}: connected", self.config.realm);
            }
            drop(state);
            self.config.probe.tell(|probe| probe.connected());
        }
        ticked.map(|()| wake_at)
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
        while !state.protocol.is_over() && !until.remaining().is_zero() {
            self.changed
                .wait_for(&mut state, until.remaining().min(SLICE));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_tried_last_comes_last() {
        let address = |last| SocketAddr::from(([10, 0, 0, last], 1));
        let mut addresses: Vec<_> = (1..4)
            .map(|last| ("name".to_owned(), address(last)))
            .collect();
        let mut firsts = Vec::new();
        for _ in 0..60 {
            arrange(&mut addresses, Some(address(2)));
            assert_eq!(addresses[2].1, address(2));
            firsts.push(addresses[0].1);
        }
        for other in [1, 3] {
            assert!(firsts.contains(&address(other)), "{firsts:?}");
        }
    }

    #[test]
    fn host_without_an_address_is_named() {
        let hosts = [
            ("127.0.0.1".to_owned(), 1),
            ("::1".to_owned(), 1),
            ("127.0.0.1".to_owned(), 1),
        ];
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
            let config = builder.config().unwrap();
            let mut client = encrypted(&config, "localhost").unwrap().unwrap();
            let certificate = CertificateDer::from_pem_file(files.file("server.pem")).unwrap();
            let key = PrivateKeyDer::from_pem_file(files.file("server.key")).unwrap();
            let config = rustls::ServerConfig::builder()
                .with_no_client_auth()
                .with_single_cert(vec![certificate], key)
                .unwrap();
            let mut server = rustls::ServerConnection::new(config.into()).unwrap();
            for _ in 0..4 {
                let mut wire = Vec::new();
                while client.wants_write() {
                    client.write_tls(&mut wire).unwrap();
                }
                let mut rest = wire.as_slice();
                while !rest.is_empty() {
                    server.read_tls(&mut rest).unwrap();
                    server.process_new_packets().unwrap();
                }
                let mut wire = Vec::new();
                while server.wants_write() {
                    server.write_tls(&mut wire).unwrap();
                }
                decrypt(&mut client, &wire).unwrap();
            }
            assert!(!server.is_handshaking());

            server.writer().write_all(b"last words").unwrap();
            server.send_close_notify();
            let mut wire = Vec::new();
            while server.wants_write() {
                server.write_tls(&mut wire).unwrap();
            }
            assert_eq!(decrypt(&mut client, &wire).unwrap(), b"last words");
            let error = decrypt(&mut client, &wire).unwrap_err();
            assert_eq!(error.kind(), IoErrorKind::UnexpectedEof, "{error}");
        });
    }
}
