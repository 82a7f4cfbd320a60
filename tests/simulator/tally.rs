//! What happened over all schedules: shown, and held against minimums, so that the simulator cannot
//! stop exercising something without anybody noticing.

macro_rules! tally {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        #[derive(Clone, Debug, Default)]
        pub struct Tally {
            $($(#[$doc])* pub $name: u64,)*
            /// The longest wait for an owner after the faults, in thousandths of the bound.
            pub slowest: u64,
        }

        impl Tally {
            pub fn add(&mut self, other: &Tally) {
                $(self.$name += other.$name;)*
                self.slowest = self.slowest.max(other.slowest);
            }

            pub fn rows(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name),)* ("slowest", self.slowest)]
            }
        }
    };
}

tally! {
    schedules,
    events,
    /// Leases granted by the model, adoptions included.
    grants,
    adoptions,
    renewals,
    /// Renewals that succeeded after one of the same ownership had failed.
    saved,
    /// Attempts made in the instant of a wake-up.
    woken,
    /// Announced.
    acquired,
    /// Released announced because the deadline had come.
    step_downs,
    /// Released announced for any other reason: a stop, or a renewal that said `Lost`.
    given_up,
    /// Late grants released without having been announced.
    give_backs,
    /// Renewals and releases that named a fence which was no longer that of the lease.
    stale_requests,
    timeouts,
    /// Replies to a call that was over by then.
    ignored_replies,
    lost_messages,
    duplicates,
    late_messages,
    pauses,
    crashes,
    stops,
    /// Releases sent again on the way out.
    release_retries,
    /// Stops in the calm of a process that was in trouble before, checked for what they leave.
    clean_stops,
    new_ids,
    memory_losses,
    /// Beliefs whose lease the backend had forgotten.
    exempt_beliefs,
    lost_wakes,
}
