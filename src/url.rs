//! Backend URLs: `scheme://user:password@host:port,host:port/path?key=value`, and the options of builders that
//! are their parameters.
//!
//! The common crates know neither several hosts nor how to keep a password out of their errors and
//! `Debug` output.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, ErrorKind, Result};
use crate::lease::Lease;

/// A URL taken apart. It has no `Debug`, as it may contain a password.
pub(crate) struct Url {
    pub(crate) scheme: String,
    pub(crate) login: Login,
    /// As written: `host` or `host:port` or `[v6]:port`, one per comma.
    pub(crate) hosts: Vec<String>,
    /// Percent-decoded, without the leading slash.
    pub(crate) path: String,
    parameters: BTreeMap<String, String>,
    /// The names of the parameters that were asked for, given or not.
    known: RefCell<Vec<&'static str>>,
}

impl Url {
    pub(crate) fn parse(text: &str) -> Result<Url> {
        let (scheme, rest) = text.split_once("://").ok_or_else(|| {
            // A text without "://" may be anything, a password too: do not repeat it.
            Error::invalid(
                "not a URL; one looks like scheme://host:port/path?key=value, such as redis://127.0.0.1:6379",
            )
        })?;
        let (authority, rest) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
        // Perhaps a password with a bare '/' or '?', of which no part may be taken for something else and shown.
        ensure(
            !rest.contains('@'),
            "a URL with an '@' after a '/' or a '?': write these in a password as %2F and %3F, and '@' in a \
             path or a parameter as %40",
        )?;
        let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
        // The last '@': a password may contain one, a host may not.
        let (credentials, hosts) = authority.rsplit_once('@').unwrap_or(("", authority));
        let (user, password) = match credentials.split_once(':') {
            Some((user, password)) => (user, Some(decode(password)?)),
            None => (credentials, None),
        };
        // Perhaps a user and a password whose ':' and '@' were encoded, too.
        ensure(
            !hosts.contains('%') || hosts.contains('['),
            "a URL with a '%' in its host: the ':' and '@' around a password stand as they are",
        )?;
        let mut parameters = BTreeMap::new();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            if parameters.insert(decode(key)?, decode(value)?).is_some() {
                let message = format!("URL parameter {key:?} stands twice");
                return Err(Error::invalid(message));
            }
        }
        Ok(Url {
            scheme: scheme.to_ascii_lowercase(),
            login: Login {
                user: Some(decode(user)?).filter(|user| !user.is_empty()),
                password,
                ask: None,
            },
            hosts: (hosts.split(',').filter(|host| !host.is_empty()))
                .map(str::to_owned)
                .collect(),
            path: decode(path.strip_prefix('/').unwrap_or(path))?,
            parameters,
            known: RefCell::default(),
        })
    }

    /// The parameter as text.
    pub(crate) fn text(&self, key: &'static str) -> Option<&str> {
        self.known.borrow_mut().push(key);
        self.parameters.get(key).map(String::as_str)
    }

    /// Sets `option` to the parameter `key`, if it is given.
    pub(crate) fn set<T: Parameter>(&self, key: &'static str, option: &mut T) -> Result<()> {
        if let Some(text) = self.text(key) {
            *option =
                T::read(text).map_err(|error| error.context(format!("URL parameter {key}")))?;
        }
        Ok(())
    }

    /// Refuses parameters that were not asked for, and lists those that were.
    pub(crate) fn refuse_unknown(&self) -> Result<()> {
        let known = self.known.borrow();
        let mut given = self.parameters.keys();
        let Some(key) = given.find(|key| !known.contains(&key.as_str())) else {
            return Ok(());
        };
        let (scheme, known) = (&self.scheme, known.join(", "));
        Err(Error::invalid(format!(
            "unknown parameter {key:?} in a {scheme}:// URL; known are: {known}"
        )))
    }

    /// The lease that the parameters `ttl` and `transition` ask for, for a backend without other parameters.
    pub(crate) fn lease(&self) -> Result<Lease> {
        let default = Lease::default();
        let (mut ttl, mut transition) = (default.ttl(), default.transition());
        self.set("ttl", &mut ttl)?;
        self.set("transition", &mut transition)?;
        self.refuse_unknown()?;
        Lease::new(ttl, transition)
    }
}

