//! Where things are in the tree, and who stands before whom.
//!
//! `{chroot}/simba/{mutex}/_c_{uuid}-latch-{sequence}`: the layout of Curator's LeaderLatch.

use std::sync::Arc;

use rand::RngExt;

use crate::error::{Error, Result};

/// The node below which the mutexes are.
pub(super) const ROOT: &str = "/simba";

/// What follows the protection prefix in the name of a contender's node.
const LATCH: &str = "latch-";

/// The node of a mutex, as Simba and Curator have it: a `/` in the name nests, and everything else
/// stands as it is. A name that would be another node, or none, is refused.
pub(super) fn mutex_path(chroot: &str, mutex: &str) -> Result<Arc<str>> {
    let refused = |what: &str| {
        Err(Error::invalid(format!(
            "mutex name {mutex:?} {what}; on ZooKeeper a name is a path below /simba, such as a or a/b, \
             without empty, \".\" and \"..\" segments, without segments that look like a contender's \
             node (_c_...-latch-0000000001), and without characters that ZooKeeper does not take"
        )))
    };
    for segment in mutex.split('/') {
        if segment.is_empty() {
            return refused("has an empty segment");
        }
        if segment == "." || segment == ".." {
            return refused("has a segment of dots");
        }
        if sequence(segment).is_some() {
            return refused("has a segment that looks like a contender's node");
        }
    }
    if !mutex.chars().all(is_allowed) {
        return refused("has a character that ZooKeeper does not take");
    }
    Ok(format!("{chroot}{ROOT}/{mutex}").into())
}

/// The characters that ZooKeeper takes in a path: it looks at UTF-16, so none beyond the first plane.
fn is_allowed(c: char) -> bool {
    !matches!(c,
        '\0'..='\u{1f}' | '\u{7f}'..='\u{9f}' | '\u{e000}'..='\u{f8ff}' | '\u{fff0}'..)
}

/// Every node above `path`, the highest first, and `path` itself.
pub(super) fn ancestry(path: &str) -> impl Iterator<Item = &str> {
    path.match_indices('/')
        .skip(1)
        .filter_map(|(end, _)| path.get(..end))
        .chain([path])
}

/// A prefix for the names of one session's nodes, as Curator has one per node: by it nodes are found again whose
/// creation was not answered.
pub(super) fn protection() -> String {
    let mut hex = format!("{:032x}", rand::rng().random::<u128>());
    for dash in [20, 16, 12, 8] {
        hex.insert(dash, '-');
    }
    format!("_c_{hex}-")
}

/// The path of a node to be, to which the server appends the sequence.
pub(super) fn node_path(mutex_path: &str, protection: &str) -> String {
    format!("{mutex_path}/{protection}{LATCH}")
}

/// The number that the server gave to a contender's node. `None` for a node that is no contender's.
fn sequence(name: &str) -> Option<i32> {
    let (_, digits) = name.rsplit_once(LATCH)?;
    let unsigned = digits.strip_prefix('-').unwrap_or(digits);
    let is_number = unsigned.bytes().all(|byte| byte.is_ascii_digit());
    digits.parse().ok().filter(|_| is_number)
}

/// The children of a node at one moment, by their names.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Line {
    /// The contenders, the leader first.
    pub members: Vec<String>,
    /// What is no contender's node: mutexes below this one.
    pub others: Vec<String>,
}

impl Line {
    /// Sorts the contenders by sequence: a signed 32-bit counter that wraps around, so only distances can be compared.
    /// Right as long as the oldest and the youngest are less than 2^31 apart.
    ///
    /// Curator sorts the text of the sequence. So beside a Curator peer the order is wrong while nodes from before and
    /// from after the wrap stand together. The wrap takes 2^31 attempts on one mutex.
    pub(super) fn new(children: Vec<String>) -> Line {
        let (mut members, mut others) = (Vec::new(), Vec::new());
        let mut first = None;
        for name in children {
            match sequence(&name) {
                Some(number) => {
                    let distance = number.wrapping_sub(*first.get_or_insert(number));
                    members.push((distance, name));
                }
                None => others.push(name),
            }
        }
        members.sort();
        let members = members.into_iter().map(|(_, name)| name).collect();
        Line { members, others }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_curators_path_and_no_other_node() {
        for (mutex, path) in [
            ("demo", "/simba/demo"),
            ("a.b-c_d:e f", "/simba/a.b-c_d:e f"),
            ("日本", "/simba/日本"),
            ("a/b", "/simba/a/b"),
            ("a%2Fb", "/simba/a%2Fb"),
            ("..x/y", "/simba/..x/y"),
        ] {
            assert_eq!(&*mutex_path("", mutex).unwrap(), path);
        }
        for (mutex, what) in [
            ("/a", "has an empty segment"),
            ("a/", "has an empty segment"),
            ("a//b", "has an empty segment"),
            (".", "has a segment of dots"),
            ("a/../b", "has a segment of dots"),
            (
                "a/_c_x-latch-0000000001",
                "has a segment that looks like a contender's node",
            ),
            ("\u{1f512}", "has a character that ZooKeeper does not take"),
        ] {
            let error = mutex_path("", mutex).unwrap_err().to_string();
            assert!(error.contains(what) && error.contains("a/b"), "{error}");
        }
        assert_eq!(&*mutex_path("/app/x", "demo").unwrap(), "/app/x/simba/demo");
        assert_eq!(
            ancestry("/app/simba/demo").collect::<Vec<_>>(),
            ["/app", "/app/simba", "/app/simba/demo"]
        );
    }

    #[test]
    fn protections_differ_and_look_like_curators() {
        let one = protection();
        assert_ne!(one, protection());
        assert_eq!(one.len(), "_c_00000000-0000-0000-0000-000000000000-".len());
        assert_eq!(
            one.match_indices('-').map(|(at, _)| at).collect::<Vec<_>>(),
            [11, 16, 21, 26, 39]
        );
    }

    #[test]
    fn the_line_is_by_sequence_whatever_the_prefix_and_across_the_wrap() {
        let line = |names: &[&str]| -> Vec<String> {
            let line = Line::new(names.iter().map(|&name| name.to_owned()).collect());
            assert!(line.members.len() + line.others.len() == names.len());
            line.members
        };
        assert_eq!(
            line(&[
                "_c_z-latch-0000000007",
                "_c_a-latch-0000000010",
                "latch-0000000008",
                "other",
                "latch-x",
                "latch-"
            ]),
            [
                "_c_z-latch-0000000007",
                "latch-0000000008",
                "_c_a-latch-0000000010"
            ]
        );
        let wrapped = ["latch-2147483646", "latch-2147483647", "latch--2147483648"];
        for turn in 0..3 {
            let mut names = wrapped;
            names.rotate_left(turn);
            assert_eq!(line(&names), wrapped);
        }
    }
}
