//! The rules of the connection manager: what each message, call and timer does in each state.

#[path = "../cm_support/mod.rs"]
#[allow(dead_code)]
mod support;

mod ends;
mod handshake;
mod harness;
mod limits;
mod listeners;
mod lookups;
mod rejections;
