//! Finding the programs that the ground runs, and running the short-lived ones.

use std::env;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Where Debian puts daemons, which is not on every user's `PATH`.
const DAEMONS: [&str; 3] = ["/usr/local/sbin", "/usr/sbin", "/sbin"];

/// How long a client program may take before it is killed, in `timeout(1)`'s notation.
const CLIENT_LIMIT: &str = "60";

/// The full path of `program`.
///
/// # Panics
/// When it is not installed, with the Debian package that has it.
pub(crate) fn find(program: &str, package: &str) -> PathBuf {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain(DAEMONS.iter().map(PathBuf::from))
        .map(|folder| folder.join(program))
        .find(|file| file.is_file())
        .unwrap_or_else(|| missing(program, package))
}

/// `path` itself, once it is sure that it is there.
///
/// # Panics
/// When it is not, with the Debian package that has it.
pub(crate) fn require<'a>(path: &'a str, package: &str) -> &'a str {
    if !Path::new(path).is_file() {
        missing(path, package);
    }
    path
}

/// Runs a client program to its end and returns what it printed, without the last line break.
///
/// # Panics
/// When it fails, with all that it said; also when it hangs, which `timeout` turns into a failure.
pub(crate) fn run<A: AsRef<OsStr>>(program: &Path, args: impl IntoIterator<Item = A>) -> String {
    let mut command = Command::new(find("timeout", "coreutils"));
    command.args(["--kill-after=1", CLIENT_LIMIT]);
    command.arg(program).args(args);
    let output = command
        .stdin(std::process::Stdio::null())
        .output()
        .unwrap_or_else(|error| panic!("cannot run {command:?}: {error}"));
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{command:?}: {}\n{stdout}{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    stdout.trim_end_matches(['\n', '\r']).to_owned()
}

fn missing(what: &str, package: &str) -> ! {
    panic!(
        "`{what}` is not on this machine. It is in the Debian package `{package}`: \
         `apt-get install {package}`, or run `./tests/run`, which installs all that the tests need."
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "`apt-get install tardis-server`, or run `./tests/run`")]
    fn missing_program_names_its_package() {
        find("tardisd", "tardis-server");
    }

    #[test]
    #[should_panic(expected = "No such file or directory")]
    fn failing_client_shows_what_it_said() {
        run(&find("ls", "coreutils"), ["/nowhere/at/all"]);
    }
}
