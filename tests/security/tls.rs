//! TLS on every backend, with an authority of our own: a peer that cannot prove what it is gets no connection.

use std::path::Path;
use std::time::{Duration, Instant};

use contend::{ErrorKind, Result};
use testbed::{Certificates, MariaDbServer, Port, RedisServer, ZooKeeperServer, within};

const LIMIT: Duration = Duration::from_secs(150);
const PATIENCE: Duration = Duration::from_secs(40);

/// Locks once, within `patience`.
fn locks(url: &str, patience: Duration) -> Result<()> {
    let locker = contend::connect(url)?.locker("tls").build()?;
    locker.try_lock_for(patience)?.unlock()
}

/// What every backend must refuse. `start` starts a server that has the certificate of that name and asks
/// clients for one, and gives its URL on 127.0.0.1, with a parameter at its end.
fn only_the_proven_get_in<S>(made: &Certificates, start: impl Fn(&str) -> (S, String)) {
    let parameters = |ca: &str| format!("&tls=true&tls_ca={}", made.file(ca));
    let client = format!(
        "&tls_cert={}&tls_key={}",
        made.file("client.pem"),
        made.file("client.key")
    );
    let trusted = parameters("ca.pem") + &client;
    let refused = |what: &str, url: &str, says: &str| {
        let start = Instant::now();
        let mut patience = Duration::from_secs(2);
        // A server that has just started may be too slow for its first handshakes, and is given longer each time.
        loop {
            let error = locks(url, patience).expect_err(what);
            println!("{what}: {error}");
            // ZooKeeper: another host may be proven, so it is tried again.
            let is_refused = matches!(
                error.kind(),
                ErrorKind::Misconfigured | ErrorKind::Denied | ErrorKind::Unreachable
            );
            if is_refused && error.to_string().contains(says) {
                break;
            }
            assert!(start.elapsed() < PATIENCE, "{what}: {error:?}");
            patience *= 2;
        }
    };
    {
        let (_server, url) = start("server");
        locks(&format!("{url}{trusted}"), PATIENCE).expect("all are proven");
        refused(
            "an unknown authority",
            &format!("{url}{}{client}", parameters("stranger.pem")),
            "certificate",
        );
        refused(
            "no certificate of the client",
            &format!("{url}{}", parameters("ca.pem")),
            "",
        );
        refused("no encryption", &url, "");
    }
    for name in ["elsewhere", "expired"] {
        let (_server, url) = start(name);
        refused(name, &format!("{url}{trusted}"), "certificate");
    }
}

#[test]
fn redis_lets_only_the_proven_in() {
    within(LIMIT, || {
        let made = Certificates::make();
        only_the_proven_get_in(&made, |name| {
            let port = Port::free();
            let number = port.number().to_string();
            let server = RedisServer::start_with(&[
                "--tls-port",
                &number,
                "--tls-cert-file",
                &made.file(&format!("{name}.pem")),
                "--tls-key-file",
                &made.file(&format!("{name}.key")),
                "--tls-ca-cert-file",
                &made.file("ca.pem"),
                "--tls-auth-clients",
                "yes",
            ]);
            let url = format!("redis://127.0.0.1:{number}?ttl=3s");
            ((server, port), url)
        });
    });
}

#[test]
fn mysql_lets_only_the_proven_in() {
    within(LIMIT, || {
        let made = Certificates::make();
        only_the_proven_get_in(&made, |name| {
            let server = MariaDbServer::start_with(&[
                &format!("--ssl-cert={}", made.file(&format!("{name}.pem"))),
                &format!("--ssl-key={}", made.file(&format!("{name}.key"))),
                &format!("--ssl-ca={}", made.file("ca.pem")),
            ]);
            let url = server.create_database("d");
            server.sql("CREATE USER private IDENTIFIED BY 'pw' REQUIRE X509");
            server.sql("GRANT ALL ON d.* TO private");
            let url = url.replace("root@", "private:pw@") + "?create_table=true";
            (server, url)
        });
    });
}

/// What a secure port of Debian's ZooKeeper needs beside its own jar.
const NETTY: [&str; 8] = [
    "netty-handler",
    "netty-transport",
    "netty-common",
    "netty-buffer",
    "netty-resolver",
    "netty-codec",
    "netty-transport-native-epoll",
    "netty-transport-native-unix-common",
];

#[test]
fn zookeeper_lets_only_the_proven_in() {
    let jars = NETTY.map(|jar| format!("/usr/share/java/{jar}.jar"));
    for jar in &jars {
        assert!(
            Path::new(jar).exists(),
            "{jar} (Debian package libnetty-java)"
        );
    }
    within(LIMIT, || {
        let made = Certificates::make();
        let path = format!("-Xbootclasspath/a:{}", jars.join(":"));
        only_the_proven_get_in(&made, |name| {
            let port = Port::free();
            let lines = [
                format!("secureClientPort={}", port.number()),
                "secureClientPortAddress=127.0.0.1".to_owned(),
                "serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory".to_owned(),
                format!("ssl.keyStore.location={}", made.pair(name)),
                "ssl.keyStore.type=PEM".to_owned(),
                format!("ssl.trustStore.location={}", made.file("ca.pem")),
                "ssl.trustStore.type=PEM".to_owned(),
            ];
            let lines = lines.each_ref().map(String::as_str);
            let server = ZooKeeperServer::start_with(&lines, &[&path]);
            let url = format!(
                "zk://me:s3cret@127.0.0.1:{}?session_timeout=6s",
                port.number()
            );
            ((server, port), url)
        });
    });
}
