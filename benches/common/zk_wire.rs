//! The barest ZooKeeper client there can be: a blocking socket, the requests that our driver sends, and
//! nothing around them. No driver that exists would do as the measure: the `zookeeper` crate sends one
//! request at a time and hands every reply through two threads, so that beside it anything looks fast.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

const CREATE2: i32 = 15;
const DELETE: i32 = 2;
const GET_DATA: i32 = 4;
const GET_CHILDREN: i32 = 8;
const SYNC: i32 = 9;

/// How a node is made.
pub const PERSISTENT: i32 = 0;
pub const EPHEMERAL: i32 = 1;
pub const EPHEMERAL_SEQUENTIAL: i32 = 3;

/// A session on a connection of its own. It sends no pings: its owner keeps it busy.
pub struct Wire {
    stream: TcpStream,
    out: Vec<u8>,
    frame: Vec<u8>,
}

impl Wire {
    pub fn connect(server: SocketAddr) -> Wire {
        let stream = TcpStream::connect(server).unwrap();
        stream.set_nodelay(true).unwrap();
        let mut wire = Wire {
            stream,
            out: Vec::new(),
            frame: Vec::new(),
        };
        let start = wire.begin();
        wire.int(0);
        wire.out.extend(0_i64.to_be_bytes());
        wire.int(60_000);
        wire.out.extend(0_i64.to_be_bytes());
        wire.text(&[0; 16]);
        wire.out.push(0);
        wire.end(start);
        wire.send();
        wire.receive();
        wire
    }

    /// Queues a creation; the reply begins with the path.
    pub fn create(&mut self, path: &str, data: &[u8], flags: i32) {
        let start = self.request(CREATE2);
        self.text(path.as_bytes());
        self.text(data);
        self.int(1);
        self.int(31);
        self.text(b"world");
        self.text(b"anyone");
        self.int(flags);
        self.end(start);
    }

    pub fn delete(&mut self, path: &str) {
        let start = self.request(DELETE);
        self.text(path.as_bytes());
        self.int(-1);
        self.end(start);
    }

    pub fn watch(&mut self, path: &str) {
        let start = self.request(GET_DATA);
        self.text(path.as_bytes());
        self.out.push(1);
        self.end(start);
    }

    pub fn children(&mut self, path: &str) {
        let start = self.request(GET_CHILDREN);
        self.text(path.as_bytes());
        self.out.push(0);
        self.end(start);
    }

    pub fn sync(&mut self) {
        let start = self.request(SYNC);
        self.text(b"/");
        self.end(start);
    }

    /// Sends what was queued.
    pub fn send(&mut self) {
        self.stream.write_all(&self.out).unwrap();
        self.out.clear();
    }

    /// The next frame: a reply, or the event of a watch. Returns its body.
    pub fn receive(&mut self) -> &[u8] {
        let mut length = [0; 4];
        self.stream.read_exact(&mut length).unwrap();
        let length = usize::try_from(i32::from_be_bytes(length)).unwrap();
        self.frame.resize(length, 0);
        self.stream.read_exact(&mut self.frame).unwrap();
        &self.frame[16.min(length)..]
    }

    /// The path in the reply to a creation.
    pub fn created(&mut self) -> String {
        let body = self.receive();
        let length = i32::from_be_bytes(body[..4].try_into().unwrap());
        let end = 4 + usize::try_from(length).unwrap();
        String::from_utf8(body[4..end].to_vec()).unwrap()
    }

    /// The names in the reply to a question for children.
    pub fn names(&mut self) -> Vec<String> {
        let mut rest = self.receive();
        let number = |rest: &mut &[u8]| {
            let (head, tail) = rest.split_at(4);
            *rest = tail;
            usize::try_from(i32::from_be_bytes(head.try_into().unwrap())).unwrap()
        };
        let count = number(&mut rest);
        (0..count)
            .map(|_| {
                let length = number(&mut rest);
                let (name, tail) = rest.split_at(length);
                rest = tail;
                String::from_utf8(name.to_vec()).unwrap()
            })
            .collect()
    }

    fn request(&mut self, op: i32) -> usize {
        let start = self.begin();
        self.int(1);
        self.int(op);
        start
    }

    fn begin(&mut self) -> usize {
        self.out.extend([0; 4]);
        self.out.len()
    }

    fn end(&mut self, start: usize) {
        let length = i32::try_from(self.out.len() - start).unwrap();
        self.out[start - 4..start].copy_from_slice(&length.to_be_bytes());
    }

    fn int(&mut self, number: i32) {
        self.out.extend(number.to_be_bytes());
    }

    fn text(&mut self, bytes: &[u8]) {
        self.int(i32::try_from(bytes.len()).unwrap());
        self.out.extend(bytes);
    }
}
