//! Durations as people write them: `500ms`, `2s`, `5m`.

use std::time::Duration;

use crate::error::{Error, Result};

/// Reads a duration: a whole or decimal number and one of `ms`, `s`, `m`, `h`, `d`.
///
/// ```
/// use std::time::Duration;
///
/// assert_eq!(contend::parse_duration("500ms")?, Duration::from_millis(500));
/// assert_eq!(contend::parse_duration("1.5s")?, Duration::from_millis(1_500));
/// assert!(contend::parse_duration("10").is_err());
/// # Ok::<(), contend::Error>(())
/// ```
///
/// # Errors
/// `InvalidInput` for anything else, with the allowed forms in the message.
pub fn parse_duration(text: &str) -> Result<Duration> {
    let bad = || {
        Error::invalid(format!(
            "{text:?} is not a duration; write a number and a unit, such as 500ms, 2s, 5m, 4h or 1d"
        ))
    };
    let split = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .ok_or_else(bad)?;
    let (number, unit) = text.split_at(split);
    let seconds = match unit {
        "ms" => 0.001,
        "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        "d" => 86_400.0,
        _ => return Err(bad()),
    };
    let number: f64 = number.parse().map_err(|_| bad())?;
    // Through whole microseconds, so that 0.3s is 300 ms and not a hair less.
    let micros = (number * seconds * 1e6).round();
    if micros > 1e18 {
        return Err(bad());
    }
    Ok(Duration::from_micros(micros as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_people_write_is_read_and_the_rest_refused() {
        for (text, ms) in [
            ("0s", 0),
            ("0.3s", 300),
            ("2m", 120_000),
            ("1d", 86_400_000),
        ] {
            assert_eq!(parse_duration(text).unwrap(), Duration::from_millis(ms));
        }
        for text in [
            "",
            "s",
            "-1s",
            "1",
            "1 s",
            "1w",
            "1.2.3s",
            "1e9s",
            "99999999999999999d",
        ] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }
}
