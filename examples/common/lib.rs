//! Code that several examples share.

pub mod device;
pub mod failure;
pub mod gid;
pub mod number;
pub mod pingpong;

use std::error::Error;
use std::process::{ExitCode, Termination};

use clap::Parser;

/// The result of an example, whose errors can move between threads.
pub type Result<T, E = Box<dyn Error + Send + Sync>> = std::result::Result<T, E>;

/// Parses the command line, calls `run`, and prints its error.
pub fn main<O: Parser, T: Termination>(run: impl FnOnce(&O) -> Result<T>) -> ExitCode {
    let options = O::parse();
    exit_code(O::command().get_name(), run(&options))
}

/// The exit status of the program `name`; prints the error if there is one.
pub fn exit_code<T: Termination>(name: &str, result: Result<T>) -> ExitCode {
    match result {
        Ok(value) => value.report(),
        Err(error) => {
            failure::print(name, &*error);
            ExitCode::FAILURE
        }
    }
}
