//! MariaDB; or MySQL proper, where `CONTEND_TEST_MYSQLD` names its server program.

use std::env;
use std::fs;
use std::io::{self, Read};
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use crate::binary;
use crate::port::Port;
use crate::server::{Server, dial, on_free_ports};
use crate::sync::lock;
use crate::temp_dir::TempDir;

const PACKAGE: &str = "mariadb-server";

/// How long a probe waits for an answer.
const PROBE: Duration = Duration::from_millis(200);

/// Names a `mysqld` to run in the place of MariaDB's.
const MYSQLD: &str = "CONTEND_TEST_MYSQLD";

/// A throw-away MariaDB whose `root` has no password.
#[derive(Debug)]
pub struct MariaDbServer {
    server: Server,
}

impl MariaDbServer {
    /// Starts one.
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// Starts one with further arguments, such as `["--innodb-lock-wait-timeout=1"]`.
    pub fn start_with(args: &[&str]) -> Self {
        on_free_ports(|| {
            let server = server(args);
            server.try_start().map(|()| Self { server })
        })
    }

    /// `mysql://root@127.0.0.1:PORT/database`; the database must exist before it is used.
    pub fn url(&self, database: &str) -> String {
        format!("mysql://root@{}/{database}", self.addr())
    }

    /// Creates a database and returns its [`url`](Self::url): a clean ground for each test.
    pub fn create_database(&self, name: &str) -> String {
        self.sql(&format!("CREATE DATABASE `{name}`"));
        self.url(name)
    }

    /// Runs SQL as root through the `mariadb` client: one line for each row, columns separated by
    /// tabs, no headings.
    ///
    /// # Panics
    /// When the server reports an error.
    pub fn sql(&self, sql: &str) -> String {
        let own = format!(
            "--no-defaults --protocol=tcp --host=127.0.0.1 --port={} --user=root --batch \
             --skip-column-names --execute",
            self.port()
        );
        let client = binary::find("mariadb", "mariadb-client");
        binary::run(&client, own.split_whitespace().chain([sql]))
    }
}

impl Deref for MariaDbServer {
    type Target = Server;

    fn deref(&self) -> &Server {
        &self.server
    }
}

/// A server on a copy of the template, not started.
fn server(args: &[&str]) -> Server {
    let port = Port::free();
    let folder = TempDir::new();
    let data = folder.path().join("data");
    {
        let template = template();
        let template = template.as_ref().expect("it was just made");
        copy(template.path(), &data)
            .unwrap_or_else(|error| panic!("cannot make {data:?}: {error}"));
    }
    let mut command = Command::new(program());
    command.args([
        "--no-defaults",
        "--bind-address=127.0.0.1",
        "--skip-name-resolve",
    ]);
    command.args(["--max-connections=500", redo_log()]);
    if is_mysql() {
        // Its second protocol would want a port too, and its binary log an fsync for every commit.
        command.args(["--mysqlx=OFF", "--skip-log-bin"]);
    }
    command.arg(tmpdir(folder.path()));
    command.arg(format!("--port={}", port.number()));
    command.arg(format!("--datadir={}", data.display()));
    for file in ["socket", "pid-file"] {
        command.arg(format!("--{file}={}", folder.path().join(file).display()));
    }
    command.args(as_user());
    command.args(args);
    Server::new("mariadbd", folder, vec![port], command, greets)
}

/// Whether the server is MySQL proper.
pub fn is_mysql() -> bool {
    env::var_os(MYSQLD).is_some()
}

fn program() -> PathBuf {
    match env::var_os(MYSQLD) {
        Some(path) => path.into(),
        None => binary::find("mariadbd", PACKAGE),
    }
}

/// A redo log that is quickly made and copied; the default is 96 MB.
fn redo_log() -> &'static str {
    if is_mysql() {
        "--innodb-redo-log-capacity=32M"
    } else {
        "--innodb-log-file-size=8M"
    }
}

/// An installed data folder that no server runs on, made once for each process: to copy it takes a
/// tenth of the time.
fn template() -> MutexGuard<'static, Option<TempDir>> {
    static TEMPLATE: Mutex<Option<TempDir>> = Mutex::new(None);
    let mut template = lock(&TEMPLATE);
    if template.is_none() {
        let folder = TempDir::new();
        let scratch = TempDir::new();
        let mut args = vec![
            "--no-defaults".to_owned(),
            redo_log().to_owned(),
            format!("--datadir={}", folder.path().display()),
            tmpdir(scratch.path()),
        ];
        args.extend(as_user());
        if is_mysql() {
            // Without names of hosts no client comes from "localhost".
            let init = scratch.path().join("init.sql");
            fs::write(&init, "RENAME USER root@localhost TO root@'%';\n").expect("a scratch file");
            args.push("--initialize-insecure".to_owned());
            args.push(format!("--init-file={}", init.display()));
            binary::run(&program(), args);
        } else {
            args.push("--auth-root-authentication-method=normal".to_owned());
            args.push("--skip-test-db".to_owned());
            binary::run(&binary::find("mariadb-install-db", PACKAGE), args);
        }
        *template = Some(folder);
    }
    template
}

/// A place of its own for temporary tables. A server that starts removes those that it finds: in the
/// common folder, also those that another server is using, which then fails or crashes.
fn tmpdir(folder: &Path) -> String {
    let path = folder.join("tmp");
    fs::create_dir_all(&path).unwrap_or_else(|error| panic!("cannot make {path:?}: {error}"));
    format!("--tmpdir={}", path.display())
}

/// The server refuses to run as root unless it is told to.
fn as_user() -> Option<String> {
    rustix::process::getuid()
        .is_root()
        .then(|| "--user=root".to_owned())
}

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}

/// Whether it greets with a handshake of protocol 10; "too many connections" is no greeting.
fn greets(port: u16) -> bool {
    let greeting = || {
        let mut start = [0; 5];
        dial(port, PROBE)?.read_exact(&mut start)?;
        io::Result::Ok(start[4])
    };
    greeting().is_ok_and(|protocol| protocol == 10)
}
