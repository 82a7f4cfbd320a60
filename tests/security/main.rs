//! What a hostile server, a reader of logs or a user with few rights can do: garbled bytes, secrets, privileges, TLS.

// What the library must not do, a test may: there a panic is the verdict.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod hostile;
mod privileges;
mod secrets;
mod tls;
