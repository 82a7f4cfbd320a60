//! Permits that nobody gives back, rows that nobody asks for, and the thread that sees to both.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use crate::ground::{SHORT, acquired, connect, number, pair, semaphores, wait_for_log, want};
use crate::mysql_ground::{HANG, ms, operator};
use contend::ErrorKind;
use contend::semaphore::{Liveness, PermitRenewal, Reason, Release, Swept, Usage};
use mysql::prelude::Queryable;
use testbed::{wait_until, within};

const PATIENCE: Duration = Duration::from_secs(30);
const HOUR: Duration = Duration::from_secs(3600);

/// Moves the times of a request into the past, as if it had been left alone for long.
fn age(url: &str, external_id: &str, hours: u32) {
    operator(url)
        .exec_drop(
            "UPDATE contend_permit_request SET updated_at = updated_at - INTERVAL ? HOUR, \
             expires_at = expires_at - INTERVAL ? HOUR, reclaim_at = reclaim_at - INTERVAL ? HOUR \
             WHERE external_id = ?",
            (hours, hours, hours, external_id),
        )
        .unwrap();
}

#[test]
fn each_sweep_takes_back_what_is_its_own_and_says_why() {
    within(HANG, || {
        let (semaphores, url) = semaphores(&[("a", 10), ("b", 10)]);
        for (id, owner) in [
            ("expired", "x"),
            ("dead", "gone"),
            ("alive", "here"),
            ("asked", "who"),
        ] {
            let request = want(id, "a", 1).permits("b", 2).owner(owner).ttl(HOUR);
            acquired(semaphores.acquire(&request).unwrap());
        }
        acquired(semaphores.acquire(&want("stale", "a", 1)).unwrap());
        age(&url, "expired", 2);
        age(&url, "stale", 25);

        let swept = semaphores.sweep_expired().unwrap();
        assert_eq!(swept.len(), 1);
        assert_eq!(
            (&*swept[0].external_id, swept[0].reason),
            ("expired", Reason::Expired)
        );
        assert_eq!(swept[0].owner.as_deref(), Some("x"));

        let asked = Mutex::new(Vec::new());
        let swept = semaphores
            .sweep_dead(|owner| {
                asked.lock().unwrap().push(owner.to_owned());
                match owner {
                    "gone" => Liveness::Dead,
                    "here" => Liveness::Alive,
                    _ => Liveness::Unknown,
                }
            })
            .unwrap();
        assert_eq!(swept.len(), 1);
        assert_eq!(
            (&*swept[0].external_id, swept[0].reason),
            ("dead", Reason::OwnerDead)
        );
        let mut asked = asked.into_inner().unwrap();
        asked.sort();
        assert_eq!(asked, ["gone", "here", "who"]);

        let swept = semaphores.sweep_stale(24 * HOUR).unwrap();
        assert_eq!(swept.len(), 1);
        assert_eq!(
            (&*swept[0].external_id, swept[0].reason),
            ("stale", Reason::Stale)
        );

        assert_eq!(semaphores.usage("a").unwrap().held, 2);
        assert_eq!(semaphores.usage("b").unwrap().held, 4);
        assert_eq!(semaphores.check().unwrap(), []);
        assert_eq!(
            semaphores.release("dead").unwrap(),
            Release::AlreadyReleased
        );
        assert_eq!(
            semaphores.renew("stale").unwrap(),
            PermitRenewal::AlreadyReleased
        );
    });
}

/// Somebody may believe in a permit until its ttl ends, however long ago its last renewal was.
#[test]
fn what_has_a_ttl_that_still_runs_is_not_stale() {
    within(HANG, || {
        let (semaphores, url) = semaphores(&[("a", 10)]);
        let guard = semaphores.guard(&want("long", "a", 1).ttl(100 * HOUR), ms(0));
        acquired(semaphores.acquire(&want("endless", "a", 1)).unwrap());
        operator(&url)
            .query_drop(
                "UPDATE contend_permit_request SET updated_at = updated_at - INTERVAL 25 HOUR",
            )
            .unwrap();
        let swept = semaphores.sweep_stale(24 * HOUR).unwrap();
        assert_eq!(ids(swept), ["endless"]);
        assert!(guard.unwrap().release().is_ok());
    });
}

