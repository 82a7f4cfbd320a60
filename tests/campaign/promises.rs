//! The page "What we promise" names tests and planted bugs; they exist.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

const PAGE: &str = include_str!("../../src/promises.md");

/// The source of all tests of an area, or the list of mutants.
fn source(area: &str) -> String {
    fn collect(folder: &Path, text: &mut String) {
        for entry in fs::read_dir(folder).expect("a folder of tests").flatten() {
            let path = entry.path();
            let ending = path.extension().unwrap_or_default();
            if path.is_dir() {
                collect(&path, text);
            } else if ending == "rs" || ending == "txt" {
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
fn named_tests_and_bugs_exist() {
    let mut sources: HashMap<&str, String> = HashMap::new();
    let mut found = 0;
    let is_path = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "_:".contains(c);
    // Between two backticks, with a `::` in it, and in small letters.
    for quoted in PAGE.split('`').skip(1).step_by(2) {
        if !quoted.contains("::") || !quoted.chars().all(is_path) || quoted.starts_with("area::") {
            continue;
        }
        let (area, _) = quoted.split_once("::").expect("an area");
        let name = quoted.rsplit("::").next().expect("a name");
        let source = sources.entry(area).or_insert_with(|| source(area));
        // A test, an entry of a table of tests, or a mutant.
        let mut ways = [
            format!("fn {name}("),
            format!("    {name}: "),
            format!("[{name}]"),
        ]
        .into_iter();
        assert!(ways.any(|it| source.contains(&it)), "{quoted}");
        found += 1;
    }
    assert!(found > 60, "only {found} are named");
}

#[test]
fn every_mutant_is_on_the_page() {
    let source = source("mutants");
    let mutants = source
        .lines()
        .filter_map(|line| line.strip_prefix('[')?.strip_suffix(']'));
    for mutant in mutants {
        assert!(PAGE.contains(&format!("`mutants::{mutant}`")), "{mutant}");
    }
}
