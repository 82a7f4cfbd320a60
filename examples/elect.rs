//! Three contenders take turns as leader, in one process and without a server:
//!
//! ```text
//! cargo run --example elect
//! ```

use std::thread;
use std::time::{Duration, Instant};

use contend::{EventKind, MutexContendService};

const LEADS: Duration = Duration::from_millis(800);
const LENGTH: Duration = Duration::from_secs(8);

fn main() -> Result<(), contend::Error> {
    let factory = contend::connect("memory://")?; // or redis://..., mysql://..., zk://...
    println!("Three contenders for one mutex, each of which leads for {LEADS:?}:\n");
    let begin = Instant::now();
    let contenders = ["anna", "ben", "cleo"].map(|id| {
        let built = factory
            .contend("demo")
            .id(id)
            .on_acquired(move |event| show(begin, id, "leads", event.fence()))
            .on_released(move |event| show(begin, id, "steps down", event.fence()))
            .on_owner_changed(move |event| {
                if event.kind == EventKind::OwnerChanged && event.state.after().has_owner() {
                    let leader = event.state.after().owner_id();
                    show(begin, id, &format!("sees {leader} lead"), None);
                }
            })
            .build();
        built.and_then(|service: MutexContendService| service.start().map(|()| service))
    });
    let contenders: Vec<_> = contenders.into_iter().collect::<Result<_, _>>()?;

    while begin.elapsed() < LENGTH {
        thread::sleep(LEADS);
        if let Some(leader) = contenders.iter().find(|service| service.is_owner()) {
            leader.stop()?; // the next one in the queue leads within a millisecond
            leader.start()?; // and this one queues up behind the others
        }
    }
    drop(contenders); // dropping a service stops it, and the next one leads until it is dropped too
    println!("\nEach time with a higher fence.");
    Ok(())
}

fn show(begin: Instant, id: &str, what: &str, fence: Option<u64>) {
    let at = begin.elapsed().as_secs_f64();
    let fence = fence.map_or(String::new(), |fence| format!("fence {fence}"));
    println!("{at:8.3} s  {id:<5} {what:<15} {fence}");
}
