//! Mutexes in the memory of one process: the embedded default, for tests, development and a first run.
//!
//! `memory://` is one registry for the whole process, `memory://name` another one. A registry lives
//! as long as a factory, service or locker uses it.

mod registry;

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use self::registry::Registry;
use super::{Attempt, Backend, Entry, Place, Renewal, Seat, Sight, Watch};
use crate::bell::Waker;
use crate::clock::Moment;
use crate::error::{Error, Result};
use crate::factory::Factory;
use crate::lease::Lease;
use crate::url::Url;

/// The registries in use, by name.
static REGISTRIES: Mutex<Option<HashMap<String, Weak<Registry>>>> = Mutex::new(None);

/// A factory on the registry called `name` (the empty name is that of `memory://`).
///
/// ```
/// use contend::{Lease, memory};
///
/// let factory = memory::factory("doc", Lease::default());
/// let service = factory.contend("demo").build()?;
/// # Ok::<(), contend::Error>(())
/// ```
#[must_use]
pub fn factory(name: &str, lease: Lease) -> Factory {
    Factory::new(Arc::new(Memory::named(name)), lease)
}

pub(super) fn connect(url: &Url) -> Result<Factory> {
    url.expect_parameters(&["ttl", "transition"])?;
    if url.user.is_some() || url.password.is_some() || url.hosts.len() > 1 || !url.path.is_empty() {
        return Err(Error::invalid(
            "a memory URL is memory:// or memory://NAME, with ttl and transition as parameters",
        ));
    }
    let name = url.hosts.first().map_or("", String::as_str);
    Ok(factory(name, url.lease()?))
}

#[derive(Debug)]
struct Memory {
    realm: String,
    registry: Arc<Registry>,
}

impl Memory {
    fn named(name: &str) -> Memory {
        let mut registries = REGISTRIES.lock();
        let registries = registries.get_or_insert_default();
        registries.retain(|_, registry| registry.strong_count() > 0);
        let registry = registries
            .get(name)
            .and_then(Weak::upgrade)
            .unwrap_or_default();
        registries.insert(name.to_owned(), Arc::downgrade(&registry));
        Memory {
            realm: format!("memory://{name}"),
            registry,
        }
    }
}

impl Backend for Memory {
    fn realm(&self) -> &str {
        &self.realm
    }

    fn seat(&self, place: &Place) -> Result<Box<dyn Seat>> {
        Ok(Box::new(MemorySeat {
            registry: Arc::clone(&self.registry),
            place: place.clone(),
            waker: None,
        }))
    }

    fn watch(&self, mutex: &Arc<str>) -> Result<Box<dyn Watch>> {
        Ok(Box::new(MemoryWatch {
            registry: Arc::clone(&self.registry),
            mutex: Arc::clone(mutex),
            waker: None,
        }))
    }
}

struct MemorySeat {
    registry: Arc<Registry>,
    place: Place,
    waker: Option<Waker>,
}

impl Seat for MemorySeat {
    fn listen(&mut self, waker: &Waker, _by: Moment) -> Result<()> {
        self.waker = Some(waker.clone());
        Ok(())
    }

    fn acquire(&mut self, entry: Entry, _by: Moment) -> Result<Attempt> {
        let queue = (entry == Entry::Queue).then_some(self.waker.as_ref());
        Ok(self.registry.acquire(&self.place, queue))
    }

    fn renew(&mut self, fence: u64, _by: Moment) -> Result<Renewal> {
        Ok(self.registry.renew(&self.place, fence))
    }

    fn release(&mut self, fence: u64, _by: Moment) -> Result<bool> {
        Ok(self.registry.release(&self.place, fence))
    }

    fn withdraw(&mut self, _by: Moment) -> Result<()> {
        self.registry.withdraw(&self.place);
        Ok(())
    }
}

impl Drop for MemorySeat {
    fn drop(&mut self) {
        self.registry.withdraw(&self.place);
    }
}

struct MemoryWatch {
    registry: Arc<Registry>,
    mutex: Arc<str>,
    waker: Option<Waker>,
}

impl Watch for MemoryWatch {
    fn listen(&mut self, waker: &Waker, _by: Moment) -> Result<()> {
        if self.waker.as_ref().is_none_or(|known| !known.same(waker)) {
            self.ignore();
            self.registry.watch(&self.mutex, waker);
            self.waker = Some(waker.clone());
        }
        Ok(())
    }

    fn observe(&mut self, _by: Moment) -> Result<Sight> {
        Ok(self.registry.observe(&self.mutex))
    }
}

impl MemoryWatch {
    fn ignore(&mut self) {
        if let Some(waker) = self.waker.take() {
            self.registry.ignore(&self.mutex, &waker);
        }
    }
}

impl Drop for MemoryWatch {
    fn drop(&mut self) {
        self.ignore();
    }
}
