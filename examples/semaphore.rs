//! Counting semaphores from a shell: `cargo run --features mysql --example semaphore -- --url mysql://...`.

mod options;

use std::process::{Command, ExitCode};
use std::time::Duration;

use contend::ContenderIdGenerator;
use contend::semaphore::{
    Acquisition, Exhausted, Permit, PermitRenewal, PermitRequest, Release, Semaphores, Usage,
};
use contend::{Error, ErrorKind};
use options::Options;

const USAGE: &str = "\
usage: semaphore --url mysql://user:password@host/database [--json] COMMAND
  create NAME CAPACITY              make a semaphore (and the tables), or change its capacity
  usage [NAME]                      how full it is, or all of them
  acquire EXTERNAL_ID NAME[:COUNT]... [--owner O] [--ttl 60s] [--timeout 5s]
  release EXTERNAL_ID
  renew EXTERNAL_ID
  sweep                             take back what expired or was not renewed for a day
  run NAME[:COUNT]... [--owner O] [--ttl 60s] [--timeout 5s] -- COMMAND [ARGUMENT]...
                                    hold permits while a command runs

exit code: 0 done; 64 bad input; 69 no such semaphore or request; 73 external id already released;
           75 exhausted; 1 anything else; of run, the command's own";

const NO_SUCH: u8 = 69;
const ALREADY_RELEASED: u8 = 73;
const EXHAUSTED: u8 = 75;

/// The ttl of `run`, whose guard renews it.
const RUN_TTL: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let options = Options::from_args(
        USAGE,
        &["--url", "--owner", "--ttl", "--timeout"],
        &["--json"],
    );
    let Some(url) = options.text("--url") else {
        options.fail("--url is missing");
    };
    let outcome = Semaphores::connect(url).and_then(|semaphores| {
        Shell {
            semaphores,
            options: &options,
            json: options.flag("--json"),
        }
        .command()
    });
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("semaphore: {error}");
            ExitCode::from(match error.kind() {
                ErrorKind::InvalidInput => options::BAD_INPUT as u8,
                ErrorKind::NotFound => NO_SUCH,
                _ => 1,
            })
        }
    }
}

struct Shell<'a> {
    semaphores: Semaphores,
    options: &'a Options,
    json: bool,
}

