//! A loopback port that stays ours.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::fd::OwnedFd;

use rustix::net::{
    AddressFamily, SocketFlags, SocketType, bind, getsockname, socket_with, sockopt,
};

/// A free TCP port on 127.0.0.1, held until it is dropped.
///
/// To ask the kernel for a port and give it back before the server binds it leaves a gap in which
/// any process can take it, and so does a server that is down until its restart. Worse, a client that
/// keeps dialling a port in the kernel's own range can be given that very port as its source and
/// talk to itself. So a socket stays bound to the port, without listening: no process is given the port
/// and who dials it is refused. It allows the address to be reused, but only *after* it was bound:
/// so two of these never share a port, while a server (all of ours set `SO_REUSEADDR`) can listen.
#[derive(Debug)]
pub struct Port {
    number: u16,
    _held: OwnedFd,
}

impl Port {
    /// A port that is not in use.
    pub fn free() -> Self {
        let held = socket_with(
            AddressFamily::INET,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )
        .expect("a socket");
        bind(&held, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).expect("a free port on loopback");
        sockopt::set_socket_reuseaddr(&held, true).expect("SO_REUSEADDR");
        let number = getsockname(&held)
            .ok()
            .and_then(|addr| SocketAddr::try_from(addr).ok())
            .expect("the address of a bound socket")
            .port();
        Self {
            number,
            _held: held,
        }
    }

    /// Its number.
    pub fn number(&self) -> u16 {
        self.number
    }

    /// Its address on loopback.
    pub fn addr(&self) -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, self.number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::ErrorKind;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn held_port_is_kept_for_its_server() {
        let (port, other) = (Port::free(), Port::free());
        assert_ne!(port.number(), other.number());
        for _ in 0..3 {
            let refused = TcpStream::connect(port.addr()).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
            let listener = TcpListener::bind(port.addr()).unwrap();
            let _client = TcpStream::connect(port.addr()).unwrap();
            let _server = listener.accept().unwrap();
        }
    }
}
