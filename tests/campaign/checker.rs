//! Judges a history: pure, facts in, verdict out.
//!
//! Fences say in which order ownerships were granted. So of two ownerships of one mutex, the one with the
//! smaller fence must have ended, in the eyes of its owner, before the other owner began to believe. Every
//! belief is recorded such that what the checker calls a violation is one on every reading of the
//! records: `from` is a time at which the belief had begun, `until` one at which it had not ended.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::time::Duration;

use crate::history::{Nanos, Record};

/// What is promised, and against what the records are held.
#[derive(Clone, Debug)]
pub struct Promise {
    /// How long an owner believes at most without the backend.
    pub ttl: Duration,
    /// After the faults have ended, every contended mutex has an owner within this.
    pub owner_within: Duration,
    /// The mutexes that must have an owner then.
    pub contended: Vec<String>,
    /// The mutex that services want all the time: the longest time without an owner is measured on it.
    pub led: String,
    /// Runs of a schedule are at least so far apart; `None` if that is not looked at.
    pub period: Option<Duration>,
    /// Whether a step of a client's wall clock may bring runs closer (ZooKeeper tells no time).
    pub runs_by_wall_clock: bool,
    /// The capacity of each semaphore.
    pub capacities: HashMap<String, u64>,
}

/// What must not happen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Violation {
    /// Two believed at once, and no fault excuses it.
    Overlap(String),
    /// A later ownership had a smaller fence.
    FenceFell(String),
    /// Two ownerships had the same fence.
    FenceRepeated(String),
    /// Acquired and Released did not alternate, or an event was missing.
    NotAlternating(String),
    /// An acknowledged write is not in the register that checks fences.
    WriteLost(String),
    /// No owner in time after the faults.
    NoOwner(String),
    /// Two scheduled runs came closer than promised.
    RunsTooClose(String),
    /// More permits were believed to be held than there are.
    OverCapacity(String),
    /// A process did what none may do.
    Misbehaved(String),
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

/// The outcome.
#[derive(Clone, Debug, Default)]
pub struct Verdict {
    /// Ownerships that somebody believed in.
    pub acquisitions: usize,
    /// How many faults there were of each kind.
    pub faults: BTreeMap<String, usize>,
    /// Overlaps after a fault that only the fence protects against.
    pub excused: usize,
    /// The time in which an overlap would be excused: what is proven is proven in the rest.
    pub excusing: Duration,
    /// The time from the first belief to the last.
    pub lasted: Duration,
    /// Acknowledged writes to the registers that check the fence, and how many of them are lost.
    pub fenced: (usize, usize),
    /// The same of the registers that do not.
    pub unfenced: (usize, usize),
    /// The longest time in which nobody led, faults included.
    pub longest_without_owner: Duration,
    /// The faults that touched it, or the ttl before it.
    pub without_owner_during: Vec<String>,
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
    /// All violations.
    pub violations: Vec<Violation>,
}

impl Verdict {
    /// How many violations are of this kind.
    pub fn count(&self, kind: impl Fn(&Violation) -> bool) -> usize {
        self.violations.iter().filter(|found| kind(found)).count()
    }
}

/// An ownership as its owner saw it.
#[derive(Clone, Debug)]
struct Belief {
    who: String,
    fence: u64,
    after: Nanos,
    from: Nanos,
    until: Nanos,
}

struct Fault {
    kind: String,
    fence_only: bool,
    mutex: Option<String>,
    begin: Nanos,
    end: Nanos,
}

impl Fault {
    /// Whether it can have hit this mutex.
    fn hits(&self, mutex: &str) -> bool {
        self.mutex.as_deref().is_none_or(|only| only == mutex)
    }
}

/// Judges `records`. `chains` are the writes that each register holds in the end.
pub fn check(
    records: &[Record],
    chains: &HashMap<String, HashSet<u64>>,
    promise: &Promise,
) -> Verdict {
    let mut verdict = Verdict::default();
    let mut faults = Vec::new();
    for record in records {
        match record {
            Record::Fault {
                kind,
                fence_only,
                mutex,
                begin,
                end,
            } => {
                *verdict.faults.entry(kind.clone()).or_default() += 1;
                faults.push(Fault {
                    kind: kind.clone(),
                    fence_only: *fence_only,
                    mutex: mutex.clone(),
                    begin: *begin,
                    end: *end,
                });
            }
            Record::Misbehaved { what } => {
                verdict.violations.push(Violation::Misbehaved(what.clone()));
            }
            _ => {}
        }
    }
    let beliefs = beliefs(records);
    for (mutex, beliefs) in &beliefs {
        verdict.acquisitions += beliefs.len();
        check_order(mutex, beliefs, &faults, promise, &mut verdict);
    }
    (verdict.excusing, verdict.lasted) = excusing(&beliefs, &faults, promise.ttl);
    check_events(records, &mut verdict);
    check_writes(records, chains, &mut verdict);
    check_liveness(records, &beliefs, &faults, promise, &mut verdict);
    check_runs(records, &faults, promise, &mut verdict);
    check_permits(records, promise, &mut verdict);
    verdict
}

