//! Prometheus' view of leadership that moves: scraped from two processes, over HTTP.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{ChildStdout, Command};
use std::time::Duration;

use testbed::{Output, Process, RedisServer, wait_until, within};

const PATIENCE: Duration = Duration::from_secs(60);
const HANG: Duration = Duration::from_secs(200);

struct Service {
    process: Process,
    address: String,
    _stdout: BufReader<ChildStdout>,
}

impl Service {
    fn start(server: &RedisServer) -> Service {
        let mut command = Command::new(env!("CARGO_BIN_EXE_contend-example-service"));
        let url = format!("{}?ttl=2s&transition=1s", server.url());
        command.args(["--url", &url, "--listen", "127.0.0.1:0"]);
        let process = Process::spawn(&command, &Output::Pipe).unwrap();
        let mut stdout = BufReader::new(process.take_stdout().unwrap());
        let address = loop {
            let mut line = String::new();
            assert!(stdout.read_line(&mut line).unwrap() > 0, "it has ended");
            if let Some(rest) = line.strip_prefix("http://") {
                break rest.trim_end().trim_end_matches("/metrics").to_owned();
            }
        };
        Service {
            process,
            address,
            _stdout: stdout,
        }
    }

    fn get(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    /// What a scrape finds: each series with its value.
    fn scrape(&self) -> BTreeMap<String, f64> {
        let answer = self.get("/metrics");
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200 OK"), "{head}");
        body.lines()
            .filter(|line| !line.is_empty() && !line.starts_with('#'))
            .map(|line| {
                let (series, value) = line.rsplit_once(' ').unwrap();
                (series.to_owned(), value.parse().unwrap())
            })
            .collect()
    }

    fn value(&self, name: &str) -> f64 {
        let series = format!("{name}{{mutex=\"report\"}}");
        self.scrape().get(&series).copied().unwrap_or(0.0)
    }
}

fn leaders(services: &[&Service]) -> Vec<f64> {
    services
        .iter()
        .map(|it| it.value("contend_owner"))
        .collect()
}

#[test]
fn leadership_that_moves_is_seen_by_who_scrapes() {
    within(HANG, || {
        let server = RedisServer::start();
        let first = Service::start(&server);
        wait_until(PATIENCE, "the first leads", || leaders(&[&first]) == [1.0]);
        let second = Service::start(&server);
        wait_until(PATIENCE, "the second was refused", || {
            second.value("contend_acquire_refused_total") >= 1.0
        });
        assert_eq!(leaders(&[&first, &second]), [1.0, 0.0]);
        wait_until(PATIENCE, "the first renews", || {
            first.value("contend_renew_renewed_total") >= 2.0
        });

        // A hand-off.
        assert!(first.process.terminate(PATIENCE).success());
        wait_until(PATIENCE, "the second leads", || {
            leaders(&[&second]) == [1.0]
        });
        let seen = second.scrape();
        assert_eq!(seen["contend_gained_total{mutex=\"report\"}"], 1.0);
        assert!(
            seen["contend_hand_off_seconds_count{mutex=\"report\"}"] >= 1.0,
            "{seen:#?}"
        );
        assert!(second.get("/health").starts_with("HTTP/1.1 200 OK"));

        // An outage: renewals fail, and the lease ends.
        server.kill();
        wait_until(PATIENCE, "no process leads", || {
            leaders(&[&second]) == [0.0]
        });
        let seen = second.scrape();
        assert_eq!(
            seen["contend_lost_expired_total{mutex=\"report\"}"], 1.0,
            "{seen:#?}"
        );
        assert!(
            seen["contend_renew_failed_total{mutex=\"report\"}"] >= 1.0,
            "{seen:#?}"
        );
        let failed = "contend_acquire_failed_total";
        let earlier = second.value(failed);
        wait_until(PATIENCE, "attempts fail, again and again", || {
            second.value(failed) > earlier + 1.0
        });
        let health = second.get("/health");
        assert!(health.starts_with("HTTP/1.1 503"), "{health}");
        assert!(health.contains("\"contact\":\"failing\""), "{health}");

        // And its end.
        server.start();
        wait_until(PATIENCE, "the second leads again", || {
            leaders(&[&second]) == [1.0]
        });
        wait_until(PATIENCE, "it is healthy", || {
            second.get("/health").starts_with("HTTP/1.1 200 OK")
        });

        // The alert rules ask for what is there.
        let rules = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/alerts.yml")).unwrap();
        let scraped = second.scrape();
        let asked: Vec<&str> = rules
            .lines()
            .filter_map(|line| line.trim().strip_prefix("expr: "))
            .flat_map(|expression| expression.split(|c: char| !(c.is_alphanumeric() || c == '_')))
            .filter(|word| word.starts_with("contend_"))
            .collect();
        // This service has neither schedules nor semaphores: what they count is only looked up.
        let documented = include_str!("../../../src/metrics.rs");
        let (elsewhere, here): (Vec<_>, Vec<_>) = asked.into_iter().partition(|name| {
            name.starts_with("contend_run_") || *name == "contend_exhausted_total"
        });
        assert_eq!(
            (here.len(), elsewhere.len()),
            (6, 9),
            "{here:?}, {elsewhere:?}"
        );
        for name in elsewhere {
            assert!(documented.contains(&format!("/// | `{name}` |")), "{name}");
        }
        for name in here {
            let series = format!("{name}{{mutex=\"report\"}}");
            assert!(scraped.contains_key(&series), "{series} in {scraped:#?}");
        }
    });
}
