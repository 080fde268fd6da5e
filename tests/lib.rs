//! Compiles the examples of the workspace's README as doc tests.

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
