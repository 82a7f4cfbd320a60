//! A register that the processes write to under the lock: with the fence checked, and without.
//!
//! A holder reads, thinks, and writes back what it read with a token of its own at the end. A holder that wrote on the
//! ground of an older state than the last one has thrown another's write away: those tokens are not in the chain that
//! leads to the last state.

use std::collections::{HashMap, HashSet};
use std::io::{self, BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

/// A register's state: the chain of tokens, newest first, by parent.
#[derive(Debug, Default)]
pub struct Register {
    /// Each accepted write and what it was based on.
    parents: HashMap<u64, u64>,
    /// The last write, 0 for none.
    last: u64,
    /// The largest fence seen, if fences are looked at.
    fence: Option<u64>,
}

impl Register {
    /// A register that takes what comes; or one that refuses fences smaller than the largest it has seen, if its
    /// name says so.
    pub fn named(name: &str) -> Register {
        Register {
            fence: name.starts_with("fenced").then_some(0),
            ..Register::default()
        }
    }

    /// The state, for a holder with this fence. A read counts: an older holder must not write any more,
    /// or this reader's write would be based on what is no longer there.
    pub fn read(&mut self, fence: u64) -> Option<u64> {
        self.admits(fence).then_some(self.last)
    }

    /// Writes `token` on the ground of `base`; `false` if the fence is too old.
    pub fn write(&mut self, fence: u64, base: u64, token: u64) -> bool {
        if !self.admits(fence) {
            return false;
        }
        self.parents.insert(token, base);
        self.last = token;
        true
    }

    /// The writes that the last state contains.
    pub fn chain(&self) -> HashSet<u64> {
        let mut chain = HashSet::new();
        let mut at = self.last;
        while at != 0 && chain.insert(at) {
            at = self.parents.get(&at).copied().unwrap_or(0);
        }
        chain
    }

    fn admits(&mut self, fence: u64) -> bool {
        match &mut self.fence {
            Some(largest) if fence < *largest => false,
            Some(largest) => {
                *largest = fence;
                true
            }
            None => true,
        }
    }
}

/// The registers by name, behind a socket on loopback. They are not part of what is tested, so no fault
/// reaches them.
#[derive(Debug)]
pub struct RegisterServer {
    addr: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    registers: Mutex<HashMap<String, Register>>,
    /// Which process read each register last.
    readers: Mutex<HashMap<String, usize>>,
}

impl RegisterServer {
    /// Starts it. Its threads end with the process.
    pub fn start() -> RegisterServer {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port for the register");
        let addr = listener.local_addr().expect("its address");
        let shared: Arc<Shared> = Arc::default();
        let served = Arc::clone(&shared);
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let shared = Arc::clone(&served);
                std::thread::spawn(move || {
                    // A client that was killed is no error.
                    let _ = serve(&client, &shared);
                });
            }
        });
        RegisterServer { addr, shared }
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// For each register, the writes that its last state contains.
    pub fn chains(&self) -> HashMap<String, HashSet<u64>> {
        let registers = self.shared.registers.lock();
        registers
            .iter()
            .map(|(name, register)| (name.clone(), register.chain()))
            .collect()
    }

    /// The process that read this register last: most likely the owner, for a nemesis that aims.
    pub fn last_reader(&self, register: &str) -> Option<usize> {
        self.shared.readers.lock().get(register).copied()
    }
}

fn serve(client: &TcpStream, shared: &Shared) -> io::Result<()> {
    client.set_nodelay(true)?;
    let mut writer = client;
    for line in BufReader::new(client).lines() {
        let answer = shared.answer(&line?);
        let answer = answer.unwrap_or_else(|| "refused".to_owned());
        writer.write_all(format!("{answer}\n").as_bytes())?;
    }
    Ok(())
}

impl Shared {
    /// `read REGISTER FENCE PROCESS` or `write REGISTER FENCE BASE TOKEN`; `None` if it is refused.
    fn answer(&self, line: &str) -> Option<String> {
        let mut words = line.split_whitespace();
        let (question, name) = (words.next()?, words.next()?);
        let mut number = || words.next()?.parse::<u64>().ok();
        let mut registers = self.registers.lock();
        let register = registers.entry(name.to_owned());
        let register = register.or_insert_with(|| Register::named(name));
        let fence = number()?;
        if question == "write" {
            let written = register.write(fence, number()?, number()?);
            return written.then(|| "ok".to_owned());
        }
        let process = usize::try_from(number()?).ok()?;
        self.readers.lock().insert(name.to_owned(), process);
        Some(register.read(fence)?.to_string())
    }
}

/// A contender's connection to the registers.
#[derive(Debug)]
pub struct RegisterClient {
    reader: BufReader<TcpStream>,
    process: usize,
}

impl RegisterClient {
    /// Connects as a process with this number.
    pub fn connect(addr: SocketAddr, process: usize) -> io::Result<RegisterClient> {
        let stream = TcpStream::connect(addr)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        Ok(RegisterClient {
            reader: BufReader::new(stream),
            process,
        })
    }

    /// What `register` holds; `None` if the fence is refused.
    pub fn read(&mut self, register: &str, fence: u64) -> io::Result<Option<u64>> {
        let question = format!("read {register} {fence} {}", self.process);
        Ok(self.ask(&question)?.parse().ok())
    }

    /// Whether the write was acknowledged.
    pub fn write(&mut self, register: &str, fence: u64, base: u64, token: u64) -> io::Result<bool> {
        Ok(self.ask(&format!("write {register} {fence} {base} {token}"))? == "ok")
    }

    fn ask(&mut self, question: &str) -> io::Result<String> {
        let mut stream = self.reader.get_ref();
        stream.write_all(format!("{question}\n").as_bytes())?;
        let mut answer = String::new();
        self.reader.read_line(&mut answer)?;
        Ok(answer.trim_end().to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two holders at once: 1 read first, 2 took over, 1 writes late.
    fn race(mut register: Register) -> (Vec<u64>, HashSet<u64>) {
        let mut acknowledged = Vec::new();
        let first = register.read(1).unwrap();
        let second = register.read(2).unwrap();
        if register.write(1, first, 11) {
            acknowledged.push(11);
        }
        if register.write(2, second, 22) {
            acknowledged.push(22);
        }
        (acknowledged, register.chain())
    }

    #[test]
    fn fenced_register_alone_loses_no_write() {
        let (acknowledged, chain) = race(Register::named("fenced-m"));
        assert_eq!(acknowledged, [22]);
        assert!(chain.contains(&22));
        let (acknowledged, chain) = race(Register::named("plain-m"));
        assert_eq!(acknowledged, [11, 22]);
        assert!(!chain.contains(&11), "a lost write is seen as lost");
    }
}
