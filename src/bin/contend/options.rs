//! Options that several commands have: the server, the contender, how long to wait.

use std::time::Duration;

use clap::Args;
pub use contend::parse_duration as duration;
use contend::{ContenderIdGenerator, Error, Factory};

use crate::console;
use crate::exit::Failure;

/// What the help calls the options that every command has.
pub const GLOBAL: &str = "Global options";

/// How long a command that runs until it is stopped waits for the server's first answer.
const FIRST_ANSWER: Duration = Duration::from_secs(5);

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
    pub fn factory(&self) -> Result<Factory, Failure> {
        // An empty variable is one that is not set.
        match self.url.as_deref() {
            None | Some("") => Err(Failure::usage(
                "no server: give --url URL, or set CONTEND_URL",
            )),
            Some(url) => Ok(contend::connect(url)?),
        }
    }

    /// Connects and asks the server once. What it refuses for good ends the program, where a service would only log
    /// it; what may pass is left to the service.
    pub fn checked_factory(&self) -> Result<Factory, Failure> {
        console::show_warnings();
        let factory = self.factory()?;
        match factory.ping(FIRST_ANSWER) {
            Err(error) if !error.is_transient() => Err(error.into()),
            _ => Ok(factory),
        }
    }
}

/// As what a command contends.
#[derive(Args)]
pub struct ContenderOptions {
    /// This contender's id [default: generated].
    #[arg(long)]
    id: Option<String>,

    /// How long a mutex is owned without a renewal [default: that of the URL, or 10s].
    #[arg(long, value_parser = duration, value_name = "DURATION")]
    ttl: Option<Duration>,

    /// How much longer no other contender can own it, so that the command has time to end [default: that of the
    /// URL, or 6s].
    #[arg(long, value_parser = duration, value_name = "DURATION")]
    transition: Option<Duration>,
}

/// The options, and defaults for those that were not given.
pub struct Contender {
    pub id: String,
    pub ttl: Duration,
    pub transition: Duration,
}

impl ContenderOptions {
    pub fn on(&self, factory: &Factory) -> Contender {
        let (id, lease) = (self.id.clone(), factory.lease());
        Contender {
            id: id.unwrap_or_else(|| ContenderIdGenerator::Host.generate()),
            ttl: self.ttl.unwrap_or(lease.ttl()),
            transition: self.transition.unwrap_or(lease.transition()),
        }
    }
}

/// How long a command waits for what it runs under.
#[derive(Args)]
pub struct Patience {
    /// How long to wait [default: forever].
    #[arg(long, value_parser = duration, value_name = "DURATION")]
    pub timeout: Option<Duration>,

    /// Does not wait: exits with 75 if it would have to wait.
    #[arg(long, conflicts_with = "timeout")]
    no_wait: bool,
}

impl Patience {
    /// Whether to wait after a first try that failed. If so, this has said for what.
    pub fn waits_after(&self, error: &Error) -> bool {
        let waits = error.is_transient() && !self.no_wait;
        if waits {
            console::message(&format!("waiting: {error}"));
            console::show_warnings();
        }
        waits
    }
}
