//! A Redis cluster whose slots move, and one of whose nodes has forgotten the others.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use contend::backend::{Attempt, OnRefusal, Renewal};
use contend::redis::Builder;
use contend::{ErrorKind, EventKind, Factory, Moment};
use testbed::{RedisCluster, wait_until, within};

use crate::conformance::{lease, next, started};
use crate::driven::{Driven, HANG, PATIENCE, from_env, ms, soon};

fn factory(cluster: &RedisCluster) -> Factory {
    let factory = Builder::cluster(cluster.addresses())
        .ttl(lease().ttl())
        .transition(lease().transition());
    factory.build().unwrap()
}

/// The ids of two masters that know each other: the one that has the key, and another.
fn two_masters(cluster: &RedisCluster, key: &str) -> (usize, usize) {
    let from = cluster.master_of(key, 0);
    let to = cluster
        .masters()
        .into_iter()
        .find(|it| *it != from)
        .unwrap();
    (from, to)
}

fn node_id(cluster: &RedisCluster, index: usize) -> String {
    cluster
        .node(index)
        .cli(&["CLUSTER", "MYID"])
        .trim()
        .to_owned()
}

fn slot_of(cluster: &RedisCluster, key: &str) -> String {
    let slot = cluster.node(0).cli(&["CLUSTER", "KEYSLOT", key]);
    slot.trim().to_owned()
}

/// Review H4: every mutex in a slot that is on its way stopped, an undisturbed leader's included.
#[test]
fn a_slot_that_is_on_its_way_unseats_nobody() {
    within(HANG, || {
        let cluster = RedisCluster::start();
        let factory = factory(&cluster);
        let (from, to) = two_masters(&cluster, "simba:{m}");
        let slot = slot_of(&cluster, "simba:{m}");
        let (source, target) = (cluster.node(from), cluster.node(to));
        let mut owner = Driven::with(&factory, "m", "owner", lease());
        let fence = owner.own();
        let mut renewed = || {
            let renewal = owner.raw.renew(fence, soon()).unwrap();
            assert!(matches!(renewal, Renewal::Renewed(_)), "{renewal:?}");
        };
        renewed();
        let setslot = |node: &testbed::RedisServer, state: &str, id: usize| {
            let id = node_id(&cluster, id);
            let said = node.cli(&["CLUSTER", "SETSLOT", &slot, state, &id]);
            assert_eq!(said.trim(), "OK");
        };
        setslot(target, "IMPORTING", from);
        setslot(source, "MIGRATING", to);
        // No key has moved: the source answers.
        renewed();
        let port = target.port().to_string();
        let keys = source.cli(&["CLUSTER", "GETKEYSINSLOT", &slot, "100"]);
        assert_eq!(keys.lines().count(), 3, "{keys}");
        let mut migrate = vec!["MIGRATE", "127.0.0.1", &port, "", "0", "5000", "KEYS"];
        migrate.extend(keys.lines());
        assert_eq!(source.cli(&migrate).trim(), "OK");
        // All have: the target does, after ASKING.
        renewed();
        // And it can be released, although the queue is nowhere.
        assert!(owner.raw.release(fence, soon()).unwrap());
        for index in cluster.masters() {
            setslot(cluster.node(index), "NODE", to);
        }
        let mut other = Driven::with(&factory, "m", "other", lease());
        let end = Moment::now() + PATIENCE;
        let second = loop {
            match other.raw.acquire(OnRefusal::Leave, soon()) {
                Ok(Attempt::Granted(grant)) => break grant.owner.fence(),
                other => assert!(!end.remaining().is_zero(), "{other:?}"),
            }
            thread::sleep(ms(10));
        };
        assert!(second > fence, "{second} after {fence}");
    });
}

