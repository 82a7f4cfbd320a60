//! A service that contends for leadership, and shows how it does to Prometheus:
//!
//! ```text
//! cargo run -p contend-example-service --features metrics,redis -- --url redis://127.0.0.1 --listen 127.0.0.1:9464
//! curl http://127.0.0.1:9464/metrics
//! curl http://127.0.0.1:9464/health
//! ```

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use contend::{Factory, MetricsProbe};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use signal_hook::consts::{SIGINT, SIGTERM};

fn main() -> Result<(), Box<dyn Error>> {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("info")).init();
    let (url, listen) = options()?;
    // First the recorder, then the probe: what is registered before it goes nowhere.
    let recorder = PrometheusBuilder::new().install_recorder()?;
    let factory = contend::connect(&url)?.with_probe(Arc::new(MetricsProbe::new()));
    factory.ping(Duration::from_secs(5))?; // a wrong URL or password ends the program here
    let service = factory
        .contend("report")
        .on_acquired(|event| println!("leads, fence {:?}", event.fence()))
        .on_released(|event| println!("has ended, fence {:?}", event.fence()))
        .build()?;
    service.start()?;

    let listener = TcpListener::bind(&listen)?;
    println!("http://{}/metrics", listener.local_addr()?);
    let server = factory.clone();
    thread::spawn(move || serve(&listener, &recorder, &server));
    // Without this, a deploy would leave the mutex owned until the lease has run out.
    signal_hook::iterator::Signals::new([SIGINT, SIGTERM])?
        .forever()
        .next();
    service.stop()?;
    Ok(())
}

/// One request after the other: a scrape a few times a minute needs no more.
fn serve(listener: &TcpListener, recorder: &PrometheusHandle, factory: &Factory) {
    for stream in listener.incoming().flatten() {
        // A client that connects and sends nothing delays the others by this much.
        let _ = stream.set_read_timeout(Some(Duration::from_secs(2)));
        let _ = answer(stream, recorder, factory);
    }
}

fn answer(
    mut stream: TcpStream,
    recorder: &PrometheusHandle,
    factory: &Factory,
) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let request = lines.next().transpose()?.unwrap_or_default();
    // The headers: a socket closed with unread input is reset, and the answer may be lost.
    while lines
        .next()
        .transpose()?
        .is_some_and(|line| !line.is_empty())
    {}
    let (status, kind, body) = match request.split(' ').nth(1) {
        Some("/metrics") => {
            recorder.run_upkeep();
            ("200 OK", "text/plain; version=0.0.4", recorder.render())
        }
        Some("/health") => {
            let health = factory.health();
            let status = if health.is_fine() {
                "200 OK"
            } else {
                "503 Service Unavailable"
            };
            (status, "application/json", health.to_json() + "\n")
        }
        _ => (
            "404 Not Found",
            "text/plain",
            "try /metrics or /health\n".to_owned(),
        ),
    };
    let length = body.len();
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    )
}

/// Returns the URL of the server, and the address to listen on.
fn options() -> Result<(String, String), &'static str> {
    let usage = "usage: contend-example-service [--url URL] [--listen ADDRESS]";
    let (mut url, mut listen) = ("memory://".to_owned(), "127.0.0.1:9464".to_owned());
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        // Not passed over: with a misspelt `--url` every copy would lead, each in its own memory.
        let option = match word.as_str() {
            "--url" => &mut url,
            "--listen" => &mut listen,
            _ => return Err(usage),
        };
        *option = words.next().ok_or(usage)?;
    }
    Ok((url, listen))
}
