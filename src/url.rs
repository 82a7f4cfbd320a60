//! Backend URLs: `scheme://user:password@host:port,host:port/path?key=value`.
//!
//! The common crates know neither several hosts nor how to keep a password out of their errors and
//! `Debug` output.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::lease::Lease;

/// A URL taken apart. Its `Debug` and `Display` show no credential.
#[derive(Clone)]
pub(crate) struct Url {
    pub(crate) scheme: String,
    pub(crate) user: Option<String>,
    pub(crate) password: Option<String>,
    /// As written: `host` or `host:port` or `[v6]:port`, one per comma.
    pub(crate) hosts: Vec<String>,
    /// Percent-decoded, without the leading slash.
    pub(crate) path: String,
    parameters: Vec<(String, String)>,
}

impl Url {
    pub(crate) fn parse(text: &str) -> Result<Url> {
        let (scheme, rest) = text.split_once("://").ok_or_else(|| {
            // A text without "://" may be anything, a password too: do not repeat it.
            Error::invalid(
                "not a URL; one looks like scheme://host:port/path?key=value, such as redis://127.0.0.1:6379",
            )
        })?;
        let (rest, query) = match rest.split_once('?') {
            Some((rest, query)) => (rest, Some(query)),
            None => (rest, None),
        };
        if query.is_some_and(|query| query.contains('@')) {
            // Either a password with a bare '?', of which no part may be taken for something else and
            // shown, or a parameter that can be written otherwise.
            return Err(Error::invalid(
                "a URL with an '@' after a '?': write '?' in a password as %3F, and '@' in a parameter as %40",
            ));
        }
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        if path.contains('@') {
            // Perhaps a password with a bare '/', of which no part may be taken for something else and shown.
            return Err(Error::invalid(
                "a URL with an '@' after a '/': write '/' in a user or a password as %2F, and '@' in a path as %40",
            ));
        }
        // The last '@': a password may contain one, a host may not.
        let (credentials, hosts) = match authority.rsplit_once('@') {
            Some((credentials, hosts)) => (Some(credentials), hosts),
            None => (None, authority),
        };
        let (user, password) = match credentials {
            None => (None, None),
            Some(credentials) => {
                let (user, password) = match credentials.split_once(':') {
                    Some((user, password)) => (user, Some(decode(password)?)),
                    None => (credentials, None),
                };
                (
                    Some(decode(user)?).filter(|user| !user.is_empty()),
                    password,
                )
            }
        };
        if hosts.contains('%') && !hosts.contains('[') {
            // Perhaps a user and a password whose ':' and '@' were encoded, too.
            return Err(Error::invalid(
                "a URL with a '%' in its host: the ':' and '@' around a password stand as they are",
            ));
        }
        let parameters = query
            .unwrap_or("")
            .split('&')
            .filter(|pair| !pair.is_empty())
            .map(|pair| {
                let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
                Ok((decode(key)?, decode(value)?))
            })
            .collect::<Result<Vec<_>>>()?;
        let url = Url {
            scheme: scheme.to_ascii_lowercase(),
            user,
            password,
            hosts: hosts
                .split(',')
                .filter(|host| !host.is_empty())
                .map(str::to_owned)
                .collect(),
            path: decode(path.strip_prefix('/').unwrap_or(path))?,
            parameters,
        };
        for (index, (key, _)) in url.parameters.iter().enumerate() {
            if url.parameters[..index]
                .iter()
                .any(|(other, _)| other == key)
            {
                return Err(Error::invalid(format!(
                    "URL parameter {key:?} stands twice"
                )));
            }
        }
        Ok(url)
    }

