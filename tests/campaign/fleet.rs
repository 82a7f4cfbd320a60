//! The processes of a campaign: started, killed, paused and stopped. On memory they are threads.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use parking_lot::Mutex;
use testbed::{FakeClock, Output, Process, wait_until};

use crate::campaign::Plan;
use crate::contender::{self, Assignment};
use crate::history::{Journal, Kind, Record, now};
use crate::register::RegisterServer;
use crate::stage::Stage;

/// How long a process may take to give everything back and end, on a machine with other things to do.
const STOPS_WITHIN: Duration = Duration::from_secs(45);

/// All processes.
pub struct Fleet<'a> {
    stage: &'a Stage,
    registers: &'a RegisterServer,
    folder: &'a Path,
    journal: &'a Journal,
    plan: &'a Plan,
    members: Vec<Mutex<Member>>,
}

#[derive(Default)]
struct Member {
    incarnation: u32,
    running: Option<Running>,
}

enum Running {
    Process {
        process: Process,
        /// Closed to ask it to stop.
        input: Option<std::process::ChildStdin>,
    },
    Threads {
        stop: Arc<AtomicBool>,
        thread: JoinHandle<()>,
    },
}

impl<'a> Fleet<'a> {
    /// Starts the processes of the plan.
    pub fn start(
        plan: &'a Plan,
        stage: &'a Stage,
        registers: &'a RegisterServer,
        folder: &'a Path,
        journal: &'a Journal,
    ) -> Fleet<'a> {
        let fleet = Fleet {
            stage,
            registers,
            folder,
            journal,
            plan,
            members: (0..plan.processes).map(|_| Mutex::default()).collect(),
        };
        (0..plan.processes).for_each(|number| fleet.launch(number));
        fleet
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Kills a process and starts another in its place after `down`. On memory, where nothing can be
    /// killed, it is stopped.
    pub fn kill(&self, number: usize, down: Duration) {
        let (name, running) = {
            let mut member = self.members[number].lock();
            (name(number, member.incarnation), member.running.take())
        };
        match running {
            Some(Running::Process { process, .. }) => {
                process.kill();
                let killed = Record::new(Kind::Killed, &name, "");
                self.journal.write(&killed.at(now()));
            }
            Some(running) => self.end(&name, running),
            None => {}
        }
        thread::sleep(down);
        self.members[number].lock().incarnation += 1;
        self.launch(number);
    }

    /// Stops a process for a while in the middle of whatever it does. Nothing on memory.
    pub fn pause(&self, number: usize, pause: Duration) {
        let member = self.members[number].lock();
        if let Some(Running::Process { process, .. }) = &member.running {
            process.pause();
            thread::sleep(pause);
            process.resume();
        }
    }

    /// Steps the wall clock that a process sees.
    pub fn step_clock(&self, number: usize, offset_s: i64) {
        self.clock(number).step(offset_s);
    }

    /// Asks all to stop and waits until they have; says so where one does not or fails.
    pub fn stop(&self) {
        let running: Vec<(String, Option<Running>)> = self
            .members
            .iter()
            .enumerate()
            .map(|(number, member)| {
                let mut member = member.lock();
                let mut running = member.running.take();
                if let Some(Running::Process { input, .. }) = &mut running {
                    *input = None;
                }
                if let Some(Running::Threads { stop, .. }) = &running {
                    stop.store(true, Ordering::SeqCst);
                }
                (name(number, member.incarnation), running)
            })
            .collect();
        for (name, running) in running {
            if let Some(running) = running {
                self.end(&name, running);
            }
        }
    }

    /// Waits for the end of one that is asked to stop.
    fn end(&self, name: &str, running: Running) {
        let misbehaved = |what: &str| self.journal.misbehaved(name, what);
        match running {
            Running::Process { process, mut input } => {
                drop(input.take());
                match process.wait(STOPS_WITHIN) {
                    Some(status) if status.success() => {}
                    Some(status) => misbehaved(&format!("ended with {status}")),
                    None => misbehaved(&format!("did not stop within {STOPS_WITHIN:?}")),
                }
            }
            Running::Threads { stop, thread } => {
                stop.store(true, Ordering::SeqCst);
                wait_until(STOPS_WITHIN, "the threads have stopped", || {
                    thread.is_finished()
                });
                if thread.join().is_err() {
                    misbehaved("panicked");
                }
            }
        }
    }

    fn clock(&self, number: usize) -> FakeClock {
        FakeClock::new(&self.folder.join(format!("{number}.clock")))
    }

    fn launch(&self, number: usize) {
        let mut member = self.members[number].lock();
        let process = name(number, member.incarnation);
        let seed = self.plan.seed.wrapping_mul(0x9e37_79b9);
        let assignment = Assignment {
            url: self.stage.url(number),
            journal: self.folder.join(format!("{process}.log")),
            register: self.registers.addr(),
            seed: seed.wrapping_add(number as u64 * 1_000 + u64::from(member.incarnation)),
            fixed_ids: number % 2 == 1,
            plant: self.plan.plant,
            process,
        };
        if let Some(factory) = self.stage.memory_factory(number) {
            let stop = Arc::new(AtomicBool::new(false));
            let stopped = Arc::clone(&stop);
            let thread = thread::spawn(move || {
                let journal = Journal::open(&assignment.journal).expect("a journal");
                contender::run(&assignment, &factory, &journal, &stopped);
            });
            member.running = Some(Running::Threads { stop, thread });
            return;
        }
        let mut command = Command::new(std::env::current_exe().expect("a test knows itself"));
        command
            .args(["--exact", "contender", "--ignored", "--nocapture"])
            .env(Assignment::VARIABLE, assignment.to_text())
            .env("RUST_BACKTRACE", "1");
        // The others see the true clock: steps move them apart.
        if number.is_multiple_of(2) {
            self.clock(number).show(&mut command);
        }
        let process = Process::spawn(&command, &Output::Pipe).expect("a process of contenders");
        // Read, so that it cannot block on a full pipe; the harness in it prints little.
        if let Some(mut output) = process.take_stdout() {
            thread::spawn(move || std::io::copy(&mut output, &mut std::io::sink()));
        }
        let input = process.take_stdin();
        member.running = Some(Running::Process { process, input });
    }
}

fn name(number: usize, incarnation: u32) -> String {
    format!("{number}.{incarnation}")
}
