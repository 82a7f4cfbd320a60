//! Work that runs on the leader only. Run it twice against one server, end one of them, and watch the
//! other go on:
//!
//! ```text
//! cargo run --example schedule
//! cargo run --example schedule --features redis -- --url redis://127.0.0.1
//! ```

use std::thread;
use std::time::Duration;

use contend::Schedule;

fn main() -> Result<(), contend::Error> {
    let url = url_or("memory://");
    let factory = contend::connect(&url)?;
    let every_second = Schedule::every(Duration::from_secs(1));
    let scheduler = factory
        .scheduler("clean-up")
        .start(every_second, |context| {
            // Pass the fence to whatever the work writes to.
            println!(
                "{} cleans up with fence {}",
                std::process::id(),
                context.fence()
            );
        })?;
    // A service does its own work here. Without a server there is nothing to wait for.
    let length = if url.starts_with("memory") { 5 } else { 3600 };
    thread::sleep(Duration::from_secs(length));
    scheduler.stop()
}

/// The word after `--url`.
fn url_or(default: &str) -> String {
    let mut words = std::env::args().skip_while(|word| word != "--url");
    words.nth(1).unwrap_or_else(|| default.to_owned())
}