/// Moves so many slots, each from its master to the next one, as `redis-cli --cluster reshard` does, spread
/// over `during` at least. Returns how many there were, and how long it took.
fn move_slots(cluster: &RedisCluster, most: usize, during: Duration) -> (u32, Duration) {
    let masters = cluster.masters();
    let ids: Vec<String> = masters.iter().map(|it| node_id(cluster, *it)).collect();
    let mut nodes: Vec<redis::Connection> = (masters.iter())
        .map(|it| redis::Client::open(cluster.node(*it).url()).unwrap())
        .map(|client| client.get_connection().unwrap())
        .collect();
    let map = cluster.node(0).cli(&["CLUSTER", "NODES"]);
    let mut owned: Vec<(usize, u16)> = map
        .lines()
        .map(|line| line.split(' ').collect::<Vec<_>>())
        .filter_map(|fields| Some((ids.iter().position(|id| id == fields[0])?, fields)))
        .flat_map(|(owner, fields)| {
            let ranges: Vec<String> = fields[8..].iter().map(|it| (*it).to_owned()).collect();
            ranges.into_iter().flat_map(move |range| {
                let (first, last) = range.split_once('-').unwrap_or((&range, &range));
                let slots = first.parse::<u16>().unwrap()..=last.parse().unwrap();
                slots.map(move |slot| (owner, slot))
            })
        })
        .collect();
    // From all in turns, as a master without a slot would become a replica; and many at a time, as the new
    // master takes a new epoch with the first one.
    owned.sort_by_key(|(_, slot)| slot % 5_461 / 500);
    owned.truncate(most);
    let began = Instant::now();
    let each = during / u32::try_from(owned.len()).unwrap();
    let mut moved = 0;
    for (from, slot) in owned {
        let to = (from + 1) % ids.len();
        let setslot = |state: &str, id: &str| {
            let mut command = redis::cmd("CLUSTER");
            command.arg("SETSLOT").arg(slot).arg(state).arg(id);
            command
        };
        let (importing, migrating) = (
            setslot("IMPORTING", &ids[from]),
            setslot("MIGRATING", &ids[to]),
        );
        importing.exec(&mut nodes[to]).unwrap();
        migrating.exec(&mut nodes[from]).unwrap();
        loop {
            let keys: Vec<String> = (redis::cmd("CLUSTER")
                .arg("GETKEYSINSLOT")
                .arg(slot)
                .arg(100))
            .query(&mut nodes[from])
            .unwrap();
            if keys.is_empty() {
                break;
            }
            let mut migrate = redis::cmd("MIGRATE");
            migrate
                .arg("127.0.0.1")
                .arg(cluster.node(masters[to]).port());
            migrate.arg("").arg(0).arg(5_000).arg("KEYS").arg(&keys);
            migrate.exec(&mut nodes[from]).unwrap();
        }
        // The new owner first, as the specification asks for, then the old one.
        for node in [to, from, (to + 1) % ids.len()] {
            wait_until(PATIENCE, "the slot has moved", || {
                let said = setslot("NODE", &ids[to]).exec(&mut nodes[node]);
                // Valkey asks for a replica that keeps up.
                let waits = |error: &redis::RedisError| error.code() == Some("NOREPLICAS");
                assert!(said.as_ref().err().is_none_or(waits), "{said:?}");
                said.is_ok()
            });
        }
        moved += 1;
        thread::sleep((each * moved).saturating_sub(began.elapsed()));
    }
    (moved, began.elapsed())
}

