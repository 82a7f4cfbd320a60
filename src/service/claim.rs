//! One id, one contender: a second live one with the same mutex and id in this process is refused.

use std::collections::HashSet;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::error::{Error, ErrorKind, Result};

type Key = (String, Arc<str>, Arc<str>);

static LIVE: Mutex<Option<HashSet<Key>>> = Mutex::new(None);

/// The right to contend for a mutex under an id; given back on drop.
#[derive(Debug)]
pub(crate) struct Claim {
    key: Key,
}

impl Claim {
    pub(crate) fn new(realm: &str, mutex: &Arc<str>, id: &Arc<str>) -> Result<Claim> {
        let key = (realm.to_owned(), Arc::clone(mutex), Arc::clone(id));
        if LIVE.lock().get_or_insert_default().insert(key.clone()) {
            return Ok(Claim { key });
        }
        Err(Error::new(
            ErrorKind::DuplicateContender,
            format!(
                "{mutex}: a live service or locker of this process contends as {id:?} already; \
                 two contenders with one id would both believe that they own"
            ),
        ))
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if let Some(live) = LIVE.lock().as_mut() {
            live.remove(&self.key);
        }
    }
}
