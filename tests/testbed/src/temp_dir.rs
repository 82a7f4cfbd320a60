//! Temporary folders that do not pile up.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::Mutex;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};

use crate::sync::lock;

/// How the folders of all processes of this crate begin.
const PREFIX: &str = "contend-ground-";

/// A file inside each process's folder on which that process holds a lock while it lives.
const ALIVE: &str = "alive";

/// From when on a folder without that file is not one that is being made.
const ABANDONED: Duration = Duration::from_secs(600);

/// A folder that is removed, with all that is in it, when this is dropped.
///
/// All folders of a process lie in one, whose lock tells others that the process lives. A process
/// that is killed, or that keeps a server in a `static`, drops nothing: what it leaves is removed by
/// the next process that needs a folder.
#[derive(Debug)]
pub struct TempDir {
    path: PathBuf,
}

impl TempDir {
    /// A new, empty folder.
    pub fn new() -> Self {
        let mut root = lock(&ROOT);
        let root = root.get_or_insert_with(|| {
            sweep();
            Root::make().unwrap_or_else(|error| panic!("cannot make a temporary folder: {error}"))
        });
        let path = root.path.join(root.made.to_string());
        fs::create_dir(&path).unwrap_or_else(|error| panic!("cannot make {path:?}: {error}"));
        root.made += 1;
        root.live += 1;
        Self { path }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
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
        let mut root = lock(&ROOT);
        if let Some(parent) = root.as_mut() {
            parent.live -= 1;
            if parent.live == 0 {
                let _ = fs::remove_dir_all(&parent.path);
                *root = None;
            }
        }
    }
}

static ROOT: Mutex<Option<Root>> = Mutex::new(None);

/// The one folder of this process, there while it has folders in it.
#[derive(Debug)]
struct Root {
    path: PathBuf,
    /// Folders made in it so far: the name of the next one.
    made: usize,
    /// Folders that are not dropped yet.
    live: usize,
    /// Locked, and the lock goes with the process, however it ends.
    _alive: File,
}

impl Root {
    fn make() -> io::Result<Self> {
        let mut attempt = 0;
        loop {
            let name = format!("{PREFIX}{}-{attempt}", process::id());
            attempt += 1;
            let path = std::env::temp_dir().join(name);
            match fs::create_dir(&path) {
                Ok(()) => {}
                // A former process with our number, or one in another container.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(error) => return Err(error),
            }
            let file = path.join(ALIVE);
            let alive = File::create(&file)?;
            // A sweeper that came between these steps took us for dead: then try another name.
            if flock(&alive, FlockOperation::NonBlockingLockExclusive).is_ok() && file.exists() {
                return Ok(Self {
                    path,
                    made: 0,
                    live: 0,
                    _alive: alive,
                });
            }
        }
    }
}

/// Removes what dead processes left.
fn sweep() {
    let Ok(entries) = fs::read_dir(std::env::temp_dir()) else {
        return;
    };
    for entry in entries.flatten() {
        if !entry.file_name().to_string_lossy().starts_with(PREFIX) {
            continue;
        }
        let path = entry.path();
        match File::open(path.join(ALIVE)) {
            Ok(alive) => {
                if flock(&alive, FlockOperation::NonBlockingLockExclusive).is_ok() {
                    let _ = fs::remove_dir_all(path);
                }
            }
            // Being made right now, or left by a sweeper that was killed half-way.
            Err(_) => {
                let age = entry.metadata().and_then(|folder| folder.modified());
                if age.is_ok_and(|at| at.elapsed().is_ok_and(|age| age > ABANDONED)) {
                    let _ = fs::remove_dir_all(path);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folder_goes_with_its_content() {
        let folder = TempDir::new();
        let path = folder.path().to_owned();
        fs::create_dir(path.join("sub")).unwrap();
        fs::write(path.join("sub/file"), "text").unwrap();
        drop(folder);
        assert!(!path.exists());
    }

    #[test]
    fn folders_of_dead_processes_are_swept() {
        let mine = TempDir::new();
        let left = std::env::temp_dir().join(format!("{PREFIX}{}-left", process::id()));
        fs::create_dir(&left).unwrap();
        fs::write(left.join(ALIVE), "").unwrap();
        sweep();
        assert!(!left.exists());
        assert!(mine.path().exists());
    }
}
