//! TLS for the backends on a network: its options, and the certificates that they name.

use std::fs;
use std::path::PathBuf;
#[cfg(all(feature = "tls", feature = "zk"))]
use std::sync::Arc;

use crate::error::{Error, ErrorKind, Result};
use crate::url::ensure;

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
#[derive(Clone)]
#[cfg_attr(not(all(feature = "tls", feature = "redis")), allow(dead_code))]
pub(crate) struct Certificates {
    /// The authorities to trust. Defaults to those that the system trusts.
    pub(crate) ca: Option<Vec<u8>>,
    /// The client's certificate chain and its key.
    pub(crate) own: Option<(Vec<u8>, Vec<u8>)>,
}

impl Tls {
    /// Checks the options and reads the files. Returns `None` if connections are not encrypted.
    pub(crate) fn certificates(&self) -> Result<Option<Certificates>> {
        if !self.on {
            let no_file = self.ca.is_none() && self.cert.is_none() && self.key.is_none();
            ensure(no_file, "tls_ca, tls_cert and tls_key need tls=true")?;
            return Ok(None);
        }
        if cfg!(not(feature = "tls")) {
            let message = "TLS needs the Cargo feature \"tls\"";
            return Err(Error::new(ErrorKind::FeatureDisabled, message));
        }
        // The drivers panic on their first connection if rustls has no provider, or several are compiled in. An error
        // means that the program has chosen one already.
        #[cfg(feature = "tls")]
        let _ = rustls::crypto::ring::default_provider().install_default();
        let both = self.cert.is_some() == self.key.is_some();
        ensure(both, "tls_cert and tls_key go together")?;
        let read = |option: &str, file: &Option<PathBuf>| -> Result<Option<Vec<u8>>> {
            let Some(file) = file else { return Ok(None) };
            fs::read(file).map(Some).map_err(|error| {
                Error::invalid(format!("{option}: cannot read {}: {error}", file.display()))
            })
        };
        Ok(Some(Certificates {
            ca: read("tls_ca", &self.ca)?,
            own: read("tls_cert", &self.cert)?.zip(read("tls_key", &self.key)?),
        }))
    }
}

#[cfg(all(feature = "tls", feature = "zk"))]
impl Tls {
    /// The settings of a client with these options.
    pub(crate) fn client_config(&self) -> Result<Option<Arc<rustls::ClientConfig>>> {
        use std::fmt::Display;

        use rustls::pki_types::pem::PemObject;
        use rustls::pki_types::{CertificateDer, PrivateKeyDer};

        let Some(files) = self.certificates()? else {
            return Ok(None);
        };
        let invalid =
            |option: &str, what: &dyn Display| Error::invalid(format!("{option}: {what}"));
        let chain = |option: &str, pem: &[u8]| {
            let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
            match found {
                Ok(none) if none.is_empty() => {
                    Err(invalid(option, &"the file contains no certificate"))
                }
                found => found.map_err(|error| invalid(option, &error)),
            }
        };
        let mut roots = rustls::RootCertStore::empty();
        if let Some(pem) = &files.ca {
            for certificate in chain("tls_ca", pem)? {
                let added = roots.add(certificate);
                added.map_err(|error| invalid("tls_ca", &error))?;
            }
        } else {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            ensure(
                !roots.is_empty(),
                "the system trusts no authority; give tls_ca",
            )?;
        }
        let builder = rustls::ClientConfig::builder().with_root_certificates(roots);
        let config = match &files.own {
            None => builder.with_no_client_auth(),
            Some((cert, key)) => {
                // The error may not quote the key.
                let key = PrivateKeyDer::from_pem_slice(key)
                    .map_err(|_| invalid("tls_key", &"the file contains no PEM private key"))?;
                let config = builder.with_client_auth_cert(chain("tls_cert", cert)?, key);
                config.map_err(|error| invalid("tls_cert", &error))?
            }
        };
        Ok(Some(Arc::new(config)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_cannot_work_are_refused() {
        let off = Tls::default();
        let on = || Tls {
            on: true,
            ..Tls::default()
        };
        let file = || Some(PathBuf::from("/none"));
        assert!(off.certificates().unwrap().is_none());
        let says = |tls: Tls| tls.certificates().err().unwrap().to_string();
        let needs = "tls_ca, tls_cert and tls_key need tls=true";
        let (ca, key) = (file(), file());
        assert_eq!(says(Tls { ca, ..off.clone() }), needs);
        assert_eq!(says(Tls { key, ..off }), needs);
        if cfg!(feature = "tls") {
            let (ca, cert) = (file(), file());
            assert_eq!(
                says(Tls { cert, ..on() }),
                "tls_cert and tls_key go together"
            );
            let error = says(Tls { ca, ..on() });
            assert!(error.starts_with("tls_ca: cannot read /none: "), "{error}");
            assert!(on().certificates().unwrap().unwrap().ca.is_none());
        } else {
            let error = on().certificates().err().unwrap();
            assert_eq!(error.kind(), ErrorKind::FeatureDisabled);
        }
    }
}
