//! A lock from async code. Every call of contend blocks, so it runs on tokio's blocking threads:
//!
//! ```text
//! cargo run -p contend-example-async
//! cargo run -p contend-example-async --features redis -- redis://127.0.0.1
//! ```
//!
//! - Dropping the future of a wait ends the wait.
//! - The loss of the lock cancels a token, which the tasks under the lock listen to.

use std::thread;
use std::time::Duration;

use contend::{Cancel, Guard, Locker};
use tokio::runtime::Runtime;
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

type AnyError = Box<dyn std::error::Error + Send + Sync>;

fn main() -> Result<(), AnyError> {
    let url = std::env::args().nth(1);
    let factory = contend::connect(url.as_deref().unwrap_or("memory://"))?;
    let ours = factory.locker("invoices").build()?;
    let theirs = factory.locker("invoices").build()?;
    Runtime::new()?.block_on(async {
        let held = AsyncGuard::lock(ours).await?;
        println!("locked, fence {}", held.fence);

        // The future is dropped after 200 ms: its wait ends, and it keeps no place in the queue.
        match timeout(Duration::from_millis(200), AsyncGuard::lock(theirs)).await {
            Ok(_) => println!("the second lock did not wait"),
            Err(_) => println!("the second lock was given up after 200 ms"),
        }

        tokio::select! {
            () = work() => println!("done under the lock"),
            () = held.lost().cancelled() => println!("lost: the work was stopped"),
        }
        held.unlock().await?;
        println!("unlocked");
        Ok(())
    })
}

async fn work() {
    sleep(Duration::from_millis(300)).await;
}

/// A held lock. Dropping it unlocks on a blocking thread.
struct AsyncGuard {
    /// Taken out when it is given up.
    guard: Option<Guard>,
    fence: u64,
    lost: CancellationToken,
}

impl AsyncGuard {
    /// Waits for the lock. Dropping the future ends the wait.
    async fn lock(locker: Locker) -> Result<AsyncGuard, AnyError> {
        let cancel = Cancel::new();
        let _on_drop = CancelOnDrop(cancel.clone()); // ends the wait if the future is dropped
        // Detached: the thread that locks goes back to its pool, and may lock for another task.
        let lock = move || locker.lock_until_cancelled(&cancel).map(Guard::detach);
        let guard = spawn_blocking(lock).await??;

        let (receiver, lost) = (guard.lost(), CancellationToken::new());
        let token = lost.clone();
        // Not one of tokio's threads: it waits for as long as the lock is held.
        thread::spawn(move || {
            let _ = receiver.recv(); // returns when the lock is lost or given up
            token.cancel();
        });
        Ok(AsyncGuard {
            fence: guard.fence(),
            guard: Some(guard),
            lost,
        })
    }

    /// Cancelled when the lock is lost or given up.
    fn lost(&self) -> &CancellationToken {
        &self.lost
    }

    async fn unlock(mut self) -> Result<(), AnyError> {
        if let Some(guard) = self.guard.take() {
            spawn_blocking(move || guard.unlock()).await??;
        }
        Ok(())
    }
}

impl Drop for AsyncGuard {
    fn drop(&mut self) {
        if let Some(guard) = self.guard.take() {
            // An unlock waits for the server: not on a thread that runs tasks.
            spawn_blocking(move || drop(guard));
        }
    }
}

/// Cancels a wait when the future that it belongs to is dropped.
struct CancelOnDrop(Cancel);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropped_future_leaves_the_queue() {
        let factory = contend::connect("memory://async-example").unwrap();
        let ours = factory.locker("m").build().unwrap();
        let theirs = factory.locker("m").build().unwrap();
        Runtime::new().unwrap().block_on(async {
            let held = AsyncGuard::lock(ours).await.unwrap();
            let waits = timeout(Duration::from_millis(50), AsyncGuard::lock(theirs)).await;
            assert!(waits.is_err());
            let left = async {
                while !factory.participants("m").unwrap().is_empty() {
                    sleep(Duration::from_millis(1)).await;
                }
            };
            timeout(Duration::from_secs(10), left).await.unwrap();
            held.unlock().await.unwrap();
        });
    }
}
