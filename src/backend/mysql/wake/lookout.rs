//! A lookout: a thread with a connection that waits for a name, on behalf of one contender at a time.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use mysql::prelude::Queryable;

use super::Shared;
use super::name::WakeName;
use super::post::{Phase, Post, Verdict};
use crate::backend::mysql::link::Link;
use crate::backend::mysql::store::Row;
use crate::clock::Moment;
use crate::error::Result;

/// The longest single wait on the server. It ends earlier by a grant or a `KILL`; the bound is for a
/// network that forgot the connection. Whoever waits longer goes to the end of the server's queue.
const WAIT: Duration = Duration::from_secs(300);

/// How long a lookout that was granted the name keeps it for a contender that does not act.
const CLAIM: Duration = Duration::from_millis(500);

/// An owner this young may hold for the length of a critical section, and holds no name: the first
/// waiter keeps the name and looks often, for all. An older one is there to stay, and shall have it.
const YOUNG: Duration = Duration::from_millis(250);

/// The first pause between two looks; each is half as long again as the one before.
const FIRST_LOOK: Duration = Duration::from_millis(1);

/// The longest pause between two looks at a young owner.
const QUICK: Duration = Duration::from_millis(10);

/// The first and the longest time after which a name given up is waited for again.
const FIRST_RETURN: Duration = Duration::from_millis(150);
const LAST_RETURN: Duration = Duration::from_secs(30);

/// Starts one with its first post; `false` where it may not or cannot.
pub(super) fn spawn(shared: &Arc<Shared>, post: &Arc<Post>) -> bool {
    let Some(alive) = shared.sign_of_life() else {
        return false;
    };
    if !shared.reserve() {
        return false;
    }
    let mut lookout = Lookout {
        shared: Arc::clone(shared),
        berth: None,
    };
    let mut post = Arc::clone(post);
    let spawned = thread::Builder::new()
        .name("contend-mysql-lookout".to_owned())
        .spawn(move || {
            loop {
                lookout.serve(&post);
                // Shorter than the silence after which the server would close the connection.
                let idle = lookout.shared.silence / 2;
                match lookout.shared.posts.recv_timeout(idle) {
                    Ok(next) => post = next,
                    Err(_) => break,
                }
            }
            lookout.shared.give_up_reservation();
            drop(lookout);
            drop(alive);
        });
    if let Err(error) = spawned {
        shared.give_up_reservation();
        log::warn!("no thread for a wake-up, the contender polls: {error}");
        return false;
    }
    true
}

struct Lookout {
    shared: Arc<Shared>,
    berth: Option<Berth>,
}

/// A connection and what it holds: gone together.
struct Berth {
    link: Link,
    /// The name that it is known by.
    known_as: WakeName,
    /// It holds the place of the first who waits.
    first: bool,
}

/// How a wait on the server ended.
enum Wait {
    Granted,
    /// Nothing yet.
    Again,
    /// The connection is gone, or the server refuses.
    Failed,
}

impl Lookout {
    /// Serves one contender to the end of its wait, and of the ownership that came of it.
    fn serve(&mut self, post: &Post) {
        let mut away = FIRST_RETURN;
        let mut failures = 0;
        while !post.state().dismissed {
            match self.wait(post) {
                Wait::Granted => {
                    failures = 0;
                    post.ring();
                    if !self.attend(post) {
                        break;
                    }
                    self.free_name(post);
                    if post.take_behind() {
                        continue;
                    }
                    // The owner is there to stay: leave it the name for a while, and look at the row.
                    // The place is kept: whoever came later waits for that.
                    if !self.watch_row(post, away) {
                        break;
                    }
                    away = (away * 2).min(LAST_RETURN);
                }
                Wait::Again => {}
                Wait::Failed => {
                    post.state().first = false;
                    post.posted();
                    // The first is often the end of a connection that idled: the next one is fresh.
                    let pause = FIRST_RETURN * failures;
                    failures = (failures + 1).min(20);
                    if !self.watch_row(post, pause) {
                        break;
                    }
                }
            }
        }
        self.free_name(post);
        self.leave_queue(post);
        post.leave();
    }

    /// Waits to be the first of those who wait, and then for the name. An owner, whose connection broke,
    /// only wants its name back.
    fn wait(&mut self, post: &Post) -> Wait {
        let is_first = self.berth.as_ref().is_some_and(|berth| berth.first);
        // The place goes with the connection.
        post.state().first = is_first;
        if !is_first && !post.state().owns {
            match self.block(post, &post.queue) {
                Wait::Granted => {}
                other => return other,
            }
            if let Some(berth) = &mut self.berth {
                berth.first = true;
            }
            post.state().first = true;
        }
        let waited = self.block(post, &post.name);
        if matches!(waited, Wait::Granted) {
            post.state().named();
        }
        waited
    }

    /// Blocks on the server until `name` is ours.
    fn block(&mut self, post: &Post, name: &WakeName) -> Wait {
        if !self.connect() {
            return Wait::Failed;
        }
        let Some(Berth { link, known_as, .. }) = &mut self.berth else {
            return Wait::Failed;
        };
        if !post.enter(Phase::Blocked(known_as.clone())) {
            post.enter(Phase::Away);
            return Wait::Again;
        }
        let answer = link.run(Moment::FAR, |conn| {
            let seconds = WAIT.as_secs();
            conn.exec_first::<Option<i64>, _, _>("SELECT GET_LOCK(?, ?)", (name.as_str(), seconds))
        });
        let mut state = post.state();
        let killed = std::mem::take(&mut state.killed);
        state.phase = Phase::Away;
        match answer {
            Ok(Some(Some(1))) => {
                // A kill that came too late for this statement may hit the next one.
                if killed {
                    self.berth = None;
                    return Wait::Again;
                }
                Wait::Granted
            }
            // Nobody freed it in all that time; or NULL, which is how MariaDB says killed.
            Ok(Some(Some(_))) => Wait::Again,
            Ok(_) if killed => Wait::Again,
            Err(fault) if killed && fault.is_interrupted() => Wait::Again,
            Ok(_) => {
                self.berth = None;
                Wait::Failed
            }
            Err(fault) => {
                self.shared.heed(&fault);
                self.berth = None;
                Wait::Failed
            }
        }
    }

