//! `contend`: mutexes, leaders, schedules and semaphores from a shell.
//!
//! One module per command; `child` runs a command that must not outlive what it holds, `console` writes
//! what people and programs read, `exit` holds the exit codes, `advice` says what to do about an error.

mod advice;
mod child;
mod console;
mod elect;
mod exit;
#[path = "../../json.rs"]
mod json;
mod list;
mod lock;
mod logger;
mod options;
mod ping;
mod revoke;
mod schedule;
mod semaphore;
mod signals;
mod status;
mod wait_notice;

use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, Parser, Subcommand};

use console::Console;
use exit::{Failure, USAGE};
use options::{Connection, GLOBAL};

const ABOUT: &str = "Distributed mutexes, leader election, schedules and semaphores from a shell.";

const LONG_ABOUT: &str = "\
Distributed mutexes, leader election, schedules and semaphores from a shell, on the MySQL, Redis or
ZooKeeper that you already run.

Give the URL of the server with --url or, better, in the environment variable CONTEND_URL: other users of
a machine can read the arguments of a process, and a URL may contain a password.";

const AFTER: &str = "\
URLs:
  redis://[USER:PASSWORD@]HOST[:PORT]      rediss://... with TLS
  redis+cluster://HOST[,HOST]...           redis+sentinel://HOST[,HOST].../MASTER
  mysql://USER:PASSWORD@HOST[:PORT]/DATABASE[?create_table=true]
  zk://HOST:PORT[,HOST:PORT]...[/CHROOT]
  memory://[NAME]                          inside this process only, to try it out

Exit codes:
  0    done
  64   the command line, a name, a duration or the URL is not valid
  65   the request contradicts an earlier one with the same external id, or the semaphore to create exists with
       another capacity
  66   no such mutex, semaphore or request
  69   the server cannot be reached, does not answer, or cannot serve now
  70   an error inside contend
  73   the external id was released already
  74   the output cannot be written
  75   held by another contender, or exhausted
  76   the lock or permit was lost before the command ended
  77   the server denied access: wrong password or missing privilege
  78   the server is not set up for this, or contend was built without this backend
  126  the command cannot be executed; 127 if it was not found
  128+n  signal n ended the command, or contend itself
  lock, elect and semaphore run otherwise exit with the code of their command.
  On SIGTERM, lock, elect and semaphore run do so too (143 if it died of that); schedule, status --watch and an
  elect that runs no command exit with 0.

--mutex before the name of a mutex can be left out: `contend lock backup` and `contend lock --mutex backup`
are the same. lock and semaphore run wait as long as it takes, or for at most --timeout DURATION, or not at
all with --no-wait.

With --json, every line that contend itself prints is a JSON object; an error has \"error\" (the message),
\"kind\" and \"code\" (the exit code for it). The output of a command passes through unchanged.

Examples:
  export CONTEND_URL=redis://10.0.0.5
  contend ping
  contend lock backup -- ./backup.sh
  contend lock db files --timeout 30s -- ./migrate.sh
  contend elect consumer -- ./consume.sh
  contend schedule report --every 1h -- ./report.sh
  contend status --watch
  contend revoke backup --fence 1731812345678901";

/// The command line.
#[derive(Parser)]
#[command(
    name = "contend",
    version,
    about = ABOUT,
    long_about = LONG_ABOUT,
    after_long_help = AFTER,
    after_help = "Run `contend --help` for URLs, exit codes and examples, and `contend COMMAND --help` for a command.",
    max_term_width = 100,
    subcommand_required = true,
    disable_help_subcommand = true
)]
struct CommandLine {
    #[command(flatten)]
    connection: Connection,

    /// Prints one JSON object per line.
    #[arg(long, global = true, help_heading = GLOBAL)]
    json: bool,

    /// Shows the library's log on standard error; -vv adds debug messages, -vvv trace messages.
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
    List(list::List),
    Revoke(revoke::Revoke),
    Ping(ping::Ping),
}

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next().is_some_and(|word| word == child::GUARDIAN) {
        child::guardian();
        return ExitCode::SUCCESS;
    }
    let code = run();
    wait_notice::join();
    console::flush_messages();
    code
}

fn run() -> ExitCode {
    let line = match CommandLine::try_parse() {
        Ok(line) => line,
        Err(error) => return not_understood(with_whole_usage(with_separator(error))),
    };
    let console = Console::new(line.json);
    // Their trouble is returned by no call: the log tells of it.
    let shows_warnings = matches!(line.command, Command::Elect(_) | Command::Schedule(_));
    logger::install(&console, line.verbose, shows_warnings);
    let connection = &line.connection;
    let outcome = match line.command {
        Command::Lock(lock) => lock.run(connection, &console),
        Command::Elect(elect) => elect.run(connection, &console),
        Command::Schedule(schedule) => schedule.run(connection, &console),
        Command::Semaphore(semaphore) => semaphore.run(connection, &console),
        Command::Status(status) => status.run(connection, &console),
        Command::List(list) => list.run(connection, &console),
        Command::Revoke(revoke) => revoke.run(connection, &console),
        Command::Ping(ping) => ping.run(connection, &console),
    };
    ExitCode::from(outcome.unwrap_or_else(|failure: Failure| {
        failure.show(&console);
        failure.code()
    }))
}

/// Says to put `--` before a command that seems to stand without it.
fn with_separator(mut error: clap::Error) -> clap::Error {
    let says = |context, text| {
        let value: Option<&ContextValue> = error.get(context);
        value.is_some_and(|value| value.to_string().contains(text))
    };
    let is_it = match error.kind() {
        ErrorKind::MissingRequiredArgument => says(ContextKind::InvalidArg, "<COMMAND>"),
        // An option of the command, which `--` before that option alone would not help.
        ErrorKind::UnknownArgument => {
            says(ContextKind::Usage, "-- <COMMAND>") && says(ContextKind::Suggested, "as a value")
        }
        _ => false,
    };
    if std::env::args().any(|argument| argument == "--") {
        // The command is not what was misunderstood.
        error.remove(ContextKind::Suggested);
    } else if is_it {
        let tip = "put -- before the command, as in `NAME -- COMMAND`".into();
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip]));
    }
    error
}

/// Shows all of a command's usage: what clap shows by itself has no `[OPTIONS]`, and demands whatever was given,
/// in the environment too.
fn with_whole_usage(mut error: clap::Error) -> clap::Error {
    let Some(shown) = error.get(ContextKind::Usage).map(ToString::to_string) else {
        return error;
    };
    let mut command = CommandLine::command();
    command.build();
    // It begins with the names of the commands: `Usage: contend semaphore run`.
    for name in shown.split_whitespace().skip(2) {
        let Some(found) = command.find_subcommand(name) else {
            break;
        };
        command = found.clone();
    }
    let usage = ContextValue::StyledStr(command.render_usage());
    error.insert(ContextKind::Usage, usage);
    error
}

/// Help that was asked for, or what is wrong with the command line.
fn not_understood(error: clap::Error) -> ExitCode {
    let is_asked_for = !error.use_stderr();
    let mut words = std::env::args_os().take_while(|word| word != "--");
    if !is_asked_for && words.any(|word| word == "--json") {
        let text = error.to_string();
        let message = text.trim_start_matches("error: ").trim_end();
        Failure::Usage(message.to_owned()).show(&Console::new(true));
    } else {
        // A reader that has gone away is no reason to panic.
        let _ = error.print();
    }
    ExitCode::from(if is_asked_for { 0 } else { USAGE })
}
