//! What a user sees of an outage, on any server that can be killed and started again.

use std::time::Duration;

use testbed::wait_until;

use super::PATIENCE;

/// A waiter asks nothing until the lease of the owner ends: the lost connection wakes it.
pub fn shows_in_the_health_of_a_waiting_service(url: &str, kill: impl Fn(), start: impl Fn()) {
    let url = format!("{url}?ttl=40s&transition=10s");
    let [first, second] = [(); 2].map(|()| contend::connect(&url).unwrap());
    let leader = first.contend("m").build().unwrap();
    leader.start().unwrap();
    wait_until(PATIENCE, "it leads", || leader.is_owner());
    let waiter = second.contend("m").build().unwrap();
    waiter.start().unwrap();
    wait_until(PATIENCE, "it waits", || waiter.state().after().has_owner());
    assert!(second.health().is_fine());
    kill();
    wait_until(Duration::from_secs(15), "it is seen", || {
        !second.health().is_fine()
    });
    start();
    wait_until(PATIENCE, "it is over", || second.health().is_fine());
}