impl Shell<'_> {
    fn command(&self) -> Result<u8, Error> {
        let words: Vec<&str> = self.options.words.iter().map(String::as_str).collect();
        match &*words {
            ["create", name, capacity] => self.create(name, capacity),
            ["usage"] => self.usage(None),
            ["usage", name] => self.usage(Some(name)),
            ["acquire", external_id, wanted @ ..] => self.acquire(external_id, wanted),
            ["release", external_id] => self.release(external_id),
            ["renew", external_id] => self.renew(external_id),
            ["sweep"] => self.sweep(),
            ["run", rest @ ..] => self.run(rest),
            [] => self.options.fail("no command"),
            [other, ..] => self.options.fail(format_args!(
                "not a command, or with too few or too many words: {other}"
            )),
        }
    }

    fn create(&self, name: &str, capacity: &str) -> Result<u8, Error> {
        let Ok(capacity) = capacity.parse() else {
            self.options
                .fail(format_args!("{capacity:?} is not a capacity"));
        };
        self.semaphores.create_tables()?;
        let created = self.semaphores.create(name, capacity)?;
        if !created {
            let user = std::env::var("USER").ok().filter(|user| !user.is_empty());
            self.semaphores
                .set_capacity(name, capacity, user.as_deref())?;
        }
        self.show_usage(&self.semaphores.usage(name)?);
        Ok(0)
    }

    fn usage(&self, name: Option<&str>) -> Result<u8, Error> {
        match name {
            Some(name) => self.show_usage(&self.semaphores.usage(name)?),
            None => {
                for usage in self.semaphores.list()? {
                    self.show_usage(&usage);
                }
            }
        }
        Ok(0)
    }

    fn acquire(&self, external_id: &str, wanted: &[&str]) -> Result<u8, Error> {
        let request = self.request(external_id, wanted, None);
        let timeout = self.options.duration("--timeout").unwrap_or_default();
        let answer = self.semaphores.acquire_timeout(&request, timeout)?;
        Ok(match answer {
            Acquisition::Acquired(permits) => self.show_permits("acquired", &permits),
            Acquisition::AlreadyAcquired(permits) => {
                self.show_permits("already_acquired", &permits)
            }
            Acquisition::AlreadyReleased => {
                self.show_result("already_released");
                ALREADY_RELEASED
            }
            Acquisition::Exhausted(exhausted) => self.show_exhausted(&exhausted),
        })
    }

    fn release(&self, external_id: &str) -> Result<u8, Error> {
        let (result, code) = match self.semaphores.release(external_id)? {
            Release::Released => ("released", 0),
            Release::AlreadyReleased => ("already_released", 0),
            Release::Unknown => ("unknown", NO_SUCH),
        };
        self.show_result(result);
        Ok(code)
    }

    fn renew(&self, external_id: &str) -> Result<u8, Error> {
        let (result, code) = match self.semaphores.renew(external_id)? {
            PermitRenewal::Renewed => ("renewed", 0),
            PermitRenewal::AlreadyReleased => ("already_released", ALREADY_RELEASED),
            PermitRenewal::Unknown => ("unknown", NO_SUCH),
        };
        self.show_result(result);
        Ok(code)
    }

    fn sweep(&self) -> Result<u8, Error> {
        let mut swept = self.semaphores.sweep_expired()?;
        let day = Duration::from_secs(24 * 3600);
        swept.extend(self.semaphores.sweep_stale(day)?);
        if self.json {
            let rows: Vec<String> = swept
                .iter()
                .map(|one| {
                    let reason = format!("{:?}", one.reason).to_lowercase();
                    let (id, reason) = (quoted(&one.external_id), quoted(&reason));
                    format!("{{\"external_id\":{id},\"reason\":{reason}}}")
                })
                .collect();
            println!("{{\"result\":\"swept\",\"requests\":[{}]}}", rows.join(","));
        } else {
            for one in &swept {
                println!("{}: {:?}", one.external_id, one.reason);
            }
            println!("{} requests swept", swept.len());
        }
        Ok(0)
    }

    /// Everything before the command is a semaphore: a command with a path or an option of its own is
    /// told apart by `--`, which the options have taken away.
    fn run(&self, rest: &[&str]) -> Result<u8, Error> {
        let raw: Vec<String> = std::env::args().collect();
        let Some(position) = raw.iter().position(|word| word == "--") else {
            self.options.fail("run wants -- and a command");
        };
        let command = &raw[position + 1..];
        let wanted = &rest[..rest.len().saturating_sub(command.len())];
        let [program, arguments @ ..] = command else {
            self.options.fail("run wants a command after --");
        };
        let external_id = ContenderIdGenerator::Host.generate();
        let request = self.request(&external_id, wanted, Some(RUN_TTL));
        let timeout = self.options.duration("--timeout").unwrap_or_default();
        let guard = match self.semaphores.guard(&request, timeout) {
            Ok(guard) => guard,
            Err(error) if error.kind() == ErrorKind::Exhausted => {
                eprintln!("semaphore: {error}");
                return Ok(EXHAUSTED);
            }
            Err(error) => return Err(error),
        };
        let fences: Vec<String> = guard
            .permits()
            .iter()
            .map(|permit| permit.fence.to_string())
            .collect();
        let status = Command::new(program)
            .args(arguments)
            .env("SEMAPHORE_EXTERNAL_ID", guard.external_id())
            .env("SEMAPHORE_FENCES", fences.join(","))
            .status();
        if !guard.is_held() {
            eprintln!("semaphore: the permits were lost while the command ran");
        }
        guard.release()?;
        match status {
            Ok(status) => Ok(status.code().map_or(1, |code| code.clamp(0, 255) as u8)),
            Err(error) => {
                eprintln!("semaphore: cannot run {program:?}: {error}");
                Ok(127)
            }
        }
    }

    fn request(&self, external_id: &str, wanted: &[&str], ttl: Option<Duration>) -> PermitRequest {
        let mut request = PermitRequest::new(external_id);
        for one in wanted {
            let (name, count) = match one.rsplit_once(':') {
                Some((name, count)) => match count.parse() {
                    Ok(count) => (name, count),
                    Err(_) => self.options.fail(format_args!("{one:?} is not NAME:COUNT")),
                },
                None => (*one, 1),
            };
            request = request.permits(name, count);
        }
        if let Some(owner) = self.options.text("--owner") {
            request = request.owner(owner);
        }
        if let Some(ttl) = self.options.duration("--ttl").or(ttl) {
            request = request.ttl(ttl);
        }
        request
    }

    fn show_permits(&self, result: &str, permits: &[Permit]) -> u8 {
        if self.json {
            let rows: Vec<String> = permits
                .iter()
                .map(|permit| {
                    let (name, count, fence) =
                        (quoted(&permit.semaphore), permit.count, permit.fence);
                    format!("{{\"semaphore\":{name},\"count\":{count},\"fence\":{fence}}}")
                })
                .collect();
            println!(
                "{{\"result\":\"{result}\",\"permits\":[{}]}}",
                rows.join(",")
            );
        } else {
            println!("{}", result.replace('_', " "));
            for permit in permits {
                let (name, count, fence) = (&permit.semaphore, permit.count, permit.fence);
                println!("  {name}: {count}, fence {fence}");
            }
        }
        0
    }

    fn show_exhausted(&self, exhausted: &Exhausted) -> u8 {
        if self.json {
            println!(
                "{{\"result\":\"exhausted\",\"semaphore\":{},\"capacity\":{},\"held\":{},\"wanted\":{}}}",
                quoted(&exhausted.semaphore),
                exhausted.capacity,
                exhausted.held,
                exhausted.wanted
            );
        } else {
            println!("{exhausted}");
        }
        EXHAUSTED
    }

    fn show_usage(&self, usage: &Usage) {
        let (name, capacity, held) = (&usage.semaphore, usage.capacity, usage.held);
        let (free, requests) = (usage.free, usage.requests);
        if self.json {
            let name = quoted(name);
            println!(
                "{{\"semaphore\":{name},\"capacity\":{capacity},\"held\":{held},\"free\":{free},\
                 \"requests\":{requests}}}"
            );
        } else {
            println!("{name}: {held} of {capacity} held by {requests} requests, {free} free");
        }
    }

    fn show_result(&self, result: &str) {
        if self.json {
            println!("{{\"result\":\"{result}\"}}");
        } else {
            println!("{}", result.replace('_', " "));
        }
    }
}

/// A text in JSON.
fn quoted(text: &str) -> String {
    let mut json = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => json.extend(['\\', c]),
            c if c.is_control() => json.push_str(&format!("\\u{:04x}", c as u32)),
            c => json.push(c),
        }
    }
    json.push('"');
    json
}
