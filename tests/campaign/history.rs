//! What happened, as the processes wrote it down, one line for each fact.
//!
//! All times are nanoseconds on the boot-time clock, which every process of a machine shares. Every
//! process writes a file of its own, so that a process that is killed loses nothing but its last line.

use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::path::Path;

use parking_lot::Mutex;

/// Nanoseconds on the boot-time clock.
pub type Nanos = u64;

/// Reads the boot-time clock: not the library's way of doing so, whose beliefs are judged by it.
pub fn now() -> Nanos {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Stands in a line for the mutex of a fault that may have hit any.
const ALL: &str = "*";

/// One fact.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record {
    /// A contender believed that it owns, at a time not after `from` and at one not before `until`.
    Belief {
        who: String,
        mutex: String,
        fence: u64,
        /// A time before the acquisition: the contender had not asked for it yet.
        after: Nanos,
        from: Nanos,
        until: Nanos,
    },
    /// A contender gave the mutex back on purpose: what it believed about the time after that is void.
    GaveUp {
        who: String,
        mutex: String,
        fence: u64,
        at: Nanos,
    },
    /// A service sent an event.
    Event {
        who: String,
        acquired: bool,
        fence: u64,
        missed: u64,
        at: Nanos,
    },
    /// The register said that it has this write.
    Acknowledged { register: String, token: u64 },
    /// A scheduled run began.
    Run {
        mutex: String,
        who: String,
        fence: u64,
        at: Nanos,
    },
    /// The backend said that the run of this fence is on record.
    Recorded {
        mutex: String,
        fence: u64,
        at: Nanos,
    },
    /// A guard of permits was surely held from not after `from` to not before `until`.
    Permits {
        who: String,
        semaphore: String,
        count: u64,
        fence: u64,
        from: Nanos,
        until: Nanos,
    },
    /// A guard of permits was released on purpose.
    GavePermitsBack {
        semaphore: String,
        fence: u64,
        at: Nanos,
    },
    /// A process was killed, and was dead at this time. Its contenders' names begin with `process`.
    Killed { process: String, at: Nanos },
    /// A fault of the nemesis.
    Fault {
        kind: String,
        /// It is on the design's list of what only a checked fence protects against.
        fence_only: bool,
        /// The only mutex that it can have hit, where there is one.
        mutex: Option<String>,
        begin: Nanos,
        end: Nanos,
    },
    /// From now on there are no faults.
    Healed { at: Nanos },
    /// Something that no process may do, such as not to stop.
    Misbehaved { what: String },
}

impl Record {
    /// Its line, without the end of the line.
    pub fn to_line(&self) -> String {
        let mut line = String::new();
        let result = match self {
            Record::Belief {
                who,
                mutex,
                fence,
                after,
                from,
                until,
            } => write!(line, "belief {who} {mutex} {fence} {after} {from} {until}"),
            Record::GaveUp {
                who,
                mutex,
                fence,
                at,
            } => write!(line, "gave-up {who} {mutex} {fence} {at}"),
            Record::Event {
                who,
                acquired,
                fence,
                missed,
                at,
            } => write!(line, "event {who} {acquired} {fence} {missed} {at}"),
            Record::Acknowledged { register, token } => {
                write!(line, "acknowledged {register} {token}")
            }
            Record::Run {
                mutex,
                who,
                fence,
                at,
            } => write!(line, "run {mutex} {who} {fence} {at}"),
            Record::Recorded { mutex, fence, at } => write!(line, "recorded {mutex} {fence} {at}"),
            Record::Permits {
                who,
                semaphore,
                count,
                fence,
                from,
                until,
            } => write!(
                line,
                "permits {who} {semaphore} {count} {fence} {from} {until}"
            ),
            Record::GavePermitsBack {
                semaphore,
                fence,
                at,
            } => write!(line, "gave-back {semaphore} {fence} {at}"),
            Record::Killed { process, at } => write!(line, "killed {process} {at}"),
            Record::Fault {
                kind,
                fence_only,
                mutex,
                begin,
                end,
            } => {
                let mutex = mutex.as_deref().unwrap_or(ALL);
                write!(line, "fault {kind} {fence_only} {mutex} {begin} {end}")
            }
            Record::Healed { at } => write!(line, "healed {at}"),
            Record::Misbehaved { what } => {
                write!(line, "misbehaved {}", what.replace(['\n', '\r'], " "))
            }
        };
        debug_assert!(result.is_ok());
        line
    }

