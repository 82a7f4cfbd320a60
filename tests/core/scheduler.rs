//! What a scheduler does with work that is slow, stuck or calls back.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::conformance::hooked::{self, Call, Switch, When};
use crate::conformance::{HANG, PATIENCE, memory, ms};
use contend::{
    Context, Error, ErrorKind, Probe, RunOutcomeKind, Schedule, Scheduler, SchedulerBuilder, Status,
};
use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use parking_lot::Mutex;
use testbed::{wait_until, within};

/// The period of a schedule whose second run never comes.
const HOUR: Duration = Duration::from_secs(3600);

/// Starts work that tells what it finds.
fn telling<T: Send + 'static>(
    builder: SchedulerBuilder,
    schedule: Schedule,
    mut find: impl FnMut(&Context) -> T + Send + 'static,
) -> (Scheduler, Receiver<T>) {
    let (sender, found) = unbounded();
    let work = move |context: &Context| {
        let _ = sender.send(find(context));
    };
    (builder.start(schedule, work).unwrap(), found)
}

/// Starts work that tells its fence and goes on until the sender is dropped.
fn stuck(builder: SchedulerBuilder) -> (Scheduler, Receiver<u64>, Sender<()>) {
    let (sender, begun) = unbounded();
    let (let_go, held) = bounded::<()>(0);
    let scheduler = builder.start(Schedule::every(ms(5)), move |context| {
        sender.send(context.fence()).unwrap();
        let _ = held.recv();
    });
    (scheduler.unwrap(), begun, let_go)
}

fn next<T>(found: &Receiver<T>) -> T {
    found.recv_timeout(PATIENCE).unwrap()
}

fn count(calls: &Mutex<Vec<Call>>, call: Call) -> usize {
    calls.lock().iter().filter(|made| **made == call).count()
}

fn fails<T>() -> Result<T, Error> {
    Err(Error::new(ErrorKind::Unavailable, "on request"))
}

/// A bound makes stop return; the lease is not released while the work runs, nor renewed.
#[test]
fn stop_gives_up_on_stuck_work() {
    within(HANG, || {
        let memory = memory(1_000, 1_000);
        let started = Instant::now();
        let (scheduler, begun, let_go) = stuck(memory.scheduler("m").stop_within(ms(100)));
        let fence = next(&begun);
        let error = scheduler.stop().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout);
        let says = "the scheduled work still runs";
        assert!(error.to_string().contains(says), "{error}");
        wait_until(PATIENCE, "it has stepped down", || !scheduler.is_leader());
        let refused = scheduler.start().unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidState);

        // The next one leads when the lease has run out: it was not released.
        let locker = memory.locker("m").ttl(ms(20_000)).build().unwrap();
        let guard = locker.try_lock_for(PATIENCE).unwrap();
        assert!(guard.fence() > fence);
        let took = started.elapsed();
        assert!(took >= memory.lease().total(), "{took:?}");

        drop(let_go);
        wait_until(PATIENCE, "its threads have ended", || {
            scheduler.status() == Status::Initial
        });
        // What is released now, if anything, is a lease that is gone: it touches no later one.
        assert!(guard.is_valid());
        guard.unlock().unwrap();
        scheduler.start().unwrap();
        assert!(next(&begun) > fence);
        scheduler.stop().unwrap();
    });
}

/// Stuck work that ends in time lets the next leader in at once.
#[test]
fn late_end_of_work_releases() {
    within(HANG, || {
        let factory = memory(20_000, 20_000);
        let (scheduler, begun, let_go) = stuck(factory.scheduler("m").stop_within(ms(50)));
        next(&begun);
        scheduler.stop().unwrap_err();
        let locker = factory.locker("m").build().unwrap();
        locker.try_lock().unwrap_err();
        drop(let_go);
        let began = Instant::now();
        drop(locker.try_lock_for(PATIENCE).unwrap());
        assert!(began.elapsed() < ms(15_000), "{:?}", began.elapsed());
        scheduler.stop().unwrap();
    });
}

/// The same after a loss: what is left of the lease is the work's time to stop in.
#[test]
fn stop_after_loss_spares_running_work() {
    within(HANG, || {
        let memory = memory(2_000, 60_000);
        let (broken, released) = <(Switch, Arc<AtomicUsize>)>::default();
        let (is_broken, counted) = (broken.clone(), Arc::clone(&released));
        let factory = hooked::around(&memory, move |when, call, _, _| {
            if when == When::After && call == Call::Release {
                counted.fetch_add(1, Ordering::SeqCst);
            }
            match call {
                Call::Renew | Call::Acquire(_) if is_broken.is_on() => fails(),
                _ => Ok(()),
            }
        });
        let (scheduler, begun, let_go) = stuck(factory.scheduler("m").stop_within(ms(300)));
        next(&begun);
        broken.on();
        wait_until(PATIENCE, "leadership is lost", || !scheduler.is_leader());
        scheduler.stop().unwrap_err();
        // A release would be sent by now.
        thread::sleep(ms(300));
        assert_eq!(released.load(Ordering::SeqCst), 0);
        let locker = memory.locker("m").build().unwrap();
        assert_eq!(locker.try_lock().unwrap_err().kind(), ErrorKind::Held);
        // The release adopts what the failed attempts may have left.
        broken.off();
        drop(let_go);
        scheduler.stop().unwrap();
        assert_eq!(released.load(Ordering::SeqCst), 1);
        drop(locker.try_lock().unwrap());
    });
}

