//! The rules that no schedule may break.
//!
//! A *believer* is a process, paused or not, whose machine's `belief()` lies in the
//! future of its own clock. A crashed process believes nothing. A belief with a fence that the backend
//! granted before it lost its memory is *exempt* from the rules that the backend's memory carries
//! (`TWO`, `OUTLIVES`, `WIND_DOWN`): DESIGN 3 leaves it to the fence, which must still grow.

/// At no true time are there two believers. Checked after every event; between two events beliefs
/// only end, so that is everywhere.
pub const TWO: &str = "never two believers at once";
/// While a process believes, the backend keeps a lease of its id, with the fence believed in (or a
/// higher one: a repeated acquire adopts), which ends no earlier than the belief, in true time.
pub const OUTLIVES: &str = "belief ends before the lease does";
/// What is left of the lease when belief ends, on the backend's clock, is the transition, less at most
/// what the allowance lets the clocks drift apart.
pub const WIND_DOWN: &str = "the transition is left for winding down";
/// Every call ends within `Lease::call_budget`, and a renewal's no later than belief.
pub const BUDGET: &str = "no call outlasts its budget or the deadline";
/// Acquired and Released alternate per incarnation, Released names the fence that Acquired did, and a
/// process that has stopped has announced its Released.
pub const ALTERNATE: &str = "events alternate";
/// When the machine says to announce Acquired, belief holds at that instant, and the grant's own send
/// time plus `Lease::belief` lies in the future.
pub const LATE: &str = "a late grant is not announced";
/// A grant that is not announced is released at once, before any other call, unless a stop intervenes.
pub const GIVE_BACK: &str = "a grant not announced is given back";
/// Once belief has ended, a process that is not paused announces Released in the same instant.
pub const OVERDUE: &str = "Released comes at the deadline";
/// No release leaves a process that believes, or that has not announced Released.
pub const TELL_FIRST: &str = "Released is announced before the release is sent";
/// Every grant's fence is higher than all before it, also across a loss of memory; and so is every
/// announced one, per process always, over all processes unless exempt.
pub const FENCE: &str = "fences grow";
/// A renewal or release changes no lease but the one with the fence it was issued for; an acquire
/// changes none but its own id's; a withdrawal none at all.
pub const TOUCH: &str = "a request touches no lease but its own";
/// A renewal moves no end backwards.
pub const SHORTEN: &str = "a renewal shortens nothing";
/// A belief that has ended does not come back with the same fence or a lower one.
pub const REVIVE: &str = "a deadline once passed never revives";
/// `Plan::patience` after the calm has begun, somebody believes.
pub const LIVE: &str = "somebody owns once faults have stopped";
/// A process that was stopped in the calm has stopped within a ttl, and the backend keeps neither
/// lease nor queue on_refusal nor reservation for it, whatever trouble it had before. Left out is what it
/// could not know of: a request still under way when it began to leave, one of an earlier incarnation,
/// and one that took or prolonged a lease after the backend had said that there was none.
pub const TRACE: &str = "a stopped process leaves nothing behind";

/// A machine comes to a wait or a call within 64 steps.
pub const SPIN: &str = "a process never spins";
