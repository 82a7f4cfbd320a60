//! The contention machine's way through a renewal, which every owner takes three times in a ttl.

use std::sync::Arc;
use std::time::Duration;

use contend::backend::{Attempt, Grant, Renewal};
use contend::machine::contention::{Contention, Step};
use contend::{ContendPeriod, Lease, Moment, MutexOwner};

alone! {
    fn renewal_is_decided_without_an_allocation() {
        let lease = Lease::default();
        let mut now = Moment::from_origin(Duration::from_secs(1));
        let id: Arc<str> = "0:1@127.0.0.1".into();
        let mut contention = Contention::new(Arc::clone(&id), lease, ContendPeriod::new(lease), now);
        let owner = MutexOwner::new(id, 1_000, 11_000, 17_000, 7);
        let grant = Grant { owner, until: None };
        assert!(matches!(contention.step(now), Step::Acquire { .. }));
        let change = contention.acquired(now, now, Ok(Attempt::Granted(grant.clone())), 0.5);
        assert!(change.is_some());

        let mut renewals = 0;
        let allocations = allocation_counter::measure(|| {
            while renewals < 1_000 {
                match contention.step(now) {
                    Step::Wait { until } => now = until,
                    Step::Renew { .. } => {
                        let renewal = Ok(Renewal::Renewed(grant.clone()));
                        contention.renewed(now, now, renewal, 0.5);
                        renewals += 1;
                    }
                    other => panic!("{other:?}"),
                }
            }
        });
        assert_eq!(allocations.count_total, 0, "{allocations:?}");
        assert_eq!(contention.belief().map(|(_, fence)| fence), Some(7));

        // And the counter does count.
        assert!(
            allocation_counter::measure(|| drop(std::hint::black_box(Box::new(renewals)))).count_total
                > 0
        );
    }
}