/// As whom to log in. It has no `Debug`, as it contains a password.
#[derive(Clone, Default)]
pub(crate) struct Login {
    pub(crate) user: Option<String>,
    pub(crate) password: Option<String>,
    /// Asked with every connection, in the place of both.
    pub(crate) ask: Option<Arc<dyn Fn() -> (String, String) + Send + Sync>>,
}

impl Login {
    /// Returns the user and the password.
    ///
    /// # Errors
    /// `Unavailable` where the callback panicked: that must not end the thread that opens connections.
    pub(crate) fn credentials(&self) -> Result<(Option<String>, Option<String>)> {
        let Some(ask) = &self.ask else {
            return Ok((self.user.clone(), self.password.clone()));
        };
        let asked = catch_unwind(AssertUnwindSafe(|| ask()))
            .map_err(|_| Error::new(ErrorKind::Unavailable, "the credentials callback panicked"));
        asked.map(|(user, password)| (Some(user), Some(password)))
    }
}

/// Declares setters of a `Builder`.
macro_rules! setters {
    ($($(#[$doc:meta])* fn $name:ident($value:ident: $type:ty) { self.$($field:ident).+ = $set:expr })*) => {
        $(
            $(#[$doc])*
            pub fn $name(mut self, $value: $type) -> Builder {
                self.$($field).+ = $set;
                self
            }
        )*
    };
}
pub(crate) use setters;

/// Declares options of a `Builder`: each is a setter, and the URL parameter of the same name. `read_options` sets
/// those that a URL names, and refuses parameters that were not asked for by then.
macro_rules! options {
    ($($(#[$doc:meta])* fn $name:ident($value:ident: $type:ty) { self.$($field:ident).+ = $set:expr })*) => {
        crate::url::setters! {
            $($(#[$doc])* fn $name($value: $type) { self.$($field).+ = $set })*
        }

        fn read_options(&mut self, url: &Url) -> Result<()> {
            $(url.set(stringify!($name), &mut self.$($field).+)?;)*
            url.refuse_unknown()
        }
    };
}
pub(crate) use options;

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

/// Refuses settings that cannot work.
pub(crate) fn ensure(can_work: bool, message: &str) -> Result<()> {
    match can_work {
        true => Ok(()),
        false => Err(Error::invalid(message)),
    }
}

/// Hosts as (host, port), sorted and each once.
pub(crate) fn addresses<H: AsRef<str>>(
    hosts: impl IntoIterator<Item = H>,
    default_port: u16,
) -> Result<Vec<(String, u16)>> {
    let hosts = hosts.into_iter().filter(|host| !host.as_ref().is_empty());
    let found: Result<BTreeSet<_>> = hosts
        .map(|host| address(host.as_ref(), default_port))
        .collect();
    Ok(found?.into_iter().collect())
}

/// A host as (host, port), brackets of a v6 address taken off.
pub(crate) fn address(host: &str, default_port: u16) -> Result<(String, u16)> {
    let (name, port) = match host.strip_prefix('[') {
        Some(rest) => rest.split_once(']').unwrap_or(("", rest)),
        None => host.split_at(host.find(':').unwrap_or(host.len())),
    };
    let port = match port {
        "" | ":" => Some(default_port),
        _ => port.strip_prefix(':').and_then(|it| it.parse().ok()),
    };
    // What stands here may be a password: the error must not show it.
    let is_odd = |c: char| c.is_whitespace() || "@/?".contains(c);
    let port = port.filter(|_| !name.is_empty() && !name.contains(is_odd));
    port.map(|port| (name.to_owned(), port)).ok_or_else(|| {
        Error::invalid(
            "a host is written host, host:port or [v6 address]:port; a user and a path are no part of it",
        )
    })
}

/// Writes hosts as a URL does.
pub(crate) fn host_list(hosts: &[(String, u16)]) -> String {
    let written = hosts.iter().map(|(host, port)| match host.contains(':') {
        true => format!("[{host}]:{port}"),
        false => format!("{host}:{port}"),
    });
    written.collect::<Vec<_>>().join(",")
}

fn decode(text: &str) -> Result<String> {
    // The text may be a password: the error must not show it.
    let bad = || Error::invalid("a % in a URL must be followed by two hex digits of UTF-8 text");
    let mut parts = text.split('%');
    let mut bytes = parts.next().unwrap_or("").as_bytes().to_vec();
    for part in parts {
        let (hex, rest) = part.split_at_checked(2).ok_or_else(bad)?;
        bytes.push(u8::from_str_radix(hex, 16).map_err(|_| bad())?);
        bytes.extend(rest.as_bytes());
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
    let units = [
        ("ms", 1e3),
        ("s", 1e6),
        ("m", 60e6),
        ("h", 3600e6),
        ("d", 86_400e6),
    ];
    let found = (units.iter()).find_map(|(unit, micros)| Some((text.strip_suffix(unit)?, micros)));
    let micros = found.and_then(|(number, micros)| {
        let is_plain = number
            .bytes()
            .all(|byte| byte.is_ascii_digit() || byte == b'.');
        let number: f64 = number.parse().ok().filter(|_| is_plain)?;
        // Through whole microseconds, so that 0.3s is 300 ms and not a hair less.
        Some((number * micros).round()).filter(|micros| *micros <= 1e18)
    });
    let micros = micros.ok_or_else(|| {
        Error::invalid(format!(
            "{text:?} is not a duration; write a number and a unit, such as 500ms, 2s, 5m, 4h or 1d"
        ))
    });
    micros.map(|micros| Duration::from_micros(micros as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_is_found() {
        let url = Url::parse("redis+cluster://us%40er:p%3A@ss@h1:1,h2,[::1]:3/simba/x?ttl=2s&n=7")
            .unwrap();
        assert_eq!(url.scheme, "redis+cluster");
        assert_eq!(url.login.user.as_deref(), Some("us@er"));
        assert_eq!(url.login.password.as_deref(), Some("p:@ss"));
        assert_eq!(
            addresses(&url.hosts, 9).unwrap(),
            [("::1".into(), 3), ("h1".into(), 1), ("h2".into(), 9)]
        );
        assert_eq!(url.path, "simba/x");
        let (mut ttl, mut n) = (Duration::ZERO, None::<u32>);
        url.set("ttl", &mut ttl).unwrap();
        url.set("n", &mut n).unwrap();
        assert_eq!((ttl, n), (Duration::from_secs(2), Some(7)));
        assert!(url.refuse_unknown().is_ok());
    }

    #[test]
    fn a_password_never_shows() {
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
            let found = Url::parse(text).and_then(|url| addresses(&url.hosts, 1));
            let error = found.unwrap_err();
            assert!(!format!("{error:?}").contains("s3"), "{error}");
        }
    }

    #[test]
    fn host_is_a_name_and_perhaps_a_port() {
        let port = |host: &str| address(host, 9).map(|(_, port)| port);
        for (host, expected) in [
            ("h", 9),
            ("h:", 9),
            ("h:1", 1),
            ("[::1]", 9),
            ("[::1]:2", 2),
        ] {
            assert_eq!(port(host).unwrap(), expected, "{host}");
        }
        for host in [
            "", ":1", "h:x", "h:70000", "[::1", "[::1]2", "a b", "s3cret@h", "h/p", "h?a",
        ] {
            let error = port(host).unwrap_err().to_string();
            assert!(
                error.contains("host:port") && !error.contains("s3"),
                "{error}"
            );
        }
    }

    #[test]
    fn an_at_sign_in_the_path_is_no_credential() {
        assert!(Url::parse("zk://h:2181/app@prod").is_err());
        let url = Url::parse("zk://h:2181,g/app%40prod").unwrap();
        assert_eq!((url.login.user, url.login.password), (None, None));
        assert_eq!((url.hosts.len(), url.path.as_str()), (2, "app@prod"));
        let url = Url::parse("zk://me:p@ss@h/app%40prod").unwrap();
        assert_eq!(url.login.password.as_deref(), Some("p@ss"));
        assert_eq!(url.path, "app@prod");
    }

    #[test]
    fn unknown_and_repeated_parameters_are_errors_that_say_so() {
        let url = Url::parse("memory://?tll=2s").unwrap();
        assert_eq!(
            url.lease().unwrap_err().to_string(),
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
