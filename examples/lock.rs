//! Two threads, or two processes on one server, enter a section one at a time:
//!
//! ```text
//! cargo run --example lock
//! cargo run --example lock --features redis -- --url redis://127.0.0.1
//! ```

use std::thread;
use std::time::Duration;

fn main() -> Result<(), contend::Error> {
    let url = url_or("memory://");
    let factory = contend::connect(&url)?;
    let workers = ["a", "b"].map(|name| {
        // A locker of its own for each, as two processes would have.
        let locker = factory.locker("invoices").build();
        thread::spawn(move || {
            let locker = locker?;
            for round in 1..=3 {
                // Waits for as long as it takes; `try_lock_for` gives up after a time.
                let guard = locker.lock()?;
                println!("{name} is in, round {round}, with fence {}", guard.fence());
                thread::sleep(Duration::from_millis(200));
                // Long work looks at `is_valid` between its steps: the server may be gone.
                println!("{name} is out, alone to the end: {}", guard.is_valid());
            }
            Ok::<(), contend::Error>(())
        })
    });
    for worker in workers {
        worker.join().expect("no panic")?;
    }
    Ok(())
}

/// The word after `--url`.
fn url_or(default: &str) -> String {
    let mut words = std::env::args().skip_while(|word| word != "--url");
    words.nth(1).unwrap_or_else(|| default.to_owned())
}
