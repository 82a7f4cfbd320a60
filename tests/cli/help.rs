//! The help of every command: what a person reads before the first run.

use crate::program::run;

/// Every page there is: that of `contend` itself, those of its commands, and of theirs.
const PAGES: [&str; 18] = [
    "",
    "lock",
    "elect",
    "schedule",
    "status",
    "list",
    "revoke",
    "ping",
    "semaphore",
    "semaphore create",
    "semaphore set-capacity",
    "semaphore usage",
    "semaphore holders",
    "semaphore acquire",
    "semaphore release",
    "semaphore renew",
    "semaphore sweep",
    "semaphore run",
];

/// A page, long or short.
fn page(command: &str, flag: &str) -> String {
    let mut args: Vec<&str> = command.split_whitespace().collect();
    args.push(flag);
    let (code, out, err) = run("", &args);
    assert_eq!(code, 0, "{command}: {err}");
    out
}

/// What the long page says of an option.
fn option(page: &str, name: &str) -> String {
    let (_, rest) = page.split_once(&format!("{name} <")).expect(name);
    rest.split("\n\n").next().unwrap().to_owned()
}

#[test]
fn the_help_of_a_ttl_says_what_it_is_by_default() {
    let long = |command| page(command, "--help");
    let server = "that of the URL, or 10s";
    for (command, default) in [
        ("lock", server),
        ("schedule", server),
        ("elect", server),
        ("elect", "2s on memory"),
        ("semaphore run", "that of the URL, or 30s"),
    ] {
        let text = option(&long(command), "--ttl");
        assert!(text.contains(default), "{command}: {text}");
    }
    // One line each, as it has no long texts.
    let acquire = long("semaphore acquire");
    let line = acquire.lines().find(|line| line.contains("--ttl")).unwrap();
    assert!(line.contains("[default: none"), "{line}");
}

/// What may come from the environment is not asked for.
#[test]
fn a_usage_line_demands_no_url() {
    let is_shown = |url, command: &str, rest: &[&str]| {
        let words: Vec<&str> = command.split_whitespace().collect();
        let args = [&words, rest].concat();
        let (code, _, err) = run(url, &args);
        assert_eq!(code, 64, "{args:?}: {err}");
        let own = format!("Usage: contend {command}");
        let usage = err.lines().find(|line| line.starts_with(own.trim_end()));
        let usage = usage.unwrap_or_else(|| panic!("{args:?}: {err}"));
        assert!(usage.contains("[OPTIONS]"), "{args:?}: {err}");
        assert!(!usage.contains("--url"), "{args:?}: {err}");
    };
    for command in PAGES {
        is_shown("", command, &["--nonsense"]);
        is_shown("memory://", command, &["--nonsense"]);
        is_shown("", command, &["--url", "memory://", "--nonsense"]);
    }
    for command in ["lock", "semaphore run", "semaphore create"] {
        is_shown("memory://", command, &["m"]);
    }
    let paces = ["--every", "1s", "--delay", "1s"];
    is_shown("memory://", "schedule", &paces);
}

#[test]
fn the_pace_of_a_schedule_has_a_default_only_to_look_at() {
    let text = option(&page("schedule", "--help"), "--every");
    assert!(text.contains("[default: 1s without a command"), "{text}");
}

/// What a unit file or a supervisor needs to know.
#[test]
fn the_help_says_what_a_command_exits_with_at_sigterm() {
    let page = page("", "--help");
    let (_, codes) = page.split_once("\nExit codes:\n").expect("exit codes");
    let codes = codes.split("\n\n").next().unwrap();
    let (_, at_sigterm) = codes
        .split_once("SIGTERM")
        .unwrap_or_else(|| panic!("{codes}"));
    for says in ["lock, elect and semaphore run", "143", "schedule", "with 0"] {
        assert!(at_sigterm.contains(says), "{says}: {codes}");
    }
}

#[test]
fn a_command_that_takes_one_mutex_shows_one() {
    for command in ["elect", "schedule", "revoke"] {
        let page = page(command, "--help");
        assert!(page.contains(" [MUTEX]"), "{page}");
        assert!(!page.contains("[MUTEX]..."), "{page}");
        assert!(!page.contains("names of mutexes"), "{page}");
        assert!(!page.contains("several times"), "{page}");
    }
    for command in ["lock", "status"] {
        assert!(page(command, "--help").contains("[MUTEX]..."), "{command}");
    }
}

#[test]
fn the_options_of_every_command_stand_apart_from_its_own() {
    for command in PAGES {
        for flag in ["-h", "--help"] {
            let page = page(command, flag);
            let (own, global) = page
                .split_once("\nGlobal options:\n")
                .unwrap_or_else(|| panic!("{command} {flag}: {page}"));
            for option in ["--url <URL>", "--json", "-v, --verbose"] {
                let is_option = |text: &str| {
                    text.lines()
                        .any(|line| line.trim_start().starts_with(option))
                };
                assert!(is_option(global), "{command} {flag}: no {option}: {page}");
                assert!(!is_option(own), "{command} {flag}: {option}: {page}");
            }
        }
    }
}

#[test]
fn every_argument_is_explained() {
    for command in PAGES {
        let page = page(command, "-h");
        let arguments = page
            .split_once("\nArguments:\n")
            .map_or("", |(_, rest)| rest);
        for line in arguments.lines().take_while(|line| !line.is_empty()) {
            let explained = line.split_once("  ").map(|(_, rest)| rest.trim());
            let explained = explained.and_then(|text| text.split_once("  "));
            let text = explained.map_or("", |(_, text)| text.trim());
            assert!(!text.is_empty(), "{command}: {line:?}");
        }
    }
}

/// What strangers stumbled over.
#[test]
fn the_help_is_english() {
    for command in PAGES {
        let page = page(command, "--help");
        let text = page.split_whitespace().collect::<Vec<_>>().join(" ");
        for words in [
            "for a try",
            "over machines",
            "for ever ",
            "for ever]",
            "another wish",
            "ours",
            "is no server",
            "out of this user's sight",
            "object a line",
            "begin anew",
            "drawn anew",
            "named plainly",
            "plain name",
            "how long it all lasts",
            "to end in",
            "tells of",
            "not with that fence",
        ] {
            assert!(!text.to_lowercase().contains(words), "{command}: {words:?}");
        }
    }
}