/// The ownerships of each mutex by growing fence, each cut where it was given up or its process died.
fn beliefs(records: &[Record]) -> BTreeMap<String, Vec<Belief>> {
    let mut merged: HashMap<(&str, &str, u64), Belief> = HashMap::new();
    let mut gave_up: HashMap<(&str, &str, u64), Nanos> = HashMap::new();
    let killed = killed(records);
    for record in records {
        match record {
            Record::Belief {
                who,
                mutex,
                fence,
                after,
                from,
                until,
            } => {
                let belief = merged
                    .entry((who, mutex, *fence))
                    .or_insert_with(|| Belief {
                        who: who.clone(),
                        fence: *fence,
                        after: *after,
                        from: *from,
                        until: *until,
                    });
                belief.after = belief.after.max(*after);
                belief.from = belief.from.min(*from);
                belief.until = belief.until.max(*until);
            }
            Record::GaveUp {
                who,
                mutex,
                fence,
                at,
            } => {
                gave_up.insert((who, mutex, *fence), *at);
            }
            _ => {}
        }
    }
    let mut by_mutex: BTreeMap<String, Vec<Belief>> = BTreeMap::new();
    for (key, mut belief) in merged {
        if let Some(at) = gave_up.get(&key) {
            belief.until = belief.until.min(*at);
        }
        if let Some(at) = killed.get(process_of(&belief.who)) {
            belief.until = belief.until.min(*at);
        }
        by_mutex.entry(key.1.to_owned()).or_default().push(belief);
    }
    for beliefs in by_mutex.values_mut() {
        beliefs.sort_by_key(|belief| (belief.fence, belief.from));
    }
    by_mutex
}

fn killed(records: &[Record]) -> HashMap<&str, Nanos> {
    records
        .iter()
        .filter_map(|record| match record {
            Record::Killed { process, at } => Some((process.as_str(), *at)),
            _ => None,
        })
        .collect()
}

/// The process in a contender's name, `process/contender`.
fn process_of(who: &str) -> &str {
    who.split_once('/').map_or(who, |(process, _)| process)
}

/// Rules 1 and 9: of two ownerships the one with the smaller fence is over when the other begins.
fn check_order(
    mutex: &str,
    beliefs: &[Belief],
    faults: &[Fault],
    promise: &Promise,
    verdict: &mut Verdict,
) {
    // The earliest beginning among this belief and those with larger fences.
    let mut earliest = vec![Nanos::MAX; beliefs.len() + 1];
    for index in (0..beliefs.len()).rev() {
        earliest[index] = earliest[index + 1].min(beliefs[index].from);
    }
    for (index, older) in beliefs.iter().enumerate() {
        for (other, newer) in beliefs.iter().enumerate().skip(index + 1) {
            if newer.fence == older.fence {
                verdict
                    .violations
                    .push(Violation::FenceRepeated(pair(mutex, older, newer)));
                continue;
            }
            if earliest[other] >= older.until {
                break;
            }
            if newer.from >= older.until {
                continue;
            }
            if older.after > newer.from {
                verdict
                    .violations
                    .push(Violation::FenceFell(pair(mutex, older, newer)));
            } else if is_excused(mutex, (older, newer), faults, promise.ttl) {
                verdict.excused += 1;
            } else {
                verdict
                    .violations
                    .push(Violation::Overlap(pair(mutex, older, newer)));
            }
        }
    }
}

/// Whether a fault of the fence-only kind explains the two: the older ownership was there before the fault
/// ended, the newer one came after it began, and one of the two owners noticed within a ttl of its end.
/// Which one does not matter: of two masters in a failover, either may be the one that stays.
fn is_excused(
    mutex: &str,
    (older, newer): (&Belief, &Belief),
    faults: &[Fault],
    ttl: Duration,
) -> bool {
    faults.iter().any(|fault| {
        fault.fence_only
            && fault.hits(mutex)
            && older.after <= fault.end
            && newer.from >= fault.begin
            && older.until.min(newer.until) <= fault.end + nanos(ttl)
    })
}

