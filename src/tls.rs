//! The TLS options that the backends on a network share: their setters, their URL parameters, and the
//! certificates that they name.

use std::path::PathBuf;

use crate::error::{Error, Result};
use crate::url::Url;

/// Whether connections are encrypted, and the PEM files to do it with.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tls {
    pub(crate) on: bool,
    /// The authorities to trust.
    pub(crate) ca: Option<PathBuf>,
    /// The client's certificate chain.
    pub(crate) cert: Option<PathBuf>,
    /// The key of the client's certificate.
    pub(crate) key: Option<PathBuf>,
}

/// The contents of the PEM files.
#[derive(Clone, Default)]
#[cfg_attr(not(all(feature = "tls", feature = "redis")), allow(dead_code))]
pub(crate) struct Certificates {
    /// The authorities to trust. Defaults to those that the system trusts.
    pub(crate) ca: Option<Vec<u8>>,
    /// The client's certificate chain and its key.
    pub(crate) own: Option<(Vec<u8>, Vec<u8>)>,
}

impl Tls {
    pub(crate) fn from_url(url: &Url) -> Result<Tls> {
        let mut tls = Tls::default();
        url.set("tls", &mut tls.on)?;
        url.set("tls_ca", &mut tls.ca)?;
        url.set("tls_cert", &mut tls.cert)?;
        url.set("tls_key", &mut tls.key)?;
        Ok(tls)
    }

    /// Checks the options and reads the files. Returns `None` if connections are not encrypted.
    pub(crate) fn certificates(&self) -> Result<Option<Certificates>> {
        let read = |option: &str, file: &Option<PathBuf>| -> Result<Option<Vec<u8>>> {
            let Some(file) = file else { return Ok(None) };
            std::fs::read(file).map(Some).map_err(|error| {
                Error::invalid(format!("{option}: cannot read {}: {error}", file.display()))
            })
        };
        if !self.on {
            return if self.ca.is_some() || self.cert.is_some() || self.key.is_some() {
                Err(Error::invalid("tls_ca, tls_cert and tls_key need tls=true"))
            } else {
                Ok(None)
            };
        }
        install_provider()?;
        if self.cert.is_some() != self.key.is_some() {
            return Err(Error::invalid("tls_cert and tls_key go together"));
        }
        let own = read("tls_cert", &self.cert)?.zip(read("tls_key", &self.key)?);
        Ok(Some(Certificates {
            ca: read("tls_ca", &self.ca)?,
            own,
        }))
    }
}

/// Chooses ring as rustls' provider: the drivers panic on their first connection if there is none, or if
/// several are compiled in.
#[cfg(feature = "tls")]
#[allow(clippy::unnecessary_wraps)]
fn install_provider() -> Result<()> {
    // An error means that the program has chosen one already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    Ok(())
}

#[cfg(not(feature = "tls"))]
fn install_provider() -> Result<()> {
    Err(Error::new(
        crate::error::ErrorKind::FeatureDisabled,
        "TLS needs the Cargo feature \"tls\"",
    ))
}

/// Adds the setters of the TLS options, which are in the field that is named, to a builder.
macro_rules! tls_setters {
    ($($tls:ident).+) => {
        /// Sets whether connections are encrypted and the server's certificate and host name are checked;
        /// needs the Cargo feature `tls`. Defaults to `false`.
        pub fn tls(mut self, tls: bool) -> Builder {
            self.$($tls).+.on = tls;
            self
        }

        /// Sets the PEM file with the certificates of the authorities to trust. Defaults to those that the
        /// system trusts, on MySQL to the public ones.
        pub fn tls_ca(mut self, file: impl Into<std::path::PathBuf>) -> Builder {
            self.$($tls).+.ca = Some(file.into());
            self
        }

        /// Sets the PEM file with the client's certificate chain, for servers that ask for one. Needs
        /// [`tls_key`](Builder::tls_key). Defaults to none.
        pub fn tls_cert(mut self, file: impl Into<std::path::PathBuf>) -> Builder {
            self.$($tls).+.cert = Some(file.into());
            self
        }

        /// Sets the PEM file with the key of the client's certificate. Defaults to none.
        pub fn tls_key(mut self, file: impl Into<std::path::PathBuf>) -> Builder {
            self.$($tls).+.key = Some(file.into());
            self
        }
    };
}
pub(crate) use tls_setters;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_cannot_work_are_refused() {
        let certificates = |parameters: &str| {
            let url = Url::parse(&format!("zk://h?{parameters}")).unwrap();
            Tls::from_url(&url).and_then(|tls| tls.certificates())
        };
        assert!(certificates("tls=off").unwrap().is_none());
        for (parameters, says) in [
            (
                "tls=maybe",
                "URL parameter tls: \"maybe\" is neither true nor false",
            ),
            ("tls_ca=x", "tls_ca, tls_cert and tls_key need tls=true"),
            (
                "tls=no&tls_key=x",
                "tls_ca, tls_cert and tls_key need tls=true",
            ),
        ] {
            let error = certificates(parameters).err().unwrap();
            assert_eq!(error.to_string(), says);
        }
        if cfg!(feature = "tls") {
            for (parameters, says) in [
                ("tls=on&tls_cert=x", "tls_cert and tls_key go together"),
                ("tls=yes&tls_ca=/none", "tls_ca: cannot read /none: "),
            ] {
                let error = certificates(parameters).err().unwrap().to_string();
                assert!(error.starts_with(says), "{error}");
            }
            assert!(certificates("tls=true").unwrap().unwrap().ca.is_none());
        } else {
            let error = certificates("tls=true").err().unwrap();
            assert_eq!(error.kind(), crate::error::ErrorKind::FeatureDisabled);
        }
    }
}
