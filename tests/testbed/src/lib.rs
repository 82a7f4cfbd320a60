//! What the tests stand on: throw-away real servers, a TCP proxy that misbehaves on request, and
//! ways to wait that never hang.
//!
//! ```no_run
//! use testbed::{Direction, Proxy, RedisServer};
//!
//! let server = RedisServer::start();
//! let proxy = Proxy::to(server.addr());
//! // ... connect the code under test to `proxy.addr()`, and then:
//! proxy.black_hole(Direction::ToClient);
//! server.pause();
//! ```
//!
//! Rules that hold everywhere in here:
//! - Nothing is skipped. What is missing on the machine is a panic that names the Debian package.
//! - Every server dies with the process that started it, even if that one is killed with SIGKILL
//!   (see [`Process`]), and only processes started here are ever signalled.
//! - Ports are held from the moment they are chosen until their owner is dropped (see [`Port`]), so
//!   that a server comes back on its own port after a kill.
//! - Every wait has a condition and a deadline.
//! - It panics instead of returning errors: in a test a panic is the verdict.

mod binary;
mod certificates;
mod cpu_load;
mod fake_clock;
mod mariadb;
mod port;
mod proc;
mod process;
mod proxy;
mod redis;
mod redis_cluster;
mod redis_sentinel;
mod server;
mod spawner;
mod sync;
mod temp_dir;
mod wait;
mod watchdog;
mod zookeeper;
mod zookeeper_ensemble;

pub use certificates::Certificates;
pub use cpu_load::{CpuLoad, cpu_load};
pub use fake_clock::FakeClock;
pub use mariadb::{MariaDbServer, is_mysql};
pub use port::Port;
pub use proc::{cpu_time, is_alive, listens, rss_kib, threads};
pub use process::{Output, Process};
pub use proxy::{Direction, Proxy};
pub use redis::RedisServer;
pub use redis_cluster::RedisCluster;
pub use redis_sentinel::RedisSentinel;
pub use server::Server;
pub use temp_dir::TempDir;
pub use wait::wait_until;
pub use watchdog::within;
pub use zookeeper::ZooKeeperServer;
pub use zookeeper_ensemble::ZooKeeperEnsemble;