/// Slots move while leaders lead and lockers lock: some, or all if `CONTEND_TEST_RESHARD_SECONDS` says for how
/// long at least.
#[test]
fn a_resharding_under_load_disturbs_no_leader() {
    let seconds = from_env("CONTEND_TEST_RESHARD_SECONDS", 0);
    let most = if seconds == 0 { 1_500 } else { 16_384 };
    within(HANG + Duration::from_secs(seconds), || {
        let cluster = RedisCluster::start();
        let factory = factory(&cluster);
        let leaders: Vec<_> = (0..12)
            .map(|number| {
                let (leader, events) = started(&factory, &format!("lead-{number}"), "leader");
                let fence = next(&events, EventKind::Acquired).fence();
                (leader, events, fence)
            })
            .collect();
        let stop = Arc::new(AtomicBool::new(false));
        let (turns, failed) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let inside: Arc<[AtomicBool; 2]> = Arc::default();
        let lockers: Vec<_> = (0..4)
            .map(|number| {
                // Two and two for the same mutex.
                let mutex = format!("lock-{}", number / 2);
                let (stop, turns, failed) =
                    (Arc::clone(&stop), Arc::clone(&turns), Arc::clone(&failed));
                let inside = Arc::clone(&inside);
                let mut one = Driven::with(
                    &self::factory(&cluster),
                    &mutex,
                    &format!("{number}"),
                    lease(),
                );
                thread::spawn(move || {
                    let mut last = 0;
                    while !stop.load(Ordering::Relaxed) {
                        let by = || Moment::now() + lease().request_limit();
                        match one.raw.acquire(OnRefusal::Enqueue, by()) {
                            Ok(Attempt::Granted(grant)) => {
                                let fence = grant.owner.fence();
                                assert!(fence > last, "{fence} after {last}");
                                last = fence;
                                let inside = &inside[number / 2];
                                assert!(!inside.swap(true, Ordering::SeqCst), "two own at once");
                                inside.store(false, Ordering::SeqCst);
                                match one.raw.release(fence, by()) {
                                    Ok(_) => turns.fetch_add(1, Ordering::Relaxed),
                                    Err(_) => failed.fetch_add(1, Ordering::Relaxed),
                                };
                            }
                            Ok(Attempt::Refused(refusal)) => {
                                one.parker.park(Moment::now() + refusal.retry_in);
                            }
                            Err(error) => {
                                assert!(error.is_transient(), "{error:?}");
                                failed.fetch_add(1, Ordering::Relaxed);
                                thread::sleep(ms(5));
                            }
                        }
                    }
                })
            })
            .collect();
        let (moved, took) = move_slots(&cluster, most, Duration::from_secs(seconds));
        let turns_then = turns.load(Ordering::Relaxed);
        wait_until(PATIENCE, "the lockers go on", || {
            turns.load(Ordering::Relaxed) > turns_then + 20
        });
        stop.store(true, Ordering::Relaxed);
        for locker in lockers {
            locker.join().unwrap();
        }
        println!(
            "{moved} slots moved in {took:.1?}: {} locks, {} failed calls, 0 overlaps",
            turns.load(Ordering::Relaxed),
            failed.load(Ordering::Relaxed)
        );
        assert_eq!(moved as usize, most);
        for (leader, events, fence) in &leaders {
            let seen: Vec<_> = events
                .try_iter()
                .map(|event| format!("{event:?}"))
                .collect();
            let unseated = format!("{seen:?}, {:?}", leader.last_error());
            assert_eq!(leader.fence(), *fence, "{unseated}");
            assert!(seen.is_empty(), "{unseated}");
        }
        println!("{} leaders, 0 of them unseated", leaders.len());
    });
}

