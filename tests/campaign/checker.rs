//! Judges a history: pure, facts in, verdict out.
//!
//! Fences say in which order ownerships were granted. So of two ownerships of one mutex, the one with the smaller fence
//! must have ended, in the eyes of its owner, before the other owner began to believe. Every belief is recorded such
//! that what the checker calls a violation is one on every reading of the records: `from` is a time at which the
//! belief had begun, `until` one at which it had not ended.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use crate::history::{ALL, Kind, Nanos, Record, nanos};

/// What is promised, and against what the records are held.
#[derive(Clone, Debug)]
pub struct Promise {
    /// How long an owner believes at most without the backend.
    pub ttl: Duration,
    /// After the faults have ended, every contended mutex has an owner within this.
    pub owner_within: Duration,
    /// The mutexes that must have an owner then.
    pub contended: Vec<String>,
    /// Runs of a schedule are at least so far apart.
    pub period: Duration,
    /// Whether a step of a client's wall clock may bring runs closer (ZooKeeper tells no time).
    pub runs_by_wall_clock: bool,
    /// The capacity of each semaphore, and how long permits last without a renewal.
    pub capacities: HashMap<String, u64>,
    pub permit_ttl: Duration,
}

/// What must hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// No two believe at once, unless a fault excuses it.
    NoOverlap,
    /// A later ownership has a larger fence.
    FenceGrows,
    /// No two ownerships have the same fence.
    FenceIsUnique,
    /// Acquired and Released alternate, and none is missing.
    EventsAlternate,
    /// An acknowledged write is in the register that checks fences.
    WriteIsKept,
    /// There is an owner in time after the faults.
    OwnerComesBack,
    /// Scheduled runs are as far apart as promised.
    RunsAreApart,
    /// No more permits are believed to be held than there are.
    CapacityHolds,
    /// A process stops when it is asked to, and does nothing else that none may do.
    ProcessBehaves,
}

/// A rule that was broken, and how.
pub type Violation = (Rule, String);

/// The outcome.
#[derive(Clone, Debug, Default)]
pub struct Verdict {
    /// Ownerships that a contender believed in.
    pub acquisitions: usize,
    /// Of those, how many were handed on inside a process.
    pub handed_on: usize,
    /// How many faults there were of each kind.
    pub faults: BTreeMap<String, usize>,
    /// Overlaps after a fault that only the fence protects against.
    pub excused: usize,
    /// Acknowledged writes to the registers that check the fence, and how many of them are lost.
    pub fenced: (usize, usize),
    /// The same of the registers that do not.
    pub unfenced: (usize, usize),
    /// How long after the end of the faults the last of the mutexes had an owner.
    pub owner_after: Duration,
    /// Scheduled runs.
    pub runs: usize,
    /// How often a run was put on record.
    pub recorded: usize,
    /// The gaps between two of them that had to be a period long, whatever else happened.
    pub gaps: usize,
    /// Guards of permits.
    pub permit_guards: usize,
    pub violations: Vec<Violation>,
}

impl Verdict {
    /// How many violations there are of a rule.
    pub fn count(&self, rule: Rule) -> usize {
        self.violations.iter().filter(|it| it.0 == rule).count()
    }
}

/// Judges `records`. `chains` are the writes that each register holds in the end.
pub fn check(
    records: &[Record],
    chains: &HashMap<String, HashSet<u64>>,
    promise: &Promise,
) -> Verdict {
    let is_fault = |it: &&Record| matches!(it.kind, Kind::Fault | Kind::FenceOnlyFault);
    let killed = records.iter().filter(|it| it.kind == Kind::Killed);
    let mut history = History {
        records,
        faults: records.iter().filter(is_fault).collect(),
        killed: killed.map(|it| (&*it.who, it.from)).collect(),
        promise,
        verdict: Verdict::default(),
    };
    for misbehaved in history.of(Kind::Misbehaved) {
        let what = format!("{}: {}", misbehaved.who, misbehaved.what);
        history.violate(Rule::ProcessBehaves, what);
    }
    for fault in &history.faults {
        let count = history.verdict.faults.entry(fault.who.clone());
        *count.or_default() += 1;
    }
    let (beliefs, permits) = history.beliefs();
    for (mutex, beliefs) in &beliefs {
        history.verdict.acquisitions += beliefs.len();
        history.check_order(mutex, beliefs);
    }
    history.check_events();
    history.check_writes(chains);
    history.check_liveness(&beliefs);
    history.check_runs();
    history.check_permits(&permits);
    history.verdict
}