#[test]
fn stop_inside_work_takes_effect_after_it() {
    within(HANG, || {
        let factory = memory(10_000, 6_000);
        let slot: Arc<Mutex<Option<Arc<Scheduler>>>> = Arc::default();
        let own = Arc::clone(&slot);
        let (sender, stopped) = unbounded();
        let work = move |context: &Context| {
            let scheduler = own.lock().take().expect("a second run");
            let is_ok = scheduler.stop().is_ok();
            sender.send((is_ok, context.is_cancelled(), context.is_leader()))
        };
        let scheduler = factory.scheduler("m");
        let scheduler = scheduler.build(Schedule::with_delay(ms(5)), work).unwrap();
        let scheduler = Arc::new(scheduler);
        *slot.lock() = Some(Arc::clone(&scheduler));
        scheduler.start().unwrap();
        assert_eq!(next(&stopped), (true, true, true));
        wait_until(PATIENCE, "it has stopped", || {
            scheduler.status() == Status::Initial
        });
        drop(factory.locker("m").build().unwrap().try_lock().unwrap());
    });
}

#[test]
fn fixed_delay_rests_between_runs() {
    within(HANG, || {
        let factory = memory(10_000, 6_000);
        let started = Instant::now();
        let schedule = Schedule::with_delay(ms(100)).initial_delay(ms(200));
        let (scheduler, begun) = telling(factory.scheduler("m"), schedule, |_| {
            let began = Instant::now();
            // A delay counts from the end of a run.
            thread::sleep(ms(50));
            began
        });
        let times: Vec<Instant> = (0..4).map(|_| next(&begun)).collect();
        assert!(times[0] - started >= ms(200));
        assert!(times.windows(2).all(|pair| pair[1] - pair[0] >= ms(150)));
        scheduler.stop().unwrap();
    });
}

/// Nor does a drop wait for the next run.
#[test]
fn drop_stops() {
    within(HANG, || {
        let factory = memory(10_000, 6_000);
        let kept = Arc::new(());
        let own = Arc::clone(&kept);
        let work = move |_: &Context| drop(Arc::clone(&own));
        let (scheduler, runs) = telling(factory.scheduler("m"), Schedule::every(HOUR), work);
        next(&runs);
        drop(scheduler);
        assert_eq!(Arc::strong_count(&kept), 1, "the work is gone too");
        drop(factory.locker("m").build().unwrap().try_lock().unwrap());
    });
}

#[test]
fn mistakes_are_refused() {
    let factory = memory(10_000, 6_000);
    for (mutex, period) in [("m", ms(0)), ("{m}", HOUR)] {
        let schedule = Schedule::every(period);
        let refused = factory.scheduler(mutex).build(schedule, |_| {});
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::InvalidInput);
    }
}

/// One write per run where the period is worth it, none below a second; and one question per leadership.
#[test]
fn run_is_recorded_once() {
    within(HANG, || {
        let memory = memory(10_000, 6_000);
        for (schedule, recorded) in [
            (Schedule::every(ms(1_000)), true),
            (Schedule::with_delay(ms(1_000)), true),
            (Schedule::every(ms(100)), false),
        ] {
            let (factory, calls) = hooked::counting(&memory);
            let (scheduler, runs) = telling(factory.scheduler("m"), schedule, |_| {});
            (0..3).for_each(|_| next(&runs));
            scheduler.stop().unwrap();
            let expected = if recorded { 3 + runs.len() } else { 0 };
            assert_eq!(count(&calls, Call::RecordRun), expected);
            assert_eq!(count(&calls, Call::LastRun), usize::from(recorded));
        }
    });
}

/// A write that fails costs the record, not the run.
#[test]
fn unrecorded_work_runs() {
    within(HANG, || {
        let memory = memory(10_000, 6_000);
        let factory = hooked::around(&memory, |when, call, _, _| match (when, call) {
            (When::Before, Call::RecordRun) => fails(),
            _ => Ok(()),
        });
        let schedule = Schedule::every(ms(1_000));
        let (scheduler, runs) = telling(factory.scheduler("m"), schedule, |_| Instant::now());
        let (first, second) = (next(&runs), next(&runs));
        // The work may begin late, by what a busy machine adds; unrecorded, it would run again at once.
        assert!(second - first >= ms(500), "{:?}", second - first);
        scheduler.stop().unwrap();
    });
}