/// In how much of the time in which anybody believed an overlap would be excused, on the mutex that was hit most; and
/// how long that time is.
fn excusing(
    beliefs: &BTreeMap<String, Vec<Belief>>,
    faults: &[Fault],
    ttl: Duration,
) -> (Duration, Duration) {
    let all = || beliefs.values().flatten();
    let begin = all().map(|belief| belief.from).min().unwrap_or(0);
    let end = all().map(|belief| belief.until).max().unwrap_or(begin);
    let excusing = |mutex: &String| {
        let mut excuses: Vec<(Nanos, Nanos)> = faults
            .iter()
            .filter(|fault| fault.fence_only && fault.hits(mutex))
            .map(|fault| (fault.begin, fault.end + nanos(ttl)))
            .collect();
        excuses.sort_unstable();
        let mut sum = 0;
        let mut counted = begin;
        for (from, until) in excuses {
            let until = until.min(end);
            sum += until.saturating_sub(from.max(counted));
            counted = counted.max(until);
        }
        sum
    };
    let most = beliefs.keys().map(excusing).max().unwrap_or(0);
    (
        Duration::from_nanos(most),
        Duration::from_nanos(end - begin),
    )
}

fn pair(mutex: &str, older: &Belief, newer: &Belief) -> String {
    let ms = |later: Nanos, earlier: Nanos| (later as f64 - earlier as f64) / 1e6;
    format!(
        "{mutex}: {} with fence {} believed until {} ({:.1} ms after {} had begun with fence {}, at {})",
        older.who,
        older.fence,
        older.until,
        ms(older.until, newer.from),
        newer.who,
        newer.fence,
        newer.from,
    )
}

/// Rule 7: Acquired and Released alternate, in pairs with one fence, and none is missing.
fn check_events(records: &[Record], verdict: &mut Verdict) {
    let mut owning: HashMap<&str, Option<u64>> = HashMap::new();
    for record in records {
        let Record::Event {
            who,
            acquired,
            fence,
            missed,
            at,
        } = record
        else {
            continue;
        };
        let before = owning.entry(who).or_default();
        let fits = match (acquired, *before) {
            (true, None) => true,
            (false, Some(held)) => held == *fence,
            _ => false,
        };
        if !fits || *missed > 0 {
            verdict.violations.push(Violation::NotAlternating(format!(
                "{who}: acquired={acquired} fence {fence} at {at}, {missed} missed, while it owned {before:?}"
            )));
        }
        *before = acquired.then_some(*fence);
    }
}

fn check_writes(records: &[Record], chains: &HashMap<String, HashSet<u64>>, verdict: &mut Verdict) {
    for record in records {
        let Record::Acknowledged { register, token } = record else {
            continue;
        };
        let kept = chains
            .get(register)
            .is_some_and(|chain| chain.contains(token));
        let fenced = register.starts_with("fenced");
        let (written, lost) = if fenced {
            &mut verdict.fenced
        } else {
            &mut verdict.unfenced
        };
        *written += 1;
        if !kept {
            *lost += 1;
            if fenced {
                verdict
                    .violations
                    .push(Violation::WriteLost(format!("{register}: {token}")));
            }
        }
    }
}

/// Rule 6: what was lost costs time, never the lock.
fn check_liveness(
    records: &[Record],
    beliefs: &BTreeMap<String, Vec<Belief>>,
    faults: &[Fault],
    promise: &Promise,
    verdict: &mut Verdict,
) {
    if let Some(led) = beliefs.get(&promise.led) {
        let (begin, end) = longest_gap(led);
        verdict.longest_without_owner = Duration::from_nanos(end - begin);
        verdict.without_owner_during = faults
            .iter()
            .filter(|fault| fault.begin < end && fault.end + nanos(promise.ttl) > begin)
            .map(|fault| fault.kind.clone())
            .collect();
    }
    let healed = records.iter().find_map(|record| match record {
        Record::Healed { at } => Some(*at),
        _ => None,
    });
    let Some(healed) = healed else { return };
    for mutex in &promise.contended {
        let first = beliefs
            .get(mutex)
            .into_iter()
            .flatten()
            .filter(|belief| belief.until > healed)
            .map(|belief| belief.from.max(healed))
            .min();
        let Some(first) = first else {
            verdict.violations.push(Violation::NoOwner(format!(
                "{mutex}: nobody after the faults"
            )));
            continue;
        };
        let after = Duration::from_nanos(first - healed);
        verdict.owner_after = verdict.owner_after.max(after);
        if after > promise.owner_within {
            verdict.violations.push(Violation::NoOwner(format!(
                "{mutex}: {after:?} after the faults, promised are {:?}",
                promise.owner_within
            )));
        }
    }
}

