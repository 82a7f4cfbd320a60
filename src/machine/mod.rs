//! What to do next, decided without I/O, clock or dice: time, outcomes and random numbers come in as
//! arguments, one step comes out.

pub mod contention;
pub(crate) mod period;
