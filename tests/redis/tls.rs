//! Redis over TLS.

use std::process::Command;
use std::time::Duration;

use contend::backend::{Attempt, Contender, OnRefusal, Purpose};
use contend::{ErrorKind, Lease, Moment, connect};
use testbed::{Output, Port, Process, RedisServer, TempDir, within};

const URL: &str = "CONTEND_TEST_REDIS_TLS";

/// Acquires once.
fn use_it(url: &str) -> contend::Result<u64> {
    let factory = connect(url)?;
    let place = Contender {
        mutex: "m".into(),
        id: "a".into(),
        lease: Lease::default(),
        purpose: Purpose::Lock,
    };
    let soon = || Moment::now() + Duration::from_secs(5);
    crate::driven::subscribe(&factory, "m", soon())?;
    let unparker = contend::Parker::new().unparker();
    let mut contender = factory.backend()?.contender(&place, &unparker)?;
    match contender.acquire(OnRefusal::Enqueue, soon())? {
        Attempt::Granted(grant) => Ok(grant.owner.fence()),
        Attempt::Refused(refusal) => panic!("refused: {refusal:?}"),
    }
}

/// Not a test: a process whose trusted certificates are ours.
#[test]
#[ignore = "run by the other test"]
fn child() {
    if let Ok(url) = std::env::var(URL) {
        use_it(&url).unwrap();
    }
}

#[test]
fn a_trusted_server_serves_and_another_is_refused() {
    within(Duration::from_secs(60), || {
        let folder = TempDir::new();
        let file = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        let (key, certificate) = (file("key.pem"), file("cert.pem"));
        let made = Command::new("openssl")
            .args([
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:P-256",
            ])
            .args(["-nodes", "-days", "2", "-subj", "/CN=localhost"])
            .args(["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"])
            .args(["-addext", "basicConstraints=critical,CA:FALSE"])
            .args(["-keyout", &key, "-out", &certificate])
            .output()
            .expect("openssl (Debian package openssl)");
        assert!(made.status.success(), "{made:?}");
        let port = Port::free();
        let number = port.number().to_string();
        let _server = RedisServer::start_with(&[
            "--tls-port",
            &number,
            "--tls-cert-file",
            &certificate,
            "--tls-key-file",
            &key,
            "--tls-ca-cert-file",
            &certificate,
            "--tls-auth-clients",
            "no",
        ]);
        let url = format!("rediss://127.0.0.1:{number}");
        let error = use_it(&url).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error:?}");
        assert!(error.to_string().contains("certificate"), "{error}");

        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["tls::child", "--exact", "--ignored", "--nocapture"])
            .env(URL, &url)
            .env("SSL_CERT_FILE", &certificate);
        let child = Process::spawn(&command, &Output::Pipe).unwrap();
        let status = child.wait(Duration::from_secs(30)).expect("it ends");
        assert!(status.success(), "{status:?}");
    });
}
