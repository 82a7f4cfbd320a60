//! A true Curator LeaderLatch beside ours, on a nested name, with kills on both sides.
//!
//! Runs where a JDK and Curator's jars are (Debian: `default-jdk-headless`, `libcurator-recipes-java`), and
//! says so where they are not. Turns are counted once every peer has had one. After every tenth a peer is killed, if it has had a turn: killed faster than a
//! Java machine starts on a busy machine, Curator would never have one.
//!
//! The owner makes a symbolic link whose target is its id, which takes one step: a peer killed in between
//! leaves nothing half done.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;

use crate::support::{HANG, factory, name};
use testbed::{Output, Process, TempDir, ZooKeeperServer, within};

const T: Duration = Duration::from_secs(3);

const JARS: &[&str] = &[
    "curator-client",
    "curator-framework",
    "curator-recipes",
    "zookeeper",
    "zookeeper-jute",
    "guava",
    "slf4j-api",
    "slf4j-nop",
    "netty-handler",
    "netty-transport",
    "netty-common",
    "netty-buffer",
    "netty-resolver",
    "netty-codec",
];

/// The class path, if all of it is there and a Java source can be run.
fn class_path() -> Option<String> {
    let jars: Vec<PathBuf> = JARS
        .iter()
        .map(|jar| Path::new("/usr/share/java").join(jar).with_extension("jar"))
        .collect();
    let javac = Command::new("javac").arg("-version").output();
    let all = jars.iter().all(|jar| jar.exists()) && javac.is_ok();
    let jars: Vec<_> = jars.iter().map(|jar| jar.display().to_string()).collect();
    all.then(|| jars.join(":"))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Ours,
    Curator,
}

struct Peer {
    side: Side,
    id: String,
    process: Process,
    had_turn: bool,
}

struct Ground {
    server: ZooKeeperServer,
    mutex: String,
    owned: PathBuf,
    class_path: String,
    /// The Java source, which `java` compiles and runs.
    source: PathBuf,
    words: mpsc::Sender<(String, String)>,
    next: usize,
}

impl Ground {
    fn peer(&mut self, side: Side) -> Peer {
        self.next += 1;
        let id = format!("{side:?}-{}", self.next);
        let address = self.server.addr().to_string();
        let mut command = match side {
            Side::Ours => {
                let mut command = Command::new(std::env::current_exe().unwrap());
                command
                    .args(["--exact", "curator::ours", "--ignored", "--nocapture"])
                    .env("CONTEND_CURATOR_SERVER", &address)
                    .env("CONTEND_CURATOR_MUTEX", &self.mutex)
                    .env("CONTEND_CURATOR_ID", &id)
                    .env("CONTEND_CURATOR_OWNED", &self.owned);
                command
            }
            Side::Curator => {
                let mut command = Command::new("java");
                command
                    .args(["-Xmx64m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"])
                    .args(["-cp", &self.class_path])
                    .arg(&self.source)
                    .args([&address, &format!("/simba/{}", self.mutex), &id])
                    .arg(T.as_millis().to_string())
                    .arg(&self.owned);
                command
            }
        };
        command.env("RUST_BACKTRACE", "0");
        let process = Process::spawn(&command, &Output::Pipe).unwrap();
        let out = process.take_stdout().unwrap();
        let (words, of) = (self.words.clone(), id.clone());
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                if words.send((of.clone(), line)).is_err() {
                    return;
                }
            }
        });
        Peer {
            side,
            id,
            process,
            had_turn: false,
        }
    }

    fn kill(&self, peer: &Peer) {
        peer.process.kill();
        // What it owned with goes with it; its session holds the mutex for T more.
        if fs::read_link(&self.owned).is_ok_and(|owner| owner == Path::new(&peer.id)) {
            fs::remove_file(&self.owned).unwrap();
        }
    }
}

#[test]
fn curator_and_ours_take_turns_through_kills() {
    let Some(class_path) = class_path() else {
        println!("NOT RUN: no JDK, or not all of Curator's jars, on this machine");
        return;
    };
    within(HANG * 5, || {
        let folder = TempDir::new();
        let (words, heard) = mpsc::channel();
        let source = folder.path().join("Latch.java");
        fs::write(&source, include_str!("Latch.java")).unwrap();
        let mut ground = Ground {
            server: ZooKeeperServer::start(),
            mutex: format!("curator/{}", name("nested")),
            owned: folder.path().join("owned"),
            class_path,
            source,
            words,
            next: 0,
        };
        let mut peers: Vec<Peer> = [Side::Curator, Side::Ours, Side::Curator, Side::Ours]
            .into_iter()
            .map(|side| ground.peer(side))
            .collect();
        let (mut ours, mut theirs, mut overlaps, mut kills) = (0, 0, Vec::new(), 0);
        let mut next_kill = 10;
        while ours + theirs < 25 {
            let (id, word) = heard
                .recv_timeout(HANG)
                .expect("turns go on: no peer is left out for so long");
            if word.contains("overlap") {
                overlaps.push(format!("{id}: {word}"));
            }
            let Some(peer) = peers.iter_mut().find(|peer| peer.id == id) else {
                continue;
            };
            if word != "turn" {
                continue;
            }
            peer.had_turn = true;
            let counts = kills > 0 || peers.iter().all(|peer| peer.had_turn);
            if counts {
                match id.starts_with("Ours") {
                    true => ours += 1,
                    false => theirs += 1,
                }
            }
            if counts && ours + theirs >= next_kill && peers[0].had_turn {
                next_kill = ours + theirs + 10;
                let victim = peers.remove(0);
                ground.kill(&victim);
                kills += 1;
                peers.push(ground.peer(victim.side));
            }
        }
        assert!(ours > 0 && theirs > 0, "{ours} and {theirs} turns");
        println!("{ours} turns of ours, {theirs} of Curator's, {kills} kills");
        assert!(overlaps.is_empty(), "{overlaps:?}");
    });
}

/// One of ours, as another process.
#[test]
#[ignore = "run by the other test, as another process"]
fn ours() {
    let of = |name: &str| std::env::var(name).unwrap();
    let ours = factory(of("CONTEND_CURATOR_SERVER"), T);
    let owned = PathBuf::from(of("CONTEND_CURATOR_OWNED"));
    let id = of("CONTEND_CURATOR_ID");
    let locker = ours
        .locker(of("CONTEND_CURATOR_MUTEX"))
        .id(&id)
        .build()
        .unwrap();
    println!("\nready");
    loop {
        let Ok(guard) = locker.lock() else {
            continue;
        };
        let made = std::os::unix::fs::symlink(&id, &owned);
        if made.is_err() {
            println!("overlap {:?}", fs::read_link(&owned));
        }
        std::thread::sleep(Duration::from_millis(2));
        if made.is_ok() {
            let _ = fs::remove_file(&owned);
        }
        println!(
            "{}",
            if guard.unlock().is_ok() {
                "turn"
            } else {
                "lost"
            }
        );
    }
}
