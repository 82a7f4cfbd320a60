//! What is logged: a process has one logger.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

use contend::backend::OnRefusal;
use contend::{Error, ErrorKind, Lease};
use parking_lot::Mutex;
use testbed::wait_until;

use crate::conformance::hooked::{Call, When, around, as_another_process};
use crate::conformance::{PATIENCE, closed, elsewhere};

static LINES: Mutex<Vec<(log::Level, String)>> = Mutex::new(Vec::new());

/// Keeps what is logged, up to the level that is set.
struct Lines;

impl log::Log for Lines {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            LINES
                .lock()
                .push((record.level(), record.args().to_string()));
        }
    }

    fn flush(&self) {}
}

alone! {
    /// Where no renewal came to notice it, a lock that was taken away under its own id was lost without a word.
    fn a_lock_that_was_taken_away_under_its_own_id_is_warned_of() {
        log::set_logger(&Lines).unwrap();
        log::set_max_level(log::LevelFilter::Warn);
        let here = contend::memory::factory("warnings", Lease::default());
        let there = as_another_process(&here);
        let ours = here.locker("m").id("host-1").build().unwrap();
        let theirs = there.locker("m").id("host-1").build().unwrap();
        let guard = ours.lock().unwrap();
        let fence = guard.fence();
        let _taken = elsewhere(|| theirs.lock().unwrap());
        assert_eq!(guard.unlock().unwrap_err().kind(), ErrorKind::Lost);
        let lines = LINES.lock();
        let told = format!("m: host-1: fence {fence} was taken away before it was released");
        let told: Vec<_> = lines.iter().filter(|line| line.1.starts_with(&told)).collect();
        assert_eq!(told.len(), 1, "{lines:?}");
        // After a failover neither another process nor an operator had done it.
        assert!(told[0].1.contains("a failover may have lost it"), "{lines:?}");
    }

    /// Nothing had reached the server, and the log said "released": whoever waited for the next leader at once waited
    /// for a whole lease.
    fn what_a_stop_could_not_release_is_not_said_to_be_released() {
        log::set_logger(&Lines).unwrap();
        log::set_max_level(log::LevelFilter::Info);
        let broken = Arc::new(AtomicBool::new(false));
        let is_broken = Arc::clone(&broken);
        let memory = contend::memory::factory("unreleased", Lease::default());
        let factory = around(&memory, move |_, _, _, _| {
            let error = Error::new(ErrorKind::Unreachable, "broken on request");
            if is_broken.load(SeqCst) { Err(error) } else { Ok(()) }
        });
        let service = factory.contend("m").id("a").build().unwrap();
        service.start().unwrap();
        wait_until(PATIENCE, "it leads", || service.is_owner());
        let fence = service.fence().unwrap();
        broken.store(true, SeqCst);
        service.stop().unwrap();
        {
            let lines = LINES.lock();
            let told = format!("m: a: fence {fence} is not released yet, which is left to the background: broken on request");
            let is_told = |line: &&(log::Level, String)| line.0 == log::Level::Warn && line.1 == told;
            assert_eq!(lines.iter().filter(is_told).count(), 1, "{lines:?}");
            let mut texts = lines.iter().map(|(_, text)| text);
            assert!(!texts.any(|text| text.contains("a released")), "{lines:?}");
        }
        broken.store(false, SeqCst);
        // One that could release says nothing of the kind.
        let service = factory.contend("other").id("a").build().unwrap();
        service.start().unwrap();
        wait_until(PATIENCE, "it leads", || service.is_owner());
        service.stop().unwrap();
        let lines = LINES.lock();
        let mut others = lines.iter().filter(|(_, text)| text.starts_with("other"));
        assert!(others.all(|(level, _)| *level == log::Level::Info), "{lines:?}");
    }

    /// A service that found the lease of a killed process seemed to do nothing for as long as that lasted.
    fn a_service_says_for_whom_it_waits_and_how_long() {
        log::set_logger(&Lines).unwrap();
        log::set_max_level(log::LevelFilter::Info);
        let factory = contend::memory::factory("waits", Lease::default());
        let count = |text: &str| LINES.lock().iter().filter(|line| line.1.contains(text)).count();
        let [first, second] = ["a", "b"].map(|id| factory.contend("m").id(id).build().unwrap());
        first.start().unwrap();
        wait_until(PATIENCE, "it leads", || first.is_owner());
        let told = format!(
            "m: b waits; owned by \"a\", fence {}, whose lease ends in 1",
            first.fence().unwrap()
        );
        second.start().unwrap();
        wait_until(PATIENCE, "it waits", || count(&told) == 1);
        // Once for each wait.
        first.stop().unwrap();
        wait_until(PATIENCE, "it leads", || second.is_owner());
        assert_eq!(count("m: b waits"), 1, "{:?}", LINES.lock());
        first.start().unwrap();
        wait_until(PATIENCE, "it waits", || count("m: a waits; owned by \"b\"") == 1);
        // Lockers wait often, and say nothing.
        let error = factory.locker("m").id("c").build().unwrap().try_lock().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Held);
        assert_eq!(count("m: c"), 0);
    }

    /// What an attempt of unknown outcome may have left is looked for with another one, which may be refused.
    fn a_service_that_is_stopped_in_doubt_does_not_say_that_it_waits() {
        log::set_logger(&Lines).unwrap();
        log::set_max_level(log::LevelFilter::Debug);
        let memory = contend::memory::factory("in-doubt", Lease::default());
        let other = memory.locker("m").id("b").build().unwrap();
        let _held = elsewhere(|| other.lock().unwrap());
        let factory = around(&memory, |_, call, _, _| match call {
            Call::Acquire(OnRefusal::Enqueue) => Err(Error::new(ErrorKind::Timeout, "no answer")),
            _ => Ok(()),
        });
        let service = factory.contend("m").id("a").build().unwrap();
        service.start().unwrap();
        wait_until(PATIENCE, "it is in doubt", || service.stats().failed_attempts > 0);
        let before = service.stats().attempts;
        service.stop().unwrap();
        assert!(service.stats().attempts > before, "nothing was looked for");
        // Nor does a locker that does not wait, at any level.
        let error = factory.locker("m").id("c").build().unwrap().try_lock().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Held);
        let lines = LINES.lock();
        assert!(!lines.iter().any(|(_, text)| text.contains("waits")), "{lines:?}");
    }

    /// Whoever holds a lock is woken by nobody, and needs not be.
    fn a_lock_that_is_granted_ends_the_trouble_although_its_locker_could_not_subscribe() {
        log::set_logger(&Lines).unwrap();
        log::set_max_level(log::LevelFilter::Info);
        let memory = contend::memory::factory("deaf", Lease::default());
        let failures = AtomicUsize::new(0);
        let factory = around(&memory, move |when, call, _, _| match call {
            Call::Listen => Err(Error::new(ErrorKind::Unreachable, "no subscriber")),
            Call::Acquire(_) if when == When::Before && failures.fetch_add(1, SeqCst) < 2 => {
                Err(Error::new(ErrorKind::Unreachable, "refused"))
            }
            _ => Ok(()),
        });
        let locker = factory.locker("m").id("a").build().unwrap();
        locker.lock().unwrap().unlock().unwrap();
        let lines = LINES.lock();
        let count = |text: &str| lines.iter().filter(|line| line.1.contains(text)).count();
        assert_eq!(count("trying again"), 1, "{lines:?}");
        assert_eq!(count("m: a: the backend answers again"), 1, "{lines:?}");
    }

    /// A `lock()` gives up on what a retry cannot fix, and said "trying again".
    fn a_lock_that_gives_up_returns_its_error_and_logs_nothing() {
        log::set_logger(&Lines).unwrap();
        log::set_max_level(log::LevelFilter::Info);
        let memory = contend::memory::factory("gives-up", Lease::default());
        let factory = around(&memory, |_, call, _, _| match call {
            Call::Acquire(_) => Err(Error::new(ErrorKind::Denied, "no such user")),
            _ => Ok(()),
        });
        let error = factory.locker("m").id("a").build().unwrap().lock().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied);
        assert!(LINES.lock().is_empty(), "{:?}", LINES.lock());
        // A service goes on, and says so.
        let service = factory.contend("m").id("b").build().unwrap();
        service.start().unwrap();
        wait_until(PATIENCE, "it is said", || {
            LINES.lock().iter().any(|(_, text)| text == "m: b: no such user; trying again")
        });
        service.stop().unwrap();
    }

    /// A release that was left to the session found nothing to do the second time, and that counted as an answer.
    fn a_release_that_asks_nothing_does_not_end_an_outage() {
        log::set_logger(&Lines).unwrap();
        log::set_max_level(log::LevelFilter::Info);
        let server = testbed::ZooKeeperServer::start();
        let factory = contend::connect(&format!("{}?ttl=4s&transition=2s", server.url())).unwrap();
        let service = factory.contend("led").id("a").build().unwrap();
        service.start().unwrap();
        wait_until(PATIENCE, "it leads", || service.is_owner());
        let locker = factory.locker("locked").id("a").build().unwrap();
        let guard = locker.lock().unwrap();
        server.pause();
        closed(&guard.lost());
        drop(guard);
        service.stop().unwrap();
        // For as long as the background goes on trying.
        thread::sleep(Duration::from_secs(7));
        let lines = LINES.lock();
        assert!(!lines.iter().any(|(_, text)| text.contains("answers again")), "{lines:?}");
        server.resume();
    }

    /// Rule "one id, one contender": it was told when the guard ended, hours later maybe, and not when it was met.
    fn a_locker_that_meets_its_double_says_so_while_its_guard_lives() {
        log::set_logger(&Lines).unwrap();
        log::set_max_level(log::LevelFilter::Warn);
        let lease = Lease::new(Duration::from_secs(2), Duration::from_secs(1)).unwrap();
        let here = contend::memory::factory("doubles", lease);
        let there = as_another_process(&here);
        let ours = here.locker("m").id("host-1").build().unwrap();
        let theirs = there.locker("m").id("host-1").build().unwrap();
        let guard = ours.lock().unwrap();
        // Later than a repeated request of our own could be.
        thread::sleep(lease.call_budget() + Duration::from_millis(50));
        let _taken = elsewhere(|| theirs.lock().unwrap());
        closed(&guard.lost());
        let told = "m: another process contends as \"host-1\" too";
        wait_until(PATIENCE, "it is told", || {
            LINES.lock().iter().any(|(_, text)| text.starts_with(told))
        });
        drop(guard);
    }

    /// The log said that the backend had trouble, and not that it was over, where the next call returned its errors.
    fn trouble_that_was_logged_is_logged_as_over_by_the_first_call_that_is_answered() {
        log::set_logger(&Lines).unwrap();
        log::set_max_level(log::LevelFilter::Info);
        let lease = Lease::new(Duration::from_millis(400), Duration::from_millis(200)).unwrap();
        let factory = contend::memory::factory("over", lease);
        let handle = contend::memory::handle("over");
        let count = |text: &str| LINES.lock().iter().filter(|line| line.1.contains(text)).count();
        let lost = |mutex: &str| {
            let locker = factory.locker(mutex).id("a").build().unwrap();
            let guard = locker.lock().unwrap();
            handle.set_unreachable(true);
            closed(&guard.lost());
            assert_eq!(count(&format!("{mutex}: a: ")), 1, "{:?}", LINES.lock());
            (locker, guard)
        };
        let is_over = |mutex: &str| count(&format!("{mutex}: a: the backend answers again")) == 1;

        // By the clean-up of a guard that ends after the outage, or in it.
        let (_locker, guard) = lost("after");
        handle.set_unreachable(false);
        assert!(!is_over("after"), "nothing was asked");
        drop(guard);
        wait_until(PATIENCE, "it is over", || is_over("after"));
        let (_locker, guard) = lost("within");
        drop(guard);
        handle.set_unreachable(false);
        wait_until(PATIENCE, "it is over", || is_over("within"));

        // By the next call, whose errors are returned, and not logged.
        let (locker, guard) = lost("next");
        drop(guard);
        locker.try_lock().map(drop).unwrap_err();
        thread::sleep(lease.total() * 2); // nothing is left to clean up
        locker.try_lock().map(drop).unwrap_err();
        handle.set_unreachable(false);
        locker.try_lock_for(PATIENCE).unwrap().unlock().unwrap();
        wait_until(PATIENCE, "it is over", || is_over("next"));

        // What was returned only was not logged, and is not over.
        let locker = factory.locker("returned").id("a").build().unwrap();
        handle.set_unreachable(true);
        locker.try_lock().map(drop).unwrap_err();
        handle.set_unreachable(false);
        let guard = locker.lock().unwrap();
        guard.unlock().unwrap();
        assert_eq!(count("returned: a: "), 0, "{:?}", LINES.lock());
    }
}