    /// The hosts as (host, port), brackets of a v6 address taken off.
    // Only some backends have several hosts.
    #[cfg_attr(
        not(all(feature = "mysql", feature = "redis", feature = "zk")),
        allow(dead_code)
    )]
    pub(crate) fn addresses(&self, default_port: u16) -> Result<Vec<(String, u16)>> {
        self.hosts
            .iter()
            .map(|host| address(host, default_port))
            .collect()
    }

    /// Refuses parameters that `known` does not list, and lists those that it does.
    pub(crate) fn expect_parameters(&self, known: &[&str]) -> Result<()> {
        for (key, _) in &self.parameters {
            if !known.contains(&key.as_str()) {
                return Err(Error::invalid(format!(
                    "unknown parameter {key:?} in a {}:// URL; known are: {}",
                    self.scheme,
                    if known.is_empty() {
                        "none".to_owned()
                    } else {
                        known.join(", ")
                    },
                )));
            }
        }
        Ok(())
    }

    /// The parameter as text.
    pub(crate) fn text(&self, key: &str) -> Option<&str> {
        self.parameters
            .iter()
            .find(|(name, _)| name == key)
            .map(|(_, value)| value.as_str())
    }

    /// Sets `option` to the parameter `key`, if it is given.
    pub(crate) fn set<T: Parameter>(&self, key: &str, option: &mut T) -> Result<()> {
        if let Some(text) = self.text(key) {
            *option =
                T::read(text).map_err(|error| error.context(format!("URL parameter {key}")))?;
        }
        Ok(())
    }

    /// The lease that the parameters `ttl` and `transition` ask for.
    pub(crate) fn lease(&self) -> Result<Lease> {
        let default = Lease::default();
        let (mut ttl, mut transition) = (default.ttl(), default.transition());
        self.set("ttl", &mut ttl)?;
        self.set("transition", &mut transition)?;
        Lease::new(ttl, transition)
    }
}

/// What the value of a URL parameter can be.
pub(crate) trait Parameter: Sized {
    fn read(text: &str) -> Result<Self>;
}

impl Parameter for String {
    fn read(text: &str) -> Result<String> {
        Ok(text.to_owned())
    }
}

impl Parameter for PathBuf {
    fn read(text: &str) -> Result<PathBuf> {
        Ok(text.into())
    }
}

impl Parameter for Duration {
    fn read(text: &str) -> Result<Duration> {
        parse_duration(text)
    }
}

impl Parameter for u32 {
    fn read(text: &str) -> Result<u32> {
        text.parse()
            .map_err(|_| Error::invalid(format!("{text:?} is not a whole number")))
    }
}

impl Parameter for bool {
    fn read(text: &str) -> Result<bool> {
        match text {
            "true" | "on" | "yes" => Ok(true),
            "false" | "off" | "no" => Ok(false),
            _ => Err(Error::invalid(format!(
                "{text:?} is neither true nor false"
            ))),
        }
    }
}

impl<T: Parameter> Parameter for Option<T> {
    fn read(text: &str) -> Result<Option<T>> {
        T::read(text).map(Some)
    }
}

/// Without credentials and parameters: enough to know the place by.
impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.scheme, self.hosts.join(","))?;
        if !self.path.is_empty() {
            write!(f, "/{}", self.path)?;
        }
        Ok(())
    }
}

impl fmt::Debug for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

pub(crate) fn address(host: &str, default_port: u16) -> Result<(String, u16)> {
    // What stands here may be a password whose '@host' was forgotten: the error must not show it.
    let bad = || Error::invalid("a host in a URL is written host, host:port or [v6 address]:port");
    let (name, port) = if let Some(rest) = host.strip_prefix('[') {
        let (name, port) = rest.split_once(']').ok_or_else(bad)?;
        (
            name,
            port.strip_prefix(':').or((port.is_empty()).then_some("")),
        )
    } else {
        match host.split_once(':') {
            Some((name, port)) => (name, Some(port)),
            None => (host, Some("")),
        }
    };
    let port = match port.ok_or_else(bad)? {
        "" => default_port,
        port => port.parse().map_err(|_| bad())?,
    };
    if name.is_empty() || name.contains(char::is_whitespace) {
        return Err(bad());
    }
    Ok((name.to_owned(), port))
}

fn decode(text: &str) -> Result<String> {
    // The text may be a password: the error must not show it.
    let bad = || Error::invalid("a % in a URL must be followed by two hex digits of UTF-8 text");
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        rest = tail;
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let (Some(hex), Some(tail)) = (rest.get(..2), rest.get(2..)) else {
            return Err(bad());
        };
        let hex = std::str::from_utf8(hex).map_err(|_| bad())?;
        bytes.push(u8::from_str_radix(hex, 16).map_err(|_| bad())?);
        rest = tail;
    }
    String::from_utf8(bytes).map_err(|_| bad())
}

