//! Redis over TLS, with the authorities that the system trusts. (`tls_ca` and client certificates: `security::tls`.)

use std::process::Command;
use std::time::Duration;

use contend::{ErrorKind, connect};
use testbed::{Certificates, Output, Port, Process, RedisServer, within};

use crate::driven::{Driven, HANG, soon, subscribe};

const URL: &str = "CONTEND_TEST_REDIS_TLS";

/// Not a test: a process in which the authority is one that the system trusts.
#[test]
#[ignore = "run by the other test"]
fn child() {
    if let Ok(url) = std::env::var(URL) {
        let factory = connect(&url).unwrap();
        subscribe(&factory, "m", soon()).unwrap();
        Driven::at(&factory, "m", "a").own();
    }
}

#[test]
fn trusted_server_serves_and_another_is_refused() {
    within(HANG, || {
        let made = Certificates::make();
        let port = Port::free();
        let number = port.number().to_string();
        let _server = RedisServer::start_with(&[
            "--tls-port",
            &number,
            "--tls-cert-file",
            &made.file("server.pem"),
            "--tls-key-file",
            &made.file("server.key"),
            "--tls-ca-cert-file",
            &made.file("ca.pem"),
            "--tls-auth-clients",
            "no",
        ]);
        let url = format!("rediss://127.0.0.1:{number}");
        let error = subscribe(&connect(&url).unwrap(), "m", soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error:?}");
        assert!(error.to_string().contains("certificate"), "{error}");

        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["tls::child", "--exact", "--ignored", "--nocapture"])
            .env(URL, &url)
            .env("SSL_CERT_FILE", made.file("ca.pem"));
        let child = Process::spawn(&command, &Output::Pipe).unwrap();
        let status = child.wait(Duration::from_secs(30)).expect("it ends");
        assert!(status.success(), "{status:?}");
    });
}
