//! Decides what a contender does next, without I/O, clock or dice. Time, outcomes and random numbers come in as
//! arguments, one step comes out.

pub mod contention;
pub(crate) mod period;
