//! Options that several commands have: the server, the mutexes, how long to wait.

use std::time::Duration;

use clap::Args;
use contend::{Error, Factory};

use crate::exit::Failure;

/// What the help calls the options that every command has.
pub const GLOBAL: &str = "Global options";

/// Where the mutexes are.
#[derive(Args)]
pub struct Connection {
    /// The URL of the server, such as redis://HOST, mysql://USER:PASSWORD@HOST/DATABASE or zk://HOST:2181.
    // Its value may hold a password: not in the help.
    #[arg(
        long,
        global = true,
        env = "CONTEND_URL",
        hide_env_values = true,
        value_name = "URL",
        help_heading = GLOBAL
    )]
    url: Option<String>,
}

impl Connection {
    /// The URL given.
    pub fn url(&self) -> Result<&str, Failure> {
        self.given().ok_or_else(|| {
            Failure::Usage("no server: give --url URL, or set CONTEND_URL".to_owned())
        })
    }

    /// The URL given, or that of an embedded backend, to look at without a server. Not with a command: in its own
    /// memory every process would lead, and each would run it.
    pub fn url_or_memory(&self, command: &[String]) -> Result<&str, Failure> {
        match command {
            [] => Ok(self.given().unwrap_or("memory://")),
            [..] => self.url(),
        }
    }

    /// An empty variable is one that is not set.
    fn given(&self) -> Option<&str> {
        self.url.as_deref().filter(|url| !url.is_empty())
    }

    pub fn factory(&self) -> Result<Factory, Failure> {
        Ok(contend::connect(self.url()?)?)
    }
}

/// The mutexes of a command: plain names, `--mutex NAME`, or both.
#[derive(Args)]
pub struct Mutexes {
    /// The names of the mutexes.
    #[arg(value_name = "MUTEX")]
    plain: Vec<String>,

    /// The same as MUTEX; may be given several times.
    #[arg(long = "mutex", value_name = "MUTEX")]
    named: Vec<String>,
}

impl Mutexes {
    /// All names as they were given, the plain ones first.
    pub fn all(&self) -> Vec<&str> {
        let names = self.plain.iter().chain(&self.named);
        names.map(String::as_str).collect()
    }
}

/// The mutex of a command that takes one: a plain name or `--mutex NAME`.
#[derive(Args)]
pub struct OneMutex {
    /// The name of the mutex.
    #[arg(value_name = "MUTEX")]
    plain: Option<String>,

    /// The same as MUTEX.
    #[arg(long = "mutex", value_name = "MUTEX")]
    named: Vec<String>,

    /// Names too many, or a command without `--` before it: we say so in our own words.
    #[arg(hide = true, requires = "plain")]
    excess: Vec<String>,
}

impl OneMutex {
    /// The name given, or the default of what can run a command and is given none.
    pub fn name(&self, default: Option<&str>) -> Result<String, Failure> {
        let names = self.plain.iter().chain(&self.named).chain(&self.excess);
        match (&names.collect::<Vec<_>>()[..], default) {
            (&[name], _) => Ok(name.clone()),
            ([], Some(name)) => Ok(name.to_owned()),
            ([], None) => Err(no_mutex()),
            ([..], None) => Err(Failure::Usage(
                "only one mutex can be given here".to_owned(),
            )),
            ([..], Some(_)) => Err(Failure::Usage(
                "only one mutex can be given here; put -- before a command".to_owned(),
            )),
        }
    }
}

pub fn no_mutex() -> Failure {
    Failure::Usage("no mutex: give its name".to_owned())
}

/// How long a command waits for what it runs under.
#[derive(Args)]
pub struct Patience {
    /// How long to wait [default: forever].
    #[arg(long, value_parser = duration, value_name = "DURATION")]
    pub timeout: Option<Duration>,

    /// Does not wait: exits with 75 if it would have to wait.
    #[arg(long, conflicts_with = "timeout")]
    pub no_wait: bool,
}

/// A duration, such as `10s`, for the command line.
pub fn duration(text: &str) -> Result<Duration, Error> {
    contend::parse_duration(text)
}
