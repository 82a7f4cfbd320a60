//! A process as `/proc` shows it.

use std::fs;
use std::time::Duration;

/// Whether there is a process with this number that has not ended (a zombie has).
pub fn is_alive(pid: u32) -> bool {
    !matches!(state(pid), None | Some('Z' | 'X'))
}

/// How many threads it has.
///
/// # Panics
/// When there is no such process.
pub fn threads(pid: u32) -> usize {
    status(pid, "Threads:")
}

/// How much memory it has resident, in KiB.
///
/// # Panics
/// When there is no such process.
pub fn rss_kib(pid: u32) -> usize {
    status(pid, "VmRSS:")
}

/// The processor time it has used so far, in user and system mode, all threads together.
///
/// The kernel counts it in ticks of usually 10 ms.
///
/// # Panics
/// When there is no such process.
pub fn cpu_time(pid: u32) -> Duration {
    let fields = stat(pid).unwrap_or_else(|| panic!("there is no process {pid}"));
    // The 14th and 15th field of the file; `fields` starts with the third.
    let ticks: u64 = fields
        .split(' ')
        .skip(11)
        .take(2)
        .map(|field| field.parse::<u64>().expect("a number of ticks"))
        .sum();
    Duration::from_secs(ticks)
        / u32::try_from(rustix::param::clock_ticks_per_second()).expect("a small number")
}

/// Whether it listens on this TCP port (IPv4).
pub fn listens(pid: u32, port: u16) -> bool {
    let sockets = fs::read_to_string("/proc/net/tcp").unwrap_or_default();
    let local = format!(":{port:04X}");
    let inodes: Vec<String> = sockets
        .lines()
        .skip(1)
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        // 0A is LISTEN.
        .filter(|fields| fields.len() > 9 && fields[1].ends_with(&local) && fields[3] == "0A")
        .map(|fields| format!("socket:[{}]", fields[9]))
        .collect();
    let Ok(files) = fs::read_dir(format!("/proc/{pid}/fd")) else {
        return false;
    };
    files
        .flatten()
        .filter_map(|file| fs::read_link(file.path()).ok())
        .any(|target| {
            inodes
                .iter()
                .any(|inode| target.as_os_str() == inode.as_str())
        })
}

/// The letter of its state: `T` is stopped, `Z` a zombie.
pub(crate) fn state(pid: u32) -> Option<char> {
    stat(pid)?.chars().next()
}

/// The fields from the third on: the second, the name, may hold spaces and parentheses.
fn stat(pid: u32) -> Option<String> {
    let line = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    Some(line.rsplit_once(") ")?.1.to_owned())
}

fn status(pid: u32, key: &str) -> usize {
    let text = fs::read_to_string(format!("/proc/{pid}/status"))
        .unwrap_or_else(|_| panic!("there is no process {pid}"));
    text.lines()
        .find_map(|line| line.strip_prefix(key))
        .and_then(|value| value.split_whitespace().next()?.parse().ok())
        .unwrap_or_else(|| panic!("process {pid} shows no {key}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wait_until;
    use std::net::TcpListener;
    use std::{hint, process};

    #[test]
    fn process_sees_itself() {
        let pid = process::id();
        assert!(is_alive(pid) && !is_alive(u32::MAX));
        assert!(rss_kib(pid) > 100 && threads(pid) >= 2);
        let before = cpu_time(pid);
        wait_until(Duration::from_secs(60), "some time was burnt", || {
            (0..1_000_000).for_each(|_| hint::spin_loop());
            cpu_time(pid) > before + Duration::from_millis(50)
        });
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        assert!(listens(pid, port));
        drop(listener);
        assert!(!listens(pid, port));
    }
}