/// What is judged, and what came of it so far.
struct History<'a> {
    records: &'a [Record],
    faults: Vec<&'a Record>,
    /// When each process that was killed was dead.
    killed: HashMap<&'a str, Nanos>,
    promise: &'a Promise,
    verdict: Verdict,
}

/// The ownerships of each mutex, each as one record, by growing fence and time.
type Beliefs = BTreeMap<String, Vec<Record>>;

/// The process in a contender's name.
fn process_of(who: &str) -> &str {
    who.split_once('/').map_or(who, |(process, _)| process)
}

/// A contender's name without the turn.
fn contender_of(who: &str) -> &str {
    who.split_once('#').map_or(who, |(contender, _)| contender)
}

fn hits(fault: &Record, mutex: &str) -> bool {
    fault.what == ALL || fault.what == mutex
}

impl<'a> History<'a> {
    fn of(&self, kind: Kind) -> impl Iterator<Item = &'a Record> + use<'a> {
        self.records.iter().filter(move |it| it.kind == kind)
    }

    fn violate(&mut self, rule: Rule, what: String) {
        self.verdict.violations.push((rule, what));
    }

    /// The ownerships, and the permits held, each cut where it was given up or its process died.
    fn beliefs(&mut self) -> (Beliefs, Vec<Record>) {
        let key = |it: &'a Record| (&*it.who, &*it.what, it.fence);
        let mut merged: HashMap<_, Record> = HashMap::new();
        for record in self.of(Kind::Belief) {
            let belief = merged.entry(key(record));
            let belief = belief.or_insert_with(|| record.clone());
            belief.after = belief.after.max(record.after);
            belief.from = belief.from.min(record.from);
            belief.until = belief.until.max(record.until);
        }
        for record in self.of(Kind::GaveUp) {
            if let Some(belief) = merged.get_mut(&key(record)) {
                belief.until = belief.until.min(record.from);
            }
        }
        // A lease that is handed on was asked for by the first of its holders.
        let lease = |it: &Record| (contender_of(&it.who).to_owned(), it.what.clone(), it.fence);
        let mut asked: HashMap<_, Nanos> = HashMap::new();
        for belief in merged.values() {
            let first = asked.entry(lease(belief)).or_insert(Nanos::MAX);
            *first = belief.after.min(*first);
        }
        self.verdict.handed_on = merged.len() - asked.len();
        let (mut beliefs, mut permits) = (Beliefs::new(), Vec::new());
        for mut belief in merged.into_values() {
            belief.after = asked[&lease(&belief)];
            if let Some(dead) = self.killed.get(process_of(&belief.who)) {
                belief.until = belief.until.min(*dead);
            }
            if belief.number > 0 {
                permits.push(belief);
                continue;
            }
            beliefs.entry(belief.what.clone()).or_default().push(belief);
        }
        for of_mutex in beliefs.values_mut() {
            of_mutex.sort_by_key(|belief| (belief.fence, belief.from));
        }
        (beliefs, permits)
    }

    /// Of two ownerships the one with the smaller fence is over when the other begins.
    fn check_order(&mut self, mutex: &str, beliefs: &[Record]) {
        // The earliest beginning among this belief and those with larger fences.
        let mut earliest = vec![Nanos::MAX; beliefs.len() + 1];
        for index in (0..beliefs.len()).rev() {
            earliest[index] = earliest[index + 1].min(beliefs[index].from);
        }
        for (index, older) in beliefs.iter().enumerate() {
            for (other, newer) in beliefs.iter().enumerate().skip(index + 1) {
                let overlap = newer.from < older.until;
                let broken = if newer.fence == older.fence {
                    let handed_on = contender_of(&newer.who) == contender_of(&older.who);
                    match handed_on {
                        true => overlap.then_some(Rule::NoOverlap),
                        false => Some(Rule::FenceIsUnique),
                    }
                } else if earliest[other] >= older.until {
                    break;
                } else if !overlap {
                    None
                } else if older.after > newer.from {
                    Some(Rule::FenceGrows)
                } else if self.is_excused(mutex, older, newer) {
                    self.verdict.excused += 1;
                    None
                } else {
                    Some(Rule::NoOverlap)
                };
                if let Some(rule) = broken {
                    self.violate(rule, pair(mutex, older, newer));
                }
            }
        }
    }

