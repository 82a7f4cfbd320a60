//! A daemon to copy: of all processes one writes, its writes are fenced, and SIGTERM hands over at once.
//!
//! ```text
//! cargo run --example worker --features mysql,metrics,cli -- 'mysql://user:password@127.0.0.1/test?create_table=true'
//! ```
//!
//! `cli` is only needed for the crate signal-hook; your own program would depend on that crate, and on a logger such as
//! env_logger.

use std::error::Error;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use contend::MetricsProbe;
use contend::crossbeam_channel::{bounded, select, tick};
use mysql::prelude::Queryable;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

fn main() -> Result<(), Box<dyn Error>> {
    let url = std::env::args().nth(1).ok_or("no URL is given")?;
    let without_options = url.split('?').next().unwrap_or_default();
    let mut database = mysql::Conn::new(without_options)?;
    database.query_drop(
        "CREATE TABLE IF NOT EXISTS worker (id INT PRIMARY KEY, written INT NOT NULL, fence BIGINT UNSIGNED NOT NULL)",
    )?;
    database.query_drop("INSERT IGNORE INTO worker (id, written, fence) VALUES (1, 0, 0)")?;

    // Install your exporter of the `metrics` facade first; `examples/service` serves one over HTTP.
    let factory = contend::connect(&url)?.with_probe(Arc::new(MetricsProbe::new()));
    factory.ping(Duration::from_secs(5))?; // a wrong URL, password or table ends the program here
    let (service, events) = factory.contend("report-writer").channel()?;
    service.start()?;

    let (terminate, terminated) = bounded(1);
    let mut signals = Signals::new([SIGTERM, SIGINT])?;
    thread::spawn(move || signals.forever().next().map(|_| terminate.send(())));

    let work = tick(Duration::from_secs(1));
    loop {
        select! {
            recv(events) -> event => event.map(|event| println!("{:?}, fence {:?}", event.kind, event.fence()))?,
            recv(work) -> _ => if let Some(fence) = service.fence() { write(&mut database, fence)? },
            recv(terminated) -> _ => break,
        }
    }
    service.stop()?; // after the work has ended: the next process leads within milliseconds
    println!("{}", factory.health().to_json());
    Ok(())
}

/// Writes, unless a newer leader has written already.
fn write(database: &mut mysql::Conn, fence: u64) -> mysql::Result<()> {
    let update = "UPDATE worker SET written = written + 1, fence = ? WHERE id = 1 AND fence <= ?";
    database.exec_drop(update, (fence, fence))?;
    let accepted = database.affected_rows() == 1;
    println!("fence {fence}: accepted {accepted}");
    Ok(())
}