/// Review H1: one isolated node took the whole factory down for good.
#[test]
fn a_node_that_forgot_the_others_takes_nobody_down() {
    within(HANG, || {
        let cluster = RedisCluster::start_with(&["--enable-debug-command", "local"]);
        let factory = factory(&cluster);
        let mutexes: Vec<String> = (0..6).map(|number| format!("m{number}")).collect();
        let mut contenders: Vec<_> = mutexes
            .iter()
            .map(|mutex| Driven::with(&factory, mutex, "a", lease()))
            .collect();
        for contender in &mut contenders {
            let fence = contender.own();
            contender.release(fence);
        }
        // It forgets everybody, its replica takes over, and the other five say that all is well.
        let victim = cluster.master_of("simba:{m0}", 0);
        let port = cluster.node(victim).port().to_string();
        let heir = cluster
            .replicas()
            .into_iter()
            .find(|&it| cluster.node(it).cli(&["ROLE"]).lines().nth(2) == Some(port.as_str()))
            .unwrap();
        let ids: Vec<String> = (0..6).map(|index| node_id(&cluster, index)).collect();
        // Deaf to packets of all types: the others would ask a Valkey 9.1 that forgot them whether it is there, hear
        // from it whom to forget, and forget each other too.
        let deaf = ["DEBUG", "DROP-CLUSTER-PACKET-FILTER", "-2"];
        assert_eq!(cluster.node(victim).cli(&deaf).trim(), "OK");
        // In one go: since 7.2 a node passes on whom it forgot to those that it still knows.
        let mut forget = redis::pipe();
        forget.atomic();
        for (index, id) in ids.iter().enumerate() {
            if index != victim {
                forget.cmd("CLUSTER").arg("FORGET").arg(id);
            }
        }
        let client = redis::Client::open(cluster.node(victim).url()).unwrap();
        forget.exec(&mut client.get_connection().unwrap()).unwrap();
        let said = cluster.node(heir).cli(&["CLUSTER", "FAILOVER", "TAKEOVER"]);
        assert_eq!(said.trim(), "OK");
        for index in (0..6).filter(|index| *index != victim) {
            wait_until(PATIENCE, "the others know the new master", || {
                let node = cluster.node(index);
                node.cli(&["CLUSTER", "INFO"]).contains("cluster_state:ok")
                    && node
                        .cli(&["CLUSTER", "NODES"])
                        .lines()
                        .any(|line| line.starts_with(&ids[heir]) && line.contains("master"))
            });
        }
        let map = cluster.node(victim).cli(&["CLUSTER", "NODES"]);
        assert_eq!(map.lines().count(), 1, "it does not stand alone:\n{map}");
        let began = Instant::now();
        let mut served = 0;
        for (contender, mutex) in contenders.iter_mut().zip(&mutexes) {
            let end = Instant::now() + PATIENCE;
            loop {
                let by = Moment::now() + lease().request_limit();
                match contender.raw.acquire(OnRefusal::Leave, by) {
                    Ok(Attempt::Granted(grant)) => {
                        contender.raw.release(grant.owner.fence(), by).unwrap();
                        served += 1;
                        break;
                    }
                    other => assert!(Instant::now() < end, "{mutex}: {other:?}"),
                }
                thread::sleep(ms(20));
            }
        }
        println!("{served} of 6 mutexes served after {:?}", began.elapsed());
    });
}

/// A panic of the caller's own closure, in the thread that finds out who has the slots, would leave the
/// factory with the map that it has, or with none, for good.
#[test]
fn a_credentials_callback_that_panics_does_not_end_the_map_of_the_slots() {
    within(HANG, || {
        let cluster = RedisCluster::start();
        for node in cluster.nodes() {
            node.cli(&["ACL", "SETUSER", "app", "on", ">pw", "~*", "&*", "+@all"]);
        }
        let panics = Arc::new(AtomicBool::new(true));
        let asked = Arc::clone(&panics);
        let factory = Builder::cluster(cluster.addresses())
            .credentials(move || {
                assert!(!asked.load(Ordering::SeqCst), "the vault is sealed");
                ("app".to_owned(), "pw".to_owned())
            })
            .build()
            .unwrap();
        let mut one = Driven::at(&factory, "m", "a");
        let mut acquire = || {
            let by = Moment::now() + Duration::from_secs(5);
            one.raw.acquire(OnRefusal::Leave, by).map(drop)
        };
        let error = acquire().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
        let text = error.to_string();
        assert!(text.contains("the credentials callback panicked"), "{text}");
        panics.store(false, Ordering::SeqCst);
        wait_until(PATIENCE, "it is served", || acquire().is_ok());
    });
}

/// How many connections the nodes have accepted, those of this question included.
fn accepted(cluster: &RedisCluster) -> usize {
    let of = |node: &testbed::RedisServer| {
        let stats = node.cli(&["INFO", "stats"]);
        let count = stats.split("total_connections_received:").nth(1).unwrap();
        count
            .lines()
            .next()
            .unwrap()
            .trim()
            .parse::<usize>()
            .unwrap()
    };
    cluster.nodes().iter().map(of).sum()
}

