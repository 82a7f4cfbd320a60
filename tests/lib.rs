//! Nothing: the tests are the binaries beside this file.