/// Without an answer a run might have been a moment ago: nothing begins before the backend answers.
#[test]
fn leader_asks_again_for_the_last_run() {
    within(HANG, || {
        let memory = memory(10_000, 6_000);
        let asked = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&asked);
        let factory = hooked::around(&memory, move |when, call, _, _| match (when, call) {
            (When::Before, Call::LastRun) if counted.fetch_add(1, Ordering::SeqCst) < 2 => fails(),
            _ => Ok(()),
        });
        let look = move |_: &Context| asked.load(Ordering::SeqCst);
        let (scheduler, runs) = telling(factory.scheduler("m"), Schedule::every(HOUR), look);
        assert_eq!(next(&runs), 3);
        scheduler.stop().unwrap();
    });
}

/// The backend's word that the leadership is over comes with the record: nothing runs in it.
#[test]
fn refused_record_begins_no_run() {
    within(HANG, || {
        let memory = memory(10_000, 6_000);
        let once = Switch::default();
        once.on();
        let (sender, revoked) = unbounded();
        let looks = memory.clone();
        let factory = hooked::around(&memory, move |when, call, _, _| {
            if (when, call) == (When::Before, Call::RecordRun) && once.take() {
                let fence = looks.owner("m")?.fence();
                assert!(looks.revoke("m", fence)?);
                sender.send(fence).unwrap();
            }
            Ok(())
        });
        let schedule = Schedule::every(ms(1_000));
        let (scheduler, runs) = telling(factory.scheduler("m"), schedule, Context::fence);
        let (over, fence) = (next(&revoked), next(&runs));
        assert!(fence > over, "a run with the fence {over}, which is over");
        scheduler.stop().unwrap();
    });
}

/// Belief ends on the local boot-time clock, for work too: the service's worker hangs in a call, so that nothing
/// says that the leadership is over, and still nothing begins after its deadline.
#[test]
fn nothing_begins_after_the_deadline() {
    within(HANG, || {
        let memory = memory(500, 500);
        let hang = Switch::default();
        let hangs = hang.clone();
        let (says, hung) = unbounded();
        let factory = hooked::around(&memory, move |when, call, _, _| {
            let renews = (when, call) == (When::Before, Call::Renew);
            if renews && hangs.take() {
                let began = Instant::now();
                // Twice the lease.
                thread::sleep(ms(2_000));
                says.send((began, Instant::now())).unwrap();
            }
            Ok(())
        });
        let schedule = Schedule::every(ms(5));
        let (scheduler, runs) = telling(factory.scheduler("m"), schedule, |_| Instant::now());
        next(&runs);
        hang.on();
        let (began, ended) = next(&hung);
        let hung = began + memory.lease().ttl()..ended;
        let late = runs.try_iter().filter(|begun| hung.contains(begun));
        assert_eq!(late.count(), 0, "runs that began after the deadline");
        wait_until(PATIENCE, "it leads and works again", || !runs.is_empty());
        scheduler.stop().unwrap();
    });
}

/// A run that is not made is not recorded: the next leader would take it for made. The service's worker hangs
/// in a call, so that nothing says that the leadership is over when the run comes due.
#[test]
fn run_after_deadline_is_not_recorded() {
    within(HANG, || {
        let (period, memory) = (ms(1_000), memory(400, 20_000));
        let hang = Switch::default();
        let hangs = hang.clone();
        let (says, hung) = unbounded();
        let (let_go, goes_on) = unbounded::<()>();
        let (sends, calls) = unbounded();
        let factory = hooked::around(&memory, move |when, call, _, _| {
            if when == When::Before && call == Call::Renew && hangs.take() {
                says.send(()).unwrap();
                let _ = goes_on.recv();
            } else if when == When::Before {
                let _ = sends.send(call);
            }
            Ok(())
        });
        let schedule = Schedule::every(period);
        let (scheduler, runs) = telling(factory.scheduler("m"), schedule, |_| Instant::now());
        let first = next(&runs);
        hang.on();
        next(&hung);
        calls.try_iter().for_each(drop);
        // Long enough for belief to end, and for the next run to come due after that.
        let due = first + period + ms(300);
        assert!(runs.recv_deadline(due).is_err(), "a run without belief");
        drop(let_go);
        let mut before = Vec::new();
        while !matches!(before.last(), Some(Call::Acquire(_))) {
            before.push(next(&calls));
        }
        assert!(!before.contains(&Call::RecordRun), "{before:?}");
        // Led again, the run that came due is made, and recorded then.
        next(&runs);
        scheduler.stop().unwrap();
    });
}

