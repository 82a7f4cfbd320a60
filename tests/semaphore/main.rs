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
//!
//! Every finding of the review of the first version, and the test that holds its cure:
//!
//! | finding | test |
//! |---|---|
//! | A1 adoption ignores the row's ttl | `guards::a_request_that_is_taken_over_...`, `lost_replies::what_an_unanswered_call_left_...` |
//! | A2 a guard without a ttl is not renewed | `guards::a_guard_without_a_ttl_of_its_own_has_thirty_seconds` |
//! | A3 a lost COMMIT reply makes the batch unknown | `guards::a_lost_reply_does_not_touch_what_others_of_the_batch_...` |
//! | A4 one id, many guards | `guards::a_request_that_is_taken_over_...`, `guards::a_guard_that_is_taken_over_...` |
//! | B5 a retry cancels the clean-up and leaks | there is no clean-up; `lost_replies::what_was_told_is_held_and_repeating_tells` |
//! | B6 a replay behind a waiter is exhausted | `waiting::a_replay_behind_a_waiter_gets_what_it_holds` |
//! | B7 a transient error uses the id up | `faults::a_lock_that_is_never_given_up_ends_in_a_clear_error` |
//! | B8 a panicking liveness callback | `sweeps::a_liveness_check_that_panics_counts_as_unknown` |
//! | B9 a locked row stops a sweep | `sweeps::a_renewal_between_the_look_and_the_release_wins_and_holds_up_nobody` |
//! | B10 a replay of what has expired | `guards::a_replay_after_the_ttl_has_no_time_left_and_is_lost` |
//! | C11 every release wakes everybody | `queue` in the library |
//! | C12 head of line | `waiting::a_waiter_for_two_semaphores_keeps_nobody_from_the_one_that_is_free` |
//! | C13 a server restart ends a wait | `waiting::waiting_survives_a_server_that_goes_away_and_comes_back` |
//! | C14 timeouts are not kept | `waiting::a_timeout_is_kept_on_a_locked_row`, `guards::dropping_a_guard_is_bounded_...` |
//! | C15 capacity below the wish | `waiting::a_wish_beyond_the_capacity_waits_for_it_to_grow` |
//! | C16 no order between processes | `waiting::waiters_of_two_processes_share_one_permit` (no order, but both are served) |
//! | D17, D18, D19 what holds renewals up | `guards::locked_rows_hold_up_no_other_renewal` |
//! | D20 no minimum ttl | `guards::a_guard_without_a_ttl_of_its_own_has_thirty_seconds` |
//! | D21 a client that vanishes in a transaction | `guards::a_client_that_vanishes_inside_a_transaction_...` |
//! | E22 a guard knows only `is_held` | `guards::a_holder_that_cannot_renew_stops_believing_...` |
//! | E23 a crash leaks for good | `guards::what_a_killed_process_held_goes_to_who_waits_after_ttl_and_a_quarter` |
//! | E24 the command | tests/cli |
//! | E25 foreign tables | `tables::tables_of_somebody_else_are_recognised_and_left_alone` |
//! | E26 not reached from the factory | `guards::semaphores_come_from_the_factory` |

// What the library must not do, a test may: there a panic is the verdict.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, dead_code)]

mod beliefs;
mod faults;
mod front;
mod grants;
mod ground;
mod guards;
mod history;
mod lost_replies;
#[path = "../mysql/server.rs"]
mod mysql_ground;
mod probe;
mod sweeps;
mod tables;
mod waiting;
