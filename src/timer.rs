//! Runs tasks at their times, on as few threads as possible and as many as are blocked.

use std::collections::{BTreeSet, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use crate::clock::Moment;
use crate::error::Result;
use crate::parker::SLICE;
use crate::thread::{self, Thread};
use crate::virtual_time::Condvar;

/// How many tasks may block before others wait for them.
const MOST_THREADS: usize = 64;

/// How many threads stay when there is nothing to do: one at work, one that watches the rest.
const STAY: usize = 2;

/// Something to do again and again.
pub(crate) trait Task: Send + Sync {
    /// Does it, and says when to do it again; `None` for never.
    fn run(&self) -> Option<Next>;

    /// A run panicked; it was the last one.
    fn panicked(&self);
}

/// When a task runs next.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Next {
    /// Not before this.
    pub(crate) at: Moment,
    /// What it keeps alive ends here. Of tasks that are due, the earliest end goes first: where many calls hang, a
    /// short lease does not wait behind long ones.
    pub(crate) ends: Moment,
}

impl Next {
    /// At `at`, which is also the end of what it keeps alive.
    pub(crate) fn at(at: Moment) -> Next {
        Next { at, ends: at }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct TaskId(u64);

pub(crate) struct Timer {
    inner: Arc<Inner>,
    /// How long dropping waits for what runs.
    request_limit: Duration,
}

#[derive(Default)]
struct Inner {
    list: Mutex<List>,
    changed: Condvar,
}

#[derive(Default)]
struct List {
    tasks: HashMap<TaskId, Entry>,
    /// Tasks whose time has not come, by time.
    waiting: BTreeSet<(Moment, TaskId)>,
    /// Tasks that are due and do not run yet, by the end of what they keep alive.
    due: BTreeSet<(Moment, TaskId)>,
    next: u64,
    threads: Vec<Thread>,
    /// Threads that wait, and until when the first of them does.
    idle: usize,
    wake_at: Option<Moment>,
    closed: bool,
}

struct Entry {
    task: Arc<dyn Task>,
    next: Next,
}

impl Timer {
    pub(crate) fn new(request_limit: Duration) -> Timer {
        Timer {
            inner: Arc::default(),
            request_limit,
        }
    }

    /// Runs `task` for the first time when `next` says.
    ///
    /// # Errors
    /// `Unavailable` if the system allows no more threads.
    pub(crate) fn add(&self, task: Arc<dyn Task>, next: Next) -> Result<TaskId> {
        let mut list = self.inner.list.lock();
        if list.threads.is_empty() {
            self.inner.start(&mut list)?;
        }
        let id = TaskId(list.next);
        list.next += 1;
        list.tasks.insert(id, Entry { task, next });
        self.inner.queue(&mut list, id, next);
        Ok(id)
    }

    /// Ends a task; a run that is under way goes on to its end.
    pub(crate) fn remove(&self, id: TaskId) {
        let mut list = self.inner.list.lock();
        if let Some(entry) = list.tasks.remove(&id) {
            list.waiting.remove(&(entry.next.at, id));
            list.due.remove(&(entry.next.ends, id));
        }
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        let threads = {
            let mut list = self.inner.list.lock();
            list.closed = true;
            std::mem::take(&mut list.threads)
        };
        self.inner.changed.notify_all();
        let by = Moment::now() + self.request_limit;
        for mut thread in threads {
            // One that is in a call ends with it.
            thread.join(by);
        }
    }
}

impl Inner {
    fn queue(&self, list: &mut List, id: TaskId, next: Next) {
        list.waiting.insert((next.at, id));
        if let Some(entry) = list.tasks.get_mut(&id) {
            entry.next = next;
        }
        // A lock that is released before its first renewal wakes no thread.
        if list.wake_at.is_some_and(|wake_at| next.at < wake_at) {
            list.wake_at = Some(next.at);
            self.changed.notify_all();
        }
    }

    fn start(self: &Arc<Inner>, list: &mut List) -> Result<()> {
        let inner = Arc::clone(self);
        list.threads.retain(|thread| !thread.is_over());
        if list.threads.len() < MOST_THREADS {
            let thread = thread::start("contend-timer", move || inner.work())?;
            list.threads.push(thread);
        }
        Ok(())
    }

    fn work(self: &Arc<Inner>) {
        let mut list = self.list.lock();
        while !list.closed {
            list.collect_due(Moment::now());
            match list.due.pop_first() {
                Some((_, id)) => {
                    if let Some(task) = list.tasks.get(&id).map(|it| Arc::clone(&it.task)) {
                        list = self.run(list, id, task);
                    }
                }
                None if list.idle >= STAY => return,
                None => {
                    let until = list.waiting.first().map_or(Moment::FAR, |(at, _)| *at);
                    list.idle += 1;
                    list.wake_at = Some(until);
                    self.changed
                        .wait_for(&mut list, until.remaining().min(SLICE));
                    list.idle -= 1;
                    list.wake_at = list.wake_at.filter(|_| list.idle > 0);
                }
            }
        }
    }

    fn run<'a>(
        self: &'a Arc<Inner>,
        mut list: MutexGuard<'a, List>,
        id: TaskId,
        task: Arc<dyn Task>,
    ) -> MutexGuard<'a, List> {
        if list.idle == 0
            && let Err(error) = self.start(&mut list)
        {
            log::debug!("no thread watches the other tasks meanwhile: {error}");
        }
        drop(list);
        let next = catch_unwind(AssertUnwindSafe(|| task.run())).unwrap_or_else(|_| {
            log::error!("a task panicked");
            task.panicked();
            None
        });
        let mut list = self.list.lock();
        let over = match next {
            Some(next) if list.tasks.contains_key(&id) => {
                self.queue(&mut list, id, next);
                None
            }
            _ => list.tasks.remove(&id),
        };
        // A task may be the last owner of the timer, whose drop locks the list.
        MutexGuard::unlocked(&mut list, || drop((over, task)));
        list
    }
}

impl List {
    fn collect_due(&mut self, now: Moment) {
        while let Some((at, id)) = self.waiting.first().copied()
            && at <= now
        {
            self.waiting.pop_first();
            if let Some(entry) = self.tasks.get(&id) {
                self.due.insert((entry.next.ends, id));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Owns the timer that runs it, as a task owns its factory.
    struct Owner {
        _timer: Arc<Timer>,
        ran: crossbeam_channel::Sender<()>,
    }

    impl Task for Owner {
        fn run(&self) -> Option<Next> {
            let _ = self.ran.send(());
            None
        }

        fn panicked(&self) {}
    }

    #[test]
    fn last_task_drops_its_timer() {
        let timer = Arc::new(Timer::new(Duration::from_secs(1)));
        let inner = Arc::downgrade(&timer.inner);
        let (ran, runs) = crossbeam_channel::unbounded();
        let owner = Arc::new(Owner {
            _timer: Arc::clone(&timer),
            ran,
        });
        let soon = Next::at(Moment::now() + Duration::from_millis(20));
        timer.add(owner, soon).unwrap();
        drop(timer);
        runs.recv_timeout(Duration::from_secs(60)).unwrap();
        let limit = Moment::now() + Duration::from_secs(60);
        while inner.strong_count() > 0 {
            assert!(Moment::now() < limit, "its threads have not ended");
            std::thread::yield_now();
        }
    }
}
