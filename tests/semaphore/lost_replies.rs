//! Calls whose outcome their caller did not learn. A retry with the same external id is the answer.

use std::thread;

use crate::ground::{PATIENCE, already_acquired, connect, semaphores, want};
use crate::mysql_ground::{HANG, ms};
use contend::Error;
use contend::semaphore::{PermitRequest, Release, Semaphores};
use testbed::{Proxy, wait_until, within};

/// A semaphore of one permit, a client behind a proxy, and one beside it.
struct Stage {
    direct: Semaphores,
    proxy: Proxy,
    client: Semaphores,
}

impl Stage {
    fn new() -> Stage {
        let (direct, url) = semaphores(&[("a", 1)]);
        let proxy = Proxy::before(&url);
        let client = connect(&format!("{}?pool_size=1", proxy.url(&url)));
        Stage {
            direct,
            proxy,
            client,
        }
    }

    fn held(&self) -> u64 {
        self.direct.usage("a").unwrap().held
    }

    /// Has the client acquire what it never hears of; from there on the server is away.
    fn lose_reply(&self, acquire: impl FnOnce(&Semaphores) -> Result<(), Error>) -> Error {
        // Its one connection lives on until that answer.
        self.proxy.refuse();
        self.proxy.lose_reply_to(b"INSERT INTO");
        let error = acquire(&self.client).unwrap_err();
        assert_eq!(self.proxy.lost_replies(), 1);
        wait_until(PATIENCE, "it is committed", || self.held() == 1);
        assert!(error.is_transient(), "{error}");
        assert!(
            error.to_string().contains("may have been granted"),
            "{error}"
        );
        error
    }

    fn lose_reply_to(&self, request: &PermitRequest) -> Error {
        self.lose_reply(|client| client.acquire(request).map(drop))
    }
}

/// The process whose call was not answered does not release what another process was told that it holds.
#[test]
fn other_process_keeps_what_it_retried() {
    within(HANG, || {
        let stage = Stage::new();
        let request = want("job", "a", 1);
        let error = stage.lose_reply_to(&request);
        assert!(error.to_string().contains("repeat it"), "{error}");
        let told = already_acquired(stage.direct.acquire(&request).unwrap());
        stage.proxy.pass();
        thread::sleep(ms(1_500)); // what the first process would do
        assert_eq!(stage.held(), 1);
        let mut again = None;
        wait_until(PATIENCE, "it is connected again", || {
            again = stage.client.acquire(&request).ok();
            again.is_some()
        });
        assert_eq!(already_acquired(again.unwrap()), told);
        assert_eq!(stage.direct.release("job").unwrap(), Release::Released);
        assert_eq!(stage.direct.check().unwrap(), []);
    });
}

/// A guard has no id to repeat: one attempt in the background gives back what it may have been granted.
#[test]
fn unheard_grant_is_given_back() {
    within(HANG, || {
        let stage = Stage::new();
        let request = PermitRequest::generated().permits("a", 1).ttl(ms(600_000));
        stage.lose_reply(|client| client.guard(&request, ms(0)).map(drop));
        stage.proxy.pass();
        wait_until(PATIENCE, "it is released", || stage.held() == 0);
        assert_eq!(stage.direct.check().unwrap(), []);
    });
}