/// Parses a duration: a whole or decimal number and one of `ms`, `s`, `m`, `h`, `d`.
///
/// ```
/// use std::time::Duration;
///
/// assert_eq!(contend::parse_duration("500ms")?, Duration::from_millis(500));
/// assert_eq!(contend::parse_duration("1.5s")?, Duration::from_millis(1_500));
/// assert!(contend::parse_duration("10").is_err());
/// # Ok::<(), contend::Error>(())
/// ```
///
/// # Errors
/// `InvalidInput` for anything else, with the allowed forms in the message.
pub fn parse_duration(text: &str) -> Result<Duration> {
    let bad = || {
        Error::invalid(format!(
            "{text:?} is not a duration; write a number and a unit, such as 500ms, 2s, 5m, 4h or 1d"
        ))
    };
    let split = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .ok_or_else(bad)?;
    let (number, unit) = text.split_at(split);
    let seconds = match unit {
        "ms" => 0.001,
        "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        "d" => 86_400.0,
        _ => return Err(bad()),
    };
    let number: f64 = number.parse().map_err(|_| bad())?;
    // Through whole microseconds, so that 0.3s is 300 ms and not a hair less.
    let micros = (number * seconds * 1e6).round();
    if micros > 1e18 {
        return Err(bad());
    }
    Ok(Duration::from_micros(micros as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_is_found() {
        let url = Url::parse("redis+cluster://us%40er:p%3A@ss@h1:1,h2,[::1]:3/simba/x?ttl=2s&n=7")
            .unwrap();
        assert_eq!(url.scheme, "redis+cluster");
        assert_eq!(url.user.as_deref(), Some("us@er"));
        assert_eq!(url.password.as_deref(), Some("p:@ss"));
        assert_eq!(
            url.addresses(9).unwrap(),
            [("h1".into(), 1), ("h2".into(), 9), ("::1".into(), 3)]
        );
        assert_eq!(url.path, "simba/x");
        let (mut ttl, mut n) = (Duration::ZERO, None::<u32>);
        url.set("ttl", &mut ttl).unwrap();
        url.set("n", &mut n).unwrap();
        assert_eq!((ttl, n), (Duration::from_secs(2), Some(7)));
        assert!(url.expect_parameters(&["ttl", "n"]).is_ok());
    }

    #[test]
    fn a_password_never_shows() {
        let url = Url::parse("mysql://root:s3cret@db/x?ttl=2s").unwrap();
        assert_eq!(format!("{url:?} {url}"), "mysql://db/x mysql://db/x");
        for text in [
            "mysql://root:s3?cret@db/x",
            "mysql://root:s3cret",
            "s3cret",
            "mysql://root:s3%ret@db/x",
            "mysql://root:s3cret@db:port/",
            "mysql://root:s3/cret@db/x",
            "zk://root:12/s3cret@h",
            "mysql://root:p@12/s3cret@db/x",
            "redis://root%3As3cret%40h",
        ] {
            let error = Url::parse(text)
                .and_then(|url| url.addresses(1))
                .unwrap_err();
            assert!(!format!("{error:?}").contains("s3"), "{error}");
        }
    }

    #[test]
    fn an_at_sign_in_the_path_is_no_credential() {
        assert!(Url::parse("zk://h:2181/app@prod").is_err());
        let url = Url::parse("zk://h:2181,g/app%40prod").unwrap();
        assert_eq!((url.user, url.password), (None, None));
        assert_eq!((url.hosts.len(), url.path.as_str()), (2, "app@prod"));
        let url = Url::parse("zk://me:p@ss@h/app%40prod").unwrap();
        assert_eq!(url.password.as_deref(), Some("p@ss"));
        assert_eq!(url.path, "app@prod");
    }

    #[test]
    fn unknown_and_repeated_parameters_are_errors_that_say_so() {
        let url = Url::parse("memory://?tll=2s").unwrap();
        assert_eq!(
            url.expect_parameters(&["ttl", "transition"])
                .unwrap_err()
                .to_string(),
            "unknown parameter \"tll\" in a memory:// URL; known are: ttl, transition"
        );
        assert!(Url::parse("memory://?a=1&a=2").is_err());
    }

    #[test]
    fn what_people_write_is_read_and_the_rest_refused() {
        for (text, ms) in [
            ("0s", 0),
            ("0.3s", 300),
            ("2m", 120_000),
            ("1d", 86_400_000),
        ] {
            assert_eq!(parse_duration(text).unwrap(), Duration::from_millis(ms));
        }
        for text in [
            "",
            "s",
            "-1s",
            "1",
            "1 s",
            "1w",
            "1.2.3s",
            "1e9s",
            "99999999999999999d",
        ] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }
}