    /// Whether a fault of the fence-only kind explains the two: the older ownership was there before the fault ended,
    /// the newer one came after it began, and one of the two owners noticed within a ttl of its end. Which one does not
    /// matter: of two masters in a failover, either may be the one that stays.
    fn is_excused(&self, mutex: &str, older: &Record, newer: &Record) -> bool {
        self.faults.iter().any(|fault| {
            fault.kind == Kind::FenceOnlyFault
                && hits(fault, mutex)
                && older.after <= fault.until
                && newer.from >= fault.from
                && older.until.min(newer.until) <= fault.until + nanos(self.promise.ttl)
        })
    }

    /// Acquired and Released alternate, in pairs with one fence, and none is missing.
    fn check_events(&mut self) {
        let mut owning: HashMap<&str, u64> = HashMap::new();
        for event in self.records {
            let fits = match event.kind {
                Kind::Acquired => owning.insert(&event.who, event.fence).is_none(),
                Kind::Released => owning.remove(&*event.who) == Some(event.fence),
                _ => continue,
            };
            if !fits || event.number > 0 {
                self.violate(Rule::EventsAlternate, event.to_line());
            }
        }
    }

    fn check_writes(&mut self, chains: &HashMap<String, HashSet<u64>>) {
        for write in self.of(Kind::Acknowledged) {
            let chain = chains.get(&write.what);
            let kept = chain.is_some_and(|chain| chain.contains(&write.number));
            let fenced = write.what.starts_with("fenced");
            let (written, lost) = match fenced {
                true => &mut self.verdict.fenced,
                false => &mut self.verdict.unfenced,
            };
            *written += 1;
            *lost += usize::from(!kept);
            if fenced && !kept {
                self.violate(Rule::WriteIsKept, write.to_line());
            }
        }
    }

    /// What was lost costs time, never the lock.
    fn check_liveness(&mut self, beliefs: &Beliefs) {
        let Some(healed) = self.of(Kind::Healed).next().map(|it| it.from) else {
            return;
        };
        for mutex in &self.promise.contended {
            let lasting = beliefs.get(mutex).into_iter().flatten();
            let lasting = lasting.filter(|belief| belief.until > healed);
            let first = lasting.map(|belief| belief.from.max(healed)).min();
            let after = first.map(|first| Duration::from_nanos(first - healed));
            self.verdict.owner_after = self.verdict.owner_after.max(after.unwrap_or_default());
            if after.is_none_or(|after| after > self.promise.owner_within) {
                let promised = self.promise.owner_within;
                let what =
                    format!("{mutex}: {after:?} after the faults, promised are {promised:?}");
                self.violate(Rule::OwnerComesBack, what);
            }
        }
    }

    /// Runs are a period apart, whichever process leads. Excepted is the run that could not be recorded or died in the
    /// middle, but only under another leadership: one leader never runs too soon.
    fn check_runs(&mut self) {
        // When a run of this ownership was put on record last: a later one of its runs is not.
        let mut recorded: HashMap<(&str, u64), Nanos> = HashMap::new();
        for record in self.of(Kind::Recorded) {
            let last = recorded.entry((&record.what, record.fence)).or_default();
            *last = record.from.max(*last);
            self.verdict.recorded += 1;
        }
        let mut runs: Vec<&Record> = self.of(Kind::Run).collect();
        runs.sort_by_key(|run| (&run.what, run.from));
        self.verdict.runs = runs.len();
        // What a loaded machine may put between the moment that counts and the moment that is written down.
        let least = nanos(self.promise.period) * 9 / 10;
        for pair in runs.windows(2).filter(|pair| pair[0].what == pair[1].what) {
            let (first, second) = (pair[0], pair[1]);
            let on_record = recorded.get(&(&*first.what, first.fence));
            let is_recorded = on_record.is_some_and(|at| *at >= first.from);
            let excuses = |fault: &Record| {
                hits(fault, &first.what) && self.excuses_gap(fault, first, second, is_recorded)
            };
            if first.fence != second.fence && self.faults.iter().any(|fault| excuses(fault)) {
                continue;
            }
            self.verdict.gaps += 1;
            if second.from - first.from < least {
                let what = format!("{}after it {}", first.to_line(), second.to_line());
                self.violate(Rule::RunsAreApart, what);
            }
        }
    }