/// Each kind of outcome, with what came with it, in the hook and in the probe.
#[test]
fn every_outcome_is_reported() {
    use RunOutcomeKind::{Cancelled, Failed, Lost, Ok as Done, Panicked};
    struct Kinds(Sender<RunOutcomeKind>);
    impl Probe for Kinds {
        fn scheduled_run(&self, _: &str, kind: RunOutcomeKind, _: Duration, took: Duration) {
            assert!(took >= ms(10));
            self.0.send(kind).unwrap();
        }
    }
    within(HANG, || {
        let (sender, probed) = unbounded();
        let factory = memory(10_000, 6_000).with_probe(Arc::new(Kinds(sender)));
        let (tell, reports) = unbounded();
        let builder = factory.scheduler("m").on_outcome(move |report| {
            let error = report.error.as_ref().map(ToString::to_string);
            tell.send((report.kind, error)).unwrap();
            panic!("a hook that panics is called again");
        });
        let (begin, begun) = unbounded();
        let mut number = 0;
        let work = move |context: &Context| {
            // The probe hears how long a run took.
            thread::sleep(ms(10));
            number += 1;
            match number {
                1 => return Ok(()),
                2 => return Err("it failed"),
                3 => panic!("on purpose"),
                _ => begin.send(context.fence()).unwrap(),
            }
            // The channel alone tells.
            let _ = context.cancelled().recv();
            assert!(context.is_cancelled());
            Ok(())
        };
        let scheduler = builder.start(Schedule::every(ms(5)), work).unwrap();
        assert_eq!(next(&reports), (Done, None));
        assert_eq!(next(&reports), (Failed, Some("it failed".to_owned())));
        assert_eq!(next(&reports), (Panicked, Some("on purpose".to_owned())));
        assert!(factory.revoke("m", next(&begun)).unwrap());
        assert_eq!(next(&reports), (Lost, None));
        next(&begun);
        scheduler.stop().unwrap();
        assert_eq!(next(&reports), (Cancelled, None));
        assert!(reports.is_empty());
        let kinds: Vec<RunOutcomeKind> = probed.try_iter().collect();
        assert_eq!(kinds, [Done, Failed, Panicked, Lost, Cancelled]);
    });
}

#[test]
fn requested_run_changes_no_other() {
    within(HANG, || {
        let (factory, calls) = hooked::counting(&memory(10_000, 6_000));
        let (sender, runs) = unbounded();
        let look = move |context: &Context| sender.send((context.due(), context.late()));
        let scheduler = factory.scheduler("m");
        let scheduler = scheduler.build(Schedule::every(HOUR), look).unwrap();
        assert!(!scheduler.run_now() && scheduler.next_run().is_none());
        scheduler.start().unwrap();
        let (due, late) = next(&runs);
        let due = due.unwrap();
        let off = due.elapsed().unwrap_or_else(|before| before.duration());
        assert!(off < PATIENCE && late < PATIENCE);
        let in_an_hour = due + HOUR - ms(1_000);
        wait_until(PATIENCE, "the next one is known", || {
            scheduler.next_run().is_some_and(|next| next > in_an_hour)
        });
        let known = scheduler.next_run().unwrap();
        for _ in 0..3 {
            assert!(scheduler.run_now());
            assert_eq!(next(&runs), (None, ms(0)));
        }
        let moved = scheduler.next_run().unwrap().duration_since(known);
        let moved = moved.unwrap_or_else(|before| before.duration());
        assert!(moved < ms(500), "by {moved:?}");
        scheduler.stop().unwrap();
        assert_eq!(count(&calls, Call::RecordRun), 1);
    });
}

/// Whichever call panics, the schedule goes on.
#[test]
fn backend_panic_does_not_end_a_schedule() {
    within(HANG, || {
        let memory = memory(600, 300);
        let panicked = Arc::new(Mutex::new(Vec::new()));
        let noted = Arc::clone(&panicked);
        let factory = hooked::around(&memory, move |when, call, _, _| {
            let panics = matches!(call, Call::LastRun | Call::RecordRun | Call::Renew);
            if when == When::Before && panics && !noted.lock().contains(&call) {
                noted.lock().push(call);
                panic!("on purpose");
            }
            Ok(())
        });
        let schedule = Schedule::every(ms(1_000));
        let (scheduler, runs) = telling(factory.scheduler("m"), schedule, |_| {});
        wait_until(PATIENCE, "each has panicked", || panicked.lock().len() == 3);
        (0..runs.len() + 2).for_each(|_| next(&runs));
        scheduler.stop().unwrap();
    });
}
