//! Redis, one server.

use std::io::{BufRead, BufReader, Read, Write};
use std::ops::Deref;
use std::process::Command;
use std::time::Duration;

use crate::binary;
use crate::port::Port;
use crate::server::{Server, dial, on_free_ports};
use crate::temp_dir::TempDir;

const PACKAGE: &str = "redis-server";

/// How long a probe waits for an answer.
const PROBE: Duration = Duration::from_millis(200);

/// A throw-away Redis that keeps nothing on disk: a restarted one is empty.
#[derive(Debug)]
pub struct RedisServer {
    server: Server,
}

impl RedisServer {
    /// Starts one with nothing but defaults.
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// Starts one with further arguments, such as `["--requirepass", "secret"]`,
    /// `["--user", "app", "on", ">secret", "~*", "&*", "+@all", "-publish"]` or `["--appendonly", "yes"]`.
    pub fn start_with(args: &[&str]) -> Self {
        on_free_ports(|| {
            let server = server(args);
            server.try_start().map(|()| Self { server })
        })
    }

    /// `redis://127.0.0.1:PORT`.
    pub fn url(&self) -> String {
        format!("redis://{}", self.addr())
    }

    /// Runs `redis-cli` against it and returns what it printed.
    ///
    /// An error of the server is what it printed, too; only a failure to connect is a panic.
    pub fn cli(&self, args: &[&str]) -> String {
        let port = self.port().to_string();
        let own = ["--no-auth-warning", "-h", "127.0.0.1", "-p", &port];
        binary::run(
            &binary::find("redis-cli", "redis-tools"),
            own.iter().chain(args),
        )
    }

    /// What it calls itself, `master` or `slave`; `None` if it does not say so within `patience`, for each of
    /// connecting and answering. Unlike [`cli`](Self::cli) it starts no process, so it may be asked all the time.
    pub fn role(&self, patience: Duration) -> Option<String> {
        let mut stream = dial(self.port(), patience).ok()?;
        stream.write_all(b"ROLE\r\n").ok()?;
        // An array, whose first element is the role: `*3`, `$6`, `master`.
        let lines = BufReader::new(stream).lines().map_while(Result::ok);
        let head: Vec<String> = lines.take(3).collect();
        match head.as_slice() {
            [array, _, role] if array.starts_with('*') => Some(role.clone()),
            _ => None,
        }
    }

    pub(crate) fn of(server: Server) -> Self {
        Self { server }
    }
}

impl Deref for RedisServer {
    type Target = Server;

    fn deref(&self) -> &Server {
        &self.server
    }
}

/// A standalone server, not started.
pub(crate) fn server(args: &[&str]) -> Server {
    let port = Port::free();
    let folder = TempDir::new();
    let mut command = command(&port, &folder);
    command.args(args);
    Server::new("redis-server", folder, vec![port], command, answers)
}

/// What a standalone server and a cluster's node have in common.
pub(crate) fn command(port: &Port, folder: &TempDir) -> Command {
    let mut command = Command::new(binary::find("redis-server", PACKAGE));
    command.args(["--port", &port.number().to_string()]);
    command.args([
        "--bind",
        "127.0.0.1",
        "--save",
        "",
        "--appendonly",
        "no",
        "--dir",
    ]);
    command.arg(folder.path());
    command
}

/// Whether it answers a PING; to be asked for a password is an answer, to be loading is not.
pub(crate) fn answers(port: u16) -> bool {
    let ping = || {
        let mut stream = dial(port, PROBE)?;
        stream.write_all(b"PING\r\n")?;
        let mut reply = [0; 5];
        stream.read_exact(&mut reply)?;
        std::io::Result::Ok(reply)
    };
    ping().is_ok_and(|reply| &reply == b"+PONG" || &reply == b"-NOAU" || &reply == b"-NOPE")
}
