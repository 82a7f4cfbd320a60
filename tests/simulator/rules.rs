//! The rules that no schedule of the real loops may break.
//!
//! A *believer* is a process, paused or not, whose service or guard says that it owns. A crashed process
//! believes nothing. A belief with a fence that the backend granted before it lost its memory is *exempt*
//! from the rules that the backend's memory carries (`TWO`, `OUTLIVES`, `WIND_DOWN`): the contract leaves it
//! to the fence, which must still grow.

/// At no true time are there two believers.
pub const TWO: &str = "never two believers at once";
/// While a process believes, the backend keeps a lease of its id, with the fence believed in (or a
/// higher one), which ends no earlier than the belief, in true time.
pub const OUTLIVES: &str = "belief ends before the lease does";
/// What is left of the lease when belief ends is the transition, less what the allowance covers.
pub const WIND_DOWN: &str = "the transition is left for winding down";
/// `fence()`, `is_owner` and `valid_for` end at the send time of a call that was answered with this fence,
/// plus `Lease::belief`.
pub const COUNTED: &str = "belief counts from before the call";
/// A belief that has ended does not come back with the same fence or a lower one.
pub const REVIVE: &str = "a deadline once passed never revives";
/// Gains and losses, and callbacks, alternate and name the same fence.
pub const ALTERNATE: &str = "events alternate";
/// What is announced or returned as owned is owned at that moment.
pub const LATE: &str = "a late grant is not announced";
/// A service that is not paused says Released when its belief ends; a guard's `lost` is closed before
/// more than a quarter of the transition and the rest of a call have passed.
pub const OVERDUE: &str = "Released comes at the deadline";
/// No release is sent while the process believes, or while its callback for Released has not returned and
/// the transition has not passed.
pub const TELL_FIRST: &str = "Released is told before the release is sent";
/// Fences grow: those granted, and those announced.
pub const FENCE: &str = "fences grow";
/// A call ends within the budget, and no later than belief.
pub const BUDGET: &str = "no call outlasts its budget or the deadline";
/// A caller's timeout bounds its call, a cancelled wait ends, unlocking takes a second at most.
pub const BOUND: &str = "waits end in time";
/// After the faults a process owns before long.
pub const LIVE: &str = "a process owns in the end";
/// The backend knows nothing of a process that ended without faults. A lease that was granted to a request
/// after its sender had given it up is exempt until it has run out: servers refuse such a request, as far as
/// they know its end, and the model, which does not, is the harder one.
pub const TRACE: &str = "no trace is left";
/// A schedule ends, without too many events.
pub const SPIN: &str = "schedules end";
/// An owner that is woken looks whether it still owns before long, unless its subscription failed.
pub const LOOK: &str = "a woken owner looks";
