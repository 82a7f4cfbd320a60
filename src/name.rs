//! What a mutex may be called, and a contender.
//!
//! One rule for all backends, so that a name that works on one works on every one. It is so narrow that a name
//! can never become a key, a channel, a path or SQL of something else.

use crate::error::{Error, Result};

/// Longest mutex name, in bytes: the width of the `mutex` column in the MySQL table.
pub const MAX_MUTEX_BYTES: usize = 66;

/// Longest contender id, in bytes.
pub const MAX_ID_BYTES: usize = 128;

pub(crate) fn check_mutex(name: &str) -> Result<()> {
    check("mutex name", name, MAX_MUTEX_BYTES, &['{', '}'])
}

pub(crate) fn check_id(id: &str) -> Result<()> {
    check("contender id", id, MAX_ID_BYTES, &['{', '}'])?;
    // `@@` separates event and id in the messages that Redis peers exchange.
    if id.starts_with(['~', '!']) || id.contains("@@") {
        return Err(Error::invalid(format!(
            "contender id {id:?} begins with ~ or !, or contains @@, which contenders use in their messages; \
             begin it with a letter or digit, and leave @@ out"
        )));
    }
    Ok(())
}

/// A text that a table keeps as it is: an external id, an owner, the name of a semaphore.
pub(crate) fn check_text(what: &str, text: &str, max: usize) -> Result<()> {
    check(what, text, max, &[])
}

fn check(what: &str, text: &str, max: usize, braces: &[char]) -> Result<()> {
    let wrong = if text.is_empty() {
        "is empty"
    } else if text.len() > max {
        "is too long"
    } else if text.chars().any(char::is_control) {
        "contains a control character"
    } else if text.trim() != text {
        "begins or ends with white space"
    } else if text.contains(braces) {
        "contains a brace"
    } else {
        return Ok(());
    };
    let shown: String = text.chars().take(80).collect();
    let without = if braces.is_empty() { "" } else { ", braces," };
    Err(Error::invalid(format!(
        "{what} {shown:?} {wrong}; allowed are 1 to {max} bytes of UTF-8 without control characters{without} or \
         white space at either end"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rule_is_kept_to_the_byte() {
        assert!(check_mutex(&"m".repeat(66)).is_ok());
        assert!(check_mutex(&"m".repeat(67)).is_err());
        assert!(check_mutex(&"ü".repeat(33)).is_ok());
        assert!(check_mutex(&"ü".repeat(34)).is_err());
        assert!(check_id(&"i".repeat(128)).is_ok());
        assert!(check_id(&"i".repeat(129)).is_err());
        for good in ["a", "a/b", "a b", "100%", "..", "a:b", "日本", "a@b"] {
            assert!(check_mutex(good).is_ok(), "{good}");
            assert!(check_id(good).is_ok(), "{good}");
        }
        for bad in [
            "",
            " a",
            "a ",
            "a\n",
            "a\0b",
            "{a}",
            "a\u{85}b",
            "\u{3000}a",
        ] {
            assert!(check_mutex(bad).is_err(), "{bad:?}");
            assert!(check_id(bad).is_err(), "{bad:?}");
        }
        assert!(check_mutex("a@@b").is_ok());
        assert!(check_id("a@@b").is_err());
        assert!(check_id("~a").is_err() && check_id("!a").is_err());
        assert!(check_mutex("~a").is_ok() && check_id("a~!").is_ok());
    }

    #[test]
    fn the_error_says_what_is_allowed() {
        let error = check_mutex("{x}").unwrap_err();
        assert_eq!(
            error.to_string(),
            "mutex name \"{x}\" contains a brace; allowed are 1 to 66 bytes of UTF-8 without control \
             characters, braces, or white space at either end"
        );
    }
}