/// Review B9: a request whose row somebody has locked is left for the next time, and does not stop the
/// sweep; and what was renewed meanwhile is not taken.
#[test]
fn a_renewal_between_the_look_and_the_release_wins_and_holds_up_nobody() {
    within(HANG, || {
        let (semaphores, url) = semaphores(&[("a", 10)]);
        let reasons: [(&str, &(dyn Fn() -> Vec<String> + Sync)); 3] = [
            ("expired", &|| ids(semaphores.sweep_expired().unwrap())),
            ("stale", &|| ids(semaphores.sweep_stale(24 * HOUR).unwrap())),
            ("dead", &|| {
                ids(semaphores.sweep_dead(|_| Liveness::Dead).unwrap())
            }),
        ];
        for (id, sweep) in reasons {
            let other = format!("{id}-too");
            for id in [id, &other] {
                let request = want(id, "a", 1).owner("me").ttl(HOUR);
                acquired(semaphores.acquire(&request).unwrap());
                age(&url, id, 48);
            }
            let mut renewer = operator(&url);
            renewer.query_drop("BEGIN").unwrap();
            renewer
                .exec_drop(
                    "UPDATE contend_permit_request SET updated_at = UTC_TIMESTAMP(6) + INTERVAL 1 HOUR, \
                     reclaim_at = UTC_TIMESTAMP(6) + INTERVAL 1 HOUR WHERE external_id = ?",
                    (id,),
                )
                .unwrap();
            assert_eq!(sweep(), [other]);
            renewer.query_drop("COMMIT").unwrap();
            assert_eq!(sweep(), [] as [String; 0], "{id}");
            assert!(semaphores.status(id).unwrap().unwrap().held);
            semaphores.release(id).unwrap();
        }
    });
}

fn ids(swept: Vec<Swept>) -> Vec<String> {
    swept
        .iter()
        .map(|one| one.external_id.to_string())
        .collect()
}

/// Rule "belief ends first": whoever asked for the permits could have them while a guard of the sweeping process
/// still believed in them.
#[test]
fn a_sweep_of_the_dead_ends_the_belief_of_its_own_guards_before_it_releases() {
    within(HANG, || {
        let (semaphores, url) = semaphores(&[("a", 10)]);
        let request = want("job", "a", 1).owner("dead").ttl(HOUR);
        let guard = semaphores.guard(&request, ms(0)).unwrap();
        let request = want("other", "a", 1).owner("alive").ttl(HOUR);
        let other = semaphores.guard(&request, ms(0)).unwrap();
        let mut locker = operator(&url);
        locker.query_drop("BEGIN").unwrap();
        locker
            .query_drop("SELECT * FROM contend_semaphore FOR UPDATE")
            .unwrap();
        thread::scope(|scope| {
            let semaphores = &semaphores;
            let sweep = scope.spawn(move || {
                semaphores.sweep_dead(|owner| match owner {
                    "dead" => Liveness::Dead,
                    _ => Liveness::Alive,
                })
            });
            wait_until(PATIENCE, "its belief has ended", || !guard.is_valid());
            let status = semaphores.status("job").unwrap().unwrap();
            assert!(status.held, "nothing can be released yet");
            locker.query_drop("COMMIT").unwrap();
            sweep.join().unwrap().unwrap();
        });
        assert!(other.is_valid());
        drop(guard);
        assert!(!semaphores.status("job").unwrap().unwrap().held);
    });
}

