//! Bugs planted to see that the simulator sees: in the driver or in the model backend, never in the
//! library.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plant {
    /// No bug.
    None,
    /// Driver: belief after a renewal counts from the reply, not from the send.
    RenewsFromReply,
    /// Driver: a renewal that failed is taken for one that succeeded.
    IgnoresErrors,
    /// Driver: a grant that comes after its own end is taken for a fresh one.
    AnnouncesLateGrant,
    /// Model: adoption leaves the fence as it was.
    KeepsFence,
    /// Model: a release looks at the id only.
    ReleasesById,
    /// Model: a renewal sets the end to what its statement's frozen clock says, earlier or not.
    ShortensLease,
    /// Driver: the clock is read before a pause, and a renewal after it revives a deadline that passed.
    RevivesDeadline,
    /// Model: adoption raises the fence and leaves the end of the lease as it was.
    AdoptsWithoutLease,
    /// Model: adoption sets the end to what its statement's clock and lease say, earlier or not.
    ShortensOnAdoption,
    /// World: clocks drift a tenth of a percent further than the allowance covers.
    DriftsTooFar,
    /// Driver: on stopping, the release goes out first and Released is announced after it.
    ReleasesBeforeTelling,
    /// Driver: a stopped contender leaves without releasing or withdrawing.
    LeavesWithoutRelease,
}