/// The longest time that no belief covers.
fn longest_gap(beliefs: &[Belief]) -> (Nanos, Nanos) {
    let mut by_time: Vec<(Nanos, Nanos)> = beliefs
        .iter()
        .map(|belief| (belief.from, belief.until))
        .collect();
    by_time.sort_unstable();
    let mut longest = (0, 0);
    let mut end = by_time.first().map_or(0, |first| first.0);
    for (from, until) in by_time {
        if from.saturating_sub(end) > longest.1 - longest.0 {
            longest = (end, from);
        }
        end = end.max(until);
    }
    longest
}

/// How long after a run a fault may begin and yet have hindered its record.
const RECORDED: Duration = Duration::from_secs(1);

/// Section 6: runs are a period apart, whoever leads. Excepted is the run that could not be recorded or died
/// in the middle, but only under another leadership: one leader never runs too soon.
fn check_runs(records: &[Record], faults: &[Fault], promise: &Promise, verdict: &mut Verdict) {
    let mut runs: BTreeMap<&str, Vec<(Nanos, &str, u64)>> = BTreeMap::new();
    // When a run of this ownership was put on record last: a later one of its runs is not.
    let mut recorded: HashMap<(&str, u64), Nanos> = HashMap::new();
    for record in records {
        match record {
            Record::Run {
                mutex,
                at,
                who,
                fence,
            } => {
                runs.entry(mutex).or_default().push((*at, who, *fence));
                verdict.runs += 1;
            }
            Record::Recorded { mutex, fence, at } => {
                verdict.recorded += 1;
                let last = recorded.entry((mutex, *fence)).or_default();
                *last = (*last).max(*at);
            }
            _ => {}
        }
    }
    let Some(period) = promise.period else { return };
    // What a loaded machine may put between the moment that counts and the moment that is written down.
    let least = nanos(period) - nanos(period) / 10;
    for (mutex, mut runs) in runs {
        runs.sort_unstable();
        for pair in runs.windows(2) {
            let ((first, who, fence), (second, next, next_fence)) = (pair[0], pair[1]);
            let is_recorded = recorded.get(&(mutex, fence)).is_some_and(|at| *at >= first);
            let excuses = |fault: &Fault| {
                // A clock that was stepped stays so: what it stamped, and what is read by it, is off.
                if fault.kind == "clock-step" {
                    return promise.runs_by_wall_clock && fault.begin <= second;
                }
                // What deletes the record may come later than what hinders it, which nothing has if it is there.
                let may_begin = if fault.fence_only {
                    second
                } else if is_recorded {
                    return false;
                } else {
                    first + nanos(RECORDED)
                };
                fault.begin <= may_begin && fault.end + nanos(promise.ttl) >= first
            };
            let is_excused = fence != next_fence
                && faults
                    .iter()
                    .any(|fault| fault.hits(mutex) && excuses(fault));
            if is_excused {
                continue;
            }
            verdict.gaps += 1;
            if second - first < least {
                verdict.violations.push(Violation::RunsTooClose(format!(
                    "{mutex}: {who} at {first}, {next} {:?} later, promised are {period:?}",
                    Duration::from_nanos(second - first)
                )));
            }
        }
    }
}

