//! A process for each test.

use std::process::Command;

use parking_lot::Mutex;

/// Set in the process that runs one test only.
const ALONE: &str = "CONTEND_TEST_ALONE";

/// What counts threads and time is not measured beside another such process.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Runs `body` in a process that runs nothing else: this binary again, with the test's own name.
///
/// # Panics
/// When the test fails there, with all that it printed.
pub fn alone(test: &str, body: impl FnOnce()) {
    if std::env::var_os(ALONE).is_some() {
        return body();
    }
    let _turn = ONE_AT_A_TIME.lock();
    // The first part is this binary's name, which the harness leaves out.
    let (_, test) = test.split_once("::").expect("a path with its crate");
    let output = Command::new(std::env::current_exe().expect("a test knows itself"))
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(ALONE, "1")
        .output()
        .expect("this binary runs again");
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    println!("{text}{errors}");
    assert!(output.status.success(), "{test}: {}", output.status);
    assert!(
        text.contains("1 passed"),
        "{test} is not the name of a test"
    );
}

/// Declares tests that run in a process of their own each.
macro_rules! alone {
    ($($(#[$attribute:meta])* fn $name:ident() $body:block)+) => {
        $(
            $(#[$attribute])*
            #[test]
            fn $name() {
                let test = concat!(module_path!(), "::", stringify!($name));
                $crate::process::alone(test, || $body);
            }
        )+
    };
}

#[cfg(test)]
mod tests {
    alone! {
        fn test_is_alone_in_its_process() {
            assert!(std::env::var_os(super::ALONE).is_some());
            // The harness and this test.
            assert_eq!(testbed::threads(std::process::id()), 2);
        }
    }
}
