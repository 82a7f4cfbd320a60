//! What happened, as the processes wrote it down, one line for each fact.
//!
//! All times are nanoseconds on the boot-time clock, which every process of a machine shares. Every process writes a
//! file of its own, so a process that is killed loses nothing but its last line.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::path::Path;
use std::time::Duration;

use parking_lot::Mutex;

/// Nanoseconds on the boot-time clock.
pub type Nanos = u64;

/// Reads the boot-time clock: not the library's way of doing so, whose beliefs are judged by it.
pub fn now() -> Nanos {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

pub fn nanos(duration: Duration) -> Nanos {
    u64::try_from(duration.as_nanos()).unwrap_or(Nanos::MAX)
}

/// Stands in a record for any mutex.
pub const ALL: &str = "*";

/// The kinds of facts, each with the columns of a [`Record`] that it uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `who` believed that it owns the mutex `what` with `fence`, at a time not after `from` and at one not before
    /// `until`. At `after` it had not asked for it yet. With a `number`, it is so many permits of the semaphore `what`.
    Belief,
    /// `who` gave `what` with `fence` back at `from`: what it believed about the time after that is void.
    GaveUp,
    /// The service `who` said at `from` that it acquired `fence`; before that, `number` events are missing.
    Acquired,
    /// The same, released.
    Released,
    /// The register `what` said that it has the write `number`.
    Acknowledged,
    /// A scheduled run of `who` began at `from`, under `fence`; `what` is the mutex.
    Run,
    /// The backend said at `from` that the run of `fence` is on record; `what` is the mutex.
    Recorded,
    /// The process `who` was killed, and was dead at `from`.
    Killed,
    /// The nemesis did `who` to the mutex `what`, from `from` until `until`.
    Fault,
    /// The same, of a kind against which only a checked fence protects.
    FenceOnlyFault,
    /// From `from` on there are no faults.
    Healed,
    /// `who` did what no process may do, which is `what`.
    Misbehaved,
}

impl Kind {
    const KINDS: [Kind; 12] = [
        Kind::Belief,
        Kind::GaveUp,
        Kind::Acquired,
        Kind::Released,
        Kind::Acknowledged,
        Kind::Run,
        Kind::Recorded,
        Kind::Killed,
        Kind::Fault,
        Kind::FenceOnlyFault,
        Kind::Healed,
        Kind::Misbehaved,
    ];
}

/// One fact. [`Kind`] says which columns mean something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    pub kind: Kind,
    /// A contender is `PROCESS/NAME`. A turn of a locker that hands its lease on is `PROCESS/NAME#TURN`.
    pub who: String,
    pub what: String,
    pub fence: u64,
    pub number: u64,
    pub after: Nanos,
    pub from: Nanos,
    pub until: Nanos,
}

impl Record {
    pub fn new(kind: Kind, who: &str, what: &str) -> Record {
        Record {
            kind,
            who: who.to_owned(),
            what: what.to_owned(),
            fence: 0,
            number: 0,
            after: 0,
            from: 0,
            until: 0,
        }
    }

    pub fn fence(self, fence: u64) -> Record {
        Record { fence, ..self }
    }

    pub fn number(self, number: u64) -> Record {
        Record { number, ..self }
    }

    pub fn after(self, after: Nanos) -> Record {
        Record { after, ..self }
    }

    pub fn at(self, from: Nanos) -> Record {
        Record { from, ..self }
    }

    pub fn until(self, until: Nanos) -> Record {
        Record { until, ..self }
    }

    /// Its line. `what` comes last: it may have spaces.
    pub fn to_line(&self) -> String {
        let Record {
            kind,
            fence,
            number,
            ..
        } = self;
        let who = if self.who.is_empty() { "-" } else { &self.who };
        let what = self.what.replace(['\n', '\r'], " ");
        let (after, from, until) = (self.after, self.from, self.until);
        format!("{kind:?} {who} {fence} {number} {after} {from} {until} {what}\n")
    }

