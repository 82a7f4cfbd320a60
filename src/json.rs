//! `Json`: one JSON object, written from left to right. The command compiles this file too.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

/// A JSON object that is being written.
pub(crate) struct Json(String);

/// What may stand in one.
pub(crate) trait Value {
    fn write(self, json: &mut String);
}

impl Json {
    pub(crate) fn new() -> Json {
        Json(String::from("{"))
    }

    /// Adds a field.
    pub(crate) fn with(mut self, name: &str, value: impl Value) -> Json {
        if self.0.len() > 1 {
            self.0.push(',');
        }
        name.write(&mut self.0);
        self.0.push(':');
        value.write(&mut self.0);
        self
    }

    pub(crate) fn end(mut self) -> String {
        self.0.push('}');
        self.0
    }
}

impl Value for &str {
    fn write(self, json: &mut String) {
        json.push('"');
        for c in self.chars() {
            match c {
                '"' | '\\' => json.extend(['\\', c]),
                c if c.is_control() => {
                    // Writing to a string does not fail.
                    let _ = write!(json, "\\u{:04x}", c as u32);
                }
                c => json.push(c),
            }
        }
        json.push('"');
    }
}

impl Value for &String {
    fn write(self, json: &mut String) {
        self.as_str().write(json);
    }
}

impl Value for &Arc<str> {
    fn write(self, json: &mut String) {
        (**self).write(json);
    }
}

impl Value for u64 {
    fn write(self, json: &mut String) {
        json.push_str(&self.to_string());
    }
}

impl Value for u32 {
    fn write(self, json: &mut String) {
        u64::from(self).write(json);
    }
}

impl Value for bool {
    fn write(self, json: &mut String) {
        json.push_str(if self { "true" } else { "false" });
    }
}

/// In milliseconds.
impl Value for Duration {
    fn write(self, json: &mut String) {
        u64::try_from(self.as_millis())
            .unwrap_or(u64::MAX)
            .write(json);
    }
}

impl Value for Json {
    fn write(self, json: &mut String) {
        json.push_str(&self.end());
    }
}

impl Value for Vec<Json> {
    fn write(self, json: &mut String) {
        let values: Vec<String> = self.into_iter().map(Json::end).collect();
        json.push_str(&format!("[{}]", values.join(",")));
    }
}

/// `null` for `None`.
impl<V: Value> Value for Option<V> {
    fn write(self, json: &mut String) {
        match self {
            Some(value) => value.write(json),
            None => json.push_str("null"),
        }
    }
}
