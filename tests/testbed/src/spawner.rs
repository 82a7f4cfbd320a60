//! The one thread that starts child processes.
//!
//! Linux sends a child its parent-death signal when the *thread* that forked it ends, not the
//! process. A server started by one test and shared with others would die with the first test's
//! thread. So all children are forked by a thread that lives as long as the process.

use std::io;
use std::process::{Child, Command};
use std::sync::mpsc::{self, Sender};
use std::sync::{LazyLock, Mutex};
use std::thread;

use crate::sync::lock;

struct Order {
    command: Command,
    reply: Sender<io::Result<Child>>,
}

static SPAWNER: LazyLock<Mutex<Sender<Order>>> = LazyLock::new(|| {
    let (orders, received) = mpsc::channel::<Order>();
    thread::Builder::new()
        .name("spawner".to_owned())
        .spawn(move || {
            for mut order in received {
                let _ = order.reply.send(order.command.spawn());
            }
        })
        .expect("a thread to start processes from");
    Mutex::new(orders)
});

/// Spawns `command` from the thread that never ends.
pub(crate) fn spawn(command: Command) -> io::Result<Child> {
    let (reply, answer) = mpsc::channel();
    lock(&SPAWNER)
        .send(Order { command, reply })
        .expect("the spawner never ends");
    answer.recv().expect("the spawner answers every order")
}
