//! Command-line options for the examples: `--name value` and `--flag`, nothing more.

#![allow(dead_code)]

use std::fmt::Display;
use std::process::exit;
use std::str::FromStr;
use std::time::Duration;

/// Exit code for a command line that is not understood (`EX_USAGE`).
pub const BAD_INPUT: i32 = 64;

/// What the command line says.
pub struct Options {
    usage: &'static str,
    values: Vec<(String, String)>,
    flags: Vec<String>,
    /// What is not an option: everything after `--`, and words before it.
    pub words: Vec<String>,
}

impl Options {
    /// Reads the command line; prints the usage and exits on `--help` or on what it does not know.
    /// A name in `flags` stands alone, one in `values` is followed by its value.
    pub fn from_args(usage: &'static str, values: &[&str], flags: &[&str]) -> Options {
        let mut options = Options {
            usage,
            values: Vec::new(),
            flags: Vec::new(),
            words: Vec::new(),
        };
        let mut args = std::env::args().skip(1);
        while let Some(arg) = args.next() {
            let (name, inline) = match arg.split_once('=') {
                Some((name, value)) if name.starts_with("--") => {
                    (name.to_owned(), Some(value.to_owned()))
                }
                _ => (arg.clone(), None),
            };
            if arg == "--" {
                options.words.extend(args.by_ref());
            } else if name == "--help" || name == "-h" {
                println!("{usage}");
                exit(0);
            } else if flags.contains(&name.as_str()) && inline.is_none() {
                options.flags.push(name);
            } else if values.contains(&name.as_str()) {
                match inline.or_else(|| args.next()) {
                    Some(value) => options.values.push((name, value)),
                    None => options.fail(format_args!("{name} wants a value")),
                }
            } else if name.starts_with("--") {
                options.fail(format_args!("unknown option {name}"));
            } else {
                options.words.push(arg);
            }
        }
        options
    }

    pub fn flag(&self, name: &str) -> bool {
        self.flags.iter().any(|flag| flag == name)
    }

    /// The last value given: what stands later on a command line wins.
    pub fn text(&self, name: &str) -> Option<&str> {
        let given = self.values.iter().rev().find(|(given, _)| given == name);
        given.map(|(_, value)| value.as_str())
    }

    pub fn duration(&self, name: &str) -> Option<Duration> {
        self.text(name)
            .map(|text| match contend::parse_duration(text) {
                Ok(duration) => duration,
                Err(error) => self.fail(format_args!("{name}: {error}")),
            })
    }

    pub fn number<T: FromStr>(&self, name: &str) -> Option<T> {
        self.text(name).map(|text| match text.parse() {
            Ok(number) => number,
            Err(_) => self.fail(format_args!("{name}: {text:?} is not understood")),
        })
    }

    /// Says what is wrong with the command line, and exits.
    pub fn fail(&self, what: impl Display) -> ! {
        eprintln!("{what}\n\n{}", self.usage);
        exit(BAD_INPUT);
    }
}