    /// The fact in a line.
    pub fn from_line(line: &str) -> Option<Record> {
        let mut columns = line.splitn(8, ' ');
        let mut text = || columns.next();
        let (kind, who) = (text()?, text()?);
        let kind = Kind::KINDS
            .into_iter()
            .find(|known| format!("{known:?}") == kind)?;
        let mut number = || text()?.parse().ok();
        let record = Record::new(kind, if who == "-" { "" } else { who }, "")
            .fence(number()?)
            .number(number()?)
            .after(number()?)
            .at(number()?)
            .until(number()?);
        let what = text()?.to_owned();
        Some(Record { what, ..record })
    }
}

/// A process's own file of facts. A line is in the kernel's hands once [`Journal::write`] returns, so it outlives the
/// process.
#[derive(Debug)]
pub struct Journal {
    file: Mutex<File>,
}

impl Journal {
    /// Appends to the file at `path`.
    pub fn open(path: &Path) -> io::Result<Journal> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        Ok(Journal {
            file: Mutex::new(file),
        })
    }

    /// Writes one fact down.
    pub fn write(&self, record: &Record) {
        self.line(&record.to_line());
    }

    /// Writes down that a process did what none may do.
    pub fn misbehaved(&self, who: &str, what: &str) {
        self.write(&Record::new(Kind::Misbehaved, who, what));
    }

    /// Writes a remark down, which the checker does not read.
    pub fn remark(&self, text: &str) {
        let text = text.replace(['\n', '\r'], " ");
        self.line(&format!("# {} {text}\n", now()));
    }

    fn line(&self, line: &str) {
        let written = self.file.lock().write_all(line.as_bytes());
        written.expect("the journal can be written");
    }
}

/// All facts in the files of a folder. A last line without its end was cut short with its process.
pub fn read(folder: &Path) -> io::Result<Vec<Record>> {
    let mut records = Vec::new();
    let entries = std::fs::read_dir(folder)?.map(|entry| entry.map(|it| it.path()));
    let mut paths = entries.collect::<io::Result<Vec<_>>>()?;
    paths.retain(|path| path.extension().is_some_and(|it| it == "log"));
    paths.sort();
    for path in paths {
        let text = String::from_utf8_lossy(&std::fs::read(&path)?).into_owned();
        for line in text.split_inclusive('\n') {
            let Some(line) = line.strip_suffix('\n') else {
                continue;
            };
            if !line.starts_with('#') {
                let record = Record::from_line(line);
                records.push(record.unwrap_or_else(|| panic!("{path:?}: what is {line:?}?")));
            }
        }
    }
    Ok(records)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_gives_its_record_back() {
        let full = Record::new(Kind::Belief, "1.0/lead", "m").fence(u64::MAX);
        let full = full.number(4).after(1).at(2).until(3);
        for record in [
            full,
            Record::new(Kind::Healed, "", "").at(1),
            Record::new(Kind::Misbehaved, "1.0", "did not stop"),
        ] {
            let line = record.to_line();
            assert_eq!(Record::from_line(line.trim_end_matches('\n')), Some(record));
        }
        for kind in Kind::KINDS {
            let line = Record::new(kind, "a", "b").to_line();
            assert_eq!(Record::from_line(line.trim_end()).unwrap().kind, kind);
        }
        assert_eq!(Record::from_line("Belief a 1 2"), None);
        assert_eq!(Record::from_line(""), None);
    }

    #[test]
    fn journal_is_read_to_its_cut() {
        let folder = testbed::TempDir::new();
        let journal = Journal::open(&folder.path().join("a.log")).unwrap();
        journal.remark("hello");
        let healed = Record::new(Kind::Healed, "", "").at(5);
        journal.write(&healed);
        journal.line(healed.to_line().trim_end());
        assert_eq!(read(folder.path()).unwrap(), [healed]);
    }
}