    fn excuses_gap(
        &self,
        fault: &Record,
        first: &Record,
        second: &Record,
        is_recorded: bool,
    ) -> bool {
        /// How long after a run a fault may begin and yet have hindered its record.
        const RECORDED: Duration = Duration::from_secs(1);
        // A clock that was stepped stays so: what it stamped, and what is read by it, is off.
        if fault.who == "clock-step" {
            return self.promise.runs_by_wall_clock && fault.from <= second.from;
        }
        // What deletes the record may come later than what hinders it, which nothing has if it is there.
        let may_begin = match fault.kind {
            Kind::FenceOnlyFault => second.from,
            _ if is_recorded => return false,
            _ => first.from + nanos(RECORDED),
        };
        fault.from <= may_begin && fault.until + nanos(self.promise.ttl) >= first.from
    }

    /// The permits that are believed to be held never exceed the capacity.
    fn check_permits(&mut self, permits: &[Record]) {
        self.verdict.permit_guards = permits.len();
        let mut granted = HashMap::new();
        let mut changes: BTreeMap<&str, Vec<(Nanos, i64)>> = BTreeMap::new();
        for held in permits {
            if let Some(other) = granted.insert((&held.what, held.fence), &held.who) {
                let what = format!("{}: granted to {other} too", held.to_line());
                self.violate(Rule::FenceIsUnique, what);
            }
            if held.until > held.from {
                let count = i64::try_from(held.number).unwrap_or(i64::MAX);
                let changes = changes.entry(&held.what).or_default();
                changes.extend([(held.from, count), (held.until, -count)]);
            }
        }
        for (semaphore, mut changes) in changes {
            // What ends at a moment ends before what begins at it.
            changes.sort_unstable();
            let capacity = self.promise.capacities.get(semaphore).copied().unwrap_or(0);
            let (mut sum, mut most) = (0, (0, 0));
            for (index, (at, change)) in changes.iter().enumerate() {
                sum += change;
                let held = u64::try_from(sum).unwrap_or(0);
                let until = changes.get(index + 1).map_or(*at, |next| next.0);
                if held > capacity.max(most.0) && until > *at {
                    if self.excuses_excess(*at, until) {
                        self.verdict.excused += 1;
                    } else {
                        most = (held, *at);
                    }
                }
            }
            if most.0 > 0 {
                let what = format!("{semaphore}: {} of {capacity} at {}", most.0, most.1);
                self.violate(Rule::CapacityHolds, what);
            }
        }
    }

    /// Whether the server may have forgotten permits that were believed in all that time.
    fn excuses_excess(&self, from: Nanos, until: Nanos) -> bool {
        self.faults.iter().any(|fault| {
            let end = fault.until + nanos(self.promise.permit_ttl);
            let forgets = fault.kind == Kind::FenceOnlyFault && fault.what == ALL;
            forgets && fault.from <= from && until <= end
        })
    }
}

