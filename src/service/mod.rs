//! The services, each a worker thread around a machine, and what they are made of.

pub(crate) mod callbacks;
pub(crate) mod contend;
pub(crate) mod delivery;
pub(crate) mod lifecycle;
mod observe;
pub(crate) mod settings;

pub use callbacks::{MutexContender, MutexRetriever};
pub use contend::{ContendBuilder, MutexContendService};
pub use delivery::{Executor, Job};
pub use lifecycle::Status;
pub use observe::{MutexRetrievalService, ObserveBuilder};

/// A service that is dropped at the semicolon does nothing, and the compiler warns of it.
///
/// ```compile_fail
/// #![deny(unused_must_use)]
/// let factory = contend::connect("memory://semicolon")?;
/// factory.contend("m").build()?;
/// # Ok::<(), contend::Error>(())
/// ```
///
/// ```compile_fail
/// #![deny(unused_must_use)]
/// let factory = contend::connect("memory://semicolon")?;
/// factory.observe("m").build()?;
/// # Ok::<(), contend::Error>(())
/// ```
///
/// The same, kept:
///
/// ```
/// #![deny(unused_must_use)]
/// let factory = contend::connect("memory://semicolon")?;
/// let _kept = (factory.contend("m").build()?, factory.observe("m").build()?);
/// # Ok::<(), contend::Error>(())
/// ```
#[cfg(doctest)]
struct DroppedAtTheSemicolon;
