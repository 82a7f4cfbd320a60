//! Who contends: one id is one contender, a leader that nobody hears steps down, one that resigns
//! rejoins.

use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use crate::conformance::hooked::{Call, When, around, as_another_process};
use crate::conformance::{HANG, PATIENCE, elsewhere, name, next, started, wait_for_owner};
use contend::{Error, ErrorKind, EventKind, Factory, Lease};
use testbed::{wait_until, within};

fn factory() -> Factory {
    let lease = Lease::new(Duration::from_secs(2), Duration::from_secs(1)).unwrap();
    contend::memory::factory(&name("identity"), lease)
}

/// Rule "one id, one contender": user.md 3. Two processes with one id alternated as leaders, without a
/// word and without end.
#[test]
fn a_double_is_told_and_the_one_that_met_it_stands_back() {
    within(HANG, || {
        let here = factory();
        let there = as_another_process(&here);
        let leads = |factory: &Factory| {
            let builder = factory.contend("m").id("host-1").failures(true);
            let (service, events) = builder.channel().unwrap();
            service.start().unwrap();
            (service, events)
        };
        let (ours, our_events) = leads(&here);
        next(&our_events, EventKind::Acquired);
        // Later than a repeated request of our own could be.
        std::thread::sleep(Duration::from_millis(550));
        let (theirs, their_events) = leads(&there);
        next(&their_events, EventKind::Acquired);

        next(&our_events, EventKind::Released);
        // It does not take the leadership back, however long the other leads.
        let until = std::time::Instant::now() + Duration::from_secs(5);
        while std::time::Instant::now() < until {
            assert!(theirs.is_owner() && !ours.is_owner());
            std::thread::sleep(Duration::from_millis(10));
        }
        // Once the other has gone, it leads again.
        theirs.stop().unwrap();
        next(&our_events, EventKind::Acquired);
        assert!(ours.last_error().is_none() && here.health().is_fine());
    });
}

/// The same for a locker: its guard is lost, and the next lock says why it cannot be had.
#[test]
fn a_locker_that_met_its_double_says_so() {
    within(HANG, || {
        let here = factory();
        let there = as_another_process(&here);
        let ours = here.locker("m").id("host-1").build().unwrap();
        let guard = ours.lock().unwrap();
        std::thread::sleep(Duration::from_millis(550));
        let theirs = there.locker("m").id("host-1").build().unwrap();
        let _theirs = elsewhere(|| theirs.lock().unwrap());
        crate::conformance::closed(&guard.lost());
        assert_eq!(guard.unlock().unwrap_err().kind(), ErrorKind::Lost);
        let error = ours.try_lock().map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Held, "{error}");
    });
}

/// Unlocking found nothing under its fence, adopted what stood under its id, and released that: the double
/// believed on, and a third could lock. After a lost reply of our own it did so for as long as a lease: whatever
/// stood there was taken for that late request.
#[test]
fn unlocking_what_a_double_has_taken_leaves_the_double_its_lock() {
    for replies_lost in [0, 1] {
        within(HANG, || {
            let there = factory();
            let left = AtomicU32::new(replies_lost);
            let here = around(&there, move |when, call, _, _| {
                let acquired = when == When::After && matches!(call, Call::Acquire(_));
                let lost = |left: u32| left.checked_sub(1);
                if acquired && left.fetch_update(SeqCst, SeqCst, lost).is_ok() {
                    return Err(Error::new(ErrorKind::Timeout, "the reply was lost"));
                }
                Ok(())
            });
            let there = as_another_process(&there);
            let ours = here.locker("m").id("host-1");
            let ours = ours.renew_after(Duration::from_millis(1_400));
            let guard = ours.build().unwrap().lock().unwrap();
            // Later than a repeated request of our own could be, and before a renewal notices.
            thread::sleep(Duration::from_millis(550));
            let theirs = there.locker("m").id("host-1").build().unwrap();
            let taken = elsewhere(|| theirs.lock().unwrap());
            assert_eq!(guard.unlock().unwrap_err().kind(), ErrorKind::Lost);
            assert_eq!(here.owner("m").unwrap().fence(), taken.fence());
            taken.unlock().unwrap();
        });
    }
}

