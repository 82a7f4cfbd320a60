//! A TCP proxy that misbehaves on request.
//!
//! [`Proxy`] is what a test holds: it listens and owns the threads. `connection` moves the bytes of
//! one connection, `weather` is what both obey.

mod connection;
mod weather;

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::net::{Shutdown, shutdown};

use crate::port::Port;
use crate::sync::lock;
use weather::Weather;

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the client to the server.
    ToServer,
    /// From the server to the client.
    ToClient,
    /// Both ways.
    Both,
}

/// A TCP proxy on loopback in front of a server, whose behaviour is changed while connections live.
///
/// The settings add up: a proxy may delay and refuse at once. [`pass`](Self::pass) clears all of
/// them. Every connection takes four threads, which matters to tests that count them. Dropping the
/// proxy closes all connections and joins its threads.
pub struct Proxy {
    /// Held, so that to refuse means to be refused by the kernel, and to return is always possible.
    port: Port,
    target: SocketAddr,
    weather: Arc<Weather>,
    listening: Mutex<Option<Listening>>,
}

/// A socket that accepts, and the thread that does it.
struct Listening {
    listener: Arc<TcpListener>,
    acceptor: JoinHandle<()>,
}

impl Proxy {
    /// Starts a proxy on a free port in front of `target`, which need not be up.
    ///
    /// To a client a server that is down looks like one that closes at once: the proxy has accepted
    /// by then. [`refuse`](Self::refuse) is a true refusal.
    pub fn to(target: SocketAddr) -> Self {
        let proxy = Self {
            port: Port::free(),
            target,
            weather: Arc::default(),
            listening: Mutex::new(None),
        };
        proxy.listen();
        proxy
    }

    /// Starts a proxy in front of the server of a URL.
    pub fn before(url: &str) -> Self {
        let (_, authority, _) = parts(url);
        let addr = authority.rsplit('@').next().unwrap_or(authority);
        Self::to(addr.parse().expect("the URL of one server by its address"))
    }

    /// The same URL through this proxy.
    pub fn url(&self, url: &str) -> String {
        let (scheme, authority, rest) = parts(url);
        let user = authority
            .rsplit_once('@')
            .map(|(user, _)| format!("{user}@"));
        let user = user.unwrap_or_default();
        format!("{scheme}://{user}{}{rest}", self.addr())
    }

    /// The port that clients connect to.
    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// The address that clients connect to.
    pub fn addr(&self) -> SocketAddr {
        self.port.addr()
    }

    /// Behaves from now on: accepts, holds nothing back, delays nothing, loses nothing. What a black
    /// hole held arrives now, as after a network that is mended.
    pub fn pass(&self) {
        self.weather.change(weather::Settings::reset);
        self.listen();
    }

    /// Closes all connections now, both ends; what was held or delayed is lost. New ones are
    /// welcome.
    pub fn cut(&self) {
        self.weather.close_all();
    }

    /// As [`cut`](Self::cut), but both ends see a reset (`ECONNRESET`), not an end of file.
    pub fn reset(&self) {
        self.weather.reset_all();
    }

    /// Stops listening: new connections are refused by the kernel, live ones go on.
    pub fn refuse(&self) {
        let Some(listening) = lock(&self.listening).take() else {
            return;
        };
        // On Linux this ends a blocked `accept`, and the socket listens no more.
        let _ = shutdown(&listening.listener, Shutdown::Both);
        let _ = listening.acceptor.join();
    }

    /// Lets nothing through that way. Connections stay open: nothing arrives, not even an end of
    /// file, and when the buffers are full, writers block. New connections are accepted (the kernel
    /// does that) and get no further. Replaces a black hole set before.
    pub fn black_hole(&self, direction: Direction) {
        self.weather.change(|settings| {
            settings.hold_to_server = direction != Direction::ToClient;
            settings.hold_to_client = direction != Direction::ToServer;
        });
    }

