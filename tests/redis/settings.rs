//! Redis: how it is set up, and what a caller reads about a wrong setting.

use std::net::SocketAddr;
use std::sync::Mutex;
use std::time::Duration;

use contend::backend::{Attempt, OnRefusal};
use contend::{Error, ErrorKind, Factory, connect};
use testbed::{RedisServer, wait_until, within};

use crate::driven::{Driven, HANG, PATIENCE, soon, subscribe};

/// Acquires, renews, listens and releases, and returns the first error.
fn use_it(factory: &Factory) -> Result<(), Error> {
    let mut contender = Driven::at(factory, "m", "a").raw;
    subscribe(factory, "m", soon())?;
    let Attempt::Granted(grant) = contender.acquire(OnRefusal::Enqueue, soon())? else {
        panic!("refused");
    };
    contender.renew(grant.owner.fence(), soon())?;
    contender.release(grant.owner.fence(), soon())?;
    Ok(())
}

#[test]
fn url_says_all_that_a_builder_can() {
    let factory = connect(
        "redis://127.0.0.1:1/3?ttl=2s&transition=500ms&initial_delay=1s&prefix=app&pool_size=4&\
         connect_timeout=1s&simba=on&tls=no",
    )
    .unwrap();
    assert_eq!(factory.realm(), "redis://127.0.0.1:1/3?prefix=app");
    assert_eq!(factory.lease().ttl(), Duration::from_secs(2));
    let cluster = connect("redis+cluster://b:2,a,b:2").unwrap();
    assert_eq!(cluster.realm(), "redis+cluster://a:6379,b:2/0?prefix=simba");
    let sentinel = connect("redis+sentinel://u:p@b,a:1/mymaster/3?sentinel_password=x").unwrap();
    assert_eq!(
        sentinel.realm(),
        "redis+sentinel://a:1,b:26379/mymaster/3?prefix=simba"
    );
    let socket = connect("redis:///2?socket=/run/redis.sock").unwrap();
    assert_eq!(
        socket.realm(),
        "redis+unix:///run/redis.sock/2?prefix=simba"
    );
}

#[test]
fn unusable_url_is_refused_with_what_is_allowed() {
    let error = |url: &str| connect(url).map(|_| ()).unwrap_err();
    assert_eq!(
        error("redis://h?tll=1s").to_string(),
        "unknown parameter \"tll\" in a redis:// URL; known are: \
         socket, ttl, transition, initial_delay, prefix, pool_size, connect_timeout, tls, tls_ca, tls_cert, tls_key, \
         sentinel_user, sentinel_password, simba, replicas"
    );
    for (url, says) in [
        ("redis://", "names a host"),
        ("redis://h1,h2", "redis+cluster://host1,host2"),
        ("redis://h/x", "the number of a database"),
        ("redis+cluster://h/1", "only database 0"),
        ("redis://h?prefix={x}", "no brace"),
        ("redis://h?pool_size=0", "from 1 to 1000"),
        ("redis://h?pool_size=4294967295", "from 1 to 1000"),
        ("redis://h?pool_size=x", "\"x\" is not a whole number"),
        ("redis://h?simba=maybe", "neither true nor false"),
        ("redis://h?tls_ca=/none", "need tls=true"),
        ("redis+sentinel://h", "names the master"),
        ("redis+sentinel://h/m/x", "the number of a database"),
        ("redis+cluster://h?socket=/s", "one server's"),
        ("redis:///0?socket=/s&tls=true", "not encrypted"),
        ("redis://h?connect_timeout=0s", "connect_timeout"),
        ("redis://h:99999", "host:port"),
    ] {
        let error = error(url);
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{url}: {error}");
        assert!(error.to_string().contains(says), "{url}: {error}");
    }
    if cfg!(feature = "tls") {
        let encrypted = connect("rediss://h?tls=off").unwrap();
        assert_eq!(encrypted.realm(), "rediss://h:6379/0?prefix=simba");
    } else {
        assert_eq!(error("rediss://h").kind(), ErrorKind::FeatureDisabled);
    }
    for host in ["me:s3cret@h", "s3cret@h"] {
        let builder = contend::redis::Builder::new(host);
        let shown = format!("{builder:?} {}", builder.clone().build().unwrap_err());
        assert!(!shown.contains("s3cret"), "{shown}");
    }
}