/// Rule "events are ordered": user.md 4. The thread that read the events panicked, and the service led
/// on for nobody.
#[test]
fn a_leader_whose_receiver_is_gone_steps_down_for_good() {
    within(HANG, || {
        let factory = factory();
        let (zombie, events) = started(&factory, "m", "zombie");
        next(&events, EventKind::Acquired);
        let (heir, heard) = started(&factory, "m", "heir");
        wait_for_owner(&heir, "zombie");
        drop(events);
        next(&heard, EventKind::Acquired);
        wait_until(PATIENCE, "it has stopped", || !zombie.is_active());
        assert!(!zombie.is_owner());
        let why = zombie.last_error().expect("it says why it stepped down");
        assert!(why.to_string().contains("lead_without_listener"), "{why}");
        let why = zombie.start().unwrap_err();
        assert_eq!(why.kind(), ErrorKind::InvalidState);
        assert!(why.to_string().contains("lead_without_listener"), "{why}");
        assert!(!zombie.is_active());

        let builder = factory.contend("alone").lead_without_listener(true);
        let (service, events) = builder.channel().unwrap();
        service.start().unwrap();
        next(&events, EventKind::Acquired);
        drop(events);
        std::thread::sleep(Duration::from_millis(300));
        assert!(service.is_owner() && service.running());
    });
}

/// It noticed when it looked the next time, half a lease later, and then ended without a word.
#[test]
fn an_observer_whose_receiver_is_gone_says_so_and_ends() {
    within(HANG, || {
        let second = Duration::from_secs(1);
        let lease = Lease::new(second, second).unwrap();
        let factory = contend::memory::factory(&name("unheard"), lease);
        let _owner = factory.locker("m").build().unwrap().lock().unwrap();
        let (observer, events) = factory.observe("m").channel().unwrap();
        observer.start().unwrap();
        next(&events, EventKind::OwnerChanged);
        drop(events);
        wait_until(PATIENCE, "it has stopped", || !observer.is_active());
        let why = observer.last_error().expect("it says why it stopped");
        assert!(why.to_string().contains("receiver"), "{why}");
    });
}

#[test]
fn whoever_resigns_is_released_first_and_rejoins_the_end_of_the_queue() {
    within(HANG, || {
        let factory = factory();
        let (a, a_events) = started(&factory, "m", "a");
        let first = next(&a_events, EventKind::Acquired).fence();
        let (b, b_events) = started(&factory, "m", "b");
        wait_for_owner(&b, "a");
        a.resign().unwrap();
        assert!(!a.is_owner() && a.running());
        assert_eq!(next(&a_events, EventKind::Released).fence(), first);
        let second = next(&b_events, EventKind::Acquired).fence();
        assert!(second > first);
        wait_for_owner(&a, "b");
        // With a rest, nobody leads meanwhile unless somebody else wants to.
        b.resign_for(Duration::from_secs(3600)).unwrap();
        assert!(next(&a_events, EventKind::Acquired).fence() > second);
        a.stop().unwrap();
        b.stop().unwrap();
        assert_eq!(a.resign().unwrap_err().kind(), ErrorKind::InvalidState);
    });
}

/// Building it made a contender of the backend and dropped it, which took the live one's place away.
#[test]
fn a_refused_double_does_not_cost_the_live_one_its_place() {
    within(HANG, || {
        let factory = factory();
        let _guard = factory.locker("m").build().unwrap().lock().unwrap();
        let (waits, _events) = started(&factory, "m", "a");
        let places = || factory.participants("m").unwrap().len();
        wait_until(PATIENCE, "it waits", || places() == 1);
        let double = factory.contend("m").id("a").build().map(drop);
        assert_eq!(double.unwrap_err().kind(), ErrorKind::DuplicateContender);
        assert_eq!(places(), 1);
        drop(waits);
        assert_eq!(places(), 0);
    });
}

/// The second call was told at once that the first still hangs, and one that a stop overtook waited for as long
/// as a stop may take.
#[test]
fn whoever_resigns_beside_another_or_beside_a_stop_is_told_the_truth() {
    within(HANG, || {
        let factory = factory();
        let (service, events) = {
            let (told, events) = crossbeam_channel::unbounded();
            let also = told.clone();
            let service = factory
                .contend("m")
                .on_acquired(move |_| told.send(EventKind::Acquired).unwrap())
                .on_released(move |_| {
                    also.send(EventKind::Released).unwrap();
                    thread::sleep(Duration::from_millis(300));
                })
                .build()
                .unwrap();
            (service, events)
        };
        service.start().unwrap();
        let told = |kind| assert_eq!(events.recv_timeout(PATIENCE).unwrap(), kind);
        told(EventKind::Acquired);
        thread::scope(|scope| {
            let both = [(); 2].map(|()| scope.spawn(|| service.resign()));
            for resigns in both {
                resigns.join().unwrap().unwrap();
            }
        });
        told(EventKind::Released);
        told(EventKind::Acquired);
        let began = Instant::now();
        thread::scope(|scope| {
            let resigns = scope.spawn(|| service.resign_for(Duration::from_secs(60)));
            told(EventKind::Released);
            service.stop().unwrap();
            if let Err(error) = resigns.join().unwrap() {
                assert_eq!(error.kind(), ErrorKind::InvalidState, "{error}");
            }
        });
        // The bound of a stop is 6 s with this lease.
        assert!(began.elapsed() < Duration::from_secs(5));
    });
}
