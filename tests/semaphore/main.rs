//! Counting semaphores.
//!
//! Every row of the seed's tables, and the test that holds it:
//!
//! | problem | test |
//! |---|---|
//! | Concurrent access | `faults::concurrent_clients_do_not_all_see_the_last_free_permit` |
//! | Multi-resource acquire | `faults::opposite_wishes_do_not_lock_each_other_out` |
//! | Network retry | `faults::a_lost_reply_to_the_commit_and_the_retry_are_one_grant` |
//! | Partial failure | `faults::a_failure_in_the_middle_leaves_nothing_behind` |
//! | Client crash | `faults::what_a_crashed_client_held_comes_back`, `guards::what_a_killed_process_held_...` |
//! | Timing-based expiry | `faults::a_stale_holder_has_the_smaller_fence` |
//! | DB contention | `faults::many_threads_on_one_semaphore_need_few_connections` |
//! | DB transient failure | `faults::a_lost_connection_and_a_lock_held_for_long_are_tried_again` |
//!
//! | maintenance | test |
//! |---|---|
//! | Orphan release | `sweeps::each_sweep_takes_back_what_is_its_own_and_says_why`, `sweeps::maintenance_...` |
//! | Request cleanup | `sweeps::a_sweep_of_more_than_a_batch_takes_all_and_cleaning_up_leaves_what_is_held` |
//! | History cleanup | the same |
//!
//! | pattern | test |
//! |---|---|
//! | Idempotency key | `front::the_same_external_id_gets_the_same_permits_and_another_wish_is_a_conflict` |
//! | Fencing token | `faults::a_stale_holder_has_the_smaller_fence`, `guards::a_request_that_is_taken_over_...` |
//! | Sorted lock ordering | `faults::opposite_wishes_do_not_lock_each_other_out` |
//! | `SELECT FOR UPDATE` | `faults::concurrent_clients_do_not_all_see_the_last_free_permit` |
//! | Single transaction for acquire | `faults::a_failure_in_the_middle_leaves_nothing_behind`, `history` |
//! | One-way state machine | `front::a_permit_is_taken_seen_and_given_back`, `history` |
//! | Passive TTL sweep | `sweeps::each_sweep_takes_back_what_is_its_own_and_says_why` |
//! | In-memory pre-lock | `front::combined_requests_are_all_granted_up_to_the_capacity_and_not_beyond` |
//! | Transaction retry + idempotency | `faults::a_lost_connection_and_a_lock_held_for_long_are_tried_again` |
//! | Batched deletes | `sweeps::a_sweep_of_more_than_a_batch_takes_all_and_cleaning_up_leaves_what_is_held` |

// What the library must not do, a test may: there a panic is the verdict.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, dead_code)]

mod beliefs;
mod faults;
mod front;
mod guards;
mod history;
#[path = "../mysql_ground/mod.rs"]
mod mysql_ground;
#[path = "../semaphore_ground/mod.rs"]
mod semaphore_ground;
mod sweeps;
mod tables;
mod waiting;
