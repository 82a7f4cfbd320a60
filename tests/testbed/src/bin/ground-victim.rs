//! A process for the ground's own tests to kill: it starts what its argument names, says so on
//! standard output, and then waits for its end.

use std::thread;
use std::time::Duration;

use testbed::{MariaDbServer, RedisServer, ZooKeeperServer, within};

/// No test needs a victim for longer, and one that was forgotten must not stay.
const LIFE: Duration = Duration::from_secs(120);

fn main() {
    let what = std::env::args().nth(1).unwrap_or_default();
    match what.as_str() {
        "redis" => show(&RedisServer::start()),
        "mariadb" => show(&MariaDbServer::start()),
        "zookeeper" => show(&ZooKeeperServer::start()),
        "hang" => within(Duration::from_millis(200), || thread::sleep(LIFE)),
        // The server's own process is started by a thread that ends at once.
        "short-thread" => {
            let server = thread::spawn(RedisServer::start).join();
            show(&server.expect("a server"));
        }
        "echo" => echo(),
        _ => panic!("`{what}` is not something to start"),
    }
}

fn show(server: &testbed::Server) {
    println!("{} {}", server.pid(), server.port());
    thread::sleep(LIFE);
}

/// Answers each line with itself.
fn echo() {
    for line in std::io::stdin().lines().map_while(Result::ok) {
        println!("{line}");
    }
}
