//! Passwords: in no output, whatever happens.

use std::error::Error as _;
use std::time::{Duration, Instant};

use contend::Factory;
use parking_lot::Mutex;
use testbed::{MariaDbServer, RedisServer, ZooKeeperServer, within};

/// Different for each kind of value, so that a failure says which one leaked; as written and encoded.
const SECRETS: [&str; 3] = ["open-sesame-4711", "s3cr%2Ft-k3y", "s3cr/t-k3y"];

/// Every line that is logged in this process, at every level.
static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct Listener;

impl log::Log for Listener {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        let line = format!("{} {}: {}", record.level(), record.target(), record.args());
        LINES.lock().push(line);
    }

    fn flush(&self) {}
}

#[track_caller]
fn shows_no_secret(what: &str, text: &str) {
    for secret in SECRETS {
        assert!(!text.contains(secret), "{what}: {text}");
    }
}

/// An error with all its causes, as they are printed.
fn all_of(error: &contend::Error) -> String {
    let mut text = format!("{error} {error:?} {error:#?}");
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(&format!(" {cause} {cause:?}"));
        source = cause.source();
    }
    text
}

fn look_at(url: &str, factory: &Factory) {
    shows_no_secret(
        url,
        &format!("{factory:?} {factory:#?} {}", factory.realm()),
    );
    let (service, events) = factory.contend("secret").failures(true).channel().unwrap();
    let locker = factory.locker("secret-lock").build().unwrap();
    shows_no_secret("service", &format!("{service:?} {service:#?}"));
    shows_no_secret("locker", &format!("{locker:?} {locker:#?}"));
    service.start().unwrap();
    let errors = [
        locker.try_lock().err(),
        locker.try_lock_for(Duration::from_millis(300)).err(),
        factory.ping(Duration::from_millis(300)).err(),
        factory.owner("secret").err(),
        factory.list().err(),
    ];
    for error in errors.iter().flatten() {
        shows_no_secret("error", &all_of(error));
    }
    let end = Instant::now() + Duration::from_millis(700);
    while Instant::now() < end {
        if let Ok(event) = events.recv_timeout(Duration::from_millis(50)) {
            shows_no_secret("event", &format!("{event:?}"));
        }
    }
    if let Some(error) = service.last_error() {
        shows_no_secret("last error", &all_of(&error));
    }
    service.stop().unwrap();
}

/// "Credentials in a URL never reach a message, a log line or a `Debug` output."
#[test]
fn password_appears_nowhere() {
    within(Duration::from_secs(150), || {
        let _ = log::set_logger(Box::leak(Box::new(Listener)));
        log::set_max_level(log::LevelFilter::Trace);
        let redis = RedisServer::start_with(&["--requirepass", "another"]);
        let open_redis = RedisServer::start();
        let mysql = MariaDbServer::start();
        let zookeeper = ZooKeeperServer::start();
        let (secret, encoded) = (SECRETS[0], SECRETS[1]);
        let urls = [
            // No server there.
            format!("redis://user:{secret}@127.0.0.1:1?ttl=2s"),
            format!("redis+cluster://user:{encoded}@127.0.0.1:1?ttl=2s"),
            format!("mysql://user:{encoded}@127.0.0.1:1/d?ttl=2s"),
            format!("zk://user:{secret}@127.0.0.1:1?session_timeout=2s"),
            // A server that refuses it.
            format!("redis://user:{secret}@{}?ttl=2s", redis.addr()),
            format!("redis://:{encoded}@{}?ttl=2s", redis.addr()),
            format!("mysql://user:{secret}@{}/d?ttl=2s", mysql.addr()),
            // Another kind of server.
            format!("redis://user:{secret}@{}?ttl=2s", mysql.addr()),
            format!("mysql://user:{encoded}@{}/d?ttl=2s", open_redis.addr()),
            format!(
                "zk://user:{secret}@{}?session_timeout=2s",
                open_redis.addr()
            ),
            // One that takes it.
            format!("zk://user:{secret}@{}?session_timeout=2s", zookeeper.addr()),
        ];
        for url in &urls {
            let factory = contend::connect(url).unwrap();
            look_at("factory", &factory);
        }
        // URLs that are wrong in some other place.
        for url in [
            format!("redis://user:{secret}@host:notaport"),
            format!("redis://user:{secret}@host?nonsense=1"),
            format!("mysql://user:{secret}@host/d?ttl=x"),
            format!("mysql://user:{secret}@"),
            format!("zk://user:{secret}@a:1,b:x"),
            format!("nosuch://user:{secret}@host"),
            format!("redis://user:{secret}@ho st/0/1/2"),
            format!("memory://user:{secret}@x"),
            format!("redis://user:{secret}%zz@host"),
        ] {
            if let Err(error) = contend::connect(&url) {
                shows_no_secret("URL", &all_of(&error));
            }
        }
        let lines = LINES.lock().clone();
        assert!(lines.len() > 20, "almost nothing was logged: {lines:?}");
        for line in &lines {
            shows_no_secret("log", line);
        }
    });
}
