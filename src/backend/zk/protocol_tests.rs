//! The protocol on its own, driven from a seed against a model of a server: delays, lost connections,
//! requests thrown out, a follower cut off from its leader, callers that give up at any moment.
//!
//! `CONTEND_PROTOCOL_WORLDS` says how many worlds are tried (60 by default); `CONTEND_SEED` repeats one.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::builder::Builder;
use super::message::{Acl, Mode, Permissions, Reply, Request};
use super::path::{node_path, protection};
use super::protocol::{Answer, Ask, Protocol, SessionState};
use super::watches::{UnparkerCell, Watch};
use super::wire::{Decoder, Encoder, Frame, Frames};
use crate::clock::Moment;

const T: u64 = 2_400;
const MUTEXES: [&str; 2] = ["/simba/a", "/simba/b"];
const SESSION: i64 = 77;

fn at(ms: u64) -> Moment {
    Moment::from_origin(Duration::from_millis(ms))
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
}

fn protocol() -> Protocol {
    let builder = Builder::new("server").session_timeout(Duration::from_millis(T));
    Protocol::new(Arc::new(builder.config().unwrap()))
}

/// A follower and its leader. The follower answers; the leader expires.
struct Server {
    /// The nodes of the session, and when each was made.
    nodes: BTreeMap<String, i64>,
    sequence: HashMap<String, u32>,
    zxid: i64,
    /// When the leader last counted the session's timeout anew.
    touched: u64,
    /// When the follower last heard from the client.
    heard: Option<u64>,
    next_report: u64,
    expired: bool,
    /// The follower is cut off from the leader.
    cut: bool,
    frames: Frames,
    greeted: bool,
    /// What waits for the leader to be back.
    backlog: Vec<Vec<u8>>,
    /// Replies on their way, in order, and when each arrives.
    replies: VecDeque<(u64, Vec<u8>)>,
}

impl Server {
    fn new() -> Server {
        Server {
            nodes: BTreeMap::new(),
            sequence: HashMap::new(),
            zxid: 1,
            touched: 0,
            heard: None,
            next_report: 0,
            expired: false,
            cut: false,
            frames: Frames::default(),
            greeted: false,
            backlog: Vec::new(),
            replies: VecDeque::new(),
        }
    }

    fn tick(&mut self, now: u64) {
        if self.next_report <= now {
            // A tick of half the smallest timeout: reports come every quarter of it.
            self.next_report = now + T / 4;
            if self.heard.take_if(|_| !self.cut).is_some() {
                self.touched = now;
            }
        }
        if !self.expired && self.greeted_once() && self.touched + T < now {
            self.expired = true;
            self.nodes.clear();
        }
    }

    fn greeted_once(&self) -> bool {
        self.zxid > 1
    }

    fn lose_connection(&mut self) {
        self.frames = Frames::default();
        self.greeted = false;
        self.backlog.clear();
        self.replies.clear();
    }

    fn receive(&mut self, bytes: &[u8], now: u64, dice: &mut StdRng) {
        self.frames.push(bytes);
        while let Some(Frame::Whole(frame)) = self.frames.next().unwrap() {
            self.heard = Some(now);
            if self.cut {
                self.backlog.push(frame);
            } else {
                self.request(&frame, now, dice);
            }
        }
    }

    fn request(&mut self, frame: &[u8], now: u64, dice: &mut StdRng) {
        let due = now + dice.random_range(0..40);
        let mut body = Decoder::new(frame);
        let mut out = Encoder::default();
        out.begin();
        if !self.greeted {
            self.greeted = true;
            out.int(0);
            out.int(if self.expired { 0 } else { T as i32 });
            out.long(if self.expired { 0 } else { SESSION });
            out.buffer(&[1; 16]);
            out.bool(false);
            out.end();
            self.zxid += 1;
            if !self.expired {
                self.touched = now;
            }
            self.replies.push_back((due, out.take()));
            return;
        }
        let (xid, op) = (body.int().unwrap(), body.int().unwrap());
        let thrown_out = xid > 0 && op != -11 && dice.random_ratio(1, 200);
        let mut reply = Encoder::default();
        let code = if thrown_out {
            -127
        } else {
            self.perform(op, &mut body, &mut reply)
        };
        out.int(xid);
        out.long(self.zxid);
        out.int(code);
        let mut bytes = out.take();
        if code == 0 {
            bytes.extend(reply.take());
        }
        let length = (bytes.len() - 4) as u32;
        bytes[..4].copy_from_slice(&length.to_be_bytes());
        self.replies.push_back((due, bytes));
    }

