//! The locker: a mutex of the backend as a lock with a guard.
//!
//! - `lock`: the front, and `builder`, which makes one.
//! - `guard`: what a locked locker returns.
//! - `holding`: one locker's seat at its mutex, and the cycle of acquiring, renewing and releasing.
//! - `loss`: how a holder learns that it lost the lock.
//! - `turnstile`: the queue of this process's threads, before the backend's.
//! - `renewer`: the factory's thread that renews for all guards, and `rota`, its list of them.

mod builder;
mod guard;
mod holding;
mod lock;
mod loss;
mod renewer;
mod rota;
mod turnstile;

pub use builder::LockerBuilder;
pub use guard::Guard;
pub use lock::Locker;
pub(crate) use renewer::Renewer;