/// Section 5: the permits that are believed to be held never exceed the capacity.
fn check_permits(records: &[Record], promise: &Promise, verdict: &mut Verdict) {
    struct Held {
        count: u64,
        from: Nanos,
        until: Nanos,
    }
    let killed = killed(records);
    let mut guards: HashMap<(&str, u64), Held> = HashMap::new();
    let mut holders: HashMap<(&str, u64), &str> = HashMap::new();
    let mut gave_back: HashMap<(&str, u64), Nanos> = HashMap::new();
    for record in records {
        match record {
            Record::Permits {
                who,
                semaphore,
                count,
                fence,
                from,
                until,
            } => {
                let until = killed
                    .get(process_of(who))
                    .map_or(*until, |at| (*at).min(*until));
                let held = guards.entry((semaphore, *fence)).or_insert(Held {
                    count: *count,
                    from: *from,
                    until,
                });
                held.from = held.from.min(*from);
                held.until = held.until.max(until);
                let holder = *holders.entry((semaphore, *fence)).or_insert(who);
                if holder != who {
                    verdict.violations.push(Violation::FenceRepeated(format!(
                        "{semaphore}: permit {fence} was granted to {holder} and to {who}"
                    )));
                }
            }
            Record::GavePermitsBack {
                semaphore,
                fence,
                at,
            } => {
                gave_back.insert((semaphore, *fence), *at);
            }
            _ => {}
        }
    }
    verdict.permit_guards = guards.len();
    let mut changes: BTreeMap<&str, Vec<(Nanos, i64)>> = BTreeMap::new();
    for ((semaphore, fence), held) in guards {
        let until = gave_back
            .get(&(semaphore, fence))
            .map_or(held.until, |at| held.until.min(*at));
        if until > held.from {
            let count = i64::try_from(held.count).unwrap_or(i64::MAX);
            let changes = changes.entry(semaphore).or_default();
            changes.push((held.from, count));
            changes.push((until, -count));
        }
    }
    for (semaphore, mut changes) in changes {
        let capacity = promise.capacities.get(semaphore).copied().unwrap_or(0);
        // What ends at a moment ends before what begins at it.
        changes.sort_unstable();
        let (mut sum, mut most, mut when) = (0, 0, 0);
        for (at, change) in changes {
            sum += change;
            if sum > most {
                (most, when) = (sum, at);
            }
        }
        if u64::try_from(most).unwrap_or(0) > capacity {
            verdict.violations.push(Violation::OverCapacity(format!(
                "{semaphore}: {most} permits of {capacity} believed at {when}"
            )));
        }
    }
}