#[test]
fn a_guard_acquired_after_the_question_keeps_its_belief() {
    within(HANG, || {
        let (semaphores, _) = semaphores(&[("a", 10)]);
        let request = |id: &str| want(id, "a", 1).owner("dead").ttl(HOUR);
        acquired(semaphores.acquire(&request("before")).unwrap());
        let mut after = None;
        let swept = semaphores.sweep_dead(|_| {
            after = Some(semaphores.guard(&request("after"), ms(0)).unwrap());
            Liveness::Dead
        });
        assert_eq!(ids(swept.unwrap()), ["before"]);
        let guard = after.unwrap();
        assert!(guard.is_valid());
        guard.release().unwrap();
    });
}

/// Nobody was told of what a sweep had released before it failed: no guard, no waiting request, no caller.
#[test]
fn a_sweep_that_fails_half_way_says_what_it_took_back() {
    within(HANG, || {
        let (semaphores, url) = semaphores(&[("a", 1_000)]);
        // More than one transaction releases.
        for number in 0..150 {
            let request = want(&format!("r{number:03}"), "a", 1).ttl(HOUR);
            acquired(semaphores.acquire(&request).unwrap());
        }
        let mut conn = operator(&url);
        conn.query_drop(
            "UPDATE contend_permit_request SET reclaim_at = UTC_TIMESTAMP(6) - INTERVAL 1 HOUR + \
             INTERVAL id SECOND",
        )
        .unwrap();
        conn.query_drop(
            "CREATE TRIGGER broken BEFORE UPDATE ON contend_permit_request FOR EACH ROW \
             IF NEW.external_id = 'r149' THEN INSERT INTO half_way VALUES (1); END IF",
        )
        .unwrap();
        assert_eq!(semaphores.sweep_expired().unwrap().len(), 100);
        wait_for_log("contend::semaphore", "a sweep ended after 100 requests");
        assert_eq!(semaphores.usage("a").unwrap().held, 50);
        assert!(semaphores.sweep_expired().is_err(), "it took nothing back");
        conn.query_drop("DROP TRIGGER broken").unwrap();
        assert_eq!(semaphores.sweep_expired().unwrap().len(), 50);
    });
}

/// `usage` counted it as held, and nothing said that whoever asks gets it.
#[test]
fn usage_tells_what_has_expired() {
    within(HANG, || {
        let both = pair("expired", &[("a", 10), ("b", 10)]);
        for (here, _) in &both {
            let soon = want("soon", "a", 2).permits("b", 1).ttl(SHORT);
            acquired(here.acquire(&soon).unwrap());
            acquired(here.acquire(&want("later", "a", 3).ttl(HOUR)).unwrap());
            acquired(here.acquire(&want("never", "a", 1)).unwrap());
            let usage = here.usage("a").unwrap();
            assert_eq!((usage.held, usage.expired), (6, 0));
        }
        for (here, elsewhere) in &both {
            wait_until(PATIENCE, "it has expired", || {
                here.usage("a").unwrap().expired > 0
            });
            let told = |it: &Usage| (it.held, it.expired, it.free, it.requests);
            let usage: Vec<_> = here.list().unwrap().iter().map(told).collect();
            assert_eq!(usage, [(6, 2, 4, 3), (1, 1, 9, 1)]);
            acquired(elsewhere.acquire(&want("wide", "a", 6)).unwrap());
            let usage: Vec<_> = here.list().unwrap().iter().map(told).collect();
            assert_eq!(usage, [(10, 0, 0, 3), (0, 0, 10, 0)]);
        }
    });
}

/// It was in use for as long as nobody swept.
#[test]
fn a_semaphore_of_which_all_that_is_held_has_expired_can_be_deleted() {
    within(HANG, || {
        let both = pair("expired-deleted", &[("a", 10)]);
        for (here, _) in &both {
            acquired(here.acquire(&want("soon", "a", 2).ttl(SHORT)).unwrap());
            let error = here.delete("a").unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidState);
        }
        for (here, _) in &both {
            wait_until(PATIENCE, "it is deleted", || {
                here.delete("a").is_ok_and(|deleted| deleted)
            });
        }
    });
}

