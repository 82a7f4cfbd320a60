//! ZooKeeper over TLS: the server's certificate, its host name and our own certificate are checked.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::zk_support::{HANG, name};
use contend::{Factory, Result, zk};
use testbed::{Port, TempDir, ZooKeeperServer, within};

/// What a secure port of Debian's server needs beside its own jar.
const NETTY: &[&str] = &[
    "netty-handler",
    "netty-transport",
    "netty-common",
    "netty-buffer",
    "netty-resolver",
    "netty-codec",
    "netty-transport-native-epoll",
    "netty-transport-native-unix-common",
];

struct Certificates {
    folder: TempDir,
}

impl Certificates {
    fn file(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    fn openssl(&self, args: &[&str]) {
        let made = Command::new("openssl")
            .args(args)
            .current_dir(self.folder.path())
            .output()
            .expect("openssl (Debian package openssl)");
        assert!(made.status.success(), "{made:?}");
    }

    /// An authority, and a certificate of `localhost` and one of a client that it has signed.
    fn make() -> Certificates {
        let all = Certificates {
            folder: TempDir::new(),
        };
        let curve = [
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
        ];
        let root = [
            &["req", "-x509"],
            &curve[..],
            &[
                "-days",
                "2",
                "-subj",
                "/CN=authority",
                "-keyout",
                "ca.key",
                "-out",
                "ca.pem",
            ],
        ];
        all.openssl(&root.concat());
        for (who, alternative) in [("server", "DNS:localhost"), ("client", "DNS:client")] {
            let (key, request) = (format!("{who}.key"), format!("{who}.csr"));
            let (certificate, extension) = (format!("{who}.pem"), format!("{who}.ext"));
            let subject = format!("/CN={who}");
            let ask = [
                &["req"],
                &curve[..],
                &["-subj", &subject, "-keyout", &key, "-out", &request],
            ];
            all.openssl(&ask.concat());
            fs::write(
                all.file(&extension),
                format!("subjectAltName={alternative}\nbasicConstraints=CA:FALSE\n"),
            )
            .unwrap();
            all.openssl(&[
                "x509",
                "-req",
                "-in",
                &request,
                "-CA",
                "ca.pem",
                "-CAkey",
                "ca.key",
                "-CAcreateserial",
                "-days",
                "2",
                "-extfile",
                &extension,
                "-out",
                &certificate,
            ]);
        }
        let pair = fs::read_to_string(all.file("server.key")).unwrap()
            + &fs::read_to_string(all.file("server.pem")).unwrap();
        fs::write(all.file("both.pem"), pair).unwrap();
        all
    }
}

fn locks(factory: Result<Factory>) -> Result<()> {
    let factory = factory?;
    let locker = factory.locker(name("tls")).build()?;
    let guard = locker.try_lock_for(std::time::Duration::from_secs(10))?;
    guard.unlock()?;
    Ok(())
}

#[test]
fn a_trusted_server_serves_and_every_other_is_refused() {
    let jars: Vec<PathBuf> = NETTY
        .iter()
        .map(|jar| PathBuf::from(format!("/usr/share/java/{jar}.jar")))
        .collect();
    if !jars.iter().all(|jar| jar.exists()) {
        println!("NOT RUN: no libnetty-java on this machine");
        return;
    }
    within(HANG, || {
        let made = Certificates::make();
        let port = Port::free();
        let lines = [
            format!("secureClientPort={}", port.number()),
            "secureClientPortAddress=127.0.0.1".to_owned(),
            "serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory".to_owned(),
            format!("ssl.keyStore.location={}", made.file("both.pem")),
            "ssl.keyStore.type=PEM".to_owned(),
            format!("ssl.trustStore.location={}", made.file("ca.pem")),
            "ssl.trustStore.type=PEM".to_owned(),
        ];
        let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
        let jars: Vec<String> = jars.iter().map(|jar| jar.display().to_string()).collect();
        let path = format!("-Xbootclasspath/a:{}", jars.join(":"));
        let _server = ZooKeeperServer::start_with(&lines, &[&path]);
        let secure = |host: &str| {
            zk::Builder::new(format!("{host}:{}", port.number()))
                .session_timeout(std::time::Duration::from_secs(9))
                .tls_ca(made.file("ca.pem"))
        };
        let ours = |builder: zk::Builder| {
            builder
                .tls_cert(made.file("client.pem"))
                .tls_key(made.file("client.key"))
        };
        locks(ours(secure("localhost")).digest("me", "s3cret").build()).unwrap();
        let url = format!(
            "zk://localhost:{}?session_timeout=9s&tls=true&tls_ca={}&tls_cert={}&tls_key={}",
            port.number(),
            made.file("ca.pem"),
            made.file("client.pem"),
            made.file("client.key"),
        );
        locks(contend::connect(&url)).unwrap();
        // Not the host that the certificate is for.
        let error = locks(ours(secure("127.0.0.1")).build()).unwrap_err();
        assert!(error.to_string().contains("certificate"), "{error}");
        // Not an authority that we trust.
        let error = locks(
            ours(secure("localhost"))
                .tls_ca(made.file("client.pem"))
                .build(),
        )
        .unwrap_err();
        assert!(error.to_string().contains("certificate"), "{error}");
        // The server asks for a certificate of ours.
        locks(secure("localhost").build()).unwrap_err();
        // Files that cannot work are refused before anything is asked.
        let error = secure("localhost")
            .tls_ca(made.file("none.pem"))
            .build()
            .unwrap_err();
        assert!(error.to_string().contains("tls_ca"), "{error}");
        let error = secure("localhost")
            .tls_cert(made.file("client.pem"))
            .build()
            .unwrap_err();
        assert!(error.to_string().contains("together"), "{error}");
    });
}
