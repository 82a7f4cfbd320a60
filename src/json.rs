//! Values of JSON, for `Health::to_json`.

use std::fmt::Display;

/// Writes a string.
pub(crate) fn string(text: &str) -> String {
    let mut json = String::from('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => json.extend(['\\', c]),
            c if c.is_control() => json += &format!("\\u{:04x}", c as u32),
            c => json.push(c),
        }
    }
    json + "\""
}

/// Writes `null` for `None`.
pub(crate) fn or_null(value: Option<impl Display>) -> String {
    value.map_or_else(|| "null".to_owned(), |value| value.to_string())
}
