//! The connection on which messages arrive: what is acknowledged is subscribed, and slowness breaks nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use contend::ErrorKind;
use contend::Moment;
use contend::backend::{OnRefusal, Wakeups};
use contend::redis::Builder;
use testbed::{Proxy, RedisServer, wait_until, within};

use crate::driven::{Driven, HANG, PATIENCE, calls, factory, listeners, ms, soon, subscribe};

/// The connection on which messages arrive, as the server names it.
fn message_connection(server: &RedisServer) -> String {
    let list = server.cli(&["CLIENT", "LIST", "TYPE", "pubsub"]);
    list.split(' ').next().unwrap_or_default().to_owned()
}

/// Rule "subscribe first, then try". A waiter leaves before its subscription is acknowledged, and another
/// comes for the same channels: the acknowledgement that arrives next is that of the first subscription,
/// which the server has ended since.
#[test]
fn acknowledgement_is_that_of_the_present_subscription() {
    within(HANG, || {
        let server = RedisServer::start();
        let proxy = Proxy::to(server.addr());
        let factory = factory(proxy.addr());
        let mut other = Driven::at(&factory, "other", "a");
        other.attempt(OnRefusal::Enqueue);
        // A pooled connection, for the look.
        factory.ping(PATIENCE).unwrap();
        // Time is the subject: 300 ms each way. The request to subscribe is sent after 600 ms, and is
        // acknowledged after 1,200 ms; if the reader is up just then, after 600 ms, and it is tried again.
        proxy.delay(ms(300));
        let end = Instant::now() + PATIENCE;
        loop {
            let began = Instant::now();
            let at = |after| thread::sleep(ms(after).saturating_sub(began.elapsed()));
            let listening = thread::scope(|scope| {
                scope.spawn(|| {
                    // Arrives after 800 ms: the reader looks what there is to send, and unsubscribes.
                    at(500);
                    server.cli(&["PUBLISH", "simba:{other}", "released@@x"]);
                });
                // Half of it is for the subscription.
                subscribe(&factory, "m", Moment::now() + ms(1_480))
            });
            if listening.is_err() {
                at(850);
                break;
            }
            assert!(Instant::now() < end, "it is always acknowledged in time");
        }
        let (backend, unparker) = (
            factory.backend().unwrap(),
            contend::Parker::new().unparker(),
        );
        let mut observer = backend.observer(&"m".into(), &unparker).unwrap();
        observer.observe(soon()).unwrap();
        assert_eq!(listeners(&server, "simba:{m}"), 1);
    });
}

/// A panic of the caller's own closure, in the thread that reads messages, would end every wake-up for good;
/// and releases would count the waiters of this process as dead.
#[test]
fn panicking_credentials_callback_ends_no_wake_ups() {
    within(HANG, || {
        let server = RedisServer::start();
        server.cli(&["ACL", "SETUSER", "app", "on", ">pw", "~*", "&*", "+@all"]);
        let panics = Arc::new(AtomicBool::new(false));
        let asked = Arc::clone(&panics);
        let factory = Builder::new(server.addr().to_string())
            .credentials(move || {
                assert!(!asked.load(Ordering::SeqCst), "the vault is sealed");
                ("app".to_owned(), "pw".to_owned())
            })
            .build()
            .unwrap();
        let mut waiter = Driven::at(&factory, "m", "a");
        waiter.attempt(OnRefusal::Enqueue);
        let wakeups = || factory.backend().unwrap().condition().wakeups;
        assert_eq!(wakeups(), Wakeups::Working);

        panics.store(true, Ordering::SeqCst);
        server.cli(&["CLIENT", "KILL", "TYPE", "pubsub"]);
        server.cli(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
        wait_until(
            PATIENCE,
            "it says why there are no wake-ups",
            || matches!(wakeups(), Wakeups::Polling(why) if why.contains("the credentials callback panicked")),
        );
        let mut other = Driven::at(&factory, "m", "b");
        let listening = subscribe(&factory, "m", soon());
        let acquired = other.raw.acquire(OnRefusal::Leave, soon()).map(drop);
        for error in [listening.unwrap_err(), acquired.unwrap_err()] {
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
            let text = error.to_string();
            assert!(text.contains("the credentials callback panicked"), "{text}");
            assert!(text.contains(&server.addr().to_string()), "{text}");
        }

        panics.store(false, Ordering::SeqCst);
        wait_until(PATIENCE, "wake-ups work again", || {
            wakeups() == Wakeups::Working && listeners(&server, "simba:{m}:a") == 1
        });
        wait_until(PATIENCE, "it is served again", || {
            other.raw.acquire(OnRefusal::Leave, soon()).is_ok()
        });
    });
}

/// Where a round trip takes longer than the silence after which a sign of life is asked for, the answer is
/// waited for, as it is for every other one.
#[test]
fn messages_arrive_over_a_slow_network() {
    within(HANG, || {
        let server = RedisServer::start();
        let proxy = Proxy::to(server.addr());
        proxy.delay(ms(600));
        let factory = factory(proxy.addr());
        let mut waiter = Driven::at(&factory, "m", "a");
        waiter.attempt(OnRefusal::Enqueue);
        let connection = || message_connection(&server);
        let subscribed = || calls(&server, "subscribe:");
        let (first, before) = (connection(), subscribed());
        wait_until(PATIENCE, "several signs of life were asked for", || {
            subscribed() >= before + 3
        });
        assert_eq!(connection(), first);
        waiter.parker.park(Moment::now());
        server.cli(&["PUBLISH", "simba:{m}", "released@@b"]);
        assert_eq!(waiter.parker.park(soon()), contend::Unparked::Wake);
    });
}

/// `!handed` is for those who still wait: between two contenders it would only cost time.
#[test]
fn hand_over_is_announced_only_to_others_that_wait() {
    within(HANG, || {
        let server = RedisServer::start();
        let factory = factory(server.addr());
        for (waiters, published) in [(1, 2), (2, 3)] {
            let mutex = format!("m{waiters}");
            let mut owner = Driven::at(&factory, &mutex, "owner");
            let fence = owner.own();
            let mut waiting: Vec<_> = (0..waiters)
                .map(|number| Driven::at(&factory, &mutex, &format!("waiter-{number}")))
                .collect();
            for waiter in &mut waiting {
                waiter.queue();
            }
            server.cli(&["CONFIG", "RESETSTAT"]);
            owner.release(fence);
            waiting[0].owns_within(PATIENCE);
            // The turn, perhaps the hand-over, and the acquisition.
            assert_eq!(calls(&server, "publish:"), published, "{waiters} waiters");
        }
    });
}