/// A prefix is a text, also where the server takes a pattern.
#[test]
fn prefix_with_wildcards_lists_its_own_mutexes() {
    within(HANG, || {
        let server = RedisServer::start();
        let factories = [r"a[*]?\", "a[x]y/"].map(|prefix| {
            let builder = contend::redis::Builder::new(server.addr().to_string());
            builder.prefix(prefix).build().unwrap()
        });
        for (number, factory) in factories.iter().enumerate() {
            Driven::at(factory, &format!("m{number}"), "a").own();
        }
        for (number, factory) in factories.iter().enumerate() {
            let listed = factory.list().unwrap();
            let names: Vec<_> = listed.iter().map(|name| &**name).collect();
            assert_eq!(names, [format!("m{number}")]);
        }
    });
}

/// What the README lists.
const RIGHTS: &str = "~simba:* resetchannels &simba:* +eval +evalsha +publish +subscribe +unsubscribe +hello +ping \
     +time +mget +get +set +psetex +del +exists +pttl +pexpire +zadd +zrem +zpopmin";

fn with_rights(extra: &[&str]) -> (RedisServer, Factory) {
    let server = RedisServer::start();
    let mut user = vec!["ACL", "SETUSER", "app", "on", ">pw"];
    user.extend(RIGHTS.split_whitespace());
    user.extend(extra);
    assert_eq!(server.cli(&user).trim(), "OK");
    let factory = connect(&format!("redis://app:pw@127.0.0.1:{}", server.port())).unwrap();
    (server, factory)
}

#[test]
fn the_rights_that_are_listed_suffice_and_each_is_needed() {
    within(HANG, || {
        let (_server, factory) = with_rights(&[]);
        use_it(&factory).unwrap();
        for missing in [
            "-evalsha",
            "-publish",
            "-subscribe",
            "-exists",
            "resetchannels",
        ] {
            let (server, factory) = with_rights(&[missing]);
            let error = use_it(&factory).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Denied, "{missing}: {error:?}");
            assert!(
                error.to_string().contains("the user needs"),
                "{missing}: {error}"
            );
            // Denied means: nothing was done.
            assert_eq!(
                server.cli(&["EXISTS", "simba:{m}"]).trim(),
                "0",
                "{missing}"
            );
        }
    });
}

/// What all of this process logged.
static LOG: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct Logger;

impl log::Log for Logger {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        if record.level() <= log::Level::Warn {
            LOG.lock().unwrap().push(record.args().to_string());
        }
    }

    fn flush(&self) {}
}

/// What was logged about the server at `address`.
fn warnings(address: SocketAddr) -> Vec<String> {
    let address = format!("redis at {address} ");
    let log = LOG.lock().unwrap();
    let about_it = log.iter().filter(|line| line.contains(&address));
    about_it.cloned().collect()
}

#[test]
fn evicting_server_is_warned_about_once() {
    log::set_logger(&Logger).unwrap();
    log::set_max_level(log::LevelFilter::Warn);
    within(HANG, || {
        let server = RedisServer::start_with(&["--maxmemory-policy", "allkeys-lru"]);
        let factory = connect(&server.url()).unwrap();
        use_it(&factory).unwrap();
        use_it(&factory).unwrap();
        let warnings = warnings(server.addr());
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        assert!(warnings[0].contains("allkeys-lru"), "{warnings:?}");
    });
}

/// Their threads: `alone::redis_threads`.
#[test]
fn hundred_services_share_nine_connections_and_leave_none() {
    within(HANG, || {
        let server = RedisServer::start();
        let clients = || {
            let list = server.cli(&["CLIENT", "LIST"]);
            // Not the one that asks.
            list.lines()
                .filter(|line| !line.contains("cmd=client"))
                .count()
        };
        let factory = connect(&server.url()).unwrap();
        let services: Vec<_> = (0..100)
            .map(|number| {
                let service = factory.contend(format!("m{}", number / 2)).build().unwrap();
                service.start().unwrap();
                service
            })
            .collect();
        wait_until(PATIENCE, "every mutex has an owner", || {
            services.iter().filter(|service| service.is_owner()).count() == 50
        });
        assert!(clients() <= 9, "{}", server.cli(&["CLIENT", "LIST"]));
        drop(services);
        drop(factory);
        wait_until(PATIENCE, "all connections are closed", || clients() == 0);
    });
}
