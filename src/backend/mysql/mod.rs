//! Mutexes in a table of a MySQL or MariaDB server.

mod clock;
pub(crate) mod fault;
pub(crate) mod link;
pub(crate) mod pool;
pub(crate) mod server;
