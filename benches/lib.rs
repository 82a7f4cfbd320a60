//! Nothing: the benchmarks are the binaries beside this file.
