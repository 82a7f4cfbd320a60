//! Where things are in the tree, and who stands before whom.
//!
//! `{chroot}/simba/{mutex}/_c_{uuid}-latch-{sequence}`: the layout of Curator's LeaderLatch.

use rand::RngExt;

/// What follows the protection prefix in the name of a contender's node.
const LATCH: &str = "latch-";

/// The node of a mutex. Plain names stand as they are, so that a Curator peer finds the same node;
/// what ZooKeeper does not allow in a name, and the percent sign itself, becomes `%XX`: different
/// names stay different nodes, and no name leads out of `/simba`.
pub(super) fn mutex_path(chroot: &str, mutex: &str) -> String {
    let mut path = format!("{chroot}/simba/");
    // As parts of a path these two mean something else.
    let dots = mutex == "." || mutex == "..";
    for c in mutex.chars() {
        if c == '/' || c == '%' || (dots && c == '.') || !is_allowed(c) {
            for byte in c.encode_utf8(&mut [0; 4]).bytes() {
                path.push_str(&format!("%{byte:02X}"));
            }
        } else {
            path.push(c);
        }
    }
    path
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

/// What begins the name of a node of ours and of nobody else: by it a node is found again whose
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

/// A contender's node, as the list of children names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Member {
    pub(super) name: String,
    sequence: i32,
}

impl Member {
    /// `None` for a node that is no contender's.
    pub(super) fn read(name: String) -> Option<Member> {
        let start = name.rfind(LATCH)? + LATCH.len();
        let digits = name.get(start..)?;
        let unsigned = digits.strip_prefix('-').unwrap_or(digits);
        if !unsigned.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        let sequence = digits.parse().ok()?;
        Some(Member { name, sequence })
    }
}

/// The contenders among `children`, the one that leads first.
///
/// The sequence is a signed 32-bit counter that wraps around, so only distances can be compared:
/// right as long as the oldest and the youngest are less than 2^31 apart.
pub(super) fn line_up(children: Vec<String>) -> Vec<Member> {
    let mut members: Vec<Member> = children.into_iter().filter_map(Member::read).collect();
    if let Some(reference) = members.first().map(|member| member.sequence) {
        members.sort_by(|a, b| {
            let distance = |member: &Member| member.sequence.wrapping_sub(reference);
            distance(a)
                .cmp(&distance(b))
                .then_with(|| a.name.cmp(&b.name))
        });
    }
    members
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plain_name_is_curators_path_and_any_other_stays_inside() {
        for (mutex, path) in [
            ("demo", "/simba/demo"),
            ("a.b-c_d:e f", "/simba/a.b-c_d:e f"),
            ("日本", "/simba/日本"),
            ("a/b", "/simba/a%2Fb"),
            ("a%2Fb", "/simba/a%252Fb"),
            (".", "/simba/%2E"),
            ("..", "/simba/%2E%2E"),
            ("../x", "/simba/..%2Fx"),
            ("\u{1f512}", "/simba/%F0%9F%94%92"),
            ("\u{e000}", "/simba/%EE%80%80"),
        ] {
            assert_eq!(mutex_path("", mutex), path);
        }
        assert_eq!(mutex_path("/app/x", "demo"), "/app/x/simba/demo");
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
            line_up(names.iter().map(|&name| name.to_owned()).collect())
                .into_iter()
                .map(|member| member.name)
                .collect()
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
