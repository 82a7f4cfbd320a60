//! ZooKeeper, one server.

use std::fs;
use std::io::{self, Read, Write};
use std::ops::Deref;
use std::process::Command;
use std::time::Duration;

use crate::binary;
use crate::port::Port;
use crate::server::{Server, dial, on_free_ports};
use crate::temp_dir::TempDir;

/// Where the server is. `CONTEND_ZOOKEEPER_JARS` puts another version before it in the class path.
const JAR: &str = "/usr/share/java/zookeeper.jar";
const LOG_JAR: &str = "/usr/share/java/slf4j-simple.jar";

/// How long a probe waits: a connection made while the server starts may never be answered.
const PROBE: Duration = Duration::from_millis(200);

/// How long any other question may take.
const PATIENT: Duration = Duration::from_secs(10);

/// A throw-away ZooKeeper with a tick of 200 ms: session timeouts from 400 ms to 60 s, container
/// nodes enabled. Its data outlives a restart.
#[derive(Debug)]
pub struct ZooKeeperServer {
    server: Server,
}

impl ZooKeeperServer {
    /// Starts a standalone server.
    pub fn start() -> Self {
        Self::start_with(&[], &[])
    }

    /// Starts a standalone server with further lines in its `zoo.cfg`, such as
    /// `["minSessionTimeout=100"]`, and further arguments to its Java machine, such as
    /// `["-Dznode.container.checkIntervalMs=500"]`, which reaps empty containers sooner.
    pub fn start_with(config: &[&str], jvm: &[&str]) -> Self {
        on_free_ports(|| {
            let port = Port::free();
            let folder = TempDir::new();
            let command = command(&folder, port.number(), config, jvm);
            let server = Server::new("zookeeper", folder, vec![port], command, serves);
            server.try_start().map(|()| Self { server })
        })
    }

    /// `zk://127.0.0.1:PORT`.
    pub fn url(&self) -> String {
        format!("zk://{}", self.addr())
    }

    /// The answer to a four-letter word: `ruok`, `srvr`, `mntr`, `cons`, `dump`, `wchp`...
    pub fn four_letter(&self, word: &str) -> io::Result<String> {
        four_letter(self.port(), word, PATIENT)
    }

    /// `standalone`, `leader` or `follower`, or `None` while it does not serve.
    pub fn mode(&self) -> Option<String> {
        mode(self.port())
    }

    pub(crate) fn of(server: Server) -> Self {
        Self { server }
    }
}

impl Deref for ZooKeeperServer {
    type Target = Server;

    fn deref(&self) -> &Server {
        &self.server
    }
}

/// Writes the configuration into `folder` and returns the command that starts a server on it.
pub(crate) fn command(folder: &TempDir, port: u16, config: &[&str], jvm: &[&str]) -> Command {
    let data = folder.path().join("data");
    fs::create_dir_all(&data).unwrap_or_else(|error| panic!("cannot make {data:?}: {error}"));
    let mut text = format!(
        "tickTime=200\n\
         dataDir={}\n\
         clientPort={port}\n\
         clientPortAddress=127.0.0.1\n\
         admin.enableServer=false\n\
         4lw.commands.whitelist=*\n\
         maxClientCnxns=0\n\
         maxSessionTimeout=60000\n",
        data.display()
    );
    for line in config {
        text.push_str(line);
        text.push('\n');
    }
    let file = folder.path().join("zoo.cfg");
    fs::write(&file, text).unwrap_or_else(|error| panic!("cannot write {file:?}: {error}"));
    let other_version = std::env::var("CONTEND_ZOOKEEPER_JARS").unwrap_or_default();
    let jars = [
        &other_version,
        binary::require(JAR, "libzookeeper-java"),
        binary::require(LOG_JAR, "libslf4j-java"),
    ];
    let mut command = Command::new(binary::find("java", "default-jre-headless"));
    command.args([
        "-Xmx64m",
        "-Xms16m",
        "-XX:+UseSerialGC",
        "-XX:TieredStopAtLevel=1",
    ]);
    // Listen on IPv4 sockets, which is where we look who listens; no statistics file in /tmp.
    command.args(["-Djava.net.preferIPv4Stack=true", "-XX:-UsePerfData"]);
    command.arg("-Dzookeeper.extendedTypesEnabled=true");
    command.args(jvm);
    command.args(["-cp", &jars.join(":")]);
    command.arg("org.apache.zookeeper.server.quorum.QuorumPeerMain");
    command.arg(file);
    command
}

/// Whether it serves clients. Not `ruok`, which is answered by a server without a quorum too.
pub(crate) fn serves(port: u16) -> bool {
    mode(port).is_some()
}

pub(crate) fn mode(port: u16) -> Option<String> {
    let answer = four_letter(port, "srvr", PROBE).ok()?;
    let mode = answer
        .lines()
        .find_map(|line| line.strip_prefix("Mode: "))?;
    Some(mode.to_owned())
}

fn four_letter(port: u16, word: &str, limit: Duration) -> io::Result<String> {
    let mut stream = dial(port, limit)?;
    stream.write_all(word.as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}