fn nanos(duration: Duration) -> Nanos {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn promise() -> Promise {
        Promise {
            ttl: Duration::from_millis(100),
            owner_within: Duration::from_millis(50),
            contended: vec!["m".into()],
            led: "m".into(),
            period: Some(Duration::from_millis(10)),
            runs_by_wall_clock: false,
            capacities: HashMap::from([("s".to_owned(), 2)]),
        }
    }

    fn belief(who: &str, fence: u64, from: u64, until: u64) -> Record {
        acquired_after(who, fence, from.saturating_sub(1), from, until)
    }

    fn acquired_after(who: &str, fence: u64, after: u64, from: u64, until: u64) -> Record {
        Record::Belief {
            who: who.into(),
            mutex: "m".into(),
            fence,
            after: after * MS,
            from: from * MS,
            until: until * MS,
        }
    }

    fn fault(fence_only: bool, begin: u64, end: u64) -> Record {
        Record::Fault {
            kind: "x".into(),
            fence_only,
            mutex: None,
            begin: begin * MS,
            end: end * MS,
        }
    }

    fn event(acquired: bool, fence: u64, missed: u64) -> Record {
        Record::Event {
            who: "a/l".into(),
            acquired,
            fence,
            missed,
            at: 0,
        }
    }

    fn judge(records: &[Record]) -> Verdict {
        check(records, &HashMap::new(), &promise())
    }

    #[track_caller]
    fn only(verdict: &Verdict, kind: impl Fn(&Violation) -> bool) {
        assert_eq!(verdict.violations.len(), 1, "{:?}", verdict.violations);
        assert!(kind(&verdict.violations[0]), "{:?}", verdict.violations);
    }

    #[test]
    fn turns_are_no_violation() {
        let verdict = judge(&[
            belief("a/l", 1, 10, 20),
            belief("b/l", 2, 20, 30),
            belief("a/l", 3, 35, 40),
        ]);
        assert!(verdict.violations.is_empty(), "{:?}", verdict.violations);
        assert_eq!(verdict.acquisitions, 3);
        assert_eq!(verdict.longest_without_owner, Duration::from_millis(5));
        assert!(verdict.without_owner_during.is_empty());
        let verdict = judge(&[
            fault(false, 31, 33),
            belief("a/l", 1, 10, 30),
            belief("b/l", 2, 35, 40),
            fault(false, 36, 37),
        ]);
        assert_eq!(verdict.without_owner_during, ["x"]);
    }

    #[test]
    fn samples_of_one_ownership_are_one_belief() {
        let verdict = judge(&[
            belief("a/l", 1, 10, 12),
            belief("a/l", 1, 14, 16),
            belief("b/l", 2, 15, 30),
        ]);
        assert_eq!(verdict.acquisitions, 2);
        only(&verdict, |found| matches!(found, Violation::Overlap(_)));
    }

    #[test]
    fn an_older_owner_that_still_believes_is_an_overlap() {
        let verdict = judge(&[belief("a/l", 1, 10, 21), belief("b/l", 2, 20, 30)]);
        only(&verdict, |found| matches!(found, Violation::Overlap(_)));
        // Also when the newer one is over before the older one is.
        let verdict = judge(&[belief("a/l", 1, 10, 90), belief("b/l", 2, 20, 30)]);
        only(&verdict, |found| matches!(found, Violation::Overlap(_)));
        // Also with another one between the two fences that is in order.
        let verdict = judge(&[
            belief("a/l", 1, 10, 50),
            belief("c/l", 3, 40, 60),
            belief("b/l", 2, 60, 61),
        ]);
        assert_eq!(
            verdict.count(|found| matches!(found, Violation::Overlap(_))),
            1
        );
    }

    #[test]
    fn a_belief_that_was_given_up_or_died_ends_there() {
        let gave_up = Record::GaveUp {
            who: "a/l".into(),
            mutex: "m".into(),
            fence: 1,
            at: 19 * MS,
        };
        assert!(
            judge(&[belief("a/l", 1, 10, 90), gave_up, belief("b/l", 2, 20, 30)])
                .violations
                .is_empty()
        );
        let killed = Record::Killed {
            process: "a".into(),
            at: 19 * MS,
        };
        assert!(
            judge(&[belief("a/l", 1, 10, 90), killed, belief("b/l", 2, 20, 30)])
                .violations
                .is_empty()
        );
    }

    #[test]
    fn a_later_acquisition_with_a_smaller_fence_is_seen_even_where_overlaps_are_excused() {
        let records = [
            fault(true, 5, 12),
            belief("a/l", 7, 10, 12),
            belief("b/l", 3, 30, 40),
        ];
        only(&judge(&records), |found| {
            matches!(found, Violation::FenceFell(_))
        });
        let records = [belief("a/l", 7, 10, 12), belief("b/l", 7, 30, 40)];
        only(&judge(&records), |found| {
            matches!(found, Violation::FenceRepeated(_))
        });
    }

    #[test]
    fn a_fence_only_fault_excuses_an_overlap_for_one_ttl_and_no_other_fault_does() {
        let overlap = [belief("a/l", 1, 10, 60), belief("b/l", 2, 20, 30)];
        let with = |fault: Record, records: &[Record]| {
            let mut all = vec![fault];
            all.extend_from_slice(records);
            judge(&all)
        };
        let verdict = with(fault(true, 15, 18), &overlap);
        assert!(verdict.violations.is_empty(), "{:?}", verdict.violations);
        assert_eq!(verdict.excused, 1);
        // Not fence-only; after the newer began; before the older was acquired.
        for fault in [fault(false, 15, 18), fault(true, 25, 28), fault(true, 1, 5)] {
            only(&with(fault, &overlap), |found| {
                matches!(found, Violation::Overlap(_))
            });
        }
        // Either may be the one that stays.
        let stays = [belief("a/l", 1, 10, 200), belief("b/l", 2, 20, 30)];
        assert_eq!(with(fault(true, 15, 18), &stays).excused, 1);
        // If both believe for longer than a ttl after it, nobody noticed.
        let long = [belief("a/l", 1, 10, 200), belief("b/l", 2, 20, 150)];
        only(&with(fault(true, 15, 18), &long), |found| {
            matches!(found, Violation::Overlap(_))
        });
    }

    #[test]
    fn in_the_time_of_a_change_of_masters_fences_must_grow_and_outside_of_it_nobody_overlaps() {
        // From 100 to 200, and a ttl of 100 for what was granted in it.
        let with = |records: &[Record]| {
            let mut all = vec![fault(true, 100, 200)];
            all.extend_from_slice(records);
            judge(&all)
        };
        let excused = [
            // Granted by the old master, and by the new one at once, in the middle, and at the end.
            [belief("a/l", 1, 50, 150), belief("b/l", 2, 100, 400)],
            [belief("a/l", 1, 50, 150), belief("b/l", 2, 149, 400)],
            [belief("a/l", 1, 190, 290), belief("b/l", 2, 195, 400)],
            [belief("a/l", 1, 190, 300), belief("b/l", 2, 280, 400)],
            // The other way round: the old one takes writes for a while yet.
            [belief("b/l", 1, 150, 900), belief("a/l", 2, 160, 300)],
        ];
        for records in &excused {
            let verdict = with(records);
            assert!(verdict.violations.is_empty(), "{records:?}: {verdict:?}");
            assert_eq!(verdict.excused, 1, "{records:?}");
        }
        let overlaps = [
            // Began before there was another master.
            [belief("a/l", 1, 50, 150), belief("b/l", 2, 99, 400)],
            // Granted when the old one was none any more.
            [belief("a/l", 1, 202, 290), belief("b/l", 2, 210, 400)],
            // Both believe when all that the old one granted has ended.
            [belief("a/l", 1, 190, 301), belief("b/l", 2, 210, 302)],
            // Long before, and long after.
            [belief("a/l", 1, 10, 30), belief("b/l", 2, 20, 40)],
            [belief("a/l", 1, 500, 530), belief("b/l", 2, 520, 540)],
        ];
        for records in &overlaps {
            only(&with(records), |found| {
                matches!(found, Violation::Overlap(_))
            });
        }
        // In the middle of it: asked for when a larger fence was believed already; and the same fence twice.
        let fell = [belief("a/l", 2, 110, 150), belief("b/l", 1, 120, 160)];
        only(&with(&fell), |found| {
            matches!(found, Violation::FenceFell(_))
        });
        let repeated = [belief("a/l", 1, 110, 150), belief("b/l", 1, 120, 160)];
        only(&with(&repeated), |found| {
            matches!(found, Violation::FenceRepeated(_))
        });
        // Asked for before, and answered late: the order of the two is open.
        let late = [
            acquired_after("b/l", 1, 105, 120, 160),
            belief("a/l", 2, 110, 150),
        ];
        assert_eq!(with(&late).excused, 1);
    }

    #[test]
    fn what_was_done_to_one_mutex_excuses_nothing_on_another() {
        let revoked = |mutex: &str| Record::Fault {
            kind: "revoke".into(),
            fence_only: true,
            mutex: Some(mutex.into()),
            begin: 15 * MS,
            end: 18 * MS,
        };
        let overlap = [belief("a/l", 1, 10, 60), belief("b/l", 2, 20, 30)];
        let with = |fault: Record, records: &[Record]| {
            let mut all = vec![fault];
            all.extend_from_slice(records);
            judge(&all)
        };
        assert_eq!(with(revoked("m"), &overlap).excused, 1);
        only(&with(revoked("n"), &overlap), |found| {
            matches!(found, Violation::Overlap(_))
        });
        let runs = [run_with(1, 14), run_with(2, 19)];
        assert!(with(revoked("t"), &runs).violations.is_empty());
        only(&with(revoked("m"), &runs), |found| {
            matches!(found, Violation::RunsTooClose(_))
        });
    }

    #[test]
    fn the_time_in_which_overlaps_are_excused_is_counted_once() {
        let verdict = judge(&[
            fault(true, 0, 50),
            fault(true, 250, 300),
            fault(true, 260, 290),
            fault(true, 990, 995),
            fault(false, 600, 700),
            belief("a/l", 1, 100, 200),
            belief("b/l", 2, 900, 1_000),
        ]);
        // 100 to 150, 250 to 400, 990 to 1000.
        assert_eq!(verdict.excusing, Duration::from_millis(50 + 150 + 10));
        assert_eq!(verdict.lasted, Duration::from_millis(900));
    }

    #[test]
    fn events_alternate_in_pairs_of_one_fence() {
        assert!(
            judge(&[event(true, 1, 0), event(false, 1, 0), event(true, 2, 0)])
                .violations
                .is_empty()
        );
        for bad in [
            vec![event(true, 1, 0), event(true, 2, 0)],
            vec![event(false, 1, 0)],
            vec![event(true, 1, 0), event(false, 2, 0)],
            vec![event(true, 1, 0), event(false, 1, 1)],
        ] {
            only(&judge(&bad), |found| {
                matches!(found, Violation::NotAlternating(_))
            });
        }
    }

    #[test]
    fn a_lost_write_counts_against_the_fenced_register_only() {
        let wrote = |register: &str, token| Record::Acknowledged {
            register: register.into(),
            token,
        };
        let records = [
            wrote("fenced-m", 1),
            wrote("fenced-m", 2),
            wrote("plain-m", 3),
        ];
        let chains = HashMap::from([("fenced-m".to_owned(), HashSet::from([1]))]);
        let verdict = check(&records, &chains, &promise());
        assert_eq!(verdict.fenced, (2, 1));
        assert_eq!(verdict.unfenced, (1, 1));
        only(&verdict, |found| matches!(found, Violation::WriteLost(_)));
    }

    #[test]
    fn after_the_faults_there_is_an_owner_in_time() {
        let healed = Record::Healed { at: 100 * MS };
        let verdict = judge(&[healed.clone(), belief("a/l", 1, 90, 120)]);
        assert_eq!(verdict.owner_after, Duration::ZERO);
        let verdict = judge(&[healed.clone(), belief("a/l", 1, 140, 160)]);
        assert_eq!(verdict.owner_after, Duration::from_millis(40));
        assert!(verdict.violations.is_empty());
        for bad in [
            vec![healed.clone(), belief("a/l", 1, 151, 160)],
            vec![healed.clone(), belief("a/l", 1, 10, 20)],
            vec![healed],
        ] {
            only(&judge(&bad), |found| matches!(found, Violation::NoOwner(_)));
        }
    }

    fn run_with(fence: u64, at: u64) -> Record {
        Record::Run {
            mutex: "t".into(),
            who: "a/s".into(),
            fence,
            at: at * MS,
        }
    }

    #[test]
    fn runs_are_a_period_apart_unless_a_fault_touched_them() {
        let run = |at: u64| run_with(1, at);
        assert!(judge(&[run(10), run(20), run(31)]).violations.is_empty());
        only(&judge(&[run(10), run(13)]), |found| {
            matches!(found, Violation::RunsTooClose(_))
        });
        // Another leader may not know of the run; the same one does.
        let other = run_with(2, 13);
        assert!(
            judge(&[fault(false, 11, 12), run(10), other.clone()])
                .violations
                .is_empty()
        );
        // If its run is on record it does, whatever else happened, unless the record was deleted.
        let recorded = |at: u64| Record::Recorded {
            mutex: "t".into(),
            fence: 1,
            at: at * MS,
        };
        let with =
            |fault: Record, recorded: Record| judge(&[fault, run(10), recorded, other.clone()]);
        only(&with(fault(false, 11, 12), recorded(11)), |found| {
            matches!(found, Violation::RunsTooClose(_))
        });
        assert!(
            with(fault(true, 12, 13), recorded(11))
                .violations
                .is_empty()
        );
        // That was the run before it.
        assert!(
            with(fault(false, 11, 12), recorded(9))
                .violations
                .is_empty()
        );
        only(&judge(&[other, run(10)]), |found| {
            matches!(found, Violation::RunsTooClose(_))
        });
        only(&judge(&[fault(false, 11, 12), run(10), run(13)]), |found| {
            matches!(found, Violation::RunsTooClose(_))
        });
        // What hinders the record comes with the run; what deletes it may come later.
        let mut late = promise();
        late.period = Some(Duration::from_secs(5));
        for (fence_only, gaps) in [(false, 1), (true, 0)] {
            let records = [fault(fence_only, 1_200, 1_210), run(10), run_with(2, 2_000)];
            let verdict = check(&records, &HashMap::new(), &late);
            assert_eq!((verdict.gaps, verdict.violations.len()), (gaps, gaps));
        }
        let step = Record::Fault {
            kind: "clock-step".into(),
            fence_only: false,
            mutex: None,
            begin: 11 * MS,
            end: 12 * MS,
        };
        only(&judge(&[step, run(10), run(13)]), |found| {
            matches!(found, Violation::RunsTooClose(_))
        });
    }

    #[test]
    fn permits_stay_within_capacity() {
        let permits = |who: &str, fence, count, from: u64, until: u64| Record::Permits {
            who: who.into(),
            semaphore: "s".into(),
            count,
            fence,
            from: from * MS,
            until: until * MS,
        };
        let fine = [
            permits("a/p", 1, 1, 10, 20),
            permits("b/p", 2, 1, 10, 20),
            permits("c/p", 3, 2, 20, 30),
        ];
        assert!(judge(&fine).violations.is_empty());
        let over = [
            permits("a/p", 1, 1, 10, 21),
            permits("b/p", 2, 1, 10, 21),
            permits("c/p", 3, 1, 20, 30),
        ];
        only(&judge(&over), |found| {
            matches!(found, Violation::OverCapacity(_))
        });
        let mut given_back = over.to_vec();
        given_back.push(Record::GavePermitsBack {
            semaphore: "s".into(),
            fence: 1,
            at: 20 * MS,
        });
        assert!(judge(&given_back).violations.is_empty());
        let twice = [permits("a/p", 1, 1, 10, 12), permits("b/p", 1, 1, 13, 14)];
        only(&judge(&twice), |found| {
            matches!(found, Violation::FenceRepeated(_))
        });
    }

    #[test]
    fn a_process_that_misbehaved_is_a_violation() {
        let verdict = judge(&[Record::Misbehaved {
            what: "did not stop".into(),
        }]);
        only(&verdict, |found| matches!(found, Violation::Misbehaved(_)));
    }
}
