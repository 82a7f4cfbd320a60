//! The page "What we promise" names tests; they exist.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

const PAGE: &str = include_str!("../../src/promises.md");

/// The source of all tests of an area, whatever file they stand in.
fn source(area: &str) -> String {
    fn collect(folder: &Path, text: &mut String) {
        for entry in fs::read_dir(folder).expect("a folder of tests").flatten() {
            let path = entry.path();
            if path.is_dir() {
                collect(&path, text);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                text.push_str(&fs::read_to_string(&path).expect("a source file"));
            }
        }
    }
    let mut text = String::new();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(area);
    assert!(folder.is_dir(), "there is no area {area}");
    collect(&folder, &mut text);
    text
}

#[test]
fn named_tests_exist() {
    let mut sources: HashMap<&str, String> = HashMap::new();
    let mut found = 0;
    // Between two backticks, with a `::` in it, and in small letters.
    for quoted in PAGE.split('`').skip(1).step_by(2) {
        let is_test = quoted.contains("::")
            && quoted
                .chars()
                .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "_:".contains(c))
            && !quoted.starts_with("area::");
        if !is_test {
            continue;
        }
        let (area, _) = quoted.split_once("::").expect("an area");
        let test = quoted.rsplit("::").next().expect("a name");
        let source = sources.entry(area).or_insert_with(|| source(area));
        // A test, or an entry of a table of tests.
        let is_there = [format!("fn {test}("), format!("    {test}: ")];
        assert!(is_there.iter().any(|it| source.contains(it)), "{quoted}");
        found += 1;
    }
    assert!(found > 15, "only {found} tests are named");
}