/// Review B8: a panicking liveness callback leaves that owner alone, and ends nothing.
#[test]
fn a_liveness_check_that_panics_counts_as_unknown() {
    within(HANG, || {
        let semaphores = contend::connect("memory://panicking-liveness")
            .unwrap()
            .semaphores()
            .unwrap();
        semaphores.create("a", 10).unwrap();
        for owner in ["bad", "dead"] {
            let request = want(owner, "a", 1).owner(owner);
            acquired(semaphores.acquire(&request).unwrap());
        }
        let swept = semaphores.sweep_dead(|owner| match owner {
            "bad" => std::panic::resume_unwind(Box::new(())),
            _ => Liveness::Dead,
        });
        assert_eq!(ids(swept.unwrap()), ["dead"]);
        assert_eq!(semaphores.usage("a").unwrap().held, 1);
    });
}

#[test]
fn a_sweep_of_more_than_a_batch_takes_all_and_cleaning_up_leaves_what_is_held() {
    within(HANG, || {
        let (semaphores, url) = semaphores(&[("a", 10_000)]);
        let mut conn = operator(&url);
        let rows: Vec<String> = (1..=1_000)
            .map(|n| {
                format!("({n}, 'r{n}', {n}, 'ACQUIRED', 1, UTC_TIMESTAMP(6) - INTERVAL 1 HOUR)")
            })
            .collect();
        conn.query_drop(format!(
            "INSERT INTO contend_permit_request (id, external_id, token, state, ttl_seconds, reclaim_at) VALUES {}",
            rows.join(", ")
        ))
        .unwrap();
        conn.query_drop(
            "INSERT INTO contend_permit (semaphore_id, permit_request_id, count, state) \
             SELECT s.id, r.id, 2, 'ACQUIRED' FROM contend_semaphore s, contend_permit_request r",
        )
        .unwrap();
        assert_eq!(semaphores.repair().unwrap().len(), 1);
        acquired(semaphores.acquire(&want("held", "a", 5)).unwrap());
        assert_eq!(semaphores.sweep_expired().unwrap().len(), 1_000);
        assert_eq!(semaphores.usage("a").unwrap().held, 5);
        assert_eq!(semaphores.check().unwrap(), []);

        assert_eq!(semaphores.delete_requests(HOUR, 300).unwrap(), 0);
        conn.query_drop(
            "UPDATE contend_permit_request SET updated_at = updated_at - INTERVAL 8 DAY",
        )
        .unwrap();
        assert_eq!(
            semaphores.delete_requests(7 * 24 * HOUR, 300).unwrap(),
            1_000
        );
        assert_eq!(
            number(&url, "SELECT COUNT(*) FROM contend_permit_request"),
            1
        );
        assert_eq!(number(&url, "SELECT COUNT(*) FROM contend_permit"), 1);
        assert_eq!(semaphores.status("held").unwrap().unwrap().permits.len(), 1);

        semaphores.set_capacity("a", 1, None).unwrap();
        assert_eq!(semaphores.delete_history(HOUR, 10).unwrap(), 0);
        conn.query_drop(
            "UPDATE contend_semaphore_capacity_change SET changed_at = changed_at - INTERVAL 31 DAY",
        )
        .unwrap();
        assert_eq!(semaphores.delete_history(30 * 24 * HOUR, 10).unwrap(), 1);
        assert!(semaphores.delete_history(HOUR, 0).is_err());
    });
}

