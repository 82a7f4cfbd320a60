//! The store's contract: what names one grant touches no other.

use std::sync::Arc;
use std::time::Duration;

use crate::ground::database;
use crate::mysql_ground::HANG;
use contend::Moment;
use contend::backend::permit_store::{Call, Decision, Held, OnHeld, Renewed, Wish};
use testbed::within;

fn by() -> Moment {
    Moment::now() + Duration::from_secs(20)
}

fn call(token: u64, on_held: OnHeld) -> Arc<Call> {
    Arc::new(Call {
        wish: Wish {
            external_id: Arc::from("job"),
            owner: None,
            ttl: Some(Duration::from_secs(60)),
            permits: vec![(Arc::from("a"), 2)],
        },
        token,
        former: Vec::new(),
        on_held,
    })
}

/// Rule "every claim carries its fence": whatever an earlier grant of a request sent, and is delayed, finds
/// nothing, though request and external id are the same.
#[test]
fn a_delayed_call_of_an_earlier_grant_touches_no_later_one() {
    within(HANG, || {
        let memory = contend::connect("memory://delayed-grants").unwrap();
        let mysql = contend::connect(&database()).unwrap();
        for factory in [memory, mysql] {
            assert!(factory.semaphores().unwrap().create("a", 3).unwrap());
            let store = factory.backend().unwrap().permits().unwrap();
            let granted = |call: &Arc<Call>| -> Arc<Held> {
                match store.acquire(call, by()).unwrap() {
                    Decision::Granted(grant) => Arc::new(grant.held),
                    other => panic!("{other:?}"),
                }
            };
            let first = granted(&call(1, OnHeld::Report));
            let second = granted(&call(2, OnHeld::TakeOver));
            assert_eq!(first.request_id, second.request_id);
            assert!(first.permits[0].id < second.permits[0].id);

            let touches_nothing = |old: &Arc<Held>| {
                assert!(!store.release(old, by()).unwrap());
                assert!(!store.bury("job", &[old.token], by()).unwrap());
                for permit in [&old.permits[0], &second.permits[0]] {
                    for left in [0, 1] {
                        assert!(!store.release_part(old, permit, left, by()).unwrap());
                    }
                }
            };
            touches_nothing(&first);
            let repeated = store.acquire(&call(1, OnHeld::Report), by()).unwrap();
            assert!(matches!(repeated, Decision::Known(_)), "{repeated:?}");
            let both = [Arc::clone(&first), Arc::clone(&second)];
            let renewed = store.renew(&both, by()).unwrap();
            assert_eq!(renewed, [Renewed::Lost, Renewed::Yes]);
            let holders = store.holders("a", by()).unwrap();
            assert_eq!(holders.len(), 1);
            let holder = (holders[0].fence, holders[0].count);
            assert_eq!(holder, (second.permits[0].id, 2));

            assert!(store.release(&second, by()).unwrap());
            touches_nothing(&second);
            assert_eq!(store.renew(&both, by()).unwrap(), [Renewed::Lost; 2]);
            // The request is forgotten, and its external id used anew.
            assert_eq!(store.delete_requests(Duration::ZERO, 10, by()).unwrap(), 1);
            let third = granted(&call(3, OnHeld::Report));
            touches_nothing(&first);
            touches_nothing(&second);
            let usage = store.usage(Some("a"), by()).unwrap();
            assert_eq!((usage[0].held, usage[0].requests), (2, 1));
            assert!(store.release(&third, by()).unwrap());
            assert_eq!(store.check(by()).unwrap(), []);
        }
    });
}