    fn perform(&mut self, op: i32, body: &mut Decoder<'_>, out: &mut Encoder) -> i32 {
        let path = match op {
            2 | 3 | 4 | 8 | 15 => body.text().unwrap(),
            _ => String::new(),
        };
        let stat = |out: &mut Encoder, czxid: i64| {
            out.long(czxid);
            (0..3).for_each(|_| out.long(1));
            (0..3).for_each(|_| out.int(0));
            out.long(SESSION);
            (0..2).for_each(|_| out.int(0));
            out.long(1);
        };
        match op {
            15 => {
                let (parent, _) = path.rsplit_once('/').unwrap();
                let sequence = self.sequence.entry(parent.to_owned()).or_default();
                let full = format!("{path}{sequence:010}");
                *sequence += 1;
                self.zxid += 1;
                self.nodes.insert(full.clone(), self.zxid);
                out.text(&full);
                stat(out, self.zxid);
                0
            }
            2 => {
                self.zxid += 1;
                if self.nodes.remove(&path).is_some() {
                    0
                } else {
                    -101
                }
            }
            3 | 4 => match self.nodes.get(&path) {
                None => -101,
                Some(czxid) => {
                    if op == 4 {
                        out.buffer(b"id");
                    }
                    stat(out, *czxid);
                    0
                }
            },
            8 => {
                let below = format!("{path}/");
                let names: Vec<&str> = self
                    .nodes
                    .keys()
                    .filter_map(|node| node.strip_prefix(&below))
                    .collect();
                out.texts(names.into_iter());
                0
            }
            _ => 0,
        }
    }

    /// What has arrived at the client by now.
    fn arrived(&mut self, now: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        while let Some((due, _)) = self.replies.front()
            && *due <= now
        {
            bytes.extend(self.replies.pop_front().unwrap().1);
        }
        bytes
    }
}

/// A caller's creation: which call it is, what it asked for, and what came of it.
struct Creation {
    call: u64,
    path: String,
    answers: [Option<Answer>; 2],
    given_up: bool,
}

struct World {
    seed: u64,
    dice: StdRng,
    protocol: Protocol,
    server: Server,
    connected: bool,
    creations: Vec<Creation>,
    next_call: u64,
    proofs: u64,
}

impl World {
    fn new(seed: u64) -> World {
        World {
            seed,
            dice: StdRng::seed_from_u64(seed),
            protocol: protocol(),
            server: Server::new(),
            connected: false,
            creations: Vec::new(),
            next_call: 0,
            proofs: 0,
        }
    }

    fn step(&mut self, now: u64, calm: bool) {
        self.server.tick(now);
        if self.protocol.phase().is_over() {
            return;
        }
        if !self.connected {
            if calm || self.dice.random_ratio(1, 30) {
                self.protocol
                    .begin(at(now), Duration::from_millis(T / 4), 1);
                self.connected = true;
            } else {
                return;
            }
        }
        let arrived = self.server.arrived(now);
        let mut outcome = if arrived.is_empty() {
            Ok(())
        } else {
            // However it is cut.
            let cut = self.dice.random_range(0..=arrived.len());
            self.protocol
                .received(&arrived[..cut], at(now))
                .and_then(|()| self.protocol.received(&arrived[cut..], at(now)))
        };
        if outcome.is_ok() {
            outcome = self.protocol.tick(at(now));
        }
        if !calm && self.dice.random_ratio(1, 2_000) {
            outcome = Err(crate::Error::new(crate::ErrorKind::Unreachable, "dice"));
        }
        if !calm && self.protocol.is_connected() {
            self.callers();
        }
        match outcome {
            Ok(()) => {
                let bytes = self.protocol.take_output();
                self.server.receive(&bytes, now, &mut self.dice);
            }
            Err(_) => {
                // What was handed to the socket in this step may get through or not.
                let bytes = self.protocol.take_output();
                if self.dice.random_bool(0.5) && self.server.greeted {
                    self.server.receive(&bytes, now, &mut self.dice);
                }
                self.protocol.disconnected();
                self.server.lose_connection();
                self.connected = false;
            }
        }
        self.collect();
        self.check(now);
    }

