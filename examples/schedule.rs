//! A leader-only job: run it twice against one server, end one of them, and watch the other go on.
//!
//! ```text
//! cargo run --features redis --example schedule -- --url redis://127.0.0.1
//! ```

mod options;

use std::time::Duration;

use contend::{Error, ScheduleConfig};
use options::Options;
use signal_hook::consts::{SIGINT, SIGTERM};

const USAGE: &str = "\
usage: schedule [options]
  --url URL        where the mutex is (default memory://; redis://..., mysql://..., zk://...)
  --mutex NAME     what the leader owns (default schedule-demo)
  --every 1s       how often the job runs";

fn main() -> Result<(), Error> {
    let options = Options::from_args(USAGE, &["--url", "--mutex", "--every"], &[]);
    let every = options.duration("--every");
    let every = every.unwrap_or(Duration::from_secs(1));

    let factory = contend::connect(options.text("--url").unwrap_or("memory://"))?;
    let scheduler = factory
        .scheduler(options.text("--mutex").unwrap_or("schedule-demo"))
        .build(
            ScheduleConfig::rate(Duration::ZERO, every),
            move |context| {
                println!(
                    "{} leads with fence {}",
                    std::process::id(),
                    context.fence()
                );
                Ok(())
            },
        )?;
    scheduler.start()?;
    println!("{} started; end it with Ctrl-C", std::process::id());
    match signal_hook::iterator::Signals::new([SIGINT, SIGTERM]) {
        Ok(mut signals) => drop(signals.forever().next()),
        Err(error) => eprintln!("signals are not handled: {error}"),
    }
    scheduler.stop()
}
