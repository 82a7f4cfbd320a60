//! Which server, and with which lease.

use std::time::Duration;

use clap::Args;
use contend::{Error, Factory};

use crate::exit::Failure;

/// Where the mutexes are.
#[derive(Args)]
pub struct Connection {
    /// Where the mutexes are, such as redis://HOST, mysql://USER:PASSWORD@HOST/DATABASE or zk://HOST:2181.
    // Its value may hold a password: not in the help.
    #[arg(
        long,
        global = true,
        env = "CONTEND_URL",
        hide_env_values = true,
        value_name = "URL"
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

    /// The URL given, or that of an embedded backend, for a try without a server.
    pub fn url_or_memory(&self) -> &str {
        self.given().unwrap_or("memory://")
    }

    /// An empty variable is one that is not set.
    fn given(&self) -> Option<&str> {
        self.url.as_deref().filter(|url| !url.is_empty())
    }

    pub fn factory(&self) -> Result<Factory, Failure> {
        Ok(contend::connect(self.url()?)?)
    }
}

/// A duration, such as `10s`, for the command line.
pub fn duration(text: &str) -> Result<Duration, Error> {
    contend::parse_duration(text)
}
