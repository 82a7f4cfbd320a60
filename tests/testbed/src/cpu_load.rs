//! Load on the processors, for tests that must hold on a busy machine.

use std::hint;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

/// Threads that burn processor time until this is dropped.
#[derive(Debug)]
pub struct CpuLoad {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

/// Starts `n` threads that burn processor time until the result is dropped.
#[must_use = "the load ends when this is dropped"]
pub fn cpu_load(n: usize) -> CpuLoad {
    let stop = Arc::new(AtomicBool::new(false));
    let threads = (0..n)
        .map(|_| {
            let stop = Arc::clone(&stop);
            thread::Builder::new()
                .name("cpu-load".to_owned())
                .spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        hint::spin_loop();
                    }
                })
                .expect("a thread to burn processor time")
        })
        .collect();
    CpuLoad { stop, threads }
}

impl Drop for CpuLoad {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
