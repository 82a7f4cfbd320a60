//! TLS to MySQL: encrypted and verified, or no connection at all.

use std::path::Path;
use std::process::Command;

use crate::conformance::{PATIENCE, next, started};
use crate::mysql_ground::{HANG, operator};
use contend::{ErrorKind, EventKind};
use mysql::prelude::Queryable;
use testbed::{MariaDbServer, TempDir, wait_until, within};

fn openssl(folder: &Path, args: &str) {
    let output = Command::new("openssl")
        .args(args.split(' '))
        .current_dir(folder)
        .output()
        .expect("the program of the Debian package `openssl` runs");
    assert!(output.status.success(), "{output:?}");
}

/// A certificate for 127.0.0.1, signed by an authority of its own (`ca.pem`).
fn certificates(folder: &Path) {
    std::fs::write(folder.join("san"), "subjectAltName=IP:127.0.0.1\n").unwrap();
    openssl(
        folder,
        "req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -days 2 -subj /CN=authority",
    );
    openssl(
        folder,
        "req -newkey rsa:2048 -nodes -keyout key.pem -out request -subj /CN=server",
    );
    openssl(
        folder,
        "x509 -req -in request -CA ca.pem -CAkey ca.key -CAcreateserial -out cert.pem -days 2 -extfile san",
    );
}

#[test]
fn a_required_encryption_is_used_and_verified() {
    within(HANG, || {
        let folder = TempDir::new();
        certificates(folder.path());
        let file = |name: &str| folder.path().join(name).display().to_string();
        let server = MariaDbServer::start_with(&[
            &format!("--ssl-cert={}", file("cert.pem")),
            &format!("--ssl-key={}", file("key.pem")),
        ]);
        let url = server.create_database("secret");
        let mut root = operator(&url);
        root.query_drop(contend::mysql::INIT_SQL).unwrap();
        root.query_drop("CREATE USER private IDENTIFIED BY 'pw' REQUIRE SSL")
            .unwrap();
        root.query_drop("GRANT ALL ON secret.* TO private").unwrap();
        let url = url.replace("root@", "private:pw@");

        let trusting = format!("{url}?tls=true&tls_ca={}", file("ca.pem"));
        let (service, events) = started(&contend::connect(&trusting).unwrap(), "m", "a");
        next(&events, EventKind::Acquired);
        drop((service, events));
        // Neither without encryption nor with a certificate that nobody vouches for.
        for (parameters, kind) in [
            ("", ErrorKind::Denied),
            ("?tls=true", ErrorKind::Misconfigured),
        ] {
            let factory = contend::connect(&format!("{url}{parameters}")).unwrap();
            let (service, _events) = started(&factory, "m", "a");
            wait_until(PATIENCE, "it says why not", || {
                service.last_error().is_some()
            });
            let error = service.last_error().unwrap();
            assert_eq!(error.kind(), kind, "{parameters}: {error:?}");
            assert!(!format!("{error:?}").contains("pw"));
        }
    });
}
