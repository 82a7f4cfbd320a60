//! Temporary folders that do not pile up.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::fs::{FlockOperation, flock};

/// How the folders of all processes of this crate begin.
const PREFIX: &str = "contend-ground-";

/// How the file beside a folder ends on which its process holds a lock while it lives.
const ALIVE: &str = "alive";

/// A folder that is removed, with all that is in it, when this is dropped.
///
/// A process that is killed, or that keeps a server in a `static`, drops nothing: what it leaves is removed by
/// the next process that needs a folder.
#[derive(Debug)]
pub struct TempDir {
    path: PathBuf,
    /// Locked, and the lock goes with the process, however it ends.
    _alive: File,
}

impl TempDir {
    /// A new, empty folder.
    pub fn new() -> Self {
        static SWEPT: Once = Once::new();
        SWEPT.call_once(sweep);
        Self::make().unwrap_or_else(|error| panic!("cannot make a temporary folder: {error}"))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn make() -> io::Result<Self> {
        static MADE: AtomicUsize = AtomicUsize::new(0);
        loop {
            let number = MADE.fetch_add(1, Ordering::Relaxed);
            let name = format!("{PREFIX}{}-{number}", process::id());
            let path = std::env::temp_dir().join(name);
            let file = path.with_extension(ALIVE);
            let alive = match File::create_new(&file) {
                Ok(alive) => alive,
                // Of a former process with our number, or of one in another container.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(error) => return Err(error),
            };
            // A sweeper that came between these steps took us for dead: then try another name.
            if flock(&alive, FlockOperation::NonBlockingLockExclusive).is_ok() && file.exists() {
                fs::create_dir(&path)?;
                let _alive = alive;
                return Ok(Self { path, _alive });
            }
        }
    }
}

impl Default for TempDir {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
        let _ = fs::remove_file(self.path.with_extension(ALIVE));
    }
}

/// Removes what dead processes left.
fn sweep() {
    let entries = fs::read_dir(std::env::temp_dir());
    for entry in entries.into_iter().flatten().flatten() {
        let file = entry.path();
        let is_ours = entry.file_name().to_string_lossy().starts_with(PREFIX);
        if !is_ours || file.extension().is_none_or(|it| it != ALIVE) {
            continue;
        }
        let is_dead = |alive: File| {
            let lock = flock(&alive, FlockOperation::NonBlockingLockExclusive);
            lock.is_ok()
        };
        if File::open(&file).is_ok_and(is_dead) {
            let _ = fs::remove_dir_all(file.with_extension(""));
            let _ = fs::remove_file(file);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_go_with_their_process() {
        let folder = TempDir::new();
        let path = folder.path().to_owned();
        fs::create_dir(path.join("sub")).unwrap();
        fs::write(path.join("sub/file"), "text").unwrap();
        let left = std::env::temp_dir().join(format!("{PREFIX}{}-left", process::id()));
        fs::create_dir(&left).unwrap();
        fs::write(left.with_extension(ALIVE), "").unwrap();
        sweep();
        assert!(!left.exists() && path.exists());
        drop(folder);
        assert!(!path.exists());
    }
}
