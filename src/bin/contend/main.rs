//! `contend`: mutexes, leaders, schedules and semaphores from a shell.
//!
//! One module per command; `child` runs a command that must not outlive what it holds, `console` writes what
//! people and programs read, `exit` holds the exit codes.

mod child;
mod console;
mod elect;
mod exit;
mod lock;
mod observe;
mod options;
mod ping;
mod revoke;
mod schedule;
mod semaphore;
mod signals;
mod status;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use console::Console;
use options::{Connection, GLOBAL};

/// Distributed mutexes, leader election, schedules and semaphores from a shell.
///
/// They are kept on the MySQL, Redis or ZooKeeper that you already run. Give the URL of the server with --url or,
/// better, in the environment variable CONTEND_URL: other users of a machine can read the arguments of a process,
/// and a URL may contain a password.
#[derive(Parser)]
#[command(
    version,
    after_help = "Run `contend --help` for URLs, exit codes and examples, and `contend COMMAND --help` for a command.",
    after_long_help = include_str!("help/contend.txt"),
    max_term_width = 100,
    disable_help_subcommand = true
)]
struct CommandLine {
    #[command(flatten)]
    connection: Connection,

    /// Prints one JSON object per line.
    #[arg(long, global = true, help_heading = GLOBAL)]
    json: bool,

    /// Shows more of the library's log on standard error: -v, -vv for debug messages, -vvv for trace messages.
    #[arg(short, long, global = true, action = clap::ArgAction::Count, help_heading = GLOBAL)]
    verbose: u8,

    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Lock(lock::Lock),
    Elect(elect::Elect),
    Schedule(schedule::Schedule),
    #[command(subcommand)]
    Semaphore(semaphore::Semaphore),
    Status(status::Status),
    Observe(observe::Observe),
    Revoke(revoke::Revoke),
    Ping(ping::Ping),
}

fn main() -> ExitCode {
    let first = std::env::args_os().nth(1);
    if first.is_some_and(|word| word == child::GUARDIAN) {
        child::guardian();
        return ExitCode::SUCCESS;
    }
    let line = match CommandLine::try_parse() {
        Ok(line) => line,
        Err(error) => {
            // A reader that has gone away is no reason to panic.
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { exit::USAGE } else { 0 });
        }
    };
    let console = Console { json: line.json };
    console::show_log(line.verbose);
    let connection = &line.connection;
    let outcome = match line.command {
        Command::Lock(lock) => lock.run(connection, console),
        Command::Elect(elect) => elect.run(connection, console),
        Command::Schedule(schedule) => schedule.run(connection, console),
        Command::Semaphore(semaphore) => semaphore.run(connection, console),
        Command::Status(status) => status.run(connection, console),
        Command::Observe(observe) => observe.run(connection, console),
        Command::Revoke(revoke) => revoke.run(connection, console),
        Command::Ping(ping) => ping.run(connection, console),
    };
    ExitCode::from(outcome.unwrap_or_else(|failure| {
        console.failure(&failure);
        failure.code
    }))
}