    fn callers(&mut self) {
        match self.dice.random_range(0..60) {
            0 => {
                self.next_call += 1;
                let mutex = MUTEXES[self.dice.random_range(0..2)];
                let path = node_path(mutex, &protection());
                let create = Request::Create {
                    path: path.clone(),
                    data: Vec::new(),
                    mode: Mode::EphemeralSequential,
                    permissions: Permissions::Of(Acl::Open),
                };
                let asks = vec![Ask::create(create), Ask::line(mutex)];
                self.protocol.ask(self.next_call, asks);
                self.creations.push(Creation {
                    call: self.next_call,
                    path,
                    answers: [None, None],
                    given_up: false,
                });
            }
            1 | 2 if !self.creations.is_empty() => {
                let chosen = self.dice.random_range(0..self.creations.len());
                self.give_up(chosen);
            }
            _ => {}
        }
    }

    fn give_up(&mut self, chosen: usize) {
        // As a session does, which hands out answers under the same lock.
        self.collect();
        let creation = &mut self.creations[chosen];
        if std::mem::replace(&mut creation.given_up, true) {
            return;
        }
        match &creation.answers[0] {
            None => self.protocol.cancel(creation.call),
            Some(Answer::Replied(Ok(Reply::Created(path, _)))) => {
                self.protocol.abandon(path.clone());
            }
            Some(Answer::Lost { handed: true }) => self.protocol.abandon_creation(&creation.path),
            Some(_) => {}
        }
    }

    fn collect(&mut self) {
        while let Some(answered) = self.protocol.next_answer() {
            let seed = self.seed;
            let found = self
                .creations
                .iter_mut()
                .find(|creation| creation.call == answered.call);
            let creation = found.unwrap_or_else(|| panic!("seed {seed}: answered nobody"));
            let place = &mut creation.answers[answered.index];
            assert!(place.is_none(), "seed {seed}: answered twice");
            if let (1, Answer::Replied(Ok(Reply::Line(line)))) = (answered.index, &answered.answer)
            {
                // The list was read after the node was made.
                let made = match &creation.answers[0] {
                    Some(Answer::Replied(Ok(Reply::Created(path, _)))) => path.rsplit('/').next(),
                    _ => None,
                };
                let seen = made.is_none_or(|name| line.members().iter().any(|m| m.name == name));
                assert!(
                    seen || creation.given_up,
                    "seed {seed}: a list from before the creation"
                );
            }
            creation.answers[answered.index] = Some(answered.answer);
        }
    }

    fn check(&mut self, now: u64) {
        let seed = self.seed;
        // Never longer than the leader keeps it.
        if let Some(until) = self.protocol.alive_until() {
            let kept = at(self.server.touched + T);
            assert!(
                until <= kept,
                "seed {seed}: at {now} ms alive until {until:?}, the leader keeps it until {kept:?}"
            );
            self.proofs += 1;
        }
    }

    /// The leader is back. What was held on the way arrives: its pings, which the follower answers with a
    /// report, and what the follower had to pass on. Whoever was not let in yet must ask again.
    fn heal(&mut self, now: u64) {
        self.server.cut = false;
        if self.connected && !self.protocol.is_connected() {
            self.protocol.disconnected();
            self.server.lose_connection();
            self.connected = false;
        }
        if !self.server.expired && self.server.heard.take().is_some() {
            self.server.touched = now;
        }
        for frame in std::mem::take(&mut self.server.backlog) {
            self.server.request(&frame, now, &mut self.dice);
        }
    }

    /// Everything heals and everybody leaves: nothing is left.
    fn end(mut self, mut now: u64) -> u64 {
        self.heal(now);
        (0..self.creations.len()).for_each(|chosen| self.give_up(chosen));
        let until = now + 4 * T;
        while now < until {
            now += 1;
            self.step(now, true);
            if self.protocol.phase() == SessionState::Expired {
                break;
            }
        }
        let seed = self.seed;
        assert!(
            self.server.nodes.is_empty(),
            "seed {seed}: left behind: {:?}",
            self.server.nodes
        );
        for creation in &self.creations {
            assert!(
                creation.answers.iter().all(Option::is_some),
                "seed {seed}: call {} was never answered",
                creation.call
            );
        }
        self.proofs
    }
}

