//! The MySQL backend keeps what every backend promises, with wake-ups and without.

use crate::server;

use std::sync::OnceLock;

use crate::conformance::Subject;

fn subject(parameters: &str) -> Subject {
    static URL: OnceLock<String> = OnceLock::new();
    let url = URL.get_or_init(server::database);
    let url = format!("{url}?ttl=2s&transition=1s{parameters}");
    Subject {
        ordered: !parameters.contains("wakeups=off"),
        factory: Box::new(move || contend::connect(&url).unwrap()),
    }
}

mod with_wakeups {
    use super::*;

    conformance!(subject(""));
}

mod polling {
    use super::*;

    conformance!(subject("&wakeups=off&poll_interval=100ms"));
}