/// An error that says nothing about the slots made the factory connect to a node ten times a second.
#[test]
fn full_memory_opens_no_connections() {
    within(HANG, || {
        let cluster = RedisCluster::start();
        let factory = factory(&cluster);
        let mut one = Driven::with(&factory, "m", "a", lease());
        let fence = one.own();
        one.release(fence);
        let limit = |bytes: &str| {
            for node in cluster.nodes() {
                node.cli(&["CONFIG", "SET", "maxmemory", bytes]);
            }
        };
        limit("1");
        let before = accepted(&cluster);
        let end = Instant::now() + ms(2_000);
        while Instant::now() < end {
            let error = one.raw.acquire(OnRefusal::Leave, soon()).unwrap_err();
            assert!(error.to_string().contains("raise maxmemory"), "{error}");
            thread::sleep(ms(10));
        }
        // Those of the question itself, and a few that replace what was idle.
        let opened = accepted(&cluster) - before - cluster.nodes().len();
        assert!(opened <= 6, "{opened} connections in 2 s");
        limit("0");
    });
}

/// `contend status` failed once after every move of a slot.
#[test]
fn inspection_follows_a_failover() {
    within(HANG, || {
        let cluster = RedisCluster::start();
        let factory = factory(&cluster);
        let mut owner = Driven::with(&factory, "m", "owner", lease());
        owner.own();
        Driven::with(&factory, "m", "waiter", lease()).queue();
        let waiters = || factory.participants("m").map(|it| it.len());
        assert_eq!(waiters().unwrap(), 1);
        let master = cluster.master_of("simba:{m}", 0);
        let port = cluster.node(master).port().to_string();
        let role = |index: usize| cluster.node(index).cli(&["ROLE"]);
        let heir = (cluster.replicas().into_iter())
            .find(|it| role(*it).lines().nth(2) == Some(port.as_str()))
            .unwrap();
        cluster.node(heir).cli(&["CLUSTER", "FAILOVER"]);
        wait_until(PATIENCE, "the old master knows it", || {
            role(master).starts_with("slave") && role(heir).starts_with("master")
        });
        assert_eq!(waiters().unwrap(), 1, "MOVED is followed");
    });
}

/// `condition()` promises no I/O, and asked for the slots.
#[test]
fn health_asks_no_node() {
    within(HANG, || {
        let seeds: Vec<_> = (0..2)
            .map(|_| std::net::TcpListener::bind("127.0.0.1:0").unwrap())
            .collect();
        let address = |index: usize| seeds[index].local_addr().unwrap().to_string();
        seeds[1].set_nonblocking(true).unwrap();
        // The first connection of the first node is opened ahead.
        let factory = Builder::cluster([address(0), address(1)]).build().unwrap();
        let end = Instant::now() + ms(500);
        while Instant::now() < end {
            let _ = factory.health();
            thread::sleep(ms(5));
        }
        let asked = seeds.iter().filter(|seed| {
            seed.set_nonblocking(true).unwrap();
            seed.accept().is_ok()
        });
        assert!(asked.count() <= 1, "only what was opened ahead");
    });
}

/// A node that answers nothing must not take the time of those whose mutexes lie elsewhere.
#[test]
fn hung_node_costs_others_no_renewal() {
    within(HANG, || {
        let cluster = RedisCluster::start();
        let factory = factory(&cluster);
        let hung = cluster.master_of("simba:{m0}", 0);
        let elsewhere = (1..100).map(|number| format!("m{number}"));
        let elsewhere = elsewhere
            .into_iter()
            .find(|it| cluster.master_of(&format!("simba:{{{it}}}"), 0) != hung)
            .unwrap();
        let mut victim = Driven::at(&factory, "m0", "a");
        victim.own();
        let mut owner = Driven::at(&factory, &elsewhere, "a");
        let fence = owner.own();
        cluster.node(hung).pause();
        for _ in 0..5 {
            // Makes the map stale.
            let by = Moment::now() + ms(200);
            let _ = victim.raw.acquire(OnRefusal::Leave, by);
            let by = Moment::now() + contend::Lease::default().request_limit();
            let renewal = owner.raw.renew(fence, by).unwrap();
            assert!(matches!(renewal, Renewal::Renewed(_)), "{renewal:?}");
        }
        cluster.node(hung).resume();
    });
}