#[test]
fn maintenance_is_done_by_the_leader_only_and_goes_on_when_it_leaves() {
    within(HANG, || {
        let (semaphores, url) = semaphores(&[("a", 10)]);
        // Long enough to lead through a busy moment; dropping it hands it over at once.
        let lease = "ttl=20s&transition=1s&create_table=true";
        let factory = contend::connect(&format!("{url}?{lease}")).unwrap();
        let asked = [Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0))];
        let mut both: Vec<_> = asked
            .iter()
            .map(|asked| {
                let asked = Arc::clone(asked);
                semaphores
                    .maintenance()
                    .orphan_interval(ms(50))
                    .liveness(move |_| {
                        asked.fetch_add(1, Ordering::SeqCst);
                        Liveness::Alive
                    })
                    .start(&factory)
                    .unwrap()
            })
            .collect();
        acquired(semaphores.acquire(&want("1", "a", 1).owner("me")).unwrap());
        acquired(semaphores.acquire(&want("2", "a", 1).ttl(SHORT)).unwrap());
        wait_until(PATIENCE, "the leader sweeps", || {
            semaphores.usage("a").unwrap().held == 1
        });
        let counts = || asked.each_ref().map(|asked| asked.load(Ordering::SeqCst));
        wait_until(PATIENCE, "the leader asks again and again", || {
            counts().into_iter().max() > Some(3)
        });
        let leader = both.iter().position(|it| it.is_leader()).unwrap();
        assert_eq!(counts()[1 - leader], 0, "who does not lead does nothing");
        drop(both.remove(leader));
        let others = counts();
        wait_until(PATIENCE, "the other one takes over", || {
            counts()[1 - leader] > others[1 - leader] + 2
        });
        assert_eq!(counts()[leader], others[leader]);
        drop(both);
        drop(factory);
        let error = semaphores
            .maintenance()
            .orphan_interval(Duration::ZERO)
            .start(&contend::connect("memory://").unwrap())
            .unwrap_err();
        assert!(error.to_string().contains("never rest"), "{error}");
    });
}

#[test]
fn a_permit_that_expired_can_be_renewed_until_a_sweep_comes() {
    within(HANG, || {
        let (semaphores, url) = semaphores(&[("a", 1)]);
        acquired(semaphores.acquire(&want("job", "a", 1).ttl(SHORT)).unwrap());
        wait_until(PATIENCE, "it has expired", || {
            let status = semaphores.status("job").unwrap().unwrap();
            assert!(status.held);
            status.expires_in == Some(Duration::ZERO)
        });
        operator(&url)
            .query_drop("UPDATE contend_permit_request SET ttl_seconds = 3600")
            .unwrap();
        assert_eq!(semaphores.renew("job").unwrap(), PermitRenewal::Renewed);
        assert_eq!(semaphores.sweep_expired().unwrap(), []);
        let other = connect(&url);
        assert!(other.status("job").unwrap().unwrap().expires_in > Some(HOUR / 2));
    });
}

/// Bug 2 of the second edition: an acquire took back a hundred requests at most, and was told that it is exhausted.
#[test]
fn an_acquire_takes_back_all_that_has_expired() {
    within(HANG, || {
        let (semaphores, url) = semaphores(&[("a", 500)]);
        let mut operator = operator(&url);
        let requests: Vec<String> = (1..=500)
            .map(|number| format!("({number}, 'old-{number}', 'ACQUIRED', 1, NOW(6), NOW(6))"))
            .collect();
        let permits: Vec<String> = (1..=500)
            .map(|number| format!("(1, {number}, 1, 'ACQUIRED')"))
            .collect();
        operator
            .query_drop(format!(
                "INSERT INTO contend_permit_request (id, external_id, state, ttl_seconds, expires_at, \
                 reclaim_at) VALUES {}",
                requests.join(", ")
            ))
            .unwrap();
        operator
            .query_drop(format!(
                "INSERT INTO contend_permit (semaphore_id, permit_request_id, count, state) VALUES {}",
                permits.join(", ")
            ))
            .unwrap();
        operator
            .query_drop("UPDATE contend_semaphore SET used = 500")
            .unwrap();
        assert_eq!(semaphores.check().unwrap(), []);
        acquired(semaphores.acquire(&want("all", "a", 500)).unwrap());
        assert_eq!(semaphores.check().unwrap(), []);
    });
}
