//! The store's contract: what names one grant touches no other.

use std::sync::Arc;
use std::time::Duration;

use crate::ground::{self, HOUR, PLACES, by, connect};
use crate::mysql_ground::HANG;
use contend::backend::permit_store::{GrantId, Outcome, Purge, Request};
use contend::semaphore::{PermitRenewal, Release};
use testbed::within;

/// What an earlier grant of a request sent, and is delayed, finds nothing, though request and external id are the
/// same.
#[test]
fn delayed_call_touches_no_later_grant() {
    within(HANG, || {
        for place in PLACES {
            let url = place();
            let here = connect(&url);
            assert!(here.create("a", 3).unwrap());
            let factory = contend::connect(&url).unwrap();
            let store = factory.backend().unwrap().permits().unwrap();
            let granted = |request| ground::granted(store.acquire(request, None, by()).unwrap());
            let [first, second, third] =
                [(1, false), (2, true), (3, false)].map(|(token, take_over)| {
                    Arc::new(Request {
                        ttl: Some(HOUR),
                        take_over,
                        ..ground::request("job", token, &[("a", 2)])
                    })
                });
            let ids = [&first, &second, &third].map(|it| it.grant_id());
            let before = granted(&first).permits[0].fence;
            assert_eq!(granted(&first).permits[0].fence, before, "a retry");
            let fence = granted(&second).permits[0].fence;
            assert!(before < fence);

            let release = |grant: &GrantId| store.release(grant, by()).unwrap();
            let freed = (Release::Released, vec![(Arc::from("a"), 2)]);
            let not_held = (Release::AlreadyReleased, Vec::new());
            assert_eq!(release(&ids[0]), not_held);
            let repeated = store.acquire(&first, None, by()).unwrap();
            assert!(matches!(repeated, Outcome::Known(_)), "{repeated:?}");
            let renew = || store.renew(&ids[..2], by()).unwrap();
            let (renewed, released) = (PermitRenewal::Renewed, PermitRenewal::AlreadyReleased);
            assert_eq!(renew(), [Some(released), Some(renewed)]);
            let any = [GrantId::any("job"), GrantId::any("none")];
            let unknown = PermitRenewal::Unknown;
            let both = store.renew(&any, by()).unwrap();
            assert_eq!(both, [Some(renewed), Some(unknown)]);
            assert_eq!(release(&any[1]), (Release::Unknown, Vec::new()));
            let holders = store.holders("a", by()).unwrap();
            assert_eq!(holders.len(), 1);
            assert_eq!((holders[0].fence, holders[0].count), (fence, 2));

            assert_eq!(release(&ids[1]), freed);
            assert_eq!(release(&ids[1]), not_held);
            assert_eq!(release(&any[0]), not_held);
            assert_eq!(renew(), [Some(released); 2]);
            // Without the permits that were superseded.
            let status = store.status("job", by()).unwrap().unwrap();
            assert_eq!((status.held, status.permits.len()), (false, 1));
            // The request is forgotten, and its external id used anew.
            let purged = store.purge(Purge::Requests, Duration::ZERO, 10, by());
            assert_eq!(purged.unwrap(), 1);
            granted(&third);
            for old in &ids[..2] {
                assert_eq!(release(old), not_held);
            }
            let usage = store.usage(Some("a"), by()).unwrap();
            assert_eq!((usage[0].held, usage[0].requests), (2, 1));
            assert_eq!(release(&any[0]), freed);
            assert_eq!(store.audit(false, by()).unwrap(), []);
        }
    });
}
