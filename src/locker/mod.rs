//! The locker: a mutex of the backend as a lock with a guard.
//!
//! - `lock`: the front, and `builder`, which makes one.
//! - `guard`: what a locked locker returns.
//! - `holding`: what a locker and its guard share, and the loop around the contention machine.
//! - `desk`: where its calls to the backend are made, and `cycle`, one ownership.
//! - `loss`: how a holder learns that it lost the lock.
//! - `turnstile`: the queue of this process's threads, before the backend's.
//! - `renewer`: the factory's thread that renews for all guards, and `rota`, its list of them.

mod builder;
mod cycle;
mod desk;
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
