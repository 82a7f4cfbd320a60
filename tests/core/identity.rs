//! Which contender is which: one id is one contender, a leader without a receiver steps down, one that resigns rejoins.

use std::thread;
use std::time::{Duration, Instant};

use crate::conformance::hooked::{self, as_another_process};
use crate::conformance::{
    HANG, PATIENCE, closed, elsewhere, memory, ms, next, started, wait_for_owner,
};
use contend::{ErrorKind, EventKind, Factory};
use testbed::{wait_until, within};

fn factory() -> Factory {
    memory(2_000, 1_000)
}

/// What stands there under its own id may be the other's; after a lost reply, too, and whether a renewal has noticed or
/// not.
#[test]
fn unlocking_leaves_a_double_its_lock() {
    for (loses_reply, notices) in [(false, false), (true, false), (false, true)] {
        within(HANG, || {
            let there = factory();
            let (here, lossy) = hooked::losing_a_grant(&there);
            if loses_reply {
                lossy.on();
            }
            let there = as_another_process(&there);
            // Long enough for both to keep it on a busy machine: it is a renewal that notices.
            let lasting = |factory: &Factory| {
                let locker = factory.locker("m").id("host-1").ttl(ms(20_000));
                locker.renew_after(ms(1_400)).build().unwrap()
            };
            let (ours, theirs) = (lasting(&here), lasting(&there));
            let guard = ours.lock().unwrap();
            let taken = elsewhere(|| theirs.lock().unwrap());
            if notices {
                closed(&guard.lost());
            }
            assert_eq!(guard.unlock().unwrap_err().kind(), ErrorKind::Lost);
            assert_eq!(here.owner("m").unwrap().fence(), taken.fence());
            if notices {
                let error = ours.try_lock().map(drop).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Held, "{error}");
            }
            taken.unlock().unwrap();
        });
    }
}

#[test]
fn leader_without_receiver_steps_down_for_good() {
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
        let refused = zombie.start().unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidState);
        for why in [why, refused] {
            assert!(why.to_string().contains("lead_without_listener"), "{why}");
        }

        let builder = factory.contend("alone").lead_without_listener(true);
        let (service, events) = builder.channel().unwrap();
        service.start().unwrap();
        next(&events, EventKind::Acquired);
        drop(events);
        // Longer than the other one took.
        thread::sleep(ms(300));
        assert!(service.is_owner() && service.running());
    });
}

#[test]
fn resigner_releases_and_rejoins() {
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
        b.resign_for(Duration::from_secs(3600)).unwrap();
        assert!(next(&a_events, EventKind::Acquired).fence() > second);
        a.stop().unwrap();
        b.stop().unwrap();
        assert_eq!(a.resign().unwrap_err().kind(), ErrorKind::InvalidState);
    });
}

#[test]
fn refused_double_costs_no_place() {
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

#[test]
fn concurrent_resigns_are_answered() {
    within(HANG, || {
        let factory = factory();
        let (told, events) = crossbeam_channel::unbounded();
        let also = told.clone();
        let builder = factory.contend("m");
        let builder = builder.on_acquired(move |event| told.send(event.kind).unwrap());
        let builder = builder.on_released(move |event| {
            also.send(event.kind).unwrap();
            // Time for the other call to come beside this one.
            thread::sleep(ms(300));
        });
        let service = builder.build().unwrap();
        service.start().unwrap();
        let hears = |kind| assert_eq!(events.recv_timeout(PATIENCE).unwrap(), kind);
        hears(EventKind::Acquired);
        thread::scope(|scope| {
            let both = [(); 2].map(|()| scope.spawn(|| service.resign()));
            for resigns in both {
                resigns.join().unwrap().unwrap();
            }
        });
        hears(EventKind::Released);
        hears(EventKind::Acquired);
        let began = Instant::now();
        thread::scope(|scope| {
            let resigns = scope.spawn(|| service.resign_for(Duration::from_secs(60)));
            hears(EventKind::Released);
            service.stop().unwrap();
            if let Err(error) = resigns.join().unwrap() {
                assert_eq!(error.kind(), ErrorKind::InvalidState, "{error}");
            }
        });
        // The bound of a stop is 6 s with this lease.
        assert!(began.elapsed() < Duration::from_secs(5));
    });
}
