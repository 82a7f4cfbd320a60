//! What a person at a shell can do about an error: the library's messages name its functions and Cargo features.

use contend::{Error, ErrorKind};

/// What this command was built with, and what must be kept when it is built again.
const FEATURES: [(&str, bool); 5] = [
    ("redis", cfg!(feature = "redis")),
    ("mysql", cfg!(feature = "mysql")),
    ("zk", cfg!(feature = "zk")),
    ("tls", cfg!(feature = "tls")),
    ("timezones", cfg!(feature = "timezones")),
];

/// The message of an error, for the console.
pub fn message(error: &Error) -> String {
    let text = error.to_string();
    let reworded = match error.kind() {
        ErrorKind::FeatureDisabled => build(&text),
        ErrorKind::Exhausted => Some(exhausted(&text)),
        ErrorKind::NotFound => Some(text.replace(
            "create it first",
            "create it first: `contend semaphore create NAME N`",
        )),
        ErrorKind::Misconfigured => Some(text.replace(
            "call create_tables",
            "run `contend semaphore create NAME N`",
        )),
        _ => None,
    };
    reworded.unwrap_or(text)
}

/// What an exhausted semaphore says, with the command that raises a capacity that is too small.
pub fn exhausted(text: &str) -> String {
    let between = |before: &str, after: &str| {
        let (_, rest) = text.split_once(before)?;
        Some(rest.split_once(after)?.0)
    };
    let name = between("the semaphore \"", "\" is exhausted").unwrap_or("NAME");
    let wanted = between("permits are held, ", " wanted").unwrap_or("N");
    let raise = format!("`contend semaphore set-capacity {name} {wanted}` raises it");
    text.replace("set_capacity raises it", &raise)
}

/// How to build a command that has what is missing.
fn build(text: &str) -> Option<String> {
    let (what, rest) = text.split_once(" needs the Cargo feature")?;
    // What a library's user writes into Cargo.toml helps nobody here.
    let rest = rest.split(": contend = ").next().unwrap_or_default();
    let (missing, rest) = rest.split_at(rest.rfind('"')? + 1);
    let features = FEATURES
        .into_iter()
        .filter(|(feature, built)| *built || missing.contains(&format!("{feature:?}")))
        .map(|(feature, _)| format!(",{feature}"))
        .collect::<String>();
    Some(format!(
        "{what} needs a contend that was built for it: `cargo install contend --features cli{features}`{rest}"
    ))
}
