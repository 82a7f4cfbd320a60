//! What a probe is told of permits, added up as `contend_permits_held` does: what the guards of this process hold.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use crate::ground::{acquired, want};
use crate::mysql_ground::{HANG, ms};
use contend::semaphore::Release;
use contend::{ErrorKind, Lease, Probe, memory};
use testbed::within;

/// Adds up what it is told.
#[derive(Default)]
struct Held(Mutex<BTreeMap<String, i64>>);

impl Probe for Held {
    fn permits(&self, semaphore: &str, count: i64) {
        *self.0.lock().unwrap().entry(semaphore.into()).or_default() += count;
    }
}

#[test]
fn permits_of_guards_are_counted_to_their_end() {
    within(HANG, || {
        let probe = Arc::new(Held::default());
        let factory = || memory::factory("counted", Lease::default());
        let here = factory().with_probe(Arc::clone(&probe) as Arc<dyn Probe>);
        let (here, elsewhere) = (here.semaphores().unwrap(), factory().semaphores().unwrap());
        here.create("a", 10).unwrap();
        let held = || probe.0.lock().unwrap().get("a").copied();
        let guard = here.guard(&want("guard", "a", 3), ms(0)).unwrap();
        acquired(here.acquire(&want("plain", "a", 2)).unwrap());
        assert_eq!(held(), Some(3), "guards only");
        guard.release().unwrap();
        assert_eq!(here.release("plain").unwrap(), Release::Released);
        assert_eq!(held(), Some(0));
        // One that is lost counts until it ends.
        let guard = here.guard(&want("lost", "a", 3), ms(0)).unwrap();
        assert_eq!(elsewhere.release("lost").unwrap(), Release::Released);
        assert_eq!(held(), Some(3));
        assert_eq!(guard.release().unwrap_err().kind(), ErrorKind::Lost);
        assert_eq!(held(), Some(0));
    });
}
