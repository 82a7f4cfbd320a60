//! TLS certificates of an authority of our own, made with `openssl`.

use std::fs;
use std::process::Command;

use crate::TempDir;

/// An authority (`ca.pem`), and key and certificate (`NAME.key`, `NAME.pem`) of those that it vouches for:
/// `server` (127.0.0.1 and localhost), `elsewhere` (another host), `expired` (as `server`, until yesterday)
/// and `client`. `stranger.pem` is another authority, which has signed nothing.
#[derive(Debug)]
pub struct Certificates {
    folder: TempDir,
}

impl Certificates {
    /// Makes all of them.
    #[must_use]
    pub fn make() -> Certificates {
        let made = Certificates {
            folder: TempDir::new(),
        };
        made.authority("ca");
        made.authority("stranger");
        made.sign("server", "DNS:localhost,IP:127.0.0.1", "2");
        made.sign("elsewhere", "DNS:elsewhere.example", "2");
        made.sign("expired", "DNS:localhost,IP:127.0.0.1", "-1");
        made.sign("client", "DNS:client", "2");
        made
    }

    /// The path of one of the files.
    #[must_use]
    pub fn file(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    /// The path of a file that holds key and certificate of `name`, as Java wants them.
    #[must_use]
    pub fn pair(&self, name: &str) -> String {
        let read = |ending| fs::read_to_string(self.file(&format!("{name}.{ending}"))).unwrap();
        let path = self.file(&format!("{name}-pair.pem"));
        fs::write(&path, read("key") + &read("pem")).unwrap();
        path
    }

    fn authority(&self, name: &str) {
        self.openssl(&format!(
            "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 \
             -subj /CN={name} -keyout {name}.key -out {name}.pem"
        ));
    }

    fn sign(&self, name: &str, hosts: &str, days: &str) {
        let extensions = format!("subjectAltName={hosts}\nbasicConstraints=CA:FALSE\n");
        fs::write(self.file(&format!("{name}.ext")), extensions).unwrap();
        self.openssl(&format!(
            "req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes \
             -subj /CN={name} -keyout {name}.key -out {name}.csr"
        ));
        self.openssl(&format!(
            "x509 -req -CA ca.pem -CAkey ca.key -CAcreateserial -days {days} \
             -in {name}.csr -extfile {name}.ext -out {name}.pem"
        ));
    }

    fn openssl(&self, words: &str) {
        let output = Command::new("openssl")
            .args(words.split_whitespace())
            .current_dir(self.folder.path())
            .output()
            .expect("openssl (Debian package openssl)");
        assert!(output.status.success(), "{output:?}");
    }
}
