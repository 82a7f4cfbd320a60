//! The memory backend: what a lock costs where nothing but this crate costs anything.
#![allow(missing_docs)]

mod common;

fn main() {
    let mut criterion = common::criterion();
    let factory = contend::memory::factory("bench", contend::Lease::default());
    let locker = factory.locker("m").build().unwrap();
    criterion
        .benchmark_group("memory")
        .bench_function("lock_cycle", |bencher| {
            bencher.iter(|| drop(locker.lock().unwrap()));
        });
    criterion.final_summary();
}
