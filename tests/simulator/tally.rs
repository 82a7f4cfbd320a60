//! What happened, to see that it did happen.

macro_rules! tally {
    ($($name:ident),* $(,)?) => {
        #[derive(Clone, Copy, Debug, Default)]
        pub struct Tally {
            $(pub $name: u64,)*
        }

        impl Tally {
            pub fn add(&mut self, other: &Tally) {
                $(self.$name += other.$name;)*
            }

            pub fn rows(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name)),*]
            }
        }
    };
}

tally! {
    schedules, events, grants, adoptions, renewals, releases, acquired, expired, given_up, taken_away,
    callbacks, cancelled, guards_lost, looks, timeouts, ignored_replies, lost_messages, duplicates,
    late_messages, pauses, crashes, stops, slow_stops, memory_losses, exempt, lost_wakes, panics, dropped_jobs,
}
