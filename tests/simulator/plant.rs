//! Bugs planted in the model of the backend and in its world, to see that the simulator sees them. Those in
//! the library are in `tests/mutants`.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plant {
    /// No bug.
    None,
    /// Adoption leaves the fence as it was.
    KeepsFence,
    /// A release looks at the id only.
    ReleasesById,
    /// A renewal sets the end to what its statement's frozen clock says, earlier or not.
    ShortensLease,
    /// Adoption raises the fence and leaves the end of the lease as it was.
    AdoptsWithoutLease,
    /// Adoption sets the end to what its statement's clock and lease say, earlier or not.
    ShortensOnAdoption,
    /// Clocks drift a tenth of a percent further than the allowance covers.
    DriftsTooFar,
}