    /// Delivers every byte this much later, each way; order is kept. A round trip takes twice that.
    pub fn delay(&self, each_way: Duration) {
        self.weather.change(|settings| {
            settings.delay_to_server = each_way;
            settings.delay_to_client = each_way;
        });
    }

    /// Delivers every byte that the server sends this much later; what clients send is not delayed.
    pub fn delay_replies(&self, delay: Duration) {
        self.weather.change(|settings| {
            settings.delay_to_server = Duration::ZERO;
            settings.delay_to_client = delay;
        });
    }

    /// The reply to the next request, on any connection, is lost: the server gets the request, the
    /// client never hears of it, and that connection is closed.
    pub fn lose_next_reply(&self) {
        self.lose_reply_to(b"");
    }

    /// As [`lose_next_reply`](Self::lose_next_reply), for the next request that contains these bytes,
    /// such as `COMMIT`. Once only; [`lost_replies`](Self::lost_replies) tells when it has happened.
    ///
    /// It looks at what arrives in one piece, which a small request on loopback does.
    pub fn lose_reply_to(&self, bytes: &[u8]) {
        self.weather
            .change(|settings| settings.lose_reply_to = Some(bytes.to_vec()));
    }

    /// Changes, inserts, repeats and drops bytes in so many of a thousand pieces that the server sends, the
    /// same ones for the same seed and traffic: what an attacker or a broken middle box might send.
    pub fn garble(&self, per_mille: u64, seed: u64) {
        self.weather.change(|settings| {
            settings.garble = Some(weather::Garble {
                per_mille,
                state: seed | 1,
            });
        });
    }

    /// How many replies were lost on request so far.
    pub fn lost_replies(&self) -> usize {
        self.weather.counters().lost_replies
    }

    /// How many connections were accepted so far.
    pub fn accepted(&self) -> usize {
        self.weather.counters().accepted
    }

    /// How many connections are open at this moment.
    pub fn live(&self) -> usize {
        self.weather.live()
    }

    /// How many bytes were passed on to the server so far; one that has arrived is counted.
    pub fn bytes_to_server(&self) -> u64 {
        self.weather.counters().bytes_to_server
    }

    /// How many bytes were passed on to clients so far; one that has arrived is counted.
    pub fn bytes_to_client(&self) -> u64 {
        self.weather.counters().bytes_to_client
    }

    fn listen(&self) {
        let mut listening = lock(&self.listening);
        if listening.is_some() {
            return;
        }
        let listener = TcpListener::bind(self.addr())
            .unwrap_or_else(|error| panic!("cannot listen on {}: {error}", self.addr()));
        let listener = Arc::new(listener);
        let acceptor = {
            let (listener, weather, target) = (
                Arc::clone(&listener),
                Arc::clone(&self.weather),
                self.target,
            );
            thread::Builder::new()
                .name("proxy-accept".to_owned())
                .spawn(move || accept(&listener, &weather, target))
                .expect("a thread for the proxy")
        };
        *listening = Some(Listening { listener, acceptor });
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.refuse();
        self.weather.close_all();
        self.weather.join_all();
    }
}

impl fmt::Debug for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "proxy {} -> {}, {} live",
            self.addr(),
            self.target,
            self.live()
        )
    }
}

/// The scheme of a URL, its authority, and what follows.
fn parts(url: &str) -> (&str, &str, &str) {
    let (scheme, rest) = url.split_once("://").expect("a URL has a scheme");
    let end = rest.find(['/', '?']).unwrap_or(rest.len());
    let (authority, rest) = rest.split_at(end);
    (scheme, authority, rest)
}

/// Accepts until the socket is shut down.
fn accept(listener: &TcpListener, weather: &Arc<Weather>, target: SocketAddr) {
    loop {
        match listener.accept() {
            Ok((client, _)) => connection::start(client, target, weather),
            // `EINVAL`: it was shut down.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => return,
            // A client that gave up while it waited, or no files left: neither lasts.
            Err(_) => thread::sleep(Duration::from_millis(5)),
        }
    }
}
