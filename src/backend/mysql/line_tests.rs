//! What a line does, without a server.

use super::*;
use crate::backend::mysql::wake::WakeName;
use crate::bell::{Bell, Ring};
use crate::clock::Moment;

struct Locker {
    number: Number,
    bell: Bell,
}

impl Locker {
    fn new() -> Locker {
        Locker {
            number: Number::new(),
            bell: Bell::new(),
        }
    }

    fn is_rung(&self) -> bool {
        self.bell.wait(Moment::now()) == Ring::Wake
    }
}

fn owner(id: &str) -> MutexOwner {
    MutexOwner::new(id, 1, 2, 3, 4)
}

/// `owner` owns, the others wait in this order.
fn line<const N: usize>() -> (Lines, Arc<str>, Locker, [Locker; N]) {
    let (lines, mutex) = (Lines::default(), Arc::from("m"));
    let first = Locker::new();
    assert!(lines.won(&mutex, first.number, &owner("first")).is_none());
    let others = std::array::from_fn(|place| {
        let other = Locker::new();
        let waker = other.bell.waker();
        let seen = lines.join_behind(&mutex, "other", other.number, &waker);
        assert_eq!(seen.is_some(), place > 0, "only behind somebody");
        if let Some(seen) = seen {
            assert_eq!(seen.owner_id(), "first");
        } else {
            let seen = Some(owner("first"));
            assert!(lines.refused(&mutex, other.number, &waker, seen));
        }
        other
    });
    (lines, mutex, first, others)
}

#[test]
fn a_release_rings_the_first_and_nobody_else_and_no_line_is_left_in_the_end() {
    let (lines, m, first, [b, c]) = line();
    lines.releasing(&m, first.number);
    assert!(b.is_rung() && !c.is_rung());
    assert!(lines.standing(&m, b.number).rung);
    assert!(!lines.standing(&m, b.number).rung, "one ring, one attempt");
    // Too early: refused, and rung again at the reply.
    assert!(lines.refused(&m, b.number, &b.bell.waker(), None));
    lines.leave(&m, first.number);
    assert!(b.is_rung() && !c.is_rung());
    assert!(lines.standing(&m, b.number).rung);
    lines.won(&m, b.number, &owner("b"));
    assert!(!c.is_rung());
    lines.leave(&m, b.number);
    assert!(c.is_rung());
    lines.won(&m, c.number, &owner("c"));
    lines.leave(&m, c.number);
    assert!(lines.lines.lock().is_empty());
}

#[test]
fn who_won_before_the_reply_of_the_release_is_not_disturbed_by_it() {
    let (lines, m, first, [b, c]) = line();
    lines.releasing(&m, first.number);
    lines.won(&m, b.number, &owner("b"));
    lines.leave(&m, first.number);
    assert!(!c.is_rung(), "b owns");
    lines.leave(&m, b.number);
    assert!(c.is_rung());
}

#[test]
fn who_leaves_passes_its_turn_on_and_only_its_own() {
    let (lines, m, first, [b, c, d]) = line();
    lines.leave(&m, c.number);
    assert!(!b.is_rung() && !d.is_rung());
    lines.leave(&m, first.number);
    assert!(b.is_rung());
    // Rung, but it has given up.
    lines.leave(&m, b.number);
    assert!(d.is_rung() && lines.standing(&m, d.number).rung);
    lines.leave(&m, d.number);
    assert!(lines.lines.lock().is_empty());
}

#[test]
fn what_looks_out_goes_with_the_first_and_is_to_spare_in_the_end() {
    let (lines, m, first, [b, c]) = line();
    let name = WakeName::new("d", "t", "m");
    let post = Arc::new(Post::new(&m, &name, &b.bell.waker()));
    assert!(!lines.look_out(&m, c.number, &post), "not the first");
    assert!(lines.look_out(&m, b.number, &post));
    post.ring();
    assert!(b.is_rung() && !c.is_rung());
    assert!(lines.leave(&m, b.number).is_none());
    c.is_rung();
    post.ring();
    assert!(c.is_rung() && !b.is_rung());
    // Lost by somebody: the next one looks for itself.
    assert!(lines.lost(&m, first.number).is_none());
    assert!(c.is_rung() && !lines.standing(&m, c.number).rung);
    assert!(lines.leave(&m, c.number).is_some());
    assert!(lines.lines.lock().is_empty());
}

#[test]
fn a_line_that_has_had_the_name_for_a_turn_goes_to_the_end_of_the_servers_queue() {
    let (lines, m, first, [b]) = line();
    let name = WakeName::new("d", "t", "m");
    let post = Arc::new(Post::new(&m, &name, &b.bell.waker()));
    assert!(lines.look_out(&m, b.number, &post));
    post.granted();
    assert!(lines.standing(&m, b.number).named);
    lines.won(&m, first.number, &owner("first"));
    std::thread::sleep(TURN * 2);
    lines.releasing(&m, first.number);
    lines.leave(&m, first.number);
    assert!(!b.is_rung(), "others come first");
    assert!(!lines.standing(&m, b.number).named);
    post.granted();
    post.ring();
    assert!(b.is_rung() && lines.standing(&m, b.number).named);
}

/// Rule 12: in a child the thread that held the lock at the fork will never give it back.
#[test]
fn a_child_process_leaves_a_line_that_is_locked() {
    let (mut lines, m, first, [b]) = line();
    lines.origin = Origin::elsewhere();
    let (left, done) = crossbeam_channel::bounded(1);
    std::thread::spawn(move || {
        std::mem::forget(lines.lines.lock());
        lines.releasing(&m, first.number);
        lines.leave(&m, first.number);
        lines.leave(&m, b.number);
        drop(lines);
        left.send(())
    });
    done.recv_timeout(Duration::from_secs(30)).unwrap();
}
