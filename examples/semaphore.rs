//! Five downloads, at most two at once, across all threads, or all processes that use one server:
//!
//! ```text
//! cargo run --example semaphore
//! cargo run --example semaphore --features redis -- --url redis://127.0.0.1
//! ```

use std::thread;
use std::time::Duration;

use contend::semaphore::PermitRequest;

fn main() -> Result<(), contend::Error> {
    let semaphores = contend::connect(&url_or("memory://"))?.semaphores()?;
    semaphores.create_tables()?;
    semaphores.create("downloads", 2)?; // one that exists keeps its capacity

    let workers = [1, 2, 3, 4, 5].map(|number| {
        let semaphores = semaphores.clone();
        thread::spawn(move || {
            let request = PermitRequest::generated()
                .permits("downloads", 1)
                .ttl(Duration::from_secs(10)); // renewed while we live, and free soon after a crash
            let permit = semaphores.guard(&request, Duration::from_secs(30))?;
            let fence = permit.fence("downloads");
            println!("download {number} begins, fence {fence:?}");
            thread::sleep(Duration::from_millis(500));
            println!("download {number} has ended");
            permit.release().map(drop)
        })
    });
    for worker in workers {
        worker.join().expect("no panic")?;
    }
    let usage = semaphores.usage("downloads")?;
    println!("{} of {} held", usage.held, usage.capacity);
    Ok(())
}

/// The word after `--url`.
fn url_or(default: &str) -> String {
    let mut words = std::env::args().skip_while(|word| word != "--url");
    words.nth(1).unwrap_or_else(|| default.to_owned())
}