    /// Holds the name while its contender tries, and for as long as it owns. `true`: the contender
    /// lost to an owner that is there to stay. `false`: it needs nothing more.
    fn attend(&mut self, post: &Post) -> bool {
        let mut look = FIRST_LOOK;
        loop {
            if !post.wait(CLAIM, |state| state.verdict.is_some()) {
                return false;
            }
            let verdict = post.state().verdict;
            match verdict {
                Some(Verdict::Won) => return self.keep_name(post),
                // Said nothing in time: others shall have their turn.
                None => {
                    self.leave_queue(post);
                    return true;
                }
                Some(Verdict::Lost) => {}
            }
            // Look on its behalf until the row is free, or its owner too old.
            loop {
                if !post.wait(look, |state| state.owns) {
                    return false;
                }
                if post.state().owns {
                    return self.keep_name(post);
                }
                match self.read(post) {
                    Ok(Some(row)) if !row.is_free() => {
                        let age = row.now_ms.saturating_sub(row.acquired_at);
                        if u128::from(age) > YOUNG.as_millis() {
                            return true;
                        }
                    }
                    // Free, or deleted: either way it is for taking.
                    Ok(_) => {
                        post.ring();
                        break;
                    }
                    Err(_) => return true,
                }
                look = (look * 3 / 2).min(QUICK);
            }
        }
    }

    /// Holds the name until the contender owns no longer; keeps the connection from being forgotten.
    fn keep_name(&mut self, post: &Post) -> bool {
        self.leave_queue(post);
        loop {
            if !post.wait(self.shared.heartbeat(), |state| !state.owns) {
                return false;
            }
            if !post.state().owns {
                // Lost without a release: it contends again, from the end of the queue.
                return true;
            }
            let Some(berth) = &mut self.berth else {
                return true;
            };
            if berth
                .link
                .run(Moment::FAR, |conn| conn.query_drop("DO 0"))
                .is_err()
            {
                self.berth = None;
                return post.enter(Phase::Away);
            }
        }
    }

    /// Looks at the row for so long, ever more seldom, without the name: a hold is over for an eighth of
    /// its length at most before that is noticed. `false` once the contender needs nothing more.
    fn watch_row(&mut self, post: &Post, limit: Duration) -> bool {
        let end = Moment::now() + limit;
        let mut look = FIRST_LOOK;
        loop {
            let pause = look.min(end.remaining());
            if !post.wait(pause, |state| state.owns) {
                return false;
            }
            if end.remaining().is_zero() || post.state().owns {
                return true;
            }
            match self.read(post) {
                Ok(Some(row)) if !row.is_free() => {}
                Ok(_) => post.ring(),
                // Its contender will find out by itself, and knows how to back off.
                Err(_) => {}
            }
            look = (look * 9 / 8).min(self.shared.poll_interval);
        }
    }

    fn free_name(&mut self, post: &Post) {
        let named = {
            let mut state = post.state();
            let named = matches!(state.phase, Phase::Named);
            state.phase = Phase::Away;
            named
        };
        if named {
            self.free(&post.name);
        }
    }

    /// The next one who waits is the first.
    fn leave_queue(&mut self, post: &Post) {
        post.state().first = false;
        let first = self.berth.as_mut().map(|berth| &mut berth.first);
        if first.is_some_and(std::mem::take) {
            self.free(&post.queue);
        }
    }

    fn free(&mut self, name: &WakeName) {
        if let Some(Berth { link, .. }) = &mut self.berth {
            let freed = link.run(Moment::FAR, |conn| {
                conn.exec_drop("DO RELEASE_LOCK(?)", (name.as_str(),))
            });
            // Closing the connection frees it as well.
            if freed.is_err() {
                self.berth = None;
            }
        }
    }

    /// Reads the row through the pool, whose answers are bounded in time.
    fn read(&self, post: &Post) -> Result<Option<Row>> {
        let store = &self.shared.store;
        let by = Moment::now() + store.pool.patience() * 2;
        let mut link = store.pool.checkout_as_waiter(by)?;
        store.read(&mut link, &post.mutex, by)
    }

    fn connect(&mut self) -> bool {
        if self
            .berth
            .as_ref()
            .is_some_and(|berth| !berth.link.is_poisoned())
        {
            return true;
        }
        self.berth = None;
        let grace = self.shared.store.pool.patience();
        let options = self.shared.link_options(Some(WAIT + grace));
        let known_as = WakeName::unique();
        let opened = self
            .shared
            .store
            .pool
            .open_apart(&options)
            .and_then(|mut link| {
                link.run(Moment::FAR, |conn| {
                    conn.exec_drop("DO GET_LOCK(?, 0)", (known_as.as_str(),))
                })?;
                Ok(link)
            });
        match opened {
            Ok(link) => {
                self.berth = Some(Berth {
                    link,
                    known_as,
                    first: false,
                });
                true
            }
            Err(fault) => {
                self.shared.heed(&fault);
                log::debug!("no connection for a wake-up: {}", fault.into_error());
                false
            }
        }
    }
}