fn pair(mutex: &str, older: &Record, newer: &Record) -> String {
    let late = (older.until as f64 - newer.from as f64) / 1e6;
    format!(
        "{mutex}: {} with fence {} believed until {} ({late:.1} ms after {} had begun with fence {}, at {})",
        older.who, older.fence, older.until, newer.who, newer.fence, newer.from,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use Rule::*;

    const MS: u64 = 1_000_000;

    fn promise() -> Promise {
        Promise {
            ttl: Duration::from_millis(100),
            owner_within: Duration::from_millis(50),
            contended: vec!["m".into()],
            period: Duration::from_millis(10),
            runs_by_wall_clock: false,
            capacities: HashMap::from([("s".to_owned(), 2)]),
            permit_ttl: Duration::from_millis(100),
        }
    }

    fn belief(who: &str, fence: u64, from: u64, until: u64) -> Record {
        let belief = Record::new(Kind::Belief, who, "m").fence(fence);
        let asked = from.saturating_sub(1);
        belief.after(asked * MS).at(from * MS).until(until * MS)
    }

    fn fault_on(what: &str, kind: Kind, from: u64, until: u64) -> Record {
        Record::new(kind, "x", what).at(from * MS).until(until * MS)
    }

    fn fault(from: u64, until: u64) -> Record {
        fault_on(ALL, Kind::Fault, from, until)
    }

    fn fence_only(from: u64, until: u64) -> Record {
        fault_on(ALL, Kind::FenceOnlyFault, from, until)
    }

    fn judge(records: &[Record]) -> Verdict {
        check(records, &HashMap::new(), &promise())
    }

    /// The rules that these records break.
    fn broken(records: &[Record]) -> Vec<Rule> {
        let verdict = judge(records);
        verdict.violations.iter().map(|it| it.0).collect()
    }

    #[test]
    fn turns_are_no_violation() {
        let turns = [
            belief("a/l", 1, 10, 20),
            belief("b/l", 2, 20, 30),
            belief("a/l", 3, 35, 40),
        ];
        let verdict = judge(&turns);
        assert!(verdict.violations.is_empty(), "{:?}", verdict.violations);
        assert_eq!(verdict.acquisitions, 3);
    }

    #[test]
    fn older_believer_is_an_overlap() {
        for records in [
            vec![belief("a/l", 1, 10, 21), belief("b/l", 2, 20, 30)],
            // The newer one is over before the older one is.
            vec![belief("a/l", 1, 10, 90), belief("b/l", 2, 20, 30)],
            // Another one between the two fences is in order.
            vec![
                belief("a/l", 1, 10, 50),
                belief("c/l", 3, 40, 60),
                belief("b/l", 2, 60, 61),
            ],
            // Samples of one ownership are one belief.
            vec![
                belief("a/l", 1, 10, 12),
                belief("a/l", 1, 14, 16),
                belief("b/l", 2, 15, 30),
            ],
        ] {
            assert_eq!(judge(&records).count(NoOverlap), 1, "{records:?}");
        }
    }

    #[test]
    fn belief_ends_with_its_process() {
        let at = 19 * MS;
        for end in [
            Record::new(Kind::GaveUp, "a/l", "m").fence(1).at(at),
            Record::new(Kind::Killed, "a", "").at(at),
        ] {
            let records = [belief("a/l", 1, 10, 90), end, belief("b/l", 2, 20, 30)];
            assert_eq!(broken(&records), []);
        }
    }

    #[test]
    fn handed_on_lease_has_one_holder() {
        let turns = [belief("a/l#1", 5, 10, 20), belief("a/l#2", 5, 20, 30)];
        assert_eq!(broken(&turns), []);
        assert_eq!(judge(&turns).handed_on, 1);
        let both = [belief("a/l#1", 5, 10, 21), belief("a/l#2", 5, 20, 30)];
        assert_eq!(broken(&both), [NoOverlap]);
        let stranger = [belief("a/l#1", 5, 10, 20), belief("b/l#2", 5, 20, 30)];
        assert_eq!(broken(&stranger), [FenceIsUnique]);
        // The second turn came later than a larger fence; the lease was asked for before it.
        let excused = [
            fence_only(5, 40),
            belief("a/l#1", 5, 10, 20),
            belief("b/l", 6, 15, 60),
            belief("a/l#2", 5, 30, 40),
        ];
        assert_eq!(broken(&excused), []);
    }

    #[test]
    fn smaller_fence_is_never_excused() {
        let (first, fault) = (belief("a/l", 7, 10, 12), fence_only(5, 12));
        let fell = [fault, first.clone(), belief("b/l", 3, 30, 40)];
        assert_eq!(broken(&fell), [FenceGrows]);
        let repeated = [first, belief("b/l", 7, 30, 40)];
        assert_eq!(broken(&repeated), [FenceIsUnique]);
    }

    #[test]
    fn fence_only_fault_excuses_one_ttl() {
        let overlap = [belief("a/l", 1, 10, 60), belief("b/l", 2, 20, 30)];
        // Either may be the one that stays; if both believe for longer than a ttl, neither noticed.
        let stays = [belief("a/l", 1, 10, 200), belief("b/l", 2, 20, 30)];
        let long = [belief("a/l", 1, 10, 200), belief("b/l", 2, 20, 150)];
        let on = |mutex| fault_on(mutex, Kind::FenceOnlyFault, 15, 18);
        for (fault, records, excused) in [
            (fence_only(15, 18), &overlap, true),
            (fence_only(15, 18), &stays, true),
            (fence_only(15, 18), &long, false),
            (on("m"), &overlap, true),
            (on("n"), &overlap, false),
            // Not fence-only; after the newer began; before the older was acquired.
            (fault(15, 18), &overlap, false),
            (fence_only(25, 28), &overlap, false),
            (fence_only(1, 5), &overlap, false),
        ] {
            let records = [&[fault][..], records].concat();
            let rules = if excused { vec![] } else { vec![NoOverlap] };
            assert_eq!(broken(&records), rules, "{records:?}");
            assert_eq!(judge(&records).excused, usize::from(excused));
        }
    }

    #[test]
    fn change_of_masters_excuses_its_time() {
        // From 100 to 200, and a ttl of 100 for what was granted in it.
        for (older, newer, rules) in [
            // Granted by the old master, and by the new one at once, in the middle, and at the end.
            ((1, 50, 150), (2, 100, 400), &[][..]),
            ((1, 50, 150), (2, 149, 400), &[]),
            ((1, 190, 290), (2, 195, 400), &[]),
            ((1, 190, 300), (2, 280, 400), &[]),
            // The other way round: the old one takes writes for a while yet.
            ((1, 150, 900), (2, 160, 300), &[]),
            // Began before there was another master; granted when the old one was none any more.
            ((1, 50, 150), (2, 99, 400), &[NoOverlap]),
            ((1, 202, 290), (2, 210, 400), &[NoOverlap]),
            // Both believe when all that the old one granted has ended; long before, and long after.
            ((1, 190, 301), (2, 210, 302), &[NoOverlap]),
            ((1, 10, 30), (2, 20, 40), &[NoOverlap]),
            ((1, 500, 530), (2, 520, 540), &[NoOverlap]),
            // In the middle: asked for when a larger fence was believed already; and the same fence twice.
            ((2, 110, 150), (1, 120, 160), &[FenceGrows]),
            ((1, 110, 150), (1, 120, 160), &[FenceIsUnique]),
        ] {
            let of = |who, (fence, from, until)| belief(who, fence, from, until);
            let records = [fence_only(100, 200), of("a/l", older), of("b/l", newer)];
            assert_eq!(broken(&records), rules, "{records:?}");
        }
        // Asked for before, and answered late: the order of the two is open.
        let late = belief("b/l", 1, 120, 160).after(105 * MS);
        let records = [fence_only(100, 200), late, belief("a/l", 2, 110, 150)];
        assert_eq!(broken(&records), []);
    }

    #[test]
    fn events_alternate_in_pairs_of_one_fence() {
        let event = |kind, fence| Record::new(kind, "a/l", "m").fence(fence);
        let acquired = |fence| event(Kind::Acquired, fence);
        let released = |fence| event(Kind::Released, fence);
        assert_eq!(broken(&[acquired(1), released(1), acquired(2)]), []);
        for bad in [
            vec![acquired(1), acquired(2)],
            vec![released(1)],
            vec![acquired(1), released(2)],
            vec![acquired(1), released(1).number(1)],
        ] {
            assert_eq!(broken(&bad), [EventsAlternate], "{bad:?}");
        }
    }

    #[test]
    fn fenced_register_must_keep_writes() {
        let wrote = |register, token| Record::new(Kind::Acknowledged, "", register).number(token);
        let records = [
            wrote("fenced-m", 1),
            wrote("fenced-m", 2),
            wrote("plain-m", 3),
        ];
        let chains = HashMap::from([("fenced-m".to_owned(), HashSet::from([1]))]);
        let verdict = check(&records, &chains, &promise());
        assert_eq!((verdict.fenced, verdict.unfenced), ((2, 1), (1, 1)));
        assert_eq!(verdict.violations.len(), 1);
        assert_eq!(verdict.count(WriteIsKept), 1);
    }

    #[test]
    fn owner_comes_back_in_time() {
        let healed = Record::new(Kind::Healed, "", "").at(100 * MS);
        for (from, until, after) in [
            (90, 120, Some(0)),
            (140, 160, Some(40)),
            (151, 160, None),
            (10, 20, None),
        ] {
            let records = [healed.clone(), belief("a/l", 1, from, until)];
            match after {
                Some(after) => {
                    assert_eq!(broken(&records), []);
                    assert_eq!(judge(&records).owner_after, Duration::from_millis(after));
                }
                None => assert_eq!(broken(&records), [OwnerComesBack]),
            }
        }
        assert_eq!(broken(&[healed]), [OwnerComesBack]);
    }

    #[test]
    fn runs_are_a_period_apart() {
        let run = |fence, at: u64| Record::new(Kind::Run, "a/s", "t").fence(fence).at(at * MS);
        let recorded = |at: u64| Record::new(Kind::Recorded, "", "t").fence(1).at(at * MS);
        let step = Record {
            who: "clock-step".into(),
            ..fault(11, 12)
        };
        let on = |mutex| fault_on(mutex, Kind::FenceOnlyFault, 11, 12);
        for (records, is_broken) in [
            (vec![run(1, 10), run(1, 20), run(1, 31)], false),
            (vec![run(1, 10), run(1, 13)], true),
            (vec![run(2, 13), run(1, 10)], true),
            // Another leader may not know of the run; the same one does.
            (vec![fault(11, 12), run(1, 10), run(2, 13)], false),
            (vec![fault(11, 12), run(1, 10), run(1, 13)], true),
            // If its run is on record it does, whatever else happened, unless the record was deleted.
            (
                vec![fault(11, 12), run(1, 10), recorded(11), run(2, 13)],
                true,
            ),
            (
                vec![fence_only(12, 13), run(1, 10), recorded(11), run(2, 13)],
                false,
            ),
            // That was the run before it.
            (
                vec![fault(11, 12), run(1, 10), recorded(9), run(2, 13)],
                false,
            ),
            // What was done to one mutex excuses nothing on another.
            (vec![on("t"), run(1, 10), run(2, 13)], false),
            (vec![on("m"), run(1, 10), run(2, 13)], true),
            (vec![step, run(1, 10), run(2, 13)], true),
        ] {
            let rules = if is_broken {
                vec![RunsAreApart]
            } else {
                vec![]
            };
            assert_eq!(broken(&records), rules, "{records:?}");
        }
        // What hinders the record comes with the run; what deletes it may come later.
        let mut slow = promise();
        slow.period = Duration::from_secs(5);
        for (fault, gaps) in [(fault(1_200, 1_210), 1), (fence_only(1_200, 1_210), 0)] {
            let records = [fault, run(1, 10), run(2, 2_000)];
            let verdict = check(&records, &HashMap::new(), &slow);
            assert_eq!((verdict.gaps, verdict.violations.len()), (gaps, gaps));
        }
    }

    #[test]
    fn permits_stay_within_capacity() {
        let permits = |who, fence, count, from: u64, until: u64| {
            let held = Record::new(Kind::Belief, who, "s").fence(fence);
            held.number(count).at(from * MS).until(until * MS)
        };
        let fine = [
            permits("a/p", 1, 1, 10, 20),
            permits("b/p", 2, 1, 10, 20),
            permits("c/p", 3, 2, 20, 30),
        ];
        assert_eq!(broken(&fine), []);
        let mut over = vec![
            permits("a/p", 1, 1, 10, 21),
            permits("b/p", 2, 1, 10, 21),
            permits("c/p", 3, 1, 20, 30),
        ];
        assert_eq!(broken(&over), [CapacityHolds]);
        // A server that forgot, at 20 and not after; and one mutex that was revoked.
        for (fault, rules) in [
            (fence_only(19, 20), &[][..]),
            (fence_only(21, 22), &[CapacityHolds]),
            (
                fault_on("m", Kind::FenceOnlyFault, 19, 20),
                &[CapacityHolds],
            ),
            (fault(19, 20), &[CapacityHolds]),
        ] {
            assert_eq!(broken(&[&over[..], &[fault]].concat()), rules);
        }
        let back = Record::new(Kind::GaveUp, "a/p", "s").fence(1);
        over.push(back.at(20 * MS));
        assert_eq!(broken(&over), []);
        let twice = [permits("a/p", 1, 1, 10, 12), permits("b/p", 1, 1, 13, 14)];
        assert_eq!(broken(&twice), [FenceIsUnique]);
    }

    #[test]
    fn process_that_misbehaves_is_a_violation() {
        let misbehaved = Record::new(Kind::Misbehaved, "a", "did not stop");
        assert_eq!(broken(&[misbehaved]), [ProcessBehaves]);
    }
}
