//! Counting semaphores.
//!
//! Each row of the seed's tables, and the test that holds it:
//!
//! | problem | test |
//! |---|---|
//! | Concurrent access | `front::combined_requests_fill_the_capacity_exactly`, `history` |
//! | Multi-resource acquire | `faults::opposite_requests_do_not_deadlock` |
//! | Network retry | `faults::lost_commit_reply_grants_once`, `lost_replies` |
//! | Partial failure | `faults::failure_in_the_middle_leaves_nothing` |
//! | Client crash | `sweeps::crashed_clients_permits_come_back`, the campaign |
//! | Timing-based expiry | `guard_faults::unrenewed_holder_stops_believing_first`, the campaign |
//! | DB contention | `faults::many_threads_need_few_connections` |
//! | DB transient failure | `faults::lost_connections_are_tried_again` |
//! | Orphan release | `sweeps::each_sweep_says_why`, `sweeps::maintenance_is_done_by_the_leader` |
//! | Request and history clean-up | `sweeps::old_requests_are_deleted_in_batches`, `front::lowered_capacity_...` |
//! | Idempotency key | `front::same_id_gets_the_same_permits` |
//! | One-way state machine | `front::permit_is_taken_shown_and_given_back`, `history` |
//!
//! `front`, `guards`, `waiting`, `sweeps` and `grants` run on every backend of `ground::PLACES`, `redis` and
//! `redis_cluster` on Redis, the others on MySQL.

// What the library must not do, a test may: there a panic is the verdict.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod faults;
mod front;
mod grants;
mod ground;
mod guard_faults;
mod guards;
mod history;
mod lost_replies;
#[path = "../mysql/server.rs"]
mod mysql_ground;
mod redis;
mod redis_cluster;
mod sweeps;
mod tables;
mod waiting;