#[test]
fn in_any_world_belief_holds_answers_come_once_and_nothing_is_left_behind() {
    let worlds = number("CONTEND_PROTOCOL_WORLDS", 60);
    let first = number("CONTEND_SEED", rand::rng().random_range(0..u64::MAX / 2));
    println!("CONTEND_SEED={first} CONTEND_PROTOCOL_WORLDS={worlds}");
    let mut proofs = 0;
    for seed in first..first + worlds {
        let mut world = World::new(seed);
        let cut_at = world.dice.random_range(2_000..12_000);
        let healed_at = cut_at + world.dice.random_range(100..2 * T);
        for now in 1..14_000 {
            if now == cut_at {
                world.server.cut = true;
            }
            if now == healed_at {
                world.heal(now);
            }
            world.step(now, false);
        }
        proofs += world.end(14_000);
    }
    assert!(proofs > worlds * 1_000, "hardly ever alive: {proofs}");
}

/// Drives a protocol through its handshake; returns what it sent after it.
fn served(protocol: &mut Protocol, now: u64) -> Vec<u8> {
    protocol.begin(at(now), Duration::from_millis(T / 4), 1);
    protocol.take_output();
    let mut out = Encoder::default();
    out.begin();
    out.int(0);
    out.int(T as i32);
    out.long(SESSION);
    out.buffer(&[1; 16]);
    out.bool(false);
    out.end();
    protocol.received(&out.take(), at(now + 1)).unwrap();
    protocol.tick(at(now + 1)).unwrap();
    protocol.take_output()
}

fn requests(bytes: &[u8]) -> Vec<(i32, i32)> {
    let mut frames = Frames::default();
    frames.push(bytes);
    let mut list = Vec::new();
    while let Some(Frame::Whole(frame)) = frames.next().unwrap() {
        let mut body = Decoder::new(&frame);
        list.push((body.int().unwrap(), body.int().unwrap()));
    }
    list
}

fn ok(xid: i32, code: i32) -> Vec<u8> {
    let mut out = Encoder::default();
    out.begin();
    out.int(xid);
    out.long(9);
    out.int(code);
    out.end();
    out.take()
}

/// review/zk.md 2 and 7: beats are sent every T/24, answered or not, past whatever waits.
#[test]
fn heartbeats_pass_the_queue_and_do_not_wait_for_each_other() {
    let mut protocol = protocol();
    assert_eq!(requests(&served(&mut protocol, 0)), [(1, 9)]);
    let asks = (0..1_000)
        .map(|_| Request::Exists("/x".into()).into())
        .collect();
    protocol.ask(1, asks);
    let sent = requests(&protocol.take_output());
    assert_eq!(sent.len(), 64, "the window");
    for beat in 1..6 {
        protocol.tick(at(1 + beat * T / 24)).unwrap();
        assert_eq!(requests(&protocol.take_output()), [(65 + beat as i32, 9)]);
    }
    // A server silent for T/4 is left.
    assert!(protocol.tick(at(T / 4)).is_ok());
    assert!(protocol.tick(at(1 + T / 4)).is_err());
}

/// review/zk.md 4: an error in the reply to a beat fails it.
#[test]
fn a_beat_that_was_answered_with_an_error_does_not_count() {
    let mut protocol = protocol();
    served(&mut protocol, 0);
    protocol.received(&ok(1, 0), at(2)).unwrap();
    let before = protocol.alive_until();
    let mut left = None;
    for beat in 1..12 {
        let now = at(1 + beat * T / 24);
        if protocol.tick(now).is_err() {
            left = Some(now);
            break;
        }
        protocol.take_output();
        protocol
            .received(&ok(1 + beat as i32, -127), now + Duration::from_millis(1))
            .unwrap();
    }
    assert_eq!(protocol.alive_until(), before);
    assert!(left.is_some(), "the server counts as silent");
}