    /// The fact in a line; `None` for one that was cut short by the end of its process.
    pub fn from_line(line: &str) -> Option<Record> {
        let (kind, rest) = line.split_once(' ')?;
        if kind == "misbehaved" {
            return Some(Record::Misbehaved {
                what: rest.to_owned(),
            });
        }
        let mut fields = rest.split(' ');
        let mut text = || fields.next().map(str::to_owned);
        let record = match kind {
            "belief" => Record::Belief {
                who: text()?,
                mutex: text()?,
                fence: text()?.parse().ok()?,
                after: text()?.parse().ok()?,
                from: text()?.parse().ok()?,
                until: text()?.parse().ok()?,
            },
            "gave-up" => Record::GaveUp {
                who: text()?,
                mutex: text()?,
                fence: text()?.parse().ok()?,
                at: text()?.parse().ok()?,
            },
            "event" => Record::Event {
                who: text()?,
                acquired: text()?.parse().ok()?,
                fence: text()?.parse().ok()?,
                missed: text()?.parse().ok()?,
                at: text()?.parse().ok()?,
            },
            "acknowledged" => Record::Acknowledged {
                register: text()?,
                token: text()?.parse().ok()?,
            },
            "run" => Record::Run {
                mutex: text()?,
                who: text()?,
                fence: text()?.parse().ok()?,
                at: text()?.parse().ok()?,
            },
            "recorded" => Record::Recorded {
                mutex: text()?,
                fence: text()?.parse().ok()?,
                at: text()?.parse().ok()?,
            },
            "permits" => Record::Permits {
                who: text()?,
                semaphore: text()?,
                count: text()?.parse().ok()?,
                fence: text()?.parse().ok()?,
                from: text()?.parse().ok()?,
                until: text()?.parse().ok()?,
            },
            "gave-back" => Record::GavePermitsBack {
                semaphore: text()?,
                fence: text()?.parse().ok()?,
                at: text()?.parse().ok()?,
            },
            "killed" => Record::Killed {
                process: text()?,
                at: text()?.parse().ok()?,
            },
            "fault" => Record::Fault {
                kind: text()?,
                fence_only: text()?.parse().ok()?,
                mutex: Some(text()?).filter(|mutex| mutex != ALL),
                begin: text()?.parse().ok()?,
                end: text()?.parse().ok()?,
            },
            "healed" => Record::Healed {
                at: text()?.parse().ok()?,
            },
            _ => return None,
        };
        Some(record)
    }
}

/// A process's own file of facts. A line is in the kernel's hands once [`Journal::write`] returns, so
/// it outlives the process.
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

    /// Writes a remark down, which the checker does not read.
    pub fn remark(&self, text: &str) {
        self.line(&format!("# {} {}", now(), text.replace(['\n', '\r'], " ")));
    }

    fn line(&self, text: &str) {
        let line = format!("{text}\n");
        self.file
            .lock()
            .write_all(line.as_bytes())
            .expect("the journal can be written");
    }
}

/// All facts in the files of a folder. The last line of a file may be cut short.
pub fn read(folder: &Path) -> io::Result<Vec<Record>> {
    let mut records = Vec::new();
    let mut paths: Vec<_> = std::fs::read_dir(folder)?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<io::Result<_>>()?;
    paths.sort();
    for path in paths {
        if path.extension().is_none_or(|extension| extension != "log") {
            continue;
        }
        let text = String::from_utf8_lossy(&std::fs::read(&path)?).into_owned();
        let lines: Vec<&str> = text.split('\n').collect();
        for (number, line) in lines.iter().enumerate() {
            let last = number + 2 >= lines.len();
            match Record::from_line(line) {
                Some(record) => records.push(record),
                None if line.is_empty() || line.starts_with('#') || last => {}
                None => panic!("{}:{}: what is {line:?}?", path.display(), number + 1),
            }
        }
    }
    Ok(records)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_gives_its_record_back() {
        let records = [
            Record::Belief {
                who: "1.0/lead".into(),
                mutex: "m".into(),
                fence: u64::MAX,
                after: 1,
                from: 2,
                until: 3,
            },
            Record::Event {
                who: "1.0/lead".into(),
                acquired: true,
                fence: 7,
                missed: 0,
                at: 4,
            },
            Record::Fault {
                kind: "cut".into(),
                fence_only: false,
                mutex: None,
                begin: 1,
                end: 2,
            },
            Record::Fault {
                kind: "revoke".into(),
                fence_only: true,
                mutex: Some("m".into()),
                begin: 1,
                end: 2,
            },
            Record::Recorded {
                mutex: "m".into(),
                fence: 7,
                at: 4,
            },
            Record::Misbehaved {
                what: "did not stop".into(),
            },
        ];
        for record in records {
            assert_eq!(Record::from_line(&record.to_line()), Some(record));
        }
        assert_eq!(Record::from_line("belief a m 1 2"), None);
        assert_eq!(Record::from_line(""), None);
    }

    #[test]
    fn a_journal_that_was_cut_short_is_read_up_to_there() {
        let folder = testbed::TempDir::new();
        let journal = Journal::open(&folder.path().join("a.log")).unwrap();
        journal.remark("hello");
        journal.write(&Record::Healed { at: 5 });
        journal.file.lock().write_all(b"belief x").unwrap();
        assert_eq!(read(folder.path()).unwrap(), vec![Record::Healed { at: 5 }]);
    }
}
