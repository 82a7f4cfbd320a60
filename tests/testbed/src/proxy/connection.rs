//! One connection through a proxy.
//!
//! Each way has two threads: one reads and stamps what it read with the time when it is due, the
//! other waits for that time, and for the way to be open, and writes. With one thread a delay would
//! also slow the reading down, and late bytes would become later still.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::sockopt::set_socket_linger;

use super::weather::{Settings, Weather};

/// How much is read at once.
const CHUNK: usize = 16 * 1024;

/// How many chunks are held before the reader stops reading, so that the sender feels it.
const HELD: usize = 16;

/// How often a blocked writer looks whether its connection was closed.
const LOOK: Duration = Duration::from_millis(100);

/// How long the server may take to accept.
const CONNECT: Duration = Duration::from_secs(10);

/// Both sockets of a connection, to be closed from outside.
#[derive(Debug)]
pub(super) struct Ends {
    client: TcpStream,
    server: OnceLock<TcpStream>,
    closed: AtomicBool,
    /// The next bytes to the client are lost and the connection with them.
    lose_reply: AtomicBool,
}

impl Ends {
    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        for stream in self.streams() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Without lingering the last close sends a reset; to stop the reading wakes the readers and
    /// sends nothing.
    pub(super) fn reset(&self) {
        self.closed.store(true, Ordering::SeqCst);
        for stream in self.streams() {
            let _ = set_socket_linger(stream, Some(Duration::ZERO));
            let _ = stream.shutdown(Shutdown::Read);
        }
    }

    fn streams(&self) -> impl Iterator<Item = &TcpStream> {
        std::iter::once(&self.client).chain(self.server.get())
    }
}

/// One way through a connection.
struct Way<'a> {
    from: &'a TcpStream,
    to: &'a TcpStream,
    ends: &'a Ends,
    weather: &'a Weather,
    to_server: bool,
}

/// Bytes on their way, or the end of the stream if there are none.
struct Parcel {
    due: Instant,
    bytes: Vec<u8>,
}

/// Serves a client that was accepted, in a thread of its own.
pub(super) fn start(client: TcpStream, target: SocketAddr, weather: &Arc<Weather>) {
    let mut number = 0;
    weather.count(|counters| {
        counters.accepted += 1;
        number = counters.accepted;
    });
    let ends = Arc::new(Ends {
        client,
        server: OnceLock::new(),
        closed: AtomicBool::new(false),
        lose_reply: AtomicBool::new(false),
    });
    weather.enter(number, Arc::clone(&ends));
    let thread = {
        let weather = Arc::clone(weather);
        thread::Builder::new()
            .name("proxy".to_owned())
            .spawn(move || {
                // An error is the end of this connection, and both peers see just that.
                let _ = serve(&ends, target, &weather);
                if !ends.is_closed() {
                    ends.close();
                }
                // A reset goes out when the last handle is gone: `leave` first, then ours.
                weather.leave(number);
            })
    };
    weather.keep(thread.expect("a thread for a connection"));
}

fn serve(ends: &Ends, target: SocketAddr, weather: &Weather) -> io::Result<()> {
    // A black hole one way or the other would have swallowed half of the handshake.
    weather.wait(ends, Instant::now(), |settings| {
        settings.hold_to_server || settings.hold_to_client
    });
    if ends.is_closed() {
        return Ok(());
    }
    let server = TcpStream::connect_timeout(&target, CONNECT)?;
    for stream in [&ends.client, &server] {
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(LOOK))?;
    }
    let server = ends.server.get_or_init(|| server);
    // Who closed before the line above did not know of this socket.
    if ends.is_closed() {
        return Ok(());
    }
    let there = Way {
        from: &ends.client,
        to: server,
        ends,
        weather,
        to_server: true,
    };
    let back = Way {
        from: server,
        to: &ends.client,
        ends,
        weather,
        to_server: false,
    };
    thread::scope(|scope| {
        for way in [&there, &back] {
            let (parcels, received) = mpsc::sync_channel(HELD);
            scope.spawn(move || way.read(&parcels));
            scope.spawn(move || way.write(&received));
        }
    });
    Ok(())
}

impl Way<'_> {
    /// Reads until the end of the stream or of the connection.
    fn read(&self, parcels: &SyncSender<Parcel>) {
        let mut buffer = vec![0; CHUNK];
        loop {
            let mut from = self.from;
            let count = match from.read(&mut buffer) {
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => return self.weather.close(self.ends),
            };
            if self.ends.is_closed() {
                return;
            }
            let bytes = buffer[..count].to_vec();
            let delay = self.weather.settings(|settings| match self.to_server {
                true => settings.delay_to_server,
                false => settings.delay_to_client,
            });
            let due = Instant::now() + delay;
            if parcels.send(Parcel { due, bytes }).is_err() || count == 0 {
                return;
            }
        }
    }

    /// Delivers until the end of the stream or of the connection.
    fn write(&self, parcels: &Receiver<Parcel>) {
        while let Ok(Parcel { due, mut bytes }) = parcels.recv() {
            self.weather
                .wait(self.ends, due, |settings| self.is_held(settings));
            if self.ends.is_closed() {
                return;
            }
            if bytes.is_empty() {
                // The other way may still have something to say.
                let _ = self.to.shutdown(Shutdown::Write);
                return;
            }
            if !self.to_server {
                self.weather.settings(|settings| {
                    if let Some(garble) = &mut settings.garble {
                        garble.apply(&mut bytes);
                    }
                });
            }
            if self.is_lost(&bytes) || self.deliver(&bytes).is_err() {
                return self.weather.close(self.ends);
            }
        }
    }

    fn is_held(&self, settings: &Settings) -> bool {
        if self.to_server {
            settings.hold_to_server
        } else {
            settings.hold_to_client
        }
    }

    /// Notes whether the reply to these bytes is to be lost; tells whether they are such a reply.
    fn is_lost(&self, bytes: &[u8]) -> bool {
        if !self.to_server {
            let lost = self.ends.lose_reply.load(Ordering::SeqCst);
            if lost {
                self.weather.count(|counters| counters.lost_replies += 1);
            }
            return lost;
        }
        self.weather.settings(|settings| {
            let meant = |wanted: &Vec<u8>| wanted.is_empty() || contains(bytes, wanted);
            if settings.lose_reply_to.as_ref().is_some_and(meant) {
                settings.lose_reply_to = None;
                // Before the request goes on, so that the reply cannot overtake it.
                self.ends.lose_reply.store(true, Ordering::SeqCst);
            }
        });
        false
    }

    fn deliver(&self, bytes: &[u8]) -> io::Result<()> {
        // Counted first: who has seen a byte arrive finds it counted.
        let count = bytes.len() as u64;
        self.weather.count(|counters| {
            if self.to_server {
                counters.bytes_to_server += count;
            } else {
                counters.bytes_to_client += count;
            }
        });
        let mut left = bytes;
        while !left.is_empty() {
            let mut to = self.to;
            match to.write(left) {
                Ok(count) => left = &left[count..],
                Err(_) if self.ends.is_closed() => return Ok(()),
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                    ) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

fn contains(bytes: &[u8], wanted: &[u8]) -> bool {
    bytes.windows(wanted.len()).any(|window| window == wanted)
}