/// The first beat of a connection is what lets reads over it be trusted.
#[test]
fn a_connection_whose_first_beat_fails_is_left() {
    let mut protocol = protocol();
    served(&mut protocol, 0);
    assert!(protocol.received(&ok(1, -127), at(2)).is_err());
}

/// review/zk.md 5: a server that does not keep a watch is noticed.
#[test]
fn a_watch_that_the_server_refuses_is_known_to_be_refused() {
    let mut protocol = protocol();
    served(&mut protocol, 0);
    protocol.received(&ok(1, 0), at(2)).unwrap();
    let cell = Arc::new(UnparkerCell::default());
    for (xid, code) in [(2, -127), (3, -101)] {
        let watch = Watch::new(&cell);
        protocol.watch("/simba/m/n", &watch);
        assert!(watch.is_due());
        protocol.received(&ok(xid, code), at(3)).unwrap();
        assert_eq!(
            (watch.is_refused(), watch.is_gone()),
            (code == -127, code == -101)
        );
    }
}

/// review/zk.md 2: one list at a time, and the next one for all that came meanwhile.
#[test]
fn many_that_ask_for_one_list_get_two() {
    let mut protocol = protocol();
    served(&mut protocol, 0);
    protocol.received(&ok(1, 0), at(2)).unwrap();
    for call in 0..1_000 {
        protocol.ask(call, vec![Ask::line("/simba/m")]);
    }
    assert_eq!(requests(&protocol.take_output()), [(2, 8)]);
    let names = |xid: i32| {
        let mut out = Encoder::default();
        out.begin();
        out.int(xid);
        out.long(9);
        out.int(0);
        out.texts(["_c_x-latch-0000000001"].into_iter());
        out.end();
        out.take()
    };
    protocol.received(&names(2), at(3)).unwrap();
    assert_eq!(std::iter::from_fn(|| protocol.next_answer()).count(), 1);
    assert_eq!(requests(&protocol.take_output()), [(3, 8)]);
    protocol.received(&names(3), at(4)).unwrap();
    assert_eq!(std::iter::from_fn(|| protocol.next_answer()).count(), 999);
    assert!(!protocol.has_output());
}

/// Whatever a server sends, at whatever stage: an error or nothing, never a panic.
#[test]
fn noise_at_any_stage_is_an_error_at_most() {
    let inputs = number("CONTEND_DECODER_INPUTS", 200_000) / 10;
    let seed = number("CONTEND_SEED", rand::rng().random());
    println!("CONTEND_SEED={seed}");
    let mut dice = StdRng::seed_from_u64(seed);
    let mut protocol = protocol();
    let mut now = 0;
    for _ in 0..inputs {
        now += 1;
        if protocol.phase().is_over() {
            protocol = self::protocol();
        }
        if !protocol.is_connected() {
            protocol.disconnected();
            if dice.random_bool(0.9) {
                if protocol.id() == 0 || protocol.id() == SESSION {
                    served(&mut protocol, now);
                }
            } else {
                protocol.begin(at(now), Duration::from_millis(T), 1);
            }
        }
        if protocol.is_connected() {
            let call = u64::from(dice.random::<u32>());
            protocol.ask(call, vec![Ask::line("/m"), Ask::delete("/m/n")]);
        }
        let mut bytes = protocol.take_output();
        bytes.truncate(dice.random_range(0..64));
        bytes.extend((0..dice.random_range(0..24)).map(|_| dice.random::<u8>()));
        // Often with a true length and head, so that it gets further than that.
        if dice.random_bool(0.7) {
            let mut framed = Encoder::default();
            framed.begin();
            framed.int(dice.random_range(-9..40));
            framed.long(dice.random());
            framed.int([0, 0, 0, -101, -112, -127][dice.random_range(0..6)]);
            framed.end();
            let mut framed = framed.take();
            framed.extend(&bytes);
            let length = (framed.len() - 4) as u32;
            framed[..4].copy_from_slice(&length.to_be_bytes());
            bytes = framed;
        }
        if protocol.received(&bytes, at(now)).is_err() || protocol.tick(at(now)).is_err() {
            protocol.disconnected();
        }
        while protocol.next_answer().is_some() {}
    }
}
