//! Waiting: in order, only for what there is room for, and no longer than was asked for.

use std::sync::{Mutex, mpsc};
use std::thread;
use std::time::Instant;

use crate::ground::{PATIENCE, acquired, already_acquired, everywhere, exhausted, want};
use crate::mysql_ground::ms;
use contend::semaphore::{PermitRequest, Wait};
use contend::{Cancel, ErrorKind};

#[test]
fn waiter_gets_what_is_released() {
    everywhere(&[("a", 1)], |here, elsewhere| {
        for (round, releaser) in [&here, &elsewhere].into_iter().enumerate() {
            let (holder, waiter) = (format!("h{round}"), format!("w{round}"));
            acquired(releaser.acquire(&want(&holder, "a", 1)).unwrap());
            thread::scope(|scope| {
                let request = want(&waiter, "a", 1);
                let waiting = scope.spawn(|| here.acquire_for(&{ request }, PATIENCE));
                thread::sleep(ms(300)); // it waits
                assert!(!waiting.is_finished());
                releaser.release(&holder).unwrap();
                acquired(waiting.join().unwrap().unwrap());
            });
            here.release(&waiter).unwrap();
        }
        acquired(here.acquire(&want("h", "a", 1)).unwrap());
        let start = Instant::now();
        let answer = here.acquire_for(&want("w", "a", 1), ms(400)).unwrap();
        assert_eq!(exhausted(answer).held, 1);
        assert!(start.elapsed() >= ms(400) && start.elapsed() < ms(10_000));
    });
}

#[test]
fn waiters_are_served_in_order() {
    everywhere(&[("a", 1), ("b", 1)], |here, _| {
        acquired(here.acquire(&want("holder", "a", 1)).unwrap());
        let order = Mutex::new(Vec::new());
        let (tell, told) = mpsc::channel();
        thread::scope(|scope| {
            for number in 0..8 {
                let (here, order, tell) = (&here, &order, tell.clone());
                scope.spawn(move || {
                    tell.send(()).unwrap();
                    let id = format!("w{number}");
                    // Those who want b too are not overtaken by those who do not.
                    let mut request = want(&id, "a", 1);
                    if number % 2 == 1 {
                        request = request.permits("b", 1);
                    }
                    acquired(here.acquire_for(&request, PATIENCE).unwrap());
                    order.lock().unwrap().push(number);
                    here.release(&id).unwrap();
                });
                // A busy machine may start a thread late, and the order in which they come is the subject.
                told.recv().unwrap();
                thread::sleep(ms(200));
            }
            here.release("holder").unwrap();
        });
        assert_eq!(*order.lock().unwrap(), (0..8).collect::<Vec<_>>());
    });
}

#[test]
fn waiter_for_two_blocks_neither() {
    everywhere(&[("a", 1), ("b", 1)], |here, _| {
        let a = here.guard(&want("a", "a", 1), ms(0)).unwrap();
        thread::scope(|scope| {
            let request = want("both", "a", 1).permits("b", 1);
            let both = scope.spawn(|| here.guard(&{ request }, PATIENCE).unwrap());
            thread::sleep(ms(300)); // it waits
            for round in 0..5 {
                let start = Instant::now();
                let guard = here.guard(&want(&format!("b{round}"), "b", 1), PATIENCE);
                drop(guard.unwrap());
                assert!(start.elapsed() < ms(10_000));
            }
            assert!(!both.is_finished());
            drop(a);
            drop(both.join().unwrap());
        });
    });
}

#[test]
fn replay_passes_waiters() {
    everywhere(&[("a", 1)], |here, _| {
        let permits = acquired(here.acquire(&want("job", "a", 1)).unwrap());
        let cancel = Cancel::new();
        thread::scope(|scope| {
            let wait = Wait::forever().cancel(&cancel);
            let waiting = scope.spawn(|| here.guard(&want("waits", "a", 1), wait));
            thread::sleep(ms(300)); // it waits
            let replay = here.acquire_for(&want("job", "a", 1), PATIENCE).unwrap();
            assert_eq!(already_acquired(replay), permits);
            cancel.cancel();
            let error = waiting.join().unwrap().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Cancelled);
        });
    });
}

#[test]
fn wish_beyond_capacity_waits() {
    everywhere(&[("a", 0)], |here, _| {
        let error = here.guard(&want("one", "a", 2), ms(50)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Exhausted);
        let says = "2 wanted, which is more than the capacity: set_capacity raises it";
        assert!(error.to_string().ends_with(says), "{error}");
        assert!(error.to_string().contains("\"one\""), "{error}");
        thread::scope(|scope| {
            let waiting = scope.spawn(|| here.guard(&want("two", "a", 2), PATIENCE));
            thread::sleep(ms(200)); // it tries more than once
            assert_eq!(here.set_capacity("a", 2, Some("ops")).unwrap(), 0);
            assert!(waiting.join().unwrap().unwrap().is_valid());
        });
    });
}

/// A cancelled wait keeps nothing, and the next in line goes on; each `Cancel` of a wait ends it.
#[test]
fn cancelled_wait_leaves_the_line() {
    everywhere(&[("a", 1)], |here, _| {
        for which in 0..2 {
            let held = PermitRequest::generated().permits("a", 1);
            let held = here.guard(&held, ms(0)).unwrap();
            let cancels = [Cancel::new(), Cancel::new()];
            thread::scope(|scope| {
                let wait = Wait::at_most(PATIENCE);
                let wait = wait.cancel(&cancels[0]).cancel(&cancels[1]);
                let first = scope.spawn(|| here.guard(&want("first", "a", 1), wait));
                thread::sleep(ms(200)); // it waits
                let second = PermitRequest::generated().permits("a", 1);
                let second = scope.spawn(|| here.guard(&{ second }, PATIENCE));
                thread::sleep(ms(100)); // behind it
                cancels[which].cancel();
                let error = first.join().unwrap().unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Cancelled);
                drop(held);
                drop(second.join().unwrap().unwrap());
            });
            // A call that was cancelled before gets nothing either.
            for timeout in [ms(0), PATIENCE] {
                let wait = Wait::at_most(timeout).cancel(&cancels[which]);
                let error = here.acquire_for(&want("first", "a", 1), wait).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Cancelled);
            }
            assert!(here.status("first").unwrap().is_none_or(|it| !it.held));
        }
        assert_eq!(here.usage("a").unwrap().held, 0);
    });
}
